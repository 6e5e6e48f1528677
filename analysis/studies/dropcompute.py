"""Findings of the study of DropCompute, compared with the paper: Giladi et al. (NeurIPS 2023, arXiv:2306.10598)."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from sdc.train.studies import DropComputeMeasured, DroppedRun, DroppedTraining, expected_speedup

from ..report import Chart, Check, Finding, Line, Table
from .intervals import mean_interval

# F1 on SQuAD of BERT-Large pretrained with dropped micro-batches, by drop rate (table 1a of the paper).
PUBLISHED = {0.0: 91.32, 0.03: 91.34, 0.06: 91.44, 0.1: 91.19}
# Maximum relative deviation of a measured speedup from the predicted one, since other programs disturb the measurement.
TOLERANCE = 0.05
WINDOW = 10  # number of steps over which a loss is averaged


def findings(measured: DropComputeMeasured) -> Iterator[Finding]:
    """Yields the tables, figures and claims of the study."""
    if measured.predicted:
        yield from _predicted(measured)
    if measured.clocked:
        yield from _clocked(measured)
    for training in measured.trainings:
        yield from _training(measured, training)


def _predicted(measured: DropComputeMeasured) -> Iterator[Finding]:
    study, latency = measured.study, measured.study.latency
    rows, lines, analytic = [], [], []
    for one in measured.predicted:
        theory = [
            expected_speedup(
                latency.mean,
                math.sqrt(latency.variance),
                study.micro_batches,
                one.workers,
                study.serial,
                one.threshold,
                known,
            )
            for known in (None, one.step)
        ]
        analytic.append(theory[0])
        rows.append((f"{one.workers:,}", one.step, one.threshold, one.drop_rate, one.speedup, *theory))
        lines.append(Line(f"{one.workers:,} workers", list(one.rates), list(one.speedups)))
    yield Table(
        f"Predicted effective speedup by number of workers: {study.micro_batches} micro-batches of {latency.base} "
        f"s with bounded log-normal delays, and {study.serial} s for the rest of the step",
        (
            "workers", "step without threshold, s", "best threshold, s", "drop rate", "speedup (algorithm 2)",
            "equations (5), (7)", "equations (5), (7) with measured E[T]",
        ),
        tuple(rows),
        "Algorithm 2 uses 100 sampled iterations. Equation (7) assumes that the times are normally distributed, but "
        "here their tails are longer.",
    )  # fmt: skip
    yield Chart(
        "Effective speedup against drop rate", "Analysis of sampled latencies, as in figure 4 of the paper.",
        "drop rate", "effective speedup", tuple(lines),
    )  # fmt: skip
    fleets, best = tuple(one.workers for one in measured.predicted), [one.speedup for one in measured.predicted]
    yield Chart(
        "Effective speedup against workers", "Speedup at the best threshold for each number of workers.",
        "workers", "effective speedup",
        (Line("algorithm 2", fleets, best), Line("equations (5), (7)", fleets, analytic, dashed=True)), log="x",
    )  # fmt: skip
    growing = all(a < b for a, b in itertools.pairwise(best))
    yield Check("the speedup grows with the number of workers", growing, ", ".join(f"{gain:.3f}" for gain in best))


def _clocked(measured: DropComputeMeasured) -> Iterator[Finding]:
    rows = tuple(
        (
            str(one.workers),
            one.seconds / one.iterations,
            one.stopped_seconds / one.iterations,
            one.speedup,
            one.predicted,
            one.speedup / one.predicted,
        )
        for one in measured.clocked
    )
    yield Table(
        "Measured effective speedup: threads with injected delays, timed with a real clock",
        ("workers", "step, s", "step with threshold, s", "measured", "predicted (algorithm 2)", "measured / predicted"),
        rows,
        f"Each row measures {measured.clocked[0].iterations} iterations of {measured.study.micro_batches} "
        "micro-batches. A speedup is a ratio of two throughputs, in completed micro-batches per second.",
    )
    off = max(abs(row[-1] - 1) for row in rows)
    yield Check("the measured speedup agrees with the predicted one", off < TOLERANCE, f"within {off:.1%}")


def _training(measured: DropComputeMeasured, training: DroppedTraining) -> Iterator[Finding]:
    name = training.workload
    rows, by_step, by_time = [], [], []
    last = {run: np.asarray([_smooth(losses)[-1] for losses in run.losses]) for run in training.runs}
    for run in training.runs:
        title = _name(run)
        published = PUBLISHED.get(run.rate) if not run.extra and run.correction == "none" else None
        cells = run.scores, last[run], run.ends[:, -1], run.unstopped / run.ends[:, -1]
        rows.append((title, run.drop_rate, *(mean_interval(cell).short() for cell in cells), published))
        if run.correction == "none":
            losses = np.mean([_smooth(each) for each in run.losses], axis=0)
            by_step.append(Line(title, list(range(1, len(losses) + 1)), losses.tolist()))
            by_time.append(Line(title, run.ends.mean(axis=0).tolist(), losses.tolist()))
    yield Table(
        f"{name}: training with dropped micro-batches, {measured.study.workers} workers, {measured.study.steps} steps",
        ("run", "drop rate", training.metric, "last loss", "simulated time, s", "time saved, ×", "published F1"),
        tuple(rows),
        f"Values are means over {measured.study.seeds} seeds, ± half of the 95 % interval (Student's t over the "
        "seeds). The published F1 is that of BERT-Large on SQuAD, pretrained with the same drop rate (table 1a). The "
        "last loss is the mean over the last ten steps.",
    )
    for what, lines in (("step", by_step), ("simulated time, s", by_time)):
        title = f"{name}: loss against {what}"
        yield Chart(title, "Training loss, averaged over ten steps and the seeds.", what, "loss", tuple(lines))
    whole, extra = training.runs[0], next(run for run in training.runs if run.extra)
    # Runs with the same seed are compared. The loss counts as the same if it is at most 2 % and 0.005 higher.
    excess = mean_interval(last[extra] - (1.02 * last[whole] + 0.005))
    sooner = mean_interval(extra.ends[:, -1] / whole.ends[:, -1])
    yield Check(
        f"{name}: extra steps lead to the same loss in less time",
        excess.high <= 0 and sooner.high < 1,
        f"loss {last[whole].mean():.4g} without a threshold, {last[extra].mean():.4g} with extra steps in "
        f"{sooner.text()} of the time; excess over the tolerance: {excess.text()}",
    )


def _name(run: DroppedRun) -> str:
    if not run.rate:
        return "no threshold"
    if run.extra:
        return f"{run.rate:.0%} dropped, {run.extra} extra steps"
    more = "" if run.correction == "none" else f", correction by {run.correction}"
    return f"{run.rate:.0%} dropped{more}"


def _smooth(values: np.ndarray) -> np.ndarray:
    """Returns for each step the mean loss over the last `WINDOW` steps (fewer at the start). Steps without a completed
    micro-batch have no loss and are left out."""
    means = []
    for end in range(1, len(values) + 1):
        known = values[max(0, end - WINDOW) : end]
        known = known[~np.isnan(known)]
        means.append(known.mean() if known.size else np.nan)
    return np.asarray(means)
