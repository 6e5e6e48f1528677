"""Converts the reports of a step to lines of its record: counts, frequencies and severities by site.

The leading axes of a report are twin, data rank and model rank, followed by one axis per enclosing loop: the last loop
is over the layers, and the loops before it are over the microsteps. In lock-step, all twins have the same rows, so only
the rows of twin 0 are read.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sdc.checksums import coverage
from sdc.faults import Events
from sdc.program import Reports
from sdc.twins import Mismatch, largest_severity, mean_frequency, mismatch_frequency, mismatch_severity

COUNTS = ("checked", "mismatched", "zero_reference", "nonfinite")
NOTABLE = ("mismatched", "unrepeated", "injected")  # a nonzero count of any of these adds a line to `mismatches.jsonl`


def tally(mismatches: Reports[Any], events: Reports[Any], *, step: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the entries of a step's line by site, and a row for each microstep, site and layer with a mismatch or
    injection.

    `undecided` counts ranks on which three or more twins had no majority, so the reference was arbitrary; `unrepeated`
    counts digests that differed although a repetition of the step found no difference.
    """
    sites: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([*mismatches, *events]):
        layers = _by_layer(name, mismatches.get(name), events.get(name))
        rows += [{"step": step, **row} for row in layers if any(row.get(count) for count in NOTABLE)]
        frequencies = [row["frequency"] for row in layers if row["frequency"] is not None]
        severity = largest_severity([row["severity"] for row in layers if row["severity"] is not None])
        counts = (*COUNTS, "injected", "undecided", *(["unrepeated"] if "unrepeated" in layers[0] else []))
        sites[name] = {
            **{count: sum(row[count] for row in layers) for count in counts},
            "frequency": mean_frequency(frequencies) if frequencies else None,
            "severity": None if np.isnan(severity) else severity,
        }
    return sites, rows


def total(mismatch: Mismatch) -> dict[str, Any]:
    """Returns the numbers of elements checked and mismatched outside loops, summed over ranks and twins, and the ranks
    that differ."""
    checked, by_rank = (np.asarray(getattr(mismatch.difference, name)[0]) for name in ("checked", "mismatched"))
    found: dict[str, Any] = {"checked": int(checked.sum()), "mismatched": int(by_rank.sum())}
    if found["mismatched"]:
        found["ranks"] = [
            {"twin": int(twin), "data": int(data), "model": int(model), "mismatched": int(by_rank[data, model, twin])}
            for data, model, twin in np.argwhere(by_rank)
        ]
    if undecided := int(np.sum(mismatch.undecided[0])):
        found["undecided"] = undecided
    return found


def _by_layer(name: str, mismatch: Mismatch | None, event: Events | None) -> list[dict[str, Any]]:
    """Returns one row per microstep and layer: counts, equations (1) and (3), and the ranks that differ."""
    difference: dict[str, np.ndarray] = {}
    undecided = changed = None
    loops: tuple[int, ...] = ()  # microsteps and layers
    if mismatch is not None:  # [data, model, microstep, layer, twin]
        fields = mismatch.difference._asdict()
        fields |= {} if mismatch.unrepeated is None else {"unrepeated": mismatch.unrepeated}
        difference = {key: join_loops(np.asarray(value[0]), trailing=1) for key, value in fields.items()}
        undecided = join_loops(np.asarray(mismatch.undecided[0]), trailing=0)
        loops = undecided.shape[2:]
    if event is not None:
        changed = join_loops(np.asarray(event.changed), trailing=0, leading=3)
        loops = loops or changed.shape[3:]
    rows = []
    for microstep, layer in np.ndindex(*loops):
        row: dict[str, Any] = {
            "microstep": microstep,
            "site": name,
            "layer": layer,
            "injected": 0 if changed is None else int(changed[:, :, :, microstep, layer].sum()),
            "undecided": 0 if undecided is None else int(undecided[:, :, microstep, layer].sum()),
        }
        rows.append(row)
        if not difference:
            row |= {**dict.fromkeys(COUNTS, 0), "frequency": None, "severity": None, "relative_max": None, "ranks": []}
            continue
        part = {key: value[:, :, microstep, layer] for key, value in difference.items()}
        counted = part["mismatched"].astype(np.int64) - part["zero_reference"] - part["nonfinite"]
        frequency = mismatch_frequency(part["mismatched"], part["checked"])
        severity = mismatch_severity(part["relative_sum"], counted)
        apart = part["mismatched"] + part.get("unrepeated", np.zeros_like(part["mismatched"]))
        row |= {
            **{count: int(part[count].sum()) for count in (*COUNTS, "unrepeated") if count in part},
            "frequency": None if np.isnan(frequency) else frequency,
            "severity": None if np.isnan(severity) else severity,
            "relative_max": float(part["relative_max"].max()),
            "ranks": [_rank(part, counted, tuple(map(int, place))) for place in np.argwhere(apart)],
        }
    return rows


def _rank(part: Mapping[str, np.ndarray], counted: np.ndarray, place: tuple[int, ...]) -> dict[str, Any]:
    mean = float(part["relative_sum"][place]) / int(counted[place]) if counted[place] else None
    data, model, twin = place
    row = {"twin": twin, "data": data, "model": model, "mismatched": int(part["mismatched"][place])}
    if "unrepeated" in part and part["unrepeated"][place]:
        row["unrepeated"] = int(part["unrepeated"][place])
    return row | {"relative_mean": mean, "relative_max": float(part["relative_max"][place])}


def join_loops(x: np.ndarray, *, trailing: int, leading: int = 2) -> np.ndarray:
    """Merges the loop axes, which lie between the leading and the trailing axes, into two: microstep and layer."""
    loops = x.shape[leading : x.ndim - trailing]
    layers = loops[-1] if loops else 1
    return x.reshape(*x.shape[:leading], -1, layers, *x.shape[x.ndim - trailing :])


FLAG_COUNTS = ("checked", "examined", "flagged", "confirmed", "corrected", "nonfinite")
AXES = ("twin", "data", "model", "microstep", "layer")


def tally_flags(flags: Reports[Any], *, twins: bool) -> dict[str, Any]:
    """Returns a summary of the flags of one step, for `steps.jsonl`."""

    def by_rank(values: Any, trailing: int = 0) -> np.ndarray:
        """Returns values with the axes twin, data, model, microstep and layer, followed by the trailing axes."""
        x = np.asarray(values)
        return join_loops(x if twins else x[None], trailing=trailing, leading=3)

    sites: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, flag in flags.items():
        counts = {count: by_rank(getattr(flag, count)) for count in FLAG_COUNTS}
        margins = {key: by_rank(getattr(flag, key)) for key in ("margin", "first_margin")}
        sites[name] = {count: int(values.sum()) for count, values in counts.items()}
        sites[name] |= {key: float(values.max(initial=0.0)) for key, values in margins.items()}
        for index in map(tuple, np.argwhere(counts["flagged"])):
            row: dict[str, Any] = {"site": name, **{axis: int(at) for axis, at in zip(AXES, index, strict=True)}}
            row |= {count: int(counts[count][index]) for count in ("flagged", "confirmed", "corrected")}
            row["margin"] = float(margins["margin"][index])
            rows.append(row)
            if flag.wrong is not None:
                wrong, elements, errors = (
                    by_rank(part, trailing)[index] for part, trailing in zip(flag.wrong, (0, 1, 1), strict=True)
                )
                known = min(int(wrong), len(elements))
                row["wrong"] = int(wrong)
                row["elements"] = [int(element) for element in elements[:known]]
                row["errors"] = [float(error) for error in errors[:known]]
    return {
        **{count: sum(site[count] for site in sites.values()) for count in FLAG_COUNTS},
        **{
            key: float(np.max([site[key] for site in sites.values()], initial=0.0))
            for key in ("margin", "first_margin")
        },
        "coverage": coverage(flags),
        "skipped": [
            {"site": one.site.name, "source": one.site.source, "reason": one.reason, "share": one.share}
            for one in flags.skipped
        ],
        "sites": sites,
        "rows": rows,
    }
