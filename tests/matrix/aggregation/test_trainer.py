"""Every method at the level of jit, on a model that XLA shards, against the same method in a manual `shard_map`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import sdc
from sdc import aggregation
from sdc.aggregation import Shadowed, data_parallel
from tests.sdc.aggregation.placements import AXIS, equal_replicas, place, stack
from tests.sdc.aggregation.test_trainer import ADAM, GRADIENT, METHODS, SPECS, STEPS, Method, given, mesh_of, params


def manually(method: Method) -> tuple[Any, Any]:
    """Parameters and optimizer of every worker after all steps, each worker on a device of its own."""
    if isinstance(method.combining, Shadowed):
        shadowed = aggregation.shadow(GRADIENT, AXIS, spares=1)

        def one(theta: Any, state: Any, batch: Any) -> Any:
            inner, roles = state
            (_, gradient), roles, _ = shadowed(roles, theta, batch)
            updates, inner = ADAM.update(gradient, inner, theta)
            return optax.apply_updates(theta, updates), (inner, roles)

        first: Any = lambda theta: (ADAM.init(theta), aggregation.init_shadow(method.workers))  # noqa: E731 - one expression, like its counterpart below
    else:
        one, first = method.manual or method.step, method.optimizer.init
    theta = stack(params(), method.workers)
    state = place(lambda theta: (first(theta),), "shard_map", method.workers)(theta)[0]
    run = place(one, "shard_map", method.workers)
    for number in range(STEPS):
        batch = jax.tree.map(
            lambda x: x.reshape(method.workers, x.shape[0] // method.workers, *x.shape[1:]), given(method, number)
        )
        theta, state = run(theta, state, batch)
    return theta, state


@pytest.mark.parametrize("name", METHODS)
def test_every_method_on_a_sharded_model_is_the_manual_one(name: str) -> None:
    """To rounding: XLA sums in other orders. What is decided (schedules, draws, counts) is the same to the bit."""
    method = METHODS[name]
    mesh = mesh_of(method.workers)
    trainer = data_parallel(GRADIENT, method.optimizer, mesh, combining=method.combining)
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params(), SPECS)
    workers = trainer.init(sharded)
    before = jax.tree.map(lambda x: x.sharding, workers)
    run = jax.jit(trainer.step, donate_argnums=0)
    with jax.numpy_dtype_promotion("standard"):
        for number in range(STEPS):
            workers, report = run(workers, trainer.place(given(method, number)))
        theta, state = manually(method)
    assert run._cache_size() == 1
    assert jax.tree.map(lambda x: x.sharding, workers) == before
    kept = P("data", "fsdp", "tensor") if method.workers == 2 else P("data", "fsdp")  # an axis of one device is none
    assert workers.params["up"].sharding.spec == kept
    found = workers.params, (workers.optimizer, workers.combining) if name == "shadow" else workers.optimizer
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(found), jax.tree.leaves((theta, state)), strict=True):
        told = jax.tree_util.keystr(path)
        assert ours.shape == theirs.shape, told
        if jnp.issubdtype(ours.dtype, jnp.floating):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5, err_msg=told)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=told)
    if "noise" in name or "lossy" in name:
        assert not equal_replicas(workers.params)
    else:
        assert equal_replicas(workers.params)
        assert np.isfinite(float(report.loss))


@pytest.mark.parametrize("name", ["noise and PAFT", "lossy"])
def test_states_are_saved_and_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    trainer = data_parallel(GRADIENT, method.optimizer, mesh_of(method.workers), combining=method.combining)
    workers = trainer.init(params())
    run = jax.jit(trainer.step)
    with jax.numpy_dtype_promotion("standard"):
        for number in range(3):
            workers, _ = run(workers, trainer.place(given(method, number)))
        ocp.save(tmp_path / "state", workers)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), workers)
        again = ocp.load(tmp_path / "state", like)
        for number in range(3, STEPS):
            workers, _ = run(workers, trainer.place(given(method, number)))
            again, _ = run(again, trainer.place(given(method, number)))
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(workers), strict=True):
        assert ours.sharding == theirs.sharding
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_the_step_can_be_transformed() -> None:
    """Its sites lead with the axis of the workers; products are checked on every one of them."""
    trainer = data_parallel(GRADIENT, ADAM, mesh_of(2))
    workers = trainer.init(params())
    with jax.numpy_dtype_promotion("standard"):
        (_, report), flags = jax.jit(sdc.abft(trainer.step))(workers, trainer.place(given(METHODS["mean"], 0)))
    assert float(report.loss) > 0
    assert sdc.checksums.coverage(flags) == 1
    for site, flag in zip(flags.sites, flags.values(), strict=True):
        assert site.dims == ("data",)
        assert flag.checked.shape == (2,)
        assert (flag.checked > 0).all()
        assert not flag.flagged.any()


def deep(theta: Any, x: Any) -> Any:
    layers = theta["up"], theta["down"]
    return jnp.mean(lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, layers)[0] ** 2)


@pytest.mark.parametrize("what", ["rows that cancel", "a fault"])
def test_a_check_that_one_worker_examines(what: str) -> None:
    """All of them take the branch, for XLA moves shards in it; the others find nothing there."""
    mesh = mesh_of(2)
    trainer = data_parallel(jax.value_and_grad(deep), optax.sgd(0.1), mesh)
    theta = {"up": 0.3 + jnp.zeros((2, 64, 32)), "down": 0.1 * jnp.ones((2, 32, 64))}
    specs = {"up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}
    workers = trainer.init(jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), theta, specs))
    x = jax.random.normal(jax.random.key(0), (16, 8, 64))
    moment = sdc.Moment(jax.random.key(0), jnp.int32(0))
    if what == "a fault":
        flip = sdc.Fault(sdc.faults.BitFlip(bits=(30,)), 1e-2, sdc.program.products, at={"data": 1})
        faulty = sdc.inject(sdc.checksums.accumulators(trainer.step), [flip])
        (_, events), flags = jax.jit(sdc.abft(faulty, mode="correct"))(moment, workers, trainer.place(x))
        struck = [sum(int(event.changed[worker].sum()) for event in events.values()) for worker in (0, 1)]
        assert struck[0] == 0 < struck[1]
        found = [sum(int(flag.corrected[worker].sum()) for flag in flags.values()) for worker in (0, 1)]
        assert found[0] == 0 < found[1]
    else:
        x = x.at[8:].set(1e3 * jax.random.normal(jax.random.key(1), (8, 8, 64)))
        _, flags = jax.jit(sdc.abft(trainer.step))(workers, trainer.place(x))
        assert sum(int(flag.examined.sum()) for flag in flags.values()) > 0
        assert not any(flag.flagged.any() for flag in flags.values())
    assert all((flag.checked[0] == flag.checked[1]).all() for flag in flags.values())
