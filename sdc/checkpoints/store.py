"""The files of a running checkpoint: versions of blocks, and manifests that list the valid versions.

    FOLDER/process-N/layout.json         the composition of this process's blocks
    FOLDER/process-N/blocks/B.S          block B as written by save S: its concatenated pieces
    FOLDER/process-N/manifests/S.json    after save S: version, step and digests of each block
    FOLDER/seal.json                     the last save completed by all processes; 0 before the first save

A save first writes new versions next to the old versions, then the manifest, and finally the seal. Until the seal is
written, the previous save is valid. The last two versions of each block and the last two manifests are kept, so that a
damaged file has a predecessor. All other files are deleted, so a store contains two versions of each block and the
versions that are being written. TensorStore reads and writes the blocks, on local disks and object stores.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorstore as ts
from etils import epath

from ..records import Format, RecordError, endless, reason, to_json
from ..schema import Header
from ..text import NOTHING
from ..twins import ALGORITHM
from .certificate import StoreError
from .partitions import Fragment

LOG = logging.getLogger("sdc.checkpoints")
KEPT = 2  # number of manifests, and versions of a block, to keep
SEAL, LAYOUT = "seal.json", "layout.json"


class Version(NamedTuple):
    """A saved version of a block."""

    save: int  # number of the save
    step: int  # steps done at the save
    digests: tuple[str, ...]  # digests of its pieces


Versions: TypeAlias = dict[int, tuple[Version, ...]]  # by block, the newest first


class StoreLayout(Header, kw_only=True, tag="jax-sdc layout of a running checkpoint"):
    """The composition of one process's blocks."""

    algorithm: str = ALGORITHM
    partition: str  # SHA-256, which distinguishes stores
    processes: int
    blocks: dict[str, list[Fragment]]


class StoreManifest(Header, kw_only=True, tag="jax-sdc manifest of a running checkpoint"):
    """The blocks of one process after a save."""

    save: int
    step: int
    note: dict[str, Any]
    versions: dict[str, tuple[Version, ...]]

    @property
    def blocks(self) -> Versions:
        return {int(block): several for block, several in self.versions.items()}


class Seal(Header, kw_only=True, tag="jax-sdc seal of a running checkpoint"):
    """The last save completed by all processes."""

    save: int
    step: int
    processes: int


REMEDY = "restore the file, or delete the running checkpoint"
LAYOUTS = Format(type=StoreLayout, noun="layout of a running checkpoint", remedy=REMEDY)
MANIFESTS = Format(type=StoreManifest, noun="manifest of a running checkpoint", remedy=REMEDY)
SEALS = Format(type=Seal, noun="seal of a running checkpoint", remedy=REMEDY)


class Store:
    """The files of one process. This class is independent of devices, because pieces are bytes."""

    def __init__(self, folder: epath.Path, process: int) -> None:
        self.folder = folder
        self.place = folder / f"process-{process}"
        self.process = process
        place = f"{self.place}".rstrip("/") + "/"  # a local path may have characters that are invalid in a URL
        self._blocks = ts.KvStore.open(place if "://" in place else {"driver": "file", "path": place}).result()
        self._asked: dict[str, Any] = {}
        self.versions: Versions = {}  # of each block that was ever saved, from the last manifest
        self._doubtful: set[str] = set()

    def create(self, layout: StoreLayout) -> None:
        """Writes the layout of the blocks, or compares it with the existing layout; raises StoreError if the layouts
        differ."""
        path = self.place / LAYOUT
        if not path.exists():
            self.place.mkdir(parents=True, exist_ok=True)
            LAYOUTS.write(path, layout)
            return
        try:
            there = self.layout()
        except (
            StoreError
        ) as error:  # a damaged layout can be rewritten, since digests show whether blocks belong to this state
            if (saves := self.saves()) and all(self.known(save) is None for save in saves):
                raise  # the whole store is of another version
            LOG.warning("%s; rewriting it", error)
            LAYOUTS.write(path, layout)
            return
        for field in ("algorithm", "partition", "processes", "blocks"):
            if getattr(there, field) != getattr(layout, field):
                raise StoreError(
                    f"{self.place} is a running checkpoint of another state ({field} differs); give another folder, or "
                    "delete this one"
                )

    def layout(self) -> StoreLayout:
        try:
            return LAYOUTS.read(self.place / LAYOUT)
        except RecordError as error:
            raise StoreError(str(error)) from error

    def saves(self) -> list[int]:
        """Returns the numbers of the existing manifests."""
        place = self.place / "manifests"
        names = (path.name.removesuffix(".json") for path in place.iterdir()) if place.is_dir() else ()
        return sorted(int(name) for name in names if name.isdecimal())

    def manifest(self, save: int) -> StoreManifest:
        try:
            found = MANIFESTS.read(self._manifest(save))
        except RecordError as error:
            raise StoreError(str(error)) from error
        if found.save != save or not all(map(str.isdecimal, found.versions)):
            raise StoreError(f"{self._manifest(save)} belongs to save {found.save}, or has blocks without numbers")
        return found

    def newest(self, until: int) -> StoreManifest:
        """Returns the newest readable manifest of this save or an earlier one."""
        for save in [until, *(one for one in sorted(self.saves(), reverse=True) if one < until)]:
            try:
                return self.manifest(save)
            except StoreError as error:
                LOG.warning("%s; using the previous manifest", error)
        raise StoreError(f"{self.place} has no readable manifest of save {until} or an earlier save")

    def _manifest(self, save: int) -> epath.Path:
        return self.place / "manifests" / f"{save}.json"

    def write(
        self,
        save: int,
        step: int,
        blocks: Mapping[int, tuple[bytes, tuple[str, ...]]],
        note: Mapping[str, Any] = NOTHING,
    ) -> int:
        """Writes blocks (bytes and digests of their pieces) and then the manifest; returns the number of bytes written.

        The previous versions are valid until the manifest is written, and remain valid if this method raises
        StoreError.
        """
        new = {block: Version(save, step, digests) for block, (_, digests) in blocks.items()}
        versions = self.versions | {block: (one, *self.versions.get(block, ()))[:KEPT] for block, one in new.items()}
        named = {str(block): several for block, several in versions.items()}
        manifest = StoreManifest(save=save, step=step, note=to_json(note), versions=named)
        path = self._manifest(save)
        try:
            writing = [self._blocks.write(_key(block, save), content) for block, (content, _) in blocks.items()]
            for one in writing:
                one.result()
            path.parent.mkdir(parents=True, exist_ok=True)
            MANIFESTS.write(path, manifest)
        except (OSError, ValueError) as error:  # TensorStore raises the latter for any storage error
            with contextlib.suppress(OSError, ValueError):
                self._delete([_key(block, save) for block in blocks])
            why = reason(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
            raise StoreError(f"cannot write to {self.place} ({why}); earlier saves are still available") from error
        self.versions = versions
        return sum(len(content) for content, _ in blocks.values()) + path.stat().length

    def last(self) -> int:
        """Returns the highest number of a save that left a manifest or a block, or 0. Even if files of that save are
        missing, it may have been completed."""
        numbers = (key.rpartition(".")[2] for key in self.keys())
        return max([*self.saves(), *(int(number) for number in numbers if number.isdecimal())], default=0)

    def reclaim(self) -> None:
        """Deletes all files except those of the last manifests and of the sealed save."""
        saves = self.saves()
        seal = read_seal(self.folder)
        sealed = [save for save in saves if seal is not None and save <= seal.save]
        kept = sorted({*saves[-KEPT:], *sealed[-KEPT:]})
        known = [versions for save in kept if (versions := self.known(save)) is not None]
        if len(known) < len(kept):
            return  # the files of a damaged manifest are unknown
        self._delete(sorted(self.keys() - _named(known) - self._doubtful))
        for save in set(saves) - set(kept):
            self._manifest(save).unlink(missing_ok=True)

    def ask(self, blocks: Sequence[tuple[int, Version]]) -> None:
        self._asked = {key: self._read(key) for key in (_key(block, one.save) for block, one in blocks)}

    def _read(self, key: str) -> Any:
        """Requests a block; returns None if TensorStore would never finish reading it, as for a pipe."""
        with contextlib.suppress(OSError):  # the read reports any error
            if endless(self.place / key):
                return None
        return self._blocks.read(key)

    def read(self, block: int, version: Version) -> bytes:
        try:
            key = _key(block, version.save)
            reading = self._asked.pop(key, None) or self._read(key)
            if reading is None:
                raise StoreError(f"block {block} of save {version.save} is not a file")
            found = reading.result()
        except StoreError:
            raise
        except (OSError, ValueError) as error:
            raise StoreError(f"block {block} of save {version.save} cannot be read") from error
        if found.state != "value":
            raise StoreError(f"block {block} of save {version.save} is missing")
        return bytes(found.value)

    def doubt(self) -> None:
        """Excludes from deletion the blocks that are in no readable manifest, since some manifests are missing or
        damaged."""
        self._doubtful = self.keys() - _named(filter(None, map(self.known, self.saves())))
        if self._doubtful:
            LOG.warning("%s: %d blocks belong to no readable manifest, and are kept", self.place, len(self._doubtful))

    def keys(self) -> set[str]:
        """Returns the names of the existing blocks."""
        try:
            return set(map(bytes.decode, self._blocks.list(ts.KvStore.KeyRange("blocks/", "blocks0")).result()))
        except (OSError, ValueError) as error:  # TensorStore raises the latter for any storage error
            why = str(error).partition("\n")[0]
            raise StoreError(f"the blocks in {self.place} cannot be listed ({why}); {REMEDY}") from error

    def known(self, save: int) -> Versions | None:
        """Returns the versions in a manifest, or None if it is missing or damaged."""
        try:
            return self.manifest(save).blocks
        except StoreError:
            return None

    def _delete(self, keys: Sequence[str]) -> None:
        for one in [self._blocks.write(key, None) for key in keys]:
            one.result()


def read_seal(folder: epath.Path) -> Seal | None:
    """Returns the seal of a store, or None if the seal is missing or unreadable."""
    try:
        return SEALS.read(folder / SEAL)
    except RecordError:
        return None


@dataclasses.dataclass(frozen=True)
class Saved:
    """A completed save, given by the newest readable manifest of each process.

    Attributes:
        save: number of the sealed save.
        manifests: one manifest for each process: that of the sealed save or, if it is missing or damaged, an earlier
            one.
        sealed: whether the seal is readable; if it is not, there may have been a later save.
    """

    save: int
    manifests: Sequence[StoreManifest]
    sealed: bool = True

    @property
    def oldest(self) -> StoreManifest:
        """The manifest of the earliest save, whose step and note apply to all processes."""
        return min(self.manifests, key=lambda one: one.save)

    @property
    def behind(self) -> set[int]:
        """Processes whose manifest of the sealed save is missing or damaged."""
        return {process for process, one in enumerate(self.manifests) if one.save < self.save}


def last_save(folder: epath.Path) -> Saved | None:
    """Returns the save in the seal or, if the seal is missing or damaged, the newest save with manifests of all
    processes.

    Returns None if no save was ever completed. Raises StoreError if files are unreadable, or are missing although
    blocks exist.
    """
    if (seal := read_seal(folder)) is not None:
        save, processes = seal.save, seal.processes
        if not save:
            return None
    else:
        stores = [Store(folder, process) for process in _processes(folder)]
        used = [store for store in stores if store.keys() or store.saves()]
        if not used:
            return None
        processes = used[0].layout().processes
        common = set.intersection(*[set(store.saves()) for store in stores])
        save = next((one for one in sorted(common, reverse=True) if used[0].known(one) is not None), 0)
        if not save or len(stores) < processes:
            raise StoreError(
                f"{folder} has blocks, but neither a readable seal nor a readable save of all processes; {REMEDY}"
            )
        LOG.warning("%s: no readable seal; using save %d, which all processes have", folder, save)
    return Saved(save, [Store(folder, process).newest(save) for process in range(processes)], seal is not None)


def _processes(folder: epath.Path) -> list[int]:
    """Returns the numbers of the processes that have files in a store."""
    found = [path.name.removeprefix("process-") for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in found if name.isdecimal())


def _named(known: Iterable[Versions]) -> set[str]:
    return {_key(block, one.save) for versions in known for block, several in versions.items() for one in several}


def _key(block: int, save: int) -> str:
    return f"blocks/{block}.{save}"
