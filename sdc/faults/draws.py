"""Draws which elements are hit, and what becomes of them: densely, sparsely or all at once.

Which they are is drawn always; what becomes of them is computed only where there are any, see `rarely`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int, Int32, PRNGKeyArray, Shaped, UInt, UInt32

from sdc.bits import as_bits

from .fault import Fault
from .patterns import One

# From this share of hit elements on, drawing for every element is cheaper than scattering the hits.
DENSE = 1 / 16


class Draw(NamedTuple):
    """A fault at one site, which draws the elements that it hits."""

    fault: Fault
    keys: PRNGKeyArray  # of the places, and of what becomes of them
    rate: Float32[Array, ""]  # probability that a hit starts at an element
    like: jax.ShapeDtypeStruct  # shape and type of the array
    layer: Int[Array, ""]
    u: Float32[ArrayLike, ""]  # what the kind drew for the step and layer

    def whole(self) -> Bool[Array, ""]:
        """Whether all elements are hit, as they are if a hit starts at any: with probability 1 - (1 - rate)^size."""
        any_start = -jnp.expm1(self.like.size * jnp.log1p(-jnp.minimum(self.rate, 1 - 2.0**-24)))
        return (jax.random.uniform(self.keys[0]) < any_start) & (self.rate > 0)

    def densely(self) -> Bool[Array, "size"]:
        """Which elements are hit, drawn for every one."""
        if self.fault.pattern != One():
            raise ValueError(
                f"rate={self.fault.rate} of a pattern of several elements would hit most of the tensor; "
                f"give a rate of at most {DENSE:g}, bursts included, or the pattern Whole()"
            )
        return jax.random.uniform(self.keys[0], (self.like.size,)) < self.rate

    def any_start(self) -> Bool[Array, ""]:
        """Whether a hit starts anywhere: what the first of the distances says."""
        return self._gaps()[0] <= self.like.size

    def starts(self) -> Int32[Array, "hits"]:
        """Places at which hits start, filled up with the first place beyond the last one."""
        # Saturating sums cannot wrap, and are associative.
        most = jnp.uint32(self.like.size + 1)
        return (lax.associative_scan(lambda a, b: jnp.minimum(a + b, most), self._gaps()) - 1).astype(jnp.int32)

    def where(self, bits: UInt[Array, "*shape"], hit: Bool[Array, "*#size"]) -> UInt[Array, "*shape"]:
        """The bits afterwards, changed where elements are hit."""
        mask = hit.reshape(bits.shape) if hit.ndim else hit
        return jnp.where(mask, self._after(bits.reshape(-1)).reshape(bits.shape), bits)

    def at(self, bits: UInt[Array, "*shape"]) -> tuple[UInt[Array, "*shape"], Int32[Array, "_"]]:
        """The bits afterwards, and the elements hit, each once, among places beyond the last one.

        Where patterns overlap, an element is what the first of them makes of it: writing twice to one place would leave
        the order to the hardware.
        """
        groups = self._groups(self.starts())
        count = jnp.sum(groups < bits.size, axis=-1, dtype=jnp.int32)
        values = self._after(take(bits, groups), count)
        at, values = groups.reshape(-1), values.reshape(-1)
        if groups.shape[-1] > 1:
            order = jnp.argsort(at)
            at, values = at[order], values[order]
            again = jnp.concatenate([jnp.zeros(1, jnp.bool_), at[1:] == at[:-1]])
            at = jnp.where(again, bits.size, at).astype(at.dtype)
        return bits.at[_indices(at, bits.shape)].set(values, mode="drop"), at

    def _gaps(self) -> UInt32[Array, "hits"]:
        """Distances from one start to the next, the first from before the first element.

        Distances between hits are geometric: 1 + floor(log(1 - u) / log(1 - rate)). There is room for eight standard
        deviations more hits than expected at the largest rate, and for a dozen more; beyond that hits would be lost.
        """
        size = self.like.size
        expected = size * self.fault.largest_rate()
        room = min(size, int(expected + 8 * np.sqrt(expected)) + 12)
        # From 32 random bits rather than 23, so that small distances keep their probability at very low rates.
        u = (jax.random.bits(self.keys[0], (room,)).astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
        gap = jnp.floor(jnp.log1p(-u) / jnp.log1p(-jnp.maximum(self.rate, 1e-30)))
        return jnp.where(self.rate > 0, jnp.minimum(gap, size), size).astype(jnp.uint32) + 1

    def _groups(self, starts: Int32[Array, "hits"]) -> Int32[Array, "hits n"]:
        groups = self.fault.pattern.positions(starts, self.like.shape)
        # Those cut off at an edge come last.
        return jnp.sort(groups, axis=-1) if groups.shape[-1] > 1 else groups

    def _after(
        self, bits: UInt[Array, "*groups n"], count: Int[Array, "*#groups"] | None = None
    ) -> UInt[Array, "*groups n"]:
        """What becomes of elements that are hit, as bits."""
        numbers = lax.bitcast_convert_type(bits, self.like.dtype)
        what = self.fault.what.on(self.u, self.layer)
        return as_bits(what(self.keys[1], numbers, self.layer, count))


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
