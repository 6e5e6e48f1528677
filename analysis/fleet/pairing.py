"""Whom to pair with whom, round by round.

Without suspects: the circle method. One host stays, the others sit at the m corners of a polygon, and in round r those
meet whose numbers add up to r modulo m. In m rounds everybody meets everybody once; an odd number of hosts has one more
seat, and who sits across from it rests.

With s suspects and h others, both odd and s <= h: in round t suspect i meets healthy host i + t modulo h. That leaves a
stretch of h - s healthy ones, which is folded: the first meets the last, and so on. Their distances are odd and
different and h is odd, so that no two meet twice within h rounds; a suspect never meets a suspect. If s or h is even, a
healthy host or the empty seat sits among the suspects. Where more rounds are asked for than that gives, the circle is
used with the suspects side by side: few of its rounds have suspects that meet each other, and those come last.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from sdc.settings import SettingError

LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST_NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*")
MOST_HOSTS, MOST_ROUNDS = 10_000, 1_000
Pair: TypeAlias = tuple[str, str]
Seat: TypeAlias = str | None
"""A host, or the empty seat."""


class Schedule(NamedTuple):
    """Pairs by round.

    Attributes:
        rounds: pairs; a suspect stands second, so that the first of a pair is the reference.
        resting: hosts that rest, by round.
        notes: what cannot be had.
    """

    rounds: tuple[tuple[Pair, ...], ...]
    resting: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def is_host_name(name: str) -> bool:
    """Whether a text is a host name (RFC 1123), which no shell and no scheduler takes for anything else.

    Example:
        >>> from sdc.analysis.fleet.pairing import is_host_name
        >>> is_host_name("gpu-17.rack2"), is_host_name("gpu;reboot"), is_host_name("-gpu")
        (True, False, False)
    """
    return len(name) <= 253 and HOST_NAME.fullmatch(name) is not None


def make_schedule(hosts: Sequence[str], rounds: int, *, suspects: Sequence[str] = (), seed: int = 0) -> Schedule:
    """Pairs hosts so that each meets as many others as there are rounds, and suspects meet healthy hosts.

    Args:
        hosts: names, two or more.
        rounds: how many rounds. When everybody has met everybody, they begin anew.
        suspects: those of the hosts that are not to meet each other, as far as that can be avoided.
        seed: who meets whom first.

    Raises:
        SettingError: a name is none or stands there twice, a suspect is no host, or there are too few or too many.

    Example:
        >>> from sdc.analysis.fleet.pairing import make_schedule
        >>> made = make_schedule(["a", "b", "c", "d"], 2, suspects=["a", "b"])
        >>> [len(pairs) for pairs in made.rounds], any({"a", "b"} == set(pair) for each in made.rounds for pair in each)
        ([2, 2], False)
    """
    _check(hosts, rounds, suspects)
    draw = random.Random(seed)
    bad = [host for host in hosts if host in set(suspects)]
    good = [host for host in hosts if host not in set(suspects)]
    draw.shuffle(bad)
    draw.shuffle(good)
    made = _apart(bad, good, rounds) if bad else None
    if made is None:
        made = _circle(bad, good, rounds, draw)
    pairs = tuple(tuple(_ordered(each, set(bad)) for each in pairs) for pairs in made)
    resting = tuple(
        tuple(host for host in hosts if host not in {name for each in one for name in each}) for one in pairs
    )
    return Schedule(pairs, resting, tuple(_notes(hosts, rounds, bad, pairs)))


def _check(hosts: Sequence[str], rounds: int, suspects: Sequence[str]) -> None:
    for host in (*hosts, *suspects):
        if not is_host_name(host):
            advice = "; scontrol show hostnames expands lists of Slurm" if "[" in host else ""
            raise SettingError("HOSTS", repr(host), f"expected a host name (letters, digits, hyphens, dots){advice}")
    counts = Counter(host.lower() for host in hosts)
    if twice := next((host for host in hosts if counts[host.lower()] > 1), None):
        raise SettingError("HOSTS", twice, "this host is named twice")
    if not 2 <= len(hosts) <= MOST_HOSTS:
        raise SettingError("HOSTS", len(hosts), f"expected 2 to {MOST_HOSTS:,} hosts")
    if not 1 <= rounds <= MOST_ROUNDS:
        raise SettingError("rounds", rounds, f"expected 1 to {MOST_ROUNDS:,}")
    if strange := next((host for host in suspects if host not in hosts), None):
        raise SettingError("suspects", strange, "is none of the hosts; name it among them too")


def _apart(bad: list[str], good: list[str], rounds: int) -> list[list[Pair]] | None:
    """Rounds in which no suspect meets a suspect, by the rule of the module; None where that gives too few."""
    whole = (len(bad) + len(good)) % 2 == 0
    sides: list[tuple[list[Seat], list[Seat]]] = []
    if whole:
        sides.append(([*bad], [*good]) if len(bad) % 2 else ([*bad, *good[:1]], [*good[1:]]))
        if len(bad) % 2 == 0:
            sides.append(([*bad], [*good]))  # the last round of these has healthy hosts that met before: they rest
    elif len(bad) % 2 == 0:
        sides.append(([*bad, None], [*good]))
    else:
        sides += [([*bad, None, *good[:1]], [*good[1:]]), ([*bad], [*good, None])]
    for few, many in sides:
        if len(few) <= len(many) and rounds <= len(many):
            return [list(pairs) for pairs in _folded(few, many, rounds)]
    return None


def _folded(few: list[Seat], many: list[Seat], rounds: int) -> Iterator[list[Pair]]:
    met: set[frozenset[Seat]] = set()
    for turn in range(rounds):
        at = [many[(place + turn) % len(many)] for place in range(len(many))]
        left = at[len(few) :]
        folded = [(left[place], left[-1 - place]) for place in range(len(left) // 2)]
        seats = [*zip(at, few, strict=False), *folded]
        pairs = [(a, b) for a, b in seats if a is not None and b is not None and frozenset((a, b)) not in met]
        met.update(map(frozenset, pairs))
        yield pairs


def _circle(bad: list[str], good: list[str], rounds: int, draw: random.Random) -> list[list[Pair]]:
    """Rounds of the circle method, those in which suspects meet each other last."""
    seats: list[Seat] = [*bad, *good]
    if len(seats) % 2:
        seats.append(None)
    corners, middle = seats[:-1], seats[-1]
    several = len(corners)
    every: list[list[Pair]] = []
    for total in range(several):
        pairs = []
        for place, seat in enumerate(corners):
            other = (total - place) % several
            across = middle if other == place else corners[other]
            if place <= other and seat is not None and across is not None:
                pairs.append((seat, across))
        every.append(pairs)
    draw.shuffle(every)
    among = set(bad)
    every.sort(key=lambda pairs: sum(a in among and b in among for a, b in pairs))
    return [every[number % several] for number in range(rounds)]


def _ordered(pair: Pair, bad: set[str]) -> Pair:
    a, b = pair
    return (b, a) if a in bad and b not in bad else (a, b)


def _notes(hosts: Sequence[str], rounds: int, bad: Sequence[str], pairs: Sequence[Sequence[Pair]]) -> Iterator[str]:
    met = Counter(frozenset(each) for one in pairs for each in one)
    again = sum(count > 1 for count in met.values())
    if again:
        yield (
            f"{rounds} rounds are more than {len(hosts)} hosts have others to meet: {again} pairs meet more than once"
        )
    among = sum(len(pair & set(bad)) == 2 for pair in met)
    if among:
        yield f"{among} pairs of two suspects meet: there are too few others for so many rounds"
    healthy = [sum(name in pair and len(pair & set(bad)) == 1 for pair in met) for name in bad]
    if bad:
        fewest, most = min(healthy), max(healthy)
        yield f"each suspect meets {fewest if fewest == most else f'{fewest} to {most}'} hosts that are no suspects"
