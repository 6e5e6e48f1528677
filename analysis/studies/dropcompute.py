"""What the study of DropCompute found, beside the paper: Giladi et al. (NeurIPS 2023, arXiv:2306.10598)."""

import itertools

import numpy as np

from sdc.train.studies import DropComputeMeasured, DroppedRun, DroppedTraining, expected_speedup

from ..report import Chart, Check, Findings, Line, Table

PUBLISHED = {0.0: 91.32, 0.03: 91.34, 0.06: 91.44, 0.1: 91.19}
"""F1 on SQuAD of BERT-Large pretrained with dropped micro-batches, by drop rate (table 1a of the paper)."""
TOLERANCE = 0.05
"""Relative: a speedup on a clock that other programs disturb may lie so far from the predicted one."""
WINDOW = 10
"""Steps over which a loss is averaged."""


def findings(measured: DropComputeMeasured) -> Findings:
    """Tables, figures and claims."""
    found = Findings()
    if measured.predicted:
        found += _predicted(measured)
    if measured.clocked:
        found += _clocked(measured)
    for training in measured.trainings:
        found += _training(measured, training)
    return found


def _predicted(measured: DropComputeMeasured) -> Findings:
    rows, lines = [], []
    best = [one.speedup for one in measured.predicted]
    analytic = []
    for one in measured.predicted:
        theory = [
            expected_speedup(
                measured.mean,
                measured.deviation,
                measured.micro_batches,
                one.workers,
                measured.serial,
                one.threshold,
                known,
            )
            for known in (None, one.step)
        ]
        analytic.append(theory[0])
        rows.append((f"{one.workers:,}", one.step, one.threshold, one.drop_rate, one.speedup, *theory))
        lines.append(Line(f"{one.workers:,} workers", list(one.rates), list(one.speedups)))
    fleets = tuple(one.workers for one in measured.predicted)
    grid = Table(
        f"Predicted effective speedup by number of workers: {measured.micro_batches} micro-batches of {measured.base} "
        f"s with bounded log-normal delays, {measured.serial} s for the rest",
        (
            "workers", "step without threshold, s", "best threshold, s", "drop rate", "speedup (algorithm 2)",
            "equations (5), (7)", "the same, measured E[T]",
        ),
        tuple(rows),
        "Algorithm 2 on 100 sampled iterations. Equation (7) takes the slowest of normal times; tails are longer here.",
    )  # fmt: skip
    charts = (
        Chart(
            "Effective speedup against drop rate", "Post analysis of sampled latencies, as in figure 4 of the paper.",
            "drop rate", "effective speedup", tuple(lines),
        ),
        Chart(
            "Effective speedup against workers", "At the best threshold for each number of workers.",
            "workers", "effective speedup",
            (Line("algorithm 2", fleets, best), Line("equations (5), (7)", fleets, analytic, dashed=True)), log="x",
        ),
    )  # fmt: skip
    growing = all(a < b for a, b in itertools.pairwise(best))
    check = Check("speedup grows with the number of workers", growing, ", ".join(f"{gain:.3f}" for gain in best))
    return Findings((grid,), charts, (check,))


def _clocked(measured: DropComputeMeasured) -> Findings:
    ratios = [one.speedup / one.predicted for one in measured.clocked]
    rows = tuple(
        (
            str(one.workers),
            one.seconds / one.iterations,
            one.stopped_seconds / one.iterations,
            one.speedup,
            one.predicted,
            ratio,
        )
        for one, ratio in zip(measured.clocked, ratios, strict=True)
    )
    grid = Table(
        "Measured effective speedup: threads with injected delays, on a real clock",
        ("workers", "step, s", "step with threshold, s", "measured", "predicted (algorithm 2)", "measured / predicted"),
        rows,
        f"{measured.clocked[0].iterations} iterations of {measured.micro_batches} micro-batches; completed "
        "micro-batches a second.",
    )
    off = max(abs(ratio - 1) for ratio in ratios)
    check = Check("the measured speedup is the predicted one", off < TOLERANCE, f"within {off:.1%}")
    return Findings((grid,), (), (check,))


def _training(measured: DropComputeMeasured, training: DroppedTraining) -> Findings:
    name = training.workload
    rows, by_step, by_time = [], [], []
    for run in training.runs:
        losses = _smooth(run.losses)
        plain = not run.extra and run.correction == "none"
        rows.append(
            (
                _name(run),
                run.drop_rate,
                run.score,
                float(losses[-1]),
                float(run.ends[-1]),
                float(run.unstopped / run.ends[-1]),
                PUBLISHED.get(run.rate) if plain else None,
            )
        )
        if run.correction == "none":
            by_step.append(Line(_name(run), list(range(1, len(losses) + 1)), losses.tolist()))
            by_time.append(Line(_name(run), run.ends.tolist(), losses.tolist()))
    grid = Table(
        f"{name}: training with dropped micro-batches, {measured.workers} workers, {measured.steps} steps",
        ("run", "drop rate", training.metric, "last loss", "simulated time, s", "time saved, ×", "published F1"),
        tuple(rows),
        "Published: F1 of BERT-Large on SQuAD (table 1a), pretrained with that drop rate. Loss: mean of ten steps.",
    )
    charts = tuple(
        Chart(f"{name}: loss against {what}", "Loss of training, mean of ten steps.", what, "loss", tuple(lines))
        for what, lines in (("step", by_step), ("simulated time, s", by_time))
    )
    whole = rows[0]
    extra = next(row for row, run in zip(rows, training.runs, strict=True) if run.extra)
    # The loss may be higher by what single trainings differ.
    same = extra[3] <= 1.02 * whole[3] + 0.005
    check = Check(
        f"{name}: with extra steps the same loss in less time",
        same and extra[4] < whole[4],
        f"loss {whole[3]:.4g} in {whole[4]:.0f} s, {extra[3]:.4g} in {extra[4]:.0f} s",
    )
    return Findings((grid,), charts, (check,))


def _name(run: DroppedRun) -> str:
    if not run.rate:
        return "no threshold"
    if run.extra:
        return f"{run.rate:.0%} dropped, {run.extra} extra steps"
    more = "" if run.correction == "none" else f", correction by {run.correction}"
    return f"{run.rate:.0%} dropped{more}"


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over the last steps, fewer at the start; steps in which nothing was completed have no loss."""
    means = []
    for end in range(1, len(values) + 1):
        known = values[max(0, end - WINDOW) : end]
        known = known[~np.isnan(known)]
        means.append(known.mean() if known.size else np.nan)
    return np.asarray(means)
