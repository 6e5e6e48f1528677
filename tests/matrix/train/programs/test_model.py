"""The decoder against a plain one: no modules, no scan, no collectives, one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.train.programs.config import ModelConfig, TrainConfig
from sdc.train.programs.step import (
    Metrics,
    TrainState,
    abstract_state,
)
from tests.train.programs.test_model import CONFIG, QUICK, TOKENS, sharded_step

TIED = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, tied=True))


def plain_loss(params: Any, tokens: Any, config: ModelConfig) -> Any:
    """Mean cross entropy, layer by layer and head by head; rotary embedding by complex numbers."""

    def norm(x: Any, scale: Any) -> Any:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def turn(x: Any) -> Any:  # x: batch, sequence, head_dim
        half = config.head_dim // 2
        angle = np.outer(np.arange(x.shape[1]), config.rope_theta ** (-np.arange(half) / half)).astype(np.float32)
        z = jax.lax.complex(x[..., :half], x[..., half:]) * jax.lax.complex(np.cos(angle), np.sin(angle))
        return jnp.concatenate([z.real, z.imag], -1)

    x = params["embedding"][tokens[:, :-1]]
    length = x.shape[1]
    future = np.triu(np.ones((length, length), bool), 1)
    for index in range(config.layers):
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], params["blocks"])
        attn, ffn = layer["attn"], layer["ffn"]
        h = norm(x, layer["attn_norm"]["scale"])
        for head in range(config.heads):
            kv_head = head // (config.heads // config.kv_heads)
            q, k = turn(h @ attn["query"][:, head]), turn(h @ attn["key"][:, kv_head])
            scores = jnp.where(future, -1e30, q @ k.mT / np.float32(np.sqrt(config.head_dim)))
            x = x + jax.nn.softmax(scores) @ (h @ attn["value"][:, kv_head]) @ attn["out"][head]
        h = norm(x, layer["ffn_norm"]["scale"])
        gate = h @ ffn["gate"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ ffn["up"])) @ ffn["down"]
    head = params["embedding"].T if config.tied else params["head"]
    probabilities = jax.nn.softmax(norm(x, params["norm"]["scale"]) @ head)
    return -jnp.log(jnp.take_along_axis(probabilities, tokens[:, 1:, None], -1)).mean()


@functools.cache
def plain(config: TrainConfig) -> tuple[TrainState, Any, Any]:
    """A state with arbitrary parameters, and the plain decoder's loss and gradient there."""
    rng = np.random.default_rng(1)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_state(config))
    params = jax.tree.map(lambda leaf: rng.normal(0.1, 0.3, leaf.shape).astype(np.float32), state.params)
    loss = functools.partial(plain_loss, tokens=TOKENS.reshape(-1, 17), config=config.model)
    return state._replace(params=params), *jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params)


@pytest.mark.parametrize(
    ("config", "data", "model"),
    [(CONFIG, 1, 1), (CONFIG, 2, 1), (CONFIG, 1, 2), (CONFIG, 2, 2), (TIED, 1, 2)],
    ids=["1x1", "2x1", "1x2", "2x2", "1x2-tied"],
)
def test_loss_and_gradient_are_those_of_the_plain_decoder(config: TrainConfig, data: int, model: int) -> None:
    state, loss, gradient = plain(config)
    metrics: Metrics = jax.jit(sharded_step(config, data, model), compiler_options=QUICK)(state, TOKENS)[1]
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
    for path, expected in jax.tree_util.tree_leaves_with_path(gradient):
        actual = functools.reduce(lambda tree, key: tree[key.key], path, metrics.gradient)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=3e-7, err_msg=jax.tree_util.keystr(path))
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics.gradient_norm, norm, rtol=1e-5)
