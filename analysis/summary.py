"""From the lines of a run record to its verdict and totals: the contents of `summary.json`.

Numbers in brackets are those of the equations in Ma et al., "Understanding Silent Data Corruption in LLM Training"
(arXiv 2502.12340); `definitions` restates them.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sdc.records import Contents
from sdc.schema import (
    CampaignSummary,
    Counts,
    FlaggedPlace,
    LayerTotals,
    MismatchRow,
    ProductCounts,
    ProductTotals,
    RunManifest,
    RunSummary,
    SiteCounts,
    SiteTotals,
    StepRow,
    TwinCounts,
)
from sdc.verdict import Verdict

from . import run_verdict
from .run_verdict import COUNTS, PRODUCTS, Judgement, graver, inconclusive
from .series import each, real, whole, worst
from .statistics import frequency_upper_bound

MOST_LAYERS = 10_000
"""Layers of a table: no model has more."""
MARGINS = ("margin", "first_margin")
PLACE = ("site", "layer", "twin", "data", "model")
SUBMODULES = ("fwd/attn", "fwd/ffn", "bwd/attn", "bwd/ffn")


def summarize(
    manifest: RunManifest, steps: Sequence[StepRow], mismatches: Sequence[MismatchRow], *, whole_run: bool = True
) -> RunSummary:
    """Computes the summary of a run, finished or not.

    Args:
        manifest: contents of `manifest.json`.
        steps: lines of `steps.jsonl`.
        mismatches: lines of `mismatches.jsonl`.
        whole_run: the lines are those of the whole run, so that none may be missing; else those of some of its steps.

    Returns:
        Contents of `summary.json`. `verdict` is `corrupt` if anything mismatched anywhere, `clean` only if at least one
        step was done, something was checked and nothing was injected unseen, else `inconclusive`; None for a training
        run that neither compares nor checks anything. Frequencies are None where nothing was checked, severities where
        none was measured.

    Example:
        >>> from sdc.schema import RunManifest, SiteCounts, StepRow
        >>> site = SiteCounts(checked=1000, mismatched=2, injected=2, severity=3.0)
        >>> row = StepRow(step=0, loss=[2.0, 2.0], sites={"fwd/attn": site})
        >>> summary = summarize(RunManifest(kind="twin", layers=2), [row], [])
        >>> summary.verdict, summary.submodules["fwd/attn"].frequency
        (<Verdict.CORRUPT: 'corrupt'>, 0.002)
    """
    others = sorted({site for row in steps for site in row.sites} - set(SUBMODULES))
    sites = {site: _site(steps, site) for site in (*SUBMODULES, *others)}
    times = (real(value) for row in steps for value in each(row.seconds)[:1])
    seconds = [value for value in times if value is not None and math.isfinite(value)]
    drift = [row.parameter_difference for row in steps if each(row.parameter_difference)]
    simulated = manifest.suspect is not None and manifest.suspect.simulated
    summary = RunSummary(
        steps=len(steps),
        sync=manifest.sync,
        submodules={site: sites[site] for site in SUBMODULES},
        other_sites={site: sites[site] for site in others},
        layers=_layers(manifest, steps, mismatches, sites),
        state=Counts(**_total([row.state for row in steps if row.state])),
        gradient=Counts(**_total([row.gradient for row in steps if row.gradient])),
        worst_noise_to_signal=worst(value for row in steps for value in each(row.noise_to_signal)),  # (5)
        parameter_difference=worst(each(drift[-1])) if drift else None,
        final_loss=list(each(steps[-1].loss)) if steps else [],
        published=manifest.published,
        expected=manifest.expected,
        simulated=bool(simulated) or any(site.injected for site in sites.values()),
        seconds_per_step=statistics.median(seconds) if seconds else None,
        first_mismatch_step=run_verdict.first_mismatch(steps, mismatches),
        odd_twins=run_verdict.odd_twins(steps, mismatches),
        twins=manifest.twins,
        hosts=manifest.hosts,
        rehearsal=run_verdict.is_rehearsal(manifest),
        abft=_products(steps),
    )
    summary.verdict, summary.reason = run_verdict.judge(manifest, steps, mismatches, summary, whole_run=whole_run)
    return summary


def summary_of(run: Contents) -> RunSummary:
    """The summary of a run as read from its folder, finished or not.

    The verdict is computed anew. What the run wrote itself can only make it graver, as does what a step showed although
    it was run again, and twins whose final states differ. A verdict is never `clean` before its time: a run that has
    not ended is `corrupt` already, or `inconclusive`.
    """
    stored, manifest = run.run_summary, run.run
    summary = summarize(manifest, run.steps, run.mismatches)
    found = Judgement(summary.verdict, str(summary.reason))
    if run.discarded:
        again = summarize(manifest, run.again.steps, run.again.mismatches, whole_run=False)
        summary.simulated = summary.simulated or again.simulated
        reason = f"in {len(run.discarded)} steps that were run again, {again.reason}; after that, {found.reason}"
        found = graver(found, Judgement(again.verdict, reason))
    if apart := run_verdict.final_states(manifest, stored.state_digest if stored else None, ended=run.ended):
        found = graver(found, apart)
    if stored is not None:
        summary.state_digest, summary.first_difference = stored.state_digest, stored.first_difference
        summary.shadow = stored.shadow
        if stored.steps is not None and stored.steps != len(run.steps):
            found = graver(found, inconclusive(f"{len(run.steps)} of the {stored.steps} steps are on record"))
        found = graver(found, _stored(stored, found))
    elif run.kind.name == "trace" and run.manifest.get("against"):  # it writes at its end what it found
        found = inconclusive("the run has not ended")
    elif found.verdict is Verdict.CLEAN:
        found = inconclusive(f"the run has not ended; so far: {found.reason}")
    summary.verdict, summary.reason = found
    return summary


def contents_of(summary: RunSummary | CampaignSummary, stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `summary.json` says: what was computed, and what else the run wrote into it."""
    computed: dict[str, Any] = msgspec.to_builtins(summary)
    keep = {"format", "schema", "version", "host", "lines", "state_digest", "first_difference", "shadow"}
    return {**(stored or {}), **{name: value for name, value in computed.items() if name not in keep}}


def _stored(stored: RunSummary, computed: Judgement) -> Judgement:
    """What the run wrote itself, and that it is not what follows from its lines, if anything does."""
    if stored.verdict is not Verdict.CORRUPT or computed.verdict is None:
        return Judgement(stored.verdict, str(stored.reason))
    said = f"summary.json says corrupt ({stored.reason}), although the lines do not: {computed.reason}"
    return Judgement(Verdict.CORRUPT, said)


def _products(steps: Sequence[StepRow]) -> ProductTotals | None:
    """Totals over the lines of `steps.jsonl`; None for a run that checked no products."""
    lines = [(row.step, row.abft) for row in steps if row.abft is not None]
    if not lines:
        return None
    sites: dict[str, list[ProductCounts]] = {}
    flagged: Counter[tuple[Any, ...]] = Counter()
    confirmed: Counter[tuple[Any, ...]] = Counter()
    for _, line in lines:
        for name, found in line.sites.items():
            sites.setdefault(name, []).append(found)
        for row in line.rows:
            place = tuple(getattr(row, name) for name in PLACE)
            flagged[place] += whole(row.flagged) or 0
            confirmed[place] += whole(row.confirmed) or 0
    totals = {name: ProductCounts(**_product_counts(found)) for name, found in sites.items()}
    covered = [share for _, line in lines if (share := real(line.coverage)) is not None]
    return ProductTotals(
        **_product_counts(list(totals.values())),
        first_step=next((step for step, line in lines if whole(line.flagged)), None),
        coverage=min(covered, default=None),
        skipped=lines[-1][1].skipped,
        sites=totals,
        places=[
            FlaggedPlace(**dict(zip(PLACE, place, strict=True)), flagged=rows, confirmed=confirmed[place])
            for place, rows in sorted(flagged.items(), key=lambda item: (-item[1], str(item[0])))
        ],
    )


def _product_counts(found: Sequence[ProductCounts]) -> dict[str, Any]:
    counts = {name: sum(whole(getattr(one, name)) or 0 for one in found) for name in PRODUCTS}
    return counts | {name: worst([0.0, *(getattr(one, name) for one in found)]) for name in MARGINS}


def _site(steps: Sequence[StepRow], name: str) -> SiteTotals:
    """Totals of one site: frequency (2) over all microsteps, severity (4) as the largest of all steps."""
    rows = [row.sites[name] for row in steps if name in row.sites]
    total = _total(rows, COUNTS)
    checked, mismatched = total["checked"], total["mismatched"]
    return SiteTotals(
        frequency=mismatched / checked if checked else None,
        severity=worst(row.severity for row in rows),
        frequency_upper_95=frequency_upper_bound(min(mismatched, checked), checked) if checked else None,
        **total,
    )


def _total(rows: Iterable[SiteCounts | TwinCounts | MismatchRow], names: Sequence[str] = COUNTS[:2]) -> dict[str, Any]:
    """Sums counts. A line with something else for a count is damaged: nothing of it counts, least of all as checked."""
    total = dict.fromkeys(names, 0)
    for row in rows:
        counts = {name: whole(0 if (value := getattr(row, name)) is None else value) for name in names}
        if None not in counts.values():
            for name in names:
                total[name] += counts[name] or 0
    return total


def _layers(
    manifest: RunManifest, steps: Sequence[StepRow], mismatches: Sequence[MismatchRow], sites: Mapping[str, SiteTotals]
) -> dict[str, LayerTotals]:
    """Per-layer frequency (1) and severity (3); every layer has the same number of checked elements."""
    recorded = {row.step for row in steps}  # a crash can leave mismatches of a step that has no line
    rows = [(layer, row) for row in mismatches if row.step in recorded and (layer := whole(row.layer)) is not None]
    layers = min(max([manifest.layers or 0, *(layer + 1 for layer, _ in rows)]), MOST_LAYERS)
    table = {}
    for site, total in sites.items():
        here: list[list[MismatchRow]] = [[] for _ in range(layers)]
        for layer, row in rows:
            if row.site == site and layer < layers:
                here[layer].append(row)
        counts = [_total(lines, ("mismatched", "injected")) for lines in here]
        checked = (total.checked or 0) / layers if layers else 0
        table[site] = LayerTotals(
            frequency=[one["mismatched"] / checked if checked else None for one in counts],
            severity=[worst(row.severity for row in lines) for lines in here],
            mismatched=[one["mismatched"] for one in counts],
            injected=[one["injected"] for one in counts],
        )
    return table
