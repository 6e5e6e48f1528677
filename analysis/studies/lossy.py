"""What the study of lost packets found, beside the paper: Weintraub et al., Distributed Training under Packet Loss."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sdc.train.studies import LossyMeasured, LossyTraining, pair_drift

from ..report import Chart, Check, Findings, Line, Table

PUBLISHED = {0.0: 10.653, 0.1: 10.778, 0.2: 10.934, 0.3: 11.055, 0.4: 11.362}
"""Validation perplexity of Llama-2-7B, 64 workers, 5,000 steps (table 1 of the paper), by loss rate."""
TOLERANCE = 0.05
"""Relative: how far the mean drift of one random walk may lie from its limit."""


def printed_pair_drift(p: float) -> float:
    """The drift between two copies of a random walk as the paper prints it, where `pair_drift` has 2p/(1 - p²).

    Args:
        p: probability that a copy is not renewed at a step.

    Example:
        >>> [round(printed_pair_drift(p), 3) for p in (0.1, 0.2, 0.4)]
        [0.182, 0.333, 0.571]
    """
    return 2 * p / (1 + p)


def findings(measured: LossyMeasured) -> Findings:
    """Tables, figures and claims."""
    found = sum((_by_rate(measured, training) for training in measured.trainings), Findings())
    return found + _walks(measured) if measured.walks else found


def _by_rate(measured: LossyMeasured, training: LossyTraining) -> Findings:
    text = training.metric == "perplexity"
    rates, scores, name = measured.rates, training.scores, training.workload
    header = ("losses", *(f"{rate:.0%}" for rate in rates), *(f"{rate:.0%}, against 0 %" for rate in rates[1:]))
    nothing = [None] * (len(rates) - 1)
    lossless = scores["per shard"][rates[0]]
    rows = [
        (losses, *map(found.get, rates), *(_percent(found.get(rate), lossless) for rate in rates[1:]))
        for losses, found in scores.items()
    ]
    if text:
        changes = (_percent(PUBLISHED.get(rate), PUBLISHED[0.0]) for rate in rates[1:])
        rows.append(("published", *map(PUBLISHED.get, rates), *changes))
    rows.append(("drift / move², measured, per shard", *(training.drifts[rate] for rate in rates), *nothing))
    rows.append(("drift / move², random walk", *map(pair_drift, rates), *nothing))
    grid = Table(
        f"{name}: {training.metric} by loss rate of gradients and of parameters, {measured.workers} workers, "
        f"{training.steps} steps",
        header,
        tuple(rows),
        f"Mean over {training.seeds} seeds, the replicas and the last three looks. Published: Llama-2-7B, 64 workers, "
        "5,000 steps. Drift between copies exceeds that of a random walk where parameters keep their direction for a "
        "while.",
    )
    chart = Chart(
        f"{name}: {training.metric} against loss rate",
        f"{measured.workers} workers, {training.steps} steps; a packet has {measured.packet} elements, a burst "
        f"{measured.burst:g} packets.",
        "loss rate",
        training.metric,
        tuple(Line(losses, list(found), list(found.values())) for losses, found in scores.items()),
    )
    return Findings((grid,), (chart,), _claims(scores["per shard"], lossless) if text else ())


def _claims(scores: Mapping[float, float], lossless: float) -> tuple[Check, ...]:
    found: tuple[Check, ...] = ()
    if 0.2 in scores:
        change = _percent(scores[0.2], lossless)
        found = (Check("perplexity at 20 % loss is less than 3 % higher", bool(change < 3), f"{change:+.2f} %"),)
    rising = list(scores.values())
    slope = np.polyfit(list(scores), rising, 1)[0]
    return (
        *found,
        Check(
            "perplexity rises with the loss rate",
            bool(rising[-1] > rising[0] and slope > 0),
            ", ".join(f"{value:.4g}" for value in rising),
        ),
    )


def _percent(value: float | None, base: float) -> Any:
    """Change in percent."""
    return None if value is None else 100 * (value / base - 1)


def _walks(measured: LossyMeasured) -> Findings:
    rates, walks = tuple(measured.walks), list(measured.walks.values())
    exact, printed = [pair_drift(rate) for rate in rates], [printed_pair_drift(rate) for rate in rates]
    rows = tuple(
        (f"{rate:.0%}", found, right, wrong, found / right)
        for rate, found, right, wrong in zip(rates, walks, exact, printed, strict=True)
    )
    grid = Table(
        f"Drift between two copies of a random walk, in squares of its step ({measured.workers} workers)",
        ("loss rate", "measured", "exact: 2p/(1-p²)", "as printed: 2p/(1+p)", "measured / exact"),
        rows,
    )
    chart = Chart(
        "Drift between two copies against theory",
        "Owners move by independent steps; parameters are lost per packet, gradients are not.",
        "loss rate",
        "E[D²] / s²",
        (
            Line("measured", rates, walks),
            Line("exact", rates, exact, dashed=True),
            Line("as printed", rates, printed, dashed=True),
        ),
    )
    off = max(abs(found / right - 1) for found, right in zip(walks, exact, strict=True))
    # At the smallest rates the two forms differ by no more than the tolerance.
    nearest = min(abs(found / wrong - 1) for found, wrong in zip(walks, printed, strict=True))
    check = Check(
        "drift follows the exact form, not the printed one",
        off < TOLERANCE < nearest + TOLERANCE,
        f"largest deviation from the exact form {off:.1%}",
    )
    return Findings((grid,), (chart,), (check,))
