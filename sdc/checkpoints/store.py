"""The files of a running checkpoint: versions of blocks, and manifests that say which of them count.

    FOLDER/process-N/layout.json         what the blocks of this process are made of
    FOLDER/process-N/blocks/B.S          block B as save number S wrote it: its pieces, one after the other
    FOLDER/process-N/manifests/S.json    after save S: for each block its version, step and digests
    FOLDER/seal.json                     the last save that all processes have done

A save writes new versions beside the old ones, then the manifest, then the seal: until that, everything is as it was
before. Of each block the version before the last stays too, and so does the manifest before the last: what is damaged
has one before it. All other files are deleted, so that a store holds two versions of each block and those that are
being written. TensorStore reads and writes the blocks, on local disks and object stores.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorstore as ts
from etils import epath

from ..records import Format, RecordError, reason, to_json
from ..schema import Header
from ..text import NOTHING
from ..twins import ALGORITHM
from .certificate import StoreError
from .partitions import Fragment

LOG = logging.getLogger("sdc.checkpoints")
KEPT = 2  # manifests that stay, and versions of a block
SEAL, LAYOUT = "seal.json", "layout.json"


class Version(NamedTuple):
    """A block as it was saved."""

    save: int  # number of the save
    step: int  # steps done then
    digests: tuple[str, ...]  # of its pieces


Versions: TypeAlias = dict[int, tuple[Version, ...]]  # of each block, the newest first


class StoreLayout(Header, kw_only=True, tag="jax-sdc layout of a running checkpoint"):
    """What the blocks of one process are made of."""

    algorithm: str = ALGORITHM
    partition: str  # SHA-256, by which stores are told apart
    processes: int
    blocks: dict[str, list[Fragment]]


class StoreManifest(Header, kw_only=True, tag="jax-sdc manifest of a running checkpoint"):
    """What one process has after a save."""

    save: int
    step: int
    note: dict[str, Any]
    versions: dict[str, tuple[Version, ...]]

    @property
    def blocks(self) -> Versions:
        return {int(block): several for block, several in self.versions.items()}


class Seal(Header, kw_only=True, tag="jax-sdc seal of a running checkpoint"):
    """The last save that all processes have done."""

    save: int
    step: int
    processes: int


REMEDY = "restore it, or delete the running checkpoint"
LAYOUTS = Format(type=StoreLayout, noun="layout of a running checkpoint", remedy=REMEDY)
MANIFESTS = Format(type=StoreManifest, noun="manifest of a running checkpoint", remedy=REMEDY)
SEALS = Format(type=Seal, noun="seal of a running checkpoint", remedy=REMEDY)


class Store:
    """The part of one process. Nothing here knows of devices: pieces are bytes."""

    def __init__(self, folder: epath.Path, process: int) -> None:
        self.folder = folder
        self.place = folder / f"process-{process}"
        self.process = process
        place = f"{self.place}".rstrip("/") + "/"  # a local path may have characters that an URL must not
        self._blocks = ts.KvStore.open(place if "://" in place else {"driver": "file", "path": place}).result()
        self._asked: dict[str, Any] = {}
        self.versions: Versions = {}  # of each block that was ever saved, as the last manifest has them

    def create(self, layout: StoreLayout) -> None:
        """Writes what the blocks are made of, or compares it with what is there: a StoreError if it is of another."""
        path = self.place / LAYOUT
        if not path.exists():
            self.place.mkdir(parents=True, exist_ok=True)
            LAYOUTS.write(path, layout)
            return
        try:
            there = self.layout()
        except StoreError as error:  # what is damaged is known: digests tell whether blocks are of this state
            if (saves := self.saves()) and not any(map(self._known, saves)):
                raise  # all of it is of another version
            LOG.warning("%s; writing it anew", error)
            LAYOUTS.write(path, layout)
            return
        for field in ("algorithm", "partition", "processes", "blocks"):
            if getattr(there, field) != getattr(layout, field):
                raise StoreError(
                    f"{self.place} is a running checkpoint of another state ({field} differs); name another folder, "
                    "or delete it"
                )

    def layout(self) -> StoreLayout:
        try:
            return LAYOUTS.read(self.place / LAYOUT)
        except RecordError as error:
            raise StoreError(str(error)) from error

    def saves(self) -> list[int]:
        """Numbers of the manifests that are there."""
        place = self.place / "manifests"
        names = (path.name.removesuffix(".json") for path in place.iterdir()) if place.is_dir() else ()
        return sorted(int(name) for name in names if name.isdecimal())

    def manifest(self, save: int) -> StoreManifest:
        try:
            found = MANIFESTS.read(self._manifest(save))
        except RecordError as error:
            raise StoreError(str(error)) from error
        if found.save != save or not all(map(str.isdecimal, found.versions)):
            raise StoreError(f"{self._manifest(save)} is that of save {found.save}, or has blocks without numbers")
        return found

    def _manifest(self, save: int) -> epath.Path:
        return self.place / "manifests" / f"{save}.json"

    def write(
        self,
        save: int,
        step: int,
        blocks: Mapping[int, tuple[bytes, tuple[str, ...]]],
        note: Mapping[str, Any] = NOTHING,
    ) -> int:
        """Writes blocks (bytes and digests of their pieces) and the manifest after them, and returns the bytes written.

        What was there before counts until the manifest is there, and stays where this raises a StoreError.
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
        except (OSError, ValueError) as error:  # TensorStore raises the latter for whatever the storage says
            with contextlib.suppress(OSError, ValueError):
                self._delete([_key(block, save) for block in blocks])
            why = reason(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
            raise StoreError(f"cannot write to {self.place} ({why}); what was saved before is still there") from error
        self.versions = versions
        return sum(len(content) for content, _ in blocks.values()) + path.stat().length

    def reclaim(self) -> None:
        """Deletes all files but those of the last manifests, and of the save that is sealed."""
        saves = self.saves()
        seal = read_seal(self.folder)
        sealed = [save for save in saves if seal is not None and save <= seal.save]
        kept = sorted({*saves[-KEPT:], *sealed[-KEPT:]})
        known = list(map(self._known, kept))
        if not all(known):
            return  # what a damaged manifest refers to is not known
        wanted = {_key(block, one.save) for versions in known for block, several in versions.items() for one in several}
        there = map(bytes.decode, self._blocks.list(ts.KvStore.KeyRange("blocks/", "blocks0")).result())
        self._delete([key for key in there if key not in wanted])
        for save in set(saves) - set(kept):
            self._manifest(save).unlink(missing_ok=True)

    def ask(self, blocks: Sequence[tuple[int, Version]]) -> None:
        self._asked = {_key(block, one.save): self._blocks.read(_key(block, one.save)) for block, one in blocks}

    def read(self, block: int, version: Version) -> bytes:
        try:
            key = _key(block, version.save)
            found = (self._asked.pop(key, None) or self._blocks.read(key)).result()
        except (OSError, ValueError) as error:
            raise StoreError(f"block {block} of save {version.save} cannot be read") from error
        if found.state != "value":
            raise StoreError(f"block {block} of save {version.save} is missing")
        return bytes(found.value)

    def _known(self, save: int) -> Versions:
        try:
            return self.manifest(save).blocks
        except StoreError:
            return {}

    def _delete(self, keys: Sequence[str]) -> None:
        for one in [self._blocks.write(key, None) for key in keys]:
            one.result()


def read_seal(folder: epath.Path) -> Seal | None:
    """The seal of a store; None if there is none, or it cannot be read."""
    try:
        return SEALS.read(folder / SEAL)
    except RecordError:
        return None


def last_save(folder: epath.Path) -> Seal | None:
    """What the seal says, or, where it is damaged, the newest save of which all processes have a manifest.

    None if nothing was ever saved whole: the first save is not done, or was cut off. A StoreError says that what there
    is cannot be read.
    """
    if (seal := read_seal(folder)) is not None:
        return seal
    first = Store(folder, 0)
    if not first.saves():
        return None
    processes = first.layout().processes
    saves = [set(Store(folder, process).saves()) for process in range(processes)]
    common = set.intersection(*saves)
    if not (folder / SEAL).exists() and not all(saves):
        for process in range(processes):  # one that has begun has a layout; without it, its part was lost
            Store(folder, process).layout()
        return None
    for save in sorted(common, reverse=True):
        with contextlib.suppress(StoreError):
            step = first.manifest(save).step
            LOG.warning("%s: no seal can be read; taking save %d, which all processes have", folder, save)
            return Seal(save=save, step=step, processes=processes)
    raise StoreError(f"{folder} has neither a seal nor a save of all processes that can be read")


def _key(block: int, save: int) -> str:
    return f"blocks/{block}.{save}"
