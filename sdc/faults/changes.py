"""Changes: what a fault does to elements, as data, and the arithmetic that carries it out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from sdc._lazy import jax, jnp
from sdc.bits import as_bits, from_bits, select

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Array, Float32, Int, Int32, Shaped, UInt32

Field: TypeAlias = Literal["sign", "exponent", "mantissa"]


FIELDS: tuple[Field, ...] = ("sign", "exponent", "mantissa")


class Change(NamedTuple):
    """What becomes of elements; the fields broadcast against them.

    Elements first take each other's places: of a group of n elements hit together, element k takes the value of element
    (k + turn) mod n. Then y = x * factor + addend in float32, rounded to the type of x. Then the bits of y become
    ((bits & keep) | set) ^ flip. Bits are given as two 32-bit words, the lower one first.
    """

    factor: Float32[ArrayLike, "*n"]
    addend: Float32[ArrayLike, "*n"]
    keep: UInt32[ArrayLike, "*n 2"]
    set: UInt32[ArrayLike, "*n 2"]
    flip: UInt32[ArrayLike, "*n 2"]
    turn: Int32[ArrayLike, ""]


def neutral() -> Change:
    """The change that leaves every bit as it is."""
    none, full = np.zeros(2, np.uint32), np.full(2, 2**32 - 1, np.uint32)
    return Change(np.float32(1), np.float32(0), full, none, none, np.int32(0))


def apply(
    x: Shaped[Array, "*groups n"], change: Change, *, count: Int[Array, "*#groups"] | int | None = None
) -> Shaped[Array, "*groups n"]:
    """Carries a change out on groups of elements.

    Args:
        x: real numbers; the last axis runs over the elements that are hit together.
        change: see `Change`.
        count: how many of them there are, in each group, where the rest of the last axis is room to spare.

    Returns:
        The changed elements; where the change is neutral, their very bits.
    """
    room = x.shape[-1]
    if room > 1:
        count = jnp.maximum(jnp.asarray(room if count is None else count, jnp.int32), 1)
        order = (jnp.arange(room, dtype=jnp.int32) + jnp.asarray(change.turn)) % count[..., None]
        x = from_bits(jnp.take_along_axis(as_bits(x), jnp.broadcast_to(order, x.shape), axis=-1), x)
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    factor, addend = (jnp.asarray(part, wide.dtype) for part in (change.factor, change.addend))
    computed = rounded(wide * factor + addend, x)
    bits = as_bits(select((factor != 1) | (addend != 0), computed, x))
    keep, fixed, flip = (_mask(words, bits.dtype) for words in (change.keep, change.set, change.flip))
    return from_bits(((bits & keep) | fixed) ^ flip, x)


def rounded(wide: Shaped[Array, "*n"], like: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
    """Numbers in the type of others; integers are rounded to the nearest."""
    return (jnp.round(wide) if jnp.issubdtype(like.dtype, jnp.integer) else wide).astype(like.dtype)


def _mask(given: UInt32[ArrayLike, "*n 2"], dtype: Any) -> Shaped[Array, "*n"]:
    words = jnp.asarray(given)
    low = words[..., 0].astype(dtype)
    if np.dtype(dtype).itemsize <= 4:
        return low
    return low | (words[..., 1].astype(dtype) << np.dtype(dtype).type(32))


def field_bits(dtype: Any, field: Field | None = None) -> tuple[int, ...]:
    """Bit positions of a field of a number, 0 being the least significant; all bits where no field is named.

    Raises:
        ValueError: numbers of this type have no such field.

    Example:
        >>> from sdc.faults.changes import field_bits
        >>> field_bits("bfloat16", "exponent")
        (7, 8, 9, 10, 11, 12, 13, 14)
    """
    width = jax.dtypes.itemsize_bits(jnp.dtype(dtype))
    if field is None:
        return tuple(range(width))
    if jnp.issubdtype(dtype, jnp.floating):
        mantissa = jnp.finfo(dtype).nmant
        exponent = jnp.finfo(dtype).nexp
        sign = (mantissa + exponent,) if mantissa + exponent < width else ()
        fields = {"sign": sign, "exponent": range(mantissa, mantissa + exponent), "mantissa": range(mantissa)}
    elif jnp.issubdtype(dtype, jnp.signedinteger):
        fields = {"sign": (width - 1,), "mantissa": range(width - 1)}
    else:
        fields = {"mantissa": range(width)}
    if not fields.get(field):
        others = " or ".join(name for name, positions in fields.items() if positions)
        raise ValueError(f"{jnp.dtype(dtype).name} has no {field}; choose {others}, or name bits")
    return tuple(fields[field])


def two_words(bits: int) -> tuple[int, int]:
    """Bits as two 32-bit words, the lower one first."""
    return bits & 0xFFFFFFFF, bits >> 32


def held_bits(value: float, dtype: Any) -> int:
    """The bits of a value in a type that can hold it, perhaps rounded.

    Raises:
        ValueError: the type holds no such value.
    """
    name = jnp.dtype(dtype).name
    with np.errstate(all="ignore"):
        if jnp.issubdtype(dtype, jnp.floating):
            held = np.float64(value).astype(dtype)
            known, wanted = float(held), float(value)
            fits = math.isnan(known) == math.isnan(wanted) and math.isinf(known) == math.isinf(wanted)
        else:
            info = jnp.iinfo(dtype)
            fits = math.isfinite(value) and value == int(value) and info.min <= value <= info.max
            held = np.asarray(int(value) if fits else 0, dtype)
    if not fits:
        raise ValueError(f"{name} holds no {value:g}; choose another number (nan is stuck,value=nan)")
    return int(held.view(f"u{held.dtype.itemsize}"))


def by_layer(value: float | tuple[float, ...], layer: Int[Array, ""]) -> Float32[Array, ""]:
    """The value for a layer: the one number, or the layer's own, or zero beyond the last."""
    values = jnp.atleast_1d(jnp.asarray(value, jnp.float32))
    if values.size == 1:
        return values[0]
    return values.at[layer].get(mode="fill", fill_value=0.0)
