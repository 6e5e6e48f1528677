"""From the reports of a step to the lines of its record: counts, frequencies and severities by site.

A report comes with its leading axes twin, data rank and model rank, then one per enclosing loop: the last is the layer,
those before it are the microstep. All twins hold the same rows of a lock-step; those of twin 0 are read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sdc.checksums import coverage
from sdc.faults import Events
from sdc.program import Reports
from sdc.twins import Mismatch, largest_severity, mean_frequency, mismatch_frequency, mismatch_severity

COUNTS = ("checked", "mismatched", "zero_reference", "nonfinite")
NOTABLE = ("mismatched", "unrepeated", "injected")
"""Counts any of which makes a line of `mismatches.jsonl`."""


def tally(mismatches: Reports, events: Reports, *, step: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a step's line has by site, and a row for each microstep, site and layer with a mismatch or an injection.

    `undecided` counts ranks on which no majority of three or more twins agreed, so that the reference was a guess;
    `unrepeated` counts digests that differed while a repetition of the step found nothing.
    """
    sites: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([*mismatches, *events]):
        layers = _by_layer(name, mismatches.get(name), events.get(name))
        rows += [{"step": step, **row} for row in layers if any(row.get(count) for count in NOTABLE)]
        sites[name] = _total(layers)
    return sites, rows


def total(mismatch: Mismatch) -> dict[str, Any]:
    """Elements checked and mismatched by a comparison outside loops, added over ranks and twins, and who differs."""
    rows = mismatch.difference
    found: dict[str, Any] = {"checked": int(rows.checked[0].sum()), "mismatched": int(rows.mismatched[0].sum())}
    if found["mismatched"]:
        by_rank = np.asarray(rows.mismatched[0])  # [data, model, twin]
        found["ranks"] = [
            {"twin": int(twin), "data": int(data), "model": int(model), "mismatched": int(by_rank[data, model, twin])}
            for data, model, twin in np.argwhere(by_rank)
        ]
    if undecided := int(np.sum(mismatch.undecided[0])):
        found["undecided"] = undecided
    return found


def _total(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    frequencies = [row["frequency"] for row in layers if row["frequency"] is not None]
    severity = largest_severity([row["severity"] for row in layers if row["severity"] is not None])
    counts = (*COUNTS, "injected", "undecided", *(["unrepeated"] if "unrepeated" in layers[0] else []))
    return {
        **{count: sum(row[count] for row in layers) for count in counts},
        "frequency": mean_frequency(frequencies) if frequencies else None,
        "severity": None if np.isnan(severity) else severity,
    }


def _by_layer(name: str, mismatch: Mismatch | None, event: Events | None) -> list[dict[str, Any]]:
    """One row per microstep and layer."""
    difference = undecided = None
    if mismatch is not None:  # [data, model, microstep, layer, twin]
        difference = {
            key: join_loops(np.asarray(value[0]), trailing=1) for key, value in mismatch.difference._asdict().items()
        }
        if mismatch.unrepeated is not None:
            difference["unrepeated"] = join_loops(np.asarray(mismatch.unrepeated[0]), trailing=1)
        undecided = join_loops(np.asarray(mismatch.undecided[0]), trailing=0)
    changed = None if event is None else join_loops(np.asarray(event.changed), trailing=0, leading=3)
    shape = difference["checked"].shape[2:4] if difference is not None else changed.shape[3:5]  # type: ignore[union-attr] # one of both is there
    rows = []
    for microstep, layer in np.ndindex(*shape):
        row: dict[str, Any] = {"microstep": microstep, "site": name, "layer": layer}
        row["injected"] = 0 if changed is None else int(changed[:, :, :, microstep, layer].sum())
        part = {} if difference is None else {key: value[:, :, microstep, layer] for key, value in difference.items()}
        row["undecided"] = 0 if undecided is None else int(undecided[:, :, microstep, layer].sum())
        rows.append({**row, **_figures(part)})
    return rows


def _figures(part: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Counts, equations (1) and (3), and the ranks that differ, from arrays [data, model, twin]."""
    if not part:
        return {**dict.fromkeys(COUNTS, 0), "frequency": None, "severity": None, "relative_max": None, "ranks": []}
    counted = part["mismatched"].astype(np.int64) - part["zero_reference"] - part["nonfinite"]
    frequency = mismatch_frequency(part["mismatched"], part["checked"])
    severity = mismatch_severity(part["relative_sum"], counted)
    apart = part["mismatched"] + part.get("unrepeated", np.zeros_like(part["mismatched"]))
    return {
        **{count: int(part[count].sum()) for count in (*COUNTS, "unrepeated") if count in part},
        "frequency": None if np.isnan(frequency) else frequency,
        "severity": None if np.isnan(severity) else severity,
        "relative_max": float(part["relative_max"].max()),
        "ranks": [_rank(part, counted, tuple(map(int, place))) for place in np.argwhere(apart)],
    }


def _rank(part: Mapping[str, np.ndarray], counted: np.ndarray, place: tuple[int, ...]) -> dict[str, Any]:
    """A device that differs."""
    data, model, twin = place
    mean = float(part["relative_sum"][place]) / int(counted[place]) if counted[place] else None
    row = {"twin": twin, "data": data, "model": model, "mismatched": int(part["mismatched"][place])}
    if "unrepeated" in part and part["unrepeated"][place]:
        row["unrepeated"] = int(part["unrepeated"][place])
    return row | {"relative_mean": mean, "relative_max": float(part["relative_max"][place])}


def join_loops(x: np.ndarray, *, trailing: int, leading: int = 2) -> np.ndarray:
    """Joins the axes of loops, between the leading and the trailing ones, into two: microstep and layer."""
    loops = x.shape[leading : x.ndim - trailing]
    layers = loops[-1] if loops else 1
    return x.reshape(*x.shape[:leading], -1, layers, *x.shape[x.ndim - trailing :])


FLAG_COUNTS = ("checked", "examined", "flagged", "confirmed", "corrected", "nonfinite")
MARGINS = ("margin", "first_margin")
AXES = ("twin", "data", "model", "microstep", "layer")


def tally_flags(flags: Reports, *, twins: bool) -> dict[str, Any]:
    """Summarizes the flags of one step for `steps.jsonl`."""
    sites: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, flag in flags.items():
        counts = {count: _by_rank(getattr(flag, count), twins) for count in FLAG_COUNTS}
        margin = _by_rank(flag.margin, twins)
        sites[name] = {
            **{count: int(values.sum()) for count, values in counts.items()},
            "margin": _largest(margin),
            "first_margin": _largest(_by_rank(flag.first_margin, twins)),
        }
        for index in map(tuple, np.argwhere(counts["flagged"])):
            row = {axis: int(at) for axis, at in zip(AXES, index, strict=True)}
            found = {count: int(counts[count][index]) for count in ("flagged", "confirmed", "corrected")}
            rows.append({"site": name, **row, **found, "margin": float(margin[index])})
            if flag.wrong is not None:
                places = [
                    _by_rank(part, twins, trailing=trailing)[index]
                    for part, trailing in zip(flag.wrong, (0, 1, 1), strict=True)
                ]
                known = min(int(places[0]), len(places[1]))
                rows[-1] |= {
                    "wrong": int(places[0]),
                    "elements": [int(element) for element in places[1][:known]],
                    "errors": [float(error) for error in places[2][:known]],
                }
    return {
        **{count: sum(site[count] for site in sites.values()) for count in FLAG_COUNTS},
        **{key: _largest(np.asarray([site[key] for site in sites.values()])) for key in MARGINS},
        "coverage": coverage(flags),
        "skipped": [
            {"site": one.site.name, "source": one.site.source, "reason": one.reason, "share": one.share}
            for one in flags.skipped
        ],
        "sites": sites,
        "rows": rows,
    }


def _largest(margins: np.ndarray) -> float:
    return float(margins.max(initial=0.0))


def _by_rank(values: Any, twins: bool, *, trailing: int = 0) -> np.ndarray:
    """Values with the axes twin, data, model, microstep and layer, and what trails."""
    x = np.asarray(values)
    return join_loops(x if twins else x[None], trailing=trailing, leading=3)
