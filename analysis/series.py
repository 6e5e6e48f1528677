"""Reads numbers from record lines; distinguishes missing, invalid and non-finite values, and never raises an
exception."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from sdc.schema import Number, StepRow

LARGEST = 10**30
"""Maximum plausible count in a record; a larger number means that the record is damaged."""
DRAWABLE = 1e150
"""Larger magnitudes are drawn as infinite, since the arithmetic of axes overflows earlier than that of floats."""

PerTwin: TypeAlias = Float[np.ndarray, "twins steps"]
Floats: TypeAlias = Float[np.ndarray, " steps"]


def real(value: Number) -> float | None:
    """Returns a recorded number, which may be NaN or infinite; None if no number was recorded."""
    try:
        return None if value is None else float(value)
    except OverflowError:  # an integer too large for a float
        return None


def whole(value: Number) -> int | None:
    """Returns a recorded count, a nonnegative integer; None for anything else."""
    if value is None or not 0 <= value <= LARGEST or value != math.floor(value):
        return None
    return int(value)


def each(value: Number | Sequence[Number]) -> Sequence[Number]:
    """Returns a list of numbers, one for each twin: a single number becomes a list of one, and None becomes an empty
    list."""
    return value if isinstance(value, Sequence) else [] if value is None else [value]


def worst(values: Iterable[Number]) -> float | None:
    """Returns the largest of the recorded numbers, or NaN if one of them is NaN; None if there are no numbers."""
    numbers = [found for value in values if (found := real(value)) is not None]
    if not numbers:
        return None
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def step_numbers(steps: Sequence[StepRow]) -> Floats:
    """Returns the step numbers of the lines of `steps.jsonl`."""
    return np.asarray([row.step for row in steps], dtype=np.float64)


def per_twin(steps: Sequence[StepRow], name: str) -> PerTwin | None:
    """Returns a quantity that each line has for every twin: NaN if a line lacks the quantity, infinite if it exceeds
    `DRAWABLE`. Returns None if no line has the quantity.
    """
    lists = [[real(value) for value in each(getattr(row, name))] for row in steps]
    twins = max((len(values) for values in lists), default=0)
    if not any(value is not None for values in lists for value in values):
        return None
    table = np.full((twins, len(steps)), np.nan)
    for step, values in enumerate(lists):
        table[: len(values), step] = [np.nan if value is None else value for value in values]
    return np.where(np.abs(table) > DRAWABLE, np.copysign(np.inf, table), table)


def per_site(steps: Sequence[StepRow], site: str, name: str) -> Floats:
    """Returns a quantity of one site at every step; NaN if a line lacks the quantity."""
    values = (real(getattr(row.sites[site], name)) if site in row.sites else None for row in steps)
    return np.asarray([np.nan if value is None else value for value in values], dtype=np.float64)


def per_method(steps: Sequence[StepRow], name: str, of: Callable[[list[float]], float] = max) -> list[float] | None:
    """Returns a quantity that an aggregation method recorded at every step, reduced to one number; NaN if missing.

    Returns None if no line has the quantity, since each method records quantities of its own.
    """
    lines = [row.aggregation or {} for row in steps]
    if not any(name in line for line in lines):
        return None
    values: list[list[Any]] = [found if isinstance(found := line.get(name), list) else [found] for line in lines]
    known = [[number for value in several if (number := real(value)) is not None] for several in values]
    return [float(of(numbers)) if numbers else math.nan for numbers in known]
