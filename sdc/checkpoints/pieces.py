"""Pieces of blocks as processes hold them: on the way from devices to bytes, and back."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..twins import digest
from ._partition import Partition
from .blocks import bits_of
from .boxes import Box, box_of, box_text, overlap, parse_box, volume
from .store import StoreError


class Held(NamedTuple):
    """A part of a block that one device of this process saves.

    Attributes:
        name: of the array.
        box: where it lies in the array (in its data, for PRNG keys); rows of a scalar are (0, 1).
        dtype: of its numbers.
    """

    name: str
    box: Box
    dtype: str

    @property
    def plain(self) -> list[str]:
        """As JSON has it."""
        return [self.name, box_text(self.box), self.dtype]

    @classmethod
    def parse(cls, plain: Sequence[str]) -> "Held":
        """The inverse of `plain`."""
        name, box, dtype = plain
        return cls(name, parse_box(box), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its numbers."""
        return tuple(stop - start for start, stop in self.box)


def held_by(cut: Partition, leaves: Mapping[str, jax.Array]) -> dict[int, list[Held]]:
    """The parts of blocks that this process saves: of replicas the first one's."""
    boxes: dict[str, list[Box]] = {}
    types: dict[str, str] = {}
    for name, leaf in leaves.items():
        bits = bits_of(leaf)
        types[name] = str(bits.dtype)
        boxes[name] = [
            box_of(shard.index, bits.shape) or ((0, 1),) for shard in bits.addressable_shards if shard.replica_id == 0
        ]
    found: dict[int, list[Held]] = {}
    for number, pieces in enumerate(cut.blocks):
        for piece in pieces:
            for box in boxes[piece.name]:
                part = overlap(box, ((piece.start, piece.stop), *box[1:]))
                if volume(part):
                    found.setdefault(number, []).append(Held(piece.name, part, types[piece.name]))
    return found


def fetch(
    held: Mapping[int, Sequence[Held]], leaves: Mapping[str, jax.Array]
) -> Callable[[], dict[int, tuple[bytes, tuple[str, ...]]]]:
    """Starts copying parts of blocks to the host, with digests that the devices take before.

    Args:
        held: by block.
        leaves: the arrays, which may be donated as soon as this returns.

    Returns:
        What waits for them: bytes and digests by block. It may be called in another thread.

    Raises:
        StoreError: an array is sharded otherwise than the parts say.
    """
    shards: dict[str, list[tuple[Box, jax.Array]]] = {}
    for name in {one.name for parts in held.values() for one in parts}:
        bits = bits_of(leaves[name])
        shards[name] = [
            (box_of(shard.index, bits.shape) or ((0, 1),), shard.data if bits.ndim else shard.data.reshape(1))
            for shard in bits.addressable_shards
            if shard.replica_id == 0
        ]

    def cut(one: Held) -> tuple[jax.Array, jax.Array]:
        for box, data in shards[one.name]:
            if overlap(box, one.box) == one.box:
                rows = one.box[0]
                return _rows(data, np.int32(rows[0] - box[0][0]), rows[1] - rows[0])
        raise StoreError(f"{one.name} is sharded otherwise than at the start; begin a running checkpoint of its own")

    started = {block: [cut(one) for one in parts] for block, parts in held.items()}
    for parts in started.values():
        for data, _ in parts:
            data.copy_to_host_async()

    def finish() -> dict[int, tuple[bytes, tuple[str, ...]]]:
        return {
            block: (
                b"".join(np.asarray(data).tobytes() for data, _ in parts),
                tuple(digest_text(np.asarray(found)) for _, found in parts),
            )
            for block, parts in started.items()
        }

    return finish


def shards_here(leaves: Mapping[str, jax.Array]) -> dict[Held, jax.Array]:
    """What this process's devices hold, each part once: of replicas the first one's."""
    found: dict[Held, jax.Array] = {}
    for name, leaf in leaves.items():
        bits = bits_of(leaf)
        for shard in sorted(bits.addressable_shards, key=lambda shard: shard.replica_id):
            box = box_of(shard.index, bits.shape) or ((0, 1),)
            found.setdefault(Held(name, box, str(bits.dtype)), shard.data if bits.ndim else shard.data.reshape(1))
    return found


def parts_of(content: bytes, held: Sequence[Held], digests: Sequence[str]) -> list[np.ndarray] | None:
    """The arrays in the bytes of a block; None if any is not what it was on the device."""
    found = []
    place = 0
    for one, expected in zip(held, digests, strict=False):
        dtype = jnp.dtype(one.dtype)
        size = dtype.itemsize * volume(one.box)
        part = content[place : place + size]
        if len(part) != size:
            return None
        array = np.frombuffer(part, dtype).reshape(one.shape)
        if digest_text(np.asarray(digest_of(array))) != expected:
            return None
        found.append(array)
        place += size
    return found if place == len(content) and len(found) == len(held) == len(digests) else None


def digest_text(words: Any) -> str:
    """Two words in hexadecimal."""
    return f"{int(words[0]):08x}{int(words[1]):08x}"


@functools.partial(jax.jit, static_argnums=2)
def _rows(x: jax.Array, start: Any, rows: int) -> tuple[jax.Array, jax.Array]:
    found = lax.dynamic_slice_in_dim(x, start, rows)
    return found, digest(found)


digest_of = jax.jit(digest)
"""Taken where the array is."""
