"""Numbers out of record lines: whatever is absent, no number or not finite is told apart and never raises."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

LARGEST = 10**30
"""No run counts further; what does is damaged."""
DRAWABLE = 1e150
"""Larger magnitudes are drawn as infinite ones are: the arithmetic of axes overflows before that of numbers does."""

Row: TypeAlias = Mapping[str, Any]
PerTwin: TypeAlias = Float[np.ndarray, "twins steps"]
Line: TypeAlias = Float[np.ndarray, " steps"]


def number(value: Any) -> float | None:
    """A recorded number, which may be NaN or infinite; None for anything else."""
    if type(value) is float:  # a long record has millions of numbers: the usual type first
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all measure
        return None


def count(value: Any) -> int | None:
    """A recorded count: a whole number, not below zero; None for anything else."""
    if type(value) is int:
        return value if 0 <= value <= LARGEST else None
    found = number(value)
    if found is None or not math.isfinite(found) or found < 0 or found != math.floor(found):
        return None
    return int(value)


def mapping(value: Any) -> Row:
    """A recorded object; an empty one where there is none."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    """A recorded list; a single value counts as a list of one, None as an empty list."""
    if isinstance(value, list | tuple):
        return value
    return [] if value is None else [value]


def worst(values: Iterable[Any]) -> float | None:
    """The largest of the recorded numbers; NaN counts as the worst; None where there is no number."""
    numbers = [found for value in values if (found := number(value)) is not None]
    if not numbers:
        return None
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def step_numbers(steps: Sequence[Row]) -> Line:
    """The step numbers of the lines of `steps.jsonl`."""
    return np.asarray([row["step"] for row in steps], dtype=np.float64)


def per_twin(steps: Sequence[Row], key: str) -> PerTwin | None:
    """A quantity that each line holds once for every twin.

    Args:
        steps: lines of `steps.jsonl`.
        key: name of the quantity.

    Returns:
        float64 array of shape (twins, steps), NaN where a line lacks the number, infinite above `DRAWABLE`; None where
        no line has it.
    """
    lists = [[number(value) for value in sequence(row.get(key))] for row in steps]
    twins = max((len(values) for values in lists), default=0)
    if not any(value is not None for values in lists for value in values):
        return None
    table = np.full((twins, len(steps)), np.nan)
    for step, values in enumerate(lists):
        for twin, value in enumerate(values):
            table[twin, step] = np.nan if value is None else value
    return np.where(np.abs(table) > DRAWABLE, np.copysign(np.inf, table), table)


def per_site(steps: Sequence[Row], site: str, key: str) -> Line:
    """A quantity of one site at every step; NaN where a line lacks it."""
    values = (number(mapping(mapping(row.get("sites")).get(site)).get(key)) for row in steps)
    return np.asarray([np.nan if value is None else value for value in values], dtype=np.float64)


def thin(x: Line, y: Line, limit: int = 2000) -> tuple[Line, Line]:
    """Fewer points for a long line: of each run of neighbours the smallest and the largest stay, so spikes stay too.

    Args:
        x: abscissae.
        y: values; those that are not finite are dropped, unless the line is short enough already.
        limit: most points that come back.

    Returns:
        The points that stay, in their order.
    """
    if len(x) <= limit:
        return x, y
    keep = []
    for block in np.array_split(np.flatnonzero(np.isfinite(y)), limit // 2):
        if len(block):
            keep += sorted({int(block[y[block].argmin()]), int(block[y[block].argmax()])})
    return x[keep], y[keep]
