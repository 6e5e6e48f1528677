"""Who is named by which evidence."""

import pytest

from sdc.burnin.examination import Suspicion, Vote, examine, vote
from sdc.burnin.programs import CheckedRows, RunOutcome

CPUS = dict.fromkeys(range(8), "cpu")


def outcomes(digests: str, confirmed: int = 0) -> list[RunOutcome]:
    """One letter for each device."""
    return [
        RunOutcome("w", device, digest, None, CheckedRows(8, confirmed, confirmed), 1, 0.1, 0, None)
        for device, digest in enumerate(digests)
    ]


@pytest.mark.parametrize(
    ("digests", "odd", "ties"),
    [
        ("aaaa", {}, ()),
        ("aaba", {2: "a"}, ()),
        ("baca", {0: "a", 2: "a"}, ()),
        ("aabb", {}, ((0, 1, 2, 3),)),
        ("ab", {}, ((0, 1),)),
        ("abc", {}, ((0, 1, 2),)),
        ("a", {}, ()),
    ],
)
def test_vote(digests: str, odd: dict[int, str], ties: tuple[tuple[int, ...], ...]) -> None:
    found = vote(dict(enumerate(digests)), CPUS)
    assert (found.odd, found.ties) == (odd, ties)


def test_each_kind_votes_for_itself() -> None:
    found = vote(dict(enumerate("aaabbc")), {**dict.fromkeys(range(3), "old"), **dict.fromkeys(range(3, 6), "new")})
    assert (found.odd, found.ties) == ({5: "b"}, ())
    assert set(found.agreed) == {0, 1, 2, 3, 4}


def examined(digests: str, **known: dict[int, str]) -> list[Suspicion]:
    given = {"before": {}, "golden": {}, "references": {}, **known}
    return examine(outcomes(digests), vote(dict(enumerate(digests)), CPUS), **given)


def test_every_kind_of_evidence_speaks_for_itself() -> None:
    assert examined("aaaa") == []
    assert examined("aaba") == [Suspicion((2,), ("vote",), "a")]
    assert examined("b", before={0: "a"}) == [Suspicion((0,), ("repeat",), "a")]
    assert examined("b", golden={0: "a"}) == [Suspicion((0,), ("golden",), "a")]
    assert examined("b", references={0: "a"}) == [Suspicion((0,), ("reference",), "a")]
    every = {0: "a", 1: "a", 2: "a"}
    (found,) = examined("aba", before=every, golden=every, references=every)
    assert found == Suspicion((1,), ("vote", "reference", "golden", "repeat"), "a")


def test_other_evidence_settles_a_tie() -> None:
    assert examined("ab") == [Suspicion((0, 1), ("vote",), None)]
    assert examined("ab", golden={0: "a", 1: "a"}) == [Suspicion((1,), ("golden",), "a")]
    assert examined("ab", before={0: "a", 1: "a"}) == [Suspicion((1,), ("repeat",), "a")]
    # What it cannot settle stays a tie.
    assert examined("abcc", before={3: "a"})[0].devices == (0,)
    assert Suspicion((0, 1, 2, 3), ("vote",), None) in examined("abab", before={0: "c"})


def test_a_tie_of_one_kind_leaves_another_its_vote() -> None:
    found = vote(dict(enumerate("xyzzq")), dict(enumerate("aabbb")))
    assert found == Vote({4: "z"}, ((0, 1),), (2, 3))


def test_shards_of_their_own_do_not_vote() -> None:
    none: dict[int, str] = {}
    args = {"before": none, "golden": none}
    assert examine(outcomes("abcd"), Vote({}, (), ()), references=dict(enumerate("abcd")), **args) == []
    found = examine(outcomes("abcd"), Vote({}, (), ()), references=dict(enumerate("abcx")), **args)
    assert found == [Suspicion((3,), ("reference",), "x")]


def test_confirmed_checksums_are_evidence_of_their_own() -> None:
    none: dict[int, str] = {}
    found = examine(outcomes("a", confirmed=2), vote({0: "a"}, CPUS), before=none, golden=none, references=none)
    assert found == [Suspicion((0,), ("checksums",), None)]
