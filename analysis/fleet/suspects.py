"""Which devices are suspects, and how sure that is.

There is no probability here. It would need the rate of defective devices of this fleet, and of what each defect shows
in each workload; published rates of the first differ by a factor of ten and more, the second nobody knows. What is
told is one of three classes, by rules that anybody can check, and points that order devices within a class:

confirmed   two independent kinds of evidence name this device alone, or two burn-ins do: what else could explain one of
            them (a program that does not repeat, a record of another version, a disturbance) explains not both
probable    one kind of evidence in one burn-in names this device alone
possible    devices differ and nothing says which of them is wrong; or the device is outvoted by other hosts, but
            shares its digest with another host. Faults that know nothing of each other do not give the same 64 bits: a
            setting, a firmware or a version that the key does not tell is likelier, and so is one fault in common

Kinds of evidence are independent if no one mistake makes both: `repeat` (the same device, other bits), `vote` (other
devices, of this host or of others), `golden` (a record), `reference` (computed by the host), `checksums`.

Points: 3 for each independent kind, 2 for each further burn-in (4 at most), 2 if persistent and 1 if intermittent, 1 if
three hosts or more outvote it, 1 if several families of workloads show it, 1 if its driver reported errors; what only a
group of devices is accused of counts half.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from .collection import DeviceResult, HostKey, HostResult
from .votes import Votes

Confidence: TypeAlias = Literal["confirmed", "probable", "possible"]
CONFIDENCES: tuple[Confidence, ...] = ("confirmed", "probable", "possible")
SEVERITY = {"persistent": 2, "intermittent": 1, "transient": 0, None: 0}
FLEET = "fleet vote"
Counts: TypeAlias = dict[tuple[str, str], tuple[int, int]]
"""Runs with a difference, and all runs, by burn-in and workload."""


class Sighting(NamedTuple):
    """A difference that somebody saw on a device."""

    kinds: tuple[str, ...]
    workload: str
    burn_in: str
    created: str
    persistence: str | None  # whether it came again; None where nobody tried
    alone: bool  # whether the device alone is accused
    hosts: int  # that outvote it
    text: str


class Past(NamedTuple):
    """A burn-in of before that accused a device, as a ledger has it."""

    created: str
    kinds: tuple[str, ...]
    alone: bool
    wrong_runs: int


@dataclasses.dataclass(frozen=True)
class SuspectDevice:
    """A device that differs."""

    identity: str
    part: DeviceResult
    host: HostKey
    simulated: bool  # whether only simulations accuse it: then nothing here is about the hardware
    confidence: Confidence
    points: int | float
    kinds: tuple[str, ...]
    workloads: tuple[str, ...]
    wrong_runs: int
    runs: int
    burn_ins: int
    first: str
    last: str
    persistence: str | None
    sightings: tuple[Sighting, ...]


def find_suspects(
    results: Sequence[HostResult], votes: Votes, past: Mapping[str, Mapping[str, Past]] | None = None
) -> list[SuspectDevice]:
    """Devices that differ, the surest first."""
    seen: dict[tuple[str, bool], list[Sighting]] = defaultdict(list)
    where: dict[tuple[str, bool], tuple[HostResult, DeviceResult]] = {}
    for result, part, sighting in _sightings(results, votes):
        place = (part.identity, result.simulated)
        seen[place].append(sighting)
        if place not in where or where[place][0].created <= result.created:
            where[place] = (result, part)
    wrong = wrong_runs(results, votes)
    found = []
    for place, sightings in seen.items():
        before = {} if place[1] else (past or {}).get(place[0], {})
        found.append(_suspect(place, *where[place], sightings, before, wrong.get(place, {})))
    order = {confidence: number for number, confidence in enumerate(CONFIDENCES)}
    return sorted(found, key=lambda each: (each.simulated, order[each.confidence], -each.points, each.identity))


def wrong_runs(
    results: Sequence[HostResult], votes: Votes
) -> dict[tuple[str, bool], dict[tuple[str, str], tuple[int, int]]]:
    """Runs with a difference, and all runs, by device and whether it is simulated, and by burn-in and workload.

    A device that is outvoted by other hosts gave their wrong digest in each run that did not differ from its others.
    """
    found: dict[tuple[str, bool], Counts] = defaultdict(dict)
    for result in results:
        for row in result.rows:
            if row.differences:
                name = result.parts[row.device].identity
                found[name, result.simulated][result.id, row.workload] = row.differences, max(row.runs, row.differences)
        for finding in result.findings:
            for index in finding.devices:
                at = found[result.parts[index].identity, result.simulated]
                at.setdefault((result.id, finding.workload), (1, 1))
    for each in votes.outvoted:
        result, part, row = each.ballot
        found[part.identity, result.simulated][result.id, row.workload] = row.runs, row.runs
    return found


def _sightings(results: Sequence[HostResult], votes: Votes) -> Iterator[tuple[HostResult, DeviceResult, Sighting]]:
    for result in results:
        told = set()
        for finding in result.findings:
            for index in finding.devices:
                told.add((finding.workload, index))
                alone = len(finding.devices) == 1
                kinds = tuple(finding.kinds)
                yield (
                    result,
                    result.parts[index],
                    Sighting(
                        kinds,
                        finding.workload,
                        result.id,
                        result.created,
                        finding.persistence,
                        alone,
                        0,
                        finding.sentence,
                    ),
                )
        for row in result.rows:
            if row.differences and (row.workload, row.device) not in told:
                text = f"{row.workload}: differences in {row.differences} of {row.runs} runs"
                yield (
                    result,
                    result.parts[row.device],
                    Sighting(("repeat",), row.workload, result.id, result.created, None, True, 0, text),
                )
    for each in votes.outvoted:
        result, part, row = each.ballot
        text = (
            f"{row.workload}: digest {row.digest}, where {each.hosts} of {each.among} other hosts have {each.expected}"
        )
        if each.shared:
            names = ", ".join(host.name for host in each.shared[:3])
            more = " and others" if len(each.shared) > 3 else ""
            text += f"; {names}{more} gave the same wrong one: look for a common cause"
        yield (
            result,
            part,
            Sighting((FLEET,), row.workload, result.id, result.created, None, not each.shared, each.hosts, text),
        )


def _suspect(
    place: tuple[str, bool],
    result: HostResult,
    part: DeviceResult,
    sightings: list[Sighting],
    past: Mapping[str, Past],
    wrong: Counts,
) -> SuspectDevice:
    past = {id: each for id, each in past.items() if id not in {one.burn_in for one in sightings}}
    alone = [each for each in sightings if each.alone]
    kinds = _independent(kind for each in (alone or sightings) for kind in each.kinds)
    accusing = {each.burn_in for each in alone} | {id for id, each in past.items() if each.alone}
    several = {each.burn_in for each in sightings} | set(past)
    confidence: Confidence = "possible"
    if alone:
        confidence = "confirmed" if len(kinds) > 1 or len(accusing) > 1 else "probable"
    grave = max((each.persistence for each in sightings), key=lambda each: SEVERITY[each])
    points = 3 * len(kinds) + min(4, 2 * (len(several) - 1)) + SEVERITY[grave]
    points += (max(each.hosts for each in sightings) >= 3) + bool(part.errors)
    points += len({each.workload.partition("/")[0] for each in sightings}) > 1
    times = sorted([*(each.created for each in sightings), *(each.created for each in past.values())])
    return SuspectDevice(
        place[0], part, result.host, place[1], confidence, points if alone else points / 2, kinds,
        tuple(dict.fromkeys(each.workload for each in sightings)), sum(count for count, _ in wrong.values()),
        sum(count for _, count in wrong.values()), len(several), times[0], times[-1], grave,
        tuple(sorted(sightings, key=lambda each: each.created)),
    )  # fmt: skip


def _independent(kinds: Iterator[str]) -> tuple[str, ...]:
    """Kinds of evidence, other devices of the host and other hosts being one."""
    return tuple(dict.fromkeys("vote" if kind == FLEET else kind for kind in kinds))
