"""What the study of PAFT found, beside the paper: Capturing and Mitigating Gradient Aggregation Errors."""

import math

import numpy as np

from sdc.train.studies import NoisyTraining, PaftMeasured, divergence_over_time

from ..report import Chart, Check, Findings, Line, Table

VARIANCES = (1e-4, 1e-3, 1e-2, 1e-1)
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
"""Table 1 of the paper: test accuracy in percent of ResNet-18 on CIFAR-10, 4 workers, by method and sigma^2."""
TOLERANCE = 0.05
"""Relative: how far the mean divergence over all steps of one run may lie from what theory expects."""


def printed_divergence(exact: np.ndarray, workers: int) -> np.ndarray:
    """Lemma 3.1 as the paper prints it, with the factor (M + 1)/M where (M - 1)/M is right.

    Args:
        exact: the divergence by `sdc.train.studies.theory`.
        workers: M.

    Example:
        >>> import numpy as np
        >>> printed_divergence(np.array([3.0]), 4).tolist()
        [5.0]
    """
    return exact * (workers + 1) / (workers - 1)


def findings(measured: PaftMeasured) -> Findings:
    """Tables, figures and claims."""
    found = Findings()
    for training in measured.trainings:
        found += _noise(measured, training)
        if training.bursts:
            found += Findings((), (_bursts(measured, training),))
    return found + _divergence(measured)


def _noise(measured: PaftMeasured, training: NoisyTraining) -> Findings:
    higher = training.metric == "accuracy"
    variances, name = measured.variances, training.workload
    header = ["method", *(f"sigma² = {variance:g}" for variance in variances)]
    if higher:
        header += [f"published, {variance:g}" for variance in variances]
    scale = 100 if higher else 1
    rows = tuple(
        (
            method,
            *(scale * value for value in values),
            *([PUBLISHED.get(method, {}).get(variance) for variance in variances] if higher else ()),
        )
        for method, values in training.scores.items()
    )
    unit = "%" if higher else "on held-out text"
    grid = Table(
        f"{name}: {training.metric} ({unit}), {measured.workers} workers, {measured.steps} steps",
        tuple(header),
        rows,
        "Mean over the replicas and the last three looks. Published: ResNet-18 on CIFAR-10 (table 1): another network, "
        "other data and 120 epochs. Synchronizations of paft: "
        + ", ".join(f"{x:g}" for x in training.synchronizations)
        + ".",
    )
    chart = Chart(
        f"{name}: {training.metric} against noise",
        f"Each element of each worker's mean gradient has noise of variance σ². {measured.workers} workers, "
        f"{measured.steps} steps.",
        "σ²",
        training.metric,
        tuple(
            Line(method, variances, list(values), dashed=method == "clean")
            for method, values in training.scores.items()
        ),
        log="x" if higher else "xy",
    )
    return Findings((grid,), (chart,), (_ordering(measured, training),))


def _ordering(measured: PaftMeasured, training: NoisyTraining) -> Check:
    """noisy < PAFT <= clean, where noise matters: at the noise that costs the noisy run most and leaves PAFT alive."""
    sign = 1 if training.metric == "accuracy" else -1

    def better(method: str, place: int) -> float:
        value = sign * training.scores[method][place]
        return value if math.isfinite(value) else -math.inf

    place = max(range(len(measured.variances)), key=lambda i: _gain(better("paft", i), better("noisy", i)))
    noisy, mended, clean = (better(method, place) for method in ("noisy", "paft", "clean"))
    return Check(
        f"{training.workload}: noisy < PAFT ≤ clean",
        noisy < mended <= clean,
        f"at sigma² = {measured.variances[place]:g}: {abs(noisy):.4g}, {abs(mended):.4g}, {abs(clean):.4g} "
        f"({training.metric})",
    )


def _gain(mended: float, noisy: float) -> float:
    """How much PAFT gains; infinities (a run that diverged) come last."""
    return mended - noisy if math.isfinite(mended) and math.isfinite(noisy) else -math.inf


def _bursts(measured: PaftMeasured, training: NoisyTraining) -> Chart:
    return Chart(
        f"{training.workload}: accidental large noise",
        f"σ² = {measured.variances[0]:g} always, and bursts of the given variance at every {measured.burst_every}th "
        "step.",
        "step",
        training.metric,
        tuple(
            Line(f"{burst.method}, bursts of {burst.variance:g}", burst.steps.tolist(), burst.scores.tolist())
            for burst in training.bursts
        ),
        log="" if training.metric == "accuracy" else "y",
    )


def _divergence(measured: PaftMeasured) -> Findings:
    lines, rows, ratios = [], [], []
    for drift in measured.drifts:
        found = drift.squares
        exact = divergence_over_time(
            measured.sigma,
            [measured.rate] * len(found),
            workers=measured.workers,
            dimension=measured.dimension,
            period=drift.period,
        )
        printed = printed_divergence(exact, measured.workers)
        ratio = float(np.mean(found[found > 0] / exact[found > 0]))
        name = "no synchronization" if drift.period is None else f"H = {drift.period}"
        number = list(range(1, len(found) + 1))
        lines.append(Line(f"measured, {name}", number, found.tolist()))
        lines.append(Line(f"exact, {name}", number, exact.tolist(), dashed=True))
        if drift.period is None:
            lines.append(Line("as printed", number, printed.tolist(), dashed=True))
        rows.append((name, float(found.max()), float(exact.max()), float(printed.max()), ratio))
        ratios.append(ratio)
    grid = Table(
        f"{measured.drifting}: model divergence, plain SGD, sigma = {measured.sigma}, {measured.workers} workers",
        ("synchronization", "largest measured", "exact (lemma 3.1)", "as printed", "measured / exact, mean"),
        tuple(rows),
        "Squared distance of a replica from the mean of all, before a synchronization, mean over replicas.",
    )
    chart = Chart(
        f"{measured.drifting}: model divergence over time",
        "E‖mean θ - θ_m‖²: measured, d (M-1)/M σ² Σ η² (exact), and with (M+1)/M as the paper prints it.",
        "step",
        "squared divergence",
        tuple(lines),
        log="y",
    )
    check = Check(
        "divergence follows the exact form, not the printed one",
        all(abs(ratio - 1) < TOLERANCE for ratio in ratios),
        "measured / exact: " + ", ".join(f"{ratio:.3f}" for ratio in ratios),
    )
    return Findings((grid,), (chart,), (check,))
