"""Calibration: how the devices at hand round, on synthetic products and on those of real training."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Generator

import jax
import numpy as np

import sdc
from sdc.checksums import Measured, Profile, begin_with_second, fit, hardware, measure, time_both

from .. import Dataset, TrainConfig
from .reference import reference_steps
from .settings import CalibrationSettings


class CalibrationError(RuntimeError):
    """A device whose errors are too large to be rounding; one line says what was found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration(CalibrationSettings):
    """Measures how a device rounds.

    Raises:
        SettingError: there is no step or no type.
    """

    def __post_init__(self) -> None:
        self.check()

    def count(self) -> int:
        """How many parts `run` yields."""
        return 1 + 2 * len(self.dtypes)

    def run(self, config: TrainConfig, dataset: Dataset) -> Generator[str, None, Profile]:
        """Measures this machine's first device.

        Args:
            config: whose step is measured; its type is replaced by each of `dtypes`.
            dataset: its text.

        Yields:
            What has just been done.

        Returns:
            The profile, for `sdc.abft(step, profile=...)`.

        Raises:
            CalibrationError: errors are too large to be rounding, or real products are flagged: this device may compute
                wrong numbers.
            ValueError: the configuration or the data set does not fit.
        """
        errors: dict[str, Measured] = {}
        for dtype in self.dtypes:
            errors[dtype] = measure(dtype, seed=self.seed)
            yield f"{dtype}, sums"
        try:
            rounding = fit(errors.get("bfloat16"), errors.get("float32"))
        except ValueError as error:
            raise CalibrationError(
                f"the errors of synthetic products are too large to be rounding ({error}): this device may compute "
                "wrong numbers. No profile was made; compare with another device"
            ) from error
        profile = Profile(rounding, measured_on=hardware())
        checked, examined, flagged = Counter[str](), Counter[str](), Counter[str]()
        margin = first_margin = 0.0
        for dtype in self.dtypes:
            checked_step = functools.partial(sdc.abft, profile=profile)
            trained = reference_steps(config, dataset, dtype, checked_step, steps=self.steps, seed=self.seed)
            for flags, _, _ in trained:
                for name, flag in jax.device_get(flags).items():
                    checked[name] += int(np.sum(flag.checked))
                    examined[name] += int(np.sum(flag.examined))
                    flagged[name] += int(np.sum(flag.flagged))
                    margin = max(margin, float(np.max(flag.margin)))
                    first_margin = max(first_margin, float(np.max(flag.first_margin)))
            yield f"{dtype}, {config.name}"
        if flagged.total():
            raise CalibrationError(
                f"{flagged.total():,} of {checked.total():,} rows of real products are flagged under the thresholds "
                "that the synthetic products ask for: this device may compute wrong numbers. No profile was made; "
                "compare with another device"
            )
        kernel = time_both()
        yield "fused kernel"
        return dataclasses.replace(
            profile,
            second_tier=begin_with_second(examined, checked),
            fused=kernel is not None and kernel["fused"] < kernel["separate"],
            measurements={
                "largest_error": {
                    dtype: {str(depth): error for depth, error in found.relative.items()}
                    for dtype, found in errors.items()
                },
                "config": config.name,
                "steps": self.steps,
                "checked": checked.total(),
                "examined": examined.total(),
                "flagged": flagged.total(),
                "largest_margin": margin,
                "largest_first_margin": first_margin,
                "kernel_seconds": kernel,
            },
        )
