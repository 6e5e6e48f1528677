"""The life of a record: created or resumed, written line by line, perhaps rolled back, finished, closed.

Runs, traces, campaigns and studies all live this way. `layout.KINDS` says which files each of them has.
"""

import collections
import datetime
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from etils import epath

from ..schema import Ending, Manifest, MismatchRow, stamp
from .contents import Contents, read_manifest, read_record
from .format import FIELD, encode, write_json, write_sealed
from .layout import DISCARDED, MANIFEST, SUMMARY, Kind, LineFile, kind_of
from .lines import Lines, Pace, end_of, open_lines, read_content, read_rows, start
from .lock import LOCK, Lock
from .storage import AnyPath, RecordError, appends, names, reason, remove

_RECORD = str(Manifest.__struct_config__.tag)


class FolderTaken(RecordError):
    """A folder that cannot become a new record, since it holds something already.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = os.fspath(path)
        super().__init__(f"run folder {self.path} exists already; name another folder, or resume the run in it")


class Record:
    """A record that is being written. Use it as a context manager.

    Methods that write raise an OSError where the storage is full or gone.

    Attributes:
        path: the folder.
        kind: what it holds, and in which files.
        manifest: what `manifest.json` holds.
    """

    def __init__(self, path: AnyPath, manifest: Mapping[str, Any], kind: Kind, lock: Lock) -> None:
        """Opens the files of a record whose folder is ready; see `create` and `resume`."""
        self.path = epath.Path(path)
        self.kind = kind
        self.manifest = dict(manifest)
        self._lock = lock
        self._ended = self._closed = False
        self._pace = Pace()
        self._files: dict[str, Lines] = {}
        for file in kind.files:
            self._files[file.name] = self._lines(file)
        self._discarded = 0 if kind.discarded is None else _count(self.path / kind.discarded.name)

    @classmethod
    def create(cls, path: AnyPath, manifest: Mapping[str, Any], *, kind: str | None = None) -> "Record":
        """Starts a new record.

        Args:
            path: a folder that does not exist or is empty, on a disk or at `gs://` or `s3://`.
            manifest: what runs. The version of the schema, that of jax-sdc, the host and the time are added.
            kind: one of `KINDS`; by default the manifest's own.

        Returns:
            The open record.

        Raises:
            FolderTaken: the folder holds something.
            RecordBusy: another process writes it.
            RecordError: the folder cannot be written, or the kind is unknown.
        """
        known = kind_of(manifest.get("kind") if kind is None else kind)
        folder = epath.Path(path)
        try:
            check_free(folder)
            if appends(folder):  # an object store has no folders, and would make a bucket of a mistyped name
                folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder) as lock:
                if set(names(folder)) - {LOCK}:  # somebody was faster, and is done
                    raise FolderTaken(folder)
                created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                whole = _stamped(_RECORD, {"created": created, **manifest, "kind": known.name})
                write_sealed(folder / MANIFEST, whole)
                return cls(folder, whole, known, lock)
        except OSError as error:
            raise RecordError(f"cannot write run folder {folder}: {reason(error)}; name another folder") from error

    @classmethod
    def resume(cls, path: AnyPath, manifest: Mapping[str, Any], *, at: int, expected: int | None = None) -> "Record":
        """Continues a record: lines numbered `at` and higher are dropped, and so is the summary.

        Args:
            path: the folder of a record.
            manifest: what runs now. It stands in for the old one, but for the time of creation; `resumed_at` lists the
                numbers at which the record was continued.
            at: number of the next line.
            expected: how many lines with lower numbers there must be; by default as many as there are.

        Returns:
            The open record.

        Raises:
            RecordBusy: another process writes it.
            RecordError: there is no readable record in the folder, lines are missing, it is of another kind, or it
                cannot be written.
        """
        folder = epath.Path(path)
        old = read_manifest(folder)
        kind = kind_of(old["kind"])
        if manifest.get("kind", kind.name) != kind.name:
            raise RecordError(
                f"{folder} holds a record of kind {kind.name!r}, which cannot go on as {manifest['kind']!r}; "
                "name another folder"
            )
        try:
            with _locked(folder) as lock:
                _check_lines(read_record(folder), at, expected)  # nothing is changed before
                history: dict[str, Any] = {name: old[name] for name in ("created", "resumed_at") if name in old}
                history["resumed_at"] = [*history.get("resumed_at", []), at]
                remove(folder / SUMMARY)
                whole = _stamped(_RECORD, {**manifest, "kind": kind.name, **history})
                record = cls(folder, whole, kind, lock)
                record.rewind(at)
                if record._discarded:
                    record.manifest["discarded"] = record._discarded
                write_sealed(folder / MANIFEST, record.manifest)
                return record
        except OSError as error:
            raise RecordError(f"cannot write run folder {folder}: {reason(error)}; make it writable") from error

    @property
    def count(self) -> int:
        """Lines on record: steps or injections."""
        return 0 if self.kind.lines is None else self._files[self.kind.lines.name].count

    @property
    def ended(self) -> bool:
        """Whether the summary is written."""
        return self._ended

    def line(self, row: Mapping[str, Any], details: Iterable[Mapping[str, Any]] = ()) -> None:
        """Appends a line and its details. On a disk the system has both when this returns, details first.

        Args:
            row: the line. It holds its number under `kind.number`.
            details: lines for the file beside it, with the same number.

        Raises:
            RecordError: the record has ended or is closed, or its kind has no such file.
        """
        self._check_open()
        lines = [encode(detail) for detail in details]
        if self.kind.lines is None or (lines and self.kind.details is None):
            raise RecordError(f"a record of kind {self.kind.name!r} has no {'details' if self.kind.lines else 'lines'}")
        assert isinstance(row.get(self.kind.number), int), f"a line without its number: {self.kind.number}"
        if taken := sorted({"details", "discarded", "mismatches", FIELD} & set(row)):
            raise RecordError(f"a line cannot have a field {taken[0]!r}, which the record adds; name it otherwise")
        beside = {"details": len(lines), "discarded": self._discarded}
        if self.kind.details is not None:
            self._files[self.kind.details.name].append(lines)
        self._files[self.kind.lines.name].append([encode({**row, **{k: v for k, v in beside.items() if v}})])
        self._pace.run(self.flush)

    def rewind(self, at: int) -> None:
        """Takes out the lines numbered `at` and higher, and their details: the run was rolled back.

        Lines of steps are kept in `discarded.jsonl` with their mismatches, for what they found was found.

        Raises:
            RecordError: the record has ended or is closed.
        """
        self._check_open()
        if self.kind.discarded is not None and self.kind.lines is not None:
            self.flush()
            lines, beside = self._read(self.kind.lines), self._mismatches()
            gone = [line for line in lines if line[self.kind.number] >= at]
            self.discard([*gone, *_orphans(lines, beside, self.kind.number)], beside)
        # Lines without details would say that nothing was found; details without a line are passed over.
        for file in reversed(self.kind.files):
            self._files[file.name].rewind(at)

    def discard(self, rows: Iterable[Mapping[str, Any]], details: Iterable[Mapping[str, Any]] = ()) -> None:
        """Keeps lines that are not, or no longer, among those of the record, since their steps are run again.

        Args:
            rows: the lines, no two of them with one number.
            details: lines for the file beside it. Mismatches are kept with the line of their number, nothing else is.

        Raises:
            RecordError: the record has ended or is closed, or its kind keeps no such lines.
        """
        self._check_open()
        if self.kind.discarded is None:
            raise RecordError(f"a record of kind {self.kind.name!r} keeps nothing that was run again")
        found = collections.defaultdict(list)
        for detail in details if self._has_mismatches else ():
            found[detail[self.kind.number]].append(detail)
        number = self.kind.number
        if lines := [encode({**row, **({"mismatches": hits} if (hits := found[row[number]]) else {})}) for row in rows]:
            file = self._lines(self.kind.discarded)
            file.rewind(sys.maxsize)  # drops nothing but a last line that a crash cut off
            file.append(lines)
            file.sync()  # before the lines leave the record
            file.close()
            self._discarded = file.count

    def file(self, name: str, value: Any) -> epath.Path:
        """Writes a JSON file of one's own beside the others, whole or not at all.

        Args:
            name: name of the file, such as `sites.json`.
            value: its contents. An object gets the version of the schema, that of jax-sdc and the host besides.

        Returns:
            Path of the file.

        Raises:
            RecordError: the name is one of the record's own files.
        """
        own = {MANIFEST, SUMMARY, LOCK, DISCARDED, *(file.name for file in self.kind.files)}
        if name in own or not name or name != os.path.basename(name):
            raise RecordError(
                f"{name!r} cannot be the name of a further file; take a plain name other than the record's"
            )
        if isinstance(value, Mapping):
            write_sealed(self.path / name, _stamped("jax-sdc record part", value, lasting=True))
        else:
            write_json(self.path / name, value)
        return self.path / name

    def flush(self) -> None:
        """Writes everything that an object store has not got yet; on a disk nothing waits."""
        for file in self._files.values():
            file.flush()

    def sync(self) -> None:
        """Makes all lines outlive the machine's sudden end, as what builds on them does: a checkpoint, the summary."""
        for file in self._files.values():
            file.sync()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`, which marks the record as ended.

        Args:
            summary: verdict and totals. The version of the schema, that of jax-sdc, the host, and where the files of
                lines end, are added.

        Raises:
            RecordError: the record has ended or is closed.
        """
        self._check_open()
        self.sync()
        ends = {name: [file.count, f"{file.checksum:08x}"] for name, file in self._files.items()}
        if self._discarded and self.kind.discarded is not None:
            name = self.kind.discarded.name
            checksum = end_of(read_content(self.path / name, whole=True), start(name))
            ends[name] = [self._discarded, f"{checksum:08x}"]
        write_summary(self.path, {**summary, **({"lines": ends} if ends else {})})
        self._ended = True

    def close(self) -> None:
        """Closes the files and releases the lock, even if the storage is gone; the record stays readable."""
        if self._closed:
            return
        self._closed = True
        try:
            for file in self._files.values():
                file.close()
        finally:
            self._lock.release()

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _has_mismatches(self) -> bool:
        return self.kind.details is not None and self.kind.details.row is MismatchRow

    def _mismatches(self) -> list[dict[str, Any]]:
        return self._read(self.kind.details) if self.kind.details is not None and self._has_mismatches else []

    def _read(self, file: LineFile) -> list[dict[str, Any]]:
        """The lines of a file that is being written."""
        key = self.kind.number
        return list(read_rows(self.path / file.name, file.row, whole=False, key=key, start=start(file.name)))

    def _lines(self, file: LineFile) -> Lines:
        return open_lines(self.path / file.name, self.kind.number, start(file.name))

    def _check_open(self) -> None:
        if self._closed or self._ended:
            state = "is closed" if self._closed else "has ended"
            raise RecordError(f"the record {self.path} {state}; resume it to write on")


@contextmanager
def _locked(folder: AnyPath) -> Iterator[Lock]:
    """Takes the lock of a folder, and gives it back only if what is done under it fails."""
    lock = Lock(folder)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _check_lines(record: Contents, at: int, expected: int | None) -> None:
    """What is missing at the end of a run that has not ended, only somebody who knows its length can tell."""
    found = sum(row[record.kind.number] < at for row in record.lines)
    if record.kind.lines is not None and expected is not None and found != expected:
        raise RecordError(
            f"{record.path / record.kind.lines.name} has {found} of the {expected} lines before {record.kind.number} "
            f"{at}; restore it, or start the run anew"
        )


def _orphans(
    lines: Iterable[Mapping[str, Any]], mismatches: Iterable[Mapping[str, Any]], number: str
) -> Iterable[dict[str, Any]]:
    """Lines, with the totals of their mismatches, that a crash has cut off although it left the mismatches."""
    known = {line[number] for line in lines}
    orphans: dict[int, dict[str, Any]] = {}
    for row in mismatches:
        if row[number] not in known and row.get("mismatched"):
            sites = orphans.setdefault(row[number], {number: row[number], "sites": {}})["sites"]
            total = sites.setdefault(str(row.get("site")), {"checked": 0, "mismatched": 0})
            for key in total:
                total[key] += row.get(key) or 0
    return orphans.values()


def _count(path: AnyPath) -> int:
    return read_content(path, whole=False).count(b"\n")


def check_free(path: AnyPath) -> None:
    """Looks whether a record can be created in a folder, without touching it; see `Record.create`."""
    folder = epath.Path(path)
    try:
        there = names(folder)
    except NotADirectoryError as error:
        if folder.exists():
            raise FolderTaken(folder) from error
        raise
    if set(there) - {LOCK}:
        if LOCK in there:
            Lock(folder).release()  # refused if somebody writes: that is what to tell
        raise FolderTaken(folder)


def write_summary(folder: AnyPath, summary: Mapping[str, Any]) -> None:
    """Writes `summary.json`, with a stamp in front that is the same for every process."""
    write_sealed(epath.Path(folder) / SUMMARY, _stamped(str(Ending.__struct_config__.tag), summary, lasting=True))


def _stamped(format: str, value: Mapping[str, Any], *, lasting: bool = False) -> dict[str, Any]:
    """With a stamp in front, whatever the value says of itself."""
    mine = stamp(format, lasting=lasting)
    return {**mine, **{key: item for key, item in value.items() if key not in mine}}
