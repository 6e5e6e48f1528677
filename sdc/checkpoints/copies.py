"""Local copies of the data on a process's devices, from which the process restores its data if another process is lost.

    FOLDER/STEP/pieces       the concatenated shards
    FOLDER/STEP/copy.json    the process, the position and digest of each shard, and a code that only this run can make

A copy is written under a temporary name and then renamed, so it is either complete or absent. The last two copies are
kept: if a process is lost during a step, some survivors may already have a copy of this step, and all survivors have a
copy of the previous step.

After a restart, all processes assemble a state (`agree`, `gather`) from the copies of the survivors; blocks without a
copy come from a running checkpoint. Processes communicate through the runtime's key-value store; only arrays that one
process lost and another process still has are transferred between devices.
"""

import contextlib
import dataclasses
import hmac
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from ..multihost import everyone
from ..records import Format, RecordError, endless, own_folder, reason, to_json, write_bytes
from ..schema import Header
from ..text import NOTHING
from ..twins import ALGORITHM
from .blocks import Box, bits_of, box_of
from .partitions import Fragment, Partition, digest_of, digest_text, named_leaves, parts_of, shards_here
from .recovery import Part, Reader, Recovered, put_back
from .store import KEPT

LOG = logging.getLogger("sdc.checkpoints")
PIECES, COPY, NEW = "pieces", "copy.json", ".new"


@dataclasses.dataclass(frozen=True)
class Copy:
    """The data of this process's devices after a step."""

    step: int  # steps done
    note: Mapping[str, Any]
    parts: Sequence[Part]  # each shard once


class Description(Header, kw_only=True, tag="jax-sdc local copy"):
    """Description of the pieces of a copy."""

    algorithm: str = ALGORITHM
    process: int
    processes: int
    held: list[Fragment]
    step: int
    note: dict[str, Any]
    digests: list[str]
    code: str = ""  # HMAC-SHA256 of everything else with the key of the run

    def coded(self, key: str) -> "Description":
        """Returns the same description with the code that belongs to it."""
        bare = msgspec.structs.replace(self, code="")
        code = hmac.new(key.encode(), msgspec.json.encode(bare), "sha256").hexdigest()
        return msgspec.structs.replace(bare, code=code)


class CopiesFolder(Header, kw_only=True, tag="jax-sdc folder of local copies"):
    """The folder of a process's copies, and the key that identifies copies of the run."""

    folder: str
    key: str


DESCRIPTIONS = Format(type=Description, noun="description of a copy", remedy="delete that folder")
FOLDERS = Format(type=CopiesFolder, noun="folder of local copies", remedy="delete that file")


def copies_folder(record: Path, parent: Path) -> CopiesFolder:
    """Returns the folder below `parent` for a process's copies, and their key, and stores them in the file `record`.

    Other users can neither predict nor access the folder, and cannot forge copies without the key. A process that
    restarts on the same host finds the same folder; on another host, it gets a new one.
    """
    key = secrets.token_hex(32)
    if record.exists():
        try:
            found = FOLDERS.read(record)
            key = found.key
            if Path(found.folder).parent == parent and Path(found.folder).is_dir():
                own_folder(found.folder)
                return found
        except (OSError, RecordError) as error:
            LOG.warning("local copies of an earlier process cannot be used (%s)", error)
    made = CopiesFolder(folder=str(parent / f"sdc-copies-{secrets.token_hex(8)}"), key=key)
    with contextlib.suppress(OSError):  # without the file, a restarted process does not find its copies
        write_bytes(record, FOLDERS.encode(made), mode=0o600)
    return made


class Copies:
    """The copies of one process. This class never waits for another process and never reads another process's files."""

    def __init__(self, folder: str | os.PathLike[str], key: str, state: Any) -> None:
        """Sets the folder, which must be on this process's host and used by no other process; nothing is written before
        the first copy.

        `key` is a secret of the run; copies that were made without it are never used. Copies have the structure of
        `state`.
        """
        self.folder, self._key = Path(folder), key
        self._held = list(shards_here(named_leaves(state)))
        self._mine: dict[str, Any] = {
            "algorithm": ALGORITHM,
            "process": jax.process_index(),
            "processes": jax.process_count(),
            "held": self._held,
        }
        self._pool = ThreadPoolExecutor(1, "sdc-local-copies")
        self._writing: Future[None] | None = None

    @classmethod
    def recorded(cls, record: Path, parent: Path, state: Any) -> "Copies":
        """Returns the copies in a private folder below `parent`, which the file `record` remembers with its key."""
        place = copies_folder(record, parent)
        return cls(place.folder, place.key, state)

    def save(self, state: Any, step: int, note: Mapping[str, Any] = NOTHING) -> None:
        """Copies this process's shards to the host, and writes them in the background. The state may be donated as soon
        as this method returns.

        Digests are computed on the devices before anything is copied. If the disk is full, an error is logged, and
        earlier copies are kept.
        """
        self.wait()
        shards = shards_here(named_leaves(state))
        digests = [digest_of(data) for data in shards.values()]
        for data in shards.values():
            data.copy_to_host_async()
        # Copies, not views: on a CPU, views would refer to memory that the next step reuses.
        arrays = [np.array(data) for data in shards.values()]
        texts = [digest_text(np.asarray(digest)) for digest in digests]
        about = Description(**self._mine | {"held": list(shards)}, step=step, note=to_json(note), digests=texts)
        about = about.coded(self._key)
        self._writing = self._pool.submit(self._write, arrays, about)

    def wait(self) -> bool:
        """Waits for the pending copy, and returns whether it was written."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
            return True
        except (OSError, RecordError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            LOG.error("no copy could be written to %s (%s); training continues without one", self.folder, why)
            return False

    @property
    def steps(self) -> list[int]:
        """Steps for which this run has a copy of the right size."""
        return [step for step in (int(path.name) for path in self._places()) if self._described(step) is not None]

    def read(self, step: int) -> Copy | None:
        """Reads a copy if all its digests match; otherwise logs the reason and returns None."""
        if (about := self._described(step)) is None:
            return None
        parts: list[Part] = []
        try:
            with (self.folder / str(step) / PIECES).open("rb") as file:
                for one, digest in zip(self._held, about.digests, strict=True):
                    content = file.read(one.bytes)
                    if (found := parts_of(content, [one], [digest])) is None:
                        raise ValueError(f"{one.name} does not match the digest that was computed on the device")
                    parts.append((one.name, one.box, found[0]))
            return Copy(step, about.note, parts)
        except (OSError, ValueError) as error:
            LOG.warning("the copy of step %d in %s is damaged (%s); continuing without it", step, self.folder, error)
            return None

    def drop(self, after: int) -> None:
        """Deletes copies of later steps after a rollback."""
        self.wait()
        for path in self._places():
            if int(path.name) > after:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Deletes all copies after the end of the run."""
        self.wait()
        with contextlib.suppress(OSError):
            shutil.rmtree(own_folder(self.folder), ignore_errors=True)

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()

    def _places(self) -> list[Path]:
        """Returns the folders of copies, oldest first."""
        try:
            paths = own_folder(self.folder).iterdir() if self.folder.is_dir() else ()
        except OSError as error:
            LOG.warning("copies in %s cannot be used (%s)", self.folder, reason(error))
            return []
        return sorted((path for path in paths if path.name.isdecimal()), key=lambda path: int(path.name))

    def _described(self, step: int) -> Description | None:
        """Reads the description of a copy; returns None if the copy is damaged or belongs to another run or state."""
        place = self.folder / str(step)
        try:
            about = DESCRIPTIONS.read(place / COPY)
            if (what := endless(place / PIECES)) is not None:
                raise RecordError(f"{place / PIECES} is {what}, not a file")
            size = (place / PIECES).stat().st_size
        except (RecordError, OSError) as error:
            LOG.warning("the copy of step %d in %s is damaged (%s); continuing without it", step, self.folder, error)
            return None
        expected = {**self._mine, "step": step}
        differ = [name for name, value in expected.items() if getattr(about, name) != value]
        if not hmac.compare_digest(about.code, about.coded(self._key).code):
            differ.append("key")
        if differ:
            LOG.warning("%s is a copy of another run or state (%s); continuing without it", place, ", ".join(differ))
            return None
        if size != sum(one.bytes for one in self._held):
            LOG.warning("the copy of step %d in %s is truncated; continuing without it", step, self.folder)
            return None
        return about

    def _write(self, arrays: Sequence[np.ndarray], about: Description) -> None:
        folder = own_folder(self.folder)
        for left in folder.iterdir():
            if left.suffix == NEW and left.stem.isdecimal():  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)
        place, beside = folder / str(about.step), folder / f"{about.step}{NEW}"
        beside.mkdir()
        try:
            with (beside / PIECES).open("wb") as file:
                for array in arrays:
                    file.write(array.reshape(-1).view(np.uint8).data)
            DESCRIPTIONS.write(beside / COPY, about)
            shutil.rmtree(place, ignore_errors=True)  # left from before a rollback
            beside.rename(place)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        for old in self._places()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


State = TypeVar("State")
CHUNK = 1 << 26  # bytes transferred between devices at once


@dataclasses.dataclass(frozen=True)
class Survivors:
    """The surviving copies."""

    step: int  # steps done, common to all used copies
    processes: Sequence[int]  # processes that have such a copy
    note: Mapping[str, Any]
    mine: Copy | None  # this process's copy; None if it is lost


@dataclasses.dataclass(frozen=True)
class Assembled(Generic[State]):
    """An assembled state."""

    recovered: Recovered[State]  # the state, and the parts read from the running checkpoint
    lost: Sequence[int]  # numbers of the blocks that no copy covered completely
    bytes: int  # size of the missing parts
    shares: Sequence[
        Mapping[str, Mapping[str, int]]
    ]  # for each process: `shards` and `bytes` by source (`own`, `peers`, `running`)


def agree(copies: Copies, *, after: int, until: int) -> Survivors | None:
    """Chooses the step from whose copies training resumes: the newest step of which all survivors have a copy, or, if
    no step has a copy from all, the step of which the largest number of survivors have a copy.

    Only steps later than `after` and at most `until` are considered. Returns None if there are no such copies. The
    result is the same in all processes except for `mine`.
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
        answers = [json.loads(text) for text in everyone(json.dumps(words), at="whether its copy is sound")]
        if not any(damaged for _, damaged in answers):
            processes = [number for number, (note, _) in enumerate(answers) if note is not None]
            return Survivors(step, processes, answers[processes[0]][0], mine)
        if mine is None:
            usable.discard(step)


def gather(state: State, survivors: Survivors, cut: Partition, reader: Reader) -> Assembled[State]:
    """Assembles the state as of the step of the copies. Survivors keep their own shards, and send them to processes
    that lost the same shards. Blocks that are missing from all survivors are read from the running checkpoint, each as
    it was last saved. `state` is any state of the same structure.
    """
    leaves = named_leaves(state)
    living = set(survivors.processes)
    places = _places(leaves)
    sources = {held: min(living & processes, default=None) for held, processes in places.items()}
    lost = [held for held, source in sources.items() if source is None]
    rows: dict[str, list[tuple[int, int]]] = {}
    for held in lost:
        rows.setdefault(held.name, []).append(held.box[0])
    blocks = [
        number
        for number, pieces in enumerate(cut.blocks)
        if any(one.start < stop and start < one.stop for one in pieces for start, stop in rows.get(one.name, ()))
    ]
    found = reader.recover(blocks, state) if blocks else Recovered(state, {}, [], [], [], 0)
    mine = {} if survivors.mine is None else {(name, box): array for name, box, array in survivors.mine.parts}
    for source in sorted(living):
        sent = [held for held in places if sources[held] == source and places[held] - living]
        mine |= _sent(sent, source, mine)
    whole = put_back(found.state, [(name, box, array) for (name, box), array in mine.items()])
    ways = ("own", "peers", "running")
    shares = [{way: {"shards": 0, "bytes": 0} for way in ways} for _ in range(jax.process_count())]
    for held, processes in places.items():
        for process in processes:
            way = "running" if sources[held] is None else "own" if process in living else "peers"
            shares[process][way]["shards"] += 1
            shares[process][way]["bytes"] += held.bytes
    recovered = dataclasses.replace(found, state=whole)
    return Assembled(recovered, blocks, sum(held.bytes for held in lost), shares)


def _places(leaves: Mapping[str, jax.Array]) -> dict[Fragment, set[int]]:
    """Returns, for each shard of each array, the processes whose devices hold it; the order is the same in all
    processes."""
    found: dict[Fragment, set[int]] = {}
    for name, leaf in leaves.items():
        bits = bits_of(leaf)
        places: Mapping[jax.Device, Any] = bits.sharding.devices_indices_map(bits.shape)
        for device in sorted(places, key=lambda device: int(device.id)):
            box = box_of(places[device], bits.shape) or ((0, 1),)
            found.setdefault(Fragment(name, box, str(bits.dtype)), set()).add(device.process_index)
    return found


def _sent(
    sent: Sequence[Fragment], source: int, mine: Mapping[tuple[str, Box], np.ndarray]
) -> dict[tuple[str, Box], np.ndarray]:
    """Sends to all processes the shards that one process has and another has lost. Bits are transferred as integers,
    because a sum of floats would turn -0.0 into 0.0 and mix the payloads of NaNs."""
    size = sum(held.bytes for held in sent)
    if not size:
        return {}
    has = jax.process_index() == source
    content = np.zeros(-(-size // 4) * 4, np.uint8)
    if has:
        arrays = (np.ascontiguousarray(mine[held.name, held.box]) for held in sent)
        np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays], out=content[:size])
    words = content.view(np.uint32)
    for start in range(0, len(words), CHUNK // 4):
        part = words[start : start + CHUNK // 4]
        part[:] = multihost_utils.broadcast_one_to_all(part, is_source=has)
    found, place = {}, 0
    for held in sent:
        numbers = content[place : place + held.bytes].tobytes()
        found[held.name, held.box] = np.frombuffer(numbers, jax.numpy.dtype(held.dtype)).reshape(held.shape)
        place += held.bytes
    return found
