"""Checkpoints of a run: Orbax's, written in the background and certified by `sdc.certify`.

FOLDER/STEP/state/, FOLDER/STEP/position/   the arrays, and where the data iterator stands, as Orbax writes trees
FOLDER/certificates/STEP/                   what they must restore to, and whether the step is protected
"""

import contextlib
import json
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
from sdc.records import endless, to_json
from sdc.settings import SettingError

State = TypeVar("State")  # a pytree of arrays

# A part of a state: a path such as `params/layers`, several, or what says yes to the paths of its arrays.
Only = str | Iterable[str] | Callable[[str], bool]

STATE, POSITION = "state", "position"  # Orbax's names of the two trees


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

    def __init__(self, folder: str | os.PathLike[str], *, every: int, keep: int = 2) -> None:
        """Reads and writes below `folder`, which need not exist.

        Args:
            folder: holds one folder a checkpoint; `gs://` as well.
            every: steps from one checkpoint to the next.
            keep: checkpoints kept, at least 1, besides those that are protected and the newest that was restored; older
                ones are deleted after a new one is complete.

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
        self._newest = _Newest(self.folder, keep)
        self._writer: Certified | None = None
        self._saving: int | None = None

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first. Waits for one that is being written."""
        self.wait()
        return certified_steps(self.folder)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None. Waits for one that is being written."""
        return max(self.steps, default=None)

    @property
    def protected(self) -> frozenset[int]:
        """Steps that are never deleted."""
        with self._reader() as orbax:
            return frozenset(step for step in self.steps if orbax.is_protected(step))

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
        self._saving = self._newest.saving = step
        text = np.frombuffer(json.dumps(to_json(position)).encode(), np.uint8)
        trees = {STATE: state, POSITION: {"json": text}}
        with self._writing(step):
            self._writer = self._writer or self._opened(cleanup_tmp_directories=True)  # of saves that were cut off
            # Orbax would not save again what a run that went back has saved before, unless it is forced.
            self._writer.save_checkpointables_async(step, trees, force=True, overwrite=True)
        return True

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete, and the ones that it replaces are deleted.

        Raises:
            CheckpointError: it cannot be written. The error comes once.
        """
        step, self._saving = self._saving, None
        if step is not None and self._writer is not None:
            with self._writing(step):
                self._writer.wait()

    def close(self) -> None:
        """Waits as `wait` does, and lets go of Orbax's threads. A later save takes them up again.

        Raises:
            CheckpointError: the last checkpoint cannot be written.
        """
        self.wait()
        self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*[CheckpointError] if kind else ()):  # what went wrong first is what to say
            self.close()

    def protect(self, step: int) -> None:
        """Keeps a checkpoint until it is released, in this run and when the run is continued.

        Raises:
            CheckpointError: there is no complete checkpoint of that step, or the folder cannot be written.
        """
        self._protect(step, True)

    def release(self, step: int) -> None:
        """Ends the protection of a checkpoint; the next save deletes it if it is old enough.

        Raises:
            CheckpointError: as of `protect`.
        """
        self._protect(step, False)

    def restore(
        self, abstract: State, *, step: int | None = None, only: Only | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Restores a checkpoint, and compares what was restored with its certificate.

        Args:
            abstract: shapes and types (`jax.ShapeDtypeStruct`) with the shardings to restore into; they may
                differ from the saved ones.
            step: step of the checkpoint; the newest complete one by default.
            only: read only this part of the state. All else comes back as it stands in `abstract`, and is not compared
                with the checkpoint.

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
            raise CheckpointError(f"{error}; continue with the configuration that the run was started with") from None
        except (CertificateError, LookupError, ValueError) as error:
            others = [other for other in steps if other != step]
            fallback = f"delete that folder to fall back on {f'step {others[-1]}' if others else 'a new run'}"
            raise CheckpointError(
                f"checkpoint {self.folder / str(step)} is damaged ({first_line(error)}); {fallback}"
            ) from error
        return jax.tree.map(lambda new, given: given if new is ... else new, loaded[STATE], abstract), position

    def _exists(self, steps: Sequence[int], step: int) -> int:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"no complete checkpoint of step {step} in {self.folder}; those of {there} are there")
        return step

    def _protect(self, step: int, protected: bool) -> None:
        self._exists(self.steps, step)
        try:
            with self._reader() as orbax:
                orbax.protect(step, protected)
        except CertificateError as error:
            raise CheckpointError(f"{error}; protect it anew") from error

    def _opened(self, **options: Any) -> Certified:
        for path in self.folder.glob("*/_CHECKPOINT_METADATA"):  # of all steps, which Orbax reads here
            if what := endless(path):
                raise CheckpointError(f"{path} is {what}, not a file; delete {path.parent}")
        context = ocp.Context()
        # By default Orbax takes a slice from each replica, which may differ where memory is bad: what is saved is one.
        context.array.saving.use_replica_parallel = False
        orbax = ocp.training.Checkpointer(self.folder, context=context, preservation_policy=self._newest, **options)
        return Certified(orbax, lock=False)  # the record of the run has one

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Certified]:
        """The checkpointer that writes; where none does, one that touches nothing that another process is writing."""
        if self._writer is not None:
            yield self._writer
            return
        with self._opened() as orbax:
            yield orbax

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and its storage layer raise many kinds
            self._saving = None
            self._abandon()
            why = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise NotWritten(
                f"cannot write checkpoint {self.folder / str(step)} ({first_line(why)}); "
                "make room or name another folder, then continue the run"
            ) from error

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # said already
            if writer is not None:
                writer.close()


class Unsaved(Checkpoints):
    """Of a run that nobody will continue: nothing is saved."""

    def save(self, step: int, state: Any, position: Mapping[str, Any], *, force: bool = False) -> bool:
        return False


class _Newest:
    """Orbax's preservation policy of a run: the newest checkpoints of its course that can be restored.

    Later steps than that which is saved belong to a course that was given up, and a run that is started again would go
    on from them.
    """

    def __init__(self, folder: epath.Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self.saving = 0

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's question before it deletes, once the new checkpoint is complete."""
        past = {step for step in certified_steps(self._folder) if step < self.saving}
        stays = sorted(past | {self.saving})[-self._keep :]
        return [one.step in stays for one in checkpoints]


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
