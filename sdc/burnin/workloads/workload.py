"""A workload: a program whose bits are known to be the same each time, with data that provoke."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from sdc.settings import SettingError

if TYPE_CHECKING:
    import jax

Family: TypeAlias = Literal[
    "matrix", "attention", "functions", "reductions", "ordering", "memory", "transfers", "collectives", "training"
]
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "matrix": "arithmetic",
        "attention": "arithmetic",
        "functions": "arithmetic",
        "reductions": "reductions",
        "ordering": "reductions",
        "memory": "memory",
        "transfers": "memory",
        "collectives": "exchanges",
    }
)
"""Module of this package whose `build_NAME` builds each family."""
Unit: TypeAlias = Literal["flop", "byte"]
AXIS = "device"
"""Axis over the local devices, under which the program of a workload that spans all of them runs."""


class Bench(NamedTuple):
    """What a workload has at hand that does more than call its program."""

    call: Callable[..., Any]  # the compiled program
    arguments: tuple[Any, ...]  # on the device
    host: Callable[[], tuple[Any, ...]]  # the same as NumPy arrays
    device: "jax.Device"
    others: "Sequence[jax.Device]"  # all other devices of the burn-in
    rest: Callable[[float], None]  # waits for so many seconds, or until the burn-in is stopped


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """A program, its data, and what is known of them: a family is a subclass with `inputs`, `run` and `reference`."""

    name: str  # family, type, sizes and data, as in `matrix/float32/8x8x8/normal`; unique within a burn-in
    family: Family  # the part of a device that it is for
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
    exact: bool = False  # the host computes the same bits (`reference`)
    way: str = ""  # what `drive` does, where more than a call is needed; the reproducer of a bundle repeats it

    def __post_init__(self) -> None:
        """Refuses, as a `SettingError`, what is unknown or cannot be, and what checks nothing."""
        if self.family not in get_args(Family):
            raise SettingError("family", self.family, f"expected one of {', '.join(get_args(Family))}")
        if self.unit not in get_args(Unit):
            raise SettingError("unit", self.unit, f"expected one of {', '.join(get_args(Unit))}")
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
