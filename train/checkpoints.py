"""Checkpoints of a run: arrays with Orbax, sealed by checksums.

    FOLDER/STEP/arrays/          the state, written by all processes together (Orbax)
    FOLDER/STEP/contents.json    dtype and shape of each array, and where the data iterator stands
    FOLDER/STEP/checksums.json   SHA-256 of every other file; written last

A folder without `checksums.json` was cut off by a crash and does not count. Orbax checks its own index but not the
arrays: a bit flipped there is restored as another number. The checksums are compared before anything is read.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from sdc.record.files import write_json

ARRAYS, CONTENTS, CHECKSUMS = "arrays", "contents.json", "checksums.json"

State = TypeVar("State")
"""A pytree of arrays."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says which and how to go on."""


class Checkpoints:
    """The checkpoints of one run. In a run of several processes, all call every method, on a file system they share.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import jax, jax.numpy as jnp
        >>> from sdc.train.checkpoints import Checkpoints
        >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()), every=10)
        >>> state = {"weights": jnp.arange(4.0)}
        >>> checkpoints.save(10, state, {"batch": 10})
        True
        >>> checkpoints.latest
        10
        >>> abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        >>> restored, position = checkpoints.restore(abstract)
        >>> position
        {'batch': 10}
    """

    def __init__(self, folder: Path, *, every: int, keep: int = 2) -> None:
        """Reads and writes below `folder`, which need not exist.

        Args:
            folder: holds one folder a checkpoint.
            every: steps from one checkpoint to the next.
            keep: checkpoints kept, at least 1; older ones are deleted after a new one is sealed.
        """
        if every < 1 or keep < 1:
            raise ValueError(f"checkpoints every {every} steps, keeping {keep}: expected at least 1 of each")
        self.folder = folder.absolute()
        self.every = every
        self.keep = keep

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return max(self._complete(), default=None)

    def save(self, step: int, state: Any, position: Mapping[str, Any], *, force: bool = False) -> bool:
        """Saves a checkpoint if one is due; it is on disk when this returns.

        Args:
            step: steps done.
            state: pytree of JAX arrays of any sharding and dtype, PRNG keys included.
            position: of the data iterator, in JSON's types.
            force: save although none is due (the last step).

        Returns:
            Whether a checkpoint was saved.

        Raises:
            CheckpointError: it cannot be written.
        """
        if not force and step % self.every:
            return False
        path = self.folder / str(step)
        first = jax.process_index() == 0
        try:
            if first:
                (path / CHECKSUMS).unlink(missing_ok=True)
                path.mkdir(parents=True, exist_ok=True)
            ocp.save(path / ARRAYS, state, overwrite=True)
            if first:
                write_json(path / CONTENTS, {"arrays": _types(state), "position": position})
                write_json(path / CHECKSUMS, _checksums(path))
                for old in self._unneeded(step):
                    # First, so that a deletion that is cut off leaves nothing that counts.
                    (old / CHECKSUMS).unlink(missing_ok=True)
                    shutil.rmtree(old)
        except Exception as error:  # Orbax and its storage layer raise many kinds
            raise CheckpointError(
                f"cannot write checkpoint {path} ({_first_line(error)}); "
                "make room or name another folder with --run, then continue with --resume"
            ) from error
        return True

    def restore(self, abstract: State) -> tuple[State, dict[str, Any]]:
        """Restores the newest complete checkpoint.

        Args:
            abstract: `jax.ShapeDtypeStruct`s with the shardings to restore into, which may differ from the saved ones.

        Returns:
            The state, bit for bit, and the data iterator's position.

        Raises:
            CheckpointError: there is none, it is damaged, or it holds another state than `abstract` describes.
        """
        complete = sorted(self._complete())
        if not complete:
            raise CheckpointError(f"no complete checkpoint in {self.folder}; start the run anew, without --resume")
        path = self.folder / str(complete[-1])
        fallback = f"step {complete[-2]}" if len(complete) > 1 else "a new run, without --resume"
        damage = _damage(path)
        if damage:
            raise CheckpointError(
                f"checkpoint {path} is damaged ({damage}); delete that folder to fall back on {fallback}"
            )
        contents = json.loads((path / CONTENTS).read_text(encoding="utf-8"))
        saved, expected = contents["arrays"], _types(abstract)
        for name in sorted({*saved, *expected}):
            if saved.get(name) != expected.get(name):
                raise CheckpointError(
                    f"checkpoint {path} holds {saved.get(name, 'nothing')} at {name}, expected "
                    f"{expected.get(name, 'nothing')}; continue with the configuration that the run was started with"
                )
        state: State = ocp.load(path / ARRAYS, abstract)
        return state, contents["position"]

    def _complete(self) -> list[int]:
        return [int(seal.parent.name) for seal in self.folder.glob(f"*/{CHECKSUMS}") if seal.parent.name.isdecimal()]

    def _unneeded(self, step: int) -> list[Path]:
        """What the checkpoint of `step` makes superfluous: older ones, complete or cut off by a crash."""
        kept = sorted(past for past in self._complete() if past <= step)[-self.keep :]
        past = [path for path in self.folder.iterdir() if path.name.isdecimal() and int(path.name) < step]
        return [path for path in past if int(path.name) not in kept]


def _checksums(path: Path) -> dict[str, str]:
    sums = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file != path / CHECKSUMS:
            with file.open("rb") as content:
                sums[file.relative_to(path).as_posix()] = hashlib.file_digest(content, "sha256").hexdigest()
    return sums


def _damage(path: Path) -> str | None:
    """Says what is wrong with a checkpoint's files, or None."""
    try:
        expected = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
        found = _checksums(path)
    except (OSError, ValueError) as error:
        return _first_line(error)
    if not isinstance(expected, dict):
        return f"{CHECKSUMS} is no table of checksums"
    for name in sorted({*expected, *found}):
        if name not in found:
            return f"{name} is missing"
        if found[name] != expected.get(name):
            return f"the checksum of {name} differs"
    return None


def _types(tree: Any) -> dict[str, str]:
    """Dtype and shape of every leaf; Orbax alone would convert a restored array to another dtype without a word."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
