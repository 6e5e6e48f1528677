"""The step: clipping and AdamW against optax, accumulation, precision, placement, and the 8B configurations."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from sdc.train.programs.config import tiny
from sdc.train.programs.step import (
    BATCH_SPEC,
    device_step,
    init_state,
    metrics_specs,
    state_specs,
)
from tests.train.programs.test_step import CONFIG, QUICK, TOKENS, compiled, initial, trained


def test_the_loss_starts_near_the_entropy_of_a_guess_and_falls() -> None:
    losses = [float(metric.loss) for metric in trained()[1]]
    assert losses[0] == pytest.approx(np.log(64), abs=0.5)
    assert losses[-1] < 0.5 * losses[0]


def test_clipping_and_adamw_are_those_of_optax_on_unsharded_parameters() -> None:
    config = CONFIG.optimizer
    states, metrics = trained()

    def matrices(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "scale" not in str(path), params)

    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, 2, 50)
    reference = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(lambda count: schedule(count + 1), 0.9, 0.99, 1e-8, weight_decay=0.1, mask=matrices),
    )
    with jax.numpy_dtype_promotion("standard"):
        params, optimizer = states[0].params, reference.init(states[0].params)
        update = jax.jit(reference.update, compiler_options=QUICK)
        for step, metric in enumerate(metrics[:4]):
            updates, optimizer = update(metric.gradient, optimizer, params)
            params = optax.apply_updates(params, updates)
            chex.assert_trees_all_close(states[step + 1].params, params, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(metric.gradient_norm, optax.tree.norm(metric.gradient), rtol=1e-5)
    assert metrics[0].gradient_norm > config.clip  # so that clipping was put to the test


def test_bound_by_vmap_it_is_the_same_step() -> None:
    step = functools.partial(device_step, config=CONFIG)
    bound = jax.jit(jax.vmap(jax.vmap(step, axis_name="data"), axis_name="model"), compiler_options=QUICK)
    state, metrics = bound(*jax.tree.map(lambda leaf: leaf[None, None], (initial(), TOKENS)))
    states, reference = trained()
    np.testing.assert_allclose(metrics.loss[0, 0], reference[0].loss, rtol=1e-6)
    moments = jax.tree.map(lambda leaf: leaf[0, 0], state.optimizer[0].mu)
    chex.assert_trees_all_close(moments, states[1].optimizer[0].mu, rtol=1e-4, atol=1e-7)


def test_twins_by_vmap_inside_shard_map_are_bitwise_equal() -> None:
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = jax.tree.map(lambda spec: P(None, *spec), (state_specs(CONFIG), BATCH_SPEC, metrics_specs(CONFIG)))
    step = jax.shard_map(
        jax.vmap(functools.partial(device_step, config=CONFIG), axis_name="twin"),
        mesh=mesh,
        in_specs=specs[:2],
        out_specs=(specs[0], specs[2]),
        check_vma=False,
    )
    twins = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (initial(), TOKENS))
    state, metrics = jax.jit(step, compiler_options=QUICK)(*twins)
    for leaf in jax.tree.leaves((state, metrics)):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    np.testing.assert_allclose(metrics.loss[0], trained()[1][0].loss, rtol=1e-6)


def test_bfloat16_keeps_a_float32_master_and_stays_near_float32() -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, dtype="bfloat16"))
    state, metrics = compiled(config, 2, 2)(initial(), TOKENS)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, initial())
    chex.assert_trees_all_equal_dtypes(metrics, trained()[1][0])
    reference = trained()[1][0]
    np.testing.assert_allclose(metrics.loss, reference.loss, rtol=1e-2)
    difference = jax.tree.map(lambda mine, theirs: mine - theirs, jax.device_get(metrics.gradient), reference.gradient)
    assert 0 < optax.tree.norm(difference) < 0.03 * reference.gradient_norm
    text = compiled(config, 2, 2).lower(initial(), TOKENS).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all("xbf16>" in line and "xf32>" not in line for line in products)


def test_tiny_learns_within_twenty_steps_as_its_docstring_says() -> None:
    config = tiny()
    text = np.frombuffer((b"The quick brown fox jumps over the lazy dog. " * 400)[: 2 * 4 * 129], np.uint8)
    tokens = text.astype(np.int32).reshape(2, 4, 129)
    state = jax.jit(functools.partial(init_state, config), compiler_options=QUICK)(jax.random.key(0))
    step = compiled(config, 1, 1)
    losses = []
    for _ in range(20):
        state, metrics = step(state, tokens)
        losses.append(float(metrics.loss))
    assert losses[0] == pytest.approx(np.log(320), abs=0.5)
    assert losses[-1] < 3.5
