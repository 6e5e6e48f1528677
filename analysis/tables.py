"""The tables of a run: frequencies, counts, ranks, checked matrix products, and aggregation."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sdc.schema import (
    Counts,
    GuardTotals,
    MismatchRow,
    ProductTotals,
    PublishedSite,
    RankRow,
    RunSummary,
    ShadowTotals,
    StepRow,
)
from sdc.verdict import limit

from .report import NOT_MEASURED, LeftOut, Table, filled, show
from .run_verdict import COMPARED, COUNTS, PRODUCTS
from .series import per_method, real, whole, worst
from .statistics import bootstrap_interval, frequency_upper_bound
from .summary import MARGINS, PLACE, SUBMODULES

FREQUENCIES, ELEMENTS = "Mismatch frequency and severity by submodule", "Elements by submodule"
CHECKED, UNCHECKED = "Checked matrix products", "Unchecked products"
FLAGGED, RANKS = "Flagged rows by product, layer and rank", "Mismatches by rank"
FIRST, TRAINING = "First mismatches", "Training"
EVIDENCE, FINDINGS = "Evidence of the guard", "Findings of the guard"
BRIEF = (FREQUENCIES, ELEMENTS, CHECKED, UNCHECKED, EVIDENCE, FINDINGS)
"""Tables shown on a terminal."""
MOST_QUIET = 12  # products without examined rows, in the table of checked products
MOST_FINDINGS, WEIGHTS = 20, {True: "proof", False: "suspicion"}
NOTHING = "no submodule was compared (this requires --sync compute)"
UNSEEN = "no mismatch at a submodule was recorded"
RESTS_ON = (
    "Intervals come from a block bootstrap over steps, which allows for bursts; if there are too few bursts, no "
    'interval is given. "Below" marks the upper bound for a run without a mismatch; this bound assumes that elements '
    "fail independently, and is weaker if mismatches come in bursts."
)


def submodules(summary: RunSummary, steps: Sequence[StepRow]) -> Table | LeftOut:
    """Returns the measured frequency and severity of each site, with published values if the run simulates a node."""
    if not any(site.checked for site in summary.sites.values()):
        return LeftOut(FREQUENCIES, NOTHING)
    published, expected = summary.published or {}, summary.expected or {}
    beside = ("published", "measured / published") if published else ()
    header = ("site", "frequency (2)", "95 % interval", *(["expected here"] if expected else []), *beside)
    rows = []
    for name, site in summary.sites.items():
        interval = _interval([row.sites[name] for row in steps if name in row.sites], site)
        known, likely = published.get(name, PublishedSite()), [show(expected.get(name))] if expected else []
        frequency, severity = (
            [show(there), NOT_MEASURED if here is None or not there else show(here / there)] if published else []
            for here, there in ((site.frequency, known.frequency), (site.severity, known.severity))
        )
        rows.append((name, show(site.frequency), interval, *likely, *frequency, show(site.severity), *severity))
    note = RESTS_ON
    if expected:
        note += " Expected here: mean over the planned steps, from the published mean and the bursts of the node."
    if published:
        note += (
            " Published: mean frequency and largest severity over 4,500 steps of that node in the study. Severities "
            "have a heavy tail, so the largest severity of a shorter run is usually smaller. Severe steps corrupt "
            "fewer elements than other steps; because steps differ in this way, the frequencies of a short run scatter "
            "more than their counts suggest."
        )
    return Table(FREQUENCIES, (*header, "severity (4)", *beside), tuple(rows), note)


def counts(summary: RunSummary) -> Table | LeftOut:
    """Returns the counts of elements from which frequencies are computed, and of injected elements, which are the
    ground truth of a simulation."""
    sites = summary.sites
    if not any(site.checked or site.injected for site in sites.values()):
        return LeftOut(ELEMENTS, NOTHING)
    lacking = {"checked": "not compared", **dict.fromkeys(("mismatched", "zero_reference", "nonfinite"), "-")}
    rows = [
        (
            name,
            *(lacking.get(key) if key in lacking and not site.checked else show(getattr(site, key)) for key in COUNTS),
        )
        for name, site in sites.items()
    ]
    note = ""
    if summary.simulated and any(site.checked for site in sites.values()):
        differ = [name for name, site in sites.items() if site.checked and site.mismatched != site.injected]
        note = f"Mismatched and injected counts differ at {', '.join(differ)}: the check or the injection is wrong."
        note = note if differ else "Mismatched and injected counts agree at every compared site."
    return Table(ELEMENTS, ("site", *(name.replace("_", " ") for name in COUNTS)), tuple(rows), note)


def whole_step(summary: RunSummary, steps: Sequence[StepRow]) -> Table | LeftOut:
    """Returns the results of the bitwise comparison of the gradients, and of that of the parameters and the optimizer
    state."""
    rows, free = [], summary.sync == "none"
    for part, name in COMPARED.items():
        total = getattr(summary, part)
        if total.checked:
            found = [] if free else [counts for row in steps if (counts := getattr(row, part))]
            interval = NOT_MEASURED if total.mismatched and not found else _interval(found, total)
            share = show(total.mismatched / total.checked)
            rows.append((name, show(total.checked), show(total.mismatched), share, interval))
    persists = (
        " Without synchronization, a difference persists and is counted again at every step, so no interval is given."
    )
    title, header = "Whole-step comparison", ("compared", "checked", "mismatched", "frequency", "95 % interval")
    note = f"Elements summed over steps. {RESTS_ON}{persists * free}"
    return filled(Table(title, header, tuple(rows), note), "no gradients or parameters were compared")


def training(summary: RunSummary) -> Table | LeftOut:
    """Returns the scalars of the training run."""
    loss = summary.final_loss
    names = [f"last loss, twin {twin}" for twin in range(len(loss))] if len(loss) > 1 else ["last loss"]
    # Twins can differ in the last bits: nine digits distinguish two float32 numbers.
    rows = [(name, show(value, digits=9)) for name, value in zip(names, loss, strict=False)]
    scalars = {
        "worst-case noise-to-signal (5)": summary.worst_noise_to_signal,
        "parameter difference ‖θ' - θ‖₂ after the last step": summary.parameter_difference,
        "seconds per step, median": summary.seconds_per_step,
    }
    rows += [(name, show(value)) for name, value in scalars.items() if value is not None]
    return filled(Table(TRAINING, ("quantity", "value"), tuple(rows)), "no step was completed")


def ranks(mismatches: Sequence[MismatchRow]) -> Table | LeftOut:
    """Returns mismatches by device, which locate the corruption on the mesh."""
    found: dict[tuple[str, str, str], list[tuple[str, RankRow]]] = defaultdict(list)
    for row in mismatches:
        for rank in row.ranks:
            if whole(rank.mismatched):
                found[show(rank.twin), show(rank.data), show(rank.model)].append((str(row.site), rank))
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
    return filled(Table(RANKS, header, rows), UNSEEN)


def first_mismatches(mismatches: Sequence[MismatchRow], limit: int = 10) -> Table | LeftOut:
    """Returns the first lines of `mismatches.jsonl` with a mismatch."""
    hits = [row for row in mismatches if whole(row.mismatched)]
    names = ("step", "microstep", "layer", "mismatched", "injected", "severity", "relative_max")
    order = {site: place for place, site in enumerate(SUBMODULES)}
    hits.sort(key=lambda row: (row.step, real(row.microstep) or 0, order.get(str(row.site), len(order))))
    rows = tuple((str(row.site), *(show(getattr(row, name)) for name in names)) for row in hits[:limit])
    note = f"{len(rows):,} of {len(hits):,} recorded mismatches; layers are numbered from 0."
    header = ("site", *(name.replace("_", " ") for name in names))
    return filled(Table(FIRST, header, rows, note), UNSEEN)


def products(found: ProductTotals | None) -> list[Table | LeftOut]:
    """Returns tables of the checked rows of matrix products, of the products that could not be checked, and of the
    flagged layers and ranks."""
    found = found or ProductTotals()
    margins = ("worst margin", "first tier's")
    order = sorted(found.sites.items(), key=lambda item: -(whole(item[1].flagged) or 0))
    quiet = [name for name, site in order if not whole(site.examined) and not whole(site.flagged)][MOST_QUIET:]
    keys = (*PRODUCTS, *MARGINS)
    checked = [(name, *(show(getattr(site, key)) for key in keys)) for name, site in order if name not in quiet]
    if quiet:
        rest = [found.sites[name] for name in quiet]
        total = [sum(whole(getattr(site, key)) or 0 for site in rest) for key in PRODUCTS]
        largest = [max(real(getattr(site, key)) or 0.0 for site in rest) for key in MARGINS]
        checked.append((f"{len(quiet):,} more products", *map(show, (*total, *largest))))
    unchecked = [(str(one.site), str(one.source), str(one.reason), show(one.share)) for one in found.skipped]
    placed = (*PLACE[1:], "flagged", "confirmed")
    flagged = [(str(place.site), *(show(getattr(place, key)) for key in placed)) for place in found.places[:20]]
    more = len(found.places) - len(flagged)
    note = (
        "Numbers of rows. Examined: rows that the first tier passed on. Confirmed: flagged rows that were correct when "
        "recomputed. Nonfinite: rows with non-finite inputs, which cannot be checked. Margin: largest |r| / bound in "
        "the deciding tier; rows with a margin above 1 are flagged, and 0 means that no row reached this tier. The "
        "first tier does not decide: it passes rows with a margin above 1 on for examination. The products with the "
        f"most flagged rows come first; beyond {MOST_QUIET} products without an examined row, further ones share a row."
    )
    share = (
        f"Checked: {show(found.coverage)} of the work of the selected products. If the work of an unchecked product is "
        "unknown, this share is 0."
    )
    elsewhere = f"The places with the most flagged rows; {more:,} more places are in steps.jsonl." if more else ""
    header = ("product", "line", "reason", "share of the step")
    return [
        filled(Table(CHECKED, ("product", *PRODUCTS, *margins), tuple(checked), note), "no step was completed"),
        filled(Table(UNCHECKED, header, tuple(unchecked), share), "every product was checked"),
        filled(Table(FLAGGED, ("product", *placed), tuple(flagged), elsewhere), "no row was flagged"),
    ]


def guard(found: GuardTotals | None, steps: int) -> list[Table | LeftOut]:
    """Returns the tables of what a guard found, and of what its layers of evidence did."""
    found = found or GuardTotals()
    shown = found.findings[:MOST_FINDINGS]
    cells = [
        (
            show(one.step),
            one.layer,
            one.what,
            ", ".join(one.devices) or NOT_MEASURED,
            WEIGHTS[bool(one.proof)],
        )
        for one in shown
    ]
    more = f"The first {len(shown)} of {len(found.findings):,}." if len(shown) < len(found.findings) else ""
    findings = Table(FINDINGS, ("step", "layer", "finding", "devices", "weight"), tuple(cells), more)
    if found.steps is None:
        return [filled(findings, "nothing was found so far"), LeftOut(EVIDENCE, "the run has not ended")]
    unwatched = max(0, steps - (whole(found.steps) or 0))
    rows = [
        (
            layer.name,
            layer.why_not or layer.compares,
            "not run" if layer.why_not and not layer.checks else show(layer.checks),
            NOT_MEASURED if (wrong := real(layer.most_wrong)) is None else show((wrong + unwatched) / max(steps, 1)),
        )
        for layer in found.layers
    ]
    note = (
        f"Checks took {100 * (real(found.overhead) or 0.0):.3g} % of the time of {show(found.steps)} steps, after "
        f"{show(found.start_up)} s of compiling and calibrating. Without a finding, the last column bounds the "
        "share of wrong steps of each device, in what the layer sees, with 95 % confidence."
    )
    if unwatched:
        note += f" {unwatched:,} steps before the run was resumed count as unchecked."
    header = ("layer", "compares", "checks", "wrong at most")
    return [filled(findings, "nothing was found"), Table(EVIDENCE, header, tuple(rows), note)]


def aggregation(steps: Sequence[StepRow], summary: RunSummary) -> list[Table]:
    """Returns a table of quantities for each aggregation method (`sdc train --aggregate`) of the run."""
    tables, quantity = [], ("quantity", "value")
    if (divergence := per_method(steps, "divergence")) is not None:
        found = [value for value in divergence if not np.isnan(value)]
        cells = [("largest divergence measured", show(max(found)) if found else "not measured: no synchronization")]
        last = steps[-1].aggregation or {}
        if "period" in last and (periods := per_method(steps, "period")) is not None:
            cells += [
                ("synchronizations", show(last.get("synchronizations"))),
                ("period, first and last", f"{show(periods[0])}, {show(periods[-1])}"),
                ("shortest and longest period", f"{show(min(periods))}, {show(max(periods))}"),
            ]
        tables.append(Table("Synchronization of parameters", quantity, tuple(cells)))
    if done := [row.aggregation["completed"] for row in steps if row.aggregation and "completed" in row.aggregation]:
        counts = np.asarray(done, np.float64)
        rows = [
            (f"data rank {rank}", show(float(each.mean())), show(int(each.min())), show(int(each.max())))
            for rank, each in enumerate(counts.T)
        ]
        skipped = int((counts.sum(axis=1) == 0).sum())
        note = f"{skipped} steps are omitted because no rank completed a micro-batch in them." if skipped else ""
        header = ("rank", "mean", "least", "most")
        tables.append(Table("Completed micro-batches per step", header, tuple(rows), note))
    if per_method(steps, "gradient_loss") is not None:
        names = {
            "gradient_loss": "share of gradient packets lost",
            "parameter_loss": "share of parameter packets lost",
            "unreduced": "packets of which no copy arrived",
            "owner_drift": "mean square drift of copies from their owners",
            "pair_drift": "mean square drift between copies",  # no value with two workers: only one copy
        }
        means = {name: np.asarray(per_method(steps, key) or [np.nan]) for key, name in names.items()}
        cells = [(name, show(float(np.nanmean(each)))) for name, each in means.items() if np.isfinite(each).any()]
        tables.append(Table("Lost packets: mean over the steps", quantity, tuple(cells)))
    shadow = summary.shadow or ShadowTotals()
    named = [
        (f"data rank {rank}", show(share), "wrong" if rank in shadow.suspects else NOT_MEASURED)
        for rank, share in enumerate(shadow.shares)
    ]
    note = f"{show(shadow.differences)} of {show(shadow.comparisons)} comparisons differed."
    tables.append(Table("Ranks compared by the shadow", ("rank", "share that differed", "named"), tuple(named), note))
    return [table for table in tables if table.rows]


def _interval(counts: Sequence[Counts], total: Counts) -> str:
    """Returns the confidence interval of a frequency, from the counts of each step and their total, or the reason why
    the interval is unknown."""
    if not total.checked:
        return NOT_MEASURED
    if not total.mismatched:
        return f"below {limit(frequency_upper_bound(0, int(total.checked)), 3, up=True)}"
    pairs = [(whole(row.mismatched), whole(row.checked)) for row in counts]
    sound = [(hit, of) for hit, of in pairs if hit is not None and of is not None and hit <= of]
    limits = bootstrap_interval([hit for hit, _ in sound], [of for _, of in sound])
    return "too few steps for an interval" if limits is None else f"{show(limits[0])} to {show(limits[1])}"
