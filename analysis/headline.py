"""The finding of a record in one sentence, and answers to the first questions: which device, which operation, since
when, is it real, and what to do. The terminal, the page and the Markdown show the same headline."""

import dataclasses
import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from sdc.records import Contents
from sdc.schema import (
    Device,
    DifferencePlace,
    FlagRow,
    GuardFinding,
    MismatchRow,
    RankRow,
    RunManifest,
    RunSummary,
    Suspect,
)
from sdc.verdict import limit

from . import state_losses
from .report import Action, Headline, show
from .run_verdict import COMPARED, REHEARSAL, odd_digests, what_differs
from .series import whole
from .statistics import burn_in_steps, count_bursts, excluded_interval, mean_interval_limits
from .summary import summarize

WAYS = {"fwd": "forward", "bwd": "backward", "remat": "recomputed"}
UNKNOWN = "not recorded"
NOWHERE = "none: nothing differed"
LOSSES = "losses"
"""Name of the suspect if the only simulated faults are losses of parts of the state."""
DETAILS = ("kind", "serial", "uuid", "bus", "coordinates", "core", "driver", "firmware")
AXES = ("twin", "data", "model")
Course: TypeAlias = Literal["persistent", "intermittent", "transient"]
Rank: TypeAlias = tuple[int | None, int | None, int | None]
"""Twin, data rank and model rank; None if not recorded."""


def headline(run: Contents, summary: RunSummary) -> Headline:
    """Returns the headline of a twin run, a training run or a trace."""
    found = (_corrupt if summary.verdict == "corrupt" else _not_corrupt)(run, summary)
    said = "; ".join(filter(None, (found.sentence, *state_losses.sentences(run.steps))))
    suspect = run.run.suspect or Suspect()
    real = "real: nothing was injected"
    if suspect.name == LOSSES:
        real = "simulated: parts of the state were deliberately discarded on healthy hardware"
    elif summary.simulated or suspect.simulated:
        real = f"simulated: {suspect.name or 'the suspect'} was deliberately corrupted on healthy hardware"
    elif summary.rehearsal:
        real = "nothing was injected, but this is a rehearsal, not a test of hardware: one processor ran all twins"
    todo = tuple(itertools.islice(_actions(run, summary, found), 3))
    return dataclasses.replace(found, sentence=said, real=real, actions=todo)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The places and times of findings."""

    steps: tuple[int, ...]  # steps with a finding, in order
    later: int  # number of recorded steps after the first of these
    ranks: Counter[Rank]  # number of wrong elements, or of flagged rows of matrix products, by rank
    sites: tuple[str, ...]  # affected sites, starting with the one that has the most findings
    layers: tuple[int, ...]
    first: tuple[str, int | None] | None  # site and layer of the first finding in program order, if known

    @property
    def course(self) -> Course | None:
        """Course of the fault: persistent if each later step has a finding, transient if no later step has one,
        otherwise intermittent. None if there are no findings or no later steps."""
        again = len(self.steps) - 1
        if again < 0 or not self.later:
            return None
        return "persistent" if again == self.later else "intermittent" if again else "transient"


def of_twins(run: Contents) -> Evidence:
    """Returns the mismatches between twins: at submodules if those were compared, otherwise in the gradient and the
    state."""
    hits = [row for row in run.mismatches if _apart(row)]
    steps = {row.step for row in hits} | {row.step for row in run.steps if what_differs([row])}
    first = min((row for row in hits if row.step == min(steps)), key=_order, default=None)
    ranks = [(rank, _apart(rank)) for row in hits for rank in row.ranks]
    return _evidence(run, steps, [(row, _apart(row)) for row in hits], ranks, first)


def of_products(run: Contents) -> Evidence:
    """Returns flagged rows of matrix products."""
    lines = [line for line in run.steps if line.abft is not None and whole(line.abft.flagged)]
    hits = [(row, whole(row.flagged) or 0) for line in lines if line.abft for row in line.abft.rows]
    return _evidence(run, {line.step for line in lines}, hits, hits, hits[0][0] if hits else None)


def _evidence(
    run: Contents,
    steps: set[int],
    hits: Sequence[tuple[MismatchRow | FlagRow, int]],
    ranks: Sequence[tuple[RankRow | FlagRow, int]],
    first: MismatchRow | FlagRow | None,
) -> Evidence:
    """Returns the affected sites, each with its number of findings."""
    start = min(steps, default=math.inf)
    sites, places = Counter[str](), Counter[Rank]()
    for row, number in hits:
        sites[str(row.site)] += number
    for rank, number in ranks:
        if number:
            places[whole(rank.twin), whole(rank.data), whole(rank.model)] += number
    return Evidence(
        steps=tuple(sorted(steps)),
        later=len({line.step for line in run.steps if line.step > start}),
        ranks=places,
        sites=tuple(name for name, _ in sites.most_common()),
        layers=tuple(sorted({layer for row, _ in hits if (layer := whole(row.layer)) is not None})),
        first=None if first is None else (str(first.site), whole(first.layer)),
    )


def _apart(row: MismatchRow | RankRow) -> int:
    """Counts differences: elements that differ, and digests that differ in an unknown number of elements."""
    return (whole(row.mismatched) or 0) + (whole(row.unrepeated) or 0)


def _order(row: MismatchRow) -> tuple[int, bool, int, bool]:
    """Returns a key that sorts rows into program order: the backward pass follows the forward pass and goes from the
    last layer to the first."""
    site, layer = str(row.site), whole(row.layer) or 0
    backward, late = site.startswith("bwd/"), site.endswith("ffn")
    return whole(row.microstep) or 0, backward, -layer if backward else layer, late != backward


def where(manifest: RunManifest, ranks: Iterable[Rank]) -> str:
    """Describes briefly the hardware of the given ranks of one twin; returns an empty string if the record does not
    distinguish it from that of other ranks."""
    known = list(ranks)
    found = {(str(device.host), str(device.id)) for rank in known for device in _devices(manifest, rank)}
    hosts = sorted({host for host, _ in found})
    if hosts:
        noun, names = ("device", [number for _, number in found]) if len(hosts) == 1 else ("host", hosts)
        unique = sorted(set(names), key=lambda name: (len(name), name))
        named = f"{noun}{'s' * (len(unique) > 1)} {listed(unique)}" if len(unique) <= 4 else f"{len(unique)} {noun}s"
        return f"host {hosts[0]}, {named}" if noun == "device" else named
    axes = [axis for axis in AXES[1:] if (manifest.mesh or {}).get(axis, 1) > 1]
    places = {tuple(dict(zip(AXES, rank, strict=True))[axis] for axis in axes) for rank in known}
    places = {place for place in places if None not in place}
    if not axes or not places:
        return ""
    if len(places) > 1:
        return f"{len(places)} ranks"
    return ", ".join(f"{axis} {number}" for axis, number in zip(axes, *places, strict=True))


def hardware(manifest: RunManifest, ranks: Iterable[Rank], limit: int = 2) -> str:
    """Describes the devices of some ranks in full, so that they can be located in a rack."""
    found = {msgspec.json.encode(device): device for rank in ranks for device in _devices(manifest, rank)}
    words = []
    for device in found.values():
        known = ((name, getattr(device, name)) for name in DETAILS)
        plain = ((name, "/".join(map(str, value)) if isinstance(value, list) else value) for name, value in known)
        words.append(", ".join(f"{name} {value}" for name, value in plain if value is not None))
    words = list(filter(None, words))
    return "; ".join(words[:limit]) + (f"; and {len(words) - limit} more" if len(words) > limit else "")


def _devices(manifest: RunManifest, rank: Rank) -> list[Device]:
    """Returns the devices that hold a rank; a device that is recorded without a twin holds that rank of every twin."""
    wanted = [(axis, value) for axis, value in zip(AXES, rank, strict=True) if value is not None]
    places = [(device, device.rank) for device in manifest.devices if device.rank]
    return [device for device, place in places if all(place.get(axis, value) == value for axis, value in wanted)]


def listed(names: Sequence[object]) -> str:
    """Joins words: `a`, `a and b`, `a, b and c`."""
    words = list(map(str, names))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _not_corrupt(run: Contents, summary: RunSummary) -> Headline:
    reason = str(summary.reason)
    if summary.verdict == "clean":
        on = f" on {summary.hosts} hosts" if summary.hosts and summary.hosts > 1 else ""
        on += f"; {REHEARSAL}" if summary.rehearsal else ""
        since = f"at none of the {summary.steps:,} completed steps"
        return Headline(reason.partition(";")[0] + on, NOWHERE, NOWHERE, since)
    if summary.verdict is None:
        return Headline(f"{summary.steps:,} steps; {reason}, so no verdict is possible")
    reason = reason.partition("; at 95 %")[0]  # of an incomplete run that is clean so far
    if not run.ended and "has not ended" not in reason:
        reason = f"the run has not ended; {reason}"
    brief = reason.partition(";")[0]
    unknown = f"unknown: {brief if len(brief) <= 90 else f'{brief[:89]}…'}"
    return Headline(reason, unknown, unknown, unknown)


def _corrupt(run: Contents, summary: RunSummary) -> Headline:
    if run.kind.name == "trace" and (place := summary.first_difference):
        return of_place(place)
    seen = _seen(summary)
    if run.discarded:  # findings count even if the step was repeated
        run = run.attempts
        every = summarize(run.run, run.steps, run.mismatches, whole_run=False)
        kept = ("verdict", "reason", "steps", "simulated", "state_digest", "shadow")
        summary = msgspec.structs.replace(every, **{name: getattr(summary, name) for name in kept})
    if summary.first_mismatch_step is not None:
        found = _twins(run, summary, of_twins(run))
    elif _seen(summary):
        found = _products(run, summary, of_products(run))
    elif apart := odd_digests(summary.state_digest):
        who, device = _odd(run.run, summary, apart, ())
        found = Headline(
            f"{who}: the final state differs, although no difference was found at any step",
            device,
            "outside the compared operations: the state changed in memory or while the last checkpoint was written",
            f"after the last comparison, at step {len(run.steps) - 1:,}",
            first=len(run.steps),
            named=who,
        )
    elif proof := [one for one in (summary.guard.findings if summary.guard else ()) if one.proof]:
        found = _guarded(run.run, proof)
    else:
        suspects = listed([f"data rank {rank}" for rank in (summary.shadow.suspects if summary.shadow else ())])
        return Headline(str(summary.reason), suspects or UNKNOWN, UNKNOWN, UNKNOWN, named=suspects)
    again = ", in steps that were repeated" if _seen(summary) and not seen else ""
    return dataclasses.replace(found, sentence=found.sentence + again, since=found.since + again)


def _seen(summary: RunSummary) -> bool:
    """Returns whether a step has a finding."""
    return summary.first_mismatch_step is not None or bool(summary.abft and summary.abft.flagged)


def _guarded(manifest: RunManifest, proof: Sequence[GuardFinding]) -> Headline:
    """Returns the headline for what a guard found."""
    first, steps = proof[0], sorted({step for one in proof if (step := whole(one.step)) is not None})
    hosts = {
        str(device.host) for device in manifest.devices if any(name.endswith(f":{device.id}") for name in first.devices)
    }
    named = listed(first.devices) + (f" (host {listed(sorted(hosts))})" if hosts else "")
    more = f", and {len(proof) - 1} more findings" if len(proof) > 1 else ""
    return Headline(
        f"{named + ': ' if named else ''}{first.layer}: {first.what}, at step {show(first.step)}{more}",
        named or "not located: the comparison does not distinguish devices",
        str(first.what),
        f"step {show(first.step)} or before: only some steps are checked",
        first=steps[0] if steps else None,
        named=named,
        hits=tuple(steps),
    )


def of_place(place: DifferencePlace) -> Headline:
    """Returns the headline for the first difference of two traces."""
    layer = "" if place.layer is None else f"layer {place.layer}, "
    way = WAYS.get(str(place.direction), str(place.direction))
    scope = f" in {place.scope}" if place.scope else ""
    source = f", at {place.source}" if place.source else ""
    devices = "; ".join(", ".join(f"{axis} {number}" for axis, number in device.items()) for device in place.devices)
    return Headline(
        f"{devices + ': ' if devices else ''}{layer}{place.site}{source}: first difference at step {place.step}",
        devices or "the only device of the run",
        f"{layer}{place.operation}, {way}{scope}{source}",
        f"step {place.step}; the traces were compared only up to their first difference",
        first=place.step,
        named=devices,
    )


def _twins(run: Contents, summary: RunSummary, found: Evidence) -> Headline:
    odd = summary.odd_twins or sorted({rank[0] for rank in found.ranks if rank[0] is not None})
    who, device = _odd(run.run, summary, odd, found.ranks)
    first, free = whole(summary.first_mismatch_step), summary.sync == "none"
    course = None if free else found.course  # unsynchronized twins continue to differ even if the fault does not recur
    mismatched, checked = (
        sum(getattr(site, key) or 0 for site in summary.sites.values()) for key in ("mismatched", "checked")
    )
    once = sum(whole(row.unrepeated) or 0 for row in run.mismatches)
    elements = [f"{amount(mismatched)} of {amount(checked)} elements"] * bool(mismatched)
    if once:
        elements.append(f"{amount(once)} digest{'s' * (once > 1)} whose difference did not recur in the repetition")
    parts = [
        f"{amount(counts.mismatched)} of {amount(counts.checked)} elements of the {name}"
        for part, name in COMPARED.items()
        if (counts := getattr(summary, part)) and counts.mismatched
    ]
    other = what_differs(run.steps)
    what = (
        (f"{spot(found)}: " if spot(found) and elements else "") + " and ".join(elements or parts)
        or listed(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        or "details of a step that is not recorded"
    )
    since = f"step {first}; unsynchronized twins continue to differ, so the course of the fault is unknown"
    return Headline(
        f"{who}: {what}, first at step {first}{f', {course}' if course else ''}",
        device,
        _spots(found) or f"not located: only {' and '.join(parts) or 'whole steps'} differ",
        since if free else _since(first, found),
        course=course,
        first=first,
        named=who,
        hits=found.steps,
    )


def _odd(manifest: RunManifest, summary: RunSummary, odd: Sequence[int], ranks: Iterable[Rank]) -> tuple[str, str]:
    """Returns the names of the twins that differ, and their hardware."""
    pair = manifest.twins in (2, None)
    if not odd and pair:
        odd = [1]  # by convention, the first of two twins is the reference
    # A rank that differs only in the state or the gradient cannot be identified.
    known = [rank for rank in ranks if rank[0] in odd]
    names = []
    for twin in odd:
        place = where(manifest, [rank for rank in known if rank[0] == twin] or [(twin, None, None)])
        names.append(f"twin {twin}" + (f" ({place})" if place else ""))
    who = listed(names) or "the twins"
    parts = hardware(manifest, known)
    device = f"{who}{f' ({parts})' if parts else ''}"
    if manifest.placement == "vmap":
        device += "; all twins share their devices"
    if pair and not summary.simulated:
        device += "; either of the two twins may be wrong, and this one is reported by convention"
    return who, device


def spot(found: Evidence) -> str:
    """Describes the affected places: `layer 2, ffn, backward`."""
    if not found.sites:
        return ""
    layers, hit = "", found.layers
    if hit:
        which = listed(hit) if len(hit) <= 4 else f"{hit[0]} to {hit[-1]} ({len(hit)} of these)"
        if len(hit) > 2 and hit[-1] - hit[0] == len(hit) - 1:
            which = f"{hit[0]}-{hit[-1]}"
        layers = f"layer{'s' * (len(hit) > 1)} {which}, "
    parts = [name.partition("/") for name in found.sites]
    names, ways = (list(dict.fromkeys(part[place] for part in parts)) for place in (2, 0))
    if len(found.sites) == 1 or len(names) > 3 or not all(names) or not set(ways) <= set(WAYS):
        return layers + (_site(found.sites[0]) if len(found.sites) == 1 else f"{len(found.sites)} places")
    return f"{layers}{listed(sorted(names))}, {listed([WAYS[way] for way in WAYS if way in ways])}"


def _spots(found: Evidence) -> str:
    """Describes the affected places; if there are several, the first one and the most affected one."""
    if len(found.sites) < 2:
        return spot(found)
    most = f"{spot(found)}; most in {_site(found.sites[0])}"
    if found.first is None:
        return most
    site, layer = found.first
    return f"{most}; the first in {'' if layer is None else f'layer {layer}, '}{_site(site)}"


def _site(name: str) -> str:
    way, _, rest = name.partition("/")
    return f"{rest}, {WAYS[way]}" if rest and way in WAYS else name


def _products(run: Contents, summary: RunSummary, found: Evidence) -> Headline:
    total, hit, manifest = summary.abft, spot(found), run.run
    assert total is not None
    names = []
    for rank in found.ranks:
        twin = f"twin {rank[0]}" if rank[0] is not None and manifest.twins else ""
        device = where(manifest, [rank])
        names.append(f"{twin} ({device})" if twin and device else twin or device)
    place = listed(list(filter(None, names))[:3])
    rows = f"{amount(total.flagged or 0)} of {amount(total.checked or 0)} checked rows of matrix products are wrong"
    known, course = hardware(manifest, found.ranks), found.course
    return Headline(
        f"{place + ': ' if place else ''}{hit + ': ' if hit else ''}{rows}, first at step {total.first_step}"
        f"{f', {course}' if course else ''}",
        (place or "the only device of the run") + (f" ({known})" if known else ""),
        _spots(found) or UNKNOWN,
        _since(total.first_step, found),
        course=course,
        first=total.first_step,
        named=place,
        hits=found.steps,
    )


def _since(first: int | None, found: Evidence) -> str:
    if found.course is None:
        return f"step {first}; no step followed it, so the course of the fault is unknown"
    return f"step {first}; {found.course}: {len(found.steps) - 1:,} of the {found.later:,} later steps also affected"


def amount(value: float) -> str:
    """Formats a count: `831,066`, or `4.2e7` if the count is a million or more."""
    if value < 1_000_000:
        return f"{value:,}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _actions(run: Contents, summary: RunSummary, found: Headline) -> Iterator[Action]:
    """Yields the next actions after a run, in order."""
    manifest, products = run.run, summary.abft
    twins, trace = manifest.kind == "twin", manifest.kind == "trace"
    if summary.verdict == "corrupt" and (summary.simulated or (manifest.suspect and manifest.suspect.simulated)):
        yield Action("No action: detection works", "The fault was deliberate and was detected.")
        if twins:
            how = "Run the command again without --suspect and --fault; any findings are then real."
            yield Action("Test the real hosts", how)
    elif summary.verdict == "corrupt":
        yield from _corrupt_actions(manifest, summary, found)
    elif summary.verdict == "clean" and summary.rehearsal:
        yield Action(
            "Run the test on the hosts that you want to test",
            "This was a rehearsal on one processor. Start one process per host, with --coordinator, --processes "
            "and --process (docs/fleet.md).",
        )
    elif summary.verdict == "clean":
        yield Action("No action", "As far as this run shows, these hosts can stay in service.")
        how = f"This run excludes {excluded(summary.steps or 0)}; increase --steps to exclude rarer bursts."
        yield Action("Run longer to detect rare bursts", how)
    elif not run.ended:
        words = manifest.command or []
        named = {"--run", "trace"} & set(words)  # otherwise the command to resume has another flag
        command = shlex.join([*(word for word in words if word != "--resume"), "--resume"])
        yield Action(
            "Let the run continue, or resume it",
            f"{summary.steps:,} of {manifest.steps or '?'} planned steps are recorded. If the run was stopped, "
            f"resume it to get a verdict{f': {command}' if named else ' (--resume)'}.",
        )
    elif summary.verdict is None and trace:
        how = "Use sdc diff GOLDEN THIS, or sdc trace --against GOLDEN on the next host."
        yield Action("Compare this trace with another one", how)
    elif summary.verdict is None:
        how = "For a verdict, watch the run (sdc train --guard), check its products (--abft) or train twins (sdc twin)."
        yield Action("No action: no verdict was requested", how)
    elif products is not None and products.flagged:
        yield Action(
            "Run the same steps on another device",
            "Rows that are equally wrong when recomputed indicate a permanent fault or a false alarm; a run on another "
            "device shows which it is.",
        )
    elif products is not None and products.skipped:
        yield Action(
            "Check more of the matrix products",
            "The table of unchecked products states the reasons; --least-coverage sets the required share.",
        )
    elif summary.guard is not None and summary.guard.findings:
        yield Action("Test the devices", "A suspicion is no proof: run sdc burnin, or the same steps elsewhere.")
    elif summary.guard is not None and not summary.simulated:
        yield Action("Run longer, or check more", "Give more --steps or a larger --guard-budget.")
    elif summary.simulated:
        yield Action(
            "Inject the fault at a checked place",
            "The fault struck an unchecked place, or it struck when all values were already NaN; choose another site, "
            "a smaller rate or other bits.",
        )
    else:
        yield Action("Fix the stated cause and run the test again", "This result does not test the hardware.")


def _corrupt_actions(manifest: RunManifest, summary: RunSummary, found: Headline) -> Iterator[Action]:
    if summary.rehearsal:
        yield Action(
            "Suspect this machine or its libraries",
            "All twins ran on one processor, so no single host is implicated. Run the test again; if the twins differ "
            "again, test the memory and compare this host with another one using sdc trace.",
        )
    elif manifest.kind == "trace":
        yield Action(
            "Trace again on a third host",
            "Either trace may be wrong; comparing both with a third trace (sdc diff) shows which. Then narrow down the "
            "operation with the selector that sdc diff prints.",
        )
    elif manifest.kind == "twin" and manifest.twins in (2, None):
        yield Action(
            "Find out which twin is wrong",
            "Run again with a third host (--twins 3 --processes 3), or swap the hosts of the twins: the fault moves "
            "with its host (docs/fleet.md, “Which host is it”).",
        )
    else:
        what = "Set aside until tested" if found.course == "transient" else "Take out of service"
        named = found.named or "the host that differs"
        yield Action(f"{what}: {named}", "Keep this folder as evidence.")
    if found.course == "persistent":
        yield Action(
            "Reproduce the fault and report it to the vendor",
            "The fault recurs at each step, so a few steps reproduce it: running sdc trace on this host and on a "
            "healthy one identifies the operation.",
        )
    elif found.course is not None:
        how = f"The fault was not present at every step. {again(found.hits, summary.steps or 0)}"
        yield Action("Observe the fault for longer", how)
    if found.first is not None:
        before = f"from before step {found.first}" if found.first else "of the initial state"
        how = f"The resulting weights are suspect; go back to a checkpoint {before}."
        yield Action("Do not trust the trained weights", how)


def again(hits: Sequence[int], steps: int) -> str:
    """Describes how many more steps are needed to see an intermittent fault again, and the basis of that number."""
    bursts = max(1, count_bursts(hits, steps))
    few, many = mean_interval_limits(steps, bursts)
    plan = burn_in_steps(steps / bursts, observed=bursts)
    return (
        f"Plan {plan:,} more steps on the same hosts to see the fault again. If bursts occur at random times, at most "
        "one run in twenty shows a fault and then stays clean for that long. This number is based on "
        f"{bursts:,} burst{'s' * (bursts > 1)} in {steps:,} steps, which give a mean interval of {math.floor(few):,} "
        f"to {math.ceil(many):,} steps (95 %)."
    )


def excluded(steps: int) -> str:
    """Describes the bursts that a run of `steps` clean steps excludes."""
    interval = excluded_interval(steps)
    if interval < 1:
        return "no bursts, since it is too short"
    often = "at every step" if interval < 2 else f"every {limit(interval, 3, up=False)} steps or more often"
    return f"bursts that occur on average {often} (95 % confidence)"
