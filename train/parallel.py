"""Collectives of the training step: sequence and vocabulary parallelism, and ZeRO-1.

Everything here runs per device with the axes `data` and `model` bound, by `shard_map` or by `vmap` (where they have
size 1). Gradients are those of `check_vma=False`: the transpose of `psum` is `psum`, and `all_gather` and
`psum_scatter` are each other's transpose. A rank therefore differentiates its *share* of the loss, such that the shares
of all ranks add up to the loss, and collects what the other ranks found afterwards.

Shapes: B sequences on this data rank, S sequence, P part of the sequence on this model rank, D width, V part of the
vocabulary on this model rank.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

DATA, MODEL = "data", "model"

Tree = Any
"""A pytree of arrays; the pytrees of one function have one structure."""


def gather_sequence(x_BPD: Float[Array, "B P D"]) -> Float[Array, "B S D"]:
    """Gives every model rank the whole sequence. Backward: adds up the ranks' cotangents and leaves each its part."""
    return _all_gather(x_BPD, MODEL, 1)


def scatter_sequence(y_BSD: Float[Array, "B S D"]) -> Float[Array, "B P D"]:
    """Adds up the model ranks' contributions and leaves each its part. Backward: gives every rank the whole."""
    return _reduce_scatter(y_BSD, MODEL, 1)


def lookup(table_VD: Float[Array, "V D"], tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Rows of a table whose rows are sharded over `model`.

    Returns:
        The rows that this rank holds and zeros elsewhere: `scatter_sequence` of it is the embedding, exactly.
    """
    rows = table_VD.shape[0]
    local_BS = tokens_BS - lax.axis_index(MODEL) * rows
    mine_BS = (local_BS >= 0) & (local_BS < rows)
    return jnp.where(mine_BS[..., None], table_VD[jnp.where(mine_BS, local_BS, 0)], 0)


def cross_entropy(logits_BSV: Float[Array, "B S V"], targets_BS: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """Negative log-likelihood of each target in nats, from logits whose vocabulary is sharded over `model`.

    Args:
        logits_BSV: this rank's part of the logits, any floating dtype; arithmetic is float32.
        targets_BS: token numbers in the whole vocabulary.

    Returns:
        float32, the same on every model rank.
    """
    logits_BSV = logits_BSV.astype(jnp.float32)
    # The largest logit is subtracted so that nothing overflows; the loss does not depend on it.
    largest_BS = lax.pmax(lax.stop_gradient(logits_BSV).max(-1), MODEL)
    logits_BSV = logits_BSV - largest_BS[..., None]
    columns_V = jnp.arange(logits_BSV.shape[-1]) + lax.axis_index(MODEL) * logits_BSV.shape[-1]
    # A masked sum, not a gather: its derivative is elementwise, where that of a gather is a scatter.
    target_BS = jnp.where(columns_V == targets_BS[..., None], logits_BSV, 0).sum(-1)
    total_BS, target_BS = lax.psum((jnp.exp(logits_BSV).sum(-1), target_BS), MODEL)
    nll_BS: Array = jnp.log(total_BS) - target_BS
    return nll_BS


def gather_width(shards: Tree, specs: Tree, dtype: str) -> Tree:
    """Parameters in full width, as the model computes with them, from the shards of the master parameters.

    They are rounded before they travel: half the bytes for bfloat16, and the same values.
    """
    return jax.tree.map(lambda shard, spec: _all_gather(shard.astype(dtype), DATA, spec.index(DATA)), shards, specs)


def scatter_width(gradient: Tree, specs: Tree) -> Tree:
    """Adds up the ranks' gradients of full-width parameters and leaves each rank its shard."""

    def scatter(leaf: Array, spec: P) -> Array:
        if MODEL not in spec:  # every model rank holds the whole and found the gradient of its part of the sequence
            leaf = lax.psum(leaf, MODEL)
        return _reduce_scatter(leaf, DATA, spec.index(DATA))

    return jax.tree.map(scatter, gradient, specs)


def global_norm(shards: Tree, specs: Tree, *, axes: tuple[str, ...] = (DATA,)) -> Float[Array, ""]:
    """Euclidean norm over all leaves and ranks; what the model ranks hold in common counts once.

    Args:
        shards: this rank's.
        specs: partition of each leaf, which says whether it is sharded over `model`.
        axes: the other axes over which all leaves are sharded.
    """
    squares = jax.tree.map(lambda leaf: jnp.sum(jnp.square(leaf)), shards)
    zero = jnp.zeros((), jnp.float32)
    sharded = jax.tree.map(lambda square, spec: square if MODEL in spec else zero, squares, specs)
    common = jax.tree.map(lambda square, spec: zero if MODEL in spec else square, squares, specs)
    square = lax.psum(sum(jax.tree.leaves(sharded)), MODEL) + sum(jax.tree.leaves(common))
    return jnp.sqrt(lax.psum(square, axes) if axes else square)


# Over one rank both are the identity. XLA copies all the same on a CPU: 15 % of a step of `bench`.


def _all_gather(x: Array, axis_name: str, dimension: int) -> Array:
    whole: Array = x if lax.axis_size(axis_name) == 1 else lax.all_gather(x, axis_name, axis=dimension, tiled=True)
    return whole


def _reduce_scatter(x: Array, axis_name: str, dimension: int) -> Array:
    if lax.axis_size(axis_name) == 1:
        return x
    return lax.psum_scatter(x, axis_name, scatter_dimension=dimension, tiled=True)
