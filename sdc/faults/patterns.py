"""Patterns: which elements of a tensor are hit together.

Beam experiments on GPUs and other accelerators find corrupted outputs of matrix products that are single elements,
lines, squares, or scattered: Oliveira, Pilla, Hanzich, Fratin, Fernandes, Lunardi, Cela, Navaux, Carro and Rech,
*Radiation-Induced Error Criticality in Modern HPC Parallel Accelerators* (HPCA 2017). A `Run` or a `Row` is a line, a
`Tile` a square. Corrupted addresses on a data-center GPU are periodic, in step with the warps of 32 threads to which
they are dealt out (*The Anatomy of Silent Data Corruption: GPU Error Pattern Study and Modeling Guidance*,
arXiv:2605.04213): a `Stride`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class One:
    """One element."""

    def setting(self) -> dict[str, str | None]:
        """How a fault's text names the pattern: its name and its sizes, or None where it has none."""
        sizes = "x".join(str(getattr(self, field.name)) for field in dataclasses.fields(self))
        return {} if type(self) is One else {type(self).__name__.lower(): sizes or None}

    def size(self, shape: tuple[int, ...]) -> int:
        """Elements hit together, in a tensor of this shape, at most."""
        return 1

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        """Flat indices of the elements hit together; the tensor's size stands for no start and for what is outside."""
        return start[:, None]


@dataclasses.dataclass(frozen=True)
class Run(One):
    """Neighbours in memory; a run ends with the tensor.

    Attributes:
        length: elements.
    """

    length: int

    def __post_init__(self) -> None:
        _positive(run=self.length)

    def size(self, shape: tuple[int, ...]) -> int:
        return self.length

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        return _within(start, np.arange(self.length), shape)


@dataclasses.dataclass(frozen=True)
class Stride(One):
    """Elements at a constant distance in memory.

    Attributes:
        count: elements.
        step: distance from one to the next.
        align: the first one lies at a multiple of this; a start elsewhere is rounded down.
    """

    count: int
    step: int
    align: int = 1

    def __post_init__(self) -> None:
        _positive(count=self.count, step=self.step, align=self.align)

    def setting(self) -> dict[str, str | None]:
        return {"stride": f"{self.count}x{self.step}" + (f"x{self.align}" if self.align != self.step else "")}

    def size(self, shape: tuple[int, ...]) -> int:
        return self.count

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        size = math.prod(shape)
        aligned = _where(start < size, start // self.align * self.align, size)
        return _within(aligned, np.arange(self.count) * self.step, shape)


@dataclasses.dataclass(frozen=True)
class Tile(One):
    """A rectangle of the last two axes, ending at their edges. A vector is taken as one row.

    Attributes:
        rows: number of rows, along the last axis but one.
        columns: number of columns, along the last axis.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        _positive(rows=self.rows, columns=self.columns)

    def size(self, shape: tuple[int, ...]) -> int:
        return self.rows * self.columns

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        height, width = (1, 1, *shape)[-2:]
        size = math.prod(shape)
        row, column = start // max(width, 1) % max(height, 1), start % max(width, 1)
        down = _like(start, np.minimum(np.repeat(np.arange(self.rows), self.columns), height))
        right = _like(start, np.minimum(np.tile(np.arange(self.columns), self.rows), width))
        inside = (down < height - row[:, None]) & (right < width - column[:, None]) & (start[:, None] < size)
        return _where(inside, start[:, None] + down * width + right, size)


@dataclasses.dataclass(frozen=True)
class Row(One):
    """All of the last axis."""

    def size(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if shape else 1

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        width, size = self.size(shape), math.prod(shape)
        first = _where(start < size, start // max(width, 1) * width, size)
        return _within(first, np.arange(width), shape)


@dataclasses.dataclass(frozen=True)
class Whole(One):
    """The whole tensor."""

    def size(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape)

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        size = math.prod(shape)
        return _where(start[:, None] < size, _like(start, np.arange(size)), size)


Pattern: TypeAlias = One | Run | Stride | Tile | Row | Whole


def _numbers(text: str, example: str, counts: tuple[int, ...]) -> list[int]:
    numbers = text.split("x")
    if len(numbers) not in counts or not all(number.strip().isdecimal() for number in numbers):
        raise ValueError(f"expected {' or '.join(map(str, counts))} numbers, as in {example}")
    return [int(number) for number in numbers]


def _stride(text: str) -> Stride:
    count, step, *align = _numbers(text, "stride=4x32", (2, 3))
    return Stride(count, step, *(align or [step]))


PATTERNS: Mapping[str, Any] = {
    "run": lambda text: Run(*_numbers(text, "run=8", (1,))),
    "stride": _stride,
    "tile": lambda text: Tile(*_numbers(text, "tile=4x32", (2,))),
    "row": None,
    "whole": None,
}
"""Settings of a fault's text that name a pattern, and how each is read; None for a word."""
WORDS: Mapping[str, Pattern] = {"row": Row(), "whole": Whole()}


def _within(first: Int[Array, "hits"], offsets: Int[np.ndarray, "n"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
    size = math.prod(shape)
    # What lies outside is separated before it is added: a sum could wrap around.
    beyond = _like(first, np.minimum(offsets, size))
    return _where(beyond < size - first[:, None], first[:, None] + beyond, size)


def _like(start: Int[Array, "hits"], numbers: Int[np.ndarray, "n"]) -> Int[Array, "n"]:
    """Numbers as an array of the kind and type of the starts."""
    return start.__array_namespace__().asarray(numbers.astype(start.dtype))


def _where(mask: Any, inside: Any, size: int) -> Any:
    return inside.__array_namespace__().where(mask, inside, size).astype(inside.dtype)


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: expected at least 1")
