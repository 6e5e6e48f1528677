"""Where shards lie in a global array: index ranges, one pair of ends for each axis."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The index range of a shard, as JAX gives it, in an array of that shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def overlap(box: Box, other: Box) -> Box:
    """What two boxes have in common; empty (`volume`) if nothing."""
    return tuple((max(a, c), max(min(b, d), max(a, c))) for (a, b), (c, d) in zip(box, other, strict=True))


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where a part lies in the array that holds the box `whole`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, whole, strict=True))


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(stop - start for start, stop in box)


def box_text(box: Box) -> str:
    """As `0:4,8:16`; empty for the box of a scalar.

    Example:
        >>> from sdc.checkpoints.boxes import box_text, parse_box
        >>> parse_box(box_text(((0, 4), (8, 16))))
        ((0, 4), (8, 16))
    """
    return ",".join(f"{start}:{stop}" for start, stop in box)


def parse_box(text: str) -> Box:
    """The inverse of `box_text`.

    Raises:
        ValueError: it is no such text.
    """
    boxes: Any = tuple(tuple(map(int, part.split(":"))) for part in text.split(",") if part)
    if any(len(ends) != 2 for ends in boxes):
        raise ValueError(f"{text!r} is no index range; expected one such as '0:4,8:16'")
    return tuple(boxes)
