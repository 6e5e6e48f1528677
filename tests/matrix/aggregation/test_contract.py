"""Every method in its neutral setting is the plain run, with every optimizer, wherever the workers are."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from orbax.checkpoint import v1 as ocp

from sdc import aggregation
from sdc.tools.bench._aggregation import plain_zero2
from tests.sdc.aggregation.placements import AXIS, PLACEMENTS, equal_replicas, place, stack

WORKERS, STEPS, MICRO_BATCHES = 4, 3, 2
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.05),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
}
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def params() -> dict[str, Any]:
    """Sizes that four workers do not divide."""
    return {"w": jnp.linspace(-1.0, 1.0, 15).reshape(5, 3), "b": jnp.linspace(0.5, 1.0, 3)}


def batches(workers: int) -> Any:
    """One batch for each worker and step, of two micro-batches."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (STEPS, workers, MICRO_BATCHES, 4, 5))
    return np.asarray(x), np.asarray(jax.random.normal(keys[1], (STEPS, workers, MICRO_BATCHES, 4, 3)))


def loss(theta: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean(jnp.square(x @ theta["w"] + theta["b"] - y))


def gradient_of(theta: Any, batch: Any) -> Any:
    """The gradient over all micro-batches of a worker."""
    return jax.grad(lambda theta: jnp.mean(jax.vmap(lambda one: loss(theta, one))(batch)))(theta)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method in its neutral setting: how it starts, and one step of a worker."""

    init: Callable[[Any], Any]
    step: Step


def around(optimizer: optax.GradientTransformation) -> Method:
    """An optimizer behind the mean of all gradients."""

    def step(theta: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        gradient = lax.pmean(gradient_of(theta, batch), AXIS)
        updates, state = optimizer.update(gradient, state, theta)
        return optax.apply_updates(theta, updates), state

    return Method(optimizer.init, step)


def dropcompute(optimizer: optax.GradientTransformation) -> Method:
    whole = aggregation.skip_empty(optimizer)

    def step(theta: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        completed = jnp.int32(MICRO_BATCHES)
        work = aggregation.accumulate(loss)
        total = aggregation.masked(work, aggregation.gradient_sum(theta), batch, completed, theta)
        found = aggregation.combine(total, AXIS, completed, MICRO_BATCHES)
        updates, state = whole.update(found.gradient, state, theta, empty=found.empty)
        return optax.apply_updates(theta, updates), state

    return Method(whole.init, step)


def lossy(optimizer: optax.GradientTransformation) -> Method:
    whole = aggregation.lossy_zero2(optimizer, AXIS, p_grad=0.0, p_param=0.0, packet=2)

    def step(theta: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = whole.update(gradient_of(theta, batch), state, theta)
        return optax.apply_updates(theta, updates), state

    return Method(whole.init, step)


def shadow(optimizer: optax.GradientTransformation) -> Method:
    """Three workers and one to spare."""
    gradient = aggregation.shadow(gradient_of, AXIS)

    def step(theta: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        inner, roles = state
        mean, roles, _ = gradient(roles, theta, batch)
        updates, inner = optimizer.update(mean, inner, theta)
        return optax.apply_updates(theta, updates), (inner, roles)

    return Method(lambda theta: (optimizer.init(theta), aggregation.init_shadow(WORKERS)), step)


METHODS: dict[str, Callable[[optax.GradientTransformation], Method]] = {
    "noise": lambda optimizer: around(optax.chain(aggregation.gradient_noise(AXIS, 0.0), optimizer)),
    "paft_sync": lambda optimizer: around(aggregation.paft_sync(optimizer, AXIS, 2, sync_state=True)),
    "paft": lambda optimizer: around(aggregation.paft(optimizer, AXIS, 1, 1, 2)),
    "dropcompute": dropcompute,
    "lossy": lossy,
    "shadow": shadow,
}


def zero2(optimizer: optax.GradientTransformation) -> Method:
    """ZeRO-2 without losses: what `lossy` is compared with, whose optimizer sees flat shards."""
    return Method(*plain_zero2(gradient_of, optimizer, AXIS, WORKERS))


def run(method: Method, placement: str, workers: int = WORKERS) -> tuple[Any, Any]:
    """Parameters and state of all workers after some steps."""
    traced = []

    def counted(*args: Any) -> Any:
        traced.append(None)
        return method.step(*args)

    step = place(counted, placement, workers)
    theta, state = place(lambda theta: (theta, method.init(theta)), placement, workers)(stack(params(), workers))
    x, y = batches(WORKERS)
    first = 0
    for number in range(STEPS):
        theta, state = step(theta, state, (x[number, :workers], y[number, :workers]))
        first = first or len(traced)
    assert len(traced) == first, "a later call compiled the step again"
    return theta, state


@functools.cache
def plain(optimizer: str, method: str) -> Any:
    """The plain run, under `vmap`; of ZeRO-2 for `lossy`, and without the spare worker for `shadow`."""
    make = zero2 if method == "lossy" else around
    theta, _ = run(make(OPTIMIZERS[optimizer]()), "vmap", WORKERS - (method == "shadow"))
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), theta)


@pytest.fixture(autouse=True)
def promotion() -> Any:
    """optax raises Python floats to integer powers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("method", "placement"),
    # `shadow` refuses the type checker, whose own sums over workers would leave nothing to compare.
    [pair for pair in itertools.product(METHODS, PLACEMENTS) if pair != ("shadow", "shard_map, checked")],
)
def test_neutral_is_plain(method: str, optimizer: str, placement: str, tmp_path: Path) -> None:
    theta, state = run(METHODS[method](OPTIMIZERS[optimizer]()), placement)
    for name, leaf in plain(optimizer, method).items():
        np.testing.assert_allclose(theta[name][0], leaf, rtol=2e-5, atol=2e-6, err_msg=name)
    assert equal_replicas(theta)
    if (placement, optimizer) == ("vmap", "adam"):
        saved = jax.tree.map(jnp.asarray, (theta, state))
        ocp.save(tmp_path / "state", saved)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved)
        restored = ocp.load(tmp_path / "state", abstract)
        jax.tree.map(np.testing.assert_array_equal, restored, saved)
        assert jax.tree.structure(restored) == jax.tree.structure(saved)
