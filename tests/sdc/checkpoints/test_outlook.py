"""What a loss would cost, against states that really lose something, and advice against all other choices."""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc.checkpoints import Outlook, RunningCheckpoint, Watch, advise, daly_interval, total_variation
from sdc.checkpoints.outlook import FRACTIONS, LEAST, SaveClock, iteration_cost_bound

from .states import moved, opened, start

RNG = np.random.default_rng(2019)
SQUARES = st.floats(0, 1e30) | st.sampled_from([math.inf, math.nan])
STEP, HELD, WHOLE = 0.5, 0.02, 0.3
BANDWIDTH = 1e4


def outlook(speeds: Any, sizes: Any = None, *, ages: Any = None, step: int = 10**6) -> Outlook:
    """Of blocks that move by these squared lengths in a step."""
    speeds = np.asarray(speeds, float)
    ages = np.zeros(len(speeds), int) if ages is None else np.asarray(ages)
    return Outlook(step, ages, speeds * ages**2, speeds, sizes or [100] * len(speeds), None, 1)


def advice(found: Outlook, **options: Any) -> Any:
    given = {"step_seconds": STEP, "save_seconds": (HELD, WHOLE), "bandwidth": BANDWIDTH, "lost": 0.5}
    return advise(found, **{**given, "failure_every": 3600.0, **options})


def test_a_state_that_moves_evenly_along_a_line() -> None:
    """To lose everything of m steps ago costs m steps; a block alone its share of the way."""
    ways = RNG.normal(size=(5, 3))  # five blocks of three numbers, by step
    at = np.asarray([3, 7, 7, 10, 4])
    squares = np.sum((ways * (12 - at)[:, None]) ** 2, axis=1)
    found = Watch([12] * 5).saved(12, at, squares)
    assert found is not None
    lengths = np.sum(ways**2, axis=1)
    np.testing.assert_allclose(found.speeds, lengths)
    lost = np.zeros((5, 3))
    lost[[0, 3]] = ways[[0, 3]] * (12 - at)[[0, 3], None]
    along = float((lost * ways).sum() / (ways * ways).sum())  # of the perturbation, in steps of the way
    assert found.behind([0, 3]) == pytest.approx(along)
    assert found.loss(0.5).steps == pytest.approx(0.5 * found.behind(range(5)))
    assert found.loss(0.25).perturbation == pytest.approx(math.sqrt(0.25 * squares.sum()))
    together = Watch([12] * 5).saved(12, np.full(5, 8), 16 * lengths)
    assert together is not None
    assert together.loss(1.0).steps == pytest.approx(4)
    assert together.behind([]) == 0
    later = together.later(20, np.asarray([8, 20, 18, 25, -1]))
    assert later.ages.tolist() == [12, 0, 2, 0, 20]
    np.testing.assert_allclose(later.squares, lengths * later.ages**2)
    assert later.behind([1, 3]) == 0


def test_an_iteration_that_converges_linearly() -> None:
    """c, the distance, and what losing everything or a half then really costs."""
    c, every = 0.97, 4
    x, watch, found = RNG.normal(size=(6, 8)), Watch([32] * 6), None
    saved, at, first = x.copy(), np.full(6, -1), np.linalg.norm(x)
    for step in range(1, 4 * LEAST * every + 1):
        x *= c
        if step % every == 0:
            found = watch.saved(step, at, np.sum((x - saved) ** 2, axis=1))
            assert found is not None
            assert (found.convergence is None) == (step < (LEAST + 2) * every)  # the first interval is left out
            before = saved
            saved, at = x.copy(), np.full(6, step)
    assert found is not None
    assert found.convergence is not None
    assert found.every == every
    assert found.convergence.c == pytest.approx(c, rel=1e-6)
    assert found.convergence.distance == pytest.approx(float(np.linalg.norm(x)), rel=1e-6)
    assert found.convergence.distance < 0.1 * first
    loss = found.loss(1.0)
    factor, distance = found.convergence.c, found.convergence.distance
    assert loss.one_rate == pytest.approx(iteration_cost_bound(distance, factor, {0: loss.perturbation}))
    assert loss.one_rate == found.one_rate(loss.perturbation)
    assert found.one_rate(math.inf) is None
    # All is set back by four steps, which is what one rate predicts: the perturbation points away from the optimum.
    assert loss.steps == pytest.approx(every)
    assert loss.one_rate == pytest.approx(every, rel=1e-6)
    costs = []
    for lost in itertools.combinations(range(6), 3):
        half = x.copy()
        half[list(lost)] = before[list(lost)]
        costs.append(math.log(np.linalg.norm(half) / np.linalg.norm(x)) / -math.log(c))
        # By the blocks that are lost; the norm is not linear in how far they are set back, by some percent here.
        assert found.behind(lost) == pytest.approx(costs[-1], rel=0.1)
    assert found.loss(0.5).steps == pytest.approx(np.mean(costs), rel=0.1)
    assert np.mean(costs) <= (found.loss(0.5).one_rate or 0)


def test_what_is_not_known_is_not_told() -> None:
    watch = Watch([8, 8, 8])
    assert watch.saved(0, np.full(3, -1), np.zeros(3)) is None  # no step was done
    assert watch.saved(2, np.full(3, -1), np.asarray([1.0, math.inf, 4.0])) is None
    assert watch.saved(4, np.asarray([2, -1, -1]), np.asarray([4.0, math.nan, 16.0])) is None
    found = watch.saved(6, np.asarray([4, 4, -1]), np.asarray([4.0, 16.0, 36.0]))
    assert found is not None
    assert found.speeds.tolist() == [1, 4, 1]
    # The write of a block failed: it is counted by how it moved before, from what is really there.
    failed = watch.saved(8, np.asarray([6, 4, -1]), np.asarray([16.0, math.inf, 64.0]))
    assert failed is not None
    assert failed.speeds.tolist() == [4, 4, 1]
    assert failed.squares.tolist() == [16, 4 * 16, 64]
    assert failed.behind([1]) == pytest.approx(4 * 4 / 9)
    still = Watch([8, 8]).saved(5, np.full(2, -1), np.zeros(2))
    assert still is not None
    assert still.loss(1.0).steps == still.loss(1.0).perturbation == 0
    with pytest.raises(ValueError, match="no block moves"):
        advice(still)
    for fraction in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="expected more than 0 and at most 1"):
            found.loss(fraction)
    for blocks in ([-1], [0, 0], [3]):
        with pytest.raises(ValueError, match="expected distinct numbers from 0 to 2"):
            found.behind(blocks)


@settings(max_examples=60)
@given(
    saves=st.lists(
        st.tuples(st.integers(0, 5), *[st.tuples(SQUARES, st.integers(-1, 30))] * 4), min_size=1, max_size=14
    )
)
def test_a_prediction_is_between_nothing_and_the_largest_age(saves: Any) -> None:
    """And grows with what is lost, whatever was measured."""
    watch, step = Watch([8, 8, 16, 0]), 0
    for gap, *save in saves:
        step += gap
        found = watch.saved(step, np.asarray([at for _, at in save]), np.asarray([square for square, _ in save]))
        if found is None:
            continue
        costs = [found.loss(fraction) for fraction in (0.1, 0.5, 1.0)]
        assert 0 <= costs[0].steps <= costs[1].steps <= costs[2].steps <= found.ages.max() * (1 + 1e-9)
        assert 0 <= costs[0].perturbation <= costs[1].perturbation <= costs[2].perturbation < math.inf
        rates = [cost.one_rate for cost in costs if cost.one_rate is not None]
        assert len(rates) in (0, 3)
        assert rates == sorted(rates)
        assert all(0 <= rate < math.inf for rate in rates)
        profile = found.profile()
        assert sum(profile) == pytest.approx(found.speeds.sum(), rel=1e-9)
        assert all(b - a <= 1e-9 * sum(profile) for a, b in itertools.pairwise(profile))


def wasted(speeds: np.ndarray, sizes: np.ndarray, fraction: float, every: int, failure: float, lost: float) -> float:
    """Waste of a choice: saves one after the other, each block of which is there when all of them are written."""
    weights, total = speeds / speeds.sum(), sizes.sum()
    written = fraction * total / BANDWIDTH / STEP
    if written > every:
        return math.inf
    saved, there, budget, costs = np.zeros(len(speeds)), np.zeros(len(speeds)), 0.0, []
    for save in range(1, int(40 / fraction)):
        now = save * every
        budget += fraction * total
        for block in np.argsort(-weights * (now - saved) ** 2 / sizes, kind="stable"):
            if sizes[block] > budget + 1e-9:
                break
            budget -= sizes[block]
            saved[block] = now
        # Until it is written what was there counts, and from then to the next save what is there now.
        early = float((weights * (now + written / 2 - there)).sum())
        late = float((weights * (now + (written + every) / 2 - saved)).sum())
        costs.append((early * written + late * (every - written)) / every)
        there = saved.copy()
    steps = lost * float(np.mean(costs[len(costs) // 2 :]))
    return (HELD + WHOLE * fraction) / (every * STEP) + steps * STEP / failure


@pytest.mark.parametrize("skew", [0.0, 1.5, 4.0])
@pytest.mark.parametrize(("failure", "lost"), [(600.0, 1.0), (86_400.0, 0.125)])
def test_no_other_choice_wastes_less(skew: float, failure: float, lost: float) -> None:
    """By an independent simulation, with an interval that is searched."""
    speeds, sizes = np.exp(skew * RNG.normal(size=48)), np.full(48, 100)
    found = advice(outlook(speeds, sizes.tolist()), failure_every=failure, lost=lost)
    told = wasted(speeds, sizes, found.fraction, found.every, failure, lost)
    assert found.waste == pytest.approx(told, rel=0.02)  # half a cycle is left over at the end of a simulation
    near = sorted({max(1, round(found.every * factor)) for factor in (0.02, 0.05, 0.1, 0.3, 0.6, 0.9, 1.1, 2, 5, 20)})
    others = [wasted(speeds, sizes, fraction, every, failure, lost) for fraction in FRACTIONS for every in near]
    assert told <= 1.05 * min(others)
    given = advice(outlook(speeds, sizes.tolist()), failure_every=failure, lost=lost, fraction=0.25, every=40)
    assert (given.fraction, given.every) == (0.25, 40)
    assert given.waste == pytest.approx(wasted(speeds, sizes, 0.25, 40, failure, lost), rel=0.02)
    assert given.waste >= found.waste


def test_what_moves_more_than_the_rest_is_saved_alone() -> None:
    """Where one block does all the moving, and where all move alike and each save costs the same."""
    skewed = outlook([1.0, *[1e-9] * 31])
    assert advice(skewed).fraction == min(FRACTIONS)
    assert advice(outlook(np.ones(32)), save_seconds=(HELD, 0.0), bandwidth=1e9).fraction == 1
    slow = advice(outlook(np.ones(32)), bandwidth=10.0)
    assert slow.every >= 3200 * slow.fraction / 10.0 / STEP - 1e-9
    # A save that must wait for the one before it holds up the training.
    late = advice(outlook(np.ones(32)), bandwidth=1000.0, fraction=1.0, every=5, failure_every=1e9)
    assert late.waste == pytest.approx((HELD + WHOLE + 3200 / 1000 - 5 * STEP) / (5 * STEP), rel=1e-3)
    assert advice(outlook(np.ones(32)), bandwidth=10.0, fraction=1.0, every=1).waste == 1  # no time is left
    cheap = advice(outlook(np.ones(32)), save_seconds=(0.0, 0.0), bandwidth=1e9)
    assert cheap.every == 1


def test_advice_does_not_go_beyond_what_was_seen() -> None:
    seldom = {"failure_every": 1e7}
    free, short = advice(outlook(np.ones(32)), **seldom), advice(outlook(np.ones(32), step=60), **seldom)
    assert not free.capped
    assert (short.every, short.capped) == (60, True)
    assert short.every < free.every
    assert short.waste >= free.waste
    assert not advice(outlook(np.ones(32), step=60), **seldom, every=500).capped
    with pytest.raises(ValueError, match=r"outlook\.step=0: expected"):
        advice(outlook(np.ones(32), step=0))


@pytest.mark.parametrize("skew", [0.0, 2.0])
def test_a_profile_is_enough_for_advice(skew: float) -> None:
    """Blocks of many sizes, of which a record keeps 32 numbers."""
    sizes = RNG.integers(50, 400, size=300)
    whole = outlook(np.exp(skew * RNG.normal(size=300)) * sizes, sizes.tolist())
    part = Outlook.of_profile(whole.profile(), int(sizes.sum()), whole.step)
    for fraction in FRACTIONS:
        one, other = (advice(each, fraction=fraction, every=20).steps for each in (whole, part))
        assert one == pytest.approx(other, rel=0.1)  # 32 parts for 300 blocks, of which each save takes whole ones


@pytest.mark.parametrize(
    "options",
    [
        {"step_seconds": 0.0}, {"bandwidth": math.inf}, {"failure_every": math.nan}, {"lost": 1.5}, {"lost": 0.0},
        {"save_seconds": (-1.0, 0.0)}, {"fraction": 2.0}, {"every": -1}, {"fraction": 0.0},
        {"every": 0},
    ],
)  # fmt: skip
def test_wrong_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        advice(outlook([1.0]), **options)


@pytest.mark.parametrize(("save", "failure"), [(1.0, 1e3), (30.0, 86_400.0), (60.0, 3600.0)])
def test_daly(save: float, failure: float) -> None:
    """The least of his complete model, equation 20: M exp(R/M) (exp((t + d) / M) - 1) / t, searched."""
    found = daly_interval(save, failure)
    times = found * np.linspace(0.5, 2, 30_001)
    best = float(times[np.argmin(np.expm1((times + save) / failure) / times)])
    assert found == pytest.approx(best, rel=1e-3)  # he says 0.2 % of the time, far less of the interval
    assert daly_interval(3 * failure, failure) == failure
    for wrong in ((0.0, 1.0), (1.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="expected finite numbers above 0"):
            daly_interval(*wrong)


def test_a_stopwatch_needs_some_saves() -> None:
    watch = SaveClock()
    for number, seconds in enumerate([9.0, 2.0, 1.0]):
        assert watch.timings is None
        watch.held(seconds, seconds, share=0.5)
        watch.held(7.0, 7.0, share=0.0)  # nothing was due
        watch.written(seconds, 10 * (number + 1))
        watch.written(seconds, 0)
    assert watch.timings == (2.0, 4.0, 10.0)


def test_a_running_checkpoint_has_an_outlook(tmp_path: Path) -> None:
    """Beside NumPy's, of blocks that are saved unlike each other; a loss that was given back counts from there."""
    with opened(tmp_path / "a") as running, opened(tmp_path / "b") as other:
        saved, state = {}, start()
        at = np.zeros(running.partition.choices)
        pieces = [
            next(piece for piece in block if piece.name.startswith("params")) for block in running.partition.blocks[:-1]
        ]

        def part(state: Any, block: int) -> np.ndarray:
            name, begin, end = pieces[block]
            return np.atleast_1d(np.asarray(state["params"][name.removeprefix("params/")], float))[begin:end].copy()

        saved = {block: part(state, block) for block in range(len(pieces))}
        assert running.outlook is None
        began = time.perf_counter()
        for step in range(2, 14, 2):
            state = moved(state, [step % 5, 7, 13], step)
            found = running.look(state, step)
            assert found is running.outlook
            squares = np.asarray([np.sum((part(state, block) - saved[block]) ** 2) for block in saved])
            assert found is not None
            np.testing.assert_allclose(found.ages, step - at)
            np.testing.assert_allclose(found.squares, squares, rtol=1e-6)
            np.testing.assert_allclose(found.speeds, squares / (step - at) ** 2, rtol=1e-6)
            assert list(found.sizes) == running.partition.sizes[:-1]
            assert (found.step, found.every) == (step, 2)
            chosen = running.save(state, step)
            assert running.outlook is found  # the very state was not measured again
            assert other.save(state, step) == chosen
            assert other.outlook is not None
            np.testing.assert_array_equal(other.outlook.squares, found.squares)
            at[chosen] = step
            saved |= {block: part(state, block) for block in chosen}
        assert running.timings is not None
        assert min(running.timings) > 0
        assert max(running.timings[:2]) < time.perf_counter() - began
        np.testing.assert_array_equal(running.saved(), np.where(at == 0, -1, at))

        lost = [int(np.argmin(at))]
        back = running.recover(lost, state).state
        running.went_back(lost, 12)
        assert running.saved()[lost] == 12
        final = moved(back, [0, 1], 14)
        found = running.look(final, 14)
        assert found is not None
        assert found.ages[lost] == 2
        np.testing.assert_allclose(found.squares[lost], np.sum((part(final, lost[0]) - saved[lost[0]]) ** 2))


def test_another_state_is_measured_anew(running: RunningCheckpoint) -> None:
    state = moved(start(), [0], 1)
    running.look(state, 1)
    other = moved(state, [9, 9], 1)
    block = running.partition.of(["params/w"])[2]
    assert block in running.save(other, 1)
    assert running.outlook is not None
    assert running.outlook.squares[block] > 0


def test_a_state_that_is_not_finite_has_none(running: RunningCheckpoint) -> None:
    """Nor has one of before the last save."""
    state = moved(start(), [0], 12)
    assert running.look(state, 12) is not None
    broken = {**state, "params": {name: leaf * jnp.nan for name, leaf in state["params"].items()}}
    assert running.look(broken, 12) is None
    running.save(state, 12)
    assert running.look(state, 3) is None


def test_a_distance_of_your_own_has_none(tmp_path: Path) -> None:
    state = {"w": jnp.ones((8, 4))}
    with RunningCheckpoint(tmp_path, state, rows=2, fraction=0.5, distance=total_variation()) as running:
        running.save({"w": state["w"].at[3, 1].add(2.0)}, 1)
        assert running.outlook is None
