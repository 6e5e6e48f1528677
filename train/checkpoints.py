"""Checkpoints of a run: written by Orbax in the background, sealed, checked when they are restored.

`sealed.py` has the layout of a checkpoint's folder, `seals.py` the digests of its arrays, `retention.py` what stays.
Checkpoints of version 0.1 (`checkpoints_v01.py`) are read; what is written is the new layout.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from sdc.multihost import PeerError, everyone, first_line, together
from sdc.settings import SettingError

from . import checkpoints_v01, sealed
from .retention import Retention
from .seals import Damage, Seal, Sha256, Sums

State = TypeVar("State")
"""A pytree of arrays."""

Only = str | Iterable[str] | Callable[[str], bool]
"""A part of a state: a path such as `params/layers`, several, or what says yes to the paths of its arrays."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says which and how to go on."""


class NotWritten(CheckpointError):
    """A checkpoint that cannot be written, as on a full disk; the run can go on from the one before."""


class Checkpoints:
    """The checkpoints of one run. In a run of several processes, all call every method, on storage that they share.

    Close it, or use it as a context: a program that ends without loses the checkpoint that is being written.

    Example:
        >>> import tempfile
        >>> import jax, jax.numpy as jnp
        >>> from sdc.train.checkpoints import Checkpoints
        >>> state = {"weights": jnp.arange(4.0), "step": jnp.int32(10)}
        >>> with Checkpoints(tempfile.mkdtemp(), every=10) as checkpoints:
        ...     checkpoints.save(10, state, {"batch": 10})
        True
        >>> checkpoints.latest
        10
        >>> abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        >>> restored, position = checkpoints.restore(abstract)
        >>> position
        {'batch': 10}
        >>> mixed, _ = checkpoints.restore({**state, "weights": state["weights"] + 1}, only="weights")
        >>> mixed["weights"]
        Array([0., 1., 2., 3.], dtype=float32)
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int, keep: int = 2, seal: Seal | None = None) -> None:
        """Reads and writes below `folder`, which need not exist.

        Args:
            folder: holds one folder a checkpoint; `gs://` as well.
            every: steps from one checkpoint to the next.
            keep: checkpoints kept, at least 1, besides those that are protected; older ones are deleted after a new one
                is complete.
            seal: how arrays are sealed, by default with SHA-256.

        Raises:
            SettingError: a number is below 1, or Orbax cannot write to such a folder.
        """
        for setting, given in (("every", every), ("keep", keep)):
            if given < 1:
                raise SettingError(setting, given, "expected at least 1")
        where = os.fspath(folder)
        if where.startswith("s3://"):
            raise SettingError("folder", where, "Orbax writes arrays to local disks, NFS and gs://, not to s3://")
        self.folder = epath.Path(where if "://" in where else Path(where).absolute())
        self.every = every
        self.keep = keep
        self._seal = seal or Sha256()
        self._retention = Retention(self.folder, keep, self._complete)
        self._orbax: Any = None
        self._saving: int | None = None

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first. Waits for one that is being written."""
        self.wait()
        return self._complete()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None. Waits for one that is being written."""
        return max(self.steps, default=None)

    @property
    def protected(self) -> frozenset[int]:
        """Steps that are never deleted."""
        try:
            return self._retention.protected()
        except Damage as damage:
            raise CheckpointError(f"in {self.folder}, {damage}; delete it and protect the checkpoints anew") from None

    def due(self, step: int) -> bool:
        """Whether `save` saves a checkpoint of so many steps without being forced."""
        return step % self.every == 0

    def save(self, step: int, state: Any, position: Mapping[str, Any], *, force: bool = False) -> bool:
        """Saves a checkpoint if one is due. It is written in the background; `state` may be donated at once.

        Waits for the save before this one. Checkpoints of later steps, which a run leaves behind when it goes back, are
        deleted once this one is complete, unless they are protected.

        Args:
            step: steps done.
            state: pytree of JAX arrays of any sharding and dtype, PRNG keys included. Where devices hold replicas, the
                first one's is saved.
            position: position of the data iterator, in JSON's types.
            force: save although none is due (the last step).

        Returns:
            Whether a checkpoint is being saved.

        Raises:
            CheckpointError: this one or the one before cannot be written.
        """
        if not (force or self.due(step)):
            return False
        self.wait()
        _ = self.protected  # nothing is deleted, so nothing is written, while it is not known what must stay
        self._saving = self._retention.saving = step
        item = sealed.Sealed(state, step, position, self._seal)
        with self._writing(step):
            # Orbax would not save again what a run that went back has saved before, unless it is forced.
            self._opened().save_checkpointables_async(step, {sealed.STATE: item}, force=True, overwrite=True)
        return True

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete, and the ones that it replaces are deleted.

        Raises:
            CheckpointError: it cannot be written. The error comes once.
        """
        if self._saving is not None:
            step, self._saving = self._saving, None
            with self._writing(step):
                self._orbax.wait()

    def close(self) -> None:
        """Waits as `wait` does, and lets go of Orbax's threads. A later save takes them up again.

        Raises:
            CheckpointError: the last checkpoint cannot be written.
        """
        self.wait()
        self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(CheckpointError) if error else contextlib.nullcontext():
            self.close()

    def protect(self, step: int) -> None:
        """Keeps a checkpoint until it is released, in this run and when the run is continued.

        Raises:
            CheckpointError: there is no complete checkpoint of that step, or the folder cannot be written.
        """
        self._exists(self.steps, step)
        self._protect(self.protected | {step})

    def release(self, step: int) -> None:
        """Ends the protection of a checkpoint; the next save deletes it if it is old enough."""
        self.wait()
        self._protect(self.protected - {step})

    def restore(
        self, abstract: State, *, step: int | None = None, only: Only | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Restores a checkpoint, and compares what was restored with its seals.

        Args:
            abstract: shapes and types (`jax.ShapeDtypeStruct`) with the shardings to restore into; they may
                differ from the saved ones.
            step: step of the checkpoint; the newest complete one by default.
            only: read only this part of the state. All else comes back as it stands in `abstract`, and is not compared
                with the checkpoint. The checksums of files, which hold more than this part, are left out.

        Returns:
            The state, bit for bit, and the data iterator's position.

        Raises:
            CheckpointError: there is none, it is damaged, or it holds another state than `abstract` describes.
            SettingError: `only` names nothing in the state.
        """
        steps = json.loads(everyone(json.dumps(self.steps))[0])  # storage may show the processes different lists
        if step is None and not steps:
            raise CheckpointError(f"no complete checkpoint in {self.folder}; start the run anew")
        step = self._exists(steps, steps[-1] if step is None else step)
        path = self.folder / str(step)
        others = [other for other in steps if other != step]
        fallback = f"delete that folder to fall back on {f'step {others[-1]}' if others else 'a new run'}"
        chosen = _chosen(abstract, only)
        wanted = jax.tree.map(lambda leaf, take: _shape(leaf) if take else ..., abstract, chosen)
        try:
            contents, sums = together(lambda: self._check_files(path, whole=only is None))
            _compare_types(path, contents["arrays"], abstract, chosen, whole=only is None)
            old = checkpoints_v01.is_complete(path)
            source, context = (path / checkpoints_v01.ARRAYS, None) if old else (path, _context())
            try:
                with context or contextlib.nullcontext():
                    state: Any = together(lambda: ocp.load(source, wanted, checkpointable_name=sealed.STATE))
            except Exception as error:  # Orbax and its storage layer raise many kinds
                raise CheckpointError(f"checkpoint {path} cannot be read ({first_line(error)}); {fallback}") from error
            if not old:
                restored = {name: leaf for name, leaf in sealed.named(state).items() if leaf is not ...}
                together(lambda: self._seal_of(contents).check(restored, sums))
        except (Damage, PeerError) as damage:
            raise CheckpointError(f"checkpoint {path} is damaged ({damage}); {fallback}") from None
        return jax.tree.map(lambda new, given: given if new is ... else new, state, abstract), contents["position"]

    def _check_files(self, path: epath.Path, *, whole: bool) -> tuple[dict[str, Any], Sums]:
        try:
            if checkpoints_v01.is_complete(path):
                return checkpoints_v01.read_contents(path), {}
            contents = sealed.read_contents(path)
            self._seal_of(contents)
            return contents, sealed.check_files(path, contents, bytes_too=whole)
        except OSError as error:
            raise Damage(first_line(error)) from error

    def _seal_of(self, contents: Mapping[str, Any]) -> Seal:
        for seal in (self._seal, Sha256()):
            if seal.algorithm == contents["algorithm"]:
                return seal
        raise Damage(f"it is sealed with {contents['algorithm']}, which nothing here can compare")

    def _complete(self) -> list[int]:
        folders = self.folder.iterdir() if self.folder.is_dir() else ()
        complete = (sealed.is_complete, checkpoints_v01.is_complete)
        return sorted(int(path.name) for path in folders if path.name.isdecimal() and any(f(path) for f in complete))

    def _exists(self, steps: list[int], step: int) -> int:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"no complete checkpoint of step {step} in {self.folder}; those of {there} are there")
        return step

    def _protect(self, steps: Iterable[int]) -> None:
        try:
            self._retention.protect(steps)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be written ({first_line(error)}); protect it anew") from error

    def _opened(self) -> Any:
        if self._orbax is None:
            self._orbax = ocp.training.Checkpointer(
                self.folder,
                context=_context(),
                preservation_policy=self._retention,
                cleanup_tmp_directories=True,  # of saves that were cut off
                lightweight_initialize=True,
            )
        return self._orbax

    @contextlib.contextmanager
    def _writing(self, step: int) -> Any:
        try:
            yield
        except Exception as error:  # Orbax and its storage layer raise many kinds
            self._saving = None
            self._abandon()
            raise NotWritten(
                f"cannot write checkpoint {self.folder / str(step)} ({first_line(error)}); "
                "make room or name another folder, then continue the run"
            ) from error

    def _abandon(self) -> None:
        orbax, self._orbax = self._orbax, None
        with contextlib.suppress(Exception):  # said already
            if orbax is not None:
                orbax.close()


class Unsaved(Checkpoints):
    """Of a run that nobody will continue: nothing is saved."""

    def save(self, step: int, state: Any, position: Mapping[str, Any], *, force: bool = False) -> bool:
        return False


def _context() -> Any:
    context = ocp.Context()
    registry = ocp.handlers.local_registry(include_global_registry=False)
    context.checkpointables.registry = registry.add(sealed.SealedHandler, checkpointable_name=sealed.STATE)
    # By default Orbax takes a slice from each replica. Replicas may differ where memory is bad: what is saved is one.
    context.array.saving.use_replica_parallel = False
    return context


def _chosen(abstract: Any, only: Only | None) -> Any:
    """For each leaf, whether it is wanted."""
    if only is None:
        return jax.tree.map(lambda _: True, abstract)
    parts = (only,) if isinstance(only, str) else () if callable(only) else tuple(only)
    hit = only if callable(only) else lambda name: any(f"{name}/".startswith(f"{part}/") for part in parts)
    names = jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), abstract)
    chosen = jax.tree.map(lambda name: bool(hit(name)), names)
    if not any(jax.tree.leaves(chosen)):
        some = ", ".join(jax.tree.leaves(names)[:8])
        raise SettingError("only", only, f"the state has no such part; it has {some}")
    return chosen


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _compare_types(path: epath.Path, saved: Mapping[str, str], abstract: Any, chosen: Any, *, whole: bool) -> None:
    expected, wanted = sealed.types(abstract), sealed.named(chosen)
    for name in sorted({*expected, *saved}) if whole else [name for name in expected if wanted[name]]:
        if saved.get(name) != expected.get(name):
            raise CheckpointError(
                f"checkpoint {path} holds {saved.get(name, 'nothing')} at {name}, expected "
                f"{expected.get(name, 'nothing')}; continue with the configuration that the run was started with"
            )
