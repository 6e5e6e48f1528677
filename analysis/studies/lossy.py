"""Findings of the study of lost packets, compared with the paper: Weintraub et al., Distributed Training under Packet
Loss."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from sdc.train.studies import LossyMeasured, LossyTraining, pair_drift

from ..report import Chart, Check, Finding, Line, Table
from .intervals import Interval, every, exceeds, line_of, mean_interval, stays_below

# Perplexity of Llama-2-7B, 64 workers, 5,000 steps (table 1 of the paper), by loss rate: validation, training.
PUBLISHED = {0.0: 10.653, 0.1: 10.778, 0.2: 10.934, 0.3: 11.055, 0.4: 11.362}
PUBLISHED_TRAINING = {0.0: 5.183, 0.1: 5.223, 0.2: 5.325, 0.3: 5.388, 0.4: 5.531}
TOLERANCE = 0.05  # maximum relative deviation of the mean drift of a random walk from its limit


def printed_pair_drift(p: float) -> float:
    """Returns the drift between two copies of a random walk as printed in the paper, 2p/(1 + p); `pair_drift` returns
    the exact form, 2p/(1 - p²)."""
    return 2 * p / (1 + p)


def findings(measured: LossyMeasured) -> Iterator[Finding]:
    """Yields the tables, figures and claims of the study."""
    for training in measured.trainings:
        yield from _by_rate(measured, training)
    if measured.walks:
        yield from _walks(measured)


def _by_rate(measured: LossyMeasured, training: LossyTraining) -> Iterator[Finding]:
    text = training.metric == "perplexity"
    study, rates = measured.study, measured.study.rates
    scores, name = training.scores, training.workload
    header = ("losses", *(f"{rate:.0%}" for rate in rates), *(f"{rate:.0%}, change in %" for rate in rates[1:]))
    nothing = [None] * (len(rates) - 1)
    lossless = scores["per shard"][rates[0]]

    def change(values: Float[np.ndarray, "seeds"], base: Float[np.ndarray, "seeds"] = lossless) -> Interval:
        """Returns the change of a score from that without losses, in percent, over runs with the same seeds. It is
        unknown where the run without losses diverged."""
        return mean_interval(100 * (np.where(np.isfinite(base), values, math.nan) / base - 1))

    def row(losses: str, found: Mapping[float, Float[np.ndarray, "seeds"]]) -> tuple[Any, ...]:
        values = (mean_interval(found[rate]).short() if rate in found else None for rate in rates)
        changes = (change(found[rate], found[rates[0]]).short() if rate in found else None for rate in rates[1:])
        return losses, *values, *changes

    def printed(what: str, figures: Mapping[float, float]) -> tuple[Any, ...]:
        changes = (100 * (figures[rate] / figures[0.0] - 1) if rate in figures else None for rate in rates[1:])
        return f"published, {what}", *map(figures.get, rates), *changes

    rows = [row(losses, found) for losses, found in scores.items()]
    if text:
        rows.append(printed("validation", PUBLISHED))
    learned = {rate: np.exp(found) if text else found for rate, found in training.losses.items()}
    rows.append(row(f"training {'perplexity' if text else 'loss'}, per shard", learned))
    if text:
        rows.append(printed("training", PUBLISHED_TRAINING))
    rows.append(("drift / move², measured, per shard", *(training.drifts[rate] for rate in rates), *nothing))
    rows.append(("drift / move², random walk", *map(pair_drift, rates), *nothing))
    yield Table(
        f"{name}: {training.metric} by loss rate of gradients and parameters, {study.workers} workers, "
        f"{training.steps} steps",
        header,
        tuple(rows),
        f"Values are means over {study.seeds} seeds, the replicas and the last three evaluations, ± half of the 95 % "
        "interval (Student's t over the seeds); changes are relative to the run with the same seed without losses. "
        "The published values are those of Llama-2-7B with 64 workers after 5,000 steps (table 1). Training values are "
        "means over the last tenth of the steps. Algorithm 1 uses the last piece of a gradient that arrived in place "
        "of a lost one. The drift between copies exceeds that of a random walk if parameters move in the same "
        "direction for a while.",
    )
    yield Chart(
        f"{name}: {training.metric} against loss rate",
        f"{study.workers} workers, {training.steps} steps. A packet contains {study.packet} elements; a burst of "
        f"losses affects {study.burst:g} packets on average.",
        "loss rate",
        training.metric,
        tuple(line_of(losses, list(found), list(found.values())) for losses, found in scores.items()),
    )
    yield Chart(
        f"Figures 1 and 2: {name}, training loss by loss rate",
        f"Means over {study.seeds} seeds and {study.workers} workers; shards of gradients and parameters are lost.",
        "step",
        "training loss",
        tuple(
            Line(f"{rate:.0%}", ((np.arange(len(curve)) + 0.5) * training.steps / len(curve)).tolist(), curve.tolist())
            for rate, curve in training.curves.items()
        ),
    )
    by_rate = scores["per shard"]
    if text and 0.2 in by_rate:
        found = change(by_rate[0.2])
        yield Check(
            "perplexity at a loss rate of 20 % is less than 3 % higher than without losses",
            every((bool(np.isfinite(by_rate[0.2]).all()), stays_below(found, 3.0))),
            f"change in %: {found.text()}",
        )
    if text:
        changes = np.stack([*by_rate.values()])
        finite = np.isfinite(changes).all(axis=0)
        # Less the first row, so that the slope of equal values is 0 and no rounding error.
        known = np.where(finite, changes, 0.0)
        lines = np.polyfit(list(by_rate), known - known[0], 1)[0]
        slopes = mean_interval(np.where(finite, lines, math.nan))
        yield Check(
            "perplexity rises with the loss rate",
            exceeds(slopes),
            f"rise of the fitted line per 100 % of losses: {slopes.text()}",
        )


def _walks(measured: LossyMeasured) -> Iterator[Finding]:
    rates, walks = tuple(measured.walks), list(measured.walks.values())
    exact, printed = [pair_drift(rate) for rate in rates], [printed_pair_drift(rate) for rate in rates]
    rows = tuple(
        (f"{rate:.0%}", found, right, wrong, found / right)
        for rate, found, right, wrong in zip(rates, walks, exact, printed, strict=True)
    )
    yield Table(
        f"Drift between two copies of a random walk, in units of its squared step ({measured.study.workers} workers)",
        ("loss rate", "measured", "exact: 2p/(1-p²)", "as printed: 2p/(1+p)", "measured / exact"),
        rows,
    )
    yield Chart(
        "Drift between two copies compared with theory",
        "Owners move by independent steps. Packets of parameters are lost; packets of gradients are not.",
        "loss rate",
        "E[D²] / s²",
        (
            Line("measured", rates, walks),
            Line("exact", rates, exact, dashed=True),
            Line("as printed", rates, printed, dashed=True),
        ),
    )
    off = max(abs(row[4] - 1) for row in rows)
    # At the smallest rates, the two forms differ by less than the tolerance; at one rate, they must differ.
    printed_off = max(abs(found / wrong - 1) for found, wrong in zip(walks, printed, strict=True))
    yield Check(
        "drift follows the exact form, not the printed one (once)",
        off < TOLERANCE < printed_off,
        f"largest deviation from the exact form: {off:.1%}, from the printed one: {printed_off:.0%}",
    )
