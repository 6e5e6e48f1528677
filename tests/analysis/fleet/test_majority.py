"""Hosts vote: whoever disagrees is named, exactly, and nobody where nothing decides."""

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest

from sdc.analysis.fleet import collection
from sdc.analysis.fleet.collection import Collection, HostKey, HostResult
from sdc.analysis.fleet.fleet_summary import outliers, summarize_results
from sdc.analysis.fleet.suspects import find_suspects, majority, vote
from sdc.burnin.results import BurninResult
from tests.reports import DAY, WORKLOADS, digest_of, make_finding, make_report

A, B, C, D = (HostKey(name, None) for name in "abcd")
NEXT_DAY = DAY.replace("-05T", "-06T")


def reduced(*reports: BurninResult) -> list[HostResult]:
    return [collection.reduced(f"{number}.json", report) for number, report in enumerate(reports)]


def named(results: Sequence[HostResult]) -> dict[str, str]:
    return {each.host: each.confidence for each in find_suspects(results, vote(results))}


def wrong(host: str, device: int = 1, workload: str = WORKLOADS[1]) -> dict[tuple[str, int], str]:
    return {(workload, device): digest_of("wrong", host)}


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([(A, "x"), (B, "x"), (C, "y")], "x"),
        ([(A, "x"), (B, "y")], None),
        ([(A, "x"), (A, "x"), (A, "x"), (B, "y")], None),  # devices of one host are not independent
        ([(A, "x"), (A, "y"), (B, "x"), (B, "x")], "x"),
        ([(A, "x"), (B, "x"), (C, "y"), (D, "y")], None),
        ([(A, "x"), (A, "x"), (B, "y"), (B, "y"), (B, "y"), (B, "x")], None),  # more votes, not more devices
        ([*8 * [(A, "x")], (B, "y"), (C, "y"), (D, "y")], None),
        ([*8 * [(A, "x")], (B, "x"), (C, "y"), (D, "y"), (HostKey("e", None), "y")], None),  # more devices, not hosts
        ([(A, "x"), (B, "x"), (C, "y"), (D, "z"), (HostKey("e", None), "w")], None),  # more than others is not most
        ([], None),
    ],
)
def test_a_majority_is_one_of_hosts_and_of_devices(votes: list[tuple[HostKey, str]], expected: str | None) -> None:
    ballots = [(host, f"device {number}", digest) for number, (host, digest) in enumerate(votes)]
    assert majority(ballots) == expected
    assert majority(list(reversed(ballots))) == expected
    assert majority(10 * ballots) == expected


def test_a_device_has_one_vote_however_often_it_was_tested() -> None:
    """Ten burn-ins of the bad host do not outnumber those of the others, and a flaky device shares its vote."""
    days = [DAY.replace("-05T", f"-{day:02}T") for day in range(5, 15)]
    reports = [make_report("bad", digests=wrong("bad"), created=day) for day in days]
    reports += [make_report("a"), make_report("b")]
    votes = vote(reduced(*reports))
    assert ({each.ballot.result.host.name for each in votes.outvoted}, votes.ties) == ({"bad"}, ())
    assert majority([(A, "0", "x"), (B, "0", "x"), (C, "0", "y"), (C, "0", "x"), (D, "0", "y")]) == "x"
    assert majority([(A, "0", "x"), (B, "0", "x"), *3 * [(C, "0", "y")], (C, "0", "x"), (D, "0", "y")]) == "x"


def test_thirty_hosts_with_three_bad_ones_whichever() -> None:
    """All 4,060 triples: of each the healthy and the bad result of every host are at hand."""
    names = [f"gpu-{number:02}" for number in range(30)]
    healthy = dict(zip(names, reduced(*(make_report(name) for name in names)), strict=True))
    bad = dict(zip(names, reduced(*(make_report(name, digests=wrong(name)) for name in names)), strict=True))
    workload = [row for row in healthy[names[0]].rows if row.workload == WORKLOADS[1]]
    assert len(workload) == 2
    for triple in itertools.combinations(names, 3):
        votes = vote([_only(bad[name] if name in triple else healthy[name]) for name in names])
        assert sorted(each.ballot.result.host.name for each in votes.outvoted) == list(triple)
        assert {each.ballot.part.index for each in votes.outvoted} == {1}
        assert not votes.ties
    for triple in itertools.islice(itertools.combinations(names, 3), 0, None, 203):
        assert set(named([bad[name] if name in triple else healthy[name] for name in names])) == set(triple)


def _only(result: HostResult) -> HostResult:
    """A result with one workload alone."""
    rows = tuple(row for row in result.rows if row.workload == WORKLOADS[1])
    return dataclasses.replace(result, rows=rows)


def test_found_by_themselves_or_by_others() -> None:
    """Whatever shows it: one of three is bad by vote of the fleet, one found itself, one was seen on two days."""
    reports = [make_report(f"gpu-{number}") for number in range(5)]
    reports += [
        make_report("voted", digests=wrong("voted")),
        make_report("own", findings=[make_finding(kinds=("repeat", "reference"))]),
        make_report("again", digests=wrong("again")),
        make_report("again", digests=wrong("again"), created=NEXT_DAY),
        make_report("tied", findings=[make_finding(devices=(0, 1), kinds=("vote",))]),
    ]
    assert named(reduced(*reports)) == {
        "again": "confirmed", "own": "confirmed", "voted": "probable", "tied": "possible",
    }  # fmt: skip


def test_one_wrong_digest_on_several_hosts_is_less_sure() -> None:
    """Faults that know nothing of each other do not give the same bits: who shares them is told so."""
    same = {(WORKLOADS[0], 0): "feedfacefeedface"}
    reports = [make_report(f"gpu-{number}", digests=same if number < 3 else None) for number in range(30)]
    results = reduced(*reports)
    assert named(results) == dict.fromkeys(("gpu-0", "gpu-1", "gpu-2"), "possible")
    text = find_suspects(results, vote(results))[0].seen[0]
    assert "29 of 29 other hosts have" in text
    assert "gpu-1, gpu-2 gave the same wrong digest: look for a common cause" in text


def test_a_tie_names_nobody_and_is_not_clean() -> None:
    one = summarize_results(Collection(tuple(reduced(make_report("a"), make_report("b", digests=wrong("b"))))))
    assert [each.device for each in one.suspects] == [1]  # three devices of two hosts against it
    both = {(WORKLOADS[1], 0): "0" * 16, (WORKLOADS[1], 1): "0" * 16}
    summary = summarize_results(Collection(tuple(reduced(make_report("a"), make_report("b", digests=both)))))
    assert summary.verdict == "corrupt"
    assert summary.suspects == []
    (tie,) = summary.ties
    assert tie.workload == WORKLOADS[1]
    assert sorted(each.hosts for each in tie.groups) == [["a"], ["b"]]


def test_other_versions_and_drivers_are_not_compared() -> None:
    usual = [make_report(f"gpu-{number}") for number in range(4)]
    digests = {(name, device): digest_of("other", name) for name in WORKLOADS for device in (0, 1)}
    for other in (
        make_report("x", digests=digests, environment={"packages": {"jax": "0.11", "jaxlib": "0.11"}}),
        make_report("x", digests=digests, device={"driver": "580"}),
        make_report("x", digests=digests, environment={"xla_flags": "--xla_fast"}),
        make_report("x", digests=digests, kind="Other Accelerator"),
    ):
        summary = summarize_results(Collection(tuple(reduced(*usual, other))))
        assert summary.verdict == "clean"
        assert summary.compared.hosts_not_compared == ["x"]
        assert summary.compared.programs_on_one_host == 3
    for same in (
        {},
        {"packages": {"jax": "0.10.2", "jaxlib": "0.10.2", "msgspec": "9"}},
        {"xla_flags": "--xla_tpu_x=1"},
    ):
        results = reduced(*usual, make_report("x", digests=digests, environment=same))
        assert summarize_results(Collection(tuple(results))).suspects


def test_simulations_never_decide_about_others() -> None:
    """Nine simulated hosts of ten with one digest do not make the tenth a suspect; alone they vote."""
    digests = {(WORKLOADS[0], 0): "5" * 16, (WORKLOADS[0], 1): "5" * 16}
    simulated = [make_report(f"s-{number}", simulated=True, digests=digests) for number in range(9)]
    mixed = summarize_results(Collection(tuple(reduced(make_report("real"), *simulated))))
    assert (mixed.simulated, mixed.suspects) == ("some", [])
    real = [make_report(f"gpu-{number}") for number in range(2)]
    voted = summarize_results(Collection(tuple(reduced(*real, *simulated))))
    assert {each.host for each in voted.suspects} == {f"s-{number}" for number in range(9)}
    assert all(each.simulated for each in voted.suspects)
    alone = summarize_results(Collection(tuple(reduced(*simulated, make_report("s-x", simulated=True)))))
    assert (alone.simulated, {each.host for each in alone.suspects}) == ("all", {"s-x"})


def test_rows_without_digest_or_runs_have_no_vote() -> None:
    results = reduced(*(make_report(f"gpu-{n}", digests={(name, d): None for name in WORKLOADS for d in (0, 1)})
                        for n in range(3)))  # fmt: skip
    assert vote(results).compared == 0
    assert summarize_results(Collection(tuple(results))).verdict == "inconclusive"


def test_classes_and_points_order_as_truth_does() -> None:
    """Simulated fleets: of devices that are called confirmed, more are bad than of probable ones, and so on.

    A bad device shows itself in some burn-ins by some kinds of evidence. Healthy ones are accused by mistakes that make
    one kind of evidence in one burn-in (a program that does not repeat, an old record), and by settings that several
    hosts share.
    """
    draw = random.Random(0)
    counts = {confidence: [0, 0] for confidence in ("confirmed", "probable", "possible")}
    points: list[tuple[float, bool]] = []
    for fleet in range(120):
        truth: set[str] = set()
        reports = []
        misset = {f"{fleet}-{number}" for number in draw.sample(range(12), 2)} if draw.random() < 0.5 else set()
        for number in range(12):
            name = f"{fleet}-{number}"
            bad = draw.random() < 0.15
            truth |= {name} if bad else set()
            for day in (DAY, NEXT_DAY):
                digests = {(WORKLOADS[2], 0): "a" * 16} if name in misset else {}
                findings = []
                if bad and draw.random() < 0.8:
                    kinds = draw.sample(["repeat", "vote", "reference", "golden"], draw.choice([1, 2, 2, 3]))
                    findings = [make_finding(kinds=kinds, host=name)]
                elif draw.random() < 0.03:
                    devices = draw.choice([(0,), (0, 1), (0, 1)])
                    findings = [make_finding(kinds=[draw.choice(["golden", "repeat"])], devices=devices, host=name)]
                reports.append(make_report(name, findings=findings, digests=digests, created=day))
        for suspect in find_suspects(results := reduced(*reports), vote(results)):
            is_bad = suspect.host in truth
            counts[suspect.confidence][is_bad] += 1
            points.append((suspect.points, is_bad))
    right = [bad / (good + bad) for good, bad in counts.values()]
    assert min(sum(each) for each in counts.values()) > 10
    assert right[0] > 0.9
    assert right[0] > right[1] > right[2]
    assert _mean([p for p, bad in points if bad]) > _mean([p for p, bad in points if not bad])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_slow_are_outliers_and_no_suspects() -> None:
    rates = {(name, 1): 0.6e12 for name in WORKLOADS}
    few = {(WORKLOADS[0], 0): 0.95e12}  # within the floor
    reports = [make_report(f"gpu-{n}", rates=rates if n == 3 else few if n == 4 else None) for n in range(6)]
    results = reduced(*reports)
    (found,) = outliers(results)
    assert found.identity == "serial SN-gpu-3-1"
    assert (found.slow, found.far, found.judged, round(found.ratio, 2)) == (True, 3, 3, 0.6)
    assert named(results) == {}
    assert outliers(results[:3]) == []  # too few devices to say what is usual
