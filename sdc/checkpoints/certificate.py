"""Certificates: files next to a checkpoint that state its expected content, and the comparison of restored arrays with
this content.

    FOLDER/certificates/STEP/process-N.json   digests of the data of process N's devices when the step was saved
    FOLDER/certificates/STEP/status.json      the evidence for the checkpoint
    FOLDER/certificates/damaged/STEP.json     the mark of a scrub that found the checkpoint damaged

docs/checkpoints.md describes the fields. A certificate states the algorithm of its digests; digests of different
algorithms are never compared. Process 0 of a run maintains the status. A checkpoint whose status is unreadable is
protected from deletion as if it were verified, but is reported as a candidate.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from etils import epath

from ..multihost import everyone
from ..records import Format, Lock, Record, RecordError, now, read_bytes, reason
from ..schema import Header
from ..twins import ALGORITHM
from .blocks import Cut, Shares, apart_text, box_text, cut_of, parse_box, take, whole

FOLDER = "certificates"
MISSING = "is missing"


class CertificateError(ValueError):
    """A checkpoint has no certificate, does not match its certificate, or cannot be certified."""


class StoreError(CertificateError):
    """A running checkpoint belongs to another state, is damaged, or cannot be written."""


class OtherState(CertificateError):
    """A checkpoint contains a state that does not match the requested one."""


class Wrong(NamedTuple):
    """A difference from the certificate.

    Attributes:
        name: name of the array or value.
        what: description of the difference.
        rows: start and stop rows of each block that differs; empty if unknown.
    """

    name: str
    what: str
    rows: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        some = ", ".join(f"{start}:{stop}" for start, stop in self.rows[:4])
        more = f" and {len(self.rows) - 4} more blocks" if len(self.rows) > 4 else ""
        return f"{self.name} {self.what}{some and f' in rows {some}'}{more}"


class Damaged(CertificateError):
    """Restoring a checkpoint does not yield the saved state.

    Attributes:
        step: step of the checkpoint.
        why: the reason.
        wrong: differences from the certificate; empty if the checkpoint is unreadable.
        remains: whether the checkpoint is the remainder of an interrupted deletion.
    """

    def __init__(
        self, step: int, folder: epath.Path, why: str, wrong: Sequence[Wrong] = (), *, remains: bool = False
    ) -> None:
        self.step, self.why, self.wrong, self.remains = step, why, list(wrong), remains
        super().__init__(f"checkpoint {step} of {folder} {why}")


class Digests(msgspec.Struct):
    """One process's digests of an array."""

    dtype: str
    shape: tuple[int, ...]
    rows: int  # rows per block
    blocks: dict[
        str, dict[str, str]
    ]  # for each index range of a shard: by block number, the two words of its share of each block


class CertificatePart(Header, kw_only=True, tag="jax-sdc certificate"):
    """The certificate file of one process."""

    algorithm: str = ALGORITHM
    step: int
    process: int
    processes: int
    history: bool  # whether the digests were computed before the state was saved
    arrays: dict[str, Digests]
    values: dict[str, str]  # SHA-256 digests of values other than JAX arrays
    uncovered: list[str]  # checkpointables that are not certified
    apart: list[str]  # arrays whose replicas differed


PARTS = Format(type=CertificatePart, noun="certificate", remedy="delete the checkpoint, or restore another one")


@dataclasses.dataclass(frozen=True)
class CertifiedArray:
    """The expected content of an array: the digests of its blocks, separately for each shard in the run that saved
    it."""

    dtype: str
    shape: tuple[int, ...]
    cut: Cut
    shares: Shares

    def total(self) -> np.ndarray:
        """Returns the digests of all blocks: uint32 of shape (blocks, 2)."""
        found = np.zeros((self.cut.blocks, 2), np.uint32)
        for share in self.shares.values():
            found[: len(share)] += share
        return found


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The expected content of a checkpoint, from all processes' files. Names are `CHECKPOINTABLE/PATH/IN/TREE`."""

    step: int
    history: bool  # False: the digests were computed from a later restore
    arrays: Mapping[str, CertifiedArray]
    values: Mapping[str, str]
    uncovered: Sequence[str]
    apart: Sequence[str]

    @property
    def names(self) -> list[str]:
        return sorted({*self.arrays, *self.values})


class Draft:
    """A pending certificate, whose digests the devices are still computing. The digested arrays may be donated as soon
    as the draft has been created."""

    def __init__(self, covered: Mapping[str, Any], uncovered: Sequence[str] = ()) -> None:
        self._uncovered = list(uncovered)
        arrays = {name: leaf for name, leaf in covered.items() if isinstance(leaf, jax.Array)}
        self._types = {name: (str(leaf.dtype), tuple(leaf.shape), cut_of(leaf).rows) for name, leaf in arrays.items()}
        self._values = {name: value_digest(leaf) for name, leaf in covered.items() if name not in arrays}
        self._digests = take(arrays)

    def part(self, step: int, *, history: bool = True) -> CertificatePart:
        """Waits for the digests and returns this process's part of the certificate."""
        shares, apart = self._digests()

        def words(share: np.ndarray) -> dict[str, str]:  # of the blocks that a shard overlaps, by number
            return {
                str(number): f"{h:08x}{squares:08x}"
                for number, (h, squares) in enumerate(share.tolist())
                if h or squares
            }

        arrays = {
            name: Digests(*about, {box_text(box): words(share) for box, share in shares[name].items()})
            for name, about in self._types.items()
        }
        return CertificatePart(
            step=step, process=jax.process_index(), processes=jax.process_count(), history=history, arrays=arrays,
            values=self._values, uncovered=self._uncovered, apart=apart,
        )  # fmt: skip

    def write(self, folder: epath.Path, step: int, *, history: bool = True) -> None:
        """Writes this process's file; raises OSError if it cannot be written."""
        part = self.part(step, history=history)
        place = step_folder(folder, step)
        Record.check_owner(place)
        place.mkdir(parents=True, exist_ok=True)
        PARTS.write(place / f"process-{part.process}.json", part)


def path_of(folder: str | os.PathLike[str]) -> epath.Path:
    """Returns the absolute path of a folder, since Orbax and TensorStore do not accept relative paths."""
    where = os.fspath(folder)
    return epath.Path(where if "://" in where else os.path.abspath(where))


def remove(path: epath.Path) -> None:
    """Deletes a folder, or what is in its place: deleting a pipe as a folder would wait for ever."""
    if path.is_dir() and not os.path.islink(path):
        path.rmtree()
    else:
        path.unlink(missing_ok=True)


def step_folder(folder: epath.Path, step: int) -> epath.Path:
    return folder / FOLDER / str(step)


def certified_steps(folder: epath.Path, *, marked: bool = True) -> list[int]:
    """Returns the steps that have a complete Orbax checkpoint and parts of a certificate from all processes; only
    folders with numeric names are considered. Without `marked`, steps that a scrub marked as damaged are left out."""
    paths = folder.iterdir() if folder.is_dir() else ()
    # Orbax writes this file last.
    done = (int(path.name) for path in paths if path.name.isdecimal() and (path / "commit_success.txt").exists())
    found = sorted(step for step in done if _finished(step_folder(folder, step)))
    return found if marked else [step for step in found if Statuses(folder).mark_of(step) is None]


def _finished(place: epath.Path) -> bool:
    """Returns whether all parts of a certificate exist; an unreadable part is rejected only when the checkpoint is
    restored."""
    first = place / "process-0.json"
    try:
        processes = msgspec.json.decode(read_bytes(first), type=_Processes).processes
    except FileNotFoundError:
        return False
    except (OSError, RecordError, msgspec.DecodeError, RecursionError):
        return first.exists()
    return all((place / f"process-{process}.json").exists() for process in range(1, processes))


class _Processes(msgspec.Struct):
    processes: int


COVERED = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, str)  # types that can be digested


def named(checkpointables: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns all values that can be digested, by name, and the checkpointables that contain any other value.

    Values that a partial restore omits (`...`) are left out.
    """
    found: dict[str, Any] = {}
    uncovered = []
    for key, tree in checkpointables.items():
        leaves = named_tree(key, tree)
        if all(leaf is ... or isinstance(leaf, COVERED) for leaf in leaves.values()):
            found |= {name: leaf for name, leaf in leaves.items() if leaf is not ...}
        else:
            uncovered.append(key)
    return found, uncovered


def named_tree(key: str, tree: Any) -> dict[str, Any]:
    """Returns the leaves of a checkpointable by name; if two paths would have the same name, names all leaves in
    Python's notation."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    simple = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if len(set(simple)) < len(simple):
        simple = [jax.tree_util.keystr(path) for path, _ in leaves]
    return {f"{key}/{name}" if name else key: leaf for name, (_, leaf) in zip(simple, leaves, strict=True)}


def value_digest(value: Any) -> str:
    """Returns the SHA-256 digest of the type, shape and content of a NumPy array, number or string."""
    if isinstance(value, str):
        return hashlib.sha256(f"str {value}".encode()).hexdigest()
    array = np.ascontiguousarray(value)
    array = array.astype(array.dtype.newbyteorder("<"))
    return hashlib.sha256(f"{array.dtype.str} {np.shape(value)} ".encode() + array.tobytes()).hexdigest()


def certificate_digest(folder: epath.Path, step: int) -> str:
    """Returns the SHA-256 digest of all files of a step's certificate, which distinguishes a checkpoint from one that
    replaced it; an empty string if there is no readable certificate."""
    place = step_folder(folder, step)
    try:
        paths = sorted(path for path in place.iterdir() if path.name.startswith("process-"))
        return hashlib.sha256(b"".join(map(read_bytes, paths))).hexdigest() if paths else ""
    except (OSError, RecordError):  # another process has just deleted it
        return ""


def read_certificate(folder: epath.Path, step: int) -> Certificate:
    place = step_folder(folder, step)
    first = _read(place, 0, step)
    parts = [first, *(_read(place, process, step) for process in range(1, first.processes))]
    try:
        return _merged(parts, f"step {step}: its certificate covers only part of {{}}")
    except CertificateError:
        raise
    except (ValueError, AttributeError) as error:
        raise CertificateError(f"the certificate of step {step} is damaged ({error!r})") from error


def _read(place: epath.Path, process: int, step: int) -> CertificatePart:
    path = place / f"process-{process}.json"
    try:
        part = PARTS.read(path)
    except RecordError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            what = "there is no certificate" if process == 0 else f"the certificate lacks the part of process {process}"
            raise CertificateError(f"step {step}: {what} ({path} is missing)") from None
        raise CertificateError(f"step {step}: {error}") from error
    if (part.step, part.process) != (step, process):
        raise CertificateError(f"step {step}: {path} belongs to step {part.step}, process {part.process}")
    if part.algorithm != ALGORITHM:
        raise CertificateError(
            f"step {step}: {path} has digests of the algorithm {part.algorithm!r}; expected {ALGORITHM!r}"
        )
    return part


def _merged(parts: Sequence[CertificatePart], incomplete: str) -> Certificate:
    """Merges the certificates of all processes; `incomplete` is the message if only a part of an array, `{}`, is
    covered."""
    arrays: dict[str, CertifiedArray] = {}
    values: dict[str, str] = {}
    apart = [text for part in parts for text in part.apart]
    for part in parts:
        values |= part.values
        for name, entry in part.arrays.items():
            there = arrays.setdefault(
                name, CertifiedArray(entry.dtype, entry.shape, Cut(entry.shape or (1,), entry.rows), {})
            )
            for text, words in entry.blocks.items():
                box, share = parse_box(text), np.zeros((max(map(int, words), default=-1) + 1, 2), np.uint32)
                for number, word in words.items():
                    share[int(number)] = int(word[:8], 16), int(word[8:], 16)
                if not np.array_equal(there.shares.setdefault(box, share), share):
                    apart.append(apart_text(name, box))
    for name, found in arrays.items():
        data = next(iter(found.shares), ())
        # The data of PRNG keys has one more axis than the keys.
        shape = (*found.shape, *(stop for _, stop in data[len(found.shape) :]))
        if not whole(found.shares, shape):
            raise CertificateError(incomplete.format(name))
        arrays[name] = dataclasses.replace(found, cut=Cut(shape or (1,), found.cut.rows))
    uncovered = sorted({key for part in parts for key in part.uncovered})
    return Certificate(parts[0].step, all(part.history for part in parts), arrays, values, uncovered, apart)


def compare(certificate: Certificate, leaves: Mapping[str, Any]) -> list[Wrong]:
    """Compares restored values with their certificate. All processes must call this function with the same names.

    Leaves that are not in the certificate count as wrong; entries of the certificate without a leaf are ignored. The
    result is the same in all processes. Raises `Unreachable` if a process does not respond.
    """
    wrong = [
        Wrong(text.rpartition(" at ")[0], f"differed between devices when it was saved ({text})")
        for text in certificate.apart
    ]
    wrong += [Wrong(name, "is not in the certificate") for name in leaves if name not in certificate.names]
    covered: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if name in certificate.values:
            covered[name] = leaf
            if isinstance(leaf, jax.Array):
                covered[name] = (
                    np.asarray(leaf) if leaf.is_fully_addressable else "it is distributed over several processes"
                )
        elif name in certificate.arrays:
            array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
            if not isinstance(leaf, jax.Array) and array.dtype != (dtype := np.asarray(leaf).dtype):
                wrong.append(Wrong(name, f"has type {dtype}, which JAX would convert; set jax_enable_x64"))
            elif problem := _misfit(certificate.arrays[name], array):
                wrong.append(Wrong(name, problem))
            else:
                covered[name] = array
    said = everyone(msgspec.json.encode(Draft(covered).part(certificate.step)).decode(), at="verifying a checkpoint")
    parts = [msgspec.json.decode(text, type=CertificatePart) for text in said]
    found = _merged(parts, "{}: these processes hold only a part of it; restore it on all their devices")
    for text in found.apart:
        name, _, where = text.rpartition(" at ")
        wrong.append(Wrong(name, f"differs between devices at {where}"))
    for name in found.names:
        if name in found.arrays:
            entry, expected = found.arrays[name], certificate.arrays[name]
            if rows := expected.cut.differing(entry.total(), expected.total()):
                wrong.append(Wrong(name, "differs", rows))
        elif any(part.values[name] != certificate.values[name] for part in parts):
            wrong.append(Wrong(name, "differs"))
    return list(dict.fromkeys(wrong))


def misfits(certificate: Certificate, abstract: Mapping[str, Any]) -> list[str]:
    """Describes the differences between an abstract state (a tree for each checkpointable; None accepts any state) and
    the saved state."""
    found = []
    for key, tree in abstract.items():
        if tree is None or key in certificate.uncovered:
            continue
        saved = {name for name in certificate.names if name == key or name.startswith(f"{key}/")}
        leaves = named_tree(key, tree)
        found += [f"it has {name}, which was not saved" for name in leaves if name not in saved]
        found += [f"it has no {name}, which was saved" for name in sorted(saved) if name not in leaves]
        for name, leaf in leaves.items():
            if name in certificate.values and isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
                found.append(f"{name} was saved as a NumPy array, number or text; give a value of the saved type")
            elif name in certificate.arrays and isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
                problem = _misfit(certificate.arrays[name], leaf)
                found += [f"{name} {problem}"] if problem else []
    return found


def _misfit(entry: CertifiedArray, array: Any) -> str | None:
    if str(array.dtype) != entry.dtype:
        return (
            f"was certified as {entry.dtype}, not as {array.dtype}; restore it as {entry.dtype} and convert it "
            "afterwards"
        )
    if tuple(array.shape) != entry.shape:
        return f"was certified with shape {list(entry.shape)}, not {list(array.shape)}"
    return None


STATUS = "status.json"
Reason: TypeAlias = Literal["digest", "twins", "guard"]
REASONS: tuple[Reason, ...] = get_args(Reason)
CANDIDATE, VERIFIED, DAMAGED = "CANDIDATE", "VERIFIED", "DAMAGED"


@dataclasses.dataclass(frozen=True)
class Status:
    """The status of a checkpoint.

    Attributes:
        step: step of the checkpoint.
        state: `CANDIDATE`, `VERIFIED` if the checkpoint matched its digests after a restore or was confirmed in
            another way, or `DAMAGED` if a scrub found that it differs.
        reasons: the kinds of evidence: `digest`, `twins`, `guard`.
        history: whether the digests were computed before the checkpoint was saved.
    """

    step: int
    state: str
    reasons: tuple[Reason, ...]
    history: bool


class Known(Header, kw_only=True, tag="jax-sdc checkpoint status"):
    """The status file of a step."""

    step: int
    reasons: tuple[Reason, ...] = ()
    doubt: bool = False  # the checkpoint could not be read, possibly because of the storage
    leaving: bool = False  # the checkpoint is about to be deleted
    protected: bool = False  # no policy may delete the checkpoint


KNOWN = Format(type=Known, noun="status of a checkpoint", remedy="delete it")


class Mark(Header, kw_only=True, tag="jax-sdc damaged checkpoint"):
    """The file with which a scrub marks a checkpoint as damaged. No other process writes it, so a scrub never competes
    with the run, which writes the status."""

    step: int
    certificate: str  # digest of the certificate with which the checkpoint was compared
    found: str
    time: str


MARKS = Format(type=Mark, noun="mark of a damaged checkpoint", remedy="delete it")


class Statuses:
    """Statuses of the checkpoints in one folder. Methods raise OSError if a status cannot be written."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder
        self._lock: Lock | None = None

    def status(self, step: int, *, history: bool) -> Status:
        """Returns the status of a step, which is a candidate if the status file is unreadable or the checkpoint is in
        doubt."""
        known = self._known(step)
        damaged = self.mark_of(step) is not None
        found = () if known is None or known.doubt or damaged else known.reasons
        return Status(step, DAMAGED if damaged else VERIFIED if found else CANDIDATE, found, history)

    def vouch(self, step: int, reason: Reason) -> None:
        """Adds evidence for a step, and clears its marks of doubt and of pending deletion."""
        known = self._known(step) or Known(step=step)
        if reason not in known.reasons or known.doubt:
            reasons = tuple(sorted({*known.reasons, reason}))
            self._write(step, Known(step=step, reasons=reasons, protected=known.protected))

    def revoke(self, step: int) -> None:
        """Removes all evidence for a step whose comparison failed."""
        known = self._known(step)
        if known is None or known.reasons or known.doubt:
            stays = known or Known(step=step)
            self._write(step, Known(step=step, leaving=stays.leaving, protected=stays.protected))

    def doubt(self, step: int) -> None:
        """Marks a step as unreadable. Policies then keep this step and an older one, unless this step is the remainder
        of a deletion."""
        known = self._known(step)
        if known is not None and known.leaving:
            self.revoke(step)
        elif known is not None and known.reasons and not known.doubt:
            self._write(step, msgspec.structs.replace(known, doubt=True))

    def leaving(self, step: int) -> None:
        """Marks a step as about to be deleted, so that the remainder of an interrupted deletion does not count as a
        damaged checkpoint."""
        if step_folder(self._folder, step).exists() and not self.left(step):
            self._write(step, msgspec.structs.replace(self._known(step) or Known(step=step), leaving=True))

    def left(self, step: int) -> bool:
        """Returns whether a step was about to be deleted. The checkpoint may still be complete."""
        return (self._known(step) or Known(step=step)).leaving

    def protect(self, step: int, protected: bool) -> None:
        """Sets whether this step is protected from deletion by policies."""
        self._write(step, msgspec.structs.replace(self._known(step) or Known(step=step), protected=protected))

    def is_protected(self, step: int) -> bool:
        """Returns whether this step is protected; a step with an unreadable status counts as protected."""
        known = self._known(step)
        return known is None or known.protected

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Returns the steps to keep: the newest verified step, steps of uncertain status, and protected steps."""
        known = {step: self._known(step) for step in steps}
        stays = {step for step, one in known.items() if one is None or one.doubt or one.protected}
        good = sorted(step for step, one in known.items() if one and one.reasons and not one.doubt)
        return stays | {*[step for step in good if self.mark_of(step) is None][-1:]}

    def mark(self, step: int, certificate: str, found: str) -> None:
        """Marks a checkpoint, which `certificate_digest` identifies, as damaged: policies then keep an older one."""
        if _first():
            path = self._mark(step)
            Record.check_owner(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            MARKS.write(path, Mark(step=step, certificate=certificate, found=found, time=now()))

    def unmark(self, step: int) -> None:
        if _first():
            self._mark(step).unlink(missing_ok=True)

    def mark_of(self, step: int) -> Mark | None:
        """Returns the mark of a checkpoint. A mark that is unreadable, or of a checkpoint that was replaced since, does
        not count."""
        try:
            mark = MARKS.read(self._mark(step))
        except RecordError:
            return None
        current = (step, certificate_digest(self._folder, step))
        return mark if (mark.step, mark.certificate) == current else None

    def _mark(self, step: int) -> epath.Path:
        return self._folder / FOLDER / "damaged" / f"{step}.json"

    def forget(self, step: int) -> None:
        """Discards the status of a step that is being replaced, except for its protection."""
        place = step_folder(self._folder, step)
        # Each process deletes its own file, so no process deletes a file that another process is already writing. The
        # certificate is deleted before the note that the checkpoint is leaving, in the order opposite to an audit's.
        (place / f"process-{jax.process_index()}.json").unlink(missing_ok=True)
        if _first():
            if (place / STATUS).exists() and self.is_protected(step):
                self._write(step, Known(step=step, protected=True))
            else:
                (place / STATUS).unlink(missing_ok=True)

    def discard(self, step: int) -> None:
        if _first() and os.path.lexists(place := step_folder(self._folder, step)):
            remove(place)
            with contextlib.suppress(OSError):
                self.unmark(step)

    def prune(self) -> None:
        """Deletes certificates whose checkpoints are no longer in the folder under any name."""
        place = self._folder / FOLDER
        if not _first() or not place.exists():
            return
        found = (re.search(r"(\d+)\D*$", path.name) for path in self._folder.iterdir())
        there = {int(number[1]) for number in found if number}
        for stale in (path for path in place.iterdir() if path.name.isdecimal() and int(path.name) not in there):
            remove(stale)
            with contextlib.suppress(OSError):  # a scrub by another user; without the certificate, it does not count
                self.unmark(int(stale.name))

    def lock(self) -> None:
        """Locks the folder for this run until `release` is called; raises CertificateError if another process is
        writing to the folder."""
        if not _first() or self._lock is not None:
            return
        place = self._folder / FOLDER
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(place)
        except RecordError as error:
            raise CertificateError(str(error)) from error
        except OSError as error:
            raise CertificateError(f"{place} cannot be written ({reason(error)})") from error

    def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _write(self, step: int, known: Known) -> None:
        if _first():
            KNOWN.write(step_folder(self._folder, step) / STATUS, known)

    def _known(self, step: int) -> Known | None:
        """Returns the stored status of a step, or None if the status is unreadable."""
        path = step_folder(self._folder, step) / STATUS
        if not path.exists():
            return Known(step=step)
        try:
            known = KNOWN.read(path)
        except RecordError:
            return None
        return known if known.step == step else None


def _first() -> bool:
    return jax.process_index() == 0
