"""Copies of what a process's devices hold, on its own host: if another process is lost, this one reads its own back.

    FOLDER/STEP/pieces       the shards, one after the other
    FOLDER/STEP/copy.json    of which run and process, and for each shard where it lies and its digest

A copy is written beside its place and renamed, so that it is whole or not there. The last two stay: of a step that one
process was lost in, another may have one already, and all have the one before.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdc.records import RecordError
from sdc.text import NOTHING

from ..records import read_json, reason, write_sealed
from ..twins import ALGORITHM
from ._partition import named_leaves
from .boxes import volume
from .pieces import Held, digest_of, digest_text, parts_of, shards_here
from .recovery import Part
from .store import KEPT

LOG = logging.getLogger("sdc.checkpoints")
FORMAT = 1
"""Of the files."""
PIECES, COPY = "pieces", "copy.json"


@dataclasses.dataclass(frozen=True)
class Copy:
    """What the devices of this process held after a step.

    Attributes:
        step: steps done.
        note: what was noted then.
        parts: every shard once.
    """

    step: int
    note: Mapping[str, Any]
    parts: Sequence[Part]


class Copies:
    """The copies of one process. They are its own: nothing here waits for another process, or reads what it wrote."""

    def __init__(self, folder: str | os.PathLike[str], run: str, state: Any) -> None:
        """Names the place; nothing is written before the first copy.

        Args:
            folder: on this host, of this process alone.
            run: what tells the run from others; a copy of another one is never taken.
            state: of the structure, shapes, types and shardings that copies have.
        """
        self.folder = Path(folder)
        self._held = list(shards_here(named_leaves(state)))
        self._told = {
            "format": FORMAT, "algorithm": ALGORITHM, "run": run, "process": jax.process_index(),
            "processes": jax.process_count(),
        }  # fmt: skip
        self._pool = ThreadPoolExecutor(1, "sdc-local-copies")
        self._writing: Future[None] | None = None

    def save(self, state: Any, step: int, note: Mapping[str, Any] = NOTHING) -> None:
        """Copies this process's shards to the host, and writes them in the background. The state may be donated then.

        Digests are taken on the devices, before anything is copied. Where the disk is full, the log says so, and the
        copies before stay.
        """
        self.wait()
        shards = shards_here(named_leaves(state))
        digests = [digest_of(data) for data in shards.values()]
        for data in shards.values():
            data.copy_to_host_async()
        # No views: on a CPU they would be of the memory that the next step takes over.
        arrays = [np.array(data) for data in shards.values()]
        texts = [digest_text(np.asarray(digest)) for digest in digests]
        self._writing = self._pool.submit(self._write, list(shards), arrays, texts, step, note)

    def wait(self) -> bool:
        """Waits until the copy that is being written is, and says whether it could be."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
            return True
        except (OSError, RecordError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            LOG.error("no copy could be written to %s (%s); the training goes on without it", self.folder, why)
            return False

    @property
    def steps(self) -> list[int]:
        """Steps of the copies of this run that are there, whole as far as their sizes tell."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(step for step in map(int, filter(str.isdecimal, names)) if self._described(step) is not None)

    def read(self, step: int) -> Copy | None:
        """A copy, if all of it is as it was on the devices; else the log says why it is none."""
        if (told := self._described(step)) is None:
            return None
        parts: list[Part] = []
        try:
            with (self.folder / str(step) / PIECES).open("rb") as file:
                for one, digest in zip(self._held, told["digests"], strict=True):
                    content = file.read(volume(one.box) * jnp.dtype(one.dtype).itemsize)
                    if (found := parts_of(content, [one], [digest])) is None:
                        raise ValueError(f"{one.name} is not what it was on the device")
                    parts.append((one.name, one.box, found[0]))
            return Copy(step, told["note"], parts)
        except (OSError, ValueError, KeyError, TypeError) as error:
            LOG.warning("the copy of step %d in %s is damaged (%s); going on without it", step, self.folder, error)
            return None

    def drop(self, after: int) -> None:
        """Deletes copies of later steps, which the run has gone back behind."""
        self.wait()
        for path in self._places():
            if int(path.name) > after:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Deletes all of them: the run is done."""
        self.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other processes of this host have theirs in it
            self.folder.parent.rmdir()

    def close(self) -> None:
        """Waits for the copy that is being written."""
        self.wait()
        self._pool.shutdown()

    def _places(self) -> list[Path]:
        """Folders of copies, the oldest first."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in paths if path.name.isdecimal()), key=lambda path: int(path.name))

    def _described(self, step: int) -> dict[str, Any] | None:
        """What a copy says of itself; None if it is damaged, or of another run or state."""
        place = self.folder / str(step)
        try:
            told = read_json(place / COPY, sealed=True)
            size = (place / PIECES).stat().st_size
        except (RecordError, OSError) as error:
            LOG.warning("the copy of step %d in %s is damaged (%s); going on without it", step, self.folder, error)
            return None
        expected = {**self._told, "step": step, "held": [one.plain for one in self._held]}
        if differ := [name for name, value in expected.items() if told.get(name) != value]:
            LOG.warning("%s is a copy of another run or state (%s); going on without it", place, ", ".join(differ))
            return None
        if size != sum(volume(one.box) * jnp.dtype(one.dtype).itemsize for one in self._held):
            LOG.warning("the copy of step %d in %s is cut off; going on without it", step, self.folder)
            return None
        return told

    def _write(
        self, held: Sequence[Held], arrays: Sequence[np.ndarray], digests: Sequence[str], step: int, note: Any
    ) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self.folder.glob(".*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        place, beside = self.folder / str(step), Path(tempfile.mkdtemp(dir=self.folder, prefix="."))
        try:
            with (beside / PIECES).open("wb") as file:
                for array in arrays:
                    file.write(array.reshape(-1).view(np.uint8).data)
            told = {"step": step, "note": dict(note), "held": [one.plain for one in held], "digests": list(digests)}
            write_sealed(beside / COPY, {**self._told, **told})
            shutil.rmtree(place, ignore_errors=True)  # of the time before, if the run went back
            beside.rename(place)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        for old in self._places()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
