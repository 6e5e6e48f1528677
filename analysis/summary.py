"""Computes the contents of `summary.json`, that is, the verdict and the totals, from the lines of a run record.

Numbers in parentheses refer to the equations in Ma et al., "Understanding Silent Data Corruption in LLM Training"
(arXiv 2502.12340); `definitions` restates these equations.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sdc import schema
from sdc.records import Contents
from sdc.schema import MismatchRow, Number, RunManifest, RunSummary, StepRow
from sdc.verdict import Judgement, Verdict

from .run_verdict import COUNTS, PRODUCTS, final_states, graver, inconclusive, is_apart, judge, what_differs
from .series import each, real, whole, worst
from .statistics import frequency_upper_bound

MOST_LAYERS = 10_000
"""Maximum number of layers in a table; no model has more."""
MARGINS = ("margin", "first_margin")
PLACE = ("site", "layer", "twin", "data", "model")
SUBMODULES = ("fwd/attn", "fwd/ffn", "bwd/attn", "bwd/ffn")


def summarize(
    manifest: RunManifest,
    steps: Sequence[StepRow],
    mismatches: Sequence[MismatchRow],
    *,
    whole_run: bool = True,
    guard: schema.GuardTotals | None = None,
) -> RunSummary:
    """Computes the summary of a complete or incomplete run.

    Args:
        manifest: contents of `manifest.json`.
        steps: lines of `steps.jsonl`.
        mismatches: lines of `mismatches.jsonl`.
        whole_run: whether the lines must cover the whole run, with no line missing; otherwise they may cover only some
            of its steps.
        guard: what the guard reported at the end of the run, if there was one.

    Returns:
        Contents of `summary.json`. `verdict` is `corrupt` if any mismatch was found; it is `clean` only if at least one
        step was completed, something was checked and no injection was missed; otherwise it is `inconclusive`. A
        training run without comparisons or checks has the verdict None. Frequencies are None if nothing was checked,
        and severities are None if none was measured.

    Example:
        >>> from sdc.schema import RunManifest, SiteCounts, StepRow
        >>> site = SiteCounts(checked=1000, mismatched=2, injected=2, severity=3.0)
        >>> row = StepRow(step=0, loss=[2.0, 2.0], sites={"fwd/attn": site})
        >>> summary = summarize(RunManifest(kind="twin", layers=2), [row], [])
        >>> summary.verdict, summary.submodules["fwd/attn"].frequency
        (<Verdict.CORRUPT: 'corrupt'>, 0.002)
    """
    others = sorted({site for row in steps for site in row.sites} - set(SUBMODULES))
    sites = {site: _site([row.sites[site] for row in steps if site in row.sites]) for site in (*SUBMODULES, *others)}
    times = (real(value) for row in steps for value in each(row.seconds)[:1])
    seconds = [value for value in times if value is not None and math.isfinite(value)]
    drift = [row.parameter_difference for row in steps if each(row.parameter_difference)]
    parts: list[MismatchRow | schema.TwinCounts] = [*mismatches]
    parts += [part for row in steps for part in (row.state, row.gradient) if part is not None]
    ranks = (rank for part in parts for rank in part.ranks if whole(rank.mismatched) or whole(rank.unrepeated))
    apart = [row.step for row in mismatches if is_apart(row)]
    apart += [row.step for row in steps if what_differs([row])]
    simulated = manifest.suspect is not None and manifest.suspect.simulated
    summary = RunSummary(
        steps=len(steps),
        sync=manifest.sync,
        submodules={site: sites[site] for site in SUBMODULES},
        other_sites={site: sites[site] for site in others},
        layers=_layers(manifest, steps, mismatches, sites),
        state=schema.Counts(**_total([row.state for row in steps if row.state])),
        gradient=schema.Counts(**_total([row.gradient for row in steps if row.gradient])),
        worst_noise_to_signal=worst(value for row in steps for value in each(row.noise_to_signal)),  # (5)
        parameter_difference=worst(each(drift[-1])) if drift else None,
        final_loss=list(each(steps[-1].loss)) if steps else [],
        published=manifest.published,
        expected=manifest.expected,
        simulated=bool(simulated) or any(site.injected for site in sites.values()),
        seconds_per_step=statistics.median(seconds) if seconds else None,
        first_mismatch_step=min(apart, default=None),
        odd_twins=sorted({twin for rank in ranks if (twin := whole(rank.twin)) is not None}),
        twins=manifest.twins,
        hosts=manifest.hosts,
        rehearsal=_is_rehearsal(manifest),
        guard=_guarded(manifest, steps, guard, whole_run),
        abft=_products([(row.step, row.abft) for row in steps if row.abft is not None]),
    )
    summary.verdict, summary.reason = judge(manifest, steps, mismatches, summary, whole_run=whole_run)
    return summary


def summary_of(run: Contents) -> RunSummary:
    """Returns the summary of a complete or incomplete run that was read from its folder.

    The verdict is recomputed. The summary that the run wrote, findings of repeated steps, and twins whose final states
    differ can only make the verdict more severe. An incomplete run is never `clean`; it is either `corrupt` or
    `inconclusive`.
    """
    stored, manifest = run.run_summary, run.run
    summary = summarize(manifest, run.steps, run.mismatches, guard=stored.guard if stored else None)
    found = Judgement(summary.verdict, str(summary.reason))
    if run.discarded:
        again = summarize(manifest, run.again.steps, run.again.mismatches, whole_run=False)
        summary.simulated = summary.simulated or again.simulated
        reason = f"in {len(run.discarded)} repeated steps, {again.reason}; afterwards, {found.reason}"
        found = graver(found, Judgement(again.verdict, reason))
    if apart := final_states(manifest, stored.state_digest if stored else None, ended=run.ended):
        found = graver(found, apart)
    if stored is not None:
        for name in ("state_digest", "first_difference", "shadow"):
            setattr(summary, name, getattr(stored, name))
        if stored.steps is not None and stored.steps != len(run.steps):
            found = graver(found, inconclusive(f"{len(run.steps)} of the {stored.steps} steps are recorded"))
        said = str(stored.reason)
        if stored.verdict is Verdict.CORRUPT and found.verdict is not None:
            said = f"summary.json reports corruption ({said}), but the recorded lines do not: {found.reason}"
        found = graver(found, Judgement(stored.verdict, said))
    elif run.kind.name == "trace" and run.manifest.get("against"):  # such a trace writes its findings when it ends
        found = inconclusive("the run has not ended")
    elif found.verdict is Verdict.CLEAN:
        found = inconclusive(f"the run has not ended; so far: {found.reason}")
    summary.verdict, summary.reason = found
    return summary


def contents_of(
    summary: schema.RunSummary | schema.CampaignSummary, stored: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the contents of `summary.json`: the computed fields, and the other fields that the run wrote into it."""
    keep = {"format", "schema", "version", "host", "lines", "state_digest", "first_difference", "shadow"}
    return {**(stored or {}), **{k: value for k, value in msgspec.to_builtins(summary).items() if k not in keep}}


def _guarded(
    manifest: RunManifest, steps: Sequence[StepRow], found: schema.GuardTotals | None, whole_run: bool
) -> schema.GuardTotals | None:
    """Returns what a guard reported in the lines of steps and at the end; None if it was not to report anything."""
    every = [*(one for row in steps for one in row.findings), *(found.findings if found else ())]
    if not every and (manifest.guard is None or not whole_run):
        return None
    different = {msgspec.json.encode(one): one for one in every}
    return msgspec.structs.replace(found or schema.GuardTotals(), findings=list(different.values()))


def _is_rehearsal(manifest: RunManifest) -> bool:
    """Returns whether all twins ran on one processor, as simulated devices do, and therefore shared hardware."""
    environment = manifest.environment
    if manifest.kind != "twin" or isinstance(environment, str | None) or environment.platform != "cpu":
        return False
    if not manifest.devices:  # the record does not list them
        return manifest.processes == 1
    machines = {device.machine or device.host for device in manifest.devices}
    return min(len(machines), manifest.hosts or len(machines)) == 1


def _products(lines: Sequence[tuple[int, schema.ProductRow]]) -> schema.ProductTotals | None:
    """Returns the totals of checked matrix products, summed over all steps, or None if nothing was checked."""
    if not lines:
        return None

    def add(found: Sequence[schema.ProductCounts]) -> schema.ProductCounts:
        counts: dict[str, Number] = {name: sum(whole(getattr(one, name)) or 0 for one in found) for name in PRODUCTS}
        margins = {name: worst([0.0, *(getattr(one, name) for one in found)]) for name in MARGINS}
        return schema.ProductCounts(**counts, **margins)

    sites: dict[str, list[schema.ProductCounts]] = defaultdict(list)
    flagged, confirmed = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for _, line in lines:
        for name, found in line.sites.items():
            sites[name].append(found)
        for row in line.rows:
            place = tuple(getattr(row, name) for name in PLACE)
            flagged[place] += whole(row.flagged) or 0
            confirmed[place] += whole(row.confirmed) or 0
    totals = {name: add(found) for name, found in sites.items()}
    return schema.ProductTotals(
        **msgspec.structs.asdict(add(list(totals.values()))),
        first_step=next((step for step, line in lines if whole(line.flagged)), None),
        coverage=min((share for _, line in lines if (share := real(line.coverage)) is not None), default=None),
        skipped=lines[-1][1].skipped,
        sites=totals,
        places=[
            schema.FlaggedPlace(**dict(zip(PLACE, place, strict=True)), flagged=rows, confirmed=confirmed[place])
            for place, rows in sorted(flagged.items(), key=lambda item: (-item[1], str(item[0])))
        ],
    )


def _site(rows: Sequence[schema.SiteCounts]) -> schema.SiteTotals:
    """Returns the totals of one site, with the frequency (equation 2) over all microsteps and the severity (equation 4)
    as the maximum over all steps."""
    total = _total(rows, COUNTS)
    checked, mismatched = total["checked"], total["mismatched"]
    return schema.SiteTotals(
        frequency=mismatched / checked if checked else None,
        severity=worst(row.severity for row in rows),
        frequency_upper_95=frequency_upper_bound(min(mismatched, checked), checked) if checked else None,
        **total,
    )


def _total(rows: Iterable[schema.Counts], names: Sequence[str] = COUNTS[:2]) -> dict[str, int]:
    """Sums counts. A line with an invalid count is damaged and is left out of every sum, including that of
    `checked`."""
    total = dict.fromkeys(names, 0)
    for row in rows:
        counts = {name: whole(0 if (value := getattr(row, name)) is None else value) for name in names}
        if None not in counts.values():
            total = {name: total[name] + (counts[name] or 0) for name in names}
    return total


def _layers(
    manifest: RunManifest,
    steps: Sequence[StepRow],
    mismatches: Sequence[MismatchRow],
    sites: Mapping[str, schema.SiteTotals],
) -> dict[str, schema.LayerTotals]:
    """Returns the frequency (equation 1) and severity (equation 3) of each layer; every layer has the same number of
    checked elements."""
    recorded = {row.step for row in steps}  # a crash can leave mismatches of a step that has no line
    rows = [(layer, row) for row in mismatches if row.step in recorded and (layer := whole(row.layer)) is not None]
    layers = min(max([manifest.layers or 0, *(layer + 1 for layer, _ in rows)]), MOST_LAYERS)
    lines: dict[tuple[str | None, int], list[MismatchRow]] = defaultdict(list)
    for layer, row in rows:
        lines[row.site, layer].append(row)
    table = {}
    for site, total in sites.items():
        here = [lines[site, layer] for layer in range(layers)]
        counts = [_total(found, ("mismatched", "injected")) for found in here]
        checked = (total.checked or 0) / layers if layers else 0
        table[site] = schema.LayerTotals(
            frequency=[one["mismatched"] / checked if checked else None for one in counts],
            severity=[worst(row.severity for row in found) for found in here],
            mismatched=[one["mismatched"] for one in counts],
            injected=[one["injected"] for one in counts],
        )
    return table
