"""The decoder against a plain one: no modules, no scan, no collectives, one device."""

import functools
from typing import Any

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import sdc
from sdc.program.selectors import primitive, probes
from sdc.train.programs import model as model_module
from sdc.train.programs.config import ModelConfig, OptimizerConfig, TrainConfig, get_config
from sdc.train.programs.model import cross_entropy, logits, lookup, param_specs, rotate, rotations
from sdc.train.programs.step import (
    BATCH_SPEC,
    TrainState,
    abstract_state,
    device_step,
    init_state,
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
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 4, 17), dtype=np.int32)


def make_mesh(data: int, model: int) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def sharded_step(config: TrainConfig, data: int, model: int) -> Any:
    specs = state_specs(config)
    return jax.shard_map(
        functools.partial(device_step, config=config),
        mesh=make_mesh(data, model),
        in_specs=(specs, BATCH_SPEC),
        out_specs=(specs, metrics_specs(config)),
        check_vma=False,
    )


@functools.cache
def initial() -> TrainState:
    return jax.jit(functools.partial(init_state, CONFIG), compiler_options=QUICK)(jax.random.key(0))


def test_initial_state_is_bitwise_the_same_on_every_mesh_and_sharded_as_stated() -> None:
    specs = state_specs(CONFIG)
    shardings = jax.tree.map(functools.partial(NamedSharding, make_mesh(2, 2)), specs)
    state = jax.jit(functools.partial(init_state, CONFIG), out_shardings=shardings, compiler_options=QUICK)(
        jax.random.key(0)
    )
    jax.tree.map(np.testing.assert_array_equal, initial(), state)
    # ZeRO-1: each of the four devices of the 2x2 mesh holds a quarter of every matrix, and of its moments.
    adam = state.optimizer[0]
    for leaf in jax.tree.leaves((state.params["blocks"]["attn"], adam.mu["embedding"], adam.nu["head"])):
        assert {shard.data.size * 4 for shard in leaf.addressable_shards} == {leaf.size}
    assert state.params["norm"]["scale"].addressable_shards[0].data.shape == (16,)


def test_xavier_uniform() -> None:
    params = initial().params
    for leaf, inputs, outputs in [
        (params["embedding"], 64, 32),
        (params["blocks"]["attn"]["key"], 32, 16),
        (params["blocks"]["ffn"]["down"], 48, 32),
    ]:
        bound = np.sqrt(6 / (inputs + outputs))
        assert np.abs(leaf).max() <= bound
        assert np.std(leaf) == pytest.approx(bound / np.sqrt(3), rel=0.05)
    np.testing.assert_array_equal(params["blocks"]["ffn_norm"]["scale"], np.ones((2, 32)))


@pytest.mark.parametrize(
    ("name", "count"),
    [("smollm2_135m", 134_515_008), ("llama3_8b_16l", 4_943_122_432), ("llama3_8b", 8_835_567_616)],
)
def test_parameter_counts(name: str, count: int) -> None:
    config = get_config(name)
    sizes = config.model
    attention = 2 * sizes.width * sizes.head_dim * (sizes.heads + sizes.kv_heads)
    layer = attention + 3 * sizes.width * sizes.ffn_width + 2 * sizes.width
    embeddings = sizes.vocab_size * sizes.width * (1 if sizes.tied else 2)
    assert sizes.layers * layer + embeddings + sizes.width == count
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_state(config).params)) == count


def test_every_parameter_is_sharded_over_its_width_and_every_matrix_over_model() -> None:
    shapes, specs = abstract_state(CONFIG).params, param_specs(CONFIG.model)
    for shape, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True):
        assert len(spec) == shape.ndim
        assert shape.shape[spec.index("data")] == 32
        assert ("model" in spec) == (spec not in (P("data"), P(None, "data")))


def test_the_four_submodules_of_the_study_are_the_probes() -> None:
    step = sharded_step(CONFIG, 1, 2)
    sites = sdc.sites(step, abstract_state(CONFIG), jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32), where=probes)
    assert sorted(site.name for site in sites) == ["bwd/attn", "bwd/ffn", "fwd/attn", "fwd/ffn"]
    for site in sites:
        assert site.probe in site.scope


def test_the_ffn_is_recomputed_and_attention_is_not() -> None:
    step = sharded_step(CONFIG, 1, 2)
    arguments = abstract_state(CONFIG), jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)
    products = sdc.sites(step, *arguments, where=primitive("dot_general"))
    remat = [site for site in products if site.direction == "remat"]
    assert len(remat) >= 2  # gate and up; the output itself need not be recomputed
    assert all("ffn" in site.scope for site in remat)


def test_probes_lower_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = abstract_state(CONFIG), jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)
    probed = jax.jit(sharded_step(CONFIG, 1, 2)).lower(*arguments).as_text()
    monkeypatch.setattr(model_module, "probe", lambda x, name, directions: x)
    assert jax.jit(sharded_step(CONFIG, 1, 2)).lower(*arguments).as_text() == probed


def test_a_prediction_does_not_see_the_future() -> None:
    config, params = CONFIG.model, initial().params

    def predict(tokens: Any) -> Any:
        bound = jax.vmap(functools.partial(logits, config, params), axis_name="data", axis_size=1)
        return jax.vmap(bound, axis_name="model")(tokens[None, None])[0, 0]

    changed = TOKENS[0, :, :-1].copy()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = predict(TOKENS[0, :, :-1]), predict(changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.all(np.any(before[:, 9:] != after[:, 9:], axis=-1))


@given(hnp.arrays(np.float32, (2, 8), elements=st.floats(-4, 4, width=32)), st.integers(0, 8), st.integers(0, 7))
@settings(deadline=None, max_examples=30)
def test_rotary_scores_depend_on_the_distance_alone(pair: np.ndarray, distance: int, shift: int) -> None:
    cos, sin = rotations(16, 8, 500.0)

    def at(vector: Any, position: int) -> Any:
        rotation = cos[position : position + 1], sin[position : position + 1]
        return np.asarray(rotate(jnp.asarray(vector)[None, None, None], rotation))[0, 0, 0]

    query, key = pair
    np.testing.assert_allclose(
        at(query, distance) @ at(key, 0), at(query, distance + shift) @ at(key, shift), atol=1e-4
    )
    np.testing.assert_allclose(np.linalg.norm(at(query, shift)), np.linalg.norm(query), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cross_entropy_over_a_sharded_vocabulary_is_safe_with_large_logits(ranks: int) -> None:
    table = np.array([[[1e4, -1e4, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-1e4, -1e4, -1e4, -1e4 - 1]]], np.float32)
    targets = np.array([[1, 3, 0]], np.int32)
    mesh = make_mesh(1, ranks)
    loss = jax.shard_map(
        cross_entropy, mesh=mesh, in_specs=(P(None, None, "model"), P()), out_specs=P(), check_vma=False
    )
    expected = [[2e4, np.log(4), np.log(3 + np.exp(-1))]]
    np.testing.assert_allclose(loss(table, targets), expected, rtol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_lookup_in_a_sharded_table_finds_each_row_on_one_rank(ranks: int) -> None:
    table = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    tokens = np.array([[0, 7, 3, 4, 4]], np.int32)
    found = jax.shard_map(
        lambda table, tokens: lookup(table, tokens)[None],
        mesh=make_mesh(1, ranks),
        in_specs=(P("model"), P()),
        out_specs=P("model"),
        check_vma=False,
    )(table, tokens)
    np.testing.assert_array_equal(found.sum(0), table[tokens])
    np.testing.assert_array_equal((found != 0).any(-1).sum(0), np.ones_like(tokens))
