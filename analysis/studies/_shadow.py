"""Findings of the study of the shadow replica proposed by Ma et al. 2025 (arXiv:2502.12340), section 7.2."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sdc.train.studies import ShadowMeasured, Watched

from ..report import Chart, Check, Finding, Line, Table


def findings(measured: ShadowMeasured) -> Iterator[Finding]:
    """Yields the tables, figures and claims of the study."""
    for training in measured.trainings:
        kinds: dict[str, list[Watched]] = {}
        for run in training.runs:
            kinds.setdefault(run.hardware, []).append(run)
        yield Table(
            f"{training.workload}: a shadow replica watches {measured.study.steps} steps of training",
            ("hardware", "runs", "corrupted steps", "compared", "detected", "detected after", "verdicts", "suspects"),
            tuple(_row(runs) for runs in kinds.values()),
            "Each step compares a working rank with the spare; the roles rotate. Steps are summed over the runs, which "
            "have different seeds. A corrupted step counts as compared if the faulty rank was among the compared "
            "ranks, of which there are two with one spare, and three with two spares. Detected after is the number "
            "of steps from the first corrupted to the first detected step: the median and the range of the runs. With "
            "one spare, a fault that strikes only once is never attributed to a single rank.",
        )
        lines = (
            Line(kind, list(range(1, measured.study.steps + 1)), _differences(runs).mean(axis=0).tolist())
            for kind, runs in kinds.items()
            if runs[0].faulty is not None
        )
        title = f"{training.workload}: detected differences over time"
        said = "Cumulative number of comparisons that detected a difference, averaged over the runs."
        yield Chart(title, said, "step", "differences", tuple(lines))
        right = [_is_right(run) for run in training.runs]
        yield Check(
            f"{training.workload}: every compared corruption is detected without false alarms, and no healthy rank is "
            "suspected",
            all(right),
            f"{sum(right)} of {len(right)} runs",
        )


def _differences(runs: Sequence[Watched]) -> np.ndarray:
    return np.cumsum([run.differed for run in runs], axis=1).astype(float)


def _seen(run: Watched) -> np.ndarray:
    """Returns the steps in which the corrupted rank was compared."""
    seen: np.ndarray = run.corrupted & (run.compared == (-1 if run.faulty is None else run.faulty)).any(axis=-1)
    return seen


def _is_right(run: Watched) -> bool:
    """Returns whether the run detected what it should have detected and suspects no healthy rank."""
    return bool((_seen(run) == run.differed).all()) and set(run.suspects) <= {run.faulty}


def _delay(delays: Sequence[int], runs: int) -> str | None:
    """Returns the median and the range of delays, and in how many of the runs with a compared corruption they are."""
    if not delays:
        return None
    known = "" if len(delays) == runs else f", in {len(delays)} of {runs} runs"
    return f"{np.median(delays):g} ({min(delays)} to {max(delays)}){known}"


def _row(runs: Sequence[Watched]) -> tuple[Any, ...]:
    """Returns the row of a kind of hardware."""
    delays = [int(np.argmax(run.differed) - np.argmax(run.corrupted)) for run in runs if run.differed.any()]
    verdicts = Counter(run.verdict for run in runs)
    named = Counter(
        ", ".join([*map(str, run.suspects), *(" or ".join(map(str, ranks)) for ranks in run.undecided)]) or "none"
        for run in runs
    )
    return (
        runs[0].hardware, len(runs), int(sum(run.corrupted.sum() for run in runs)),
        int(sum(_seen(run).sum() for run in runs)), int(sum(run.differed.sum() for run in runs)),
        _delay(delays, sum(bool(_seen(run).any()) for run in runs)),
        *("; ".join(f"{what} ({times})" for what, times in counts.items()) for counts in (verdicts, named)),
    )  # fmt: skip
