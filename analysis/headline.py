"""What a record says in one sentence, and what a reader asks first: which device, which operation, since when, is it
real, and what now. The terminal, the page and the Markdown show the same."""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sdc.records import Contents
from sdc.schema import RunManifest, RunSummary, StepRow, Suspect

from . import outlooks, recoveries
from .evidence import AXES, Evidence, Rank, hardware, listed, of_products, of_twins, where
from .report import Action, Headline
from .run_verdict import COMPARED, REHEARSAL, odd_digests, what_differs
from .series import whole
from .statistics import burn_in_steps, count_bursts, excluded_interval, mean_interval_limits
from .summary import summarize

WAYS = {"fwd": "forward", "bwd": "backward", "remat": "recomputed"}
UNKNOWN = "the record does not say"
NOWHERE = "none: nothing differed"
LOSSES = "losses"
"""Name of the suspect where nothing is simulated but losses of parts of the state."""


def headline(run: Contents, summary: RunSummary) -> Headline:
    """The headline of a twin, a training run or a trace."""
    found = (_corrupt if summary.verdict == "corrupt" else _not_corrupt)(run, summary)
    said = "; ".join(filter(None, (found.sentence, recoveries.sentence(run.steps), outlooks.sentence(run.steps))))
    todo = tuple(itertools.islice(_actions(run, summary, found), 3))
    return Headline(said, found.device, found.operation, found.since, _real(run.run, summary), todo)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A headline before its advice."""

    sentence: str
    device: str
    operation: str
    since: str
    course: str | None = None
    first: int | None = None
    named: str = ""
    hits: tuple[int, ...] = ()


def _not_corrupt(run: Contents, summary: RunSummary) -> Diagnosis:
    reason = str(summary.reason)
    if summary.verdict == "clean":
        on = f" on {summary.hosts} hosts" if summary.hosts and summary.hosts > 1 else ""
        on += f"; {REHEARSAL}" if summary.rehearsal else ""
        return Diagnosis(
            reason.partition(";")[0] + on, NOWHERE, NOWHERE, f"at no step of the {summary.steps:,} that were done"
        )
    if summary.verdict is None:
        nothing = "nothing was compared, so nothing can be said"
        sentence = f"{summary.steps:,} steps; {reason}"
        return Diagnosis(sentence, nothing, nothing, nothing)
    reason = reason.partition("; at 95 %")[0]  # of a run that has not ended and is clean so far
    if not run.ended and "has not ended" not in reason:
        reason = f"the run has not ended; {reason}"
    unknown = f"unknown: {_brief(reason)}"
    return Diagnosis(reason, unknown, unknown, unknown)


def _corrupt(run: Contents, summary: RunSummary) -> Diagnosis:
    if run.kind.name == "trace" and (place := summary.first_difference):
        return of_place(place)
    seen = _seen(summary)
    if run.discarded:  # what a step showed counts, although it was run again
        run = run.attempts
        every = summarize(run.run, run.steps, run.mismatches, whole_run=False)
        kept = ("verdict", "reason", "steps", "simulated", "state_digest", "shadow")
        summary = msgspec.structs.replace(every, **{name: getattr(summary, name) for name in kept})
    if summary.first_mismatch_step is not None:
        found = _twins(run, summary, of_twins(run))
    elif _seen(summary):
        found = _products(run, summary, of_products(run))
    elif apart := odd_digests(summary.state_digest):
        found = _final(run, summary, apart)
    else:
        suspects = listed([f"data rank {rank}" for rank in (summary.shadow.suspects if summary.shadow else ())])
        return Diagnosis(str(summary.reason), suspects or UNKNOWN, UNKNOWN, UNKNOWN, named=suspects)
    again = ", in steps that were run again" if _seen(summary) and not seen else ""
    return dataclasses.replace(found, sentence=found.sentence + again, since=found.since + again)


def _seen(summary: RunSummary) -> bool:
    """Whether a step shows what is wrong."""
    return summary.first_mismatch_step is not None or bool(summary.abft and summary.abft.flagged)


def of_place(place: Mapping[str, Any]) -> Diagnosis:
    """The first difference of two traces, as `describe_difference` describes it."""
    layer = "" if place.get("layer") is None else f"layer {place['layer']}, "
    way = WAYS.get(str(place.get("direction")), str(place.get("direction")))
    scope = f" in {place['scope']}" if place.get("scope") else ""
    source = f", at {place['source']}" if place.get("source") else ""
    devices = "; ".join(
        ", ".join(f"{axis} {number}" for axis, number in device.items()) for device in place.get("devices") or ()
    )
    step = place.get("step")
    operation = f"{layer}{place.get('operation')}, {way}{scope}{source}"
    return Diagnosis(
        f"{devices + ': ' if devices else ''}{layer}{place.get('site')}{source}: first difference at step {step}",
        devices or "the only device of the run",
        operation,
        f"step {step}; a trace is compared up to its first difference",
        first=step,
        named=devices,
    )


def _twins(run: Contents, summary: RunSummary, found: Evidence) -> Diagnosis:
    odd = summary.odd_twins or sorted({rank[0] for rank in found.ranks if rank[0] is not None})
    who, device = _odd(run.run, summary, odd, found.ranks)
    first = whole(summary.first_mismatch_step)
    # Twins that are not synchronized go on differing whatever the fault does.
    course = None if summary.sync == "none" else found.course
    what = _elements(summary, run, spot(found)) or _other(run.steps)
    sentence = f"{who}: {what}, first at step {first}{f', {course}' if course else ''}"
    return Diagnosis(
        sentence, device, _spots(found) or f"not located: only {' and '.join(_parts(summary)) or 'whole steps'} differ",
        _since(first, found, course, free=summary.sync == "none"), course, first, who, found.steps,
    )  # fmt: skip


def _final(run: Contents, summary: RunSummary, odd: Sequence[int]) -> Diagnosis:
    """Twins that agreed at every step and not in the end."""
    who, device = _odd(run.run, summary, odd, ())
    return Diagnosis(
        f"{who}: the final state differs, although no step showed a difference",
        device,
        "none that was compared: it changed in memory, or while the last checkpoint was written",
        f"after the last comparison, that of step {len(run.steps) - 1:,}",
        first=len(run.steps),
        named=who,
    )


def _odd(manifest: RunManifest, summary: RunSummary, odd: Sequence[int], ranks: Iterable[Rank]) -> tuple[str, str]:
    """The twins that differ, as they are called, and what hardware they are."""
    pair = manifest.twins in (2, None)
    if not odd and pair:
        odd = [1]  # by convention the first of two is the reference
    # A rank that only the state or the gradient tells of cannot be named.
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
        device += "; of two twins the comparison cannot say which is wrong: calling this one so is a convention"
    return who, device


def spot(found: Evidence) -> str:
    """The places that were hit: `layer 2, ffn, backward`."""
    if not found.sites:
        return ""
    layers = f"layer{'s' if len(found.layers) > 1 else ''} {_ranges(found.layers)}, " if found.layers else ""
    parts = [name.partition("/") for name in found.sites]
    names, ways = (list(dict.fromkeys(part[place] for part in parts)) for place in (2, 0))
    if len(found.sites) == 1 or len(names) > 3 or not all(names) or not set(ways) <= set(WAYS):
        return layers + (_site(found.sites[0]) if len(found.sites) == 1 else f"{len(found.sites)} places")
    return f"{layers}{listed(sorted(names))}, {listed([WAYS[way] for way in WAYS if way in ways])}"


def _spots(found: Evidence) -> str:
    """The same, and which of several places was the first and which is hit most."""
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


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3`, `2`, or `1, 5 and 9`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return listed(numbers) if len(numbers) <= 4 else f"{numbers[0]} to {numbers[-1]}, {len(numbers)} of them"


def _elements(summary: RunSummary, run: Contents, spot: str) -> str:
    sites = [*summary.submodules.values(), *summary.other_sites.values()]
    mismatched, checked = (sum(getattr(site, key) or 0 for site in sites) for key in ("mismatched", "checked"))
    once = sum(whole(row.unrepeated) or 0 for row in run.mismatches)
    parts = [f"{amount(mismatched)} of {amount(checked)} elements"] * bool(mismatched)
    parts += [f"{amount(once)} digest{'s' * (once > 1)} that did not differ again when repeated"] * bool(once)
    if parts:
        return f"{spot + ': ' if spot else ''}{' and '.join(parts)}"
    return " and ".join(_parts(summary))


def _other(lines: Sequence[StepRow]) -> str:
    """What differs without a count of elements."""
    parts = what_differs(lines)
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return listed(parts[:3]) + more or "details of a step without a line"


def _parts(summary: RunSummary) -> list[str]:
    return [
        f"{amount(counts.mismatched)} of {amount(counts.checked)} elements of the {name}"
        for part, name in COMPARED.items()
        if (counts := getattr(summary, part)) and counts.mismatched
    ]


def _products(run: Contents, summary: RunSummary, found: Evidence) -> Diagnosis:
    total, hit = summary.abft, spot(found)
    assert total is not None
    place = listed([name for name in map(_rank_name(run.run), found.ranks) if name][:3])
    course, first = found.course, total.first_step
    rows = f"{amount(total.flagged or 0)} of {amount(total.checked or 0)} checked rows of matrix products are wrong"
    sentence = f"{place + ': ' if place else ''}{hit + ': ' if hit else ''}{rows}, first at step {first}"
    known = hardware(run.run, found.ranks)
    device = (place or "the only device of the run") + (f" ({known})" if known else "")
    sentence += f", {course}" if course else ""
    since = _since(first, found, course)
    return Diagnosis(sentence, device, _spots(found) or UNKNOWN, since, course, first, place, found.steps)


def _rank_name(manifest: RunManifest) -> Callable[[Any], str]:
    def name(rank: Any) -> str:
        twin = "" if rank[AXES.index("twin")] is None or not manifest.twins else f"twin {rank[0]}"
        place = where(manifest, [rank])
        return f"{twin} ({place})" if twin and place else twin or place

    return name


def _since(first: Any, found: Evidence, course: str | None, *, free: bool = False) -> str:
    if free:
        return f"step {first}; twins that are not synchronized go on differing, so how the fault goes on is unknown"
    later = f"{len(found.steps) - 1:,} of the {found.later:,} steps after it"
    if course is None:
        return f"step {first}; no step followed it, so how the fault goes on is unknown"
    return f"step {first}; {course}: {later} have it too"


def _real(manifest: RunManifest, summary: RunSummary) -> str:
    suspect = manifest.suspect or Suspect()
    if suspect.name == LOSSES:
        return "simulated: parts of the state were thrown away on purpose, on sound hardware"
    if summary.simulated or suspect.simulated:
        return f"simulated: {suspect.name or 'the suspect'} was corrupted on purpose, on sound hardware"
    if summary.rehearsal:
        return (
            "nothing was injected, but this is a rehearsal, not a test of hardware: one processor played all the twins"
        )
    return "real: nothing was injected"


def _brief(reason: str, limit: int = 90) -> str:
    first = reason.partition(";")[0]
    return first if len(first) <= limit else f"{first[: limit - 1]}…"


def amount(value: float) -> str:
    """A count for reading: `831,066`, and from a million on `4.2e7`."""
    if value < 1_000_000:
        return f"{value:,}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


LISTED = "docs/fleet.md, “Which host is it”"
HOLD = "Keep this folder: it is the evidence."


def _actions(run: Contents, summary: RunSummary, found: Diagnosis) -> Iterator[Action]:
    """What follows from a run, the first thing first."""
    manifest = run.run
    if summary.verdict == "corrupt":
        simulated = summary.simulated or (manifest.suspect and manifest.suspect.simulated)
        return _simulated(manifest) if simulated else _corrupt_actions(manifest, summary, found)
    if summary.verdict == "clean":
        return _rehearsed() if summary.rehearsal else _clean(summary)
    if not run.ended:
        return _unfinished(manifest, summary)
    return _unjudged(manifest) if summary.verdict is None else _inconclusive(summary)


def _simulated(manifest: RunManifest) -> Iterator[Action]:
    yield Action("Nothing to mend: the detection works", "The fault was made on purpose, and it was found.")
    if manifest.kind == "twin":
        yield Action("Test the real hosts", "Run it again without --suspect and --fault: what is found then is real.")


def _corrupt_actions(manifest: RunManifest, summary: RunSummary, found: Diagnosis) -> Iterator[Action]:
    kind, first = manifest.kind, found.first
    if summary.rehearsal:
        yield Action(
            "Suspect this machine or its libraries",
            "All twins ran on one processor, so no host stands out. Run it again; if it differs again, test the memory "
            "and compare with another machine by sdc trace.",
        )
    elif kind == "trace":
        yield Action(
            "Trace again on a third machine",
            "Of two traces one is wrong; sdc diff with a third tells which. Then narrow the operation down with the "
            "selector that sdc diff prints.",
        )
    elif kind == "twin" and manifest.twins in (2, None):
        yield Action(
            "Find out which twin is wrong",
            "Run again with a third host (--twins 3 --processes 3), or swap the hosts of the twins: the fault goes "
            f"with its host ({LISTED}).",
        )
    else:
        what = "Set aside until tested" if found.course == "transient" else "Take out of service"
        yield Action(f"{what}: {found.named or 'the host that differs'}", HOLD)
    yield from _course_actions(found, summary.steps or 0)
    if first is not None:
        before = f"from before step {first}" if first else "of the start"
        yield Action(
            "Distrust what was trained there", f"Weights that it made are in doubt; go back to a checkpoint {before}."
        )


def _course_actions(found: Diagnosis, steps: int) -> Iterator[Action]:
    if found.course == "persistent":
        yield Action(
            "Reproduce it and report it to the vendor",
            "It comes back at each step, so a few steps show it again: sdc trace on it and on a sound host names the "
            "operation.",
        )
    elif found.course is not None:
        yield Action("Watch it for longer", f"It was not there at every step. {again(found.hits, steps)}")


def again(hits: Sequence[int], steps: int) -> str:
    """How many steps show a fault again that was there at some of a run's steps, and what that rests on, as words."""
    bursts = max(1, count_bursts(hits, steps))
    few, many = mean_interval_limits(steps, bursts)
    plan = burn_in_steps(steps / bursts, observed=bursts)
    return (
        f"Plan {plan:,} more steps on the same hosts to see it again (95 %). This rests on {bursts:,} "
        f"burst{'s' * (bursts > 1)} in {steps:,} steps, from which the mean interval of bursts at random times is "
        f"known as {few:,.0f} to {many:,.0f} steps."
    )


def excluded(steps: int) -> str:
    """Which bursts a run of so many steps excludes that showed none, as words."""
    interval = excluded_interval(steps)
    if interval < 1:
        return "no bursts at all, so short is it"
    often = "at every step" if interval < 2 else f"every {interval:.3g} steps or oftener"
    return f"(95 %) bursts that come, on average, {often}"


def _clean(summary: RunSummary) -> Iterator[Action]:
    yield Action("Nothing to mend", "These hosts, as far as this run goes, can stay in service.")
    how = f"This run excludes {excluded(summary.steps or 0)}; for more give more --steps."
    yield Action("Run longer against rare bursts", how)


def _rehearsed() -> Iterator[Action]:
    yield Action(
        "Run it on the hosts that you want to test",
        "This was a rehearsal on one processor. Start one process on each host, with --coordinator, --processes and "
        "--process (docs/fleet.md).",
    )


def _unfinished(manifest: RunManifest, summary: RunSummary) -> Iterator[Action]:
    words = manifest.command or []
    named = {"--run", "trace"} & set(words)  # else the command that goes on has a further flag
    again = shlex.join([*(word for word in words if word != "--resume"), "--resume"])
    yield Action(
        "Let it go on, or resume it",
        f"{summary.steps:,} of {manifest.steps or '?'} planned steps are on record. If it was stopped, start "
        f"it again {f'by: {again}' if named else 'with --resume'}; then there will be a verdict.",
    )


def _unjudged(manifest: RunManifest) -> Iterator[Action]:
    if manifest.kind == "trace":
        yield Action(
            "Compare it with another trace", "sdc diff GOLDEN THIS, or sdc trace --against GOLDEN on the next machine."
        )
    else:
        yield Action(
            "Nothing: no verdict was asked for",
            "For one, check the products (sdc train --abft) or train twins (sdc twin).",
        )


def _inconclusive(summary: RunSummary) -> Iterator[Action]:
    found = summary.abft
    if found is not None and found.flagged:
        yield Action(
            "Run the same steps on another device",
            "Rows that are as wrong when computed again are a permanent fault or a false alarm; another device tells.",
        )
    elif found is not None and found.skipped:
        yield Action(
            "Check more of the products", "The table of products that were not checked says why; --least-coverage sets "
            "how much is enough."
        )  # fmt: skip
    elif summary.simulated:
        yield Action(
            "Aim the fault at what is checked",
            "It struck where no check looks, or after all was NaN: choose a site, a smaller rate or other bits.",
        )
    else:
        yield Action("Mend what the reason names, and run again", "This says nothing about the hardware.")
