"""A state put together after a restart: survivors' own copies, a running checkpoint for what nobody has.

All processes of the run call these functions alike. What they say to each other goes through the runtime's key-value
store; only the numbers that a process lost, and another has, cross the devices.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from sdc.multihost import everyone

from ._partition import Partition, named_leaves
from .blocks import bits_of
from .boxes import Box, box_of, overlap, volume
from .copies import Copies, Copy
from .pieces import Held
from .recovery import Part, Reader, put_back

State = TypeVar("State")
CHUNK = 1 << 26
"""Bytes that cross the devices at once."""


@dataclasses.dataclass(frozen=True)
class Survivors:
    """What is left on the hosts.

    Attributes:
        step: steps done, of all copies that are taken.
        processes: those that have such a copy.
        note: what was noted then.
        mine: this process's copy; None if it is lost.
    """

    step: int
    processes: Sequence[int]
    note: Mapping[str, Any]
    mine: Copy | None


@dataclasses.dataclass(frozen=True)
class Share:
    """Parts of the state that a process got from one source.

    Attributes:
        shards: how many.
        bytes: their size.
    """

    shards: int = 0
    bytes: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(self.shards + other.shards, self.bytes + other.bytes)


@dataclasses.dataclass(frozen=True)
class Gathered(Generic[State]):
    """A state that was put together.

    Attributes:
        state: the state.
        lost: numbers of the blocks of which a part was in no copy.
        bytes: size of these parts in the state.
        read: bytes that were read of the running checkpoint.
        steps: of each block that was read, the step at which it was saved.
        initial: blocks that were never saved, and are as they were at the start.
        older: blocks whose newest version is damaged.
        shares: of each process, from where its shards came: `own`, `peers`, `running`.
    """

    state: State
    lost: Sequence[int]
    bytes: int
    read: int
    steps: Mapping[int, int]
    initial: Sequence[int]
    older: Sequence[int]
    shares: Sequence[Mapping[str, Share]]


def agree(copies: Copies, *, after: int, until: int) -> Survivors | None:
    """The copies to go on from: the newest that all processes share which have any, or else the one that most have.

    Args:
        copies: this process's.
        after: steps from which on copies count.
        until: the last step that does; that of the record.

    Returns:
        The same in all processes, but for `mine`; None if no process has a copy.
    """
    usable = {step for step in copies.steps if after < step <= until}
    while True:
        said = [json.loads(text) for text in everyone(json.dumps(sorted(usable)), at="which copies each has")]
        every = {step for steps in said for step in steps}
        if not every:
            return None
        step = max(every, key=lambda step: (sum(step in steps for steps in said), step))
        mine = copies.read(step) if step in usable else None
        words = [None if mine is None else dict(mine.note), step in usable and mine is None]
        told = [json.loads(text) for text in everyone(json.dumps(words), at="whether its copy is sound")]
        if not any(damaged for _, damaged in told):
            processes = [number for number, (note, _) in enumerate(told) if note is not None]
            return Survivors(step, processes, told[processes[0]][0], mine)
        if mine is None:
            usable.discard(step)


def gather(state: State, survivors: Survivors, cut: Partition, reader: Reader) -> Gathered[State]:
    """The state after the copies' step: each survivor's own shards, its bits for replicas of it, and for what no
    survivor has the blocks of the running checkpoint, each of its own step.

    Args:
        state: any of the run's structure and shardings.
        survivors: what `agree` returned.
        cut: the blocks of the state.
        reader: of the running checkpoint.

    Raises:
        StoreError: a block that is needed has no version that is as it was saved.
    """
    leaves = named_leaves(state)
    living = set(survivors.processes)
    places = _places(leaves)
    sources = {held: min(living & processes, default=None) for held, processes in places.items()}
    lost = [held for held, source in sources.items() if source is None]
    blocks = _blocks(cut, lost)
    found = reader.recover(blocks, state) if blocks else None
    mine = {} if survivors.mine is None else {(name, box): array for name, box, array in survivors.mine.parts}
    for source in sorted(living):
        sent = [held for held in places if sources[held] == source and places[held] - living]
        mine |= _sent(sent, source, mine)
    parts: dict[str, list[Part]] = {}
    for (name, box), array in mine.items():
        parts.setdefault(name, []).append((name, box, array))
    shares: list[dict[str, Share]] = [
        {"own": Share(), "peers": Share(), "running": Share()} for _ in range(jax.process_count())
    ]
    for held, processes in places.items():
        for process in processes:
            way = "running" if sources[held] is None else "own" if process in living else "peers"
            shares[process][way] += Share(1, _bytes(held))
    read = (found.bytes, found.steps, found.initial, found.older) if found is not None else (0, {}, [], [])
    whole = put_back(state if found is None else found.state, parts)
    return Gathered(whole, blocks, sum(map(_bytes, lost)), *read, shares)


def _places(leaves: Mapping[str, jax.Array]) -> dict[Held, set[int]]:
    """Every shard of every array, in the same order in all processes, and the processes whose devices hold it."""
    found: dict[Held, set[int]] = {}
    for name, leaf in leaves.items():
        bits = bits_of(leaf)
        places: Mapping[jax.Device, Any] = bits.sharding.devices_indices_map(bits.shape)
        for device in sorted(places, key=lambda device: int(device.id)):
            box = box_of(places[device], bits.shape) or ((0, 1),)
            found.setdefault(Held(name, box, str(bits.dtype)), set()).add(device.process_index)
    return found


def _blocks(cut: Partition, lost: Sequence[Held]) -> list[int]:
    """Numbers of the blocks that hold any of these parts."""
    boxes: dict[str, list[Box]] = {}
    for held in lost:
        boxes.setdefault(held.name, []).append(held.box)
    return [
        number
        for number, pieces in enumerate(cut.blocks)
        if any(
            volume(overlap(box, ((piece.start, piece.stop), *box[1:])))
            for piece in pieces
            for box in boxes.get(piece.name, ())
        )
    ]


def _sent(
    sent: Sequence[Held], source: int, mine: Mapping[tuple[str, Box], np.ndarray]
) -> dict[tuple[str, Box], np.ndarray]:
    """Shards that one process has and another lost, in all processes. Bits move, not numbers: a sum of floats would
    turn -0.0 into 0.0, and mix the payloads of NaNs."""
    size = sum(map(_bytes, sent))
    if not size:
        return {}
    has = jax.process_index() == source
    content = np.zeros(-(-size // 4) * 4, np.uint8)
    if has:
        np.concatenate([_flat(mine[held.name, held.box]) for held in sent], out=content[:size])
    words = content.view(np.uint32)
    for start in range(0, len(words), CHUNK // 4):
        part = words[start : start + CHUNK // 4]
        part[:] = multihost_utils.broadcast_one_to_all(part, is_source=has)
    found, place = {}, 0
    for held in sent:
        numbers = content[place : place + _bytes(held)].tobytes()
        found[held.name, held.box] = np.frombuffer(numbers, _dtype(held)).reshape(held.shape)
        place += _bytes(held)
    return found


def _flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _dtype(held: Held) -> np.dtype[Any]:
    return jax.numpy.dtype(held.dtype)


def _bytes(held: Held) -> int:
    return _dtype(held).itemsize * volume(held.box)
