"""What the runs of a workload prove: three independent kinds of evidence, and what the host and checksums add.

repeat      a device gives the bits that it gave before; blind to a fault that repeats itself
vote        the devices of one kind give the same bits; the majority names the odd one
golden      a device gives the bits that were recorded; blind to nothing, where they are of the same program
reference   a device gives the bits that the host computes, where it can
checksums   the sums of a matrix product agree with those of its factors, and what did not is right when repeated

A difference is run again at once: does it come again, and what differs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .comparison import compare_outputs
from .programs import Programs, RunOutcome
from .results import Evidence, Finding, Persistence
from .workloads import Workload

RERUNS = 3
"""Runs right after a difference."""
Place = int | None
"""Index of a device; None for all of them together."""
Run = Callable[[Place], "list[RunOutcome] | Exception"]


class Vote(NamedTuple):
    """What the devices say of each other."""

    odd: dict[int, str]  # for each device that the others outvote, what these have
    ties: tuple[tuple[int, ...], ...]  # groups of devices that differ without a majority
    agreed: tuple[int, ...]  # devices that others agree with


def vote(digests: Mapping[int, str], kinds: Mapping[int, str]) -> Vote:
    """Lets the devices of each kind vote: the majority is what more of them have than anything else, two at least."""
    odd: dict[int, str] = {}
    ties: list[tuple[int, ...]] = []
    agreed: list[int] = []
    for kind in sorted({kinds[device] for device in digests}):
        group = {device: digest for device, digest in digests.items() if kinds[device] == kind}
        if len(group) < 2:
            continue
        ranked = Counter(group.values()).most_common()
        if len(ranked) > 1 and ranked[1][1] == ranked[0][1]:
            ties.append(tuple(sorted(group)))
            continue
        for device, digest in group.items():
            if digest == ranked[0][0]:
                agreed.append(device)
            else:
                odd[device] = ranked[0][0]
    return Vote(odd, tuple(ties), tuple(agreed))


class Suspicion(NamedTuple):
    """A device whose outputs differ, or several of which nothing says which."""

    devices: tuple[int, ...]  # one, or those that are tied
    kinds: tuple[Evidence, ...]  # evidence that sees it
    expected: str | None  # digest of what the outputs should be, where it is known


def examine(
    outcomes: Sequence[RunOutcome],
    voted: Vote,
    *,
    before: Mapping[int, str | None],
    golden: Mapping[int, str],
    references: Mapping[int, str],
) -> list[Suspicion]:
    """What the outcomes of one workload, run once on each device, say beside earlier, recorded and computed digests."""
    digests = {outcome.device: outcome.digest for outcome in outcomes}
    found: list[Suspicion] = []
    for outcome in outcomes:
        device = outcome.device
        sources: dict[Evidence, Mapping[int, str | None]] = {
            "vote": voted.odd, "reference": references, "golden": golden, "repeat": before,
        }  # fmt: skip
        against: list[tuple[Evidence, str]] = [
            (kind, known)
            for kind, each in sources.items()
            if (known := each.get(device)) is not None and known != outcome.digest
        ]
        seen: tuple[Evidence, ...] = tuple(kind for kind, _ in against)
        if outcome.checks.confirmed:
            seen = (*seen, "checksums")
        if seen:
            found.append(Suspicion((device,), seen, against[0][1] if against else None))
    named = {device for suspicion in found for device in suspicion.devices}
    for tie in voted.ties:
        # Of those that nothing else speaks against, all that are left agree with each other, or nobody knows who erred.
        if len({digests[device] for device in tie if device not in named}) != 1:
            found.append(Suspicion(tie, ("vote",), None))
    return found


class Confirmation(NamedTuple):
    """What the runs right after a difference say of it."""

    finding: Finding
    baselines: dict[int, str]  # what each device is to be compared with from now on
    errors: tuple[tuple[Place, Exception], ...]  # what the runs threw, and where
    outputs: tuple[Any, Any] | None  # right and wrong ones on the host, where right ones were at hand


def confirm(
    workload: Workload, suspicion: Suspicion, outcomes: Sequence[RunOutcome], run: Run, programs: Programs, round: int
) -> Confirmation:
    """Runs a workload again where it differed."""
    first = {outcome.device: outcome for outcome in outcomes}
    again: dict[int, list[RunOutcome]] = {device: [] for device in suspicion.devices}
    errors: list[tuple[Place, Exception]] = []
    places: Sequence[Place] = [None] if workload.multi else suspicion.devices
    for place in places:
        for _ in range(RERUNS):
            done = run(place)
            if isinstance(done, Exception):
                errors.append((place, done))
                break
            for outcome in done:
                if outcome.device in again:
                    again[outcome.device].append(outcome)
    usual = {
        device: Counter(outcome.digest for outcome in runs).most_common(1)[0][0]
        for device, runs in again.items()
        if runs
    }
    devices, kinds, expected = suspicion.devices, suspicion.kinds, suspicion.expected
    note = ""
    if len(devices) > 1:  # a tie: who errs but now and then gives other bits in the runs after it
        settled = set(usual.values())
        odd = tuple(device for device in devices if first[device].digest not in settled)
        if len(settled) == 1 and len(usual) == len(devices) and odd:
            devices, kinds, expected = odd, (*kinds, "repeat"), settled.pop()
        else:
            note = "a tie: the devices differ, and nothing says which of them is wrong"
    wrong = [_wrong(outcome, first[each], expected) for each in devices for outcome in again[each]]
    persistence = persistence_of(wrong) if wrong else None
    if kinds == ("repeat",) and persistence == "persistent":
        note = "the bits changed and stayed: either the runs before were wrong or those since are"
    outputs = _outputs(workload, first, again, devices, expected, programs)
    elements = None if outputs is None else compare_outputs(*outputs)
    if elements is None and not note:
        note = "no right outputs were at hand to compare with"
    finding = Finding(
        workload=workload.name, devices=devices, round=round, kinds=kinds, digest=first[devices[0]].digest,
        expected=expected, persistence=persistence, elements=elements, confirmed=first[devices[0]].checks.confirmed,
        note=note,
    )  # fmt: skip
    baselines = {each: _baseline(runs, usual[each], expected) for each, runs in again.items() if runs}
    return Confirmation(finding, baselines, tuple(errors), outputs)


def persistence_of(wrong: Sequence[bool]) -> Persistence:
    """What it is called that a difference came again in some of the runs right after it."""
    if not any(wrong):
        return "transient"
    return "persistent" if all(wrong) else "intermittent"


def _baseline(runs: Sequence[RunOutcome], usual: str, expected: str | None) -> str:
    """What a device repeats from now on: what is right if it gives that as well, else what it gives again and again.

    Wrong bits that came once must not become it, or the next right ones would count as another difference.
    """
    digests = [run.digest for run in runs]
    if expected is not None and (expected in digests or digests.count(usual) == 1):
        return expected
    return usual


def _wrong(outcome: RunOutcome, first: RunOutcome, expected: str | None) -> bool:
    if expected is None:  # checksums alone, or a tie that stays
        return outcome.digest == first.digest and (not first.checks.confirmed or outcome.checks.confirmed > 0)
    return outcome.digest != expected


def _outputs(
    workload: Workload,
    first: Mapping[int, RunOutcome],
    again: Mapping[int, Sequence[RunOutcome]],
    devices: Sequence[int],
    expected: str | None,
    programs: Programs,
) -> tuple[Any, Any] | None:
    """Whatever right outputs there are, and the wrong ones of the first device; of a tie those of two of them."""
    wrong = first[devices[0]]
    right: Any = None
    if expected is None:
        others = [first[other] for other in devices if first[other].digest != wrong.digest]
        right = others[0].outputs if others else None
    else:
        candidates = [*first.values(), *(outcome for runs in again.values() for outcome in runs)]
        right = next((outcome.outputs for outcome in candidates if outcome.digest == expected), None)
        known = programs.reference(workload, wrong.device)
        if right is None and known is not None and known.digest == expected:
            right = programs.expected(workload, wrong.device)
    if right is None:
        return None
    return jax.device_get(right), jax.device_get(wrong.outputs)
