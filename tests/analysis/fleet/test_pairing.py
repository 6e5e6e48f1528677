"""Schedules: who meets whom, how it is started, and how many rounds name the bad ones."""

import itertools
import json
import os
import random
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from sdc.analysis.fleet.pair_schedule import (
    Schedule,
    jobset_lines,
    make_schedule,
    name_bad,
    simulate_naming,
    srun_lines,
)
from sdc.settings import SettingError


def meetings(schedule: Schedule) -> Counter[frozenset[str]]:
    return Counter(frozenset(pair) for pairs in schedule.rounds for pair in pairs)


@st.composite
def wishes(draw: st.DrawFn) -> tuple[list[str], int, int, int]:
    hosts = draw(st.integers(2, 33))
    everybody = hosts - 1 if hosts % 2 == 0 else hosts
    rounds, suspects = draw(st.integers(1, everybody)), draw(st.integers(0, hosts))
    return [f"h{number}" for number in range(hosts)], rounds, suspects, draw(st.integers(0, 3))


@given(wishes())
def test_what_a_schedule_keeps(wish: tuple[list[str], int, int, int]) -> None:
    hosts, rounds, number, seed = wish
    suspects = set(hosts[:number])
    made = make_schedule(hosts, rounds, suspects=sorted(suspects), seed=seed)
    met = meetings(made)
    assert len(made.rounds) == rounds
    assert all(count == 1 for count in met.values())  # nobody meets the same one twice
    for pairs, resting in zip(made.rounds, made.resting, strict=True):
        busy = [host for pair in pairs for host in pair]
        assert sorted([*busy, *resting]) == sorted(hosts)  # nobody is in two places, nobody is forgotten
        assert all(second in suspects or first not in suspects for first, second in pairs)
    healthy = len(hosts) - number
    last = number and number % 2 == 0 and healthy % 2 == 0 and rounds == healthy  # some that met before rest, once
    rests = Counter(host for resting in made.resting for host in resting)
    if not last:
        assert max(rests.values(), default=0) <= (rounds if len(hosts) % 2 else 0)
        assert all(len(resting) == len(hosts) % 2 for resting in made.resting)
    if number <= healthy and rounds <= healthy:
        assert not any(pair <= suspects for pair in met)
        fewest = min((sum(host in pair for pair in met) for host in suspects), default=rounds)
        assert fewest >= rounds - len(hosts) % 2
    elif any(pair <= suspects for pair in met):
        assert any("two suspects" in note for note in made.notes)
    assert made == make_schedule(hosts, rounds, suspects=sorted(suspects), seed=seed)


def test_more_rounds_than_others_are_told() -> None:
    made = make_schedule(["a", "b", "c", "d"], 5)
    assert set(meetings(made).values()) == {1, 2}
    assert made.notes == ("5 rounds are too many for 4 hosts: 4 pairs meet more than once",)
    assert make_schedule(["a", "b", "c", "d"], 3).notes == ()


@pytest.mark.parametrize(
    ("hosts", "suspects", "problem"),
    [
        (["a"], [], "expected 2 to"),
        (["a", "A"], [], "listed twice"),
        (["a", "b;reboot"], [], "expected a host name"),
        (["a", "$(reboot)"], [], "expected a host name"),
        (["a", "-x"], [], "expected a host name"),
        (["a", "b\nc"], [], "expected a host name"),
        (["a", "gpu[1-3]"], [], "scontrol show hostnames"),
        (["a", "x" * 64], [], "expected a host name"),
        (["a", "bücher"], [], "expected a host name"),
        (["a", "b"], ["c"], "not among the hosts"),
    ],
)
def test_names_that_are_none_are_refused(hosts: list[str], suspects: list[str], problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        make_schedule(hosts, 1, suspects=suspects)


def test_lines_for_slurm() -> None:
    made = make_schedule(["a", "b.rack", "c"], 3, suspects=["a"])
    lines = list(srun_lines(made, "/shared/my runs"))
    starts = [line for line in lines if line.startswith("srun")]
    nodes = [shlex.split(line)[5].removeprefix("--nodelist=").split(",") for line in starts]
    assert {frozenset(pair) for pair in nodes} == set(meetings(made))
    assert all(shlex.split(line)[9].startswith("/shared/my runs/round-") for line in starts)
    rounds = "\n".join(lines).split("\nfor pair in")
    assert [part.count("srun") for part in rounds] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 0, 0), 0), ((0, 1, 3), 1), ((3, 0, 1), 1), ((0, 3, 0), 3), ((0, 0, 2), 3), ((137, 0, 0), 3)],
)
def test_the_script_for_slurm_ends_with_the_gravest_of_its_pairs(
    codes: Sequence[int], code: int, tmp_path: Path
) -> None:
    made = make_schedule([f"n{number}" for number in range(6)], 2)
    ends = {",".join(pair): end for pair, end in zip(itertools.chain(*made.rounds), (*codes, 0, 0, 0), strict=True)}
    (tmp_path / "srun").write_text(
        "#!/bin/sh\ncase $* in\n" + "".join(f"*{pair}*) exit {end} ;;\n" for pair, end in ends.items()) + "esac\n"
    )
    (tmp_path / "srun").chmod(0o755)
    script = "\n".join(srun_lines(made, "/runs"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert subprocess.run(["sh", "-c", script], env={"PATH": path}, check=False).returncode == code


def test_documents_for_kubernetes() -> None:
    made = make_schedule(["a", "b", "c", "d"], 2)
    text = "\n".join(jobset_lines(made, "/runs", "registry/sdc:1"))
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    documents = [json.loads(part) for part in bare.split("---\n")[1:]]
    assert [each["spec"]["suspend"] for each in documents] == [False, False, True, True]
    assert len({each["metadata"]["name"] for each in documents}) == 4
    for each, pair in zip(documents, itertools.chain(*made.rounds), strict=True):
        jobs = [job["template"]["spec"]["template"]["spec"] for job in each["spec"]["replicatedJobs"]]
        assert tuple(job["nodeSelector"]["kubernetes.io/hostname"] for job in jobs) == pair
        commands = [job["containers"][0]["command"] for job in jobs]
        assert [command[-1] for command in commands] == ["0", "1"]
        name = each["metadata"]["name"]
        assert commands[0][:-1] == commands[1][:-1]
        assert f"{name}-first-0-0.{name}:4321" in commands[0]
        assert {job["containers"][0]["image"] for job in jobs} == {"registry/sdc:1"}
    with pytest.raises(SettingError, match="lower case"):
        list(jobset_lines(make_schedule(["A", "b"], 1), "/runs"))


def smallest_sets(pairs: list[tuple[str, str]]) -> list[frozenset[str]]:
    """By trying all sets of hosts."""
    hosts = sorted({host for pair in pairs for host in pair})
    for size in range(len(hosts) + 1):
        found = [
            frozenset(each) for each in itertools.combinations(hosts, size) if all(set(p) & set(each) for p in pairs)
        ]
        if found:
            return found
    return []


def test_who_is_named_is_what_trying_all_sets_gives() -> None:
    draw = random.Random(0)
    unique = 0
    for _ in range(300):
        hosts = "abcdefgh"[: draw.randint(2, 8)]
        every = list(itertools.combinations(hosts, 2))
        pairs = draw.sample(every, draw.randint(0, min(9, len(every))))
        found = smallest_sets(pairs)
        assert name_bad(pairs) == (found[0] if len(found) == 1 else None)
        unique += len(found) == 1
    assert 30 < unique < 270


def test_simulated_shares_are_those_of_all_cases() -> None:
    """Six hosts, two of them bad, certain detection: all 15 pairs of bad hosts, on the schedule that is used."""
    rounds, names = 3, [f"h{number}" for number in range(6)]
    schedule = make_schedule(names, rounds).rounds
    for upto in range(1, rounds + 1):
        exact = 0
        for truth in map(set, itertools.combinations(names, 2)):
            failed = [pair for pairs in schedule[:upto] for pair in pairs if set(pair) & truth]
            exact += smallest_sets(failed) == [frozenset(truth)]
        row = simulate_naming(6, 2, 1.0, upto, trials=2000)[-1]
        assert row.low <= exact / 15 <= row.high
        assert row.exact + row.wrong + row.undecided == row.trials


def test_more_rounds_and_surer_pairs_name_more() -> None:
    shares = [row.share for row in simulate_naming(20, 2, 0.7, 8, trials=400)]
    assert shares[0] == 0  # of one pair that differs nobody knows which
    assert shares[-1] > 0.85 > shares[2]
    assert simulate_naming(20, 2, 0.3, 8, trials=400)[-1].share < shares[-1]
