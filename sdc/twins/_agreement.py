"""Collectives over the twin axis: who is the reference, do the twins agree, what does the reference hold.

Everything here runs under a bound axis name (`shard_map`, `pmap` or `vmap`) and moves bits, never floats: a masked sum
of floats would turn -0.0 into 0.0 and mix the payloads of NaNs.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Shaped, UInt, UInt32

from sdc.bits import as_bits, from_bits

from ..program import bound_axes, manual_in_part, varying
from .digests import digest, tree_digest
from .mismatch import Difference, difference, merge, no_difference

Tree = TypeVar("Tree")


class Agreement(NamedTuple):
    """What the digests of all twins say.

    Attributes:
        reference: index of the reference: twin 0 of two; of three or more, a twin of the largest group that agrees.
        undecided: 1 where no more than half of three or more twins agree, so that the reference is a guess; else 0.
        differs: whether any twin differs from its reference, anywhere on the mesh: the same on every device.
    """

    reference: Int32[Array, ""]
    undecided: UInt32[Array, ""]
    differs: Bool[Array, ""]


def agreement(leaves: list[Shaped[Array, "..."]], axis_name: str) -> Agreement:
    """Compares the digests of some arrays over the twin axis; 8 bytes per twin cross it."""
    digests = exchanged(digest(leaves[0]) if len(leaves) == 1 else tree_digest(leaves), axis_name)
    same = jnp.all(digests[:, None] == digests[None, :], axis=-1)
    if len(digests) == 2:
        reference, undecided = jnp.int32(0), jnp.uint32(0)
    else:
        votes = jnp.sum(same, axis=1, dtype=jnp.int32)
        reference = jnp.argmax(votes).astype(jnp.int32)
        undecided = (2 * jnp.max(votes) <= len(digests)).astype(jnp.uint32)
    differs = jnp.any(~same)
    return Agreement(reference, undecided, anywhere(differs, axis_name))


def anywhere(differs: Bool[Array, ""], axis_name: str) -> Bool[Array, ""]:
    """Whether it holds on any device: a conditional around a collective needs the same branch on all of them.

    It is not asked over the twin axis: each twin has the digests of all twins, and over it the network may be slow.
    """
    others = other_axes(differs, axis_name)
    return lax.pmax(varying(differs.astype(jnp.int32), others), others) > 0 if others else differs


def other_axes(x: Shaped[Array, "..."], axis_name: str) -> tuple[str, ...]:
    """The axes but the twins' over which a value may vary.

    Over axes of size one nothing varies, but `shard_map` may take them to vary.
    """
    typed = jax.typeof(x).manual_axis_type.varying
    return tuple(axis for axis, size in bound_axes().items() if axis != axis_name and (size > 1 or axis in typed))


def wrong(digests: UInt32[Array, "twins rows 2"]) -> Bool[Array, "twins rows"]:
    """Which twins are apart from the reference, row by row."""
    same = jnp.all(digests[:, None] == digests[None, :], axis=-1)
    if len(digests) == 2:
        return ~same[0]
    reference = jnp.argmax(jnp.sum(same, axis=1, dtype=jnp.int32), axis=0)
    return ~jnp.take_along_axis(same, reference[None, None], axis=0)[0]


def gather_twins(x: Shaped[Array, "*shape"], axis_name: str) -> list[Shaped[Array, "*shape"]]:
    """The tensor as each twin holds it, bit for bit, on every device."""
    rows = exchanged(as_bits(x), axis_name)
    return [from_bits(row, x) for row in rows]


def choose(copies: list[Shaped[Array, "*shape"]], index: Int32[Array, ""]) -> Shaped[Array, "*shape"]:
    """`copies[index]` for a traced index."""
    return lax.select_n(index, *copies) if len(copies) > 1 else copies[0]


def from_reference(tree: Tree, axis_name: str, reference: Int32[Array, ""]) -> Tree:
    """The reference twin's arrays on every twin, bit for bit."""
    mine = axis_place(axis_name) == reference

    def broadcast(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        bits = as_bits(x)
        return from_bits(lax.psum(jnp.where(mine, bits, jnp.zeros_like(bits)), axis_name), x)

    return jax.tree.map(broadcast, tree)


def measure(
    leaves: list[Shaped[Array, "..."]], axis_name: str, reference: Int32[Array, ""]
) -> tuple[list[Shaped[Array, "..."]], Difference]:
    """Compares every twin with the reference, element by element."""
    size = lax.axis_size(axis_name)
    total: Difference | None = None
    chosen = []
    for leaf in leaves:
        copies = gather_twins(leaf, axis_name)
        chosen.append(choose(copies, reference))
        rows = [difference(chosen[-1], copy) for copy in copies]
        new = Difference(*(jnp.stack(column) for column in zip(*rows, strict=True)))
        total = new if total is None else merge(total, new)
    assert total is not None
    others = jnp.arange(size) != reference
    total = jax.tree.map(lambda row: jnp.where(others, row, jnp.zeros_like(row)), total)
    return chosen, from_reference(total, axis_name, reference)


def nothing_found(leaves: list[Shaped[Array, "..."]], axis_name: str, reference: Int32[Array, ""]) -> Difference:
    """The result of `measure` where all twins agree."""
    elements = jnp.uint32(sum(leaf.size for leaf in leaves))
    return no_difference(jnp.where(jnp.arange(lax.axis_size(axis_name)) != reference, elements, jnp.uint32(0)))


def squared_distance(
    leaves: list[Shaped[Array, "..."]], axis_name: str, replicas: list[int], reference: Int32[Array, ""]
) -> Float32[Array, "twins"]:
    """Squared L2 distance of every twin from the reference, over arrays that are sharded on the other axes.

    Args:
        leaves: the local shards.
        axis_name: the twin axis.
        replicas: how many devices of a twin hold the same shard, for each array.
        reference: index of the reference.
    """
    others = tuple(axis for axis in bound_axes() if axis != axis_name)
    total = jnp.zeros((), jnp.float32)
    for leaf, count in zip(leaves, replicas, strict=True):
        delta = leaf.astype(jnp.float32) - from_reference(leaf, axis_name, reference).astype(jnp.float32)
        total += jnp.sum(jnp.square(delta)) / count
    if others:
        total = lax.psum(total, others)
    return lax.bitcast_convert_type(exchanged(lax.bitcast_convert_type(total, jnp.uint32), axis_name), jnp.float32)


def axis_place(axis_name: str) -> Int32[Array, ""]:
    """This device's index along a bound axis: `lax.axis_index`, also where a mesh is manual in part.

    There XLA's compiler for TPUs moves the number of a device to where it means nothing, if a program asks for it at
    several places, and refuses the program. So a sum gives each device its part.
    """
    if not manual_in_part():
        return lax.axis_index(axis_name)
    size = lax.axis_size(axis_name)
    places = varying(jnp.arange(size, dtype="int32"), [axis_name])
    return lax.psum_scatter(places, axis_name, tiled=True)[0] // size


def exchanged(mine: UInt[Array, "*shape"], axis_name: str) -> UInt[Array, "twins *shape"]:
    """All twins' values, one row each, equal on every device also for `shard_map`'s type checker."""
    row = jnp.arange(lax.axis_size(axis_name)) == axis_place(axis_name)
    rows = jnp.where(lax.expand_dims(row, range(1, mine.ndim + 1)), mine[None], jnp.zeros_like(mine)[None])
    return lax.psum(rows, axis_name)
