"""The step: clipping and AdamW against optax, accumulation, precision, placement, and the 8B configurations."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from sdc.train.programs.config import ModelConfig, OptimizerConfig, TrainConfig, check, get_config
from sdc.train.programs.model import global_norm
from sdc.train.programs.step import (
    BATCH_SPEC,
    Metrics,
    TrainState,
    abstract_state,
    adamw,
    device_step,
    history_ratio,
    init_state,
    learning_rate,
    metrics_specs,
    state_specs,
)

CONFIG = TrainConfig(
    name="test",
    model=ModelConfig(vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=48),
    optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=2, total_steps=50, weight_decay=0.1, clip=0.5),
    sequence_length=16,
    batch_size=4,
    microsteps=2,
)
# Text with structure: each token is the one before plus one, so that there is something to learn.
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time
TOKENS = (np.random.default_rng(0).integers(0, 64, (2, 4, 1)) + np.arange(17)).astype(np.int32) % 64


def bind(config: TrainConfig, mesh: Any) -> Any:
    specs = state_specs(config)
    return jax.shard_map(
        functools.partial(device_step, config=config),
        mesh=mesh,
        in_specs=(specs, BATCH_SPEC),
        out_specs=(specs, metrics_specs(config)),
        check_vma=False,
    )


@functools.cache
def compiled(config: TrainConfig, data: int, model: int) -> Any:
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), (state_specs(config), BATCH_SPEC))
    return jax.jit(bind(config, mesh), in_shardings=shardings, compiler_options=QUICK)


@functools.cache
def initial() -> TrainState:
    return jax.jit(functools.partial(init_state, CONFIG), compiler_options=QUICK)(jax.random.key(0))


@functools.cache
def trained() -> tuple[list[TrainState], list[Metrics]]:
    """Twelve steps on a 2×2 mesh: states before and after each, and metrics."""
    states, metrics = [initial()], []
    for _ in range(12):
        state, metric = compiled(CONFIG, 2, 2)(states[-1], TOKENS)
        states.append(jax.device_get(state))
        metrics.append(jax.device_get(metric))
    return states, metrics


def test_counters_and_learning_rate_agree() -> None:
    states, metrics = trained()
    assert [int(state.step) for state in states] == list(range(13))
    assert [int(state.optimizer[0].count) for state in states] == list(range(13))
    np.testing.assert_allclose([metric.learning_rate for metric in metrics[:3]], [0.01, 0.02, 0.02], rtol=1e-2)


def test_learning_rate_rises_linearly_and_ends_at_zero() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, total_steps=12)
    rates = [float(learning_rate(config, jnp.int32(step))) for step in range(13)]
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates[7], 0.5, rtol=1e-6)  # half of the cosine's way
    np.testing.assert_allclose(rates[11:], [0.0, 0.0], atol=1e-6)


def test_two_microsteps_are_one_of_twice_the_batch() -> None:
    whole = dataclasses.replace(CONFIG, batch_size=8, microsteps=1)
    state, metrics = compiled(whole, 1, 1)(initial(), TOKENS.reshape(1, 8, 17))
    np.testing.assert_allclose(metrics.loss, trained()[1][0].loss, rtol=1e-6)
    chex.assert_trees_all_close(metrics.gradient, trained()[1][0].gradient, rtol=1e-4, atol=1e-6)
    assert int(state.step) == 1


def test_the_second_step_does_not_compile_again() -> None:
    trained()
    assert compiled(CONFIG, 2, 2)._cache_size() <= 2  # uncommitted initial arrays, and those from the host


def test_global_norm_counts_what_model_ranks_hold_in_common_once() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"matrix": P("data", "model"), "scale": P("data")}
    leaves = {"matrix": jnp.full((2, 2), 2.0), "scale": jnp.full(2, 3.0)}
    norm = jax.shard_map(
        functools.partial(global_norm, specs=specs), mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )(leaves)
    np.testing.assert_allclose(norm, np.sqrt(4 * 4 + 2 * 9))


@pytest.mark.parametrize("shape", [(2, 1, 8), (1, 2, 8)], ids=["twins", "data"])
@pytest.mark.parametrize("name", ["llama3_8b_16l", "llama3_8b"])
def test_the_8b_configurations_lower_for_a_mesh_of_sixteen(name: str, shape: tuple[int, int, int]) -> None:
    config = get_config(name)
    config = dataclasses.replace(config, batch_size=shape[1], microsteps=config.microsteps // shape[1])
    check(config, shape[1], shape[2])
    mesh = AbstractMesh(shape, ("twin", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    specs = state_specs(config)

    def place(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    batch = jax.ShapeDtypeStruct((config.microsteps, config.batch_size, config.sequence_length + 1), jnp.int32)
    traced = jax.jit(bind(config, mesh), donate_argnums=0).trace(
        jax.tree.map(place, abstract_state(config), specs), place(batch, BATCH_SPEC)
    )
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "num_partitions = 16" in text
    # The feed-forward of one rank: an eighth of 16,384, at the full width of 4,096, in bfloat16.
    assert "tensor<4096x2048xbf16>" in text
    state, metrics = traced.out_info
    assert jax.tree.map(lambda leaf: leaf.shape, state.params) == jax.tree.map(
        lambda leaf: leaf.shape, metrics.gradient
    )


def test_the_history_of_sound_steps_stays_within_its_bound() -> None:
    """Gradients of the clipping norm, all in one element, reach the bound; one that was not clipped exceeds it."""
    config, params = CONFIG.optimizer, {"w": jnp.zeros((2, 3))}
    optimizer = adamw(config, {"w": P()})

    def after(gradients: list[Any]) -> float:
        state = optimizer.init(params)
        with jax.numpy_dtype_promotion("standard"):
            for gradient in gradients:
                _, state = optimizer.update({"w": gradient}, state, params)
            return float(history_ratio(config, state))

    peak = jnp.zeros((2, 3)).at[1, 2].set(config.clip)
    rng = np.random.default_rng(0)
    some = [rng.normal(size=(2, 3)).astype(np.float32) for _ in range(6)]
    for count in (1, 2, 6):
        assert 0.99 < after([peak] * count) <= 1.0
        assert after([jnp.asarray(g * config.clip / np.linalg.norm(g)) for g in some[:count]]) <= 1.0
        assert after([peak] * (count - 1) + [100.0 * peak]) > 1.0
