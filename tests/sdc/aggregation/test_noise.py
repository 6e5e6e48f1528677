"""Noise on exactly the workers asked for and of the size asked for, wherever they are; and what faults changed."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sdc.aggregation import gradient_noise
from sdc.aggregation.noise import NoiseState
from sdc.faults.fault import Fault, Stride
from sdc.faults.kinds import BitFlip

from .placements import AXIS, PLACEMENTS, bits, place

WORKERS, SIZE = 4, 4096


def noisy(transform: optax.GradientTransformation, placement: str = "vmap", steps: int = 1) -> Any:
    """Gradients of ones after a transform, at each of some steps, and the last state."""

    def step(gradient: Any, state: NoiseState) -> tuple[Any, NoiseState]:
        return transform.update(gradient, state)

    run = place(step, placement, WORKERS)
    gradient = {"a": jnp.ones((WORKERS, SIZE)), "b": jnp.full((WORKERS, 3), -0.0)}
    state = place(transform.init, placement, WORKERS)(gradient)
    found = []
    for _ in range(steps):
        out, state = run(gradient, state)
        found.append(jax.tree.map(np.asarray, out))
    return found, jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_hits_the_workers_asked_for_and_draws_alike_everywhere(placement: str) -> None:
    transform = gradient_noise(AXIS, 0.5, seed=3, workers=[1, 3])
    (first,), _ = noisy(transform, placement)
    (reference,), _ = noisy(transform)
    for name in first:
        np.testing.assert_allclose(first[name], reference[name], rtol=1e-6)
    errors = first["a"] - 1
    assert (errors[[0, 2]] == 0).all()
    assert (bits(first["b"][[0, 2]]) == 0x80000000).all(), "the untouched workers keep their zeros' signs"
    # The standard deviation of 4,096 draws lies within 5 of its standard errors, sigma / sqrt(2 n).
    for worker in (1, 3):
        assert abs(errors[worker].std() - 0.5) < 5 * 0.5 / math.sqrt(2 * SIZE)
        assert abs(errors[worker].mean()) < 5 * 0.5 / math.sqrt(SIZE)
    assert abs(np.corrcoef(errors[1], errors[3])[0, 1]) < 5 / math.sqrt(SIZE)


def test_bursts_come_at_every_nth_step() -> None:
    found, state = noisy(gradient_noise(AXIS, 0.01, burst_period=3, burst_sigma=10.0), steps=6)
    deviations = [(step["a"] - 1).std() for step in found]
    assert [deviation > 1 for deviation in deviations] == [False, False, True, False, False, True]
    assert (state.step == 6).all()
    assert not np.array_equal(found[0]["a"], found[1]["a"])


def test_one_program_serves_every_degree_of_noise() -> None:
    def run(sigma: float) -> Any:
        def worker(gradient: Any, sigma: Any) -> Any:
            noise = gradient_noise(AXIS, sigma, seed=3)
            return noise.update(gradient, noise.init(gradient))[0]

        mapped = jax.vmap(worker, in_axes=(0, None), axis_name=AXIS)
        return jax.jit(mapped)(jnp.ones((WORKERS, SIZE)), jnp.float32(sigma))

    plain = jax.vmap(lambda x: gradient_noise(AXIS, 0.5, seed=3).update(x, NoiseState(jnp.int32(0), jnp.uint32(0)))[0],
                     axis_name=AXIS)(jnp.ones((WORKERS, SIZE)))  # fmt: skip
    np.testing.assert_allclose(run(0.5), plain, rtol=1e-6)
    np.testing.assert_array_equal(run(0.0), 1)


def test_faults_are_counted_as_they_are_measured() -> None:
    link = Fault(BitFlip(bits=(20,)), rate=1e-3, pattern=Stride(2, 32, 32))
    (out,), state = noisy(gradient_noise(AXIS, faults=[link], workers=[2]))
    changed = sum((bits(out[name]) != bits(start)).sum(axis=1) for name, start in (("a", 1.0 + 0 * out["a"]),))
    changed = changed + (bits(out["b"]) != 0x80000000).sum(axis=1)
    assert changed.tolist() == state.changed.tolist()
    assert changed[2] > 0
    assert (changed[[0, 1, 3]] == 0).all()


def test_a_fault_of_its_own_worker_stays_there() -> None:
    flip = Fault(BitFlip(), rate=0.1, at={AXIS: 1})
    _, state = noisy(gradient_noise(AXIS, faults=[flip]))
    assert state.changed[1] > 0
    assert (state.changed[[0, 2, 3]] == 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gradient_noise(AXIS, -1.0), "sigma=-1.0"),
        (lambda: gradient_noise(AXIS, math.nan), "sigma=nan"),
        (lambda: gradient_noise(AXIS, burst_period=0), "burst_period=0"),
        (lambda: gradient_noise(AXIS, 0.1, burst_sigma=1.0), "burst_sigma has no effect without burst_period"),
        (lambda: noisy(gradient_noise(AXIS, 1.0, workers=[4])), r"workers=\(4,\): expected numbers from 0 to 3"),
        (
            lambda: gradient_noise("other", 1.0).update(jnp.ones(2), NoiseState(jnp.int32(0), jnp.uint32(0))),
            "not bound",
        ),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
