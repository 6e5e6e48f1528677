"""c, the distance and the cost at one rate of an outlook, beside iterations that shrink every error by c."""

import itertools
import math

import numpy as np
import pytest

from sdc.checkpoints import Outlook, Watch, choose
from sdc.checkpoints.outlook import LEAST

Saves = list[tuple[Outlook | None, np.ndarray, np.ndarray]]


def saves_of(c: float, r: float, count: int, lengths: np.ndarray) -> Saves:
    """Blocks that shrink by c in a step, saved by priority after every step: outlooks, lengths, and what was saved."""
    blocks, watch = len(lengths), Watch([100] * len(lengths))
    now, saved, at, budget, told = lengths.astype(float), lengths.astype(float), np.full(len(lengths), -1), 0.0, []
    for step in range(1, count + 1):
        now = now * c
        squares = (saved - now) ** 2
        told.append((watch.saved(step, at, squares), now, saved.copy()))
        budget += r * 100 * blocks
        chosen, _ = choose("priority", budget, [100] * blocks, squares)
        budget -= 100 * len(chosen)
        saved[chosen], at[chosen] = now[chosen], step
    return told


def really_costs(c: float, now: np.ndarray, saved: np.ndarray, fraction: float) -> float:
    """Steps, the mean over all that may be lost."""
    blocks, costs = range(len(now)), []
    for lost in itertools.combinations(blocks, round(fraction * len(now))):
        mixed = np.where(np.isin(blocks, lost), saved, now)
        costs.append(math.log(np.linalg.norm(mixed) / np.linalg.norm(now)) / -math.log(c))
    return float(np.mean(costs))


@pytest.mark.parametrize("uneven", [0.0, 1.0])
@pytest.mark.parametrize(("r", "since"), [(1, 10), (0.5, 11), (0.25, 13), (0.125, 25)])
@pytest.mark.parametrize("c", [0.8, 0.9, 0.97])
def test_one_rate_is_above_what_a_loss_costs(c: float, r: float, since: int, uneven: float) -> None:
    """However long ago blocks were saved: c and the distance are those of the iteration, as soon as they are told."""
    lengths = 4 * np.exp(uneven * np.random.default_rng(3).normal(size=8))
    for step, (found, now, saved) in enumerate(saves_of(c, r, 33, lengths), 1):
        assert found is not None
        assert found.convergence is not None or step < since
        if found.convergence is None:
            continue
        assert found.convergence.c == pytest.approx(c, rel=0.003)
        assert found.convergence.distance == pytest.approx(float(np.linalg.norm(now)), rel=0.001)
        if step in (since, 24, 33):
            for fraction in (0.125, 0.5, 1.0):
                loss = found.loss(fraction)
                assert loss.one_rate is not None
                assert loss.one_rate >= really_costs(c, now, saved, fraction) * (1 - 1e-9)
                assert loss.one_rate >= 0.98 * loss.steps


def test_what_went_back_begins_anew() -> None:
    """A block that was given back, or a failed write, is no movement from save to save; nor is what was before."""
    watch, at, told = Watch([8, 8]), np.zeros(2, int), []
    way = 0.9 ** np.arange(60.0)
    for step in range(1, 50):
        squares = (way[at] - way[step]) ** 2
        if step in (30, 31):
            squares[1] = np.inf  # not written: measured by nobody, saved later
        found = watch.saved(step, at, squares)
        assert found is not None
        told.append(found.convergence)
        if step not in (30, 31):
            at[:] = step
        if step == 20:
            watch.went_back([0, 1], 20)
    assert all(one is None or one.c == pytest.approx(0.9) for one in told)
    assert [one is not None for one in told[9:28]] == [True] * 11 + [False] * 8
    assert told[-1] is not None
    back = watch.saved(5, np.asarray([3, 3]), np.ones(2))
    assert back is not None
    assert back.convergence is None
    assert watch.saved(6, np.asarray([3, 7]), np.ones(2)) is None  # saved later than that
    assert watch.saved(8, np.asarray([3, 7]), np.asarray([1.0, np.nan])) is None


def test_what_grows_has_no_convergence() -> None:
    growing = Watch([8])
    for step in range(1, 2 * LEAST):
        found = growing.saved(step, np.asarray([step - 1]), np.asarray([1.1**step]))
        assert found is not None
        assert found.convergence is None
        assert found.loss(1.0).one_rate is None
