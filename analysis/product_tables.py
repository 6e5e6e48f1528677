"""Tables and the figure of what the checks of matrix products found."""

from collections.abc import Sequence

import numpy as np

from .canvas import LeftOut, Picture, canvas
from .figures import draw_curves
from .products import COUNTS, MARGINS, PLACE
from .series import Row, count, mapping, number, sequence
from .tables import Table, show

SHOWN = 20
"""Places of flags that a report lists."""
LEFT = ("site", "source", "reason")


def by_site(found: Row | None) -> Table | None:
    """Rows checked and flagged by product."""
    if found is None:
        return None
    rows = [
        (name, *(show(site[key]) for key in COUNTS), *(show(site.get(key)) for key in MARGINS))
        for name, site in found["sites"].items()
    ]
    return Table(
        "Checked matrix products",
        ("product", *COUNTS, "worst margin", "first tier's"),
        tuple(rows),
        "Rows. Examined: passed on by the first tier. Confirmed: flagged, and right when computed again. Nonfinite: "
        "rows of inputs that are not finite, of which nothing can be said. Margin: largest |r| / bound in the tier "
        "that decides; above 1 is a flag, 0 means that no row came so far. The first tier decides nothing: rows above "
        "1 are examined.",
    )


def by_place(found: Row | None) -> Table | None:
    """The layers and ranks that were flagged."""
    if found is None:
        return None
    places = found["places"][:SHOWN]
    rows = [
        (str(place["site"]), *(show(place[key]) for key in (*PLACE[1:], "flagged", "confirmed"))) for place in places
    ]
    more = len(found["places"]) - len(places)
    return Table(
        "Flagged rows by product, layer and rank",
        ("product", *PLACE[1:], "flagged", "confirmed"),
        tuple(rows),
        f"The most often flagged; {more:,} more are in steps.jsonl." if more else "",
    )


def skipped(found: Row | None) -> Table | None:
    """The products that could not be checked."""
    if found is None:
        return None
    left = [mapping(one) for one in sequence(found.get("skipped"))]
    rows = [(*(str(one.get(key)) for key in LEFT), show(one.get("share"))) for one in left]
    return Table(
        "Products that were not checked",
        ("product", "line", "reason", "share of the step"),
        tuple(rows),
        f"Checked: {show(found.get('coverage'))} of the work of the products that were asked for. Products of unknown "
        "work count as all of it.",
    )


def flags_over_time(steps: Sequence[Row], *, mark: str) -> Picture | LeftOut:
    """Share of the rows that were flagged at each step, by pass (the study's figure 10)."""
    title = "Flagged rows over time"
    lines = [mapping(row.get("abft")) for row in steps]
    if not any(lines):
        return LeftOut(title, "no matrix product was checked (that needs --abft)")
    if not any(count(line.get("flagged")) for line in lines):
        return LeftOut(title, "no row of a matrix product was flagged at any step")
    shares = {way: np.asarray([_share(line, way) for line in lines]) for way in ("fwd", "remat", "bwd")}
    with canvas("flags", mark) as drawing:
        draw_curves(drawing, steps, shares, "flagged / checked rows", positive=True)
    return drawing.picture(
        title, "Forward, recomputed and backward products, over all ranks. A step without a flag has no point."
    )


def _share(line: Row, way: str) -> float:
    found = [mapping(site) for name, site in mapping(line.get("sites")).items() if name.startswith(f"{way}/")]
    flagged, checked = (sum(number(site.get(key)) or 0 for site in found) for key in ("flagged", "checked"))
    return flagged / checked if checked else 0.0
