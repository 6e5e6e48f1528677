"""Computes the tables of a campaign (the contents of its `summary.json`) from the lines of its record.

All shares refer to the injections that reached their site. *Vulnerability* is the share of injections after which the
state at the end of the struck step differed from that of the clean run. *Harm* is the share of injections that ended in
a loss spike, divergence, NaN or infinity.
"""

import contextlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from sdc import records, schema
from sdc.campaigns import DETECTORS, OUTCOMES
from sdc.faults import field_bits
from sdc.schema import CampaignManifest, CampaignSummary, InjectionRow, Share

from .series import whole
from .statistics import proportion_interval

HARMFUL = ("spike", "divergence", "nonfinite")
GROUPS: dict[str, Callable[[InjectionRow], Any]] = {
    "operation": lambda row: row.operation,
    "layer": lambda row: whole(row.layer),
    "phase": lambda row: row.phase,
    "scope": lambda row: _scope(row.scope),
    "bit": lambda row: "{} {:>2}".format(*place) if (place := _bit(row)) else None,
    "field": lambda row: row.field,
    "fault": lambda row: row.fault,
    "site": lambda row: row.site,
}
"""Functions that group injections, by name; None omits an injection."""
SEALED = ("done", "outcomes", "groups", "detectors")
"""Fields that must not change when the summary of a complete campaign is recomputed."""


def summarize_campaign(manifest: CampaignManifest, rows: Sequence[InjectionRow]) -> CampaignSummary:
    """Computes the summary of a complete or incomplete campaign; the order of `rows` does not matter.

    Args:
        manifest: contents of `manifest.json`.
        rows: lines of `injections.jsonl`.

    Returns:
        Contents of `summary.json`: `verdict` (None, since a simulation does not test the hardware), `outcomes`,
        `vulnerability` and `harm` by group with 95 % intervals, `bits` (outcomes by dtype and bit), `detectors`,
        `visible` (the share of the unmasked injections that changed the loss visibly), `steps_to_visible` (the median
        over those injections).

    Example:
        >>> from sdc.schema import CampaignManifest, InjectionRow
        >>> row = InjectionRow(injection=0, outcome="spike", operation="exp", detected={"loss_spike": 1})
        >>> summary = summarize_campaign(CampaignManifest(kind="campaign", injections=1), [row])
        >>> summary.outcomes["spike"].count, summary.groups["operation"]["exp"].harm.share
        (1, 1.0)
    """
    readable = {
        row.injection: row for row in reversed(rows) if row.outcome in OUTCOMES
    }  # only the first line of each injection counts
    known = [readable[place] for place in sorted(readable)]
    outcomes = Counter(row.outcome for row in known)
    reached = [row for row in known if row.outcome != "not_reached"]
    unmasked = [row for row in reached if row.outcome != "masked"]
    harmful = [row for row in reached if row.outcome in HARMFUL]
    planned = manifest.injections or 0
    visible = [found for row in unmasked if (found := whole(row.visible_after)) is not None]
    detectors = manifest.detectors or list(DETECTORS)
    alone = [name for name in detectors if name != "fingerprint"]
    missed = sum(all(whole(row.detected.get(name)) is None for name in alone) for row in harmful)
    return CampaignSummary(
        reason=(
            f"{len(unmasked):,} of {len(reached):,} injections changed training; {len(harmful):,} of them harmed "
            f"training, and detectors without a recorded trace missed {missed:,} of these"
        ),
        simulated=True,
        planned=planned,
        done=len(known),
        complete=len(known) >= planned > 0,
        reached=len(reached),
        outcomes={
            name: _share(outcomes[name], len(known) if name == "not_reached" else len(reached)) for name in OUTCOMES
        },
        vulnerability=_share(len(unmasked), len(reached)),
        harm=_share(len(harmful), len(reached)),
        groups={name: _group(reached, key) for name, key in GROUPS.items()},
        bits=_bits(reached),
        detectors={name: _detector(name, unmasked, harmful) for name in detectors},
        harmful_missed=missed,
        visible=_share(len(visible), len(unmasked)),
        steps_to_visible=statistics.median(visible) if visible else None,
    )


def summary_of(campaign: records.Contents) -> CampaignSummary:
    """Returns the summary of a complete or incomplete campaign that was read from its folder."""
    summary, stored = summarize_campaign(campaign.campaign, campaign.injections), campaign.campaign_summary
    if stored is not None and any(getattr(summary, name) != getattr(stored, name) for name in SEALED):
        raise records.RecordError(
            f"{campaign.path} is damaged: {records.INJECTIONS} does not match the summary; restore the record, or run "
            "the campaign again"
        )
    return summary


def _share(hits: int, of: int) -> Share:
    low, high = proportion_interval(hits, of) if of else (None, None)
    return Share(count=hits, of=of, share=hits / of if of else None, low=low, high=high)


def _group(rows: Sequence[InjectionRow], key: Callable[[InjectionRow], Any]) -> dict[str, schema.GroupTotals]:
    groups: dict[Any, list[str]] = defaultdict(list)
    for row in rows:
        if (name := key(row)) not in (None, ""):
            groups[name].append(str(row.outcome))
    numbered = all(isinstance(name, int) for name in groups)
    return {
        str(name): schema.GroupTotals(
            injections=len(outcomes),
            outcomes={outcome: outcomes.count(outcome) for outcome in OUTCOMES if outcome in outcomes},
            vulnerability=_share(sum(outcome != "masked" for outcome in outcomes), len(outcomes)),
            harm=_share(sum(outcome in HARMFUL for outcome in outcomes), len(outcomes)),
        )
        for name, outcomes in sorted(groups.items(), key=lambda item: item[0] if numbered else str(item[0]))
    }


def _bits(rows: Sequence[InjectionRow]) -> dict[str, dict[str, dict[str, int]]]:
    """Returns the outcomes of the faults that target a single bit, by dtype and bit position."""
    places = Counter((place, str(row.outcome)) for row in rows if (place := _bit(row)) is not None)
    table: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for ((dtype, bit), outcome), times in sorted(places.items()):
        table[dtype][str(bit)][outcome] = times
    return {dtype: dict(by_bit) for dtype, by_bit in table.items()}


def _detector(name: str, unmasked: Sequence[InjectionRow], harmful: Sequence[InjectionRow]) -> schema.DetectorTotals:
    latencies = [found for row in unmasked if (found := whole(row.detected.get(name))) is not None]
    return schema.DetectorTotals(
        of_unmasked=_share(len(latencies), len(unmasked)),
        of_harmful=_share(sum(whole(row.detected.get(name)) is not None for row in harmful), len(harmful)),
        median_latency=statistics.median(latencies) if latencies else None,
        largest_latency=max(latencies, default=None),
        latencies={str(steps): latencies.count(steps) for steps in sorted(set(latencies))},
    )


def _scope(scope: str | None) -> str | None:
    """Returns the scope without the entries that JAX's transformations add to the name stack."""
    if scope is None:
        return None
    names = [part for part in scope.split("/") if part and "(" not in part and "->" not in part]
    names = [name for name in names if name not in ("rematted_computation", "checkpoint")]
    return "/".join(dict.fromkeys(names)) or "(none)"


def _bit(row: InjectionRow) -> tuple[str, int] | None:
    """Returns the dtype and position of the targeted bit; raises an error if the dtype lacks that bit."""
    with contextlib.suppress(TypeError):  # the name is not a dtype
        if row.dtype is not None and row.bits and len(row.bits) == 1 and isinstance(bit := row.bits[0], int):
            return (row.dtype, bit) if bit in field_bits(row.dtype) else None
    return None
