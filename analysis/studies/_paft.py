"""Findings of the study of PAFT, compared with the paper: Capturing and Mitigating Gradient Aggregation Errors."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from sdc.train.studies import NoisyTraining, PaftMeasured, divergence_over_time

from ..report import Chart, Check, Finding, Line, Table
from .intervals import Interval, exceeds, line_of, mean_interval

VARIANCES = (1e-4, 1e-3, 1e-2, 1e-1)
# Table 1 of the paper: test accuracy in percent of ResNet-18 on CIFAR-10, 4 workers, by method and sigma^2.
PUBLISHED = {
    name: dict(zip(VARIANCES, row, strict=True))
    for name, row in {
        "clean": (94.0, 94.0, 94.0, 94.0),
        "noisy": (93.7, 91.1, 60.5, 13.5),
        "paft_sync, H = 5": (93.8, 93.3, 85.2, 32.8),
        "paft_sync, H = 10": (93.9, 93.6, 84.7, 31.9),
        "paft_sync, H = 50": (93.9, 93.4, 84.3, 28.5),
        "paft, algorithm 2": (93.9, 93.4, 85.2, 33.2),
    }.items()
}
TOLERANCE = 0.05  # maximum relative deviation of the mean divergence over all steps of a run from theory


def printed_divergence(exact: np.ndarray, workers: int) -> np.ndarray:
    """Returns lemma 3.1 as printed in the paper, with the factor (M + 1)/M instead of the correct (M - 1)/M."""
    return exact * (workers + 1) / (workers - 1)


def findings(measured: PaftMeasured) -> Iterator[Finding]:
    """Yields the tables, figures and claims of the study."""
    for training in measured.trainings:
        yield from _training(measured, training)
    yield from _divergence(measured)


def _training(measured: PaftMeasured, training: NoisyTraining) -> Iterator[Finding]:
    higher = training.metric == "accuracy"
    study, variances = measured.study, measured.study.variances
    name, scores = training.workload, training.scores
    scale, unit = (100, "%") if higher else (1, "on held-out text")
    rows: list[tuple[Any, ...]] = []
    for method, values in scores.items():
        rows.append((method, *(mean_interval(row).short(scale) for row in values)))
        if higher and method in PUBLISHED:
            rows.append((f"{method}, published", *map(PUBLISHED[method].get, variances)))
    for rule, numbers in training.synchronizations.items():
        rows.append((f"{rule}: synchronizations", *(mean_interval(row).short() for row in numbers)))
    yield Table(
        f"{name}: {training.metric} ({unit}), {study.workers} workers, {study.steps} steps",
        ("method", *(f"sigma² = {variance:g}" for variance in variances)),
        tuple(rows),
        f"Values are means over {study.seeds} seeds, the replicas and the last three evaluations, ± half of the 95 % "
        "interval (Student's t over the seeds). The published values are those of ResNet-18 on CIFAR-10 after 120 "
        "epochs (table 1), so the network and the data differ. PAFT begins with H = 10 and averages at most every "
        f"second step, {max(0, study.steps - 9) // 2} times here.",
    )
    yield Chart(
        f"{name}: {training.metric} against noise",
        f"Each of {study.workers} workers receives the mean gradient with noise of variance σ² on each element; "
        f"training takes {study.steps} steps.",
        "σ²",
        training.metric,
        tuple(
            dataclasses.replace(line_of(method, variances, values), dashed=method == "clean")
            for method, values in scores.items()
        ),
        log="x" if higher else "xy",
    )
    if training.bursts:
        yield Table(
            f"{name}: bursts of noise every {study.burst_every} of {study.steps} steps, {training.metric} ({unit})",
            ("method", "σ² of a burst", "before the first burst", "worst afterwards", "at the end"),
            tuple(
                (burst.method, burst.variance, *_around(burst.scores, burst.steps >= study.burst_every, higher, scale))
                for burst in training.bursts
            ),
            f"Means over {study.seeds} seeds and the replicas, ± half of the 95 % interval. The score was measured "
            f"{len(training.bursts[0].steps)} times, so that the worst one just after a burst may be missing. In all "
            f"other steps, σ² = {variances[0]:g}.",
        )
        yield Chart(
            f"{name}: occasional large noise",
            f"The noise has the variance σ² = {variances[0]:g}. Every {study.burst_every} steps, a burst of noise "
            "occurs, whose variance the legend states.",
            "step",
            training.metric,
            tuple(
                line_of(f"{burst.method}, bursts of {burst.variance:g}", burst.steps.tolist(), burst.scores.T)
                for burst in training.bursts
            ),
            log="" if higher else "y",
        )

    # Each comparison is between runs with the same seeds; together the gains and the losses have 95 % confidence.
    confidence = 1 - 0.05 / (2 * len(variances))
    sign = 1 if higher else -1
    gains = [_difference(scores["paft"][row], scores["noisy"][row], sign, confidence) for row in range(len(variances))]
    losses = [_difference(scores["clean"][row], scores["paft"][row], sign, confidence) for row in range(len(variances))]
    places = {
        "above 0": [gain.low > 0 for gain in gains],
        "below 0": [gain.high < 0 for gain in gains],
        "PAFT above clean": [loss.high < 0 for loss in losses],
    }
    certain = "; ".join(
        f"{what}: {', '.join(f'{v:g}' for v, each in zip(variances, there, strict=True) if each) or 'nowhere'}"
        for what, there in places.items()
    )
    contradicted = any(exceeds(each) is False for each in (*gains, *losses))
    yield Check(
        f"{name}: PAFT is better than noisy training at some σ², and at none shown to be worse than noisy or better "
        "than clean training",
        False if contradicted else any(exceeds(gain) for gain in gains) or None,
        f"gain of PAFT in {training.metric}, by σ²: "
        + "; ".join(f"{variance:g}: {gain.text()}" for variance, gain in zip(variances, gains, strict=True))
        + f" ({confidence:.4g} confidence). Significantly {certain}.",
    )


def _around(
    scores: Float[np.ndarray, "seeds looks"], struck: Bool[np.ndarray, "looks"], higher: bool, scale: float
) -> tuple[str | None, ...]:
    """Returns the last scores before the first burst, the worst ones since then, and those at the end."""
    before, since = scores[:, ~struck], scores[:, struck]
    worst = (np.min if higher else np.max)(since, axis=1) if since.size else None  # NaN if one is
    columns = (before[:, -1] if before.size else None, worst, scores[:, -1])
    return tuple(None if one is None else mean_interval(one).short(scale) for one in columns)


def _difference(
    upper: Float[np.ndarray, "seeds"], lower: Float[np.ndarray, "seeds"], sign: int, confidence: float
) -> Interval:
    """Returns the mean difference of two methods over the seeds. If runs of only one of them diverged, this decides if
    it is significant by the sign test; otherwise, the interval is unbounded."""
    better = int((np.isfinite(upper) & ~np.isfinite(lower)).sum())
    worse = int((~np.isfinite(upper) & np.isfinite(lower)).sum())
    if better + worse and stats.binomtest(better, better + worse).pvalue < 1 - confidence:
        note = f" (diverged in {better} seeds with the other method alone, in {worse} with this one alone)"
        return Interval(*(math.copysign(math.inf, better - worse),) * 3, note)
    found = mean_interval(sign * (upper - lower), confidence)
    return found if math.isfinite(found.value) else Interval(0.0, -math.inf, math.inf, found.note)  # all diverged


def _divergence(measured: PaftMeasured) -> Iterator[Finding]:
    study = measured.study
    lines, rows, ratios = [], [], []
    for drift in measured.drifts:
        found = drift.squares
        exact = divergence_over_time(
            study.sigma,
            [study.rate] * len(found),
            workers=study.workers,
            dimension=drift.dimension,
            period=drift.period,
        )
        printed = printed_divergence(exact, study.workers)
        ratios.append(float(np.mean(found[found > 0] / exact[found > 0])))
        name = "no synchronization" if drift.period is None else f"H = {drift.period}"
        number = list(range(1, len(found) + 1))
        lines.append(Line(f"measured, {name}", number, found.tolist()))
        lines.append(Line(f"exact, {name}", number, exact.tolist(), dashed=True))
        if drift.period is None:
            lines.append(Line("as printed", number, printed.tolist(), dashed=True))
        rows.append((name, float(found.max()), float(exact.max()), float(printed.max()), ratios[-1]))
    yield Table(
        f"{measured.drifting}: model divergence, plain SGD, sigma = {study.sigma}, {study.workers} workers",
        ("synchronization", "largest measured", "exact (lemma 3.1)", "as printed", "measured / exact, mean"),
        tuple(rows),
        "Squared distance of a replica from the mean of all replicas before a synchronization, averaged over replicas.",
    )
    yield Chart(
        f"{measured.drifting}: model divergence over time",
        "The divergence is E‖mean θ - θ_m‖². The exact form is d (M-1)/M σ² Σ η²; the paper prints the "
        "factor (M+1)/M instead of (M-1)/M.",
        "step",
        "squared divergence",
        tuple(lines),
        log="y",
    )
    yield Check(
        "divergence follows the exact form, not the printed one (once)",
        all(abs(ratio - 1) < TOLERANCE for ratio in ratios),
        "measured / exact: " + ", ".join(f"{ratio:.3f}" for ratio in ratios),
    )
