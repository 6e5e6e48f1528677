"""Times of programs that take turns, and their ratios."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def take_turns(runs: Mapping[str, Callable[[], Any]], steps: int) -> dict[str, list[float]]:
    """Seconds of each run, after two rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(steps + 2):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(plain: list[float], other: list[float]) -> float:
    """Median of the ratios of neighbours in time, which share what else the machine does."""
    return statistics.median(b / a for a, b in zip(plain, other, strict=True))
