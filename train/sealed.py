"""A checkpoint's files, and how they are written and read: arrays with Orbax, and beside them what seals them.

    FOLDER/STEP/state/...                     the arrays, written by all processes together (Orbax: OCDBT, Zarr 3)
    FOLDER/STEP/state/contents.json           step, dtype and shape of each array, where the data iterator stands
    FOLDER/STEP/state/seals/process-N.json    process N's: digests of its shards, size and SHA-256 of its files
    FOLDER/STEP/commit_success.txt            Orbax's: everything else is complete

Orbax writes all this under another name and gives it its own at the end, so a checkpoint that was cut off by a crash
has another name or no `commit_success.txt`. Orbax checks its own index but not the arrays: a bit flipped there is
restored as another number. The files' checksums find what changed in storage, before anything is read. The arrays'
digests, compared after the restore, also find what changed between the device and the file, on either way.
"""

import asyncio
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from sdc.records import endless, parse_json, read_bytes, to_json, write_text

from .seals import Damage, Seal, Sums

STATE, CONTENTS, SEALS = "state", "contents.json", "seals"
COMMITTED, METADATA = "commit_success.txt", "_CHECKPOINT_METADATA"
"""Orbax's own files of a checkpoint."""
FORMAT = 2
"""Layout of the folder; 1 is that of version 0.1."""


@dataclasses.dataclass(frozen=True)
class Sealed:
    """What a checkpoint holds."""

    state: Any
    step: int
    position: Mapping[str, Any]
    seal: Seal


class SealedHandler:
    """Orbax's handler of a `Sealed`: the state as Orbax writes any pytree, then the files that seal it."""

    def __init__(self) -> None:
        self._arrays = ocp.handlers.PyTreeHandler()

    async def save(self, directory: Any, checkpointable: Sealed) -> Awaitable[None]:
        """Takes the seal and copies the arrays to the host; what it returns writes both."""
        sums = checkpointable.seal.take(named(checkpointable.state))
        contents = {
            "format": FORMAT,
            "step": checkpointable.step,
            "processes": jax.process_count(),
            "algorithm": checkpointable.seal.algorithm,
            "arrays": types(checkpointable.state),
            "position": to_json(checkpointable.position),
        }
        written = await self._arrays.save(directory, checkpointable.state)
        return self._finish(directory, written, contents, sums)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Reads the state alone."""
        return await self._arrays.load(directory, abstract_checkpointable)

    async def metadata(self, directory: Any) -> Any:
        """Orbax's description of the state."""
        return await self._arrays.metadata(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it can be saved."""
        return isinstance(checkpointable, Sealed)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether it can be restored into."""
        return bool(self._arrays.is_abstract_handleable(abstract_checkpointable))

    async def _finish(
        self, directory: Any, written: Awaitable[None], contents: dict[str, Any], sums: Callable[[], Sums]
    ) -> None:
        await written  # by all processes: Orbax waits for them there
        folder = await directory.await_creation()
        await asyncio.to_thread(_write_seal, epath.Path(folder), contents, sums)


def _write_seal(folder: epath.Path, contents: dict[str, Any], sums: Callable[[], Sums]) -> None:
    me = jax.process_index()
    mine = [name for name in _names(folder) if _writer(name) == me]
    files = {name: _file(folder / name) for name in mine}
    (folder / SEALS).mkdir(parents=True, exist_ok=True)
    seal = {"step": contents["step"], "process": me, "arrays": sums(), "files": files}
    write_checked(folder / SEALS / f"process-{me}.json", seal)
    if me == 0:
        write_checked(folder / CONTENTS, contents)


def is_complete(path: epath.Path) -> bool:
    """Whether a folder of this layout was written to its end."""
    return bool((path / COMMITTED).exists() and (path / STATE / CONTENTS).exists())


def read_contents(path: epath.Path) -> dict[str, Any]:
    """Reads what a checkpoint says of itself.

    Raises:
        Damage: it is damaged, or was written by a newer version.
    """
    contents = read_checked(path / STATE / CONTENTS)
    if contents["format"] != FORMAT:
        raise Damage(f"its layout is number {contents['format']}, which this version does not know")
    if str(contents["step"]) != path.name:
        raise Damage(f"it is the checkpoint of step {contents['step']}")
    return contents


def check_files(path: epath.Path, contents: Mapping[str, Any], *, bytes_too: bool) -> Sums:
    """Compares the files with what their writers noted. All processes call it, and share the work.

    Args:
        path: path of the checkpoint.
        contents: contents of the checkpoint.
        bytes_too: compare the checksums as well as names and sizes.

    Returns:
        The digests of all arrays.

    Raises:
        Damage: a file is missing, new, or differs.
    """
    folder = path / STATE
    sums: Sums = {}
    files: dict[str, list[Any]] = {}
    for process in range(contents["processes"]):
        seal = read_checked(folder / SEALS / f"process-{process}.json")
        if (seal["step"], seal["process"]) != (contents["step"], process):
            raise Damage(f"{SEALS}/process-{process}.json belongs to step {seal['step']}, process {seal['process']}")
        files |= seal["files"]
        for name, blocks in seal["arrays"].items():
            sums.setdefault(name, {}).update(blocks)
    for stray in sorted({file.name for file in path.iterdir()} - {STATE, COMMITTED, METADATA}):
        raise Damage(f"{stray} does not belong to it")
    found = {name: (folder / name).stat().length for name in _names(folder)}
    for name in sorted({*files, *found}):
        if name not in found:
            raise Damage(f"{name} is missing")
        if name not in files:
            raise Damage(f"{name} does not belong to it")
        if what := endless(folder / name):
            raise Damage(f"{name} is {what}, not a file")
        if found[name] != files[name][0]:
            raise Damage(f"{name} has {found[name]} bytes instead of {files[name][0]}")
    for name in sorted(files)[jax.process_index() :: jax.process_count()] if bytes_too else ():
        if _file(folder / name) != files[name]:
            raise Damage(f"the checksum of {name} differs")
    return sums


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, as in `['layers'][0].bias`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def types(tree: Any) -> dict[str, str]:
    """Dtype and shape of every leaf; Orbax alone would convert a restored array to another dtype without a word."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named(tree).items()}


def write_checked(path: epath.Path, body: Mapping[str, Any]) -> None:
    """Writes a JSON file that carries its own checksum, whole or not at all: other processes may read it meanwhile."""
    write_text(path, json.dumps({"sha256": _checksum(body), "body": body}, indent=1) + "\n")


def read_checked(path: epath.Path) -> dict[str, Any]:
    """Reads such a file.

    Raises:
        Damage: it is missing or damaged.
    """
    try:
        content = parse_json(read_bytes(path))
        body, checksum = content["body"], content["sha256"]
    except FileNotFoundError:
        raise Damage(f"{path.name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damage(f"{path.name} cannot be read: {error}") from error
    if _checksum(body) != checksum:
        raise Damage(f"the checksum of {path.name} differs")
    return dict(body)


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _names(folder: epath.Path, within: str = "") -> list[str]:
    """Names of the files below a folder, without those that seal them."""
    names = []
    for path in sorted((folder / within).iterdir()):
        name = f"{within}{path.name}"
        if name in (SEALS, CONTENTS, COMMITTED):
            continue
        # A link is none of Orbax's, and may lead in a circle.
        entered = path.is_dir() and not os.path.islink(path)
        names += _names(folder, f"{name}/") if entered else [name]
    return names


def _writer(name: str) -> int:
    """The process that wrote a file of Orbax's, by its name; process 0 writes what belongs to all."""
    match = re.search(r"process_(\d+)(/|$)", name)
    return int(match[1]) if match else 0


def _file(path: epath.Path) -> list[Any]:
    """Size and checksum."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as content:
        while part := content.read(1 << 20):
            digest.update(part)
            size += len(part)
    return [size, digest.hexdigest()]
