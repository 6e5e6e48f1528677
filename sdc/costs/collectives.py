"""Collectives of a compiled program: over which axes of the mesh, how many bytes, and what crosses hosts or slices.

The compiler's cost model has nothing of them. They are charged here by what a ring sends over a stated bandwidth, with
n devices to a group and s bytes of the largest array that a device holds of it (Patarasu and Yuan, *Bandwidth optimal
all-reduce algorithms*, 2009, section 3): 2 (n - 1) / n * s for an all-reduce, (n - 1) / n * s for an all-gather, a
reduce-scatter and an all-to-all, s for a permutation. Each takes a stated latency besides.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .chips import Chip
from .groups import groups_of
from .hlo import Instruction, Module, bytes_of

_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Collective:
    """What a program does over some axes, on the way of a step in which nothing is wrong.

    Attributes:
        kind: of operation.
        axes: of the mesh, joined by `,`; empty where the groups are none that axes give.
        crosses: `slices`, `hosts` or `` (nothing).
        blocking: whether it is a single operation, so that nothing else runs beside it.
        count: how often it runs.
        sent: bytes that a device sends in all.
        seconds: that takes, over the stated bandwidth.
        hidden: of these, what the device does other things in: what the compiler put between beginning and end of each,
            and no more than it takes. Nothing is taken off for it elsewhere.
    """

    kind: str
    axes: str
    crosses: str
    blocking: bool
    count: int
    sent: float
    seconds: float
    hidden: float


@dataclasses.dataclass
class _Begun:
    """One that has begun: how long it takes, and how much of that is hidden."""

    key: tuple[str, str, str, bool]
    seconds: float
    hidden: float = 0.0


def kind_of(one: Instruction) -> str | None:
    """The kind of collective that an instruction is, or begins; None for all others.

    What goes between slices of TPUs, their hosts send: the operation that it belongs to stands beside it.
    """
    if one.opcode == "send" and (between := _BETWEEN.search(one.line)):
        return between[1].lower().replace("_", "-")
    kind = one.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def collectives_of(
    module: Module, chip: Chip, devices: Sequence[Any], mesh: Mapping[str, int], takes: Callable[[Instruction], float]
) -> list[Collective]:
    """The collectives of a program, alike ones together.

    Args:
        module: the program.
        chip: what its devices can do.
        devices: in the order of the mesh.
        mesh: sizes of its axes.
        takes: seconds of any other instruction, by estimate.
    """
    found: dict[tuple[str, str, str, bool], tuple[int, float, float]] = {}
    hidden: dict[tuple[str, str, str, bool], float] = collections.defaultdict(float)
    begun: dict[str, _Begun] = {}
    for one, times in module.way():
        if done := next((begun.pop(name) for name in one.operands if name in begun and "-done" in one.opcode), None):
            hidden[done.key] += times * done.hidden
        elif begun and not kind_of(one):
            _hide(takes(one), begun)
        for each in [one, *module.inside(one)]:
            kind = kind_of(each)
            if kind is None:
                continue
            groups = groups_of(each.line) or (tuple(range(len(devices))),)
            if each.opcode == "send":
                groups = _between_slices(devices)
            size = max(len(group) for group in groups)
            if size < 2:
                continue
            crosses, far = _crosses(groups, devices, chip)
            # What an operation begins with `-start` has its operands among its results.
            sent = _sent(kind, size, max(0 if "-start" in each.opcode else each.bytes, _operands(module, each)))
            key = kind, ",".join(_axes(groups, mesh)), crosses, each is one and each.opcode == kind
            count, bytes_, seconds = found.get(key, (0, 0.0, 0.0))
            took = sent / (chip.network if far else chip.link) + chip.latency[far]
            found[key] = count + times, bytes_ + times * sent, seconds + times * took
            if each is one and not key[-1]:
                begun[one.name] = _Begun(key, took)
    return [Collective(*key, count, sent, seconds, hidden[key]) for key, (count, sent, seconds) in found.items()]


def _hide(seconds: float, begun: Mapping[str, _Begun]) -> None:
    """What runs hides as much of those that have begun, the first one first, and nothing of two at once."""
    for one in begun.values():
        used = min(seconds, one.seconds - one.hidden)
        one.hidden, seconds = one.hidden + used, seconds - used


def _operands(module: Module, one: Instruction) -> int:
    return sum(bytes_of(module.shapes.get(name, "")) for name in one.operands)


def _sent(kind: str, size: int, held: float) -> float:
    if kind in ("collective-permute", "collective-broadcast"):
        return held
    share = (size - 1) / size * held
    return 2 * share if kind == "all-reduce" else share


def _axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> list[str]:
    """The axes along which the members of a group differ."""
    shape = tuple(mesh.values())
    if not shape or math.prod(shape) <= max(max(group) for group in groups):
        return []
    places = np.stack(np.unravel_index(np.asarray(groups[0]), shape))
    return [axis for axis, row in zip(mesh, places, strict=True) if (row != row[0]).any()]


def _between_slices(devices: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """One device of each slice, at the same place in it."""
    slices: dict[Any, list[int]] = {}
    for number, device in enumerate(devices):
        slices.setdefault(getattr(device, "slice_index", 0), []).append(number)
    return tuple(zip(*slices.values(), strict=True))


def _crosses(groups: Sequence[Sequence[int]], devices: Sequence[Any], chip: Chip) -> tuple[str, bool]:
    """What a collective crosses, and whether that is the data-centre network."""
    for place, what in (("slice_index", "slices"), ("process_index", "hosts")):
        if any(len({getattr(devices[one], place, None) for one in group}) > 1 for group in groups):
            return what, what == "slices" or chip.platform == "gpu"
    return "", False
