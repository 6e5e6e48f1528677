"""The division of a state into blocks, from which a running checkpoint chooses the blocks to save.

A block is a range of rows (indices of the first axis) of one array, or of several arrays that belong together.
An optimizer array (such as a moment of Adam) belongs to the blocks of a parameter if it has the shape of the parameter
and its path ends with the path of the parameter. All other arrays, such as counters and keys, form the last block,
which every save includes.

The parts of blocks that a process holds (`Fragment`) are converted from device arrays to bytes, and back.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..settings import SettingError
from ..twins import digest
from .blocks import Box, bits_of, box_of, cut_of, described, overlap, volume
from .certificate import StoreError

By: TypeAlias = Literal["rows", "shards", "experts", "layers", "arrays"]


class Piece(NamedTuple):
    """A range of rows of an array.

    Attributes:
        name: name of the array.
        start: first row.
        stop: the row after the last one.
    """

    name: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Partition:
    """The blocks of a state.

    Attributes:
        types: type and shape of each array, by name; a scalar has one row.
        blocks: pieces of each block. Every save includes the last block.
        moving: names of the arrays whose movement counts, that is, of the parameters.
        sizes: bytes of each block.
    """

    types: Mapping[str, tuple[str, tuple[int, ...]]]
    blocks: Sequence[Sequence[Piece]]
    moving: Sequence[str]
    sizes: Sequence[int]

    @property
    def choices(self) -> int:
        """Number of blocks that can be chosen."""
        return len(self.blocks) - 1

    @property
    def schema(self) -> str:
        """SHA-256 digest of the partition, which distinguishes the stores of different partitions."""
        text = json.dumps([sorted(self.types.items()), self.blocks])
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self, leaves: Mapping[str, jax.Array]) -> None:
        """Compares names, types and shapes of a state with those of the partition; raises StoreError if they differ."""
        types = {name: (str(leaf.dtype), tuple(leaf.shape)) for name, leaf in leaves.items()}
        for name in sorted({*types, *self.types}):
            if types.get(name) != self.types.get(name):
                found, expected = (one.get(name, "nothing") for one in (types, self.types))
                raise StoreError(f"{name} is {found}, but the running checkpoint has {expected}")

    def of(self, names: Sequence[str]) -> list[int]:
        """Returns the numbers of the blocks that contain any of these arrays, or arrays below these paths.

        Raises:
            SettingError: an array does not exist.
        """
        found = set()
        for wanted in names:
            hit = {
                number
                for number, pieces in enumerate(self.blocks)
                for piece in pieces
                if f"{piece.name}/".startswith(f"{wanted}/")
            }
            if not hit:
                some = ", ".join(list(self.types)[:8])
                raise SettingError("names", wanted, f"not found in the state; its arrays include {some}")
            found |= hit
        return sorted(found)


def path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "state"


def named_leaves(state: Any) -> dict[str, jax.Array]:
    """Returns the arrays of a state by path; raises SettingError if a leaf is not a JAX array, or if two leaves have
    the same path."""
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = path_name(path)
        if not isinstance(leaf, jax.Array):
            raise SettingError("state", name, f"is {type(leaf).__name__}; a running checkpoint needs JAX arrays")
        if name in found:
            raise SettingError("state", name, "is the path of two leaves; rename one of them")
        found[name] = leaf
    return found


def partition(
    state: Any, *, moving: str | Callable[[str], bool] = "", by: By = "rows", rows: int | None = None
) -> Partition:
    """Divides a state into blocks.

    Args:
        state: a tree of JAX arrays.
        moving: selects the parameters, by a path such as `params` or by a predicate on the paths of arrays (default:
            all floating-point arrays).
        by: content of a block: `rows` (a number of rows of an array), `shards` (the rows that a device holds), `arrays`
            (a whole array), `layers` (all arrays with the same parent, such as a weight and its bias) or `experts` (for
            arrays with the same parent and first axis, at least one of which has three or more axes: all slices with
            the same index, such as the weights and biases of an expert, or of a layer of a stacked model; every other
            array is one block).
        rows: number of rows per block with `by="rows"` (default: enough for 64 KiB per block and at most 64 blocks per
            array).

    Raises:
        SettingError: a parameter does not exist, or a leaf is not an array.

    Example:
        >>> import jax.numpy as jnp
        >>> from sdc.checkpoints import partition
        >>> state = {"params": {"w": jnp.ones((4, 8))}, "adam": {"mu": {"w": jnp.ones((4, 8))}, "count": jnp.int32(0)}}
        >>> found = partition(state, moving="params", rows=2)
        >>> [[tuple(piece) for piece in block] for block in found.blocks]
        [[('params/w', 0, 2), ('adam/mu/w', 0, 2)], [('params/w', 2, 4), ('adam/mu/w', 2, 4)], [('adam/count', 0, 1)]]
    """
    if by not in get_args(By):
        raise SettingError("by", by, f"expected one of {', '.join(get_args(By))}")
    if rows is not None and (rows < 1 or by != "rows"):
        raise SettingError("rows", rows, "expected at least 1, and only with by='rows'")
    leaves = named_leaves(state)

    def hit(name: str) -> bool:
        return bool(moving(name)) if callable(moving) else not moving or f"{name}/".startswith(f"{moving}/")

    chosen = [name for name, leaf in leaves.items() if hit(name) and jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not chosen:
        raise SettingError(
            "moving", moving, f"no floating-point array matches; the state has {', '.join(leaves)[:200]}"
        )
    companions = _companions(leaves, chosen, moving)
    parents = {name: name.rpartition("/")[0] for name in chosen}
    stacked = {
        (parents[name], row_count(leaves[name])) for name in chosen if by == "experts" and leaves[name].ndim >= 3
    }
    grouped: dict[tuple[str, int, int], list[Piece]] = {}
    for name in chosen:
        array, key = leaves[name], (name, 0)
        count, each = array.shape[0] if array.ndim else 1, max(row_count(array), 1)
        if array.ndim and (parents[name], count) in stacked:
            key, each = (parents[name], count), 1
        elif by == "rows":
            each = rows or cut_of(array).rows
        elif by == "shards" and array.ndim:
            each = max(array.sharding.shard_shape(array.shape)[0], 1)
        elif by == "layers":
            key = (parents[name], -1)
        for start in range(0, max(count, 1), each):
            stop = min(start + each, count)
            pieces = [Piece(one, start, stop) for one in (name, *companions[name])]
            grouped.setdefault((*key, start), []).extend(pieces)
    placed = {piece.name for pieces in grouped.values() for piece in pieces}
    rest = [Piece(name, 0, row_count(leaf)) for name, leaf in leaves.items() if name not in placed]
    blocks = [*grouped.values(), rest]
    types = {name: (str(leaf.dtype), tuple(leaf.shape)) for name, leaf in leaves.items()}
    bits = {name: described(leaf) for name, leaf in leaves.items()}
    counts = {name: max(row_count(leaf), 1) for name, leaf in leaves.items()}
    sizes = [
        sum(bits[one].size * bits[one].dtype.itemsize * (stop - start) // counts[one] for one, start, stop in pieces)
        for pieces in blocks
    ]
    return Partition(types, blocks, chosen, sizes)


def _companions(
    leaves: Mapping[str, jax.Array], chosen: Sequence[str], moving: str | Callable[[str], bool]
) -> dict[str, list[str]]:
    """Returns the companion arrays of each parameter. An array that matches several parameters belongs to the parameter
    with the longest path."""
    tails = {name: name.removeprefix(f"{moving}/") if isinstance(moving, str) else name for name in chosen}
    found: dict[str, list[str]] = {name: [] for name in chosen}
    for other, leaf in leaves.items():
        hits = [name for name in chosen if f"/{other}".endswith(f"/{tails[name]}")]
        if other not in found and hits:
            name = max(hits, key=lambda name: len(tails[name]))
            if leaf.shape == leaves[name].shape:
                found[name].append(other)
    return found


def row_count(array: Any) -> int:
    """Returns the number of rows of an array's data; the data of PRNG keys have one more axis than the keys."""
    bits = described(array)
    return int(bits.shape[0]) if bits.ndim else 1


class Fragment(NamedTuple):
    """A part of a block that one device of this process saves."""

    name: str  # name of the array
    box: Box  # position in the array (in the data, for PRNG keys); rows of a scalar are (0, 1)
    dtype: str  # type of the numbers

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def bytes(self) -> int:
        return volume(self.box) * jnp.dtype(self.dtype).itemsize


def held_by(cut: Partition, leaves: Mapping[str, jax.Array]) -> dict[int, list[Fragment]]:
    """Returns the parts of blocks that this process saves; only the first of several replicas is saved."""
    boxes = {name: [box for box, _, first in _shards(leaf) if first] for name, leaf in leaves.items()}
    types = {name: str(bits_of(leaf).dtype) for name, leaf in leaves.items()}
    found: dict[int, list[Fragment]] = {}
    for number, pieces in enumerate(cut.blocks):
        for piece in pieces:
            for box in boxes[piece.name]:
                part = overlap(box, ((piece.start, piece.stop), *box[1:]))
                if volume(part):
                    found.setdefault(number, []).append(Fragment(piece.name, part, types[piece.name]))
    return found


def fetch(
    held: Mapping[int, Sequence[Fragment]], leaves: Mapping[str, jax.Array]
) -> Callable[[], dict[int, tuple[bytes, tuple[str, ...]]]]:
    """Starts copying parts of blocks to the host, with digests computed on the devices beforehand.

    The arrays may be donated as soon as this function returns. The returned function, which any thread may call, waits
    for the bytes and digests and returns them by block. Raises StoreError if the sharding of an array does not match
    the parts.
    """
    names = {one.name for parts in held.values() for one in parts}
    shards = {name: [(box, data) for box, data, first in _shards(leaves[name]) if first] for name in names}

    def cut(one: Fragment) -> tuple[jax.Array, jax.Array]:
        for box, data in shards[one.name]:
            if overlap(box, one.box) == one.box:
                rows = one.box[0]
                return _slice(data, np.int32(rows[0] - box[0][0]), rows[1] - rows[0])
        raise StoreError(f"{one.name} is sharded differently than at the start; create a new running checkpoint")

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


def shards_here(leaves: Mapping[str, jax.Array]) -> dict[Fragment, jax.Array]:
    """Returns the data of this process's devices, each part once and, if it has several replicas, from the first."""
    found: dict[Fragment, jax.Array] = {}
    for name, leaf in leaves.items():
        for box, data, _ in _shards(leaf):
            found.setdefault(Fragment(name, box, str(data.dtype)), data)
    return found


def _shards(leaf: jax.Array) -> list[tuple[Box, jax.Array, bool]]:
    """Returns the shards of an array on this process's devices, first replicas first: the position and data of each
    shard, and whether it is a first replica."""
    bits = bits_of(leaf)
    found = []
    for shard in sorted(bits.addressable_shards, key=lambda shard: shard.replica_id):
        data = shard.data if bits.ndim else shard.data.reshape(1)
        found.append((box_of(shard.index, bits.shape) or ((0, 1),), data, shard.replica_id == 0))
    return found


def rows_of(array: jax.Array) -> jax.Array:
    """Returns the data of an array, with at least one axis."""
    bits = bits_of(array)
    return bits if bits.ndim else bits.reshape(1)


def parts_of(content: bytes, held: Sequence[Fragment], digests: Sequence[str]) -> list[np.ndarray] | None:
    """Decodes the arrays in the bytes of a block; returns None if any array does not match its digest."""
    found = []
    place = 0
    for one, expected in zip(held, digests, strict=False):
        part = content[place : place + one.bytes]
        if len(part) != one.bytes:
            return None
        array = np.frombuffer(part, jnp.dtype(one.dtype)).reshape(one.shape)
        if digest_text(np.asarray(digest_of(array))) != expected:
            return None
        found.append(array)
        place += one.bytes
    return found if place == len(content) and len(found) == len(held) == len(digests) else None


def digest_text(words: Any) -> str:
    return f"{int(words[0]):08x}{int(words[1]):08x}"


@functools.partial(jax.jit, static_argnums=2)
def _slice(x: jax.Array, start: Any, rows: int) -> tuple[jax.Array, jax.Array]:
    found = lax.dynamic_slice_in_dim(x, start, rows)
    return found, digest(found)


digest_of = jax.jit(digest)  # computed on the array's devices
