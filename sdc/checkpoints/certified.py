"""`certify`: an Orbax checkpointer whose checkpoints are verified to restore the bits that were on the devices.

Orbax silently restores an array in which a bit has flipped, and file checksums miss corruption between the device and
the file. Digests are therefore computed on the devices before anything is copied, stored next to the checkpoint, and
compared on the devices after a restore. `audit` compares a checkpoint with its digests without needing the program that
saved it.
"""

import contextlib
import dataclasses
import datetime
import functools
import gc
import inspect
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Self, TypeAlias, TypeVar

import jax
from etils import epath
from jax.sharding import SingleDeviceSharding

from ..multihost import PeerError, Unreachable, everyone, first_line, together
from ..records import RecordError, check_files, names
from ..results import Result, ResultTable
from ..verdict import Judgement, Verdict
from .certificate import (
    MISSING,
    REASONS,
    CertificateError,
    Damaged,
    Draft,
    OtherState,
    Reason,
    Status,
    Statuses,
    Wrong,
    certificate_digest,
    compare,
    misfits,
    named,
    path_of,
    read_certificate,
    remove,
    step_folder,
)

LOG = logging.getLogger("sdc.checkpoints")
Answer = TypeVar("Answer")
ScrubResult: TypeAlias = Literal["clean", "repaired", "damaged", "unreadable", "gone"]
FAILURES = (OSError, RuntimeError, ValueError)  # errors of Orbax, its storage and devices
ORBAX = "orbax/checkpoint"  # part of the path of its modules
NO_TIME = datetime.datetime.fromtimestamp(0, datetime.UTC)
UNFINISHED = ".orbax-checkpoint-tmp"  # part of the names of folders of interrupted saves
AT_ONCE = 1 << 28  # maximum bytes of arrays that an audit reads at a time


class Certified:
    """An Orbax checkpointer that certifies the checkpoints that it saves and verifies those that it loads; see
    `certify`.

    Other attributes (`latest`, `checkpoints`, `metadata`, `should_save`, ...) are those of the wrapped checkpointer.
    """

    def __init__(self, checkpointer: Any, *, lock: bool = True) -> None:
        """Wraps a checkpointer.

        Args:
            checkpointer: see `certify`.
            lock: whether saves lock the folder against other processes; False if the caller locks the folder.

        Raises:
            CertificateError: the checkpointer has an unsupported type.
        """
        manager: Any = getattr(checkpointer, "_manager", None)
        policy = getattr(manager, "_preservation_policy", None)
        if not hasattr(policy, "should_preserve") or not hasattr(manager, "all_steps"):
            raise CertificateError(
                f"{type(checkpointer).__name__} is not a checkpointer that this version of jax-sdc supports; expected "
                "orbax.checkpoint.v1.training.Checkpointer"
            )
        manager._preservation_policy = _Keeping(policy, self)
        self._orbax = checkpointer
        self._folder = epath.Path(checkpointer.directory)
        self._statuses = Statuses(self._folder)
        self._pool: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._saving: Any = (
            None  # Orbax's response to the last save, which keeps a thread until its result is requested
        )
        self._locks, self._owned = lock, False
        self.rejected: list[tuple[int, str]] = []  # steps that the last `restore_verified` skipped, and the reasons

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, lock: bool = True, **options: Any) -> Self:
        """Opens a folder with an Orbax checkpointer of its own, which reads no checkpoint before it is restored:
        damaged metadata of one checkpoint is in the way of no other. `options` are those of Orbax's checkpointer; its
        list of checkpoints has no times."""
        return cls(_open(path_of(folder), **options), lock=lock)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "load", "save", "restore")):
            raise AttributeError(
                f"{name} of the checkpointer is not certified; use save, save_async, save_checkpointables, "
                "save_checkpointables_async, load, load_checkpointables or restore_verified"
            )
        return getattr(self._orbax, name)

    def save(self, step: int, state: Any, **options: Any) -> bool:
        """Saves a tree of arrays, as the wrapped checkpointer does.

        Raises:
            CertificateError: the certificate cannot be written.
        """
        response = self.save_async(step, state, **options)
        return response is not None and response.result()

    def save_async(self, step: int, state: Any, **options: Any) -> "SaveResponse | None":
        """Saves a tree of arrays in the background, as the wrapped checkpointer does. The arrays may be donated as soon
        as this method returns."""
        key = options.get("checkpointable_name", _state_key(self._orbax))
        return self._saved("save_async", step, state, {key: state}, options)

    def save_checkpointables(self, step: int, checkpointables: dict[str, Any], **options: Any) -> bool:
        """Saves several checkpointables, as the wrapped checkpointer does. Checkpointables that contain values other
        than arrays are not certified."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return response is not None and response.result()

    def save_checkpointables_async(
        self, step: int, checkpointables: dict[str, Any], **options: Any
    ) -> "SaveResponse | None":
        """Saves several checkpointables in the background."""
        return self._saved("save_checkpointables_async", step, checkpointables, checkpointables, options)

    # Names used before Orbax 0.12.
    save_pytree, save_pytree_async = save, save_async

    def load(self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str | None = None) -> Any:
        """Restores a tree of arrays and compares it with its certificate.

        Args:
            step: step of the checkpoint (default: the newest).
            abstract_state: shapes, types and shardings of the arrays to restore, as in Orbax.
            checkpointable_name: name of the tree (default: Orbax's name for an unnamed tree).

        Raises:
            Damaged: the checkpoint cannot be restored, or differs from the saved state.
            CertificateError: the checkpoint has no readable certificate.
            Unreachable: another process did not respond.
        """
        key = checkpointable_name or _state_key(self._orbax)
        loaded = self.load_checkpointables(step, {key: abstract_state})
        if key in named(loaded)[1]:
            raise CertificateError(
                f"{key} of checkpoint {step} contains values other than arrays and cannot be verified"
            )
        return loaded[key]

    load_pytree = load

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Restores several checkpointables and compares the certified ones with their certificate; see `load`."""
        self.wait()
        number = self._existing(step)
        certificate = _agreed(number, lambda: read_certificate(self._folder, number))
        if problems := misfits(certificate, abstract_checkpointables or {}):
            raise OtherState(f"the abstract state does not match checkpoint {number}: {_some(problems)}")
        loaded = self._loaded(number, abstract_checkpointables)
        found, uncovered = named(loaded)
        if not found and uncovered:
            raise CertificateError(f"checkpoint {number} has no certified arrays: {', '.join(uncovered)}")
        if uncovered:
            LOG.warning(
                "step %d: %s contains values other than arrays and cannot be verified", number, ", ".join(uncovered)
            )
        # Ignore parts that were not requested.
        partly = {key for key, tree in loaded.items() if any(leaf is ... for leaf in jax.tree.leaves(tree))}
        whole = set(loaded) - partly - set(uncovered)
        lost = [name for name in certificate.names if name not in found and name.split("/")[0] in whole]
        wrong = [Wrong(name, MISSING) for name in lost]
        wrong += compare(certificate, found)
        if wrong:
            self._noted(self._statuses.revoke, number)
            remains = self._statuses.left(number) and all(one.what == MISSING for one in wrong)
            raise Damaged(number, self._folder, f"is damaged: {_some(wrong)}", wrong, remains=remains)
        if set(certificate.names) <= set(found) and found:
            self._noted(self._statuses.vouch, number, "digest")
            self._noted(self._statuses.unmark, number)
        return loaded

    def restore_verified(
        self, abstract_state: Any = None, *, checkpointable_name: str | None = None
    ) -> tuple[Any, int]:
        """Restores the newest checkpoint that passes verification.

        Args:
            abstract_state, checkpointable_name: see `load`.

        Returns:
            The state and its step. `rejected` lists newer steps that were skipped, with the reasons.

        Raises:
            CertificateError: no checkpoint passes; the message states the reason for each.
        """
        self.wait()
        self.rejected = []
        # Storage may list different checkpoints to different processes.
        steps = map(int, everyone(" ".join(map(str, steps_of(self._orbax))))[0].split())
        for step in sorted(steps, reverse=True):
            try:
                state = self.load(step, abstract_state, checkpointable_name=checkpointable_name)
            except CertificateError as error:
                LOG.warning("skipping checkpoint %d: %s", step, error)
                self.rejected.append((step, str(error)))
                continue
            if not self.status(step).history:
                LOG.warning("checkpoint %d: history not verified, since the certificate was made after the save", step)
            return state, step
        why = "; ".join(f"{step}: {words}" for step, words in self.rejected) or "there are no checkpoints"
        raise CertificateError(f"no checkpoint in {self._folder} can be verified ({why})")

    def certify_existing(
        self, step: int, abstract_state: Any = None, *, checkpointable_name: str | None = None
    ) -> None:
        """Certifies the current content of a checkpoint that has no certificate; its history remains unverified.

        Raises:
            CertificateError: the checkpoint already has a certificate, or cannot be restored.
        """
        self.certify_all(step, {checkpointable_name or _state_key(self._orbax): abstract_state})

    def certify_all(self, step: int, abstract_checkpointables: dict[str, Any] | None = None) -> None:
        """Certifies the current content of several checkpointables (default: all), as `certify_existing` does."""
        self.wait()
        number = self._existing(step)
        if step_folder(self._folder, number).exists():
            raise CertificateError(
                f"checkpoint {number} already has a certificate, which can be deleted only with the checkpoint"
            )
        loaded = self._loaded(number, abstract_checkpointables)
        if not named(loaded)[0]:
            raise CertificateError(f"checkpoint {number} contains nothing that can be digested")
        draft = Draft(*named(loaded))
        _agreed(number, lambda: draft.write(self._folder, number, history=False))

    def vouch(self, step: int, reason: Reason) -> None:
        """Records evidence that the saved state was correct: twins agreed (`twins`), or a guard detected nothing
        (`guard`).

        Raises:
            CertificateError: the step has no certificate, or the reason is unknown.
        """
        if reason not in REASONS:
            raise CertificateError(f"{reason!r} is not a valid reason; expected one of {', '.join(REASONS)}")
        self._note(step, self._statuses.vouch, reason)

    def protect(self, step: int, protected: bool = True) -> None:
        """Protects a checkpoint from deletion by the policy, or ends the protection if `protected` is False.

        Raises:
            CertificateError: the step has no certificate.
        """
        self._note(step, self._statuses.protect, protected)

    def is_protected(self, step: int) -> bool:
        """Returns whether a checkpoint is protected from deletion by the policy."""
        return self._statuses.is_protected(step)

    def status(self, step: int) -> Status:
        """Returns the status of a checkpoint: `CANDIDATE` or `VERIFIED`, and the evidence.

        Raises:
            CertificateError: the checkpoint has no readable certificate.
        """
        certificate = read_certificate(self._folder, self._existing(step))
        return self._statuses.status(certificate.step, history=certificate.history)

    def delete(self, step: Any, **options: Any) -> Any:
        """Deletes a checkpoint and its certificate."""
        self.wait()
        number = self._existing(step)
        self._noted(self._statuses.leaving, number)
        done = self._orbax.delete(step, **options)
        self._statuses.discard(number)
        return done

    def wait(self) -> None:
        """Waits for pending background writes.

        Raises:
            CertificateError: the certificate cannot be written. The error is raised only once.
        """
        saving, self._saving = self._saving, None
        try:
            with _tidy():
                if saving is not None:
                    saving.result()
                self._orbax.wait()
        finally:
            self._written()

    def close(self) -> None:
        """Waits for pending writes and stops all threads."""
        try:
            self.wait()
        finally:
            try:
                self._orbax.close()
            finally:
                pool, self._pool = self._pool, None
                if pool is not None:
                    pool.shutdown()
                self._owned = False
                self._statuses.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*FAILURES if kind else ()):  # the first error takes precedence
            self.close()

    def _saved(
        self, method: str, step: int, given: Any, checkpointables: Mapping[str, Any], options: Mapping[str, Any]
    ) -> "SaveResponse | None":
        self._written()
        if step in dict(self.rejected):  # it cannot be restored, and Orbax would not save another one of its step
            options = {"force": True, "overwrite": True, **options}
        # Digests of a state that is not saved would be wasted.
        due = options.get("force") or self._orbax.should_save(step)
        draft = Draft(*named(checkpointables)) if due else None
        if due:
            if self._locks and not self._owned:
                _agreed(step, self._statuses.lock)
                self._owned = True
            self.wait()  # as Orbax itself would; from here on, the folder has only complete checkpoints
            self._statuses.prune()
            _make_way(self._folder, step)
            if uncovered := named(checkpointables)[1]:
                LOG.warning(
                    "step %d: %s contains values other than arrays and is not certified", step, ", ".join(uncovered)
                )
        if options.get("overwrite"):
            self._noted(self._statuses.leaving, step)
        with _tidy():
            response = getattr(self._orbax, method)(step, given, **options)
        if response is None:
            return None
        if options.get("overwrite"):
            self._statuses.forget(step)
        self._pool = self._pool or ThreadPoolExecutor(1, "sdc-certificates")
        self._saving = response
        self._writing = self._pool.submit((draft or Draft(*named(checkpointables))).write, self._folder, step)
        return SaveResponse(response, self._written)

    def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except Exception as error:  # errors of the storage or a device
                raise CertificateError(
                    f"the certificate of the last checkpoint cannot be written to {self._folder} "
                    f"({first_line(error)}); the checkpoint itself may exist, but is not certified"
                ) from error

    def _loaded(self, step: int, abstract: dict[str, Any] | None) -> dict[str, Any]:
        def load() -> dict[str, Any]:
            check_files(self._orbax.directory / self._orbax._step_name_format.build_name(step))
            with _tidy():
                return dict(self._orbax.load_checkpointables(step, abstract))

        try:
            return together(load)
        except Unreachable:
            raise
        except Exception as error:  # Orbax and its storage layer raise many types
            self._noted(self._statuses.doubt, step)
            left = self._statuses.left(step)
            words = "was being deleted when a run ended, and cannot be read" if left else "cannot be read"
            raise Damaged(step, self._folder, f"{words}: {first_line(_chain(error)[-1])}", remains=left) from error

    def _existing(self, step: Any) -> int:
        steps = steps_of(self._orbax)
        number = max(steps, default=None) if step is None else int(getattr(step, "step", step))
        if number is None or number not in steps:
            there = ", ".join(map(str, sorted(steps))) or "none"
            raise CertificateError(f"no checkpoint of step {number} in {self._folder}; available steps: {there}")
        return number

    def _note(self, step: int, note: Callable[..., None], *what: Any) -> None:
        """Updates the status of a checkpoint that has a certificate."""
        self.wait()
        _agreed(step, lambda: read_certificate(self._folder, self._existing(step)))
        try:
            note(step, *what)
        except (OSError, RecordError) as error:
            raise CertificateError(f"cannot write to {self._folder} ({error})") from error

    def _noted(self, note: Callable[..., None], *what: Any) -> None:
        """Stores the result of a comparison. If this result cannot be stored, a warning is logged, and the next
        comparison stores its own result."""
        try:
            note(*what)
        except (OSError, RecordError) as error:
            LOG.warning("cannot update the status of checkpoint %s in %s (%s)", what[0], self._folder, error)


class SaveResponse:
    """The response to a background save."""

    def __init__(self, orbax: Any, written: Callable[[], None]) -> None:
        self._orbax, self._written = orbax, written

    def result(self, timeout: float | None = None) -> bool:
        """Waits until the checkpoint and its certificate are written, and returns whether this succeeded.

        Raises:
            CertificateError: the certificate cannot be written.
        """
        with _tidy():
            done = bool(self._orbax.result(timeout))
        self._written()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._orbax, name)


def certify(checkpointer: Any) -> Certified:
    """Wraps an Orbax checkpointer so that it certifies saved checkpoints and verifies loaded ones.

    Digests of every array are computed on the devices before Orbax copies anything, and stored next to the checkpoint.
    Restored arrays, under any sharding, are compared with these digests on the devices: `load` returns the saved bits
    or raises an error. No policy deletes the newest verified checkpoint.

    Args:
        checkpointer: `orbax.checkpoint.v1.training.Checkpointer`, with any policies and context.

    Returns:
        The wrapped checkpointer, to be used in place of the given one.

    Raises:
        CertificateError: the checkpointer has an unsupported type.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from orbax.checkpoint import v1 as ocp
        >>> import sdc
        >>> state = {"w": jnp.arange(4.0)}
        >>> with sdc.certify(ocp.training.Checkpointer(tempfile.mkdtemp())) as checkpointer:
        ...     saved = checkpointer.save(10, state)
        ...     restored, step = checkpointer.restore_verified(state)
        ...     checkpointer.status(step).reasons
        ('digest',)
    """
    return Certified(checkpointer)


def _agreed(step: int, action: Callable[[], Answer]) -> Answer:
    """Runs an action in all processes; if the action fails in one process, raises an error in all processes."""
    try:
        return together(action)
    except PeerError as error:
        raise CertificateError(f"step {step}: another process reports: {error}") from error


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    """Disposes of Orbax's other reads and writes if one of them fails.

    Otherwise, each of them would print a traceback, immediately or when TensorStore completes it after the event loop
    has closed.
    """
    _ignore_remains()
    try:
        yield
    except Exception as error:
        for each in _chain(error):
            traceback.clear_frames(each.__traceback__)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            gc.collect()
        raise


@functools.cache
def _ignore_remains() -> None:
    """Ignores errors of Orbax's unfinished reads and writes from now on: they may be completed or deleted at any
    time."""
    hook = sys.unraisablehook

    def filtered(found: Any) -> None:
        closed = found.object is None and "Event loop is closed" in str(found.exc_value)  # not called by Python
        if not (closed or (inspect.iscoroutine(found.object) and ORBAX in found.object.cr_code.co_filename)):
            hook(found)

    sys.unraisablehook = filtered
    # asyncio logs the repr of a task, with the file of its coroutine, which may be one of TensorStore's.
    logging.getLogger("asyncio").addFilter(
        lambda entry: (
            ORBAX not in entry.getMessage() and not (entry.exc_info and "tensorstore" in f"{entry.exc_info[1]}")
        )
    )


def _chain(error: BaseException) -> list[BaseException]:
    """Returns an error and its causes, since Orbax's own error does not say what is wrong with a file."""
    return [error, *([] if error.__cause__ is None else _chain(error.__cause__))]


def _some(problems: Sequence[object]) -> str:
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(map(str, problems[:3])) + more


def steps_of(checkpointer: Any) -> list[int]:
    """Returns the steps of the complete checkpoints. The checkpointer's own list requires timestamps that may not have
    been read yet.

    Wrapping a checkpointer fails for versions of Orbax that lack the private names used here.
    """
    return sorted(map(int, checkpointer._manager.all_steps()))


def _state_key(checkpointer: Any) -> str:
    """Returns the name under which Orbax saves an unnamed tree."""
    return str(inspect.signature(checkpointer.save).parameters["checkpointable_name"].default)


class _Keeping:
    """A preservation policy that keeps additional steps, and marks steps before their deletion."""

    def __init__(self, policy: Any, certified: Certified) -> None:
        self._policy, self._certified = policy, certified

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        mine = self._certified
        more = mine._statuses.kept(steps_of(mine._orbax))
        kept = self._policy.should_preserve(checkpoints, context=context)
        found = [bool(stays) or one.step in more for one, stays in zip(checkpoints, kept, strict=True)]
        for one, stays in zip(checkpoints, found, strict=True):
            if not stays:
                mine._noted(mine._statuses.leaving, int(one.step))
        return found


@dataclasses.dataclass(frozen=True, repr=False)
class Audit(Result):
    """The result of auditing a checkpoint.

    Attributes:
        step: step of the checkpoint.
        status: status of the checkpoint; None if there is no readable certificate.
        covered: number of certified arrays and values.
        bytes: size of the arrays.
        uncovered: checkpointables that are not in the certificate.
        compared: whether the checkpoint was restored and compared with its certificate.
        problem: the reason why the checkpoint could not be verified, or an empty string.
        wrong: differences from the certificate.
        remains: whether the checkpoint is the remainder of an interrupted deletion, or was deleted or replaced during
            the audit.
        certificate: digest of the certificate's files.
    """

    step: int
    status: Status | None
    covered: int
    bytes: int
    uncovered: Sequence[str]
    compared: bool
    problem: str
    wrong: Sequence[Wrong]
    remains: bool = False
    certificate: str = ""

    def verdict(self) -> Judgement:
        """Returns the verdict on the checkpoint."""
        if self.wrong:
            more = f" and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
            return Judgement(Verdict.CORRUPT, f"checkpoint {self.step}: {self.wrong[0]}{more}")
        if self.problem or self.uncovered:
            why = self.problem or f"{', '.join(self.uncovered)} is not certified"
            return Judgement(Verdict.INCONCLUSIVE, f"checkpoint {self.step}: {why}")
        if not self.compared:
            return Judgement(None, f"checkpoint {self.step} was not compared with its certificate")
        if not self.covered:
            return Judgement(Verdict.INCONCLUSIVE, f"checkpoint {self.step}: no array has a certificate")
        return Judgement(
            Verdict.CLEAN, f"checkpoint {self.step}: {self.covered:,} arrays and values equal their certificates"
        )

    def table(self) -> ResultTable:
        """Returns what differs from the certificate."""
        return ResultTable(("what", "difference"), tuple((one.name, str(one)) for one in self.wrong))

    def mark(self, folder: str) -> ScrubResult:
        """Marks the checkpoint as damaged if it differs, and removes this mark if it does not. Policies keep an older
        checkpoint in place of a marked one; restores compare every checkpoint anyway. A mark that cannot be written is
        logged.

        Returns:
            `clean`, `repaired` (clean, and was marked), `damaged`, `unreadable` (it could not be compared), or `gone`
            (deleted or replaced meanwhile).
        """
        place = path_of(folder)
        statuses = Statuses(place)
        # A run notes that a checkpoint is leaving, deletes or replaces it, deletes its certificate, and then the note.
        leaving = (self.problem or self.wrong) and statuses.left(self.step)
        replaced = self.certificate != certificate_digest(place, self.step)
        if self.remains or leaving or replaced or not (place / str(self.step)).exists():
            return "gone"
        if not self.compared or (self.problem and not self.wrong):
            return "unreadable"
        marked = statuses.mark_of(self.step) is not None
        try:
            if self.wrong:
                statuses.mark(self.step, self.certificate, self.problem)
            elif marked:
                statuses.unmark(self.step)
        except (OSError, RecordError) as error:
            LOG.warning("cannot mark checkpoint %d in %s (%s)", self.step, folder, error)
        return "damaged" if self.wrong else "repaired" if marked else "clean"


def checkpoints_in(folder: str) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder that an Orbax checkpointer wrote.

    Raises:
        CertificateError: the folder does not exist or contains no checkpoints.
    """
    place = path_of(folder)
    try:
        with contextlib.suppress(NotADirectoryError):
            names(place)
    except (OSError, RecordError) as error:  # an object store without its client, credentials or a connection
        raise CertificateError(f"{folder} cannot be read ({first_line(error)})") from error
    if not place.is_dir():
        raise CertificateError(f"{folder} is not a folder; expected one that an Orbax checkpointer wrote")
    with _opened(place) as checkpointer:
        # What lies in the place of a checkpoint and is no folder cannot be read; an audit says so.
        odd = (int(path.name) for path in place.iterdir() if path.name.isdecimal() and not path.is_dir())
        steps = sorted({*steps_of(checkpointer), *odd})
    if (place / "process-0" / "layout.json").exists():
        raise CertificateError(f"{folder} is a running checkpoint; read it with sdc.checkpoints.RunningCheckpoint.read")
    if not steps:
        raise CertificateError(
            f"there are no complete checkpoints in {folder}; expected a folder whose subfolders are "
            "checkpoints, named by their steps"
        )
    return steps


def audit(folder: str, step: int, *, restore: bool = True, pace: Callable[[int], None] | None = None) -> Audit:
    """Audits one checkpoint by restoring it array by array on this process's first device.

    Args:
        folder: folder that an Orbax checkpointer wrote.
        step: step of the checkpoint.
        restore: whether to restore and compare the checkpoint, or only to read its certificate.
        pace: called before each read with the number of bytes, so that it can wait; reads are then of 16 MiB, or of
            one array if that is larger.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from orbax.checkpoint import v1 as ocp
        >>> import sdc
        >>> from sdc.checkpoints import audit
        >>> folder = tempfile.mkdtemp()
        >>> with sdc.certify(ocp.training.Checkpointer(folder)) as checkpointer:
        ...     saved = checkpointer.save(10, {"w": jnp.arange(4.0)})
        >>> audit(folder, 10).problem
        ''
    """
    place = path_of(folder)
    identity = certificate_digest(place, step)
    try:
        certificate = read_certificate(place, step)
    except CertificateError as error:
        return Audit(step, None, 0, 0, (), False, str(error), (), certificate=identity)
    status = Statuses(place).status(step, history=certificate.history)
    size = 0
    for entry in certificate.arrays.values():
        try:
            width = jax.numpy.dtype(entry.dtype).itemsize
        except TypeError:  # the size of PRNG keys is negligible
            width = 8
        size += width * math.prod(entry.shape)
    about = Audit(
        step, status, len(certificate.names), size, certificate.uncovered, restore, "", (), certificate=identity
    )
    if not certificate.names:
        return dataclasses.replace(about, compared=False, problem="it has no certified arrays")
    if not restore:
        return about
    wrong: list[Wrong] = []
    seen: set[str] = set()
    problem = ""
    try:
        with _opened(place, step) as checkpointer, _tidy():
            for part in _parts(checkpointer, step, set(certificate.uncovered), pace):
                seen |= set(part)
                wrong += [one for one in compare(certificate, part) if one not in wrong]
        if lost := [name for name in certificate.names if name not in seen]:
            problem = f"the checkpoint lacks {lost[0]}{f' and {len(lost) - 1} more' if lost[1:] else ''}"
    except Exception as error:  # Orbax and its storage layer raise many types
        problem = f"it cannot be read ({first_line(_chain(error)[-1])})"
    if problem and not wrong and Statuses(place).left(step):
        problem = "it was being deleted when a run ended; the next save of that run deletes the rest"
        return dataclasses.replace(about, compared=False, problem=problem, remains=True)
    if (problem or wrong) and certificate_digest(place, step) != identity:
        problem = "it was deleted or replaced while it was compared"
        return dataclasses.replace(about, compared=False, problem=problem, remains=True)
    return dataclasses.replace(about, wrong=wrong, problem=problem or "; ".join(map(str, wrong[:3])))


def certify_folder(folder: str, step: int) -> None:
    """Restores a whole checkpoint that has no certificate, and certifies its current content.

    Raises:
        CertificateError: the checkpoint already has a certificate, or cannot be restored.
    """
    with _opened(path_of(folder), step) as checkpointer:
        place = SingleDeviceSharding(jax.local_devices()[0])
        metadata = checkpointer.checkpointables_metadata(step).metadata
        Certified(checkpointer).certify_all(step, jax.tree.map(lambda leaf: _abstract(leaf, place), metadata))


def _parts(
    checkpointer: Any, step: int, left_out: set[str], pace: Callable[[int], None] | None
) -> Iterator[dict[str, Any]]:
    """Yields all leaves of a checkpoint in groups."""
    place = SingleDeviceSharding(jax.local_devices()[0])
    for key, tree in checkpointer.checkpointables_metadata(step).metadata.items():
        if key in left_out:
            continue
        if (
            tree is None
        ):  # Orbax does not describe trees that contain Python's True or False, and restores them as a whole
            yield named(checkpointer.load_checkpointables(step, {key: None}))[0]
            continue
        leaves, structure = jax.tree.flatten(tree)
        sizes = [leaf.dtype.itemsize * math.prod(leaf.shape) if hasattr(leaf, "dtype") else 0 for leaf in leaves]
        first = 0
        while first < len(leaves):
            last, held = first + 1, sizes[first]
            while last < len(leaves) and held + sizes[last] <= (AT_ONCE if pace is None else AT_ONCE >> 4):
                last, held = last + 1, held + sizes[last]
            wanted = [_abstract(leaf, place) if first <= n < last else ... for n, leaf in enumerate(leaves)]
            if pace is not None:
                pace(held)
            loaded = checkpointer.load_checkpointables(step, {key: jax.tree.unflatten(structure, wanted)})
            yield named(loaded)[0]
            first = last


def _abstract(leaf: Any, place: SingleDeviceSharding) -> Any:
    if hasattr(leaf, "sharding_metadata"):  # the leaf was on devices
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    return leaf


@contextlib.contextmanager
def _opened(place: epath.Path, step: int | None = None) -> Iterator[Any]:
    if step is not None:
        try:
            check_files(place / str(step))
        except RecordError as error:
            raise CertificateError(f"in checkpoint {step} of {place}, {error}") from error
    with contextlib.closing(_open(place)) as checkpointer:
        yield checkpointer


def _open(folder: epath.Path, **options: Any) -> Any:
    from orbax.checkpoint import path, v1 as ocp

    if options.get("cleanup_tmp_directories"):
        _make_way(folder)
    return ocp.training.Checkpointer(folder, step_name_format=_Names(path.step.standard_name_format()), **options)


def _make_way(folder: epath.Path, step: int | None = None) -> None:
    """Deletes what is no folder and lies in the place of a checkpoint that is to be saved, or of an interrupted save:
    Orbax deletes it as a folder, and would wait for ever for a pipe."""
    if jax.process_index() or not folder.is_dir():
        return
    there = [path for path in folder.iterdir() if path.name == str(step) or UNFINISHED in path.name]
    for path in there if step is None else (*there, step_folder(folder, step)):
        if not path.is_dir():
            remove(path)


class _Names:
    """Orbax's names of checkpoints. Orbax would open the metadata of each checkpoint for its time, and a pipe in one of
    them would block it; with `lightweight_initialize`, it loads nothing (0.12.8: "year 0 is out of range")."""

    def __init__(self, orbax: Any) -> None:
        self._orbax = orbax

    def __getattr__(self, name: str) -> Any:
        return getattr(self._orbax, name)

    def find_all(self, base_path: Any) -> Iterator["_Found"]:
        return (_Found(each.step, each.path) for each in self._orbax.find_all(base_path) if each.path.is_dir())


@dataclasses.dataclass(frozen=True)
class _Found:
    """A checkpoint that has not been read."""

    step: int
    path: epath.Path
    commit_timestamp: datetime.datetime = NO_TIME
