"""Bit views of tensors, used by digests, comparisons, faults and exact broadcasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdc._lazy import jax, jnp, lax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Shaped, UInt, UInt32


def has_bits(dtype: Any) -> bool:
    """Returns whether `as_bits` accepts arrays of a dtype."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key)) or jax.dtypes.itemsize_bits(dtype) >= 8


def as_bits(x: Shaped[Array, "*shape"]) -> UInt[Array, "*bits"]:
    """Returns the bits of an array as unsigned integers of the same width; elements must have at least 8 bits.

    Booleans become 8-bit integers, complex arrays gain a last axis of size two, and PRNG keys become their key data.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
    width = jax.dtypes.itemsize_bits(x.dtype)
    if width < 8:
        raise ValueError(f"dtype {x.dtype} is narrower than 8 bits and has no bit view; cast the array, or exclude it")
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))


def from_bits(bits: UInt[Array, "*bits"], like: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Inverts `as_bits` for an array with the dtype of `like`."""
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
    """Returns, bit for bit, `a` where the mask is true and `b` elsewhere.

    The selection is made on bits, because XLA widens 8-bit floats even for a selection, and the conversion loses the
    payloads of NaNs.
    """
    return from_bits(jnp.where(mask, as_bits(a), as_bits(b)), b)


def element_words(x: Shaped[Array, "*shape"]) -> tuple[UInt32[Array, "*words"], ...]:
    """Returns the 32-bit words of each element, in arrays shaped as `x`, or as its key data if `x` holds PRNG keys.

    An element of up to 32 bits becomes one zero-extended word. An element of 64 bits becomes two words, of which the
    lower one comes first. For a complex number, the words of the real part precede those of the imaginary part. The
    function neither moves elements nor adds an axis of size two: either operation would copy the tensor on a TPU, which
    stores the last two axes of an array in tiles of 8 by 128.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return (*element_words(jnp.real(x)), *element_words(jnp.imag(x)))
    bits = as_bits(x)
    low = bits.astype(jnp.uint32)
    return (low, (bits >> 32).astype(jnp.uint32)) if bits.dtype.itemsize == 8 else (low,)


def same_bits(a: Shaped[Array, "*shape"], b: Shaped[Array, "*shape"]) -> Bool[Array, ""]:
    """Returns whether two arrays of one type are equal, bit by bit, or by value if the type is narrower than 8 bits."""
    if has_bits(a.dtype):
        return jnp.array_equal(as_bits(a), as_bits(b))
    wide = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
    return jnp.array_equal(a.astype(wide), b.astype(wide))
