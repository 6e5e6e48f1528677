"""Orbax checkpoints of a run, written in the background and certified by `sdc.certify`.

FOLDER/STEP/state/, FOLDER/STEP/position/   the arrays and the position of the data iterator, as Orbax trees
FOLDER/certificates/STEP/                   the expected content, and whether the step is protected
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from sdc.checkpoints import CertificateError, Certified, OtherState, certified_steps
from sdc.multihost import everyone, first_line
from sdc.records import to_json
from sdc.settings import SettingError

LOG = logging.getLogger("sdc.checkpoints")
State = TypeVar("State")  # a pytree of arrays

# A part of a state: a path such as `params/layers`, several paths, or a predicate on the paths of arrays.
Only = str | Iterable[str] | Callable[[str], bool]

STATE, POSITION = "state", "position"  # Orbax's names of the two trees


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message identifies the checkpoint and states the remedy."""


class NotWritten(CheckpointError):
    """A checkpoint cannot be written, for example because the disk is full; the run can resume from the previous
    checkpoint."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint cannot be read, or differs from its certificate."""


class Checkpoints:
    """The checkpoints of one run. The processes of the run share the storage, and every process must call every method.

    Call `close`, or use the object as a context manager; otherwise, a checkpoint that is still being written at exit is
    lost.

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

    def __init__(self, folder: str | os.PathLike[str], *, every: int, keep: int = 2) -> None:
        """Opens `folder` for reading and writing; the folder need not exist.

        Args:
            folder: parent of one folder per checkpoint; may be on `gs://`.
            every: number of steps between checkpoints.
            keep: number of checkpoints to keep, at least 1, in addition to the protected ones and the newest one that
                has been restored; older checkpoints are deleted once a new checkpoint is complete.

        Raises:
            SettingError: `every` or `keep` is below 1, or Orbax cannot write to this kind of folder.
        """
        for setting, given in (("every", every), ("keep", keep)):
            if given < 1:
                raise SettingError(setting, given, "expected at least 1")
        where = os.fspath(folder)
        if where.startswith("s3://"):
            raise SettingError(
                "folder", where, "Orbax cannot write to s3://; give a folder on a local disk, NFS or gs://"
            )
        self.folder = epath.Path(where if "://" in where else Path(where).absolute())
        self.every = every
        self._newest = _Newest(self.folder, keep)
        self._writer: Certified | None = None
        self._saving: int | None = None

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first; reading this property waits for a pending save."""
        self.wait()
        return certified_steps(self.folder)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None; reading this property waits for a pending save."""
        return max(self.steps, default=None)

    @property
    def protected(self) -> frozenset[int]:
        """Steps of the protected checkpoints, which are never deleted."""
        with self._reader() as orbax:
            return frozenset(step for step in self.steps if orbax.is_protected(step))

    def due(self, step: int) -> bool:
        """Returns whether `save` writes a checkpoint at this step without `force`."""
        return step % self.every == 0

    def save(self, step: int, state: Any, position: Mapping[str, Any], *, force: bool = False) -> bool:
        """Saves a checkpoint in the background if one is due. `state` may be donated as soon as this method returns.

        The method first waits for the previous save. Unprotected checkpoints of later steps, which a rollback leaves
        behind, are deleted once the new checkpoint is complete.

        Args:
            step: number of completed steps.
            state: pytree of JAX arrays of any sharding and dtype, PRNG keys included. Only the first replica of an
                array is saved.
            position: position of the data iterator, JSON-serializable.
            force: whether to save even if no checkpoint is due, for example after the last step.

        Returns:
            True if a checkpoint is being saved, False if none is due.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written.
        """
        if not (force or self.due(step)):
            return False
        self.wait()
        self._saving = self._newest.saving = step
        text = np.frombuffer(json.dumps(to_json(position)).encode(), np.uint8)
        trees = {STATE: state, POSITION: {"json": text}}
        with self._writing(step):
            self._writer = self._writer or self._opened(cleanup_tmp_directories=True)  # left by interrupted saves
            # After a rollback, Orbax saves a step again only if forced.
            self._writer.save_checkpointables_async(step, trees, force=True, overwrite=True)
        return True

    def wait(self) -> None:
        """Waits until the pending checkpoint is complete and the checkpoints that it replaces are deleted.

        Raises:
            CheckpointError: the pending checkpoint cannot be written. The error is raised only once.
        """
        step, self._saving = self._saving, None
        if step is not None and self._writer is not None:
            with self._writing(step):
                self._writer.wait()

    def close(self) -> None:
        """Waits as `wait` does, and stops Orbax's threads, which a later save restarts.

        Raises:
            CheckpointError: the last checkpoint cannot be written.
        """
        self.wait()
        self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*[CheckpointError] if kind else ()):  # the first error takes precedence
            self.close()

    def protect(self, step: int) -> None:
        """Keeps a checkpoint until `release` is called, even if the run is resumed in between.

        Raises:
            CheckpointError: there is no complete checkpoint of that step, or the folder cannot be written.
        """
        self._protect(step, True)

    def release(self, step: int) -> None:
        """Ends the protection of a checkpoint; the next save deletes the checkpoint if enough newer ones exist.

        Raises:
            CheckpointError: see `protect`.
        """
        self._protect(step, False)

    def restore(
        self, abstract: State, *, step: int | None = None, only: Only | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Restores a checkpoint and compares the result with its certificate.

        Args:
            abstract: shapes, types and target shardings (`jax.ShapeDtypeStruct`); the shardings may differ from those
                of the saved arrays.
            step: step of the checkpoint (default: the newest undamaged one; see `restore_newest`).
            only: part of the state to read. Everything else is returned as given in `abstract`, and is not compared
                with the checkpoint.

        Returns:
            The state, bit for bit as it was saved, and the position of the data iterator.

        Raises:
            CheckpointError: the checkpoint does not exist, is damaged, or differs in structure from `abstract`.
            SettingError: `only` matches nothing in the state.
        """
        if step is None:
            return self.restore_newest(abstract, only=only)[:2]
        steps = self._common_steps()
        return self._restored(abstract, self._exists(steps, step), only)

    def restore_newest(self, abstract: State, *, only: Only | None = None) -> tuple[State, dict[str, Any], int]:
        """Restores the newest undamaged checkpoint, as `restore` does; a warning names each damaged checkpoint that is
        skipped.

        Returns:
            The state, the position of the data iterator, and the step of the checkpoint.

        Raises:
            CheckpointError: there is no undamaged checkpoint, or the newest one differs in structure from `abstract`.
            SettingError: `only` matches nothing in the state.
        """
        steps = self._common_steps()
        if not steps:
            raise CheckpointError(f"no complete checkpoint in {self.folder}; start a new run")
        problems = []
        for step in reversed(steps):
            try:
                return *self._restored(abstract, step, only), step
            except DamagedCheckpoint as error:
                LOG.warning("%s; skipping it", error)
                problems.append(str(error))
        raise CheckpointError(f"{'; '.join(problems)}; start a new run")

    def _common_steps(self) -> list[int]:
        """Returns the steps that process 0 sees, since processes may see different lists on shared storage."""
        return [int(step) for step in json.loads(everyone(json.dumps(self.steps))[0])]

    def _restored(self, abstract: State, step: int, only: Only | None) -> tuple[State, dict[str, Any]]:
        chosen = _chosen(abstract, only)

        def shape(leaf: Any, take: bool) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if take else ...

        wanted = jax.tree.map(shape, abstract, chosen)
        try:
            with self._reader() as orbax:
                loaded = orbax.load_checkpointables(step, {STATE: wanted, POSITION: None})
            position = dict(json.loads(np.asarray(loaded[POSITION]["json"]).tobytes()))
        except CheckpointError:
            raise
        except OtherState as error:
            raise CheckpointError(f"{error}; resume with the original configuration of the run") from None
        except (CertificateError, LookupError, ValueError) as error:
            raise DamagedCheckpoint(f"checkpoint {self.folder / str(step)} is damaged ({first_line(error)})") from error
        return jax.tree.map(lambda new, given: given if new is ... else new, loaded[STATE], abstract), position

    def _exists(self, steps: Sequence[int], step: int) -> int:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"no complete checkpoint of step {step} in {self.folder}; available steps: {there}")
        return step

    def _protect(self, step: int, protected: bool) -> None:
        self._exists(self.steps, step)
        try:
            with self._reader() as orbax:
                orbax.protect(step, protected)
        except CertificateError as error:
            raise CheckpointError(f"{error}; protect the checkpoint again") from error

    def _opened(self, **options: Any) -> Certified:
        context = ocp.Context()
        # By default, Orbax saves a slice of each replica, and replicas may differ if memory is faulty. This option
        # makes Orbax save a single replica.
        context.array.saving.use_replica_parallel = False
        # The record of the run has a lock of its own.
        return Certified.open(self.folder, lock=False, context=context, preservation_policy=self._newest, **options)

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Certified]:
        """Yields the writing checkpointer or, if there is none, a temporary one that does not touch the files of other
        writers."""
        if self._writer is not None:
            yield self._writer
            return
        with self._opened() as orbax:
            yield orbax

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and its storage layer raise many types
            self._saving = None
            self._abandon()
            why = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise NotWritten(
                f"cannot write checkpoint {self.folder / str(step)} ({first_line(why)}); "
                "free some space or choose another folder, then resume the run"
            ) from error

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # already reported
            if writer is not None:
                writer.close()


class Unsaved(Checkpoints):
    """A stand-in for `Checkpoints` that saves nothing, for runs that are never resumed."""

    def save(self, step: int, state: Any, position: Mapping[str, Any], *, force: bool = False) -> bool:
        return False


class _Newest:
    """Orbax's preservation policy for a run: it keeps the newest checkpoints of the run's current course.

    Checkpoints of steps after the one being saved belong to an abandoned course. They are not kept, since a restarted
    run would resume from them.
    """

    def __init__(self, folder: epath.Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self.saving = 0

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns, for each checkpoint, whether Orbax keeps it. Orbax calls this method once the new checkpoint is
        complete, before deleting any checkpoint."""
        past = {step for step in certified_steps(self._folder) if step < self.saving}
        good = {step for step in certified_steps(self._folder, marked=False) if step < self.saving}
        oldest = sorted(good | {self.saving})[-self._keep :][0]  # those marked as damaged do not count
        return [one.step in past | {self.saving} and one.step >= oldest for one in checkpoints]


def _chosen(abstract: Any, only: Only | None) -> Any:
    """Returns a pytree that states for each leaf whether it is selected."""
    if only is None:
        return jax.tree.map(lambda _: True, abstract)
    parts = (only,) if isinstance(only, str) else () if callable(only) else tuple(only)
    hit = only if callable(only) else lambda name: any(f"{name}/".startswith(f"{part}/") for part in parts)
    names = jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), abstract)
    chosen = jax.tree.map(lambda name: bool(hit(name)), names)
    if not any(jax.tree.leaves(chosen)):
        some = ", ".join(jax.tree.leaves(names)[:8])
        raise SettingError("only", only, f"matches no array of the state, whose arrays include {some}")
    return chosen
