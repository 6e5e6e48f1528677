"""Every method at the level of jit, on a model that XLA shards, against the same method in a manual `shard_map`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sdc
from sdc import aggregation
from sdc.aggregation import Dropped, Own, Shadowed, data_parallel

from .placements import AXIS

STEPS, ROWS = 6, 8
SPECS = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "bias": P()}


def mesh_of(data: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((data, 2, 4 // data), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)


def params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 2)
    up, down = (0.5 * jax.random.normal(key, shape) for key, shape in zip(keys, ((8, 16), (16, 4)), strict=True))
    return {"up": up, "down": down, "bias": jnp.zeros(4)}


def loss(theta: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean(jnp.square(jnp.tanh(x @ theta["up"]) @ theta["down"] + theta["bias"] - y))


GRADIENT = jax.value_and_grad(loss)


def batches(workers: int) -> Any:
    x, y = (np.asarray(jax.random.normal(jax.random.key(i), (STEPS, workers * ROWS, n))) for i, n in ((3, 8), (4, 4)))
    return x, y


COMPLETED = np.asarray([[4, 2, 0, 1], [4, 4, 4, 4], [0, 0, 0, 0], [1, 0, 3, 2], [4, 0, 4, 0], [2, 2, 2, 2]], np.int32)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method, and one step of a worker as a user writes it under a bound axis."""

    optimizer: optax.GradientTransformation
    combining: Any = None
    workers: int = 2
    manual: Callable[..., Any] | None = None

    def step(self, theta: Any, state: Any, batch: Any) -> Any:
        _, gradient = GRADIENT(theta, batch)
        if not isinstance(self.combining, Own):
            gradient = lax.pmean(gradient, AXIS)
        updates, state = optax.with_extra_args_support(self.optimizer).update(gradient, state, theta)
        return optax.apply_updates(theta, updates), state


def dropped(theta: Any, state: Any, batch: Any) -> Any:
    rows, (completed,) = batch
    cut = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), rows)
    total = aggregation.masked(aggregation.accumulate(loss), aggregation.gradient_sum(theta), cut, completed, theta)
    found = aggregation.combine(total, AXIS, completed, 4, correction="count")
    updates, state = SKIPPING.update(found.gradient, state, theta, empty=found.empty)
    return optax.apply_updates(theta, updates), state


ADAM = optax.adam(0.02)
SKIPPING = aggregation.skip_empty(ADAM)
METHODS = {
    "mean": Method(ADAM),
    "noise and PAFT-Sync": Method(
        optax.chain(aggregation.gradient_noise(AXIS, 0.1), aggregation.paft_sync(ADAM, AXIS, 4))
    ),
    "noise and PAFT": Method(
        optax.chain(aggregation.gradient_noise(AXIS, 0.1, workers=[1]), aggregation.paft(ADAM, AXIS, 2, max_period=3))
    ),
    "DropCompute": Method(SKIPPING, Dropped(4, "count"), 4, dropped),
    "lossy": Method(aggregation.lossy_zero2(ADAM, AXIS, 0.3, 0.3, packet=5, seed=2), Own(), 4),
    "lossy in bursts, reliable": Method(
        aggregation.lossy_zero2(
            ADAM, AXIS, aggregation.GilbertElliott(0.3, 2.0), 0.2, packet=4, reliable=0.2, parity=3, tighten=0.5
        ), Own(), 2,
    ),
    "shadow": Method(ADAM, Shadowed(1), 4),
}  # fmt: skip


def given(method: Method, number: int) -> Any:
    rows = jax.tree.map(lambda x: x[number], batches(method.workers))
    return (rows, COMPLETED[number]) if isinstance(method.combining, Dropped) else rows


def test_a_fault_in_one_worker_is_found_by_the_shadow() -> None:
    """The gradient of one rank is struck; shadow names the rank, on a sharded model, inside of `jax.jit`."""
    mesh = mesh_of(4)

    def struck(theta: Any, batch: Any) -> Any:
        value, gradient = GRADIENT(theta, batch)
        wrong = jnp.where(lax.axis_index("data") == 1, 1e-3, 0.0).astype(jnp.float32)
        return value, {**gradient, "up": gradient["up"].at[3, 5].add(wrong)}

    trainer = data_parallel(struck, ADAM, mesh, combining=Shadowed(1))
    workers = trainer.init(params())
    run = jax.jit(trainer.step)
    blamed = np.zeros(4, int)
    with jax.numpy_dtype_promotion("standard"):
        for number in range(24):
            workers, report = run(workers, trainer.place(given(METHODS["shadow"], number % STEPS)))
            blamed += np.asarray(report.shadow.blamed)
    assert blamed[1] > 0
    assert blamed.sum() == blamed[1]


def split(theta: Any, batch: Any) -> Any:
    """XLA permutes what is split, by a collective of the whole mesh."""
    q, k, v = jnp.split(batch @ theta, 3, -1)
    return jnp.mean((q * k + v) ** 2)


def test_workers_that_complete_different_numbers_do_not_wait_for_one_another() -> None:
    mesh = mesh_of(2)
    trainer = data_parallel(jax.value_and_grad(split), SKIPPING, mesh, combining=Dropped(4, "count"))
    theta = jax.random.normal(jax.random.key(0), (16, 48))
    workers = trainer.init(jax.device_put(theta, NamedSharding(mesh, P("fsdp", "tensor"))))
    rows = jax.random.normal(jax.random.key(1), (16, 16))
    step = jax.jit(trainer.step)

    def run(*completed: int) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return step(workers, trainer.place((rows, jnp.asarray(completed, jnp.int32))))[1]

    report = run(4, 1)
    done = [split(theta, part) for part in (*rows[:8].reshape(4, 2, 16), rows[8:10])]
    assert int(report.completed) == 5
    np.testing.assert_allclose(report.loss, np.mean(done), rtol=1e-5)
    # Numbers that cannot be count as those that can.
    assert [int(run(*completed).completed) for completed in [(9, 9), (9, -3), (-1, -1)]] == [8, 4, 0]
    assert float(run(9, 1).loss) == float(report.loss)


def test_a_strike_of_one_worker() -> None:
    mesh = mesh_of(2)
    trainer = data_parallel(jax.value_and_grad(split), optax.sgd(0.1), mesh)
    workers, rows = trainer.init(jnp.ones((16, 48))), trainer.place(jnp.ones((16, 16)))
    where = sdc.program.products
    [site, *_] = sdc.sites(trainer.step, workers, rows, where=where)
    hit = sdc.strike_on(site, "bitflip,bits=22", 3, device={"data": 1})
    _, events = jax.jit(sdc.strike(trainer.step, where))(hit, workers, rows)
    assert events[site.name].changed.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("combining", [None, Own()], ids=["mean", "own"])
def test_narrow_parameters_and_losses(dtype: Any, combining: Any) -> None:
    """XLA's CPU backend cannot sum bfloat16 over a manual axis beside automatic ones."""
    optimizer = optax.sgd(0.1) if combining is None else aggregation.lossy_zero2(optax.sgd(0.1), "data")

    def narrow(theta: Any, x: Any) -> Any:
        return jnp.mean((x.astype(jnp.bfloat16) @ theta.astype(jnp.bfloat16)) ** 2)

    trainer = data_parallel(jax.value_and_grad(narrow), optimizer, mesh_of(2), combining=combining)
    workers, report = jax.jit(trainer.step)(trainer.init(jnp.ones((16, 8), dtype)), trainer.place(jnp.ones((16, 16))))
    assert report.loss.dtype == jnp.bfloat16
    assert float(report.loss) == 256
    assert workers.params.dtype == dtype


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_meshes_as_they_are_made(kind: AxisType) -> None:
    """`jax.make_mesh` makes explicit axes by default, and arrays may lie on such a mesh already."""
    mesh = mesh_of(2, kind)
    trainer = data_parallel(GRADIENT, ADAM, mesh)
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params(), SPECS)
    batch = jax.device_put(given(METHODS["mean"], 0), NamedSharding(mesh, P("data")))
    workers = trainer.init(sharded)
    with jax.numpy_dtype_promotion("standard"):
        workers, report = jax.jit(trainer.step)(workers, trainer.place(batch))
        with jax.set_mesh(mesh):  # the same one, or that of something else
            again = trainer.init(sharded)
            again, set_report = jax.jit(trainer.step)(again, trainer.place(batch))
    assert float(set_report.loss) == float(report.loss)
    assert workers.params["down"].sharding.spec == P("data", "tensor", "fsdp")
    assert np.isfinite(float(report.loss))


def abs_(x: Any) -> Any:
    return jnp.abs(x)


def test_one_clear_line() -> None:
    mesh = mesh_of(2)
    with pytest.raises(ValueError, match="axis_name='batch': expected an axis of the mesh"):
        data_parallel(GRADIENT, ADAM, mesh, "batch")
    trainer = data_parallel(GRADIENT, ADAM, mesh)
    wrong = {**params(), "up": jax.device_put(params()["up"], NamedSharding(mesh, P("data")))}
    with pytest.raises(ValueError, match="paft synchronizes replicas, but the parameters are sharded over 'data'"):
        data_parallel(GRADIENT, aggregation.paft(ADAM, "data"), mesh).init(wrong)
    other = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="parameters are on a mesh"):
        trainer.init(jax.device_put(params(), NamedSharding(other, P())))
    workers = trainer.init(params())
    with pytest.raises(ValueError, match=r"batch\[0\] has shape \(7, 8\); expected a first axis whose size"):
        trainer.place((np.ones((7, 8)), np.ones((7, 4))))
    with pytest.raises(ValueError, match="the state has type dict; start with"):
        trainer.step(params(), given(METHODS["mean"], 0))  # type: ignore[arg-type]
    cut = data_parallel(GRADIENT, SKIPPING, mesh, combining=Dropped(3))
    with pytest.raises(ValueError, match="the 8 rows of a worker are not divisible by micro_batches=3"):
        cut.step(cut.init(params()), (given(METHODS["mean"], 0), np.ones(2, np.int32)))
    for combining in ("mean", Dropped):
        with pytest.raises(ValueError, match=r"combining=.*: expected an object such as"):
            data_parallel(GRADIENT, ADAM, mesh, combining=combining)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="completed, the second element of the batch, is not int32"):
        cut.step(cut.init(params()), given(METHODS["mean"], 0))
    with pytest.raises(ValueError, match=r"params\['act'\] is function, not an array; give only the arrays"):
        trainer.init({**params(), "act": abs_})
    elsewhere = data_parallel(GRADIENT, aggregation.gradient_noise("model", 0.1), mesh)
    with pytest.raises(ValueError, match=r"'model' is not bound .*; name 'data', or call the step under"):
        elsewhere.step(elsewhere.init(params()), given(METHODS["mean"], 0))
    with pytest.raises(ValueError, match="ranks=2: expected at least three"):
        data_parallel(GRADIENT, ADAM, mesh, combining=Shadowed()).init(params())
    for combining, optimizer, said in [
        (Own(), ADAM, "combining=Own.. leaves gradients unreduced"),
        (None, aggregation.lossy_zero2(ADAM, "data"), "lossy_zero2 reduces the workers' gradients itself"),
    ]:
        with pytest.raises(ValueError, match=said):
            data_parallel(GRADIENT, optimizer, mesh, combining=combining).init(params())
    wrong_gradients: dict[str, Any] = {
        r"must return \(loss, gradient\)": jax.grad(loss),
        "expected a single number; if it returns": jax.value_and_grad(lambda p, b: (loss(p, b), 1.0), has_aux=True),
        "gradient_fn uses psum": lambda p, b: lax.pmean(GRADIENT(p, b), "data"),
    }
    for said, gradient in wrong_gradients.items():
        with pytest.raises(ValueError, match=said):
            data_parallel(gradient, ADAM, mesh).step(workers, given(METHODS["mean"], 0))
    with pytest.raises(ValueError, match=r"with has_aux, gradient must return \(\(loss, aux\), gradient\)"):
        data_parallel(GRADIENT, ADAM, mesh, has_aux=True).step(workers, given(METHODS["mean"], 0))
    with pytest.raises(ValueError, match=r"mesh=None: expected a jax\.sharding\.Mesh"):
        data_parallel(GRADIENT, ADAM, None)  # type: ignore[arg-type]
