"""Cycles of a program for a TPU, by the compiler's own estimate of each operation.

The text of a compiled program carries `estimated_cycles` for most operations. They are added up along the way of a
step in which nothing is wrong. What the compiler has no estimate of is charged by a bound: kernels by their
instructions, and never with less than what they read and write takes to move, nor, where they compute a product, with
less than the compiler's own product; collectives by bytes over a stated bandwidth. That some of it overlaps is not
modelled. The sum compares programs for the same chips; it is no prediction of a time.
"""

import collections
import re
from collections.abc import Mapping
from typing import NamedTuple

from sdc.text import NOTHING

from .chips import Chip
from .collectives import kind_of
from .hlo import Instruction, Module
from .products import Plain, bytes_told
from .schedules import Uncharged

_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
_SPACE = re.compile(r"S\(\d+\)")
"""In which memory an array is: the same instructions read and write all."""
_BODY = re.compile(r'"body":"([^"]+)"')


class Cycles(NamedTuple):
    """What a program costs.

    Attributes:
        operations: cycles of what the compiler estimates.
        kernels: cycles that custom kernels are charged with.
        scheduled: their instructions alone.
        parts: cycles by operation of the step.
    """

    operations: int
    kernels: int
    scheduled: int
    parts: collections.Counter[str]


def cycles_of(
    module: Module, chip: Chip, schedules: Mapping[str, int] | None = None, products: Mapping[str, Plain] = NOTHING
) -> Cycles:
    """Adds up the cycles of a program, without its collectives.

    Args:
        module: the program.
        chip: what its devices can do.
        schedules: cycles of kernels, as `read_schedules` gives them.
        products: of kernels that compute a product the compiler's own, by name.

    Raises:
        Uncharged: a kernel is not among `schedules`.
    """
    known = _by_body(module, schedules or {})
    operations = kernels = scheduled = 0
    parts: collections.Counter[str] = collections.Counter()
    for one, times in module.way():
        if one.opcode in ("while", "conditional", "call") or kind_of(one):
            continue
        if _KERNEL in one.line:
            alone = _scheduled(one, known)
            moving = round(max(module.moved(one), bytes_told(one)) / chip.bandwidth * chip.clock)
            own = max(products[one.name].charged(alone) if one.name in products else alone, moving)
            kernels, scheduled = kernels + times * own, scheduled + times * alone
        elif found := _CYCLES.search(one.line):
            own = int(found[1])
            operations += times * own
        else:
            continue
        parts[one.label] += times * own
    return Cycles(operations, kernels, scheduled, parts)


def estimated(one: Instruction) -> int:
    """The compiler's estimate of one operation; 0 where it has none."""
    found = _CYCLES.search(one.line)
    return int(found[1]) if found else 0


def _by_body(module: Module, schedules: Mapping[str, int]) -> Mapping[str, int]:
    """Cycles of kernels by what they are: the compiler writes the instructions of equal ones once."""
    lines = [one for computation in module.computations.values() for one in computation if _KERNEL in one.line]
    return {_body(one): schedules[one.name] for one in lines if one.name in schedules}


def _body(one: Instruction) -> str:
    found = _BODY.search(one.line)
    return f"{_SPACE.sub('', one.shape)} {found[1]}" if found else one.name


def _scheduled(one: Instruction, known: Mapping[str, int]) -> int:
    if _body(one) not in known:
        raise Uncharged(
            f"the kernel %{one.name} carries no estimate, and its instructions were not written; call "
            "prepare_compilers(kernel=None) before anything is compiled"
        )
    return known[_body(one)]
