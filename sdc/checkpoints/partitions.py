"""How a state is cut into the blocks that a running checkpoint chooses among.

A block is so many rows (indices of the first axis) of one array, or of several that belong together. Arrays of an
optimizer that are shaped as a parameter, and whose path ends with that parameter's (Adam's moments, for instance), go
with the rows of the parameter. What is left, as counters and keys, is the last block, which is saved every time.

The parts of blocks that a process holds (`Fragment`) travel from devices to bytes, and back.
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
from .blocks import Box, bits_of, box_of, cut_of, overlap, volume
from .certificate import StoreError

By: TypeAlias = Literal["rows", "shards", "experts", "layers", "arrays"]


class Piece(NamedTuple):
    """Rows of an array.

    Attributes:
        name: of the array.
        start: first row.
        stop: the one behind the last.
    """

    name: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Partition:
    """The blocks of a state.

    Attributes:
        types: type and shape of each array, by name; a scalar has one row.
        blocks: pieces of each block. The last one is saved every time.
        moving: names of the arrays whose movement counts: the parameters.
        sizes: bytes of each block.
    """

    types: Mapping[str, tuple[str, tuple[int, ...]]]
    blocks: Sequence[Sequence[Piece]]
    moving: Sequence[str]
    sizes: Sequence[int]

    @property
    def choices(self) -> int:
        """Number of blocks to choose among."""
        return len(self.blocks) - 1

    @property
    def schema(self) -> str:
        """SHA-256 of all this, by which stores are told apart."""
        text = json.dumps([sorted(self.types.items()), self.blocks])
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self, leaves: Mapping[str, jax.Array]) -> None:
        """Compares names, types and shapes of a state; a StoreError if it is another one."""
        types = {name: (str(leaf.dtype), tuple(leaf.shape)) for name, leaf in leaves.items()}
        for name in sorted({*types, *self.types}):
            if types.get(name) != self.types.get(name):
                found, expected = (one.get(name, "nothing") for one in (types, self.types))
                raise StoreError(f"{name} is {found}, and the running checkpoint has {expected} there")

    def of(self, names: Sequence[str]) -> list[int]:
        """Numbers of the blocks that hold any of these arrays, or arrays below these paths.

        Raises:
            SettingError: there is no such array.
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
                raise SettingError("names", wanted, f"the state has no such array; it has {some}")
            found |= hit
        return sorted(found)


def path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "state"


def named_leaves(state: Any) -> dict[str, jax.Array]:
    """The arrays of a state by their paths; a SettingError where a leaf is none, or two have the same path."""
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = path_name(path)
        if not isinstance(leaf, jax.Array):
            raise SettingError("state", name, f"is {type(leaf).__name__}, and a running checkpoint holds JAX arrays")
        if name in found:
            raise SettingError("state", name, "stands there twice")
        found[name] = leaf
    return found


def partition(
    state: Any, *, moving: str | Callable[[str], bool] = "", by: By = "rows", rows: int | None = None
) -> Partition:
    """Cuts a state into blocks.

    Args:
        state: a tree of JAX arrays.
        moving: the parameters: a path such as `params`, or what says yes to the paths of their arrays; by default all
            arrays of floating-point numbers.
        by: `rows`: so many rows of each array; `shards`: the rows that a device holds; `arrays`: each whole; `layers`:
            all arrays with the same parent, as a weight and its bias, together; `experts`: of arrays with the same
            parent and first axis, of which one has three axes or more, all that has the same index, as the weights and
            biases of an expert, or of a layer of a stacked model; other arrays whole.
        rows: rows of a block, with `rows`. By default as many as make 64 KiB, and at most 64 blocks of an array.

    Raises:
        SettingError: there is no such parameter, or a leaf is no array.

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
        raise SettingError("rows", rows, "expected at least 1, and blocks by rows")
    leaves = named_leaves(state)

    def hit(name: str) -> bool:
        return bool(moving(name)) if callable(moving) else not moving or f"{name}/".startswith(f"{moving}/")

    chosen = [name for name, leaf in leaves.items() if hit(name) and jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not chosen:
        raise SettingError("moving", moving, f"no array of floating-point numbers; there are {', '.join(leaves)[:200]}")
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
    bits = {name: jax.eval_shape(bits_of, leaf) for name, leaf in leaves.items()}
    counts = {name: max(row_count(leaf), 1) for name, leaf in leaves.items()}
    sizes = [
        sum(bits[one].size * bits[one].dtype.itemsize * (stop - start) // counts[one] for one, start, stop in pieces)
        for pieces in blocks
    ]
    return Partition(types, blocks, chosen, sizes)


def _companions(
    leaves: Mapping[str, jax.Array], chosen: Sequence[str], moving: str | Callable[[str], bool]
) -> dict[str, list[str]]:
    """Of each parameter the arrays that go with it. One that could go with several goes with the longest path."""
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
    """Of an array's numbers: a PRNG key has several."""
    bits = jax.eval_shape(bits_of, array)
    return int(bits.shape[0]) if bits.ndim else 1


class Fragment(NamedTuple):
    """A part of a block that one device of this process saves."""

    name: str  # of the array
    box: Box  # where it lies in the array (in its data, for PRNG keys); rows of a scalar are (0, 1)
    dtype: str  # of its numbers

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def bytes(self) -> int:
        return volume(self.box) * jnp.dtype(self.dtype).itemsize


def held_by(cut: Partition, leaves: Mapping[str, jax.Array]) -> dict[int, list[Fragment]]:
    """The parts of blocks that this process saves: of replicas the first one's."""
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
    """Starts copying parts of blocks to the host, with digests that the devices take before.

    The arrays may be donated as soon as this returns. What it returns waits, in any thread, for bytes and digests by
    block. An array that is sharded otherwise than the parts say is a StoreError.
    """
    names = {one.name for parts in held.values() for one in parts}
    shards = {name: [(box, data) for box, data, first in _shards(leaves[name]) if first] for name in names}

    def cut(one: Fragment) -> tuple[jax.Array, jax.Array]:
        for box, data in shards[one.name]:
            if overlap(box, one.box) == one.box:
                rows = one.box[0]
                return _slice(data, np.int32(rows[0] - box[0][0]), rows[1] - rows[0])
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


def shards_here(leaves: Mapping[str, jax.Array]) -> dict[Fragment, jax.Array]:
    """What this process's devices hold, each part once: of replicas the first one's."""
    found: dict[Fragment, jax.Array] = {}
    for name, leaf in leaves.items():
        for box, data, _ in _shards(leaf):
            found.setdefault(Fragment(name, box, str(data.dtype)), data)
    return found


def _shards(leaf: jax.Array) -> list[tuple[Box, jax.Array, bool]]:
    """What this process's devices hold of an array, first replicas first: where, the numbers, and whether it is one."""
    bits = bits_of(leaf)
    found = []
    for shard in sorted(bits.addressable_shards, key=lambda shard: shard.replica_id):
        data = shard.data if bits.ndim else shard.data.reshape(1)
        found.append((box_of(shard.index, bits.shape) or ((0, 1),), data, shard.replica_id == 0))
    return found


def rows_of(array: jax.Array) -> jax.Array:
    """The numbers of an array, with one axis at least."""
    bits = bits_of(array)
    return bits if bits.ndim else bits.reshape(1)


def parts_of(content: bytes, held: Sequence[Fragment], digests: Sequence[str]) -> list[np.ndarray] | None:
    """The arrays in the bytes of a block; None if any is not what it was on the device."""
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


digest_of = jax.jit(digest)  # taken where the array is
