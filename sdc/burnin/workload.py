"""A workload: a program whose bits are known to be the same each time, with data that provoke."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from sdc.settings import SettingError

if TYPE_CHECKING:
    import jax

Family: TypeAlias = Literal[
    "matrix", "attention", "functions", "reductions", "ordering", "memory", "transfers", "collectives", "training"
]
FAMILIES: tuple[str, ...] = get_args(Family)
Unit: TypeAlias = Literal["flop", "byte"]
AXIS = "device"
"""Axis over the local devices, under which the program of a workload that spans all of them runs."""


class Bench(NamedTuple):
    """What a workload has at hand that does more than call its program.

    Attributes:
        call: the compiled program.
        arguments: its arguments, on the device.
        host: the same as NumPy arrays.
        device: where it runs.
        others: all other devices of the burn-in.
        rest: waits for so many seconds, or until the burn-in is told to stop.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    host: tuple[Any, ...]
    device: "jax.Device"
    others: "Sequence[jax.Device]"
    rest: Callable[[float], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """A program, its data, and what is known of them.

    Attributes:
        name: family, type, sizes and data, as in `matrix/float32/8x8x8/normal`; unique within a burn-in.
        family: what part of a device it is for.
        dtype: type of its data.
        data: kind of its data, see `data`.
        sizes: of its operands, as the family counts them.
        program: workloads of one program, which differ in their data only, share what is compiled.
        inputs: makes the arguments on the host, a tuple of NumPy arrays, the same at each call and on every host.
        run: pure function of the arguments; returns a pytree of arrays. Where `multi`, it runs for each device under
            the mapped axis `device`, and arguments and results have a first axis of 1 there.
        elements: numbers in its outputs on one device: what a run checks.
        work: operations or bytes that a run takes on one device.
        unit: which of these.
        seed: from which the data were made.
        multi: it spans all devices at once.
        alike: outputs are the same on all devices, so that these can vote; not so for an exchange of shards.
        checked: its matrix products are checked by checksums (`sdc.abft`) as well.
        on_host: the outputs are brought to the host and compared there: what is tested is the way.
        reference: outputs as the host computes them from the arguments, bit for bit; None where rounding differs.
            Where `multi`, of all devices together.
        drive: runs the program, where more than one call is needed, and returns the outputs on the device.

    Raises:
        SettingError: the family or the unit is unknown, or nothing is checked.
    """

    name: str
    family: Family
    dtype: str
    data: str
    sizes: tuple[int, ...]
    program: str
    inputs: Callable[[], tuple[Any, ...]]
    run: Callable[..., Any]
    elements: int
    work: float
    unit: Unit = "flop"
    seed: int = 0
    multi: bool = False
    alike: bool = True
    checked: bool = False
    on_host: bool = False
    reference: Callable[..., Any] | None = None
    drive: Callable[[Bench], Any] | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise SettingError("family", self.family, f"expected one of {', '.join(FAMILIES)}")
        if self.unit not in get_args(Unit):
            raise SettingError("unit", self.unit, f"expected one of {', '.join(get_args(Unit))}")
        if self.elements < 1:
            raise SettingError("elements", self.elements, "expected at least one element that a run checks")
        if self.multi and (self.drive is not None or self.on_host or self.checked):
            raise SettingError("multi", self.multi, "only a plain program can span all devices")
        if not self.alike and self.reference is None:
            raise SettingError("alike", self.alike, "outputs that differ between devices need a reference")
