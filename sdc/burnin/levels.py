"""How large and how long: the sizes of a burn-in's workloads, by level."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from sdc.settings import SettingError


@dataclasses.dataclass(frozen=True)
class Level:
    """Sizes of the workloads and the course of their load.

    Attributes:
        name: what it is called.
        side: rows of a square matrix product; the other shapes follow from it.
        positions: of attention, and the width of training steps.
        numbers: elements of an operand of functions, reductions and orderings.
        buffer: bytes of a buffer of the memory patterns and of the copies.
        pauses: seconds before each run, by round: a round of 0 is load that stays, another one load that swings.
        retention: seconds between writing a buffer and reading it.
        data: kinds of data (`data.FLOATS`) of the workloads that take each of them; all others take normal ones.
        minutes: how long a burn-in of this level takes where nothing else is asked for; None for two rounds.

    Raises:
        SettingError: a size is too small to hold the odd shapes, or a time is negative.
    """

    name: str
    side: int
    positions: int
    numbers: int
    buffer: int
    pauses: tuple[float, ...]
    retention: float
    data: tuple[str, ...]
    minutes: float | None = None

    def __post_init__(self) -> None:
        for setting, least in (("side", 8), ("positions", 8), ("numbers", 64), ("buffer", 256)):
            if getattr(self, setting) < least:
                raise SettingError(setting, getattr(self, setting), f"expected at least {least}")
        if not self.pauses or min(self.pauses) < 0:
            raise SettingError("pauses", self.pauses, "expected a number of seconds for each round, 0 or more")
        if self.retention < 0:
            raise SettingError("retention", self.retention, "expected a number of seconds, 0 or more")


ALL_DATA = ("normal", "ones", "subnormal", "alternating", "activations")
SMALLEST = Level("smallest", 8, 8, 64, 256, (0.0,), 0.0, ("normal", "subnormal"))
"""For rehearsals and tests: it loads nothing."""
LEVELS: Mapping[str, Level] = MappingProxyType(
    {
        level.name: level
        for level in (
            Level("quick", 1024, 256, 2**16, 2**22, (0.0, 0.01), 0.05, ALL_DATA),
            Level("prejob", 2304, 1024, 2**20, 2**26, (0.0, 0.05), 1.0, ALL_DATA, minutes=5.0),
            Level("acceptance", 5120, 4096, 2**24, 2**30, (0.0, 0.0, 0.2), 5.0, ALL_DATA, minutes=60.0),
            Level("soak", 5120, 4096, 2**24, 2**30, (0.0, 0.0, 0.0, 0.5), 30.0, ALL_DATA, minutes=1440.0),
        )
    }
)


def find_level(level: str | Level) -> Level:
    """A level by its name, or itself.

    Raises:
        SettingError: there is none of that name.

    Example:
        >>> from sdc.burnin.levels import find_level
        >>> find_level("quick").side
        1024
    """
    if isinstance(level, Level):
        return level
    if level not in LEVELS:
        raise SettingError("level", level, f"expected one of {', '.join(LEVELS)}")
    return LEVELS[level]
