"""Tensors as bits: the views on which digests, comparisons, faults and exact broadcasts work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sdc._lazy import jax, jnp, lax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Shaped, UInt, UInt32


def as_bits(x: Shaped[Array, "*shape"]) -> UInt[Array, "*bits"]:
    """The bits of an array as unsigned integers of the width of its elements.

    Args:
        x: numbers of 8 bits or more, booleans (as 8-bit integers), complex numbers (real and imaginary part on a new
            last axis), or PRNG keys (their key data).

    Raises:
        ValueError: the elements are narrower than 8 bits.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
    width = jax.dtypes.itemsize_bits(x.dtype)
    if width < 8:
        raise ValueError(
            f"dtype {x.dtype} is narrower than 8 bits and has no bit view; cast it to int8, or do not select it"
        )
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))


def from_bits(bits: UInt[Array, "*bits"], like: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """The inverse of `as_bits` for an array of the type of `like`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
    if like.dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = lax.bitcast_convert_type(bits, jnp.finfo(like.dtype).dtype)
        return lax.complex(parts[..., 0], parts[..., 1])
    return lax.bitcast_convert_type(bits, like.dtype)


def select(
    mask: Bool[Array, "*shape"], a: Shaped[Array, "*shape"], b: Shaped[Array, "*shape"]
) -> Shaped[Array, "*shape"]:
    """`a` where the mask is true, else `b`, bit for bit.

    XLA computes with 8-bit floats by way of wider ones, even to choose between them, and the payloads of NaNs get lost.
    """
    return from_bits(jnp.where(mask, as_bits(a), as_bits(b)), b)


def packs(bits: jax.ShapeDtypeStruct | UInt[Array, "*bits"]) -> bool:
    """Whether `to_words` packs these bits: 16-bit elements along an even last axis, two to a word."""
    return bits.dtype.itemsize == 2 and bool(bits.shape) and bits.shape[-1] % 2 == 0 and math.prod(bits.shape) > 0


def to_words(x: Shaped[Array, "*shape"], *, pack: bool = True) -> UInt32[Array, "*words"]:
    """The bits of an array as 32-bit words.

    Elements of 32 bits give one word and of 64 bits two, on a new last axis. Pairs of 16-bit elements along an even
    last axis are packed into one word unless `pack` is false; other narrow elements are widened to one word each.
    """
    bits = as_bits(x)
    if pack and packs(bits):
        bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 2, 2)
    elif bits.dtype.itemsize < 4:
        return bits.astype(jnp.uint32)
    return lax.bitcast_convert_type(bits, jnp.uint32)


def from_words(words: UInt32[Array, "*words"], like: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """The inverse of `to_words` for an array of the shape and type of `like`."""
    bits = jax.eval_shape(as_bits, like)
    if packs(bits):
        return from_bits(lax.bitcast_convert_type(words, bits.dtype).reshape(bits.shape), like)
    if bits.dtype.itemsize < 4:
        return from_bits(words.astype(bits.dtype), like)
    return from_bits(lax.bitcast_convert_type(words, bits.dtype), like)
