"""Draws which elements are hit, and what becomes of them: densely, sparsely or all at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32, PRNGKeyArray, Shaped, UInt

from sdc.bits import as_bits, from_bits

from .fault import Fault
from .patterns import One

# From this share of hit elements on, drawing for every element is cheaper than scattering the hits.
DENSE = 1 / 16


def _bits_after(
    fault: Fault,
    draws: PRNGKeyArray,
    bits: UInt[Array, "*groups n"],
    like: Shaped[Array, "*shape"],
    layer: Int[Array, ""],
    count: Int[Array, "*#groups"] | None = None,
) -> UInt[Array, "*groups n"]:
    """What becomes of elements that are hit, as bits."""
    return as_bits(fault.what(draws[1], from_bits(bits, like), layer, count))


def _where(
    hit: Bool[Array, "*#size"], compute: Callable[[], UInt[Array, "size"]], bits: UInt[Array, "size"], any_hit: Any
) -> UInt[Array, "size"]:
    """The computed bits where elements are hit.

    What comes out of a conditional is one value for the step and for its events. Otherwise XLA computes it anew for
    each, now and then to another last bit: so it is under `vmap`, where a conditional becomes a choice. `_compare`
    therefore looks at elements that were hit only.
    """
    missing = tuple(jax.typeof(hit).manual_axis_type.varying - jax.typeof(bits).manual_axis_type.varying)
    kept = lax.pcast(bits, missing, to="varying") if missing else bits
    return lax.cond(any_hit, lambda: jnp.where(hit, compute(), kept), lambda: kept)


def hit_whole(
    fault: Fault,
    draws: PRNGKeyArray,
    rate: Float32[Array, ""],
    bits: UInt[Array, "size"],
    like: Shaped[Array, "*shape"],
    layer: Int[Array, ""],
) -> tuple[UInt[Array, "size"], Bool[Array, ""]]:
    """Hits all elements if a hit starts at any: with probability 1 - (1 - rate)^size. Returns whether it does."""
    any_start = -jnp.expm1(bits.size * jnp.log1p(-jnp.minimum(rate, 1 - 2.0**-24)))
    hit = (jax.random.uniform(draws[0]) < any_start) & (rate > 0)
    return _where(hit, lambda: _bits_after(fault, draws, bits, like, layer), bits, hit), hit


def hit_densely(
    fault: Fault,
    draws: PRNGKeyArray,
    rate: Float32[Array, ""],
    bits: UInt[Array, "size"],
    like: Shaped[Array, "*shape"],
    layer: Int[Array, ""],
) -> tuple[UInt[Array, "size"], Bool[Array, "size"]]:
    """Draws for every element. Returns which are hit."""
    if fault.pattern != One():
        raise ValueError(
            f"rate={fault.rate} of a pattern of several elements would hit most of the tensor; "
            f"give a rate of at most {DENSE:g}, bursts included, or the pattern Whole()"
        )
    hit = jax.random.uniform(draws[0], bits.shape) < rate
    return _where(hit, lambda: _bits_after(fault, draws, bits, like, layer), bits, rate > 0), hit


def hit_sparsely(
    fault: Fault,
    draws: PRNGKeyArray,
    rate: Float32[Array, ""],
    bits: UInt[Array, "size"],
    like: Shaped[Array, "*shape"],
    layer: Int[Array, ""],
) -> tuple[UInt[Array, "size"], Int32[Array, "hits"]]:
    """Draws the places at which hits start. Returns the elements hit, each once, among places beyond the last one.

    Where patterns overlap, an element is what the first of them makes of it: writing twice to one place would leave the
    order to the hardware.
    """
    starts = _bernoulli_positions(draws[0], rate, bits.size, fault.largest_rate())
    groups = fault.pattern.positions(starts, like.shape)
    if groups.shape[-1] > 1:
        groups = jnp.sort(groups, axis=-1)  # so that those cut off at an edge come last
    count = jnp.sum(groups < bits.size, axis=-1, dtype=jnp.int32)
    values = _bits_after(fault, draws, bits.at[groups].get(mode="clip"), like, layer, count)
    at, values = groups.reshape(-1), values.reshape(-1)
    if groups.shape[-1] > 1:
        order = jnp.argsort(at)
        at, values = at[order], values[order]
        again = jnp.concatenate([jnp.zeros(1, jnp.bool_), at[1:] == at[:-1]])
        at = jnp.where(again, bits.size, at).astype(at.dtype)
    return bits.at[at].set(values, mode="drop"), at


def _bernoulli_positions(
    key: PRNGKeyArray, rate: Float32[Array, ""], size: int, largest_rate: float
) -> Int32[Array, "hits"]:
    """Sorted positions of the hits among `size` elements, each hit with probability `rate`, filled up with `size`.

    Distances between hits are geometric: 1 + floor(log(1 - u) / log(1 - rate)). There is room for eight standard
    deviations more hits than expected at the largest rate, and for a dozen more; beyond that hits would be lost.
    """
    expected = size * largest_rate
    room = min(size, int(expected + 8 * np.sqrt(expected)) + 12)
    # From 32 random bits rather than 23, so that small distances keep their probability at very low rates.
    u = (jax.random.bits(key, (room,)).astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
    gap = jnp.floor(jnp.log1p(-u) / jnp.log1p(-jnp.maximum(rate, 1e-30)))
    gap = jnp.where(rate > 0, jnp.minimum(gap, size), size).astype(jnp.uint32) + 1
    # Saturating sums cannot wrap, and are associative.
    after = lax.associative_scan(lambda a, b: jnp.minimum(a + b, jnp.uint32(size + 1)), gap)
    return (after - 1).astype(jnp.int32)
