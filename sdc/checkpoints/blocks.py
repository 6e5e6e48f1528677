"""Digests of a state's arrays, block by block, taken where the arrays are.

A block is so many rows of a global array, that is of indices of its first axis, whatever the sharding. Each process
takes the digests of what its own devices hold: of each shard, the share of every block that it touches. Shares add up
(see `sdc.twins.digests`), so that arrays are compared under any sharding and no array is ever gathered.
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

MOST = 64  # blocks of an array
LEAST = 1 << 16  # bytes of a block, unless the array has fewer
AT_ONCE = 64  # arrays whose digests one program takes
DEVICES = "devices"

Box: TypeAlias = tuple[tuple[int, int], ...]  # where a shard lies in a global array: a pair of ends for each axis
# By the index range of a shard its shares of all blocks of the array, uint32 of shape (blocks, 2).
Shares: TypeAlias = dict[Box, np.ndarray]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The index range of a shard, as JAX gives it, in an array of that shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def overlap(box: Box, other: Box) -> Box:
    """What two boxes have in common; empty (`volume`) if nothing."""
    return tuple((max(a, c), max(min(b, d), max(a, c))) for (a, b), (c, d) in zip(box, other, strict=True))


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where a part lies in the array that holds the box `whole`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, whole, strict=True))


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def box_text(box: Box) -> str:
    """As `0:4,8:16`; empty for the box of a scalar."""
    return ",".join(f"{start}:{stop}" for start, stop in box)


def parse_box(text: str) -> Box:
    """The inverse of `box_text`; a ValueError where it is no such text."""
    boxes: Any = tuple(tuple(map(int, part.split(":"))) for part in text.split(",") if part)
    if any(len(ends) != 2 for ends in boxes):
        raise ValueError(f"{text!r} is no index range; expected one such as '0:4,8:16'")
    return tuple(boxes)


class Cut(NamedTuple):
    shape: tuple[int, ...]  # that of the data, for PRNG keys, and (1,) for a scalar
    rows: int  # of a block

    @property
    def blocks(self) -> int:
        return max(1, -(-self.shape[0] // self.rows))

    def block(self, number: int) -> tuple[int, int]:
        """First row of a block, and the one behind its last."""
        return number * self.rows, min((number + 1) * self.rows, self.shape[0])

    def differing(self, digests: np.ndarray, others: np.ndarray) -> tuple[tuple[int, int], ...]:
        """First and behind the last row of each block whose digests differ."""
        return tuple(self.block(int(number)) for number in np.flatnonzero((digests != others).any(axis=1)))


def cut_of(array: Any) -> Cut:
    """Cuts an array into at most `MOST` blocks of at least `LEAST` bytes; rows are a power of two."""
    bits = jax.eval_shape(bits_of, array)
    return cut_shape(bits.shape, bits.dtype.itemsize)


def cut_shape(shape: Sequence[int], itemsize: int) -> Cut:
    """The same of an array of numbers of that shape and size."""
    shape = tuple(shape) or (1,)
    row = max(1, math.prod(shape[1:]) * itemsize)
    rows = max(1, -(-shape[0] // MOST), -(-LEAST // row))
    return Cut(shape, 1 << (rows - 1).bit_length())


def bits_of(array: Any) -> Any:
    """An array as numbers of 8 bits or more: the data of PRNG keys, and wider ones for the narrowest."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    if jax.dtypes.itemsize_bits(array.dtype) < 8:
        return array.astype(jnp.int8 if jnp.issubdtype(array.dtype, jnp.integer) else jnp.float32)
    return array


def take(arrays: Mapping[str, jax.Array]) -> Callable[[], tuple[dict[str, Shares], list[str]]]:
    """Starts taking digests of this process's shards. The arrays may be donated as soon as this returns.

    What it returns waits for them, in any thread: shares by name, and in words what devices that should hold the same
    do not (`apart_text`).
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
    """An array, and where in it devices that should hold the same do not."""
    return f"{name} at {box_text(box) or 'its only element'}"


class _Plan(NamedTuple):
    """How this process's shards of an array lie side by side on a mesh of their own: no other process is waited for."""

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
    """What a shard adds to each block. Rows go together as far as no block ends between them in any shard."""
    if not x.size:
        return jnp.zeros((cut.blocks, 2), jnp.uint32)
    rows = math.gcd(x.shape[0], cut.rows)
    chunks = x.reshape(-1, rows, *x.shape[1:])
    offset = [start[0] // rows, jnp.uint32(0), *(start[axis] for axis in range(1, len(cut.shape)))]
    sums = row_digests(chunks, shape=(0, rows, *cut.shape[1:]), offset=offset)
    first = start[0] + jnp.arange(chunks.shape[0], dtype=jnp.uint32) * jnp.uint32(rows)
    return jax.ops.segment_sum(sums, first // jnp.uint32(cut.rows), cut.blocks, indices_are_sorted=True)


def whole(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether boxes of different shards make up an array of that shape."""
    return sum(map(volume, boxes)) == math.prod(shape)


def total(shares: Mapping[Box, np.ndarray]) -> np.ndarray:
    """The digests of all blocks, from the shares of all shards: uint32 of shape (blocks, 2)."""
    return np.asarray(sum(shares.values()), np.uint32)
