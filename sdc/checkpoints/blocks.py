"""Digests of a state's arrays, block by block, computed on the arrays' devices.

A block is a range of rows (indices of the first axis) of a global array, independent of the sharding. Each process
digests the data of its own devices: each shard contributes a share to every block that it overlaps. The digest of a
block is the sum of its shares (see `sdc.twins.digests`), so arrays can be compared under any sharding without being
gathered.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, UInt32

from ..twins import row_digests

MOST = 64  # maximum number of blocks of an array
LEAST = 1 << 16  # minimum bytes of a block, unless the whole array has fewer
AT_ONCE = 64  # maximum number of arrays whose digests one program computes
DEVICES = "devices"

Box: TypeAlias = tuple[tuple[int, int], ...]  # index range of a shard in a global array: start and stop for each axis
# For each index range of a shard, its shares of all blocks of the array: uint32 of shape (blocks, 2).
Shares: TypeAlias = dict[Box, np.ndarray]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Converts JAX's index of a shard to an index range in an array of the given shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def overlap(box: Box, other: Box) -> Box:
    """Returns the intersection of two boxes; its `volume` is 0 if they are disjoint."""
    return tuple((max(a, c), max(min(b, d), max(a, c))) for (a, b), (c, d) in zip(box, other, strict=True))


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Returns the position of a part in the array that holds the box `whole`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, whole, strict=True))


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def box_text(box: Box) -> str:
    """Formats a box, as in `0:4,8:16`; the text for the box of a scalar is empty."""
    return ",".join(f"{start}:{stop}" for start, stop in box)


def parse_box(text: str) -> Box:
    """Parses the result of `box_text`; raises ValueError for any other text."""
    boxes: Any = tuple(tuple(map(int, part.split(":"))) for part in text.split(",") if part)
    if any(len(ends) != 2 for ends in boxes):
        raise ValueError(f"{text!r} is not an index range; expected one such as '0:4,8:16'")
    return tuple(boxes)


class Cut(NamedTuple):
    shape: tuple[int, ...]  # shape of the array; for PRNG keys that of their data, for a scalar (1,)
    rows: int  # rows per block

    @property
    def blocks(self) -> int:
        return max(1, -(-self.shape[0] // self.rows))

    def block(self, number: int) -> tuple[int, int]:
        """Returns the first row of a block, and the row after its last row."""
        return number * self.rows, min((number + 1) * self.rows, self.shape[0])

    def differing(self, digests: np.ndarray, others: np.ndarray) -> tuple[tuple[int, int], ...]:
        """Returns the start and stop rows of each block whose digests differ."""
        return tuple(self.block(int(number)) for number in np.flatnonzero((digests != others).any(axis=1)))


def cut_of(array: Any) -> Cut:
    """Divides an array into at most `MOST` blocks of at least `LEAST` bytes; the number of rows per block is a power of
    two."""
    bits = described(array)
    return cut_shape(bits.shape, bits.dtype.itemsize)


def cut_shape(shape: Sequence[int], itemsize: int) -> Cut:
    """Divides an array of the given shape and item size into blocks."""
    shape = tuple(shape) or (1,)
    row = max(1, math.prod(shape[1:]) * itemsize)
    rows = max(1, -(-shape[0] // MOST), -(-LEAST // row))
    return Cut(shape, 1 << (rows - 1).bit_length())


def bits_of(array: Any) -> Any:
    """Converts an array to numbers of at least 8 bits: replaces PRNG keys with their data, and widens narrower
    types."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    if jax.dtypes.itemsize_bits(array.dtype) < 8:
        return array.astype(jnp.int8 if jnp.issubdtype(array.dtype, jnp.integer) else jnp.float32)
    return array


def described(array: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and type of an array's `bits_of`."""
    return _described(tuple(array.shape), array.dtype)


@functools.lru_cache(maxsize=4096)  # each call of `eval_shape` leaves an entry in JAX's caches
def _described(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    found: jax.ShapeDtypeStruct = jax.eval_shape(bits_of, jax.ShapeDtypeStruct(shape, dtype))
    return found


def take(arrays: Mapping[str, jax.Array]) -> Callable[[], tuple[dict[str, Shares], list[str]]]:
    """Starts computing digests of this process's shards. The arrays may be donated as soon as this function returns.

    The returned function, which any thread may call, waits for the digests and returns the shares by name, and
    descriptions of the replicas that differ (`apart_text`).
    """
    plans: dict[str, _Plan] = {}
    laid: dict[str, Array] = {}
    for name, array in arrays.items():  # without a copy
        bits = bits_of(array)
        plan = plans[name] = _plan(bits.sharding, bits.shape, bits.dtype.itemsize)
        shards = {shard.device: shard.data for shard in bits.addressable_shards}
        parts = [shards[device] if bits.ndim else shards[device].reshape(1) for device in plan.mesh.devices.flat]
        laid[name] = jax.make_array_from_single_device_arrays(plan.shape, plan.sharding, parts)
    sums: dict[str, Array] = {}
    for mesh in dict.fromkeys(plan.mesh for plan in plans.values()):
        names = [name for name, plan in plans.items() if plan.mesh == mesh]
        for first in range(0, len(names), AT_ONCE):
            batch = names[first : first + AT_ONCE]
            program = _shares(mesh, tuple(plans[name].cut for name in batch))
            found = program([laid[name] for name in batch], [plans[name].starts for name in batch])
            sums |= zip(batch, found, strict=True)

    def finish() -> tuple[dict[str, Shares], list[str]]:
        shares: dict[str, Shares] = {}
        apart = []
        for name, plan in plans.items():
            held = shares.setdefault(name, {})
            for box, share in zip(plan.boxes, np.asarray(sums[name]), strict=True):
                if not np.array_equal(held.setdefault(box, share), share):
                    apart.append(apart_text(name, box))
        return shares, apart

    return finish


def apart_text(name: str, box: Box) -> str:
    """Describes the part of an array whose replicas differ."""
    return f"{name} at {box_text(box) or 'its only element'}"


class _Plan(NamedTuple):
    """The arrangement of this process's shards of an array on a mesh of local devices, which involves no other
    process."""

    boxes: list[Box]
    cut: Cut
    starts: np.ndarray
    mesh: Mesh
    sharding: NamedSharding
    shape: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _plan(sharding: jax.sharding.Sharding, shape: tuple[int, ...], itemsize: int) -> _Plan:
    places: Any = sharding.addressable_devices_indices_map(shape)
    devices = sorted(places, key=lambda device: int(device.id))
    boxes = [box_of(places[device] or (), shape) for device in devices]
    starts = np.asarray([[start for start, _ in box] or [0] for box in boxes], np.uint32)
    mesh = Mesh(np.asarray(devices), (DEVICES,))
    one = sharding.shard_shape(shape) or (1,)
    own = NamedSharding(mesh, P(DEVICES), memory_kind=sharding.memory_kind)
    return _Plan(boxes, cut_shape(shape, itemsize), starts, mesh, own, (len(devices) * one[0], *one[1:]))


@functools.lru_cache(maxsize=256)
def _shares(mesh: Mesh, cuts: tuple[Cut, ...]) -> Callable[..., list[Array]]:
    def one(arrays: Sequence[Array], starts: Sequence[UInt32[Array, "1 axes"]]) -> list[UInt32[Array, "1 blocks 2"]]:
        return [_share(x, cut, start[0])[None] for x, cut, start in zip(arrays, cuts, starts, strict=True)]

    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(DEVICES), out_specs=P(DEVICES), check_vma=False))


def _share(x: Array, cut: Cut, start: UInt32[Array, " axes"]) -> UInt32[Array, "blocks 2"]:
    """Returns a shard's contribution to each block. Rows that are not separated by a block boundary in any shard are
    digested as a group."""
    if not x.size:
        return jnp.zeros((cut.blocks, 2), jnp.uint32)
    rows = math.gcd(x.shape[0], cut.rows)
    chunks = x.reshape(-1, rows, *x.shape[1:])
    offset = [start[0] // rows, jnp.uint32(0), *(start[axis] for axis in range(1, len(cut.shape)))]
    sums = row_digests(chunks, shape=(0, rows, *cut.shape[1:]), offset=offset)
    first = start[0] + jnp.arange(chunks.shape[0], dtype=jnp.uint32) * jnp.uint32(rows)
    return jax.ops.segment_sum(sums, first // jnp.uint32(cut.rows), cut.blocks, indices_are_sorted=True)


def whole(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Returns whether the boxes of distinct shards together cover an array of the given shape."""
    return sum(map(volume, boxes)) == math.prod(shape)


def total(shares: Mapping[Box, np.ndarray]) -> np.ndarray:
    """Returns the digests of all blocks, which are the sums of the shards' shares: uint32 of shape (blocks, 2)."""
    return np.asarray(sum(shares.values()), np.uint32)
