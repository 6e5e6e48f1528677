"""Numbers out of record lines: what is absent, no count or not finite is told apart and never raises."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from sdc.schema import Number, StepRow

LARGEST = 10**30
"""No run counts further; what does is damaged."""
DRAWABLE = 1e150
"""Larger magnitudes are drawn as infinite ones are: the arithmetic of axes overflows before that of numbers does."""

PerTwin: TypeAlias = Float[np.ndarray, "twins steps"]
Floats: TypeAlias = Float[np.ndarray, " steps"]


def real(value: Number) -> float | None:
    """A recorded number, which may be NaN or infinite; None where there is none."""
    try:
        return None if value is None else float(value)
    except OverflowError:  # a whole number beyond all measure
        return None


def whole(value: Number) -> int | None:
    """A recorded count: a whole number, not below zero; None for anything else."""
    if value is None or not 0 <= value <= LARGEST or value != math.floor(value):
        return None
    return int(value)


def each(value: Number | Sequence[Number]) -> Sequence[Number]:
    """A number for each twin; a single one counts as a list of one, None as an empty list."""
    return value if isinstance(value, Sequence) else [] if value is None else [value]


def worst(values: Iterable[Number]) -> float | None:
    """The largest of the recorded numbers; NaN counts as the worst; None where there is no number."""
    numbers = [found for value in values if (found := real(value)) is not None]
    if not numbers:
        return None
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def step_numbers(steps: Sequence[StepRow]) -> Floats:
    """The step numbers of the lines of `steps.jsonl`."""
    return np.asarray([row.step for row in steps], dtype=np.float64)


def per_twin(steps: Sequence[StepRow], name: str) -> PerTwin | None:
    """A quantity that each line holds once for every twin: NaN where a line lacks it, infinite above `DRAWABLE`.

    None where no line has it.
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
    """A quantity of one site at every step; NaN where a line lacks it."""
    values = (real(getattr(row.sites[site], name)) if site in row.sites else None for row in steps)
    return np.asarray([np.nan if value is None else value for value in values], dtype=np.float64)


def per_method(steps: Sequence[StepRow], name: str, of: Callable[[list[float]], float] = max) -> list[float] | None:
    """What a method of aggregation recorded at every step, of several numbers one; NaN where a line has none.

    None where no line says it: what each method says of a step is its own.
    """
    lines = [row.aggregation or {} for row in steps]
    if not any(name in line for line in lines):
        return None
    values: list[list[Any]] = [found if isinstance(found := line.get(name), list) else [found] for line in lines]
    known = [[number for value in several if (number := real(value)) is not None] for several in values]
    return [float(of(numbers)) if numbers else math.nan for numbers in known]
