"""Simulated failures: what they hold and cost is what a real running checkpoint and a formula say."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from sdc.checkpoints import RunningCheckpoint
from sdc.checkpoints.outlook import POLICIES, Policy, iteration_cost_bound
from sdc.train.iterative import Iterative, logistic_regression
from sdc.train.iterative.models import State, rows_of
from sdc.train.studies import trials
from sdc.train.studies.trials import DoesNotConverge, Failure, Held, Trajectory

C = 0.8


def contraction(rows: int = 8) -> Iterative:
    """x_{k+1} = C x_k: every error shrinks by C."""
    return Iterative(
        name="contraction",
        source="made up",
        init=lambda key: {"x": jax.random.normal(key, (rows, 2))},
        step=lambda state, k: {"x": C * state["x"]},
        loss=lambda state: jnp.linalg.norm(state["x"]),
        blocks={"x": rows_of(rows)[0]},
        moving=("x",),
    )


@pytest.fixture(scope="module")
def regression() -> Trajectory:
    """Sixteen features, of which the first move most."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(80, 16)) * 0.8 ** np.arange(16)).astype(np.float32)
    y = (x @ rng.normal(size=(16, 3))).argmax(axis=1).astype(np.int32)
    task = logistic_regression(x, y, source="made up", batch=40, rate=0.2)
    found = trials.train(task, 40)
    return trials.until(found, float(found.losses[24]))


@pytest.fixture(scope="module")
def shrinking() -> Trajectory:
    found = trials.train(contraction(), 40)
    return trials.until(found, float(found.losses[20]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fraction", [1.0, 0.25, 0.125])
def test_it_holds_what_a_running_checkpoint_holds(
    policy: Policy, fraction: float, regression: Trajectory, tmp_path: Path
) -> None:
    """The same blocks at the same iterations, and a recovery of the same bits."""
    held = trials.hold(regression, fraction, 8, policy, seed=3)
    states = [{"weights": regression.states["weights"][k]} for k in range(20)]
    lost = np.zeros(16, bool)
    lost[[0, 3, 9, 15]] = True
    with RunningCheckpoint(tmp_path, states[0], fraction=fraction, policy=policy, rows=1, seed=3) as running:
        for k in range(1, 20):
            assert (held.steps[k] == np.maximum(running.steps[:-1], 0)).all(), k
            if k in (7, 19):
                real = running.recover([0, 3, 9, 15], states[k]).state["weights"]
                at = trials.recover(Failure(k, lost), held)
                simulated = trials.recovered(regression, [at])["weights"][0]
                assert (np.asarray(real) == np.asarray(simulated)).all()
            if k % max(1, round(8 * fraction)) == 0:
                running.save(states[k], k)
                assert running.wait()


def test_a_recovery_takes_what_was_lost_and_no_more(regression: Trajectory) -> None:
    held = trials.hold(regression, 1.0, 8, "priority")
    lost = np.arange(16) < 4
    at = trials.recover(Failure(13, lost), held)
    assert at.tolist() == [8] * 4 + [13] * 12
    assert trials.recover(Failure(13, lost), held, everything=True).tolist() == [8] * 16
    found = trials.recovered(regression, [at])["weights"][0]
    weights = regression.states["weights"]
    assert (np.asarray(found) == np.concatenate([weights[8][:4], weights[13][4:]])).all()


def test_going_back_costs_what_it_goes_back(shrinking: Trajectory) -> None:
    """Of a linear iteration, to rounding; and the sizes are those of the perturbations."""
    held = trials.hold(shrinking, 1.0, 8, "priority")
    after = list(range(1, 20))
    at = [trials.recover(Failure(k, np.ones(8, bool)), held) for k in after]
    found = trials.go_on(shrinking, after, trials.recovered(shrinking, at))
    # Between two iterations a loss is taken for a line, which it is not: the same error at both ends.
    np.testing.assert_allclose(found.costs, [k - held.steps[k, 0] for k in after], atol=0.02)
    x = np.asarray(shrinking.states["x"], float)
    sizes = [np.linalg.norm(x[held.steps[k, 0]] - x[k]) for k in after]
    np.testing.assert_allclose(found.sizes, sizes, rtol=1e-5, atol=1e-6)


def test_perturbations_away_from_the_optimum_cost_the_bound(shrinking: Trajectory) -> None:
    at, scales = 6, np.asarray([0.1, 0.5, 2.0])
    here = shrinking.states["x"][at]
    starts: State = {"x": here * (1 + jnp.asarray(scales, jnp.float32))[:, None, None]}
    found = trials.go_on(shrinking, [at] * 3, starts)
    distance = float(shrinking.losses[0])
    sizes = scales * float(shrinking.losses[at])
    bounds = [iteration_cost_bound(distance, C, {at: float(size)}) for size in sizes]
    # Between two iterations the loss is taken for a line: off its curve by at most max (1 - C^x) / (1 - C) - x = 0.028.
    np.testing.assert_allclose(found.costs, bounds, atol=0.03)


def test_more_trials_than_devices(shrinking: Trajectory) -> None:
    """All are told, each once, in their order, whatever the number of devices."""
    count = 2 * jax.local_device_count() + 1
    after = [1 + k % 19 for k in range(count)]
    starts = trials.recovered(shrinking, [np.zeros(8, int)] * count)
    found = trials.go_on(shrinking, after, starts)
    np.testing.assert_allclose(found.costs, after, atol=0.02)


@pytest.mark.parametrize("how", ["random", "contiguous"])
def test_failures_are_drawn_as_said(how: trials.How, regression: Trajectory) -> None:
    """Geometric times before the end, with the same times whatever is lost; the fraction in each."""
    found = trials.failures(4000, regression, 0.25, how, seed=1)
    assert [one.after for one in found] == [
        one.after for one in trials.failures(4000, regression, 1.0, "random", seed=1)
    ]
    last = math.ceil(regression.iterations[0]) - 1
    after = np.asarray([one.after for one in found])
    assert after.min() >= 1
    assert after.max() <= last
    seen = np.bincount(after, minlength=last + 1)[1:]
    law = stats.geom(2 / last).pmf(np.arange(1, last + 1))
    assert stats.chisquare(seen, 4000 * law / law.sum()).pvalue > 1e-4
    lost = np.stack([one.lost for one in found])
    assert (lost.sum(axis=1) == 4).all()
    assert abs(lost.mean(axis=0) - 0.25).max() < 0.05  # 7 deviations of a share of 4,000
    edges = (lost != np.roll(lost, 1, axis=1)).sum(axis=1)
    assert (edges == 2).all() if how == "contiguous" else (edges > 2).any()


def test_what_does_not_converge_is_said(shrinking: Trajectory) -> None:
    with pytest.raises(
        DoesNotConverge, match=r"contraction does not converge to a loss of 1e-09: its loss was .* after 40"
    ):
        trials.until(shrinking, 1e-9)
    with pytest.raises(DoesNotConverge, match="does not converge"):
        trials.until(shrinking, math.inf)
    starts = {"x": jnp.full((1, 8, 2), 1e30)}
    assert trials.go_on(shrinking, [3], starts).costs.tolist() == [math.inf]
    task = Iterative(
        name="root", source="made up", init=lambda key: {"x": jnp.ones((1, 1))}, step=lambda s, k: {"x": s["x"] - 1},
        loss=lambda state: jnp.sqrt(state["x"]).sum(), blocks={"x": rows_of(1)[0]}, moving=("x",),
    )  # fmt: skip
    with pytest.raises(DoesNotConverge, match="root does not converge: its loss is nan after 2 iterations"):
        trials.train(task, 4)


def test_outlooks_are_those_before_the_failure(regression: Trajectory) -> None:
    held: Held = trials.hold(regression, 0.125, 8, "priority")
    assert held.outlooks[1] is None
    for k in range(3, 20):
        outlook = held.outlooks[k]
        assert outlook is not None
        assert outlook.step == k - 1
        assert (outlook.ages == k - 1 - held.steps[k - 1]).all()
