"""Cycles of a program for a TPU, by the compiler's own estimate of each operation.

The text of a compiled program carries `estimated_cycles` for most operations. They are added up along the way of a
step in which nothing is wrong. What the compiler has no estimate of is charged by a bound: kernels by their
instructions, and never with less than their operands and results take to move; collectives by bytes over a stated
bandwidth. That some of it overlaps is not modelled. The sum compares programs for the same chips; it is no prediction
of a time.
"""

import collections
import re
from collections.abc import Mapping
from typing import NamedTuple

from .chips import Chip
from .collectives import kind_of
from .hlo import Instruction, Module
from .schedules import Uncharged

_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
_BODY = re.compile(r'"body":"([^"]+)"')


class Cycles(NamedTuple):
    """What a program costs.

    Attributes:
        operations: cycles of what the compiler estimates.
        kernels: cycles of custom kernels, by their instructions.
        parts: cycles by operation of the step.
    """

    operations: int
    kernels: int
    parts: collections.Counter[str]


def cycles_of(module: Module, chip: Chip, schedules: Mapping[str, int] | None = None) -> Cycles:
    """Adds up the cycles of a program, without its collectives.

    Args:
        module: the program.
        chip: what its devices can do.
        schedules: cycles of kernels, as `read_schedules` gives them.

    Raises:
        Uncharged: a kernel is not among `schedules`.
    """
    known = _by_body(module, schedules or {})
    operations = kernels = 0
    parts: collections.Counter[str] = collections.Counter()
    for one, times in module.way():
        if one.opcode in ("while", "conditional", "call") or kind_of(one):
            continue
        if _KERNEL in one.line:
            own = _kernel(module, one, chip, known)
            kernels += times * own
        elif found := _CYCLES.search(one.line):
            own = int(found[1])
            operations += times * own
        else:
            continue
        parts[one.label] += times * own
    return Cycles(operations, kernels, parts)


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
    return f"{one.shape} {found[1]}" if found else one.name


def _kernel(module: Module, one: Instruction, chip: Chip, known: Mapping[str, int]) -> int:
    if _body(one) not in known:
        raise Uncharged(
            f"the kernel %{one.name} carries no estimate, and its instructions were not written; call "
            "prepare_compilers(kernel=None) before anything is compiled"
        )
    return max(known[_body(one)], round(module.moved(one) / chip.bandwidth * chip.clock))
