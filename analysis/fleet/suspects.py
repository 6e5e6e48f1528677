"""Votes of hosts on digests, the resulting suspects, and the confidence in each.

The same program on the same kind of device should give the same bits. Devices of one host share its memory, driver and
power, so they are not independent: each host has one vote, which its devices share. The majority is the digest with
more than half of the votes and more than half of the devices, on at least two hosts. Without a majority, no device is
outvoted, and the hosts that differ are only reported, since any of them may be wrong. Simulated results never affect
the outcome for real results: they vote only if the real results have no majority, and then only on other simulated
results.

Suspects are not assigned a probability. A probability would require the rate of defective devices in this fleet, for
which published values differ by a factor of ten or more, and the rate at which each defect appears in each workload,
which is unknown. Instead, verifiable rules assign each suspect to one of three classes, and points rank the suspects
within a class:

confirmed   Two independent kinds of evidence, or the evidence of two burn-ins, point to this device alone. No other
            single cause (a nondeterministic program, a record of another version, a disturbance) explains both.
probable    One kind of evidence in one burn-in points to this device alone.
possible    Devices differ without a majority, so any of them may be wrong; or the device is outvoted by other hosts but
            shares its digest with another host. Independent faults do not produce the same 64 bits: a setting, firmware
            or version that the key does not include, or a common fault, is more likely.

Two kinds of evidence are independent if no single mistake could cause both: `repeat` (the same device gave different
bits), `vote` (other devices of this or another host), `golden` (a record), `reference` (computed by the host),
`checksums`.

A suspect gets 3 points for each independent kind of evidence, 2 for each further burn-in (at most 4 points in all), 2
if the fault is persistent or 1 if it is intermittent, 1 if at least three hosts outvote the device, 1 if several
workload families show the fault, and 1 if the driver of the device reported errors. The points are halved if all
evidence is against a whole group of devices.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from sdc.schema import Fields, about
from sdc.verdict import SIMULATED

from .collection import DeviceResult, HostKey, HostResult, WorkloadResult
from .pair_schedule import is_host_name

Confidence: TypeAlias = Literal["confirmed", "probable", "possible"]
CONFIDENCES: tuple[Confidence, ...] = ("confirmed", "probable", "possible")
SHOWN = 20  # maximum number of sightings listed for a suspect
NEXT_PAIRED = 4  # healthy hosts to pair with a suspect
SEVERITY = {"persistent": 2, "intermittent": 1, "transient": 0, None: 0}
FLEET = "fleet vote"
Counts: TypeAlias = dict[tuple[str, str], tuple[int, int]]
"""Number of runs with a difference and total number of runs, by burn-in and workload."""


class Ballot(NamedTuple):
    """The result that a device produced for a workload in a burn-in of its host."""

    result: HostResult
    part: DeviceResult
    row: WorkloadResult

    @property
    def digest(self) -> str:
        return str(self.row.digest)


class Outvoted(NamedTuple):
    """A device whose digest differs from that of the majority."""

    ballot: Ballot
    expected: str
    hosts: int  # other hosts with the majority's digest
    among: int  # other hosts that took part
    shared: tuple[HostKey, ...]  # other hosts with the same wrong digest, which rules out independent faults


class Group(msgspec.Struct, kw_only=True):
    """Devices with the same digest."""

    digest: str
    devices: int
    hosts: list[str]


class TieRow(msgspec.Struct, kw_only=True):
    """Groups of devices whose digests differ; no group has a majority."""

    workload: str
    simulated: bool
    groups: list[Group]


class Votes(NamedTuple):
    """The result of comparing all hosts with one another."""

    compared: int  # programs that several hosts ran
    alone: int  # programs that only one host ran
    split: int  # workloads with several programs or versions, which are not comparable
    agreed: frozenset[str]  # devices that agree with a majority in every comparison, by identity
    hosts: frozenset[HostKey]  # hosts that were compared with others
    outvoted: tuple[Outvoted, ...]
    ties: tuple[TieRow, ...]


def majority(votes: Iterable[tuple[HostKey, str, str]]) -> str | None:
    """Returns the majority digest, or None, from the host, the device and the digest of each ballot. A device has one
    vote, which the digests of its burn-ins share."""
    by_device: dict[tuple[HostKey, str], Counter[str]] = defaultdict(Counter)
    for host, device, digest in votes:
        by_device[host, device][digest] += 1
    by_host: dict[HostKey, dict[str, Fraction]] = defaultdict(lambda: defaultdict(Fraction))
    devices: dict[str, Fraction] = defaultdict(Fraction)
    for (host, _), ballots in by_device.items():
        for digest, count in ballots.items():
            by_host[host][digest] += Fraction(count, ballots.total())
            devices[digest] += Fraction(count, ballots.total())
    if not devices:
        return None
    digest = max(devices, key=lambda digest: devices[digest])
    if 2 * devices[digest] <= len(by_device) or sum(digest in counts for counts in by_host.values()) < 2:
        return None
    won = sum(counts.get(digest, 0) / sum(counts.values()) for counts in by_host.values())
    return digest if 2 * won > len(by_host) else None


def vote(results: Sequence[HostResult]) -> Votes:
    ballots: dict[str, list[Ballot]] = defaultdict(list)
    contexts: dict[str, set[str]] = defaultdict(set)
    for result in results:
        for row in result.rows:
            if row.context is not None and row.digest is not None and row.standard:
                ballots[row.context].append(Ballot(result, result.parts[row.device], row))
                contexts[row.workload].add(row.context)
    compared, alone = 0, 0
    hosts: set[HostKey] = set()
    agreed: set[str] = set()
    outvoted: list[Outvoted] = []
    ties: list[TieRow] = []
    for each in ballots.values():
        among = {ballot.result.host for ballot in each}
        if len(among) < 2:
            alone += 1
            continue
        true = {ballot.result.host for ballot in each if not ballot.result.simulated}
        compared += 1
        hosts |= among if len(true) != 1 else among - true  # a single real result is not compared with simulations
        if len({ballot.digest for ballot in each}) == 1:  # nearly always true
            agreed.update(ballot.part.identity for ballot in each)
            continue
        real = [ballot for ballot in each if not ballot.result.simulated]
        known = majority((ballot.result.host, ballot.part.identity, ballot.digest) for ballot in real)
        simulated = [ballot for ballot in each if ballot.result.simulated]
        usual = known or majority((ballot.result.host, ballot.part.identity, ballot.digest) for ballot in each)
        holders: dict[str, set[HostKey]] = defaultdict(set)
        for ballot in each:
            holders[ballot.digest].add(ballot.result.host)
        for group, expected in ((real, known), (simulated, usual)):
            if expected is None:
                ties += _tie(group)
                continue
            for ballot in group:
                own = {ballot.result.host}
                if ballot.digest == expected:
                    agreed.add(ballot.part.identity)
                    continue
                shared = tuple(sorted(holders[ballot.digest] - own, key=str))
                outvoted.append(Outvoted(ballot, expected, len(holders[expected] - own), len(among - own), shared))
    agreed -= {each.ballot.part.identity for each in outvoted}
    split = sum(len(each) > 1 for each in contexts.values())
    return Votes(compared, alone, split, frozenset(agreed), frozenset(hosts), tuple(outvoted), tuple(ties))


def _tie(group: Sequence[Ballot]) -> Iterator[TieRow]:
    digests: dict[str, list[Ballot]] = defaultdict(list)
    for ballot in group:
        digests[ballot.digest].append(ballot)
    groups = [
        Group(
            digest=digest,
            devices=len({ballot.part.identity for ballot in ballots}),
            hosts=sorted({ballot.result.host.name for ballot in ballots}),
        )
        for digest, ballots in sorted(digests.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    if len(groups) > 1:
        simulated = all(ballot.result.simulated for ballot in group)
        yield TieRow(workload=group[0].row.workload, simulated=simulated, groups=groups)


class Sighting(NamedTuple):
    """An observed difference on a device."""

    kinds: tuple[str, ...]
    workload: str
    burn_in: str
    created: str
    persistence: str | None  # whether the difference recurred; None if no run was repeated
    alone: bool  # whether only this device is accused
    hosts: int  # number of hosts that outvote the device
    text: str


class Accusation(Fields, kw_only=True):
    """A burn-in in which a device differed, as stored in a ledger."""

    created: Annotated[str, about("start of the burn-in")]
    kinds: Annotated[list[str], about("kinds of evidence")]
    alone: Annotated[bool, about("whether this device alone is accused")]
    wrong_runs: Annotated[int, about("runs with a difference")]


class NamedDevice(msgspec.Struct, kw_only=True):
    """A device and its location in a rack."""

    host: str
    device: int
    identity: str
    kind: str
    serial: str | None
    uuid: str | None
    bus: str | None
    driver: str | None
    simulated: bool


class SuspectRow(NamedDevice, kw_only=True):
    """A device whose results differ."""

    confidence: Confidence
    points: int | float
    kinds: list[str]
    workloads: list[str]
    wrong_runs: int
    runs: int
    burn_ins: int
    first: str
    last: str
    persistence: str | None
    errors: list[str]
    seen: list[str]
    machine: str | None
    not_shown: int  # sightings
    next: list[str]  # next actions, as sentences and commands


def named_device(result: HostResult, part: DeviceResult, simulated: bool) -> NamedDevice:
    return NamedDevice(
        host=result.host.name, device=part.index, identity=part.identity, kind=part.kind, serial=part.serial,
        uuid=part.uuid, bus=part.bus, driver=part.driver, simulated=simulated,
    )  # fmt: skip


def find_suspects(
    results: Sequence[HostResult], votes: Votes, past: Mapping[str, Mapping[str, Accusation]] | None = None
) -> list[SuspectRow]:
    seen: dict[tuple[str, bool], list[Sighting]] = defaultdict(list)
    errors: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for result, part, sighting in _sightings(results, votes):
        seen[part.identity, result.simulated].append(sighting)
        errors[part.identity, result.simulated] += part.errors
    # The device may have moved since it differed.
    where = {
        (part.identity, result.simulated): (result, part)
        for result in sorted(results, key=lambda result: result.created)
        for part in result.parts.values()
        if (part.identity, result.simulated) in seen
    }
    wrong = wrong_runs(results, votes)
    found = []
    for place, sightings in seen.items():
        before = {} if place[1] else (past or {}).get(place[0], {})
        own = list(dict.fromkeys(errors[place]))
        found.append(_suspect(place[1], *where[place], sightings, own, before, wrong.get(place, {})))
    order = {confidence: number for number, confidence in enumerate(CONFIDENCES)}
    return sorted(found, key=lambda each: (each.simulated, order[each.confidence], -each.points, each.identity))


def wrong_runs(
    results: Sequence[HostResult], votes: Votes
) -> dict[tuple[str, bool], dict[tuple[str, str], tuple[int, int]]]:
    """Returns the number of runs with a difference and the total number of runs for each device, burn-in and workload;
    real and simulated results are counted separately.

    If other hosts outvote a device, every run of that workload with the same data counts as a run with a difference,
    even if all runs of the device agree.
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
        found[part.identity, result.simulated][result.id, row.workload] = row.standard, row.runs
    return found


def _sightings(results: Sequence[HostResult], votes: Votes) -> Iterator[tuple[HostResult, DeviceResult, Sighting]]:
    for result in results:
        found = set()
        about = result.id, result.created
        for finding in result.findings:
            for index in finding.devices:
                found.add((finding.workload, index))
                sighting = Sighting(
                    finding.kinds, finding.workload, *about, finding.persistence, len(finding.devices) == 1, 0,
                    finding.sentence,
                )  # fmt: skip
                yield result, result.parts[index], sighting
        for row in result.rows:
            if row.differences and (row.workload, row.device) not in found:
                text = f"{row.workload}: differences in {row.differences} of {row.runs} runs"
                yield (
                    result,
                    result.parts[row.device],
                    Sighting(("repeat",), row.workload, *about, None, True, 0, text),
                )
    for each in votes.outvoted:
        result, part, row = each.ballot
        text = f"{row.workload}: digest {row.digest}, but {each.hosts} of {each.among} other hosts have {each.expected}"
        if each.shared:
            names = ", ".join(host.name for host in each.shared[:3])
            more = " and others" if len(each.shared) > 3 else ""
            text += f"; {names}{more} gave the same wrong digest: look for a common cause"
        seen = Sighting((FLEET,), row.workload, result.id, result.created, None, not each.shared, each.hosts, text)
        yield result, part, seen


def _suspect(
    simulated: bool,
    result: HostResult,
    part: DeviceResult,
    sightings: list[Sighting],
    errors: list[str],
    past: Mapping[str, Accusation],
    wrong: Counts,
) -> SuspectRow:
    past = {id: each for id, each in past.items() if id not in {one.burn_in for one in sightings}}
    alone = [each for each in sightings if each.alone]
    # Kinds of evidence; other devices of the host and other hosts count as one kind.
    named = (kind for each in (alone or sightings) for kind in each.kinds)
    kinds = list(dict.fromkeys("vote" if kind == FLEET else kind for kind in named))
    accusing = {each.burn_in for each in alone} | {id for id, each in past.items() if each.alone}
    several = {each.burn_in for each in sightings} | set(past)
    confidence: Confidence = "possible"
    if alone:
        confidence = "confirmed" if len(kinds) > 1 or len(accusing) > 1 else "probable"
    grave = max((each.persistence for each in sightings), key=lambda each: SEVERITY[each])
    points = 3 * len(kinds) + min(4, 2 * (len(several) - 1)) + SEVERITY[grave]
    points += (max(each.hosts for each in sightings) >= 3) + bool(errors)
    points += len({each.workload.partition("/")[0] for each in sightings}) > 1
    times = sorted([*(each.created for each in sightings), *(each.created for each in past.values())])
    ordered = sorted(sightings, key=lambda each: each.created)
    return SuspectRow(
        **msgspec.structs.asdict(named_device(result, part, simulated)),
        confidence=confidence, points=points if alone else points / 2, kinds=kinds,
        workloads=list(dict.fromkeys(each.workload for each in sightings)),
        wrong_runs=sum(count for count, _ in wrong.values()), runs=sum(count for _, count in wrong.values()),
        burn_ins=len(several), first=times[0], last=times[-1], persistence=grave, errors=errors,
        seen=[each.text for each in ordered[:SHOWN]], machine=result.host.machine,
        not_shown=max(0, len(sightings) - SHOWN), next=_next(result.host.name, part, confidence, simulated=simulated),
    )  # fmt: skip


def _next(host: str, part: DeviceResult, confidence: Confidence, *, simulated: bool) -> list[str]:
    """Returns the next actions, as sentences and commands."""
    if simulated:
        return [SIMULATED]
    steps = [f"take {host} out of service"]
    if is_host_name(host):
        healthy = " ".join(f"HEALTHY{number}" for number in range(1, NEXT_PAIRED + 1))
        steps.append(f"sdc fleet schedule {host} {healthy} --rounds {NEXT_PAIRED} --suspects {host}")
    if confidence == "possible":
        steps.append("compare versions, firmware and settings of the hosts that differ before blaming a device")
    else:
        what = part.serial or part.uuid or f"device {part.index}"
        steps.append(
            f"if {host} differs from healthy hosts again, return {what} to the vendor with the result and evidence"
        )
    return steps
