"""Findings of the study of the shadow replica proposed by Ma et al. 2025 (arXiv:2502.12340), section 7.2."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from sdc.train.studies import ShadowMeasured, Watched

from ..report import Chart, Check, Finding, Line, Table


def findings(measured: ShadowMeasured) -> Iterator[Finding]:
    """Yields the tables, figures and claims of the study."""
    for training in measured.trainings:
        judged = [_judged(run) for run in training.runs]
        yield Table(
            f"{training.workload}: a shadow replica watches {measured.study.steps} steps of training",
            (
                "hardware", "corrupted steps", "compared", "detected", "first corrupted", "first detected", "verdict",
                "suspects",
            ),
            tuple(row for row, _ in judged),
            "Each step compares a working rank with the spare; the roles rotate. A corrupted step counts as compared "
            "if the faulty rank was among the compared ranks, of which there are two with one spare, and three with "
            "two spares. With one spare, a fault that strikes only once is never attributed to a single rank.",
        )  # fmt: skip
        lines = (
            Line(run.hardware, list(range(1, len(run.differed) + 1)), np.cumsum(run.differed).astype(float).tolist())
            for run in training.runs
            if run.faulty is not None
        )
        title = f"{training.workload}: detected differences over time"
        yield Chart(
            title, "Cumulative number of comparisons that detected a difference.", "step", "differences", tuple(lines)
        )
        right = [good for _, good in judged]
        yield Check(
            f"{training.workload}: every compared corruption is detected without false alarms, and no healthy rank is "
            "suspected",
            all(right),
            f"{sum(right)} of {len(right)} kinds of hardware",
        )


def _judged(run: Watched) -> tuple[tuple[Any, ...], bool]:
    """Returns a row of the table, and whether the run detected what it should have detected and suspects no healthy
    rank."""
    seen = run.corrupted & (run.compared == (-1 if run.faulty is None else run.faulty)).any(axis=-1)
    first = [int(np.flatnonzero(mask)[0]) if mask.any() else None for mask in (run.corrupted, run.differed)]
    named = ", ".join(map(str, run.suspects)) or (" or ".join(map(str, run.undecided[0])) if run.undecided else "none")
    row = (
        run.hardware, int(run.corrupted.sum()), int(seen.sum()), int(run.differed.sum()), first[0], first[1],
        run.verdict, named,
    )  # fmt: skip
    return row, bool((seen == run.differed).all()) and set(run.suspects) <= {run.faulty}
