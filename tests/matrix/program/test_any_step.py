"""One contract over steps that hold nothing of this project, and every transformation.

The same outputs (to rounding: instrumentation changes fusions), reports of the right shape that say nothing when
nothing happened, and no recompilation on the second call. `test_interpreter.py` has the same for single constructs of
JAX.
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.faults import BitFlip
from sdc.program import arithmetic, operations, primitive
from tests.sdc.program.test_interpreter import STEPS

X = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4)
W = np.linspace(0.1, 0.5, 16, dtype=np.float32).reshape(4, 4)
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
Step = Callable[..., Any]


def squares(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def plain() -> tuple[Step, tuple[Any, ...]]:
    return lambda w, x: w - 0.1 * jax.grad(squares)(w, x), (W, X)


def accumulated() -> tuple[Step, tuple[Any, ...]]:
    def step(w: Any, x: Any) -> Any:
        def micro(total: Any, rows: Any) -> Any:
            return total + jax.grad(squares)(w, rows), None

        total, _ = lax.scan(micro, jnp.zeros_like(w), x.reshape(4, 2, 4), reverse=True)
        return w - 0.1 * total / 4.0

    return step, (W, X)


def rematerialized() -> tuple[Step, tuple[Any, ...]]:
    def step(w: Any, x: Any) -> Any:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        layer = jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w)), policy=policy)
        return jax.grad(lambda x: jnp.sum(layer(layer(x))))(x)

    return step, (W, X)


def automatically_sharded() -> tuple[Step, tuple[Any, ...]]:
    sharding = jax.sharding.NamedSharding(MESH, P("data", "model"))

    def step(w: Any, x: Any) -> Any:
        x = lax.with_sharding_constraint(x, sharding)
        return w - 0.1 * jax.grad(squares)(w, x)

    return step, (W, X)


def partly_manual() -> tuple[Step, tuple[Any, ...]]:
    def body(w: Any, x: Any) -> Any:
        return lax.pmean(jax.grad(squares)(w, x), "data")

    mapped = jax.shard_map(
        body, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    return mapped, (W, X)


def donated() -> tuple[Step, tuple[Any, ...]]:
    inner = jax.jit(lambda w, g: w - 0.1 * g, donate_argnums=0)
    return lambda w, x: inner(w + 0.0, jax.grad(squares)(w, x)), (W, X)


def keys_and_integers() -> tuple[Step, tuple[Any, ...]]:
    def step(key: Any, count: Any, x: Any) -> Any:
        key, use = jax.random.split(key)
        mask = jax.random.bernoulli(use, 0.5, x.shape)
        # The tangent of an integer is of type float0.
        gradient = jax.grad(lambda x, n: jnp.sum(jnp.where(mask, x, 0.0) ** 2) * n.astype(jnp.float32))(x, count)
        return key, count + 1, gradient

    return step, (jax.random.key(0), jnp.int32(3), X)


def effectful() -> tuple[Step, tuple[Any, ...]]:
    def step(w: Any, x: Any) -> Any:
        jax.debug.callback(lambda value: None, jnp.sum(x))
        return w - 0.1 * jax.grad(squares)(w, x)

    return step, (W, X)


def flax_nnx() -> tuple[Step, tuple[Any, ...]]:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return nnx.gelu(self.norm(self.up(x)))

    definition, weights = nnx.split(Model(nnx.Rngs(0)))

    def step(weights: Any, x: Any) -> Any:
        gradient = jax.grad(lambda weights: jnp.mean(nnx.merge(definition, weights)(x) ** 2))(weights)
        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, gradient)

    return step, (weights, X)


def flax_linen() -> tuple[Step, tuple[Any, ...]]:
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(1)])
    params = model.init(jax.random.key(0), X)
    return lambda params, x: jax.grad(lambda p: jnp.mean(model.apply(p, x) ** 2))(params), (params, X)


def equinox() -> tuple[Step, tuple[Any, ...]]:
    arrays, static = eqx.partition(eqx.nn.MLP(4, 1, 8, 2, key=jax.random.key(0)), eqx.is_array)

    def step(arrays: Any, x: Any) -> Any:
        return jax.grad(lambda a: jnp.mean(jax.vmap(eqx.combine(a, static))(x) ** 2))(arrays)

    return step, (arrays, X)


def with_optax(make: Callable[[], optax.GradientTransformation]) -> tuple[Step, tuple[Any, ...]]:
    optimizer = make()

    def step(w: Any, state: Any, x: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(jax.grad(squares)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    with jax.numpy_dtype_promotion("standard"):
        return step, (W, optimizer.init(W), X)


FOREIGN: dict[str, Callable[[], tuple[Step, tuple[Any, ...]]]] = {
    "plain": plain,
    "accumulation in a reversed scan": accumulated,
    "remat with a policy": rematerialized,
    "automatic sharding": automatically_sharded,
    "partly manual shard_map": partly_manual,
    "donated buffers": donated,
    "keys, integers and float0": keys_and_integers,
    "effects": effectful,
    "Flax nnx": flax_nnx,
    "Flax Linen": flax_linen,
    "Equinox": equinox,
    "optax chain": functools.partial(
        with_optax, lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    ),
    "optax MultiSteps": functools.partial(
        with_optax, lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    ),
    "optax inject_hyperparams": functools.partial(
        with_optax, lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    ),
}
WHERE = operations & arithmetic


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_every_transformation_of_foreign_steps(make: Callable[[], tuple[Step, tuple[Any, ...]]]) -> None:
    step, arguments = make()
    all_sites = sdc.sites(step, *arguments, where=WHERE)
    # Faults and comparisons compile slowly; digests are taken of all operations.
    few = primitive("dot_general") if any(map(primitive("dot_general"), all_sites)) else WHERE
    never = sdc.Fault(BitFlip(), 0.0, few)
    moment = sdc.Moment(jax.random.key(0), jnp.int32(0))

    def all_of_them(*args: Any) -> Any:
        def pair(*args: Any) -> Any:
            return jax.vmap(sdc.lockstep(step, "twin", where=few), None, axis_name="twin", axis_size=2)(*args)

        return {
            "fingerprint": sdc.fingerprint(step, WHERE)(*args),
            "inject": sdc.inject(step, [never])(moment, *args),
            "strike": sdc.strike(step, few)(sdc.no_strike(), *args),
            "lockstep": pair(*args) if "key" not in str(jax.typeof(jax.tree.leaves(args)[0])) else None,
        }

    run = jax.jit(all_of_them)
    results = run(*arguments)
    run(*arguments)
    assert run._cache_size() == 1
    expected = jax.jit(step)(*arguments)
    names = [site.name for site in all_sites]
    for tool in ("fingerprint", "inject", "strike"):
        out, reports = results[tool]
        assert jax.tree.structure(out) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
            assert ours.dtype == theirs.dtype
            if not jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
                chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert set(reports) <= set(names)
        assert len(reports) > 0
    assert list(results["fingerprint"][1]) == names
    for tool in ("inject", "strike"):
        assert not any(np.asarray(event.changed).any() for event in results[tool][1].values())
    if results["lockstep"] is not None:
        out, mismatches = results["lockstep"]
        assert sum(int(m.difference.checked.sum()) for m in mismatches.values()) > 0
        assert not any(np.asarray(m.difference.mismatched).any() for m in mismatches.values())


@pytest.mark.parametrize("name", STEPS)
def test_every_operation_of_every_construct(name: str) -> None:
    """Digests of all sites of the steps of `test_interpreter.py`: the right axes, and the step as it was."""
    step, _ = STEPS[name]
    x = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
    out, digests = jax.jit(sdc.fingerprint(step, lambda site: True))(x)
    chex.assert_trees_all_close(out, jax.jit(step)(x), rtol=1e-5)
    for site, value in zip(digests.sites, digests.values(), strict=True):
        assert value.shape[-2:] == (len(site.outputs), 2)
        assert value.ndim == len(site.dims) + 2
    assert sdc.first_difference(digests, digests) is None
