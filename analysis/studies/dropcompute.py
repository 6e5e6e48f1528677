"""Findings of the study of DropCompute, compared with the paper: Giladi et al. (NeurIPS 2023, arXiv:2306.10598)."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float
from scipy import stats

from sdc.train.studies import DropComputeMeasured, DroppedRun, DroppedTraining, expected_speedup

from ..report import Chart, Check, Finding, Line, Table
from .intervals import every, exceeds, line_of, mean_interval, stays_below

# F1 on SQuAD of BERT-Large pretrained with dropped micro-batches, mean and standard deviation of three fine-tunings, by
# drop rate (table 1a of the paper) and, for 10 %, by compensation (table 1b).
PUBLISHED = {
    (0.0, "none"): "91.32 ± 0.15", (0.03, "none"): "91.34 ± 0.04", (0.06, "none"): "91.44 ± 0.02",
    (0.1, "none"): "91.19 ± 0.02", (0.1, "extra steps"): "91.40 ± 0.08", (0.1, "larger batch"): "91.38 ± 0.08",
    (0.1, "repetition"): "91.19 ± 0.11",
}  # fmt: skip
# E[T] / E[T_n] by figure of the paper (tables below figures 13 and 14).
RATIOS = {
    "13a, 14a": 1.496, "13b": 1.302, "13c": 1.283, "13d": 1.386, "13e": 1.39,
    "14b": 1.933, "14c": 2.394, "14d": 2.773, "14e": 3.043, "14f": 3.4,
}  # fmt: skip
# Maximum relative deviation of a measured speedup from the predicted one, since other programs disturb the measurement.
TOLERANCE = 0.05
NEGLIGIBLE = 0.02  # loss of accuracy that the paper's word "negligible" stands for here
BINS = 60  # number of bins of a histogram
WINDOW = 10  # number of steps over which a loss is averaged


def findings(measured: DropComputeMeasured) -> Iterator[Finding]:
    """Yields the tables, figures and claims of the study."""
    if measured.predicted:
        yield from _predicted(measured)
    if measured.distributions is not None:
        yield from _distributions(measured)
    if measured.noisy:
        yield from _noisy(measured)
    if measured.local:
        yield from _local(measured)
    if measured.clocked:
        yield from _clocked(measured)
    for training in measured.trainings:
        yield from _training(measured, training)


def _distributions(measured: DropComputeMeasured) -> Iterator[Finding]:
    found = measured.distributions
    assert found is not None

    def histogram(name: str, samples: Float[np.ndarray, "samples"], edges: Float[np.ndarray, "edges"]) -> Line:
        shares = np.histogram(samples, edges)[0] / len(samples)
        return Line(name, ((edges[1:] + edges[:-1]) / 2).tolist(), shares.tolist())

    edges = np.linspace(found.alone.min(), found.steps.max(), BINS + 1)
    lines = [histogram("one worker, nothing dropped", found.alone, edges)]
    lines += [
        histogram(f"slowest of {found.workers}, {rate:.1%} dropped", steps, edges)
        for rate, steps in zip(found.rates, found.steps, strict=True)
    ]
    yield Chart(
        f"Figure 2: seconds of computation per step, {found.workers} workers",
        "Shares of sampled iterations. A threshold narrows and shifts the distribution of the slowest worker's time.",
        "seconds", "share", tuple(lines),
    )  # fmt: skip
    edges = np.linspace(found.batches.min(), 1.0, BINS + 1)
    yield Chart(
        f"Figure 8: size of the batch, {found.workers} workers",
        "Shares of sampled iterations, by the part of all micro-batches that is completed.",
        "share of the full batch", "share",
        tuple(
            histogram(f"{rate:.1%} dropped", batches, edges)
            for rate, batches in zip(found.rates, found.batches, strict=True)
            if rate
        ),
    )  # fmt: skip
    rows = [
        (f"{rate:.1%}", steps.mean(), steps.std(), batches.mean(), batches.std())
        for rate, steps, batches in zip(found.rates, found.steps, found.batches, strict=True)
    ]
    yield Table(
        f"Figures 2 and 8: the slowest of {found.workers} workers, and the size of the batch",
        ("dropped", "mean time, s", "standard deviation, s", "mean share of the batch", "standard deviation"),
        tuple(rows),
        f"Over {found.steps.shape[1]:,} sampled iterations, once.",
    )
    spread = found.steps.std(axis=1)
    yield Check(
        "a threshold reduces the mean and the variance of the time of a step (once)",
        bool((found.steps[1:].mean(axis=1) < found.steps[0].mean()).all() and (spread[1:] < spread[0]).all()),
        f"standard deviation {spread[0]:.3g} s without, at most {spread[1:].max():.3g} s with a threshold",
    )


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
    yield Check(
        "the predicted speedup grows with the number of workers (once)",
        growing,
        ", ".join(f"{gain:.3f}" for gain in best),
    )


def _noisy(measured: DropComputeMeasured) -> Iterator[Finding]:
    few, many = measured.noisy[0].workers[-2:]
    rows, inside = [], []
    for one in measured.noisy:
        below, above = (mean_interval(ratios) for ratios in one.ratios[-2:])
        inside.append(below.low <= RATIOS[one.figure] <= above.high)
        gain = mean_interval(one.speedups[-1]), mean_interval(one.drop_rates[-1])
        ratios = below.short(), above.short(), RATIOS[one.figure]
        rows.append((one.figure, one.latency, *ratios, *(each.short() for each in gain)))
    runs = f"± half of the 95 % interval (Student's t over {measured.study.seeds} seeds)"
    yield Table(
        f"Delays of figures 13 and 14: {measured.study.micro_batches} micro-batches, and {measured.study.serial} s for "
        "the rest of the step",
        (
            "figure", "seconds of a micro-batch", f"slowest worker / mean, {few:,} workers", f"{many:,} workers",
            "published", f"best speedup, {many:,} workers", "drop rate",
        ),
        tuple(rows),
        f"{runs}. The paper states the ratio of the slowest worker's time to a worker's mean time, but not the number "
        "of workers.",
    )  # fmt: skip
    lines = (line_of(one.figure, one.workers, one.speedups) for one in measured.noisy)
    yield Chart(
        "Effective speedup by distribution of delays", f"Best threshold for each number of workers, {runs}.",
        "workers", "effective speedup", tuple(lines), log="x",
    )  # fmt: skip
    yield Check(
        f"the published ratios of figures 13 and 14 are not shown to be outside those of {few:,} to {many:,} workers",
        all(inside), f"{sum(inside)} of {len(inside)}",
    )  # fmt: skip
    ratios, gains = (np.mean([each[-1] for each in found], axis=1) for found in (
        [one.ratios for one in measured.noisy], [one.speedups for one in measured.noisy]
    ))  # fmt: skip
    order = float(stats.spearmanr(ratios, gains).statistic) if np.ptp(gains) else 0.0
    yield Check("the ratio indicates the speedup (of the means)", order > 0.9, f"rank correlation {order:.2f}")


def _local(measured: DropComputeMeasured) -> Iterator[Finding]:
    rows, lines = [], []
    places = {False: "all workers", True: "one server"}
    for one in measured.local:
        cells = (mean_interval(values).short() for values in (one.local, one.dropped, one.drop_rates))
        rows.append((f"{one.period}, {places[one.server]}", *cells))
    for server, place in places.items():
        some = [one for one in measured.local if one.server is server]
        periods = [one.period for one in some]
        lines.append(line_of(f"{place}, no threshold", periods, [one.local for one in some]))
        lines.append(line_of(f"{place}, threshold", periods, [one.dropped for one in some]))
    yield Table(
        "Local SGD with stragglers: effective speedup over training that averages after each step",
        ("local steps, stragglers", "local SGD", "local SGD with a threshold", "drop rate"),
        tuple(rows),
        "Simulated times of 32 workers, as in figure 12 of the paper: a second is added to 4 % of the local steps of "
        "0.45 s, of all workers or, as many, of 8 workers in one server. ± half of the 95 % interval (Student's t over "
        f"{measured.study.seeds} seeds). Dropped local steps count as lost time.",
    )
    yield Chart(
        "Local SGD with stragglers", "Effective speedup over training that averages after each step.",
        "local steps between averages", "effective speedup", tuple(lines), log="x",
    )  # fmt: skip
    gains = [mean_interval(one.dropped - one.local) for one in measured.local]
    yield Check(
        "a threshold makes local SGD with stragglers faster",
        every(map(exceeds, gains)),
        ", ".join(f"{gain.short()}" for gain in gains),
    )
    pairs = zip(*([one for one in measured.local if one.server is server] for server in places), strict=True)
    lost = [mean_interval(spread.local - server.local) for spread, server in pairs if spread.period > 1]
    yield Check(
        "local SGD gains less if all stragglers are in one server",
        every(map(exceeds, lost)),
        ", ".join(f"{gain.short()}" for gain in lost),
    )


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
    yield Check("the measured speedup agrees with the predicted one (once)", off < TOLERANCE, f"within {off:.1%}")


def _training(measured: DropComputeMeasured, training: DroppedTraining) -> Iterator[Finding]:
    name = training.workload
    rows, by_step, by_time = [], [], []
    whole, extra = training.runs[0], next(run for run in training.runs if run.compensation == "extra steps")
    last = {run: np.asarray([_smooth(losses)[-1] for losses in run.losses]) for run in training.runs}
    for run in training.runs:
        title = _name(measured, run)
        published = PUBLISHED.get((run.rate, run.compensation)) if run.correction == "none" else None
        cells = run.scores, last[run], run.ends[:, -1], whole.ends[:, -1] / run.ends[:, -1]
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
        "seeds). The published F1 is that of BERT-Large on SQuAD, pretrained with the same drop rate (tables 1a and "
        "1b; ± the standard deviation of three fine-tunings). The last loss is the mean over the last ten steps. "
        "Larger batch: as many samples are completed as without a threshold. Repetition: as soon as the dropped "
        "samples fill a batch, they are the next one.",
    )
    for what, lines in (("step", by_step), ("simulated time, s", by_time)):
        title = f"{name}: loss against {what}"
        yield Chart(title, "Training loss, averaged over ten steps and the seeds.", what, "loss", tuple(lines))
    # Runs with the same seed are compared. The loss counts as the same if it is at most 2 % and 0.005 higher.
    excess = mean_interval(last[extra] - (1.02 * last[whole] + 0.005))
    sooner = mean_interval(extra.ends[:, -1] / whole.ends[:, -1])
    yield Check(
        f"{name}: extra steps lead to the same loss in less time",
        every((bool(np.isfinite(last[extra]).all()), stays_below(excess, 0.0), stays_below(sooner, 1.0))),
        f"loss {last[whole].mean():.4g} without a threshold, {last[extra].mean():.4g} with extra steps in "
        f"{sooner.text()} of the time; excess over the tolerance: {excess.text()}; {_needed(whole, extra)}",
    )
    if training.shares:
        yield from _shares(measured, training)


def _needed(whole: DroppedRun, extra: DroppedRun) -> str:
    """Returns how many more steps it takes until the loss stays below the last one of the run without a threshold."""
    steps, found = whole.losses.shape[1], []
    for losses, target in zip(extra.losses, (_smooth(each)[-1] for each in whole.losses), strict=True):
        above = np.flatnonzero(_smooth(losses) > target)
        found.append(int(above[-1]) + 2 if above.size else 1)  # steps count from 1
    reached = np.asarray([step / steps - 1 for step in found if step <= extra.losses.shape[1]])
    said = f"in only {len(reached)} of {len(found)} seeds"
    if len(reached) > 1:
        said = f"after {mean_interval(reached).text(percent=True)} more steps, in {len(reached)} of {len(found)} seeds"
    return f"its loss stays below that {said} (as many samples take {extra.losses.shape[1] / steps - 1:.1%} more)"


def _shares(measured: DropComputeMeasured, training: DroppedTraining) -> Iterator[Finding]:
    shares = training.shares
    whole, rates = shares["none"][0.0], measured.study.drops
    yield Table(
        f"{training.workload}: each worker's share of a batch is dropped with a probability",
        ("probability", *(f"correction: {correction}" for correction in shares)),
        (
            ("0", mean_interval(whole).short(), *(None for _ in list(shares)[1:])),
            *((f"{rate:g}", *(mean_interval(scores[rate]).short() for scores in shares.values())) for rate in rates),
        ),
        f"{training.metric.capitalize()}, mean over {measured.study.seeds} seeds ± half of the 95 % interval "
        "(Student's t), as in figures 10 and 11 of the paper.",
    )
    lines = (line_of(f"correction: {name}", rates, [scores[rate] for rate in rates]) for name, scores in shares.items())
    yield Chart(
        f"{training.workload}: {training.metric} against dropped shares", "As in figure 11 of the paper.",
        "probability that a worker drops its share", training.metric, tuple(lines),
    )  # fmt: skip
    low = [rate for rate in rates if rate <= 0.1]
    losses = {rate: mean_interval(whole - shares["none"][rate]) for rate in low}
    yield Check(
        f"{training.workload}: up to 10 % of dropped shares cost at most {NEGLIGIBLE:.0%} of {training.metric}",
        every(stays_below(loss, NEGLIGIBLE) for loss in losses.values()),
        "; ".join(f"{rate:.0%}: {loss.text()}" for rate, loss in losses.items()),
    )


def _name(measured: DropComputeMeasured, run: DroppedRun) -> str:
    if not run.rate:
        return "no threshold"
    more = "" if run.correction == "none" else f", correction by {run.correction}"
    if run.compensation != "none":
        more = f", {run.compensation}"
    if extra := run.losses.shape[1] - measured.study.steps:
        more = f", {extra} {run.compensation}"
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
