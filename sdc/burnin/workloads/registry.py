"""Which workloads there are: the sizes of a level, families by name, and the workloads of both.

Whoever has other programs to load a device with, such as a training step, registers a family of them.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from sdc.settings import SettingError

from .workload import BUILT_IN, Workload

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class Level:
    """Sizes of the workloads and the course of their load."""

    name: str
    side: int  # rows of a square matrix product; the other shapes follow from it
    positions: int  # of attention, and the width of training steps
    numbers: int  # elements of an operand of functions, reductions and orderings
    buffer: int  # bytes of a buffer of the memory patterns and of the copies
    pauses: tuple[float, ...]  # seconds before each run, by round: 0 is load that stays, others load that swings
    retention: float  # seconds between writing a buffer and reading it
    data: tuple[str, ...]  # kinds of data of the workloads that take each of them; all others take normal ones
    minutes: float | None = None  # how long where nothing else is asked for; None for two rounds

    def __post_init__(self) -> None:
        """Refuses sizes that are too small to hold the odd shapes, and negative times, as a `SettingError`."""
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
    """A level by its name, or itself."""
    if isinstance(level, Level):
        return level
    if level not in LEVELS:
        raise SettingError("level", level, f"expected one of {', '.join(LEVELS)}")
    return LEVELS[level]


class FamilyRequest(NamedTuple):
    """What a family is asked for."""

    level: Level
    devices: "Sequence[jax.Device]"  # devices that the workloads are to run on
    dtypes: tuple[str, ...]  # types of floating-point numbers
    seed: int  # from which data are made


Build: TypeAlias = Callable[[FamilyRequest], Iterable[Workload]]
_REGISTERED: dict[str, Build] = {}
DTYPES = ("float32", "bfloat16")
KNOWN = ("float32", "bfloat16", "float16")
"""Types of floating-point numbers that the families have data for."""


def register(name: str, build: Build) -> None:
    """Adds a family of workloads, which `workloads` then gives too."""
    if name in families():
        raise SettingError("name", name, "is a family of workloads already; choose another name")
    _REGISTERED[name] = build


def unregister(name: str) -> None:
    """Takes a family back that was registered."""
    if name not in _REGISTERED:
        raise SettingError("name", name, f"was not registered; registered are {', '.join(_REGISTERED) or 'none'}")
    del _REGISTERED[name]


def families() -> tuple[str, ...]:
    """Names of all families, in the order in which they run."""
    return (*BUILT_IN, *_REGISTERED)


def workloads(
    level: str | Level,
    devices: "Sequence[jax.Device]",
    dtypes: Sequence[str] = DTYPES,
    *,
    only: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Workload]:
    """The workloads of a level, of some families or all; collectives and copies between devices need two devices."""
    if not devices:
        raise SettingError("devices", None, "expected one device at least")
    for dtype in dtypes:
        if dtype not in KNOWN:
            raise SettingError("dtypes", dtype, f"expected some of {', '.join(KNOWN)}")
    for name in only or ():
        if name not in families():
            raise SettingError("only", name, f"expected some of {', '.join(families())}")
    request = FamilyRequest(find_level(level), devices, tuple(dtypes), seed)
    found = [each for name in families() if only is None or name in only for each in _builder(name)(request)]
    names = [each.name for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingError("name", twice[0], "two workloads have this name; give each its own")
    return found


def _builder(name: str) -> Build:
    if name in _REGISTERED:
        return _REGISTERED[name]
    build: Build = getattr(importlib.import_module(f".{BUILT_IN[name]}", __package__), f"build_{name}")
    return build
