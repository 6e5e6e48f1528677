"""How far the blocks of a state moved, measured on the devices, and a copy of the state there."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ._partition import Partition
from .norms import Distance, squared_distance


def auto(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The same arrays, without a copy, on meshes whose shardings the compiler finds by itself."""

    def one(leaf: jax.Array) -> jax.Array:
        found = leaf.sharding
        if not isinstance(found, NamedSharding) or all(kind is AxisType.Auto for kind in found.mesh.axis_types):
            return leaf
        mesh = Mesh(found.mesh.devices, found.mesh.axis_names, axis_types=(AxisType.Auto,) * len(found.mesh.axis_names))
        parts = [shard.data for shard in leaf.addressable_shards]
        sharding = NamedSharding(mesh, found.spec, memory_kind=found.memory_kind)
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

    return {name: one(leaf) for name, leaf in leaves.items()}


@jax.jit
def difference(new: Sequence[jax.Array], old: Sequence[jax.Array]) -> jax.Array:
    parts = [jnp.sum(squared_distance(a.reshape(-1), b.reshape(-1))) for a, b in zip(new, old, strict=True)]
    return jnp.sqrt(sum(parts, jnp.float32(0)))


class Measure(NamedTuple):
    """Two compiled programs: how far each block moved, and the copy with some blocks replaced."""

    moved: Callable[..., jax.Array]
    updated: Callable[..., dict[str, jax.Array]]


def measuring(cut: Partition, leaves: Mapping[str, jax.Array], distance: Distance) -> Measure:
    ids: dict[str, np.ndarray] = {}
    for name in cut.moving:
        shape = cut.types[name][1]
        ids[name] = np.zeros(shape[0] if shape else 1, np.int32)
    for block, pieces in enumerate(cut.blocks[:-1]):
        for piece in pieces:
            if piece.name in ids:
                ids[piece.name][piece.start : piece.stop] = block
    shardings = tuple(leaves[name].sharding for name in ids)
    return _measures(tuple((name, block.tobytes()) for name, block in ids.items()), shardings, cut.choices, distance)


@functools.lru_cache(maxsize=16)
def _measures(
    rows_of: tuple[tuple[str, bytes], ...], shardings: tuple[Any, ...], choices: int, distance: Distance
) -> Measure:
    """Of each array the block of each row, as 32-bit numbers, and its sharding, which its copy has too."""
    ids = {name: np.frombuffer(block, np.int32) for name, block in rows_of}

    def rows(x: jax.Array) -> jax.Array:
        return x if x.ndim else x[None]

    def moved(new: Mapping[str, jax.Array], old: Mapping[str, jax.Array]) -> jax.Array:
        total = jnp.zeros(choices, jnp.float32)
        for name, block in ids.items():
            far = distance(rows(new[name]), rows(old[name])).astype(jnp.float32)
            total += jax.ops.segment_sum(far, block, choices)
        return total

    def updated(new: Mapping[str, jax.Array], old: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
        def one(name: str) -> jax.Array:
            chosen = mask[ids[name]].reshape(-1, *[1] * (rows(new[name]).ndim - 1))
            return jnp.where(chosen, rows(new[name]), rows(old[name])).reshape(new[name].shape)

        return {name: one(name) for name in ids}

    # Each process chooses by the same numbers: all must have all of them.
    everywhere = [NamedSharding(one.mesh, PartitionSpec()) for one in shardings if isinstance(one, NamedSharding)]
    placed = {name: one if isinstance(one, NamedSharding) else None for name, one in zip(ids, shardings, strict=True)}
    return Measure(
        jax.jit(moved, out_shardings=everywhere[0] if everywhere else None),
        jax.jit(updated, donate_argnums=1, out_shardings=placed),
    )
