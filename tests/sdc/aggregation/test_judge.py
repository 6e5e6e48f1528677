"""Who is named when a rank is wrong now and then."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdc.aggregation.spares import init_shadow, judge
from tests.sdc.aggregation.test_spares import RANKS


def judged(undecided: Sequence[tuple[int, int]], ranks: int = RANKS) -> tuple[tuple[int, ...], Any]:
    pairs = np.zeros((ranks, ranks), np.uint32)
    for pair in undecided:
        pairs[pair] += 1
    everywhere = np.uint32(100) * (1 - np.eye(ranks, dtype=np.uint32))
    verdict = judge(init_shadow(ranks)._replace(checked=everywhere, differed=pairs, undecided=pairs))
    return verdict.suspects, verdict.undecided


def test_a_rank_that_is_wrong_now_and_then_is_named_when_chance_is_no_explanation() -> None:
    star = [(0, 1), (1, 2), (3, 1), (1, 4), (1, 0), (2, 1), (1, 3)]
    assert judged(star[:2]) == ((), ((0, 1), (1, 2)))
    assert judged(star) == ((1,), ())
    assert judged([*star * 2, (3, 4)]) == ((1,), ((3, 4),))
    assert judged([(1, 7), (30, 1)], 64) == ((), ((1, 7), (1, 30)))
    assert judged([(1, 7), (30, 1), (1, 9)], 64) == ((1,), ())
    assert judged([(a, b) for a in range(RANKS) for b in range(RANKS) if a != b] * 200)[0] == ()
