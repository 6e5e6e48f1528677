"""The page of a campaign."""

from collections.abc import Mapping
from typing import Any

from sdc.campaigns import LEAST_FACTOR, LEAST_RISE, OUTCOMES
from sdc.records import Contents
from sdc.schema import CampaignManifest, CampaignSummary, GroupTotals, Number, Share

from . import campaign_figures as figures
from .campaigns import GROUPS
from .report import NOT_MEASURED, Action, Definition, Headline, LeftOut, Report, Table, marked, record_page, show

SIMULATED = "simulated faults"
LONGEST = 25
"""Rows of a table; what is left out is in `summary.json`."""

SOURCE = "L and state: of the clean run at the same step; primes: of the struck run."


def build(campaign: Contents, summary: CampaignSummary) -> Report:
    """Collects the text, tables and figures of a campaign's report."""
    manifest = campaign.campaign
    outcomes, detectors = _outcomes(summary), _detectors(summary)
    groups = [_group(summary, name) for name in GROUPS if name != "site"] + [_sites(summary)]
    return record_page(
        campaign.manifest,
        mark=SIMULATED,
        kind="campaign",
        title=campaign.path.resolve().name,
        verdict=None,
        label="CAMPAIGN" + ("" if summary.complete else ", NOT ENDED"),
        headline=_headline(summary),
        simulated="every injection is a fault that was made on purpose, on sound hardware",
        faults=manifest.faults,
        notes=_notes(summary),
        facts=_facts(manifest, summary),
        measured=[outcomes, detectors, *groups],
        drawn=[
            figures.bits(summary), figures.by_group(summary, "layer"), figures.operations(summary),
            figures.by_group(summary, "phase"), figures.latency(summary),
        ],
        settings={
            "Data and thresholds": {key: campaign.manifest.get(key) for key in ("data", "seed", "thresholds")},
            "Configuration": campaign.manifest.get("config"),
        },
        definitions=definitions(manifest.thresholds),
        about=(SOURCE, "Intervals take injections to be independent; they are spread more evenly than that."),
        brief=[marked(outcomes, SIMULATED), marked(detectors, SIMULATED)],
    )  # fmt: skip


def _headline(summary: CampaignSummary) -> Headline:
    worst = max(
        summary.groups["operation"].items(),
        key=lambda item: (item[1].harm.share or 0, item[1].harm.count),
        default=None,
    )
    harmful = worst and worst[1].harm.count
    operation = "no operation was harmed"
    if worst and harmful:
        operation = f"most harmed: {worst[0]} ({show(harmful)} of its {show(worst[1].injections)} injections)"
    best = max(
        ((name, entry) for name, entry in summary.detectors.items() if name != "fingerprint"),
        key=lambda item: item[1].of_harmful.count,
        default=None,
    )
    actions = []
    if not summary.complete:
        actions.append(
            Action("Let it go on, or resume it", "Shares are of what is on record so far; --resume does the rest.")
        )
    if harmful:
        actions.append(Action("Protect what is harmed most", "By checked products (--abft), twins, or more precision."))
    if best and best[1].of_harmful.count:
        of = best[1].of_harmful
        found = f"It found {show(of.count)} of the {show(of.of)} harmful injections without a recorded trace."
        actions.append(Action(f"Watch the {best[0].replace('_', ' ')}", found))
    if not actions:
        actions.append(Action("Inject more, or elsewhere", "None of these injections harmed training."))
    return Headline(
        str(summary.reason),
        "none: simulated on sound hardware, so this says nothing about a device",
        operation,
        f"steps until the loss changed visibly, median: {_visible(summary)}",
        "simulated, all of it",
        tuple(actions),
    )


def definitions(thresholds: Mapping[str, Number]) -> tuple[Definition, ...]:
    """What outcomes, quantities and detectors are, with the thresholds of the record."""
    spike, visible, rise, factor = (show(thresholds.get(name)) for name in ("spike", "visible", "rise", "factor"))
    return (
        Definition(
            "Outcome: masked", "state' = state, bit for bit", "The state after the struck step is the clean run's."
        ),
        Definition(
            "Outcome: benign drift",
            f"(L' - L) / L ≤ {spike} at every followed step",
            "The state differs, but no loss exceeds the clean one by more than that while followed. What goes wrong "
            "more slowly counts as benign.",
        ),
        Definition(
            "Outcome: loss spike",
            f"some (L' - L) / L > {spike}, the last one not",
            "The loss exceeded the clean one by more than that, but came back under it by the last followed step.",
        ),
        Definition(
            "Outcome: divergence", f"the last (L' - L) / L > {spike}", "Still above it at the last followed step."
        ),
        Definition(
            "Outcome: NaN or infinity", "not finite", "A loss, a gradient norm or the state became NaN or infinite."
        ),
        Definition(
            "Outcome: not reached",
            "not executed",
            "The struck operation lies in a branch that was not taken. All other shares are conditional on injections "
            "that reached their site.",
        ),
        Definition("Vulnerability", "1 - masked / reached", "Exact (Clopper-Pearson) intervals, 95 %."),
        Definition("Harm", "(spike + divergence + NaN or infinity) / reached", "Intervals as above."),
        Definition(
            "Visible loss change", f"|L' - L| / L > {visible}", "Latencies are steps since the struck one, from 0."
        ),
        Definition(
            "Phase",
            "fwd | bwd | remat | jvp | update | memory",
            "Forward; backward; forward done again for the backward pass; tangents of forward-mode derivatives; what "
            "is outside of derivatives, such as the optimizer; an array that the step takes or returns.",
        ),
        Definition("Detector: fingerprint", "digest' ≠ digest", "Needs a recorded trace of the same program."),
        Definition(
            "Detector: ABFT", "|r| / bound > 1", "In a row of a matrix product of the struck step; with --abft only."
        ),
        Definition("Detector: non-finite", "NaN or infinity", "In a loss, a gradient norm or the state."),
        Definition(
            "Detector: loss spike",
            f"L'_t - L'_(t-1) > {rise}",
            f"Twice the largest rise of the clean run, at least {LEAST_RISE:g} of its mean loss: no false alarm on it.",
        ),
        Definition(
            "Detector: gradient-norm spike",
            f"‖g'_t‖ / ‖g'_(t-1)‖ > {factor}",
            f"Twice the largest factor of the clean run, at least {LEAST_FACTOR:g}: no false alarm on it.",
        ),
        Definition(
            "Detector: history bound",
            "|m| ≤ c (1 - β₁ᵗ), v ≤ c² (1 - β₂ᵗ)",
            "Fires where it is broken: no sound step with gradients clipped to norm c can exceed it (after He et al., "
            "ISCA 2023).",
        ),
    )


def _notes(summary: CampaignSummary) -> list[str]:
    if summary.complete:
        return []
    return [f"This campaign has not ended: {summary.done:,} of {summary.planned:,} injections are on record."]


def _facts(manifest: CampaignManifest, summary: CampaignSummary) -> list[tuple[str, Any]]:
    return [
        ("injections", f"{summary.done:,} of {summary.planned:,}"),
        ("sites", manifest.sites),
        ("selector", manifest.where),
        ("faults", ", ".join(manifest.faults)),
        ("clean run", f"{show(manifest.steps)} steps"),
        ("followed", f"{show(manifest.follow)} steps"),
        ("started", manifest.created),
        ("median steps to a visible loss change", _visible(summary)),
    ]


def _visible(summary: CampaignSummary) -> str:
    hits = summary.visible
    if hits is None or summary.steps_to_visible is None:
        return "none was visible"
    return f"{show(summary.steps_to_visible)} ({hits.count:,} of the {hits.of:,} not masked had one)"


def _outcomes(summary: CampaignSummary) -> Table:
    rows = [(name.replace("_", " "), *_share(summary.outcomes[name])) for name in OUTCOMES]
    rows += [(name, *_share(getattr(summary, name))) for name in ("vulnerability", "harm")]
    note = (
        f"Shares of the {summary.reached:,} injections that reached their site; not reached: of all. In this and "
        "all tables intervals are exact (Clopper-Pearson)."
    )
    return Table("Outcomes", ("outcome", "injections", "share", "95 % interval"), tuple(rows), note)


def _detectors(summary: CampaignSummary) -> Table:
    rows = []
    for name, entry in summary.detectors.items():
        rows.append(
            (
                name.replace("_", " "),
                *_share(entry.of_unmasked)[:2],
                *_share(entry.of_harmful)[:2],
                show(entry.median_latency),
                show(entry.largest_latency),
            )
        )
    header = ("detector", "found", "share", "harmful found", "share of harmful", "median latency", "largest latency")
    note = "Of the injections that were not masked; latencies in steps since the struck one, while followed."
    return Table("Detectors", header, tuple(rows), note)


def _group(summary: CampaignSummary, name: str) -> Table | LeftOut:
    if not summary.groups[name]:
        return LeftOut(f"By {name}", "no injection belongs to one")
    rows = (_row(key, entry) for key, entry in summary.groups[name].items())
    return Table(f"By {name}", (name, *COLUMNS), tuple(rows))


COLUMNS = ("injections", "vulnerability", "95 % interval", "harm", "95 % interval")


def _row(key: str, entry: GroupTotals) -> tuple[str, ...]:
    return (key, show(entry.injections), *_share(entry.vulnerability)[1:], *_share(entry.harm)[1:])


def _sites(summary: CampaignSummary) -> Table | LeftOut:
    group = summary.groups["site"]
    if not group:
        return LeftOut("By site", "no injection belongs to one")
    worst = sorted(group.items(), key=lambda item: (-item[1].harm.count, -(item[1].harm.share or 0), item[0]))
    rows = tuple(_row(key, entry) for key, entry in worst[:LONGEST])
    note = f"{len(rows):,} of {len(group):,} sites, the most harmed first; all are in summary.json."
    return Table("By site", ("site", *COLUMNS), rows, note)


def _share(entry: Share | None) -> tuple[str, str, str]:
    """Count, share and interval."""
    if entry is None:
        return NOT_MEASURED, NOT_MEASURED, NOT_MEASURED
    if entry.share is None:
        return show(entry.count), NOT_MEASURED, NOT_MEASURED
    return show(entry.count), show(entry.share), f"{show(entry.low)} to {show(entry.high)}"
