"""Fingerprints: 64-bit digests of tensors and of every selected value of a step.

The digest of a tensor is computed from the 32-bit words w_i of its elements (see `bits.element_words`). With n words
per element, i is n times the element's index in the whole tensor, plus the number of the word within the element:

    v_i = w_i + i * 0x9E3779B1;    for elements of more than 16 bits: v_i ^= v_i >> 16
    p_i = v_i * 0x85EBCA6B;   h_i = p_i ^ (p_i >> 15);   digest = (sum_i h_i, sum_i h_i**2)   mod 2**32

Integer sums wrap and are associative, so the digest depends neither on the sharding nor on the order of the reduction,
and the digest of a tensor is the sum of the digests of its shards. Every step up to h_i is a bijection of the word, so
a change inside one word is never missed. If h_i and h_j change by d and -d, their sum is preserved, but the sum of
squares is preserved only if d * (h_i - h_j + d) is a multiple of 2**31. Sums, index-weighted sums and XOR are cheaper,
but each misses whole classes of changes.

The multiplier 0x9E3779B1 is 2**32 divided by the golden ratio. Its multiples are well spread, so the words of narrow
elements collide only if the elements are more than 29,000 apart (Knuth, The Art of Computer Programming, volume 3,
section 6.4). The multiplier 0x85EBCA6B comes from the finalizer of MurmurHash3 (Appleby, 2008).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped, UInt32

from sdc.bits import element_words

from ..program import Place, Reports, Values, Where, compiled_for, probes, rewrite, traced_once

# Name of the algorithm above, which records store. Records that do not store a name used an older algorithm, which
# applied the finalizer of MurmurHash3 to packed words. Digests of different algorithms are never compared.
ALGORITHM = "sum-and-squares"
GOLDEN, MIX = 0x9E3779B1, 0x85EBCA6B
ROW = 256  # minimum number of words in the inner sum of a large tensor
P = ParamSpec("P")  # of a step
Out = TypeVar("Out")


def fmix32(h: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Applies the finalizer of MurmurHash3: a bijection of 32-bit words with full avalanche."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def digest(
    x: Shaped[Array, "*shard"],
    *,
    shape: Sequence[int] | None = None,
    offset: Sequence[int | Int[Array, ""]] | None = None,
) -> UInt32[Array, "2"]:
    """Computes the 64-bit digest of a tensor; see the module's docstring.

    Args:
        x: a tensor of any type that `bits.as_bits` accepts, or a shard of one.
        shape: shape of the whole tensor, if `x` is a shard.
        offset: index of the shard's first element in the whole tensor, one number per dimension.

    Returns:
        Two 32-bit words. Adding the words of all shards, modulo 2**32, gives the words of the whole tensor.
    """
    if shape is None and offset is None and compiled_for().platform == "tpu":
        from . import digest_kernel  # needed on TPUs only

        if digest_kernel.fits(x):
            return digest_kernel.kernel_digest(x, GOLDEN, MIX)
    parts = _mixed(x, x.shape if shape is None else shape, offset or [0] * x.ndim)
    if not parts[0].size:
        return jnp.zeros(2, jnp.uint32)
    inner = _inner(parts[0])
    return jnp.stack(_sums(_sums(parts, range(inner, parts[0].ndim)), range(inner)))


def row_digests(
    x: Shaped[Array, "rows *rest"], *, shape: Sequence[int], offset: Sequence[int | Int[Array, ""]]
) -> UInt32[Array, "rows 2"]:
    """Computes the contribution of each row (along the first axis) to a tensor's digest, which is the sum of these
    contributions."""
    parts = _mixed(x, shape, offset)
    if not parts[0].size:
        return jnp.zeros((x.shape[0], 2), jnp.uint32)
    inner = max(_inner(parts[0]), 1)
    return jnp.stack(_sums(_sums(parts, range(inner, parts[0].ndim)), range(1, inner)), axis=-1)


def _inner(words: UInt32[Array, "*words"]) -> int:
    """Returns the first of the trailing axes that form the inner sum, which is a short loop that CPUs can vectorize."""
    axis = words.ndim - 1
    while axis > 1 and math.prod(words.shape[axis:]) < ROW:
        axis -= 1
    return max(axis, 0)


def _mixed(
    x: Shaped[Array, "*shard"], shape: Sequence[int], offset: Sequence[int | Int[Array, ""]]
) -> tuple[UInt32[Array, "*words"], UInt32[Array, "*words"]]:
    """Computes, for each element, the sums of h and of h squared over the element's words."""
    if jax.typeof(x).memory_space != jax.memory.Space.Device:  # nothing is computed in the memory of the host
        x = jax.device_put(x, jax.memory.Space.Device)
    words = element_words(x)
    trailing = words[0].shape[x.ndim :]  # the axes of key data
    extent, start = [*shape, *trailing], [*offset, *[0] * len(trailing)]
    # Computes i * GOLDEN as a sum over the axes, with one multiplication by a constant per axis.
    spread = jnp.zeros(words[0].shape, jnp.uint32)
    stride = GOLDEN * len(words)
    for axis in reversed(range(len(extent))):
        position = lax.broadcasted_iota(jnp.uint32, spread.shape, axis) + jnp.asarray(start[axis], jnp.uint32)
        spread += position * jnp.uint32(stride % 2**32)
        stride *= extent[axis]
    narrow = x.dtype.itemsize <= 2
    h, squares = jnp.uint32(0), jnp.uint32(0)
    for number, word in enumerate(words):
        v = word + spread + jnp.uint32(number * GOLDEN % 2**32)
        p = (v if narrow else v ^ (v >> 16)) * jnp.uint32(MIX)
        mixed = p ^ (p >> 15)
        h, squares = h + mixed, squares + mixed * mixed
    return jnp.asarray(h), jnp.asarray(squares)


def _sums(
    parts: tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]], axes: Sequence[int]
) -> tuple[UInt32[Array, "*rest"], UInt32[Array, "*rest"]]:
    if not len(axes):
        return parts
    # A variadic reduction fuses with the hash, whereas two separate sums would write the hash to memory.
    zero = jnp.uint32(0)
    h, g = lax.reduce(parts, (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(axes))
    return h, g


def tree_digest(tree: Any) -> UInt32[Array, "2"]:
    """Computes the digest of a pytree: the sum of the leaves' digests, each mixed with the position of its leaf."""
    total = jnp.zeros(2, jnp.uint32)
    for position, leaf in enumerate(jax.tree.leaves(tree)):
        total += fmix32(digest(leaf) + jnp.uint32((position * GOLDEN) % 2**32))
    return total


def fingerprint(
    step: Callable[P, Out], where: Where = probes
) -> Callable[P, tuple[Out, Reports[UInt32[Array, "*axes n 2"]]]]:
    """Transforms a step so that it also returns the digest of every selected value.

    Args:
        step: any function that JAX can trace.
        where: selects sites; by default, the probes.

    Returns:
        A function that returns `(out, digests)`; `digests` holds, for each site, the digests of the equation's n
        outputs as `uint32[..., n, 2]`, where the leading axes are those of `site.dims`. The iterations of a `while`
        loop are mixed into one digest, in order.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> out, digests = sdc.fingerprint(lambda x: sdc.probe(x + 1.0, "p"))(jnp.ones(3))
        >>> digests["fwd/p"].shape
        (1, 2)
    """
    return rewrite(step, where, DigestRule(), required=True)


class DigestRule:
    """The rule that takes the digests of an operation's results."""

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Any]:
        return _digested(bind(*inputs))

    def merge(self, total: UInt32[Array, "n 2"], new: UInt32[Array, "n 2"]) -> UInt32[Array, "n 2"]:
        return fmix32(total) + new


@traced_once
def _digested(outs: Values) -> tuple[Values, UInt32[Array, "n 2"]]:
    # XLA may compute a value twice, once for each fusion that uses it. The barrier ensures that the digested value is
    # the one that the step uses.
    outs = lax.optimization_barrier(outs)
    return outs, jnp.stack([digest(out) for out in outs])
