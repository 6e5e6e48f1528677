"""Hosts vote on digests: whoever ran the same program on the same kind of device should have the same bits.

Devices of one host share its memory, driver and power, so that they are not independent: each host has one vote, which
its devices share. The majority is the digest that has more than half of the votes, more than half of the devices, and
is on two hosts at the least. Where there is none, nobody is outvoted, and the hosts that differ are told: of two hosts
that differ nothing here says which is wrong.

Results of simulations never decide about others: they have a vote only where none else has a majority, and then only
about each other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from .collection import DeviceResult, HostKey, HostResult, WorkloadResult


class Ballot(NamedTuple):
    """What a device of a host gave in a burn-in."""

    result: HostResult
    part: DeviceResult
    row: WorkloadResult

    @property
    def digest(self) -> str:
        """The digest, which ballots have."""
        assert self.row.digest is not None
        return self.row.digest


class Outvoted(NamedTuple):
    """A device whose digest is not that of the majority."""

    ballot: Ballot
    expected: str
    hosts: int  # other hosts that have that
    among: int  # other hosts that took part
    shared: tuple[HostKey, ...]  # other hosts with the same wrong digest, which independent faults do not give


class Tie(NamedTuple):
    """Devices that differ, where nothing says which of them are wrong."""

    workload: str
    groups: tuple[tuple[str, tuple[Ballot, ...]], ...]


class Votes(NamedTuple):
    """What all hosts say of each other."""

    compared: int  # programs that several hosts ran
    alone: int  # programs that only one host ran
    split: int  # workloads of which there are several programs, or versions, that are not comparable
    agreed: frozenset[str]  # devices that agree with a majority in all that could be compared, by identity
    hosts: frozenset[HostKey]  # that were compared with others
    outvoted: tuple[Outvoted, ...]
    ties: tuple[Tie, ...]


def majority(votes: Iterable[tuple[HostKey, str]]) -> str | None:
    """The digest that is right, as far as hosts can say."""
    by_host: dict[HostKey, Counter[str]] = defaultdict(Counter)
    devices: Counter[str] = Counter()
    for host, digest in votes:
        by_host[host][digest] += 1
        devices[digest] += 1
    if not devices:
        return None
    digest, most = devices.most_common(1)[0]
    if 2 * most <= devices.total() or sum(digest in counts for counts in by_host.values()) < 2:
        return None
    won = sum(Fraction(counts[digest], counts.total()) for counts in by_host.values())
    return digest if 2 * won > len(by_host) else None


def vote(results: Sequence[HostResult]) -> Votes:
    """Lets hosts vote on everything that several of them ran."""
    ballots: dict[str, list[Ballot]] = defaultdict(list)
    contexts: dict[str, set[str]] = defaultdict(set)
    for result in results:
        for row in result.rows:
            if row.context is not None and row.digest is not None and row.runs:
                ballots[row.context].append(Ballot(result, result.parts[row.device], row))
                contexts[row.workload].add(row.context)
    compared, alone = 0, 0
    hosts: set[HostKey] = set()
    agreed: set[str] = set()
    outvoted: list[Outvoted] = []
    ties: list[Tie] = []
    for each in ballots.values():
        among = {ballot.result.host for ballot in each}
        if len(among) < 2:
            alone += 1
            continue
        true = {ballot.result.host for ballot in each if not ballot.result.simulated}
        compared += 1
        hosts |= among if len(true) != 1 else among - true  # one among simulations is compared with nothing
        if len({ballot.digest for ballot in each}) == 1:  # which is so nearly always
            agreed.update(ballot.part.identity for ballot in each)
            continue
        real = [ballot for ballot in each if not ballot.result.simulated]
        known = majority((ballot.result.host, ballot.digest) for ballot in real)
        simulated = [ballot for ballot in each if ballot.result.simulated]
        usual = known or majority((ballot.result.host, ballot.digest) for ballot in each)
        for group, expected in ((real, known), (simulated, usual)):
            if expected is None:
                ties += _tie(group)
                continue
            agreed.update(ballot.part.identity for ballot in group if ballot.digest == expected)
            outvoted += _outvoted(group, each, expected)
    agreed -= {each.ballot.part.identity for each in outvoted}
    split = sum(len(each) > 1 for each in contexts.values())
    return Votes(compared, alone, split, frozenset(agreed), frozenset(hosts), tuple(outvoted), tuple(ties))


def _outvoted(group: Sequence[Ballot], every: Sequence[Ballot], expected: str) -> list[Outvoted]:
    having: dict[str, set[HostKey]] = defaultdict(set)
    for ballot in every:
        having[ballot.digest].add(ballot.result.host)
    among = {ballot.result.host for ballot in every}
    found = []
    for ballot in group:
        if ballot.digest != expected:
            own = {ballot.result.host}
            shared = tuple(sorted(having[ballot.digest] - own, key=str))
            found.append(Outvoted(ballot, expected, len(having[expected] - own), len(among - own), shared))
    return found


def _tie(group: Sequence[Ballot]) -> list[Tie]:
    digests: dict[str, list[Ballot]] = defaultdict(list)
    for ballot in group:
        digests[ballot.digest].append(ballot)
    if len(digests) < 2:
        return []
    ranked = sorted(digests.items(), key=lambda item: (-len(item[1]), item[0]))
    return [Tie(group[0].row.workload, tuple((digest, tuple(ballots)) for digest, ballots in ranked))]
