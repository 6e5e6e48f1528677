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
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorstore as ts
from etils import epath

from sdc.records import RecordError
from sdc.text import NOTHING

from ..records import read_json, reason, write_sealed
from ..twins import ALGORITHM
from .certificate import CertificateError

LOG = logging.getLogger("sdc.checkpoints")
FORMAT = 1
"""Of the files."""
KEPT = 2
"""Manifests that stay, and versions of a block."""
SEAL, LAYOUT = "seal.json", "layout.json"


class StoreError(CertificateError):
    """A running checkpoint that is of another state, damaged, or cannot be written."""


@dataclasses.dataclass(frozen=True)
class Version:
    """A block as it was saved.

    Attributes:
        save: number of the save.
        step: steps done then.
        digests: of its pieces.
    """

    save: int
    step: int
    digests: tuple[str, ...]


Versions: TypeAlias = dict[int, tuple[Version, ...]]
"""Of each block, the newest first."""


class Store:
    """The part of one process. Nothing here knows of devices: pieces are bytes."""

    def __init__(self, folder: epath.Path, process: int) -> None:
        self.folder = folder
        self.place = folder / f"process-{process}"
        self.process = process
        self._blocks = ts.KvStore.open(_spec(self.place)).result()
        self._asked: dict[str, Any] = {}
        self.versions: Versions = {}
        """Of each block that was ever saved, as the last manifest has them."""

    def create(self, layout: Mapping[str, Any]) -> None:
        """Writes what the blocks are made of, or compares it with what is there.

        Raises:
            StoreError: the store is of another state.
        """
        path = self.place / LAYOUT
        if not path.exists():
            self.place.mkdir(parents=True, exist_ok=True)
            write_sealed(path, {"format": FORMAT, "algorithm": ALGORITHM, **layout})
            return
        try:
            _read(path)
        except StoreError as error:  # what is damaged is known: digests tell whether blocks are of this state
            LOG.warning("%s; writing it anew", error)
            write_sealed(path, {"format": FORMAT, "algorithm": ALGORITHM, **layout})
        there = self.layout()
        for field, value in layout.items():
            if there.get(field) != value:
                raise StoreError(
                    f"{self.place} is a running checkpoint of another state ({field} differs); name another folder, "
                    "or delete it"
                )

    def layout(self) -> dict[str, Any]:
        """What the blocks are made of.

        Raises:
            StoreError: it is missing, damaged, or of a version that is not known here.
        """
        body = _read(self.place / LAYOUT)
        for field, known in (("format", FORMAT), ("algorithm", ALGORITHM)):
            if body.get(field) != known:
                raise StoreError(f"{self.place / LAYOUT} has {field} {body.get(field)!r}; this version knows {known!r}")
        return body

    def saves(self) -> list[int]:
        """Numbers of the manifests that are there."""
        place = self.place / "manifests"
        names = (path.name.removesuffix(".json") for path in place.iterdir()) if place.is_dir() else ()
        return sorted(int(name) for name in names if name.isdecimal())

    def note(self, save: int) -> dict[str, Any]:
        """What was noted of a save.

        Raises:
            StoreError: its manifest is damaged or missing.
        """
        return dict(_read(self.place / "manifests" / f"{save}.json").get("note", {}))

    def manifest(self, save: int) -> tuple[int, Versions]:
        """The step of a save, and the versions after it.

        Raises:
            StoreError: it is damaged or missing.
        """
        body = _read(self.place / "manifests" / f"{save}.json")
        try:
            versions = {
                int(block): tuple(Version(int(one[0]), int(one[1]), tuple(map(str, one[2]))) for one in several)
                for block, several in body["versions"].items()
            }
            if body["save"] != save:
                raise ValueError(f"of save {body['save']}")
            return int(body["step"]), versions
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StoreError(f"the manifest of save {save} in {self.place} is damaged ({error!r})") from error

    def write(
        self,
        save: int,
        step: int,
        blocks: Mapping[int, tuple[bytes, tuple[str, ...]]],
        note: Mapping[str, Any] = NOTHING,
    ) -> int:
        """Writes blocks and the manifest after them; what was there before counts until that.

        Args:
            save: number of the save.
            step: steps done.
            blocks: bytes and digests of the pieces, by block.
            note: what else is to be known of the save, in JSON's types.

        Returns:
            Bytes written.

        Raises:
            StoreError: they cannot be written. The store is as before.
        """
        new = {block: Version(save, step, digests) for block, (_, digests) in blocks.items()}
        versions = self.versions | {block: (one, *self.versions.get(block, ()))[:KEPT] for block, one in new.items()}
        body = {
            "save": save, "step": step, "note": dict(note),
            "versions": {
                str(block): [[one.save, one.step, list(one.digests)] for one in several]
                for block, several in versions.items()
            },
        }  # fmt: skip
        path = self.place / "manifests" / f"{save}.json"
        try:
            writing = [self._blocks.write(_key(block, save), content) for block, (content, _) in blocks.items()]
            for one in writing:
                one.result()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, body)
        except (OSError, ValueError) as error:  # TensorStore raises the latter for whatever the storage says
            with contextlib.suppress(Exception):
                self._delete([_key(block, save) for block in blocks])
            why = reason(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
            raise StoreError(f"cannot write to {self.place} ({why}); what was saved before is still there") from error
        self.versions = versions
        return sum(len(content) for content, _ in blocks.values()) + path.stat().length

    def reclaim(self, *, keep: int = KEPT) -> None:
        """Deletes all files but those of the last manifests, and of the save that is sealed."""
        saves = self.saves()
        seal = read_seal(self.folder)
        sealed = [save for save in saves if seal is not None and save <= seal.save]
        kept = sorted({*saves[-keep:], *sealed[-keep:]})
        wanted = {
            _key(block, one.save) for save in kept for block, several in self._known(save).items() for one in several
        }
        if not all(map(self._readable, kept)):
            return  # what a damaged manifest refers to is not known
        self._delete([key for key in self._keys() if key not in wanted])
        for save in set(saves) - set(kept):
            (self.place / "manifests" / f"{save}.json").unlink(missing_ok=True)

    def ask(self, blocks: Sequence[tuple[int, Version]]) -> None:
        """Begins to read blocks that `read` will be asked for."""
        self._asked = {_key(block, one.save): self._blocks.read(_key(block, one.save)) for block, one in blocks}

    def read(self, block: int, version: Version) -> bytes:
        """The bytes of a block.

        Raises:
            StoreError: they cannot be read.
        """
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
            return self.manifest(save)[1]
        except StoreError:
            return {}

    def _readable(self, save: int) -> bool:
        return bool(self._known(save))

    def _keys(self) -> Iterator[str]:
        for key in self._blocks.list(ts.KvStore.KeyRange("blocks/", "blocks0")).result():
            yield key.decode()

    def _delete(self, keys: Sequence[str]) -> None:
        for one in [self._blocks.write(key, None) for key in keys]:
            one.result()


class Seal(NamedTuple):
    """The last save that all processes have done.

    Attributes:
        save: its number.
        step: steps done then.
        processes: how many there were.
    """

    save: int
    step: int
    processes: int


def read_seal(folder: epath.Path) -> Seal | None:
    """The seal of a store; None if there is none, or it cannot be read."""
    try:
        body = read_json(folder / SEAL, sealed=True)
        return Seal(int(body["save"]), int(body["step"]), int(body["processes"]))
    except (RecordError, OSError, KeyError, TypeError, ValueError):
        return None


def last_save(folder: epath.Path) -> Seal | None:
    """What the seal says, or, where it is damaged, the newest save of which all processes have a manifest.

    None if nothing was ever saved whole: the first save is not done, or was cut off.

    Raises:
        StoreError: what there is cannot be read.
    """
    if (seal := read_seal(folder)) is not None:
        return seal
    first = Store(folder, 0)
    if not first.saves():
        return None
    processes = int(first.layout()["processes"])
    saves = [set(Store(folder, process).saves()) for process in range(processes)]
    common = set.intersection(*saves)
    if not (folder / SEAL).exists() and not all(saves):
        for process in range(processes):  # one that has begun has a layout; without it, its part was lost
            Store(folder, process).layout()
        return None
    for save in sorted(common, reverse=True):
        with contextlib.suppress(StoreError):
            step, _ = first.manifest(save)
            LOG.warning("%s: no seal can be read; taking save %d, which all processes have", folder, save)
            return Seal(save, step, processes)
    raise StoreError(f"{folder} has neither a seal nor a save of all processes that can be read")


def write_seal(folder: epath.Path, seal: Seal) -> None:
    """Says that all processes have done a save.

    Raises:
        OSError: it cannot be written.
    """
    write_sealed(folder / SEAL, seal._asdict())


def _read(path: epath.Path) -> dict[str, Any]:
    try:
        return read_json(path, sealed=True)
    except (RecordError, OSError) as error:
        raise StoreError(str(error)) from error


def _key(block: int, save: int) -> str:
    return f"blocks/{block}.{save}"


def _spec(place: epath.Path) -> Any:
    """What TensorStore opens; a local path may have characters that an URL must not."""
    text = str(place).rstrip("/") + "/"
    return text if "://" in text else {"driver": "file", "path": text}
