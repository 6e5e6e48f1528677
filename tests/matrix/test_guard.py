"""Guarded and unguarded runs end with equal bits, without a false alarm, in many forms of a training step."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sdc
from sdc.train import TrainConfig, get_config
from sdc.train.programs import initial_state, place, plain, sharded
from sdc.verdict import Verdict
from tests.matrix.test_forms import eqx_step, nnx_state, nnx_step

pytestmark = pytest.mark.usefixtures("free_checks")
STEPS = 20
Form = tuple[Callable[..., Any], Callable[[], Any], Callable[[int], Any], Any]  # step, state, batch, mesh
POLICIES = jax.checkpoint_policies


def layers(policy: Any, dtype: Any, *, donate: bool, microsteps: int, data: int, fsdp: bool) -> Form:
    """A small network under `jax.jit` with shardings."""
    mesh = jax.make_mesh((data,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:data])
    layer = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w), policy=policy)
    optimizer = optax.adam(1e-2)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].astype(jnp.float32) ** 2)

    def step(state: Any, x: Any) -> Any:
        w, inner = state
        parts = x.reshape(microsteps, -1, x.shape[-1])
        value, gradient = lax.scan(
            lambda total, part: (jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(w, part)), None),
            (jnp.float32(0), jnp.zeros_like(w)),
            parts,
        )[0]
        updates, inner = optimizer.update(gradient, inner, w)
        return (optax.apply_updates(w, updates), inner), {"loss": value}

    def state() -> Any:
        w = (jax.random.normal(jax.random.key(0), (3, 8, 8)) / 3).astype(dtype)
        placed = NamedSharding(mesh, P(None, "data") if fsdp else P())
        return jax.tree.map(
            lambda x: jax.device_put(jnp.copy(x), placed if x.ndim == 3 else NamedSharding(mesh, P())),
            (w, optimizer.init(w)),
        )

    def batch(number: int) -> Any:
        x = jax.random.normal(jax.random.key(number), (8 * microsteps, 8)).astype(dtype)
        return jax.device_put(x, NamedSharding(mesh, P("data")))

    return jax.jit(step, donate_argnums=(0,) if donate else ()), state, batch, mesh


def reference(dtype: Any, remat: Any, data: int, model: int) -> Form:
    """The reference workload, under `shard_map`."""
    config: TrainConfig = dataclasses.replace(get_config("tiny").of_type(dtype, remat), sequence_length=32)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, layers=2, width=32))
    work, placement = sharded(config), place(twins=None, data=data, model=model, devices=jax.devices()[: data * model])
    shape = (config.microsteps, config.batch_size, config.sequence_length + 1)

    def batch(number: int) -> Any:
        tokens = np.random.default_rng(number).integers(0, config.model.vocab_size, shape).astype(np.int32)
        return jax.device_put(tokens, placement.sharding(P(None, "data", None)))

    return jax.jit(plain(work, placement)), lambda: initial_state(work, placement, 0), batch, placement.mesh


def of_module(step: Any, state: Any, jit: Any) -> Form:
    return jit(step), state, lambda number: jax.random.normal(jax.random.key(number), (8, 4)), None


def forms() -> Iterator[tuple[str, Callable[[], Form]]]:
    policies = {"all": None, "products": POLICIES.dots_saveable, "none": POLICIES.everything_saveable}
    for number, (policy, dtype) in enumerate(itertools.product(policies, ("float32", "bfloat16"))):
        for data in (1, 4):
            settings = {"donate": bool(number % 2), "microsteps": 1 + (number + data) % 2, "data": data}
            yield (
                f"{policy} {dtype} {settings}",
                functools.partial(layers, policies[policy], dtype, fsdp=data > 1 and number % 3 == 0, **settings),
            )
    for dtype, remat, data, model in (
        ("float32", "layer", 2, 1), ("bfloat16", "layer", 1, 1), ("float32", "ffn", 1, 2), ("bfloat16", "ffn", 2, 2),
    ):  # fmt: skip
        yield f"reference {dtype} {remat} {data} {model}", functools.partial(reference, dtype, remat, data, model)
    yield "nnx", functools.partial(of_module, nnx_step, nnx_state, nnx.jit)
    yield "nnx function", functools.partial(of_module, nnx_step, nnx_state, lambda step: step)
    model = functools.partial(eqx.nn.MLP, 4, 2, 4, 1, key=jax.random.key(0))
    yield "equinox", functools.partial(of_module, eqx_step, model, eqx.filter_jit)
    donating = functools.partial(eqx.filter_jit, donate="all")
    yield "equinox, donated", functools.partial(of_module, eqx_step, model, donating)


FORMS = dict(forms())


def arrays_of(state: Any) -> list[Any]:
    leaves = jax.tree.leaves(
        nnx.split(state)[1] if isinstance(state, tuple) and isinstance(state[0], nnx.Module) else state
    )
    return [np.asarray(x) for x in leaves if eqx.is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def test_there_are_twenty_forms() -> None:
    assert len(FORMS) == 20


@pytest.mark.parametrize("name", FORMS)
def test_the_guard_changes_no_bit_and_finds_nothing(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        step, state, batch, mesh = FORMS[name]()
        watch = sdc.guard(step, mesh, budget=0.6)
        guarded, alone = state(), state()
        for number in range(STEPS):
            guarded, _ = watch(guarded, batch(number))
            alone, _ = step(alone, batch(number))
        for ours, theirs in zip(arrays_of(guarded), arrays_of(alone), strict=True):
            assert ours.tobytes() == theirs.tobytes()
        report = watch.report()
        assert not report.findings
        assert report.verdict().verdict is Verdict.CLEAN, str(report)
