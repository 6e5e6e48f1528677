"""What a run with a way of aggregation (`sdc train --aggregate`) says of it: tables and figures of the report."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from sdc.schema import RunSummary, ShadowTotals, StepRow
from sdc.train.studies import pair_drift

from .report import NOT_MEASURED, Chart, Figure, LeftOut, Line, Table, line_figure, show
from .series import real, step_numbers

Row: TypeAlias = dict[str, Any]
"""What each method says of a step is its own."""


def tables(steps: Sequence[StepRow], summary: RunSummary) -> list[Table]:
    """Tables of what the methods did over the run."""
    rows = _rows(steps)
    found = [
        *(make(rows) for make in (_synchronization, _completed, _losses)),
        _ranks(summary.shadow or ShadowTotals()),
    ]
    return [table for table in found if table is not None and table.rows]


def figures(steps: Sequence[StepRow]) -> list[Figure | LeftOut]:
    """Figures of what the methods did, step by step."""
    rows = _rows(steps)
    x = [float(step) for step in step_numbers(steps)]
    charts: list[Chart] = []

    def add(title: str, caption: str, quantity: str, *lines: Line) -> None:
        charts.append(Chart(title, caption, "step", quantity, lines))

    if _has(rows, "divergence"):
        add(
            "Divergence of replicas", "The largest over the data ranks. Not measured before the first synchronization.",
            "‖mean θ - θ_m‖",
            Line("measured at the last synchronization", x, _each(rows, "divergence", max)),
            Line("expected now", x, _each(rows, "expected_divergence", max), dashed=True),
        )  # fmt: skip
    if _has(rows, "period"):
        line = Line("H", x, _each(rows, "period", _one))
        add("Period of synchronization", "Chosen by the signal-to-noise ratio.", "steps", line)
    if _has(rows, "completed"):
        means = (Line(name, x, _each(rows, "completed", of)) for name, of in (("least", min), ("most", max)))
        add("Completed micro-batches", "By the slowest and the fastest rank.", "micro-batches", *means)
    if _has(rows, "pair_drift"):
        drift, move = (np.asarray(_each(rows, name, _one)) for name in ("pair_drift", "move"))
        with np.errstate(divide="ignore", invalid="ignore"):
            lines = [Line("measured", x, (drift / move).tolist())]
        rate = float(np.nanmean(_each(rows, "parameter_loss", _one)))
        if 0 <= rate < 1:
            lines.append(Line("random walk", x, [pair_drift(rate)] * len(x), dashed=True))
        caption = "In squares of an owner's mean move; theory at the mean loss rate."
        add("Drift between copies", caption, "drift / move²", *lines)
    if _has(rows, "differed"):
        found = np.cumsum([bool(row.get("differed")) for row in rows]).astype(float).tolist()
        add(
            "Differences found by the shadow", "Comparisons that differed, added up.", "differences",
            Line("found", x, found),
        )  # fmt: skip
    return list(map(line_figure, charts))


def _rows(steps: Sequence[StepRow]) -> list[Row]:
    """What was recorded of the aggregation."""
    return [row.aggregation or {} for row in steps]


def _synchronization(rows: Sequence[Row]) -> Table | None:
    if not _has(rows, "divergence"):
        return None
    last = rows[-1]
    found = [value for value in _each(rows, "divergence", max) if not np.isnan(value)]
    cells = [("largest divergence measured", show(max(found)) if found else "not measured: no synchronization")]
    if "period" in last:
        periods = _each(rows, "period", _one)
        cells += [
            ("synchronizations", show(last.get("synchronizations"))),
            ("period, first and last", f"{show(periods[0])}, {show(periods[-1])}"),
            ("shortest and longest period", f"{show(min(periods))}, {show(max(periods))}"),
        ]
    return Table("Synchronization of parameters", ("quantity", "value"), tuple(cells))


def _completed(rows: Sequence[Row]) -> Table | None:
    if not _has(rows, "completed"):
        return None
    counts = np.asarray([row["completed"] for row in rows if "completed" in row], np.float64)
    cells = tuple(
        (f"data rank {rank}", show(float(mean)), show(int(least)), show(int(most)))
        for rank, (mean, least, most) in enumerate(
            zip(counts.mean(axis=0), counts.min(axis=0), counts.max(axis=0), strict=True)
        )
    )
    skipped = int((counts.sum(axis=1) == 0).sum())
    note = f"{skipped} steps were left out: no rank completed anything." if skipped else ""
    return Table("Completed micro-batches a step", ("rank", "mean", "least", "most"), cells, note)


def _losses(rows: Sequence[Row]) -> Table | None:
    if not _has(rows, "gradient_loss"):
        return None
    names = {
        "gradient_loss": "packets of gradients lost, share",
        "parameter_loss": "packets of parameters lost, share",
        "unreduced": "packets of which nothing arrived",
        "owner_drift": "drift of copies from their owners, mean square",
        "pair_drift": "drift between copies, mean square",
    }
    means = {key: np.asarray(_each(rows, key, _one)) for key in names}
    # With two workers there is but one copy, and no drift between copies.
    cells = tuple(
        (name, show(float(np.nanmean(means[key])))) for key, name in names.items() if np.isfinite(means[key]).any()
    )
    return Table("Lost packets: mean over the steps", ("quantity", "value"), cells)


def _ranks(shadow: ShadowTotals) -> Table | None:
    cells = tuple(
        (f"data rank {rank}", show(share), "wrong" if rank in shadow.suspects else NOT_MEASURED)
        for rank, share in enumerate(shadow.shares)
    )
    note = f"{show(shadow.differences)} of {show(shadow.comparisons)} comparisons differed."
    return Table("Ranks compared by the shadow", ("rank", "share that differed", "named"), cells, note)


def _has(rows: Sequence[Row], name: str) -> bool:
    return bool(rows) and any(name in row for row in rows)


def _each(rows: Sequence[Row], name: str, of: Callable[[Any], Any]) -> list[float]:
    """One number for each step, NaN where the line has none."""
    values = []
    for row in rows:
        value = row.get(name)
        known = [n for item in (value if isinstance(value, list) else [value]) if (n := real(item)) is not None]
        values.append(float(of(known)) if known else float("nan"))
    return values


def _one(values: Sequence[float]) -> float:
    return values[0]
