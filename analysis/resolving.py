"""Which hosts are wrong, from several pairs of hosts that were compared: as few as explain all the differences."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from sdc.burnin import Pair
from sdc.verdict import Verdict

from .devices import listed

MOST = 12
"""Hosts beyond which nothing is named: so many wrong ones are no exception, but something that all have in common."""
Edge = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What several pairs say together.

    Attributes:
        verdict: corrupt if any pair differs, clean if all agree.
        suspects: hosts that are wrong in each of the likeliest explanations.
        undecided: hosts that are wrong in some of them.
        sentences: that in words.
        simulated: whether faults were simulated.
    """

    verdict: Verdict
    suspects: tuple[str, ...]
    undecided: tuple[str, ...]
    sentences: tuple[str, ...]
    simulated: bool


def resolve_pairs(pairs: Sequence[Pair]) -> Resolution:
    """Says which hosts are wrong, where pairs of them differ and agree.

    Each pair that differs has a wrong host in it. The likeliest explanation has the fewest wrong hosts, and among such
    the fewest wrong ones that agreed with a sound one.

    Args:
        pairs: results of `sdc pair`. Those that are inconclusive count for nothing.

    Raises:
        ValueError: there is none, one is no pair, or its hosts cannot be told apart by name.

    Example:
        >>> from sdc.analysis.resolving import explain
        >>> explain({("a", "b"): True, ("a", "c"): False, ("b", "c"): True})  # differ, agree, differ
        [frozenset({'b'})]
        >>> sorted(sorted(each) for each in explain({("a", "b"): True}))
        [['a'], ['b']]
    """
    edges: dict[Edge, bool] = {}
    void = []
    for pair in pairs:
        names = _names(pair)
        if pair.verdict is Verdict.INCONCLUSIVE:
            void.append(f"{listed(names)}: inconclusive, which counts for nothing")
            continue
        edges[names] = edges.get(names, False) or pair.verdict is Verdict.CORRUPT
    simulated = any(pair.simulated for pair in pairs)
    mark = "SIMULATED: " if simulated else ""
    told = [f"{a} and {b} {'differ' if differ else 'agree'}" for (a, b), differ in edges.items()] + void
    if not edges:
        return Resolution(Verdict.INCONCLUSIVE, (), (), (f"{mark}no pair says anything", *told), simulated)
    if not any(edges.values()):
        return Resolution(Verdict.CLEAN, (), (), (f"{mark}no pair differs", *told), simulated)
    found = explain(edges)
    sure = frozenset.intersection(*found) if found else frozenset()
    open_ = frozenset.union(*found) - sure if found else frozenset(host for edge in edges for host in edge)
    first = f"{listed(sorted(sure))} {'is' if len(sure) == 1 else 'are'} wrong, if as few hosts are as can be"
    parts = [first] * bool(sure)
    parts += [f"of {listed(sorted(open_))} the pairs do not say which; pair each with another host"] * bool(open_)
    return Resolution(
        Verdict.CORRUPT, tuple(sorted(sure)), tuple(sorted(open_)), (mark + "; ".join(parts), *told), simulated
    )


def explain(edges: Mapping[Edge, bool]) -> list[frozenset[str]]:
    """The likeliest sets of wrong hosts; none where they would be too many.

    Args:
        edges: whether the two hosts of each pair differ.
    """
    differing = [edge for edge, differ in edges.items() if differ]
    for size in range(1, MOST + 1):
        if found := set(_covers(differing, size)):
            odd = {
                each: sum(not differ and (a in each) != (b in each) for (a, b), differ in edges.items())
                for each in found
            }
            return [each for each in found if odd[each] == min(odd.values())]
    return []


def _covers(edges: Sequence[Edge], size: int) -> Iterator[frozenset[str]]:
    """Sets of at most so many hosts of which each edge has one."""
    if not edges:
        yield frozenset()
    elif size:
        for host in edges[0]:
            for rest in _covers([edge for edge in edges if host not in edge], size - 1):
                yield rest | {host}


def _names(pair: Pair) -> Edge:
    if len(pair.hosts) != 2:
        raise ValueError(f"a {pair.kind} of {len(pair.hosts)} hosts is no pair; give results of sdc pair")
    a, b = sorted(row.host for row in pair.hosts)
    if any(row.devices and row.host != row.devices[0].host for row in pair.hosts):
        raise ValueError(f"{a} and {b} are one host: pairs of a single host say nothing of others")
    return a, b
