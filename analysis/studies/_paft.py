"""Findings of the study of PAFT, compared with the paper: Capturing and Mitigating Gradient Aggregation Errors."""

import math
from collections.abc import Iterator

import numpy as np

from sdc.train.studies import NoisyTraining, PaftMeasured, divergence_over_time

from ..report import Chart, Check, Finding, Line, Table

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
        "paft": (93.9, 93.4, 85.2, 33.2),
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
    header = ["method", *(f"sigma² = {variance:g}" for variance in variances)]
    if higher:
        header += [f"published, {variance:g}" for variance in variances]
    scale, unit = (100, "%") if higher else (1, "on held-out text")
    rows = []
    for method, values in scores.items():
        beside = [PUBLISHED.get(method, {}).get(variance) for variance in variances] if higher else []
        rows.append((method, *(scale * value for value in values), *beside))
    yield Table(
        f"{name}: {training.metric} ({unit}), {study.workers} workers, {study.steps} steps",
        tuple(header),
        tuple(rows),
        "Values are means over the replicas and the last three evaluations. The published values are those of "
        "ResNet-18 on CIFAR-10 after 120 epochs (table 1), so the network and the data differ. Number of "
        "synchronizations performed by paft, for each variance: "
        + ", ".join(f"{x:g}" for x in training.synchronizations)
        + ".",
    )
    yield Chart(
        f"{name}: {training.metric} against noise",
        f"Each of {study.workers} workers receives the mean gradient with noise of variance σ² on each element; "
        f"training takes {study.steps} steps.",
        "σ²",
        training.metric,
        tuple(Line(method, variances, list(values), dashed=method == "clean") for method, values in scores.items()),
        log="x" if higher else "xy",
    )
    if training.bursts:
        yield Chart(
            f"{name}: occasional large noise",
            f"The noise has the variance σ² = {variances[0]:g}. Every {study.burst_every} steps, a burst of noise "
            "occurs, whose variance the legend states.",
            "step",
            training.metric,
            tuple(
                Line(f"{burst.method}, bursts of {burst.variance:g}", burst.steps.tolist(), burst.scores.tolist())
                for burst in training.bursts
            ),
            log="" if higher else "y",
        )

    # noisy < PAFT <= clean is checked at the variance at which PAFT, if it still converges, gains most.
    def better(method: str, place: int) -> float:
        value = scores[method][place] if higher else -scores[method][place]
        return value if math.isfinite(value) else -math.inf

    def gain(place: int) -> float:
        """Returns the gain of PAFT over the noisy run, or minus infinity if one of the two runs diverged."""
        mended, noisy = better("paft", place), better("noisy", place)
        return mended - noisy if math.isfinite(mended) and math.isfinite(noisy) else -math.inf

    place = max(range(len(variances)), key=gain)
    noisy, mended, clean = (better(method, place) for method in ("noisy", "paft", "clean"))
    yield Check(
        f"{name}: noisy < PAFT ≤ clean",
        noisy < mended <= clean,
        f"{training.metric} at σ² = {variances[place]:g}: {abs(noisy):.4g} (noisy), {abs(mended):.4g} (PAFT), "
        f"{abs(clean):.4g} (clean)",
    )


def _divergence(measured: PaftMeasured) -> Iterator[Finding]:
    study = measured.study
    lines, rows, ratios = [], [], []
    for drift in measured.drifts:
        found = drift.squares
        exact = divergence_over_time(
            study.sigma,
            [study.rate] * len(found),
            workers=study.workers,
            dimension=measured.dimension,
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
        "divergence follows the exact form, not the printed one",
        all(abs(ratio - 1) < TOLERANCE for ratio in ratios),
        "measured / exact: " + ", ".join(f"{ratio:.3f}" for ratio in ratios),
    )
