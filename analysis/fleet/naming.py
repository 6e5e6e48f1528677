"""How many rounds of pairs it takes to name the bad hosts: a simulation.

A pair with a bad host shows a difference with some probability in each meeting, and a pair of two bad ones as well; a
pair of healthy hosts never does. A pair that differs does not say which of the two it is. The rule of decoding: the
bad hosts are *the smallest set of hosts that has a member in every pair that differed*, if there is only one such set;
else nobody is named. Pairs that did not differ are not used, since nobody knows how likely a bad host shows itself.
So a bad host is named after two of its pairs differed, unless others explain them as well; one that never differed is
missed, and if two bad hosts meet the same healthy ones, these explain it as well.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from sdc.settings import SettingError

from .. import proportion_interval
from .pairing import MOST_ROUNDS, make_schedule

Edges: TypeAlias = frozenset[frozenset[str]]
MOST_HOSTS, MOST_BAD, MOST_TRIALS = 1_000, 12, 100_000


class Named(NamedTuple):
    """What so many rounds give.

    Attributes:
        rounds: how many.
        exact: trials in which exactly the bad hosts are named.
        wrong: trials in which others are named, or only some of them.
        undecided: trials in which several sets explain what was seen, or nothing was seen.
        trials: how many.
        share, low, high: share of exact ones, and its limits at 95 % (Clopper and Pearson).
    """

    rounds: int
    exact: int
    wrong: int
    undecided: int
    trials: int
    share: float
    low: float
    high: float


def name_bad(pairs: Iterable[tuple[str, str]]) -> frozenset[str] | None:
    """The hosts that pairs with a difference name.

    Args:
        pairs: those that differed.

    Returns:
        The smallest set of hosts with a member in every pair; None if there are several. Empty without pairs.

    Example:
        >>> from sdc.analysis.fleet.naming import name_bad
        >>> sorted(name_bad([("a", "b"), ("a", "c")])), name_bad([("a", "b")])
        (['a'], None)
    """
    found: set[str] = set()
    for part in _components(frozenset(map(frozenset, pairs))):
        size = 1
        while not (covers := _first_two(part, size)):
            size += 1
        if len(covers) > 1:
            return None
        found |= covers[0]
    return frozenset(found)


def simulate_naming(
    hosts: int, bad: int, probability: float, rounds: int, *, trials: int = 1000, seed: int = 0
) -> list[Named]:
    """Which share of fleets has its bad hosts named after each number of rounds.

    Args:
        hosts: number of hosts.
        bad: how many of them are bad, drawn at random.
        probability: with which a pair with a bad host differs in a meeting.
        rounds: most rounds.
        trials: fleets to draw.
        seed: of the draws.

    Raises:
        SettingError: a number is out of its range.

    Example:
        >>> from sdc.analysis.fleet.naming import simulate_naming
        >>> [each.exact for each in simulate_naming(16, 1, 1.0, 2, trials=50)]
        [0, 50]
    """
    _check(hosts, bad, probability, rounds, trials)
    draw = random.Random(seed)
    names = [f"h{number}" for number in range(hosts)]
    schedule = make_schedule(names, rounds).rounds
    counts = [[0, 0, 0] for _ in range(rounds)]
    for _ in range(trials):
        truth = frozenset(draw.sample(names, bad))
        failed: set[tuple[str, str]] = set()
        named: frozenset[str] | None = frozenset()
        for number, pairs in enumerate(schedule):
            fresh = {pair for pair in pairs if truth & set(pair) and draw.random() < probability}
            if not fresh <= failed:
                failed |= fresh
                named = name_bad(failed)
            counts[number][2 if not named else 0 if named == truth else 1] += 1
    found = []
    for number, (exact, wrong, undecided) in enumerate(counts, start=1):
        limits = proportion_interval(exact, trials)
        found.append(Named(number, exact, wrong, undecided, trials, exact / trials, *limits))
    return found


def _check(hosts: int, bad: int, probability: float, rounds: int, trials: int) -> None:
    if not 2 <= hosts <= MOST_HOSTS:
        raise SettingError("hosts", hosts, f"expected 2 to {MOST_HOSTS:,}")
    if not 1 <= bad <= min(MOST_BAD, hosts - 1):
        raise SettingError("bad", bad, f"expected 1 to {min(MOST_BAD, hosts - 1)} of {hosts} hosts")
    if not 0 < probability <= 1:
        raise SettingError("probability", probability, "expected a number above 0, and 1 at most")
    if not 1 <= rounds <= MOST_ROUNDS:
        raise SettingError("rounds", rounds, f"expected 1 to {MOST_ROUNDS:,}")
    if not 1 <= trials <= MOST_TRIALS:
        raise SettingError("trials", trials, f"expected 1 to {MOST_TRIALS:,}")


def _components(edges: Edges) -> Iterator[Edges]:
    """Parts of a graph that have no host in common."""
    touching: dict[str, set[frozenset[str]]] = defaultdict(set)
    for edge in edges:
        for host in edge:
            touching[host].add(edge)
    left = set(edges)
    while left:
        part, fresh = set(), {next(iter(left))}
        while fresh:
            part |= fresh
            fresh = {near for edge in fresh for host in edge for near in touching[host]} - part
        left -= part
        yield frozenset(part)


def _first_two(edges: Edges, size: int) -> list[frozenset[str]]:
    """Up to two sets of so many hosts with a member in every pair."""
    found: list[frozenset[str]] = []
    for cover in _covers(edges, size):
        if len(cover) == size:
            found.append(cover)
        if len(found) == 2:
            break
    return found


def _covers(edges: Edges, size: int) -> Iterator[frozenset[str]]:
    """Sets of at most so many hosts: one is in a set, or all that it met are."""
    if not edges:
        yield frozenset()
        return
    met: dict[str, set[str]] = defaultdict(set)
    for a, b in map(sorted, edges):
        met[a].add(b)
        met[b].add(a)
    host = max(sorted(met), key=lambda name: len(met[name]))
    if size * len(met[host]) < len(edges):
        return
    for chosen in (frozenset((host,)), frozenset(met[host])):
        if len(chosen) <= size:
            left = frozenset(edge for edge in edges if not edge & chosen)
            yield from (cover | chosen for cover in _covers(left, size - len(chosen)))
