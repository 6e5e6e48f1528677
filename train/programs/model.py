"""Llama-3-style decoder as a per-device function, and the explicit collectives that it uses.

Everything here runs per device with the axes `data` and `model` bound, by `shard_map` or by `vmap` (where both axes
have size 1). Gradients are those of `check_vma=False`: the transpose of `psum` is `psum`, and `all_gather` and
`psum_scatter` are each other's transpose. Each rank therefore differentiates its *share* of the loss (the shares of all
ranks sum to the loss), and the gradients of all ranks are summed afterwards.

The modules define parameters in their global shapes, together with the partition of each parameter over the mesh. A
module is called on one device with that device's parameters: its part of the heads, the feed-forward network and the
vocabulary, in full width. Between submodules, the residual stream is sharded over the sequence, which is gathered
before each submodule and reduce-scattered after it. The probes are at the points at which the SDC study compares values
(section 4): at a submodule's output before the reduce-scatter, and at the gradient of its input before the
reduce-scatter of the backward pass.

Letters in shapes denote sizes on one device:

    B  sequences             D  width                    F  feed-forward
    S  sequence (queries)    H  query heads              V  vocabulary
    T  sequence (keys)       K  key and value heads      L  layers
    P  part of the sequence  G  query heads of one key   C  width of one head

The model deviates from the study in one respect. The study describes its decoder as Llama-3-style, but with a layer
normalization after the residual connection (appendix B). This model applies RMSNorm before each submodule, as Llama 3
does.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sdc.program import probe

from .config import ModelConfig

DATA, MODEL = "data", "model"

Tree = Any  # a pytree of arrays; all pytrees that a function takes or returns have the same structure


def gather_sequence(x_BPD: Float[Array, "B P D"]) -> Float[Array, "B S D"]:
    """Gathers the whole sequence on every model rank. The backward pass sums the ranks' cotangents and scatters the
    parts."""
    return _all_gather(x_BPD, MODEL, 1)


def scatter_sequence(y_BSD: Float[Array, "B S D"]) -> Float[Array, "B P D"]:
    """Sums the model ranks' contributions and scatters the parts. The backward pass gathers the whole sequence on every
    rank."""
    return _reduce_scatter(y_BSD, MODEL, 1)


def lookup(table_VD: Float[Array, "V D"], tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Looks up rows of a table sharded over `model`. Rows that belong to other ranks are returned as zeros;
    `scatter_sequence` sums the results of all ranks."""
    rows = table_VD.shape[0]
    local_BS = tokens_BS - lax.axis_index(MODEL) * rows
    mine_BS = (local_BS >= 0) & (local_BS < rows)
    return jnp.where(mine_BS[..., None], table_VD[jnp.where(mine_BS, local_BS, 0)], 0)


def cross_entropy(logits_BSV: Float[Array, "B S V"], targets_BS: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """Returns the negative log-likelihood of each target in nats, from logits with the vocabulary sharded over
    `model`."""
    logits_BSV = logits_BSV.astype(jnp.float32)
    # Subtracting the largest logit prevents overflow; the loss does not depend on it.
    largest_BS = lax.pmax(lax.stop_gradient(logits_BSV).max(-1), MODEL)
    logits_BSV = logits_BSV - largest_BS[..., None]
    columns_V = jnp.arange(logits_BSV.shape[-1]) + lax.axis_index(MODEL) * logits_BSV.shape[-1]
    # Use a masked sum instead of a gather: the derivative of the sum is elementwise, whereas that of a gather is a
    # scatter.
    target_BS = jnp.where(columns_V == targets_BS[..., None], logits_BSV, 0).sum(-1)
    total_BS, target_BS = lax.psum((jnp.exp(logits_BSV).sum(-1), target_BS), MODEL)
    nll_BS: Array = jnp.log(total_BS) - target_BS
    return nll_BS


def gather_width(shards: Tree, specs: Tree, dtype: str) -> Tree:
    """Gathers the full-width compute parameters from the shards of the master parameters.

    The parameters are rounded before the transfer. For bfloat16, this halves the number of bytes and does not change
    the values.
    """
    return jax.tree.map(lambda shard, spec: _all_gather(shard.astype(dtype), DATA, spec.index(DATA)), shards, specs)


def scatter_width(gradient: Tree, specs: Tree) -> Tree:
    """Sums the ranks' gradients of full-width parameters and scatters the shards."""

    def scatter(leaf: Array, spec: P) -> Array:
        # every model rank holds the whole parameter and has the gradient of its part of the sequence
        if MODEL not in spec:
            leaf = lax.psum(leaf, MODEL)
        return _reduce_scatter(leaf, DATA, spec.index(DATA))

    return jax.tree.map(scatter, gradient, specs)


def global_norm(shards: Tree, specs: Tree, *, axes: tuple[str, ...] = (DATA,)) -> Float[Array, ""]:
    """Returns the Euclidean norm over all leaves and ranks; leaves replicated over model ranks are counted once."""
    squares = jax.tree.map(lambda leaf: jnp.sum(jnp.square(leaf)), shards)
    zero = jnp.zeros((), jnp.float32)
    sharded = jax.tree.map(lambda square, spec: square if MODEL in spec else zero, squares, specs)
    common = jax.tree.map(lambda square, spec: zero if MODEL in spec else square, squares, specs)
    square = lax.psum(sum(jax.tree.leaves(sharded)), MODEL) + sum(jax.tree.leaves(common))
    return jnp.sqrt(lax.psum(square, axes) if axes else square)


# With a single rank, both collectives are the identity, but on a CPU, XLA still copies the array, which takes 15 % of a
# step of `bench`.


def _all_gather(x: Array, axis_name: str, dimension: int) -> Array:
    whole: Array = x if lax.axis_size(axis_name) == 1 else lax.all_gather(x, axis_name, axis=dimension, tiled=True)
    return whole


def _reduce_scatter(x: Array, axis_name: str, dimension: int) -> Array:
    if lax.axis_size(axis_name) == 1:
        return x
    return lax.psum_scatter(x, axis_name, scatter_dimension=dimension, tiled=True)


Params: TypeAlias = dict[str, Any]
Rotation: TypeAlias = tuple[Float[Array, "S C/2"], Float[Array, "S C/2"]]


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], spec: P, *, inputs: int, outputs: int) -> nnx.Param[Array]:
    """Initializes a matrix from the Xavier uniform distribution over [-b, b] with b = sqrt(6 / (inputs + outputs)), as
    in the study's appendix B.2."""
    bound = math.sqrt(6 / (inputs + outputs))
    return nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound), spec=spec)


class RMSNorm(nnx.Module):
    """Division by the root mean square over the width, in float32."""

    def __init__(self, config: ModelConfig) -> None:
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.width, jnp.float32), spec=P(DATA))

    def __call__(self, x_BPD: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        x32_BPD = x_BPD.astype(jnp.float32)
        mean_square_BP1 = jnp.mean(jnp.square(x32_BPD), axis=-1, keepdims=True)
        return (x32_BPD * jax.lax.rsqrt(mean_square_BP1 + self.epsilon)).astype(x_BPD.dtype) * self.scale[...]


class Attention(nnx.Module):
    """Causal self-attention with grouped queries (GQA) and rotary positions; the softmax is computed in float32."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, dim = config.width, config.head_dim
        queries, keys = config.heads * dim, config.kv_heads * dim
        heads = P(DATA, MODEL, None)
        self.query = matrix(rngs, (width, config.heads, dim), heads, inputs=width, outputs=queries)
        self.key = matrix(rngs, (width, config.kv_heads, dim), heads, inputs=width, outputs=keys)
        self.value = matrix(rngs, (width, config.kv_heads, dim), heads, inputs=width, outputs=keys)
        self.out = matrix(rngs, (config.heads, dim, width), P(MODEL, None, DATA), inputs=queries, outputs=width)

    def __call__(self, x_BSD: Float[Array, "B S D"], rotation: Rotation) -> Float[Array, "B S D"]:
        q_BSHC = rotate(jnp.einsum("bsd,dhc->bshc", x_BSD, self.query[...]), rotation)
        k_BTKC = rotate(jnp.einsum("btd,dkc->btkc", x_BSD, self.key[...]), rotation)
        v_BTKC = jnp.einsum("btd,dkc->btkc", x_BSD, self.value[...])
        batch, length, kv_heads, dim = k_BTKC.shape

        q_BSKGC = q_BSHC.reshape(batch, length, kv_heads, -1, dim)
        with jax.named_scope("mix"):
            scores_BKGST = jnp.einsum("bskgc,btkc->bkgst", q_BSKGC, k_BTKC).astype(jnp.float32) * dim**-0.5
            position_S = jnp.arange(length)
            causal_ST = position_S[:, None] >= position_S[None, :]
            weights_BKGST = jax.nn.softmax(jnp.where(causal_ST, scores_BKGST, -jnp.inf), axis=-1).astype(x_BSD.dtype)
            mixed_BSKGC = jnp.einsum("bkgst,btkc->bskgc", weights_BKGST, v_BTKC)
        return jnp.einsum("bshc,hcd->bsd", mixed_BSKGC.reshape(q_BSHC.shape), self.out[...])


class FeedForward(nnx.Module):
    """SwiGLU: the product of a gate with SiLU activation and a linear map, projected back to the width."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, inner = config.width, config.ffn_width
        self.gate = matrix(rngs, (width, inner), P(DATA, MODEL), inputs=width, outputs=inner)
        self.up = matrix(rngs, (width, inner), P(DATA, MODEL), inputs=width, outputs=inner)
        self.down = matrix(rngs, (inner, width), P(MODEL, DATA), inputs=inner, outputs=width)

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        return (jax.nn.silu(x_BSD @ self.gate[...]) * (x_BSD @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
    """One decoder layer on the residual stream, which is sharded over the sequence."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attn_norm = RMSNorm(config)
        self.attn = Attention(config, rngs)
        self.ffn_norm = RMSNorm(config)
        self.ffn = FeedForward(config, rngs)
        self.remat = config.remat

    def run_ffn(self, h_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        return recomputed(self.ffn)(h_BSD) if self.remat == "ffn" else self.ffn(h_BSD)

    def __call__(self, x_BPD: Float[Array, "B P D"], rotation: Rotation) -> Float[Array, "B P D"]:
        with jax.named_scope("attn"):
            h_BSD = probe(gather_sequence(self.attn_norm(x_BPD)), "attn", directions=["bwd"])
            y_BSD = probe(self.attn(h_BSD, rotation), "attn", directions=["fwd"])
            x_BPD = x_BPD + scatter_sequence(y_BSD)
        with jax.named_scope("ffn"):
            h_BSD = probe(gather_sequence(self.ffn_norm(x_BPD)), "ffn", directions=["bwd"])
            y_BSD = probe(self.run_ffn(h_BSD), "ffn", directions=["fwd"])
            return x_BPD + scatter_sequence(y_BSD)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and output head. Parameters of the layers are stacked: their first axis is L."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        rows, width = config.vocab_size, config.width
        self.config = config
        self.embedding = matrix(rngs, (rows, width), P(MODEL, DATA), inputs=rows, outputs=width)
        self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(jax.random.split(rngs.params(), config.layers))
        self.norm = RMSNorm(config)
        if not config.tied:
            self.head = matrix(rngs, (width, rows), P(DATA, MODEL), inputs=width, outputs=rows)

    def __call__(self, tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        with jax.named_scope("embed"):
            x_BPD = scatter_sequence(lookup(self.embedding[...], tokens_BS))
        rotation = rotations(tokens_BS.shape[1], self.config.head_dim, self.config.rope_theta)
        definition, layers = nnx.split(self.blocks)

        def layer(x_BPD: Float[Array, "B P D"], params: nnx.State[Any, Any]) -> tuple[Float[Array, "B P D"], None]:
            return nnx.merge(definition, params)(x_BPD, rotation), None

        layer = recomputed(layer) if self.config.remat == "layer" else layer
        x_BPD, _ = jax.lax.scan(layer, x_BPD, layers)
        with jax.named_scope("head"):
            h_BSD = gather_sequence(self.norm(x_BPD))
            if self.config.tied:
                return jnp.einsum("bsd,vd->bsv", h_BSD, self.embedding[...])
            return h_BSD @ self.head[...]


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the backward pass compute a function again; the scan over layers prevents XLA from merging the two."""
    remat: Callable[..., Any] = jax.checkpoint(function, prevent_cse=False)
    return remat


def rotations(length: int, dim: int, theta: float) -> Rotation:
    """Returns the cosines and sines of the rotary embedding's angles (position times theta^(-2i/C) for the pair i) in
    float32."""
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BSHC: Float[Array, "B S H C"], rotation: Rotation) -> Float[Array, "B S H C"]:
    """Rotates each pair of elements (i, i + C/2) of every head by the angle for its position and i, in float32."""
    cos, sin = (table[:, None, :] for table in rotation)
    first, second = jnp.split(x_BSHC.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BSHC.dtype)


def init_params(config: ModelConfig, key: Array) -> Params:
    """Returns initial master parameters in float32, with global shapes; the values do not depend on the sharding."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(key))))


def param_specs(config: ModelConfig) -> Params:
    """Returns the partition of every parameter: width over `data`; heads, feed-forward or vocabulary over `model`."""
    _, state = _definition(config)
    specs = nnx.to_pure_dict(state, lambda param: param.get_metadata("spec"))
    specs["blocks"] = jax.tree.map(lambda spec: P(None, *spec), specs["blocks"])
    return specs


def logits(config: ModelConfig, params: Params, tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S V"]:
    """Returns the logits of the next token at every position."""
    definition, _ = _definition(config)
    decoder: Decoder = nnx.merge(definition, nnx.State(params))
    return decoder(tokens_BS)


@functools.cache
def _definition(config: ModelConfig) -> tuple[nnx.GraphDef[Decoder], nnx.State[Any, Any]]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
