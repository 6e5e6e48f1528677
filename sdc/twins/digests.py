"""Fingerprints: 64-bit digests of tensors and of every selected value of a step.

The digest of a tensor works on its 32-bit words w_i (see `bits.to_words`), i being the index in the whole tensor:

    h_i = fmix32(w_i + i * 0x9E3779B1);   g_i = h_i * 0xC2B2AE3D;   g_i ^= g_i >> 15
    digest = (sum_i h_i, sum_i g_i)  mod 2**32

fmix32 is the finalizer of MurmurHash3 (Appleby, 2008). Integer sums wrap and are associative, so the digest does not
depend on sharding or on the order of the reduction, and the digests of shards add up to that of the whole. Every step
up to h_i is a bijection of the word: a change inside one word is never missed, any other with probability of about
2**-64. Sums, index-weighted sums and XOR, which are cheaper, each miss whole classes of changes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped, UInt32

from sdc.bits import as_bits, packs, to_words

GOLDEN, MIX = 0x9E3779B1, 0xC2B2AE3D
ROW = 256
"""Words that are summed at a time."""


def fmix32(h: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The finalizer of MurmurHash3: a bijection of 32-bit words in which every input bit reaches every output bit."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def digest(
    x: Shaped[Array, "*shard"],
    *,
    shape: Sequence[int] | None = None,
    offset: Sequence[int | Int[Array, ""]] | None = None,
) -> UInt32[Array, "2"]:
    """The 64-bit digest of a tensor; see the module.

    Args:
        x: a tensor of any type that `bits.to_words` takes, or a shard of one.
        shape: shape of the whole tensor, where `x` is a shard.
        offset: index of the shard's first element in the whole, one number per dimension.

    Returns:
        Two words. Those of all shards of a tensor, added with wrap-around, are those of the whole.

    Raises:
        ValueError: 16-bit elements are packed in pairs, and the shard's last axis is odd while the whole's is even.
    """
    bits = jax.eval_shape(as_bits, x)
    trailing = bits.shape[x.ndim :]  # key data and parts of complex numbers
    whole = jax.ShapeDtypeStruct((*(x.shape if shape is None else shape), *trailing), bits.dtype)
    start = [*(offset or [0] * x.ndim), *[0] * len(trailing)]
    if packs(whole) and not packs(bits) and math.prod(bits.shape):
        raise ValueError(
            f"a shard of shape {x.shape} cuts pairs of 16-bit elements of the whole {tuple(shape or ())}; "
            "shard the last axis into even parts"
        )
    words = to_words(x, pack=packs(whole))
    if words.size == 0:
        return jnp.zeros(2, jnp.uint32)
    extent = list(whole.shape)
    if packs(whole):
        extent[-1] //= 2
        start[-1] = jnp.asarray(start[-1], jnp.uint32) // 2
    if words.ndim > len(extent):  # two words for an element of 64 bits
        extent, start = [*extent, 2], [*start, 0]

    # i * GOLDEN, summed over the axes: one multiplication by a constant for each, and none on top.
    spread = jnp.zeros(words.shape, jnp.uint32)
    stride = GOLDEN
    for axis in reversed(range(words.ndim)):
        position = lax.broadcasted_iota(jnp.uint32, words.shape, axis) + jnp.asarray(start[axis], jnp.uint32)
        spread += position * jnp.uint32(stride % 2**32)
        stride *= extent[axis]
    h = fmix32(words + spread)
    g = h * jnp.uint32(MIX)
    g = g ^ (g >> 15)
    # Variadic reductions fuse with the hash; two sums would write the hash to memory. Rows first: their loop is short
    # and straight, so that a CPU computes several words at once.
    rows = words.ndim - 1
    while rows > 1 and math.prod(words.shape[rows:]) < ROW:
        rows -= 1
    return jnp.stack(_sums(_sums((h, g), range(max(rows, 0), words.ndim)), range(max(rows, 0))))


def _sums(
    parts: tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]], axes: Sequence[int]
) -> tuple[UInt32[Array, "*rest"], UInt32[Array, "*rest"]]:
    if not len(axes):
        return parts
    zero = jnp.uint32(0)
    h, g = lax.reduce(parts, (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(axes))
    return h, g


def tree_digest(tree: Any) -> UInt32[Array, "2"]:
    """The digest of a pytree: those of its leaves, each mixed with its position, added up."""
    total = jnp.zeros(2, jnp.uint32)
    for position, leaf in enumerate(jax.tree.leaves(tree)):
        total += fmix32(digest(leaf) + jnp.uint32((position * GOLDEN) % 2**32))
    return total
