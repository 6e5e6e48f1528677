"""A workload, a program whose bits are known to be the same each time; and which there are, by level and family.

Whoever has other programs to load a device with, such as a training step, registers a family of them.
"""

import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast, get_args

from sdc.settings import SettingError

if TYPE_CHECKING:
    import jax

Family: TypeAlias = Literal[
    "matrix", "attention", "functions", "reductions", "ordering", "memory", "transfers", "collectives", "training"
]
# Modules of this package whose `build_NAME` build the families, but for the one that the training registers.
MODULES = ("arithmetic", "movement")
BUILT_IN: tuple[Family, ...] = tuple(name for name in get_args(Family) if name != "training")
Unit: TypeAlias = Literal["flop", "byte"]
LevelName: TypeAlias = Literal["quick", "prejob", "acceptance", "soak"]
DataType: TypeAlias = Literal[
    "float32", "bfloat16", "float16"
]  # floating-point numbers that the families have data for
AXIS = "device"  # axis over the local devices, under which the program of a workload that spans all of them runs


class Bench(NamedTuple):
    """What a workload has at hand that does more than call its program."""

    call: Callable[..., Any]  # the compiled program
    arguments: tuple[Any, ...]  # on the device
    host: Callable[[], tuple[Any, ...]]  # the same as NumPy arrays
    device: "jax.Device"
    others: "Sequence[jax.Device]"  # all other devices of the burn-in
    rest: Callable[[float], None]  # waits for so many seconds, or until the burn-in is stopped


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BurninWorkload:
    """A program, its data, and what is known of them: a family is a subclass with `inputs`, `run` and `reference`."""

    name: str  # family, type, sizes and data, as in `matrix/float32/8x8x8/normal`; unique within a burn-in
    family: str  # the part of a device that it is for: one of `Family`, or registered
    dtype: str  # type of its data
    data: str  # kind of its data, see `arrays`
    sizes: tuple[int, ...]  # of its operands, as the family counts them
    program: str  # workloads of one program, which differ in their data only, share what is compiled
    elements: int  # numbers in its outputs on one device: what a run checks
    work: float  # operations or bytes that a run takes on one device
    unit: Unit = "flop"
    seed: int = 0  # from which the data are made
    multi: bool = False  # it spans all devices at once
    alike: bool = True  # all devices have equal outputs and can vote; not so for an exchange of shards
    checked: bool = False  # its matrix products are checked by checksums (`sdc.abft`) as well
    on_host: bool = False  # outputs are brought to the host and compared there: what is tested is the way
    way: str = ""  # what `drive` does, where more than a call is needed; the reproducer of a bundle repeats it

    @property
    def exact(self) -> bool:
        """Whether the host computes the same bits: the family has a `reference`."""
        return type(self).reference is not BurninWorkload.reference

    def __post_init__(self) -> None:
        for name, known in (("family", (*get_args(Family), *_REGISTERED)), ("unit", get_args(Unit))):
            if getattr(self, name) not in known:
                raise SettingError(name, getattr(self, name), f"expected one of {', '.join(known)}")
        if self.elements < 1:
            raise SettingError("elements", self.elements, "expected at least one element that a run checks")
        if self.multi and (self.way or self.on_host or self.checked):
            raise SettingError("multi", self.multi, "only a plain program can span all devices")
        if not self.alike and not self.exact:
            raise SettingError("alike", self.alike, "outputs that differ between devices need a reference")

    def inputs(self) -> tuple[Any, ...]:
        """The arguments, made on the host as NumPy arrays, the same at each call and on every host."""
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The program: a pure function of the arguments that returns a pytree of arrays.

        Where `multi`, it runs for each device under the mapped axis `device`, and arguments and results have a first
        axis of 1 there.
        """
        raise NotImplementedError

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs as the host computes them, bit for bit; where `multi`, of all devices together."""
        raise NotImplementedError

    def drive(self, bench: Bench) -> Any:
        """Runs the compiled program on a device and returns the outputs there."""
        return bench.call(*bench.arguments)


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
        for setting, least in (("side", 8), ("positions", 8), ("numbers", 64), ("buffer", 256)):
            if getattr(self, setting) < least:
                raise SettingError(setting, getattr(self, setting), f"expected at least {least}")
        if not self.pauses or min(self.pauses) < 0:
            raise SettingError("pauses", self.pauses, "expected a number of seconds for each round, 0 or more")
        if self.retention < 0:
            raise SettingError("retention", self.retention, "expected a number of seconds, 0 or more")


Build: TypeAlias = "Callable[[FamilyRequest], Iterable[BurninWorkload]]"
ALL_DATA = ("normal", "ones", "subnormal", "alternating", "activations")
# For rehearsals and tests: it loads nothing.
SMALLEST = Level("smallest", 8, 8, 64, 256, (0.0,), 0.0, ("normal", "subnormal"))
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
    if isinstance(level, Level):
        return level
    if level not in LEVELS:
        raise SettingError("level", level, f"expected one of {', '.join(LEVELS)}")
    return LEVELS[level]


class FamilyRequest(NamedTuple):
    level: Level
    devices: "Sequence[jax.Device]"  # devices that the workloads are to run on
    dtypes: tuple[str, ...]  # types of floating-point numbers
    seed: int  # from which data are made


_REGISTERED: dict[str, Build] = {}
DTYPES = ("float32", "bfloat16")


def register(name: str, build: Build) -> None:
    if name in families():
        raise SettingError("name", name, "is a family of workloads already; choose another name")
    _REGISTERED[name] = build


def unregister(name: str) -> None:
    if name not in _REGISTERED:
        raise SettingError("name", name, f"was not registered; registered are {', '.join(_REGISTERED) or 'none'}")
    del _REGISTERED[name]


def families() -> tuple[str, ...]:
    return (*BUILT_IN, *_REGISTERED)


def _built_in(name: str) -> Build:
    modules = (importlib.import_module(f".{module}", __package__) for module in MODULES)
    for module in modules:
        if build := getattr(module, f"build_{name}", None):
            return cast("Build", build)
    raise AssertionError(f"no module of {', '.join(MODULES)} has build_{name}, which Family promises")


def workloads(
    level: str | Level,
    devices: "Sequence[jax.Device]",
    dtypes: Sequence[str] = DTYPES,
    *,
    only: Sequence[str] | None = None,
    seed: int = 0,
) -> list[BurninWorkload]:
    """The workloads of a level, of some families or all; collectives and copies between devices need two devices."""
    if not devices:
        raise SettingError("devices", None, "expected one device at least")
    for setting, given, known in (("dtypes", dtypes, get_args(DataType)), ("only", only or (), families())):
        if unknown := [name for name in given if name not in known]:
            raise SettingError(setting, unknown[0], f"expected some of {', '.join(known)}")
    request = FamilyRequest(find_level(level), devices, tuple(dtypes), seed)
    found: list[BurninWorkload] = []
    for name in families():
        if only is None or name in only:
            found += (_REGISTERED.get(name) or _built_in(name))(request)
    counts = Counter(each.name for each in found)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise SettingError("name", twice[0], "two workloads have this name; give each its own")
    return found
