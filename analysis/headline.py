"""What a record says in one sentence, and what a reader asks first: which device, which operation, since when, is it
real, and what now. The terminal, the page and the Markdown show the same."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sdc.records import Contents

from . import advice, outlooks, recoveries
from .advice import Action
from .devices import listed, where, whole
from .equality import COMPARED, what_differs
from .evidence import AXES, Evidence, Rank, of_products, of_twins
from .series import Row, count, mapping, sequence
from .summary import summarize
from .verdict import REHEARSAL, odd_digests

WAYS = {"fwd": "forward", "bwd": "backward", "remat": "recomputed"}
UNKNOWN = "the record does not say"
NOWHERE = "none: nothing differed"
LOSSES = "losses"
"""Name of the suspect where nothing is simulated but losses of parts of the state."""


@dataclasses.dataclass(frozen=True)
class Headline:
    """The first screen of a report in words.

    Attributes:
        sentence: what happened, where and since when.
        device: which device it was.
        operation: which operation.
        since: since when, and how it went on.
        real: whether the fault was real or simulated.
        actions: what to do next, the first thing first.
    """

    sentence: str
    device: str
    operation: str
    since: str
    real: str
    actions: tuple[Action, ...]

    @property
    def answers(self) -> tuple[tuple[str, str], ...]:
        """The five questions with their answers."""
        return (
            ("Which device", self.device),
            ("Which operation", self.operation),
            ("Since when", self.since),
            ("Real or simulated", self.real),
            ("What now", self.actions[0].what),
        )


def headline(run: Contents, summary: Row) -> Headline:
    """The headline of a twin, a training run or a trace.

    Args:
        run: the record.
        summary: its summary, as `summary_of` makes it.
    """
    found = (_corrupt if summary.get("verdict") == "corrupt" else _not_corrupt)(run, summary)
    actions = advice.actions(
        run.manifest, summary, ended=run.ended, course=found.course, first=found.first, named=found.named,
        hits=found.hits,
    )  # fmt: skip
    said = "; ".join(filter(None, (found.sentence, recoveries.sentence(run.lines), outlooks.sentence(run.lines))))
    return Headline(said, found.device, found.operation, found.since, _real(run.manifest, summary), tuple(actions))


@dataclasses.dataclass(frozen=True)
class Found:
    """A headline before its advice.

    Attributes:
        sentence, device, operation, since: as in `Headline`.
        course: how the fault went on, if that is known.
        first: the first step with a finding.
        named: the hardware that was found to differ.
        hits: numbers of the steps with a finding.
    """

    sentence: str
    device: str
    operation: str
    since: str
    course: str | None = None
    first: int | None = None
    named: str = ""
    hits: tuple[int, ...] = ()


def _not_corrupt(run: Contents, summary: Row) -> Found:
    reason = str(summary.get("reason"))
    if summary.get("verdict") == "clean":
        hosts = count(summary.get("hosts"))
        on = f" on {hosts} hosts" if hosts and hosts > 1 else ""
        on += f"; {REHEARSAL}" if summary.get("rehearsal") else ""
        return Found(
            reason.partition(";")[0] + on, NOWHERE, NOWHERE, f"at no step of the {summary['steps']:,} that were done"
        )
    if summary.get("verdict") is None:
        nothing = "nothing was compared, so nothing can be said"
        sentence = f"{summary['steps']:,} steps; {reason}"
        return Found(sentence, nothing, nothing, nothing)
    reason = reason.partition("; at 95 %")[0]  # of a run that has not ended and is clean so far
    if not run.ended and "has not ended" not in reason:
        reason = f"the run has not ended; {reason}"
    unknown = f"unknown: {_brief(reason)}"
    return Found(reason, unknown, unknown, unknown)


def _corrupt(run: Contents, summary: Row) -> Found:
    if run.kind.name == "trace" and (place := mapping(summary.get("first_difference"))):
        return of_place(place)
    seen = _seen(summary)
    if run.discarded:  # what a step showed counts, although it was run again
        run = run.attempts
        kept = {key: summary[key] for key in ("verdict", "reason", "steps", "simulated")}
        summary = {**summary, **summarize(run.manifest, run.lines, run.details, whole=False), **kept}
    if summary.get("first_mismatch_step") is not None:
        found = _twins(run, summary, of_twins(run))
    elif _seen(summary):
        found = _products(run, summary, of_products(run))
    elif apart := odd_digests(summary.get("state_digest")):
        found = _final(run, summary, apart)
    else:
        suspects = listed([f"data rank {rank}" for rank in sequence(mapping(summary.get("shadow")).get("suspects"))])
        return Found(str(summary.get("reason")), suspects or UNKNOWN, UNKNOWN, UNKNOWN, named=suspects)
    again = ", in steps that were run again" if _seen(summary) and not seen else ""
    return dataclasses.replace(found, sentence=found.sentence + again, since=found.since + again)


def _seen(summary: Row) -> bool:
    """Whether a step shows what is wrong."""
    return summary.get("first_mismatch_step") is not None or bool(count(mapping(summary.get("abft")).get("flagged")))


def of_place(place: Row) -> Found:
    """The first difference of two traces, as `describe_difference` describes it."""
    layer = "" if place.get("layer") is None else f"layer {place['layer']}, "
    way = WAYS.get(str(place.get("direction")), str(place.get("direction")))
    scope = f" in {place['scope']}" if place.get("scope") else ""
    source = f", at {place['source']}" if place.get("source") else ""
    devices = "; ".join(
        ", ".join(f"{axis} {number}" for axis, number in mapping(device).items())
        for device in sequence(place.get("devices"))
    )
    step = place.get("step")
    operation = f"{layer}{place.get('operation')}, {way}{scope}{source}"
    return Found(
        f"{devices + ': ' if devices else ''}{layer}{place.get('site')}{source}: first difference at step {step}",
        devices or "the only device of the run",
        operation,
        f"step {step}; a trace is compared up to its first difference",
        first=count(step),
        named=devices,
    )


def _twins(run: Contents, summary: Row, found: Evidence) -> Found:
    odd = [twin for twin in sequence(summary.get("odd_twins")) if count(twin) is not None]
    odd = odd or sorted({rank[0] for rank in found.ranks if rank[0] is not None})
    who, device = _odd(run.manifest, summary, odd, found.ranks)
    first = summary["first_mismatch_step"]
    # Twins that are not synchronized go on differing whatever the fault does.
    course = None if summary.get("sync") == "none" else found.course
    what = _elements(summary, run, _spot(found)) or _other(run.lines)
    sentence = f"{who}: {what}, first at step {first}{f', {course}' if course else ''}"
    return Found(
        sentence, device, _spots(found) or f"not located: only {' and '.join(_parts(summary)) or 'whole steps'} differ",
        _since(first, found, course, free=summary.get("sync") == "none"), course, first, who, found.steps,
    )  # fmt: skip


def _final(run: Contents, summary: Row, odd: Sequence[int]) -> Found:
    """Twins that agreed at every step and not in the end."""
    who, device = _odd(run.manifest, summary, odd, ())
    return Found(
        f"{who}: the final state differs, although no step showed a difference",
        device,
        "none that was compared: it changed in memory, or while the last checkpoint was written",
        f"after the last comparison, that of step {summary['steps'] - 1:,}",
        first=summary["steps"],
        named=who,
    )


def _odd(manifest: Row, summary: Row, odd: Sequence[int], ranks: Iterable[Rank]) -> tuple[str, str]:
    """The twins that differ, as they are called, and what hardware they are."""
    pair = manifest.get("twins") in (2, None)
    if not odd and pair:
        odd = [1]  # by convention the first of two is the reference
    # A rank that only the state or the gradient tells of cannot be named.
    known = [rank for rank in ranks if rank[0] in odd]
    names = []
    for twin in odd:
        place = where(manifest, [rank for rank in known if rank[0] == twin] or [(twin, None, None)])
        names.append(f"twin {twin}" + (f" ({place})" if place else ""))
    who = listed(names) or "the twins"
    parts = whole(manifest, known)
    device = f"{who}{f' ({parts})' if parts else ''}"
    if manifest.get("placement") == "vmap":
        device += "; all twins share their devices"
    if pair and not summary.get("simulated"):
        device += "; of two twins the comparison cannot say which is wrong: calling this one so is a convention"
    return who, device


def _spot(found: Evidence) -> str:
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
        return _spot(found)
    most = f"{_spot(found)}; most in {_site(found.sites[0])}"
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


def _elements(summary: Row, run: Contents, spot: str) -> str:
    sites = [*mapping(summary.get("submodules")).values(), *mapping(summary.get("other_sites")).values()]
    mismatched, checked = (sum(count(site.get(key)) or 0 for site in sites) for key in ("mismatched", "checked"))
    once = sum(count(row.get("unrepeated")) or 0 for row in run.details)
    parts = [f"{amount(mismatched)} of {amount(checked)} elements"] * bool(mismatched)
    parts += [f"{amount(once)} digest{'s' * (once > 1)} that did not differ again when repeated"] * bool(once)
    if parts:
        return f"{spot + ': ' if spot else ''}{' and '.join(parts)}"
    return " and ".join(_parts(summary))


def _other(lines: Sequence[Row]) -> str:
    """What differs without a count of elements."""
    parts = what_differs(lines)
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return listed(parts[:3]) + more or "details of a step without a line"


def _parts(summary: Row) -> list[str]:
    return [
        f"{amount(counts['mismatched'])} of {amount(counts['checked'])} elements of the {name}"
        for part, name in COMPARED.items()
        if (counts := mapping(summary.get(part))).get("mismatched")
    ]


def _products(run: Contents, summary: Row, found: Evidence) -> Found:
    total, spot = summary["abft"], _spot(found)
    place = listed([name for name in map(_rank_name(run.manifest), found.ranks) if name][:3])
    course, first = found.course, total["first_step"]
    rows = f"{amount(total['flagged'])} of {amount(total['checked'])} checked rows of matrix products are wrong"
    sentence = f"{place + ': ' if place else ''}{spot + ': ' if spot else ''}{rows}, first at step {first}"
    known = whole(run.manifest, found.ranks)
    device = (place or "the only device of the run") + (f" ({known})" if known else "")
    sentence += f", {course}" if course else ""
    since = _since(first, found, course)
    return Found(sentence, device, _spots(found) or UNKNOWN, since, course, first, place, found.steps)


def _rank_name(manifest: Row) -> Callable[[Any], str]:
    def name(rank: Any) -> str:
        twin = "" if rank[AXES.index("twin")] is None or not manifest.get("twins") else f"twin {rank[0]}"
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


def _real(manifest: Row, summary: Row) -> str:
    suspect = mapping(manifest.get("suspect"))
    if suspect.get("name") == LOSSES:
        return "simulated: parts of the state were thrown away on purpose, on sound hardware"
    if summary.get("simulated") or suspect.get("simulated"):
        return f"simulated: {suspect.get('name') or 'the suspect'} was corrupted on purpose, on sound hardware"
    if summary.get("rehearsal"):
        return (
            "nothing was injected, but this is a rehearsal, not a test of hardware: one processor played all the twins"
        )
    return "real: nothing was injected"


def _brief(reason: str, limit: int = 90) -> str:
    first = reason.partition(";")[0]
    return first if len(first) <= limit else f"{first[: limit - 1]}…"


def amount(value: int) -> str:
    """A count for reading: `831,066`, and from a million on `4.2e7`."""
    if value < 1_000_000:
        return f"{value:,}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
