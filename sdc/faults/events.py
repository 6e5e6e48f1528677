"""The ground truth of a simulation: when an injected step runs, and what faults did to it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray, Shaped, UInt, UInt32

from sdc.bits import as_bits

from ..program import Selector, aside


@aside
class Moment(NamedTuple):
    """When an injected step runs, and the randomness of its faults.

    Attributes:
        key: PRNG key of the run. The same key, step, site, iteration and device draw the same faults, however the mesh
            is mapped.
        step: number of the step.
    """

    key: PRNGKeyArray
    step: Int[Array, ""]


class Hits(NamedTuple):
    """The first elements that were changed, in order of output and index; rows beyond the changed ones are zero.

    Attributes:
        output: number of the operation's output.
        element: flat index of the element, row-major.
        old: its bits before, as two 32-bit words, the lower one first.
        new: its bits after.
    """

    output: UInt32[Array, "k"]
    element: UInt32[Array, "k"]
    old: UInt32[Array, "k 2"]
    new: UInt32[Array, "k 2"]


class Events(NamedTuple):
    """What faults did at one site: the ground truth.

    Attributes:
        drawn: elements hit, counted once per fault.
        changed: elements whose bits are not what they were; what an exact comparison finds.
        hits: the first of those one by one, where they were asked for, else None.
    """

    drawn: UInt32[Array, ""]
    changed: UInt32[Array, ""]
    hits: Hits | None = None


def corruptible(x: Any) -> bool:
    """Whether an array holds real numbers of 8 bits or more, which faults can hit: no keys, truth values or complex."""
    real = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    return real and jax.dtypes.itemsize_bits(x.dtype) >= 8


def strikable(x: Any) -> bool:
    """Whether an array has an element that faults can hit."""
    return corruptible(x) and math.prod(x.shape) > 0


NUMBERS = Selector("real numbers", lambda site: any(map(strikable, site.outputs)))
"""Sites that faults can hit."""


def words(x: Shaped[Array, "*n"]) -> UInt32[Array, "*n 2"]:
    """The bits of real numbers as two 32-bit words each, the lower one first."""
    return _words(as_bits(x))


def _words(bits: UInt[Array, "*n"]) -> UInt32[Array, "*n 2"]:
    if bits.dtype.itemsize > 4:
        return lax.bitcast_convert_type(bits, jnp.uint32)
    return jnp.stack([bits.astype(jnp.uint32), jnp.zeros(bits.shape, jnp.uint32)], axis=-1)
