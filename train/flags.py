"""From the flags of a run to the lines of its record."""

from typing import Any

import numpy as np

from sdc.checksums import coverage
from sdc.program import Reports

from .tally import join_loops

COUNTS = ("checked", "examined", "flagged", "confirmed", "corrected", "nonfinite")
MARGINS = ("margin", "first_margin")
AXES = ("twin", "data", "model", "microstep", "layer")


def tally_flags(flags: Reports, *, twins: bool) -> dict[str, Any]:
    """Summarizes the flags of one step for `steps.jsonl`.

    Args:
        flags: the reports of `sdc.abft`, as NumPy arrays, with leading axes twin (if there are twins), data rank and
            model rank, then one per enclosing loop: the last is the layer, those before it are the microstep.
        twins: whether there are twins.

    Returns:
        Totals and the largest margin, the same by site, and `rows`: one per site, rank, microstep and layer with a
        flag, with the first wrong elements where they were located; `coverage`, and the products that were `skipped`.
    """
    sites: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, flag in flags.items():
        counts = {count: _by_rank(getattr(flag, count), twins) for count in COUNTS}
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
        **{count: sum(site[count] for site in sites.values()) for count in COUNTS},
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
