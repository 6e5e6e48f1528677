"""Packets that are sent reliably, and rates that follow the gradient."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from sdc.aggregation import (
    lossy_zero2,
)
from tests.sdc.aggregation.test_lossy import WORKERS

from .placements import AXIS, place


def test_the_reliable_packets_are_those_of_largest_norm() -> None:
    """All links lose everything; a quarter of the packets, those with the large gradients, still come through."""
    optimizer = lossy_zero2(optax.sgd(1.0), AXIS, 1.0, 0.0, packet=5, reliable=0.25)

    def step(theta: Any) -> Any:
        size = jnp.where(jnp.arange(80) % 20 < 5, 8.0, 1.0)  # the first packet of each shard of 20
        gradient = size * (1.0 + lax.axis_index(AXIS).astype(jnp.float32))
        updates, state = optimizer.update(gradient, optimizer.init(theta), theta)
        return optax.apply_updates(theta, updates), state.log

    theta, log = place(step, "vmap", WORKERS)(jnp.zeros((WORKERS, 80)))
    arrived = np.unpackbits(log.gradient, axis=-1, count=4)
    off = ~np.eye(WORKERS, dtype=bool)
    assert (arrived[off] == [1, 0, 0, 0]).all()
    first = -np.asarray(theta[0]).reshape(4, 4, 5)
    np.testing.assert_allclose(first[:, 0], 8 * 2.5)  # the mean over all workers
    np.testing.assert_allclose(first[:, 1:], np.arange(1.0, 5.0)[:, None, None] * np.ones((4, 3, 5)))  # the owner's own


def test_rates_tighten_with_the_gradient() -> None:
    """Gradients shrink tenfold over the run; with an exponent of 1 so does the loss."""

    def run(theta: Any) -> Any:
        optimizer = lossy_zero2(optax.sgd(0.0), AXIS, 0.5, 0.5, packet=1, tighten=1.0)

        def step(state: Any, number: Any) -> Any:
            gradient = jnp.ones(4000) * jnp.where(number < 5, 1.0, 0.1)
            _, state = optimizer.update(gradient, state, theta)
            return state, state.report

        return lax.scan(step, optimizer.init(theta), jnp.arange(10))[1]

    report = place(run, "vmap", WORKERS)(jnp.zeros((WORKERS, 4000)))
    loss = np.asarray(report.gradient_loss)[0]
    assert loss[:6] == pytest.approx(0.5, abs=0.03)
    assert loss[6:] == pytest.approx(0.05, abs=0.01)


def test_one_bad_step_does_not_tighten_for_good() -> None:
    """After a gradient that is not finite, rates follow the finite ones again."""

    def run(theta: Any) -> Any:
        optimizer = lossy_zero2(optax.sgd(0.0), AXIS, 0.5, 0.5, packet=1, tighten=1.0)

        def step(state: Any, number: Any) -> Any:
            bad = jnp.where(number == 2, jnp.nan, jnp.where(number == 4, jnp.inf, 1.0))
            _, state = optimizer.update(jnp.ones(4000) * bad, state, theta)
            return state, state.report.gradient_loss

        return lax.scan(step, optimizer.init(theta), jnp.arange(8))[1]

    loss = np.asarray(place(run, "vmap", WORKERS)(jnp.zeros((WORKERS, 4000))))[0]
    assert loss == pytest.approx(0.5, abs=0.03)


def test_exactly_the_share_asked_for_is_reliable() -> None:
    """Where most packets have no norm at all, and some are not numbers."""
    optimizer = lossy_zero2(optax.sgd(0.0), AXIS, 1.0, 1.0, packet=1, reliable=0.25)

    def step(theta: Any) -> Any:
        gradient = jnp.zeros(80).at[jnp.arange(4) * 20 + 3].set(jnp.nan)
        return optimizer.update(gradient, optimizer.init(theta), theta)[1].log

    log = place(step, "vmap", WORKERS)(jnp.zeros((WORKERS, 80)))
    arrived = np.unpackbits(log.gradient, axis=-1, count=20)[~np.eye(WORKERS, dtype=bool)]
    assert (arrived.sum(axis=-1) == 5).all()
    assert (arrived[:, 3] == 1).all()
