"""The base class of workloads (programs that produce the same bits in each run), and the workloads of each level.

Further programs, such as a training step, are added by registering a family.
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
# Modules of this package with functions `build_NAME` for all families, except the one that `sdc.train` registers.
MODULES = ("arithmetic", "movement")
BUILT_IN: tuple[Family, ...] = tuple(name for name in get_args(Family) if name != "training")
Unit: TypeAlias = Literal["flop", "byte"]
LevelName: TypeAlias = Literal["quick", "prejob", "acceptance", "soak"]
DataType: TypeAlias = Literal["float32", "bfloat16", "float16"]  # floating-point types for which the families have data
AXIS = "device"  # mesh axis over the local devices, for workloads that span all of them


class Bench(NamedTuple):
    """Everything that `drive` may use to run a workload."""

    call: Callable[..., Any]  # the compiled program
    arguments: tuple[Any, ...]  # arguments on the device
    host: Callable[[], tuple[Any, ...]]  # returns the arguments as NumPy arrays
    device: "jax.Device"
    others: "Sequence[jax.Device]"  # all other devices of the burn-in
    rest: Callable[[float], None]  # waits for a number of seconds, or until the burn-in is stopped


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BurninWorkload:
    """A program, its data and their properties; each family is a subclass with `inputs`, `run` and `reference`."""

    name: str  # family, type, sizes and data, as in `matrix/float32/8x8x8/normal`; unique within a burn-in
    family: str  # the part of a device that it tests: one of `Family`, or registered
    dtype: str  # dtype of its data
    data: str  # kind of its data, see `arrays`
    sizes: tuple[int, ...]  # sizes of its operands, in the order that the family defines
    program: str  # workloads with the same program, which differ only in their data, share the executable
    elements: int  # elements of its outputs on one device, which a run checks
    work: float  # operations or bytes of a run on one device
    unit: Unit = "flop"
    seed: int = 0  # seed of the data
    multi: bool = False  # whether it spans all devices
    alike: bool = True  # whether all devices have equal outputs and can vote; false for an exchange of shards
    checked: bool = False  # whether checksums (`sdc.abft`) also check its matrix products
    on_host: bool = False  # whether outputs are compared on the host, to test the transfer
    way: str = ""  # kind of `drive`, if it does more than one call; the reproducer of a bundle repeats it

    @property
    def exact(self) -> bool:
        """Whether the host computes the same bits, that is, whether the family defines a `reference`."""
        return type(self).reference is not BurninWorkload.reference

    def __post_init__(self) -> None:
        for name, known in (("family", (*get_args(Family), *_REGISTERED)), ("unit", get_args(Unit))):
            if getattr(self, name) not in known:
                raise SettingError(name, getattr(self, name), f"expected one of {', '.join(known)}")
        if self.elements < 1:
            raise SettingError("elements", self.elements, "expected at least 1, because a run must check elements")
        if self.multi and (self.way or self.on_host or self.checked):
            raise SettingError("multi", self.multi, "cannot be combined with way, on_host or checked; leave these out")
        if not self.alike and not self.exact:
            raise SettingError("alike", self.alike, "outputs that differ between devices need a reference; define one")

    def inputs(self) -> tuple[Any, ...]:
        """Returns the arguments as NumPy arrays, which are the same in each call and on every host."""
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the outputs, a pytree of arrays, as a pure function of the arguments.

        If `multi`, this function runs on each device under the mapped axis `device`, and the first axis of its
        arguments and results has size 1.
        """
        raise NotImplementedError

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the correct outputs on the host, bit for bit; if `multi`, the outputs of all devices together."""
        raise NotImplementedError

    def drive(self, bench: Bench) -> Any:
        """Runs the compiled program on a device and returns its outputs, which remain on the device."""
        return bench.call(*bench.arguments)


if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class Level:
    """Sizes of the workloads, and how the load varies over time."""

    name: str
    side: int  # rows of a square matrix product; the other shapes follow from it
    positions: int  # positions of attention, and the width of training steps
    numbers: int  # elements of an operand of functions, reductions and orderings
    buffer: int  # bytes of a buffer of the memory patterns and of the copies
    pauses: tuple[float, ...]  # seconds before each run, by round: 0 for constant load, others for varying load
    retention: float  # seconds between writing a buffer and reading it
    data: tuple[str, ...]  # kinds of data for workloads that use several; all others use normal data
    repeats: int = 2  # rounds with the same data, which take the host as long to generate as some rounds take
    minutes: float | None = None  # default duration; None for rounds with two sets of data

    def __post_init__(self) -> None:
        for setting, least in (("side", 8), ("positions", 8), ("numbers", 64), ("buffer", 256)):
            if getattr(self, setting) < least:
                raise SettingError(setting, getattr(self, setting), f"expected at least {least}")
        if not self.pauses or min(self.pauses) < 0:
            raise SettingError("pauses", self.pauses, "expected at least 0 seconds for each round")
        if self.repeats < 2:
            raise SettingError("repeats", self.repeats, "expected at least 2: runs with equal data are compared")
        if self.retention < 0:
            raise SettingError("retention", self.retention, "expected at least 0 seconds")


Build: TypeAlias = "Callable[[FamilyRequest], Iterable[BurninWorkload]]"
ALL_DATA = ("normal", "ones", "subnormal", "alternating", "activations")
# For rehearsals and tests: this level puts no load on a device.
SMALLEST = Level("smallest", 8, 8, 64, 256, (0.0,), 0.0, ("normal", "subnormal"))
LEVELS: Mapping[str, Level] = MappingProxyType(
    {
        level.name: level
        for level in (
            Level("quick", 1024, 256, 2**16, 2**22, (0.0, 0.01), 0.05, ALL_DATA),
            Level("prejob", 2304, 1024, 2**20, 2**26, (0.0, 0.05), 1.0, ALL_DATA, 8, minutes=5.0),
            Level("acceptance", 5120, 4096, 2**24, 2**30, (0.0, 0.0, 0.2), 5.0, ALL_DATA, 8, minutes=60.0),
            Level("soak", 5120, 4096, 2**24, 2**30, (0.0, 0.0, 0.0, 0.5), 30.0, ALL_DATA, 16, minutes=1440.0),
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
    devices: "Sequence[jax.Device]"  # devices on which the workloads will run
    dtypes: tuple[str, ...]  # floating-point types
    seed: int  # seed of the data


_REGISTERED: dict[str, Build] = {}
DTYPES = ("float32", "bfloat16")


def register(name: str, build: Build) -> None:
    if name in families():
        raise SettingError("name", name, "is already a family of workloads; choose another name")
    _REGISTERED[name] = build


def unregister(name: str) -> None:
    if name not in _REGISTERED:
        raise SettingError("name", name, f"was not registered; registered families: {', '.join(_REGISTERED) or 'none'}")
    del _REGISTERED[name]


def families() -> tuple[str, ...]:
    return (*BUILT_IN, *_REGISTERED)


def _built_in(name: str) -> Build:
    modules = (importlib.import_module(f".{module}", __package__) for module in MODULES)
    for module in modules:
        if build := getattr(module, f"build_{name}", None):
            return cast("Build", build)
    raise AssertionError(f"none of the modules {', '.join(MODULES)} defines build_{name}, although Family lists {name}")


def workloads(
    level: str | Level,
    devices: "Sequence[jax.Device]",
    dtypes: Sequence[str] = DTYPES,
    *,
    only: Sequence[str] | None = None,
    seed: int = 0,
) -> list[BurninWorkload]:
    """Returns the workloads of a level, from some or all families; collectives and copies between devices require at
    least two devices."""
    if not devices:
        raise SettingError("devices", None, "expected at least one device")
    for setting, given, known in (("dtypes", dtypes, get_args(DataType)), ("only", only or (), families())):
        if unknown := [name for name in given if name not in known]:
            raise SettingError(setting, unknown[0], f"expected one or more of {', '.join(known)}")
    request = FamilyRequest(find_level(level), devices, tuple(dtypes), seed)
    found: list[BurninWorkload] = []
    for name in families():
        if only is None or name in only:
            found += (_REGISTERED.get(name) or _built_in(name))(request)
    counts = Counter(each.name for each in found)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise SettingError("name", twice[0], "two workloads have this name; give them distinct names")
    return found
