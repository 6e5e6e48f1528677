"""What can be told wrong of a study's settings before JAX is imported."""

from collections.abc import Sequence

from sdc.settings import SettingError

from .. import LARGEST_SEED

MOST = 1_000_000
"""Steps of a study, which keeps what it measures of each."""
LEAST = 10
"""Steps of a training of which the last tell the result."""


def check_training(steps: int, seed: int) -> None:
    """Checks the settings of a study that trains.

    Raises:
        SettingError: there are fewer than ten steps or more than a million, or the seed is no number from 0 to
            2^31 - 2.
    """
    if steps < LEAST:
        raise SettingError("steps", steps, f"expected at least {LEAST}, of which the last tell the result")
    _check_most(steps)
    if not 0 <= seed <= LARGEST_SEED:
        raise SettingError("seed", seed, f"expected a number from 0 to {LARGEST_SEED}")


def check_measurement(steps: int, dtypes: Sequence[str]) -> None:
    """Checks the settings of a measurement of products.

    Raises:
        SettingError: there is no step, there are more than a million, or there is no type.
    """
    if steps < 1:
        raise SettingError("steps", steps, "expected at least 1")
    _check_most(steps)
    if not dtypes:
        raise SettingError("dtypes", None, "expected float32, bfloat16 or both")


def _check_most(steps: int) -> None:
    if steps > MOST:
        raise SettingError("steps", steps, f"expected at most {MOST:,}, since what is measured of each is kept")
