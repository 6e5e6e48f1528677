"""Drift of replicas under lost packets, measured and predicted."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from sdc.aggregation import (
    lossy_zero2,
)
from sdc.aggregation.lossy import Layout, measured_losses
from sdc.train.studies.theory import owner_drift, pair_drift, steady_drift
from tests.sdc.aggregation.test_lossy import WORKERS, random_walk

from .placements import AXIS, place


@pytest.mark.parametrize("p", [0.1, 0.4])
def test_drift_of_a_random_walk(p: float) -> None:
    """Gradients are lossless: with N = 4 the mean of draws of variance 4 has variance 1."""
    _, state = random_walk(lossy_zero2(optax.sgd(1.0), AXIS, 0.0, p, packet=4), 300)
    settled = slice(40, None)
    report = jax.tree.map(lambda leaf: leaf[0, settled].mean(), state.report)
    assert report.move == pytest.approx(1.0, rel=0.01)
    # 1,000 packets, 260 steps, correlated over 1 / (1 - p) steps: a relative standard error below 0.01.
    assert report.pair_drift == pytest.approx(pair_drift(p), rel=0.05)
    assert report.owner_drift == pytest.approx(owner_drift(p), rel=0.05)
    assert report.parameter_loss == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / (12 * 250 * 260)))
    assert (state.report.gradient_loss == 0).all()


def test_drift_of_a_steady_owner() -> None:
    p = 0.3
    _, state = random_walk(lossy_zero2(optax.sgd(1.0), AXIS, 0.0, p, packet=4), 300, steady=0.5)
    assert state.report.pair_drift[0, 40:].mean() == pytest.approx(steady_drift(p, 0.5), rel=0.05)


def test_drift_over_pairs_is_that_of_the_copies() -> None:
    """The report's sums against the parameters themselves, where every element is in the sample."""
    theta, state = random_walk(lossy_zero2(optax.sgd(1.0), AXIS, 0.2, 0.4, packet=3), 10, size=40)
    for step in range(10):
        copies = theta[:, step].reshape(WORKERS, WORKERS, 10)  # [holder, owner, element]
        pairs, owners = [], []
        for owner in range(WORKERS):
            others = [holder for holder in range(WORKERS) if holder != owner]
            owners += [np.square(copies[a, owner] - copies[owner, owner]).mean() for a in others]
            pairs += [np.square(copies[a, owner] - copies[b, owner]).mean() for a in others for b in others if a < b]
        assert state.report.pair_drift[0, step] == pytest.approx(np.mean(pairs), rel=1e-4, abs=1e-7)
        assert state.report.owner_drift[0, step] == pytest.approx(np.mean(owners), rel=1e-4, abs=1e-7)


def test_pair_drift_is_not_negative() -> None:
    """Three copies that are off by the same: (a + a + a)^2 and 3 (a^2 + a^2 + a^2) differ in their last bits."""
    for seed in range(5):
        off = jnp.broadcast_to(jax.random.normal(jax.random.key(seed), (4, 256)), (4, 4, 256))

        def report(off: Any) -> Any:
            layout = Layout(4, (1024,), None)
            owned = (jnp.arange(4) == lax.axis_index(AXIS))[:, None]
            arrived, copies = jnp.ones((4, 1), bool), jnp.where(owned, 0, off)
            nothing = [jnp.zeros_like(off)]
            return measured_losses(layout, AXIS, arrived, arrived, jnp.ones(1), [off[:1]], [copies], nothing)

        assert place(report, "vmap", 4)(off).pair_drift[0] >= 0
