"""Draws which elements are hit, and what becomes of them: densely, sparsely or all at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32, PRNGKeyArray, Shaped, UInt

from sdc.bits import as_bits, from_bits
from sdc.program.axes import agreed, typed_as

from .fault import Fault
from .patterns import One

# From this share of hit elements on, drawing for every element is cheaper than scattering the hits.
DENSE = 1 / 16


class Draw(NamedTuple):
    """A fault at one site, which draws the elements that it hits."""

    fault: Fault
    keys: PRNGKeyArray  # of the places, and of what becomes of them
    rate: Float32[Array, ""]  # probability that a hit starts at an element
    bits: UInt[Array, "*shape"]  # of all elements
    like: Shaped[Array, "*shape"]  # the array of these bits
    layer: Int[Array, ""]

    def whole(self) -> tuple[UInt[Array, "*shape"], Bool[Array, ""]]:
        """Hits all elements if a hit starts at any: with probability 1 - (1 - rate)^size. Returns whether it does."""
        any_start = -jnp.expm1(self.bits.size * jnp.log1p(-jnp.minimum(self.rate, 1 - 2.0**-24)))
        hit = (jax.random.uniform(self.keys[0]) < any_start) & (self.rate > 0)
        return self._where(hit, hit), hit

    def densely(self) -> tuple[UInt[Array, "*shape"], Bool[Array, "size"]]:
        """Draws for every element. Returns which are hit."""
        if self.fault.pattern != One():
            raise ValueError(
                f"rate={self.fault.rate} of a pattern of several elements would hit most of the tensor; "
                f"give a rate of at most {DENSE:g}, bursts included, or the pattern Whole()"
            )
        hit = jax.random.uniform(self.keys[0], (self.bits.size,)) < self.rate
        return self._where(hit.reshape(self.bits.shape), self.rate > 0), hit

    def sparsely(self) -> tuple[UInt[Array, "*shape"], Int32[Array, "hits"]]:
        """Draws the places at which hits start. Returns the elements hit, each once, among places beyond the last one.

        Where patterns overlap, an element is what the first of them makes of it: writing twice to one place would leave
        the order to the hardware.
        """
        bits = self.bits
        starts = _bernoulli_positions(self.keys[0], self.rate, bits.size, self.fault.largest_rate())
        groups = self.fault.pattern.positions(starts, self.like.shape)
        if groups.shape[-1] > 1:
            groups = jnp.sort(groups, axis=-1)  # so that those cut off at an edge come last
        count = jnp.sum(groups < bits.size, axis=-1, dtype=jnp.int32)
        values = self._after(take(bits, groups), count)
        at, values = groups.reshape(-1), values.reshape(-1)
        if groups.shape[-1] > 1:
            order = jnp.argsort(at)
            at, values = at[order], values[order]
            again = jnp.concatenate([jnp.zeros(1, jnp.bool_), at[1:] == at[:-1]])
            at = jnp.where(again, bits.size, at).astype(at.dtype)
        return bits.at[_indices(at, bits.shape)].set(values, mode="drop"), at

    def _after(
        self, bits: UInt[Array, "*groups n"], count: Int[Array, "*#groups"] | None = None
    ) -> UInt[Array, "*groups n"]:
        """What becomes of elements that are hit, as bits."""
        return as_bits(self.fault.what(self.keys[1], from_bits(bits, self.like), self.layer, count))

    def _where(self, hit: Bool[Array, "*#shape"], any_hit: Bool[Array, ""]) -> UInt[Array, "*shape"]:
        """The bits afterwards, changed where elements are hit.

        What comes out of a conditional is one value for the step and for its events. Otherwise XLA computes it anew for
        each, now and then to another last bit: so it is under `vmap`, where a conditional becomes a choice. `_compare`
        therefore looks at elements that were hit only.
        """
        kept = typed_as(self.bits, hit)

        def changed() -> UInt[Array, "*shape"]:
            return jnp.where(hit, self._after(self.bits.reshape(-1)).reshape(self.bits.shape), kept)

        return lax.cond(agreed(any_hit), changed, lambda: kept)


def take(x: Shaped[Array, "*shape"], at: Int32[Array, "*n"]) -> Shaped[Array, "*n"]:
    """Elements of an array by their places in its flat form; any element stands for a place beyond."""
    return x.at[_indices(at, x.shape)].get(mode="clip")


def _indices(at: Int32[Array, "*n"], shape: tuple[int, ...]) -> tuple[Int32[Array, "*n"], ...]:
    """Indices of the elements at places of the flat form, beyond the array where these are beyond.

    The flat form itself would lose the sharding of some axes.
    """
    found: list[Int32[Array, "*n"]] = []
    for number in reversed(shape[1:]):
        found.append(lax.rem(at, jnp.int32(number)))
        at = lax.div(at, jnp.int32(number))
    return at, *reversed(found)


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
