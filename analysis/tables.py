"""The tables of a run: frequencies, counts, ranks, checked products."""

from collections.abc import Sequence

from sdc.schema import (
    Counts,
    MismatchRow,
    Number,
    ProductTotals,
    PublishedSite,
    RankRow,
    RunSummary,
    SiteTotals,
    StepRow,
)

from .report import NOT_MEASURED, LeftOut, Table, show
from .run_verdict import COMPARED, COUNTS, PRODUCTS
from .series import real, whole, worst
from .statistics import bootstrap_interval, frequency_upper_bound
from .summary import MARGINS, PLACE, SUBMODULES

FREQUENCIES, ELEMENTS = "Mismatch frequency and severity by submodule", "Elements by submodule"
CHECKED, UNCHECKED = "Checked matrix products", "Products that were not checked"
FLAGGED, RANKS = "Flagged rows by product, layer and rank", "Mismatches by rank"
FIRST, TRAINING = "First mismatches", "Training"
BRIEF = (FREQUENCIES, ELEMENTS, CHECKED, UNCHECKED)
"""What a terminal shows."""
TOO_FEW = "too few steps with a mismatch"
NOTHING = "no submodule was compared (that needs --sync compute)"
UNSEEN = "no mismatch at a submodule was recorded"
SHOWN = 20
"""Places of flags that a report lists."""
RESTS_ON = (
    "Intervals are of the block bootstrap over steps, which allows for bursts; with too few bursts there is none. "
    "Below: what a run without a mismatch says if elements fail independently. With bursts it says less."
)


def submodules(summary: RunSummary, steps: Sequence[StepRow]) -> Table | LeftOut:
    """Measured frequency and severity of each site, beside the published values where the run simulates a node."""
    sites = {**summary.submodules, **summary.other_sites}
    if not any(site.checked for site in sites.values()):
        return LeftOut(FREQUENCIES, NOTHING)
    published, expected = summary.published or {}, summary.expected or {}
    beside = ("published", "measured / published") if published else ()
    header = ("site", "frequency (2)", "95 % interval", *(["expected here"] if expected else []), *beside)
    rows = []
    for name, site in sites.items():
        known = published.get(name, PublishedSite())
        interval = _interval([row.sites[name] for row in steps if name in row.sites], site)
        row = [name, show(site.frequency), interval, *([show(expected.get(name))] if expected else [])]
        row += _beside(site.frequency, known.frequency) if published else []
        row += [show(site.severity), *(_beside(site.severity, known.severity) if published else [])]
        rows.append(tuple(row))
    note = RESTS_ON
    if expected:
        note += " Expected here: the published mean, shaped in time as the node's bursts are, over the planned steps."
    if published:
        note += (
            " Published: mean frequency, and largest severity of 4,500 steps, of that node in the study. Severities "
            "have a heavy tail, so that a run of fewer steps meets milder ones; and severe steps hit few elements, so "
            "that frequencies of a short run scatter more than their counts would let expect."
        )
    return Table(FREQUENCIES, (*header, "severity (4)", *beside), tuple(rows), note)


def counts(summary: RunSummary) -> Table | LeftOut:
    """Element counts behind the frequencies, and the injected ones, which are the ground truth of a simulation."""
    sites = {**summary.submodules, **summary.other_sites}
    if not any(site.checked or site.injected for site in sites.values()):
        return LeftOut(ELEMENTS, NOTHING)
    rows = tuple((name, *_counted(site)) for name, site in sites.items())
    note = ""
    if any(site.checked for site in sites.values()) and summary.simulated:
        differ = [name for name, site in sites.items() if site.checked and site.mismatched != site.injected]
        note = f"Mismatched differs from injected at {', '.join(differ)}: the check or the injection is at fault."
        note = note if differ else "Mismatched equals injected at every site that was compared."
    return Table(ELEMENTS, ("site", *(name.replace("_", " ") for name in COUNTS)), rows, note)


def _counted(site: SiteTotals) -> list[str]:
    """The counts of a site: what was not compared is not nought."""
    measured = ("mismatched", "zero_reference", "nonfinite")
    compared = {"checked": "not compared", **dict.fromkeys(measured, "-")} if not site.checked else {}
    return [compared.get(key, show(getattr(site, key))) for key in COUNTS]


def whole_step(summary: RunSummary, steps: Sequence[StepRow]) -> Table | LeftOut:
    """Bitwise comparison of gradients, and of parameters with the optimizer state."""
    rows = []
    for part, name in COMPARED.items():
        total = getattr(summary, part)
        if total.checked:
            counts = [] if summary.sync == "none" else [found for row in steps if (found := getattr(row, part))]
            interval = NOT_MEASURED if total.mismatched and not counts else _interval(counts, total)
            share = show(total.mismatched / total.checked)
            rows.append((name, show(total.checked), show(total.mismatched), share, interval))
    header = ("compared", "checked", "mismatched", "frequency", "95 % interval")
    note = f"Elements summed over steps. {RESTS_ON}"
    if summary.sync == "none":
        note += (
            " Without synchronization a difference persists and is counted again at every step, so that there is no "
            "interval either."
        )
    title = "Whole-step comparison"
    if not rows:
        return LeftOut(title, "no gradient and no parameter was compared")
    return Table(title, header, tuple(rows), note)


def training(summary: RunSummary) -> Table | LeftOut:
    """Scalars of the training run."""
    loss = summary.final_loss
    names = [f"last loss, twin {twin}" for twin in range(len(loss))] if len(loss) > 1 else ["last loss"]
    # Twins can differ in the last bits: nine digits tell two float32 numbers apart.
    rows = [(name, show(value, digits=9)) for name, value in zip(names, loss, strict=False)]
    rows += [
        (name, show(value))
        for key, name in (
            ("worst_noise_to_signal", "worst-case noise-to-signal (5)"),
            ("parameter_difference", "parameter difference ‖θ' - θ‖₂ after the last step"),
            ("seconds_per_step", "seconds per step, median"),
        )
        if (value := getattr(summary, key)) is not None
    ]
    return Table(TRAINING, ("quantity", "value"), tuple(rows)) if rows else LeftOut(TRAINING, "no step was done")


def ranks(mismatches: Sequence[MismatchRow]) -> Table | LeftOut:
    """Mismatches by device: where on the mesh the corruption sits."""
    found: dict[tuple[str, str, str], list[tuple[str, RankRow]]] = {}
    for row in mismatches:
        for rank in row.ranks:
            if whole(rank.mismatched):
                place = (show(rank.twin), show(rank.data), show(rank.model))
                found.setdefault(place, []).append((str(row.site), rank))
    rows = tuple(
        (
            " / ".join(place),
            show(sum(whole(rank.mismatched) or 0 for _, rank in hits)),
            show(worst(rank.relative_max for _, rank in hits)),
            ", ".join(sorted({site for site, _ in hits})),
        )
        for place, hits in sorted(found.items())
    )
    header = ("twin / data / model", "mismatched", "largest relative error", "sites")
    return Table(RANKS, header, rows) if rows else LeftOut(RANKS, UNSEEN)


def first_mismatches(mismatches: Sequence[MismatchRow], limit: int = 10) -> Table | LeftOut:
    """The first lines of `mismatches.jsonl` in which something mismatched."""
    hits = [row for row in mismatches if whole(row.mismatched)]
    names = ("step", "microstep", "layer", "mismatched", "injected", "severity", "relative_max")
    order = {site: place for place, site in enumerate(SUBMODULES)}
    hits.sort(key=lambda row: (row.step, real(row.microstep) or 0, order.get(str(row.site), len(order))))
    rows = tuple((str(row.site), *(show(getattr(row, name)) for name in names)) for row in hits[:limit])
    note = f"{len(rows):,} of {len(hits):,} recorded; layers count from 0."
    header = ("site", *(name.replace("_", " ") for name in names))
    return Table(FIRST, header, rows, note) if rows else LeftOut(FIRST, UNSEEN)


def products(found: ProductTotals | None) -> Table | LeftOut:
    """Rows checked and flagged by product."""
    if found is None or not found.sites:
        return LeftOut(CHECKED, "no step was done")
    rows = [(name, *(show(getattr(site, key)) for key in (*PRODUCTS, *MARGINS))) for name, site in found.sites.items()]
    return Table(
        CHECKED,
        ("product", *PRODUCTS, "worst margin", "first tier's"),
        tuple(rows),
        "Rows. Examined: passed on by the first tier. Confirmed: flagged, and right when computed again. Nonfinite: "
        "rows of inputs that are not finite, of which nothing can be said. Margin: largest |r| / bound in the tier "
        "that decides; above 1 is a flag, 0 means that no row came so far. The first tier decides nothing: rows above "
        "1 are examined.",
    )


def flagged_places(found: ProductTotals | None) -> Table | LeftOut:
    """The layers and ranks that were flagged."""
    if found is None or not found.places:
        return LeftOut(FLAGGED, "no row was flagged")
    places = found.places[:SHOWN]
    rows = [
        (str(place.site), *(show(getattr(place, key)) for key in (*PLACE[1:], "flagged", "confirmed")))
        for place in places
    ]
    more = len(found.places) - len(places)
    return Table(
        FLAGGED,
        ("product", *PLACE[1:], "flagged", "confirmed"),
        tuple(rows),
        f"The most often flagged; {more:,} more are in steps.jsonl." if more else "",
    )


def unchecked_products(found: ProductTotals | None) -> Table | LeftOut:
    """The products that could not be checked."""
    if found is None or not found.skipped:
        return LeftOut(UNCHECKED, "every product was checked")
    rows = [(str(one.site), str(one.source), str(one.reason), show(one.share)) for one in found.skipped]
    return Table(
        UNCHECKED,
        ("product", "line", "reason", "share of the step"),
        tuple(rows),
        f"Checked: {show(found.coverage)} of the work of the products that were asked for. Products of unknown "
        "work count as all of it.",
    )


def _interval(counts: Sequence[Counts], total: Counts) -> str:
    """The interval of a frequency, from the counts of each step and their total, or why there is none."""
    if not total.checked:
        return NOT_MEASURED
    if not total.mismatched:
        return f"below {show(frequency_upper_bound(0, int(total.checked)))}"
    pairs = [(whole(row.mismatched), whole(row.checked)) for row in counts]
    sound = [(hit, of) for hit, of in pairs if hit is not None and of is not None and hit <= of]
    limits = bootstrap_interval([hit for hit, _ in sound], [of for _, of in sound])
    return TOO_FEW if limits is None else f"{show(limits[0])} to {show(limits[1])}"


def _beside(measured: Number, published: Number) -> list[str]:
    """The published value and the ratio of the measured one to it."""
    return [show(published), NOT_MEASURED if measured is None or not published else show(measured / published)]
