"""Seals: digests of a state's arrays, taken before a save and compared after a restore.

A seal covers global arrays, block by block: `{name: {"0:4,8:16": digest}}`, where the block is the index range of a
shard of the run that saved. Each process takes the digests of its own shards. The run that restores may cut its arrays
otherwise: a process puts every saved block together from its own shards. Where a block lies on several processes, the
array is gathered, one array at a time.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from sdc.checkpoints import Box, box_of, box_text, overlap, parse_box, volume, within

Sums = dict[str, dict[str, str]]
"""Name of an array -> index range of a block -> digest."""


class Damage(Exception):
    """What is wrong with a checkpoint, in words."""


class Seal(Protocol):
    """A way to take digests and to compare them. The files of a checkpoint name its algorithm."""

    algorithm: str

    def take(self, arrays: Mapping[str, Any]) -> Callable[[], Sums]:
        """Takes the digests of this process's own shards, before they are copied anywhere.

        Args:
            arrays: JAX arrays by name. They may be donated as soon as this returns.

        Returns:
            What gives the digests. It is called once, from another thread, so that digests computed on the device do
            not hold up the next step.
        """

    def check(self, arrays: Mapping[str, Any], sums: Sums) -> None:
        """Compares restored arrays with the digests of all processes. All processes call it with the same names.

        Args:
            arrays: JAX arrays by name, of any sharding.
            sums: what all processes' `take` gave, merged.

        Raises:
            Damage: an array differs, or is not wholly covered by the digests.
        """


class Sha256:
    """SHA-256 of each block's bytes, computed by the host.

    Where several devices hold the same block, the first one's is sealed and saved. A restored block is compared on
    every device that holds it.

    Example:
        >>> import jax.numpy as jnp
        >>> from sdc.train.seals import Sha256
        >>> sums = Sha256().take({"weights": jnp.arange(4.0)})()
        >>> list(sums["weights"])
        ['0:4']
        >>> Sha256().check({"weights": jnp.arange(4.0)}, sums)
        >>> Sha256().check({"weights": jnp.arange(4.0).at[2].set(7.0)}, sums)
        Traceback (most recent call last):
        ...
        sdc.train.seals.Damage: weights differs from its seal at 0:4
    """

    algorithm = "sha256"

    def take(self, arrays: Mapping[str, Any]) -> Callable[[], Sums]:
        """See `Seal`. The digests are there when this returns: hashing is faster than another copy of the state."""
        sums: Sums = {}
        for name, array in arrays.items():
            blocks = dict(_shards(array, first_replica=True))
            sums[name] = dict(zip(map(box_text, blocks), _digests(blocks.values()), strict=True))
        return lambda: sums

    def check(self, arrays: Mapping[str, Any], sums: Sums) -> None:
        """See `Seal`."""
        damage: list[Damage] = []
        for name, array in arrays.items():
            blocks = {parse_box(text): digest for text, digest in sums.get(name, {}).items()}
            whole = _gathered(array) if _cut(array, blocks) else None  # by all processes, whatever one of them finds
            try:
                _check(name, array, blocks, whole)
            except Damage as found:
                damage.append(found)
        if damage:
            raise damage[0]


def _check(name: str, array: Any, expected: Mapping[Box, str], whole: np.ndarray | None) -> None:
    if sum(map(volume, expected)) != math.prod(_shape(array)):
        raise Damage(f"the seals do not cover {name}")
    held: dict[Box, np.ndarray] = {}
    for box, data in _shards(array):
        same = held.setdefault(box, data) if whole is None else whole[tuple(slice(*ends) for ends in box)]
        if not np.array_equal(_bytes(same), _bytes(data)):
            raise Damage(f"{name} differs between devices at {box_text(box)}")
    if whole is not None:
        held = {tuple((0, size) for size in whole.shape): whole}
    blocks = {box: block for box in expected if (block := _block(box, held)) is not None}
    for box, digest in zip(blocks, _digests(blocks.values()), strict=True):
        if digest != expected[box]:
            raise Damage(f"{name} differs from its seal at {box_text(box) or 'its only element'}")


def _bits(array: Any) -> Any:
    """An array as numbers: the data of PRNG keys."""
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(jax.eval_shape(_bits, array).shape)


def _shards(array: Any, *, first_replica: bool = False) -> Iterable[tuple[Box, np.ndarray]]:
    """This process's shards, with their index ranges."""
    bits = _bits(array)
    for shard in bits.addressable_shards:
        if shard.replica_id == 0 or not first_replica:
            yield box_of(shard.index, bits.shape), np.asarray(shard.data)


def _digests(blocks: Iterable[np.ndarray]) -> list[str]:
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        return list(pool.map(lambda block: hashlib.sha256(_bytes(block).data).hexdigest(), blocks))


def _bytes(block: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def _cut(array: Any, blocks: Iterable[Box]) -> bool:
    """Whether some process holds a part of a block and not the rest; all processes come to the same answer."""
    bits = _bits(array)
    if bits.is_fully_addressable:
        return False
    held: dict[int, set[Box]] = {}
    for device, index in bits.sharding.devices_indices_map(bits.shape).items():
        held.setdefault(device.process_index, set()).add(box_of(index, bits.shape))
    parts = ((sum(volume(overlap(block, box)) for box in boxes), block) for boxes in held.values() for block in blocks)
    return any(part not in (0, volume(block)) for part, block in parts)


def _gathered(array: Any) -> np.ndarray:
    """The whole array, on every process."""
    return np.asarray(multihost_utils.process_allgather(_bits(array), tiled=True))


def _block(box: Box, held: Mapping[Box, np.ndarray]) -> np.ndarray | None:
    """A block put together from what is held; None where it is held by others."""
    if box in held:
        return held[box]
    parts = {other: common for other in held if volume(common := overlap(box, other))}
    if not parts:
        return None
    block = np.empty([stop - start for start, stop in box], next(iter(held.values())).dtype)
    for other, common in parts.items():
        block[within(common, box)] = held[other][within(common, other)]
    return block
