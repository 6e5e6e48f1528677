"""Kernels of a program for a GPU, and the bytes that they move: a roofline, as its compiler estimates no cycles.

Each kernel reads its operands and writes its results once, at the least. Products are charged for that too, but not for
their arithmetic: the ratio of two programs with the same products says what was put around them.
"""

import collections
from typing import NamedTuple

from .chips import Chip
from .collectives import kind_of
from .hlo import Instruction, Module

FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
     "partition-id", "replica-id", "optimization-barrier", "async-start", "async-done", "async-update")
)  # fmt: skip
"""What is no kernel."""


class Traffic(NamedTuple):
    """What a program launches and moves.

    Attributes:
        kernels: number of kernels.
        moved: bytes of their operands and results.
        seconds: that takes at the memory's bandwidth.
        parts: bytes by operation of the step.
    """

    kernels: int
    moved: int
    seconds: float
    parts: collections.Counter[str]


def is_kernel(one: Instruction) -> bool:
    """Whether an instruction is launched as a kernel that is no collective."""
    return not (one.opcode in FREE or one.opcode.endswith("-done") or kind_of(one))


def traffic_of(module: Module, chip: Chip) -> Traffic:
    """Counts the kernels of a program and their bytes, without its collectives."""
    kernels = moved = 0
    parts: collections.Counter[str] = collections.Counter()
    for one, times in module.way():
        if not is_kernel(one):
            continue
        own = module.moved(one)
        kernels += times
        moved += times * own
        parts[one.label] += times * own
    return Traffic(kernels, moved, moved / chip.bandwidth, parts)
