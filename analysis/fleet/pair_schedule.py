"""Schedules of host pairs in rounds, the jobs that run them, and the number of rounds needed to identify bad hosts.

Without suspects, the circle method is used. One host is fixed, the other m hosts are the corners of a polygon, and
round r pairs the hosts whose numbers sum to r modulo m. In m rounds, every host meets every other host once. If the
number of hosts is odd, an empty seat is added, and the host that is paired with the empty seat rests.

With s suspects and h other hosts, where s and h are odd and s <= h, round t pairs suspect i with healthy host i + t
modulo h. The remaining h - s consecutive healthy hosts are paired from the outside in: the first meets the last, the
second meets the second to last, and so on. The distances within these pairs are odd and distinct and h is odd, so no
two hosts meet twice within h rounds, and suspects never meet each other. If s or h is even, a healthy host or the empty
seat is added to the suspects. If more rounds are requested than this method provides, the circle method is used with
the suspects in adjacent places: only a few of its rounds then pair suspects with each other, and these rounds come
last.

In the simulation, a pair with one or two bad hosts shows a difference with some probability in each meeting; a pair of
healthy hosts never does. A pair that differs does not reveal which of its hosts is bad. By the decoding rule, the bad
hosts are *the smallest set of hosts that has a member in every pair that differed*, if that set is unique; otherwise no
host is identified. Pairs that did not differ are not used, since the probability that a bad host shows a difference is
unknown. A bad host is therefore identified once two of its pairs have differed, unless other hosts explain these
differences equally well. A bad host whose pairs never differed is missed. If two bad hosts meet the same healthy hosts,
the healthy hosts explain the differences equally well.
"""

import itertools
import json
import random
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from sdc.settings import SettingError

from ..statistics import proportion_interval

LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST_NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*")
MOST_HOSTS, MOST_ROUNDS = 10_000, 1_000
Pair: TypeAlias = tuple[str, str]
Seat: TypeAlias = str | None  # a host, or the empty seat


class Schedule(NamedTuple):
    rounds: tuple[tuple[Pair, ...], ...]
    resting: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def is_host_name(name: str) -> bool:
    """Returns whether a string is a host name (RFC 1123), and is therefore safe in shells and schedulers."""
    return len(name) <= 253 and HOST_NAME.fullmatch(name) is not None


def make_schedule(hosts: Sequence[str], rounds: int, *, suspects: Sequence[str] = (), seed: int = 0) -> Schedule:
    """Pairs hosts so that each host meets a different one in every round and suspects meet healthy hosts."""
    _check(hosts, rounds, suspects)
    draw = random.Random(seed)
    bad = [host for host in hosts if host in set(suspects)]
    good = [host for host in hosts if host not in set(suspects)]
    draw.shuffle(bad)
    draw.shuffle(good)
    made = _apart(bad, good, rounds) if bad else None
    if made is None:
        made = _circle(bad, good, rounds, draw)
    accused = set(bad)
    pairs = tuple(
        tuple((b, a) if a in accused and b not in accused else (a, b) for a, b in meetings) for meetings in made
    )
    resting = tuple(
        tuple(host for host in hosts if host not in {name for each in one for name in each}) for one in pairs
    )
    return Schedule(pairs, resting, tuple(_notes(hosts, rounds, bad, pairs)))


def _check(hosts: Sequence[str], rounds: int, suspects: Sequence[str]) -> None:
    for host in (*hosts, *suspects):
        if not is_host_name(host):
            advice = "; expand a Slurm host list with scontrol show hostnames" if "[" in host else ""
            raise SettingError("HOSTS", repr(host), f"expected a host name (letters, digits, hyphens, dots){advice}")
    counts = Counter(host.lower() for host in hosts)
    twice = next((host for host in hosts if counts[host.lower()] > 1), None)
    strange = next((host for host in suspects if host not in hosts), None)
    for wrong, setting, given, problem in (
        (twice is not None, "HOSTS", twice, "this host is listed twice; list each host once"),
        (not 2 <= len(hosts) <= MOST_HOSTS, "HOSTS", len(hosts), f"expected 2 to {MOST_HOSTS:,} hosts"),
        (not 1 <= rounds <= MOST_ROUNDS, "rounds", rounds, f"expected 1 to {MOST_ROUNDS:,}"),
        (strange is not None, "suspects", strange, "is not among the hosts; add it to HOSTS"),
    ):
        if wrong:
            raise SettingError(setting, given, problem)


def _apart(bad: list[str], good: list[str], rounds: int) -> list[list[Pair]] | None:
    """Returns rounds in which no two suspects meet; None if there are fewer such rounds than required."""
    whole = (len(bad) + len(good)) % 2 == 0
    sides: list[tuple[list[Seat], list[Seat]]] = []
    if whole:
        sides.append(([*bad], [*good]) if len(bad) % 2 else ([*bad, *good[:1]], [*good[1:]]))
        if len(bad) % 2 == 0:
            sides.append(([*bad], [*good]))  # the healthy hosts left in this last round have already met, so they rest
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


def _notes(hosts: Sequence[str], rounds: int, bad: Sequence[str], pairs: Sequence[Sequence[Pair]]) -> Iterator[str]:
    met = Counter(frozenset(each) for one in pairs for each in one)
    again = sum(count > 1 for count in met.values())
    if again:
        yield (f"{rounds} rounds are too many for {len(hosts)} hosts: {again} pairs meet more than once")
    among = sum(len(pair & set(bad)) == 2 for pair in met)
    if among:
        yield f"{among} pairs consist of two suspects, because there are too few other hosts for {rounds} rounds"
    healthy = [sum(name in pair and len(pair & set(bad)) == 1 for pair in met) for name in bad]
    if bad:
        fewest, most = min(healthy), max(healthy)
        yield f"each suspect meets {fewest if fewest == most else f'{fewest} to {most}'} hosts that are not suspects"


PORT = 4321


def srun_lines(schedule: Schedule, folder: str) -> Iterator[str]:
    """Yields a script that runs the pairs of a round concurrently and the rounds in sequence, and exits with 1 if a
    pair did, otherwise with 3 if a pair did not end with 0."""
    yield from ("#!/bin/sh", "worst=0 pairs=")
    for note in schedule.notes:
        yield f"# {note}"
    for number, pairs in enumerate(schedule.rounds, start=1):
        rest = f"; resting: {' '.join(schedule.resting[number - 1])}" if schedule.resting[number - 1] else ""
        yield f"# round {number} of {len(schedule.rounds)}{rest}"
        for first, second in pairs:
            run = shlex.quote(f"{folder}/round-{number}/{first}-{second}")
            start = "srun --kill-on-bad-exit=0 --nodes=2 --ntasks=2 --ntasks-per-node=1"
            yield f'{start} --nodelist={first},{second} sdc pair --run {run} & pairs="$pairs $!"'
        yield (
            'for pair in $pairs; do wait "$pair"; case $?:$worst in 0:* | *:1) ;; 1:*) worst=1 ;; *) worst=3 ;; esac; '
            "done; pairs="
        )
    yield 'exit "$worst"'


def jobset_lines(schedule: Schedule, folder: str, image: str = "IMAGE") -> Iterator[str]:
    """Yields a JobSet (jobset.x-k8s.io/v1alpha2) for each pair, as YAML documents in JSON syntax.

    All rounds but the first are suspended: resume a round when the previous one has ended.
    """
    for pairs in schedule.rounds:
        for name in (name for pair in pairs for name in pair):
            if name != name.lower() or len(name) > 63:
                raise SettingError(
                    "HOSTS", name, "expected the name of a Kubernetes node: lower case, at most 63 characters"
                )
    for note in schedule.notes:
        yield f"# {note}"
    for number, pairs in enumerate(schedule.rounds, start=1):
        label = f"jax-sdc/round={number}"
        for place, pair in enumerate(pairs, start=1):
            yield "---"
            yield json.dumps(_jobset(number, place, pair, f"{folder}/round-{number}/{'-'.join(pair)}", image), indent=1)
        yield f"# kubectl wait --for=condition=Completed --timeout=-1s jobset -l {label}"
        if number < len(schedule.rounds):
            yield (
                f"# kubectl get jobset -l jax-sdc/round={number + 1} -o name | xargs -n 1 -I NAME "
                """kubectl patch NAME --type=merge -p '{"spec":{"suspend":false}}'"""
            )


def _jobset(number: int, place: int, pair: tuple[str, str], run: str, image: str) -> dict[str, Any]:
    name = f"pair-{number}-{place}"
    coordinator = f"{name}-first-0-0.{name}:{PORT}"

    jobs = []
    for process, role in enumerate(("first", "second")):
        flags = ["--run", run, "--coordinator", coordinator, "--processes", "2", "--process", str(process)]
        pod = {
            "restartPolicy": "Never",
            "nodeSelector": {"kubernetes.io/hostname": pair[process]},
            "containers": [{"name": "pair", "image": image, "command": ["sdc", "pair", *flags]}],
        }
        spec = {"backoffLimit": 0, "parallelism": 1, "completions": 1, "template": {"spec": pod}}
        jobs.append({"name": role, "replicas": 1, "template": {"spec": spec}})
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"jax-sdc/round": str(number)}},
        "spec": {
            "suspend": number > 1,
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": jobs,
        },
    }


Edges: TypeAlias = frozenset[frozenset[str]]
MOST_SIMULATED, MOST_BAD, MOST_TRIALS = 1_000, 12, 100_000


class Named(NamedTuple):
    """The outcome of a simulation of fleets after a number of rounds."""

    rounds: int
    exact: int  # trials that identify exactly the bad hosts
    wrong: int  # trials that identify other hosts, or only some of the bad ones
    undecided: int  # trials in which several sets explain the differences, or no pair differed
    trials: int
    share: float
    low: float
    high: float


def name_bad(pairs: Iterable[tuple[str, str]]) -> frozenset[str] | None:
    found: set[str] = set()
    for part in _components(frozenset(map(frozenset, pairs))):
        covers: list[frozenset[str]] = []
        size = 0
        while not covers:  # find up to two sets of this size that have a member in every pair
            size += 1
            exact = (cover for cover in _covers(part, size) if len(cover) == size)
            covers = list(itertools.islice(exact, 2))
        if len(covers) > 1:
            return None
        found |= covers[0]
    return frozenset(found)


def simulate_naming(
    hosts: int, bad: int, probability: float, rounds: int, *, trials: int = 1000, seed: int = 0
) -> list[Named]:
    """Simulates fleets and returns, for each number of rounds, the share of fleets whose bad hosts are identified."""
    most = min(MOST_BAD, hosts - 1)
    for right, setting, given, problem in (
        (2 <= hosts <= MOST_SIMULATED, "hosts", hosts, f"expected 2 to {MOST_SIMULATED:,}"),
        (1 <= bad <= most, "bad", bad, f"expected 1 to {most} of {hosts} hosts"),
        (0 < probability <= 1, "probability", probability, "expected a number above 0 and at most 1"),
        (1 <= rounds <= MOST_ROUNDS, "rounds", rounds, f"expected 1 to {MOST_ROUNDS:,}"),
        (1 <= trials <= MOST_TRIALS, "trials", trials, f"expected 1 to {MOST_TRIALS:,}"),
    ):
        if not right:
            raise SettingError(setting, given, problem)
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


def _components(edges: Edges) -> Iterator[Edges]:
    """Returns the connected components of a graph."""
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


def _covers(edges: Edges, size: int) -> Iterator[frozenset[str]]:
    """Yields covers of at most `size` hosts: for every host, a cover contains that host or all hosts that it met."""
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
