"""Functions that write a record (create or resume, append lines, roll back, finish, close) or read one.

Runs, traces, campaigns and studies are all records; `layout.KINDS` lists the files of each kind.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias

import msgspec

from sdc._lazy import epath

from .. import schema
from .format import FIELD, REMEDY, Format, encode, to_json, to_text, write_sealed, write_text
from .layout import DISCARDED, MANIFEST, SUMMARY, Kind, LineFile, kind_of
from .lines import Lines, Pace, Rows, end_of, read_content, read_rows, start
from .lock import LOCK, Lock
from .storage import UNREADABLE, AnyPath, RecordError, appends, check_owner, names, reason, remove, temporary_of

# Files that show that a folder is not a record, and the commands that read them.
OTHERS = {
    "result.json": "; it holds a burn-in, which sdc verdict {path} and sdc fleet summarize {path} read",
    "pair.json": "; it holds the run of a pair of hosts, which sdc verdict {path} and sdc pair --resolve {path} read",
    "pool.json": "; it holds the run of a pool of hosts, which sdc verdict {path} and sdc pair --resolve {path} read",
}
# A manifest, a line or a summary, as a typed object or as a mapping, which may have custom fields.
Given: TypeAlias = schema.Fields | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Contents:
    """A record as read from its folder.

    The attributes hold the JSON of the files, including custom fields; properties such as `run` and `steps` hold the
    same content as typed objects. Equal parts of lines are shared, so do not change them.

    Attributes:
        path: the folder.
        kind: the kind of record.
        manifest: contents of `manifest.json`.
        lines: one line for each step or injection.
        details: the lines of the file of details.
        summary: contents of `summary.json`, or None for an incomplete record.
        discarded: lines removed from the record because their steps were repeated.
    """

    path: epath.Path
    kind: Kind
    manifest: dict[str, Any]
    lines: Rows
    details: Rows
    summary: dict[str, Any] | None
    discarded: Rows

    @cached_property
    def run(self) -> schema.RunManifest:
        """`manifest.json` of a twin run, training run or trace."""
        return msgspec.convert(self.manifest, schema.RunManifest if self.kind.name != "trace" else schema.TraceManifest)

    @cached_property
    def campaign(self) -> schema.CampaignManifest:
        """`manifest.json` of a campaign."""
        return msgspec.convert(self.manifest, schema.CampaignManifest)

    @cached_property
    def study(self) -> schema.StudyManifest:
        """`manifest.json` of a study."""
        return msgspec.convert(self.manifest, schema.StudyManifest)

    @property
    def steps(self) -> list[schema.StepRow]:
        """Lines of `steps.jsonl`."""
        return self.lines.typed

    @property
    def mismatches(self) -> list[schema.MismatchRow]:
        """Lines of `mismatches.jsonl`; empty if the details of this kind of record are not mismatches."""
        return self.details.typed if self.kind.has_mismatches else []

    @property
    def injections(self) -> list[schema.InjectionRow]:
        """Lines of `injections.jsonl`."""
        return self.lines.typed

    @property
    def parts(self) -> list[schema.PartRow]:
        """Lines of `parts.jsonl`."""
        return self.lines.typed

    @cached_property
    def run_summary(self) -> schema.RunSummary | None:
        """`summary.json` of a twin run, training run or trace."""
        return None if self.summary is None else msgspec.convert(self.summary, schema.RunSummary)

    @cached_property
    def campaign_summary(self) -> schema.CampaignSummary | None:
        """`summary.json` of a campaign."""
        return None if self.summary is None else msgspec.convert(self.summary, schema.CampaignSummary)

    @property
    def ended(self) -> bool:
        """Whether the run wrote its summary."""
        return self.summary is not None

    @property
    def again(self) -> "Contents":
        """The discarded attempts as a separate record: lines, sorted by number, with their mismatches."""
        lines = self.discarded.by(self.kind.number)
        return dataclasses.replace(self, lines=lines, details=_mismatches(lines), discarded=Rows())

    @property
    def attempts(self) -> "Contents":
        """All attempts at steps: both recorded and discarded lines, in the order of their numbers."""
        lines = (self.discarded + self.lines).by(self.kind.number)
        details = self.details + _mismatches(self.discarded)
        return dataclasses.replace(self, lines=lines, details=details, discarded=Rows())


def _mismatches(lines: Rows) -> Rows:
    """Returns the mismatches of discarded lines."""
    beside = [row for line in lines for row in line.get("mismatches") or ()]
    return Rows(msgspec.convert(beside, list[schema.MismatchRow]), beside)


def read_record(path: AnyPath, *kinds: str, details: bool = True) -> Contents:
    """Reads a record, which may be incomplete.

    Args:
        path: the folder.
        *kinds: expected kinds; any kind if none is given.
        details: whether to read the file of details too.

    Returns:
        The record's contents. Unknown fields are kept.

    Raises:
        RecordError: there is no record, the record is of another kind or has a schema that this version does not read,
            a file, a line or a field is damaged, a line is missing or repeated, or the last line is incomplete although
            the run has ended.
    """
    manifest = read_manifest(path, *kinds)
    folder, kind = epath.Path(path), kind_of(manifest["kind"])
    summary = None
    if SUMMARY in names(folder):
        try:
            summary = _fields(folder / SUMMARY, kind.summary)
        except RecordError as error:
            raise RecordError(f"{error}, or remove it and resume the run, which rewrites it") from error
    ends = (summary or {}).get("lines") or {}

    def lost(file: str, problem: str) -> RecordError:
        return RecordError(f"{os.fspath(folder / file)} {problem}; {REMEDY}")

    def rows(file: LineFile | None) -> Rows:
        if file is None:
            return Rows()
        if ends and file.name not in ends and file is not kind.discarded:
            raise lost(SUMMARY, f"does not state where {file.name} ends")
        ended = summary is not None and file is not kind.discarded
        return read_rows(folder / file.name, file.row, whole=ended, key=kind.number, end=ends.get(file.name))

    lines = rows(kind.lines)
    numbers = [getattr(row, kind.number) for row in lines.typed]
    for line, (before, number) in enumerate(itertools.pairwise(numbers), start=2):
        if number <= before and kind.lines is not None:  # a repeated line would be counted twice
            raise RecordError(
                f"{os.fspath(folder / kind.lines.name)} line {line} has {kind.number} {number} after {kind.number} "
                f"{before}; {REMEDY}"
            )
    beside, discarded = rows(kind.details) if details else Rows(), rows(kind.discarded)
    # Checksums of later lines cannot show that complete lines are missing at the end of a file.
    known = max([manifest.get("discarded") or 0, *(getattr(row, "discarded", None) or 0 for row in lines.typed)])
    if len(discarded) < known:
        raise lost(DISCARDED, f"has only {len(discarded)} of {known} lines")
    if kind.details is not None and details:
        counts = collections.Counter(getattr(row, kind.number) for row in beside.typed)
        for number, row in zip(numbers, lines.typed, strict=True):
            if counts[number] != (count := row.details or 0):
                problem = f"has {counts[number]} lines for {kind.number} {number}; expected {count}"
                raise lost(kind.details.name, problem)
    return Contents(folder, kind, manifest, lines, beside, summary, discarded)


def read_manifest(path: AnyPath, *kinds: str) -> dict[str, Any]:
    """Reads only the manifest of a record. Arguments and errors are those of `read_record`."""
    place = os.fspath(path)
    try:
        inside = names(path)
    except NotADirectoryError:
        inside = []
    except OSError as error:
        raise RecordError(f"{place} {UNREADABLE.format(reason(error))}") from error
    if MANIFEST not in inside:
        other = next((said for name, said in OTHERS.items() if name in inside), "").format(path=place)
        raise RecordError(f"{place} is not a run folder (it has no {MANIFEST}{other}); give the folder of a run")
    file = epath.Path(path) / MANIFEST
    kind = kind_of(_fields(file, schema.Manifest)["kind"])
    if kinds and kind.name not in kinds:
        article = "an" if kinds[0][0] in "aeiou" else "a"
        wanted = f"{article} {' or '.join(kinds)}"
        raise RecordError(f"{place} holds a record of kind {kind.name!r}; give the folder of {wanted}")
    return _fields(file, kind.manifest)


def _fields(file: epath.Path, type: type[schema.Header]) -> dict[str, Any]:
    return Format(type=type, noun="record of a run", remedy=REMEDY).fields(file)


class FolderTaken(RecordError):
    """A folder cannot become a new record, because the folder is not empty.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = os.fspath(path)
        super().__init__(f"run folder {self.path} already exists; give another folder, or resume the run in it")


class Record:
    """A record open for writing. Use it as a context manager.

    Methods that write raise OSError if the storage is full or unavailable.

    Attributes:
        path: the folder.
        kind: the kind of record, with its files.
        manifest: contents of `manifest.json`.
    """

    def __init__(self, path: AnyPath, manifest: Mapping[str, Any], kind: Kind, lock: Lock) -> None:
        """Opens the files of a prepared folder; see `create` and `resume`."""
        self.path, self.kind, self.manifest = epath.Path(path), kind, dict(manifest)
        self._lock = lock
        self._ended = self._closed = False
        self._pace = Pace()
        self._files: dict[str, Lines] = {}
        for file in kind.files:
            self._files[file.name] = Lines(self.path / file.name, kind.number)
        # An incomplete last line left by a crash does not count.
        content = b"" if kind.discarded is None else read_content(self.path / kind.discarded.name, whole=False)
        self._discarded = content.count(b"\n")

    @staticmethod
    def check_free(path: AnyPath) -> None:
        """Checks that a record can be created in a folder, without changing the folder; see `Record.create`."""
        check_owner(path)
        folder = epath.Path(path)
        try:
            there = names(folder)
        except NotADirectoryError as error:
            if folder.exists():
                raise FolderTaken(folder) from error
            raise
        if _content(there):
            if LOCK in there:
                Lock(folder).release()  # raises RecordBusy if another process is writing
            raise FolderTaken(folder)

    @staticmethod
    def is_free(path: AnyPath) -> bool:
        """Returns whether a folder is empty, but for what a start leaves if it ends before its first file is written.

        Raises OSError if the path is a file, or cannot be read.
        """
        return not _content(names(path))

    @staticmethod
    def check_owner(path: AnyPath) -> None:
        """Checks that no other user planted a path in a folder to which everyone can write, such as /tmp.

        Raises:
            RecordError: another user could forge or redirect what is at the path.
        """
        check_owner(path)

    @classmethod
    def create(cls, path: AnyPath, manifest: Given, *, kind: str | None = None) -> "Record":
        """Starts a new record.

        Args:
            path: a nonexistent or empty folder, on a disk or at `gs://` or `s3://`.
            manifest: description of the run. The versions of the schema and of jax-sdc, the host and the time are
                added.
            kind: one of `KINDS` (default: that of the manifest).

        Returns:
            The open record.

        Raises:
            FolderTaken: the folder is not empty.
            RecordBusy: another process is writing the record.
            RecordError: the folder cannot be written, or the kind is unknown.
        """
        given = _plain(manifest)
        known = kind_of(given.get("kind") if kind is None else kind)
        folder = epath.Path(path)
        try:
            Record.check_free(folder)
            if appends(folder):  # an object store has no folders, and a mistyped name would create a bucket
                folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder) as lock:
                there = names(folder)
                if _content(there):  # another process was faster and has finished
                    raise FolderTaken(folder)
                for name in set(there) - {LOCK}:
                    remove(folder / name)
                whole = _stamped(schema.Manifest, {"created": schema.now(), **given, "kind": known.name})
                write_sealed(folder / MANIFEST, whole)
                return cls(folder, whole, known, lock)
        except OSError as error:
            raise RecordError(f"cannot write run folder {folder}: {reason(error)}; give another folder") from error

    @classmethod
    def resume(cls, path: AnyPath, manifest: Given, *, at: int, expected: int | None = None) -> "Record":
        """Resumes a record: removes lines numbered `at` and higher, and the summary.

        Args:
            path: the folder of a record.
            manifest: description of the resumed run. This manifest replaces the old one, except for the time of
                creation; `resumed_at` lists the numbers at which the record was resumed.
            at: number of the next line.
            expected: number of lines with lower numbers that must exist (default: any number).

        Returns:
            The open record.

        Raises:
            RecordBusy: another process is writing the record.
            RecordError: there is no readable record in the folder, lines are missing, the record is of another kind, or
                the record cannot be written.
        """
        folder, given = epath.Path(path), _plain(manifest)
        old = read_manifest(folder)
        kind = kind_of(old["kind"])
        if given.get("kind", kind.name) != kind.name:
            raise RecordError(
                f"{folder} holds a record of kind {kind.name!r}, which cannot be resumed as {given['kind']!r}; give "
                "another folder"
            )
        try:
            with _locked(folder) as lock:
                # Read everything before changing anything. Only the caller knows the number of lines of an incomplete
                # run.
                found = sum(row[kind.number] < at for row in read_record(folder).lines)
                if kind.lines is not None and expected is not None and found != expected:
                    raise RecordError(
                        f"{folder / kind.lines.name} has {found} of the {expected} lines before {kind.number} {at}; "
                        "restore it, or start a new run"
                    )
                history: dict[str, Any] = {name: old[name] for name in ("created", "resumed_at") if name in old}
                history["resumed_at"] = [*history.get("resumed_at", []), at]
                remove(folder / SUMMARY)
                record = cls(folder, _stamped(schema.Manifest, {**given, "kind": kind.name, **history}), kind, lock)
                record.rewind(at)
                if record._discarded:
                    record.manifest["discarded"] = record._discarded
                write_sealed(folder / MANIFEST, record.manifest)
                return record
        except OSError as error:
            raise RecordError(f"cannot write run folder {folder}: {reason(error)}; make it writable") from error

    @property
    def count(self) -> int:
        """Number of recorded lines: steps or injections."""
        return 0 if self.kind.lines is None else self._files[self.kind.lines.name].count

    @property
    def ended(self) -> bool:
        """Whether the summary has been written."""
        return self._ended

    def line(self, row: Given, details: Iterable[Given] = ()) -> None:
        """Appends a line and its details. On a disk, the operating system has received them when this method returns.

        Args:
            row: the line, with its number under `kind.number`.
            details: lines for the file of details, with the same number.

        Raises:
            RecordError: the record has ended or is closed, or its kind has no such file.
        """
        self._check_open()
        given, lines = _plain(row), [encode(_plain(detail)) for detail in details]
        if self.kind.lines is None or (lines and self.kind.details is None):
            raise RecordError(f"a record of kind {self.kind.name!r} has no {'details' if self.kind.lines else 'lines'}")
        assert isinstance(given.get(self.kind.number), int), f"a line without its number: {self.kind.number}"
        if taken := sorted({"details", "discarded", "mismatches", FIELD} & set(given)):
            raise RecordError(f"a line cannot have a field {taken[0]!r}, which is reserved; use another name")
        beside = {"details": len(lines), "discarded": self._discarded}
        if self.kind.details is not None:
            self._files[self.kind.details.name].append(lines)
        self._files[self.kind.lines.name].append([encode({**given, **{k: v for k, v in beside.items() if v}})])
        self._pace.run(self.flush)

    def rewind(self, at: int) -> None:
        """Removes the lines numbered `at` and higher, and their details, after a rollback.

        Keeps removed lines of steps and their mismatches in `discarded.jsonl`, since the findings in them remain valid.

        Raises:
            RecordError: the record has ended or is closed.
        """
        self._check_open()
        number = self.kind.number
        if self.kind.discarded is not None and self.kind.lines is not None:
            self.flush()
            lines, details = self._read(self.kind.lines), self.kind.details
            beside = self._read(details) if self.kind.has_mismatches and details is not None else []
            gone = {row[number]: row for row in lines if row[number] >= at}
            # A crash may have lost lines but kept their mismatches: such lines get the totals of the mismatches.
            known = {row[number] for row in lines}
            for row in beside:
                if row[number] not in known and row.get("mismatched"):
                    sites = gone.setdefault(row[number], {number: row[number], "sites": {}})["sites"]
                    total = sites.setdefault(str(row.get("site")), {"checked": 0, "mismatched": 0})
                    for key in total:
                        total[key] += row.get(key) or 0
            self.discard(gone.values(), beside)
        # Lines without details would mean that nothing was found; details without a line are ignored.
        for file in reversed(self.kind.files):
            self._files[file.name].rewind(at)

    def discard(self, rows: Iterable[Given], details: Iterable[Given] = ()) -> None:
        """Saves lines that are no longer part of the record because their steps are repeated.

        Args:
            rows: the lines, with distinct numbers.
            details: lines of the file of details. Only mismatches are kept, each with the line that has the same
                number.

        Raises:
            RecordError: the record has ended or is closed, or its kind does not keep discarded lines.
        """
        self._check_open()
        if self.kind.discarded is None:
            raise RecordError(f"a record of kind {self.kind.name!r} does not keep discarded lines")
        number = self.kind.number
        found = collections.defaultdict(list)
        for detail in map(_plain, details if self.kind.has_mismatches else ()):
            found[detail[number]].append(detail)
        lines = [
            encode({**row, **({"mismatches": hits} if (hits := found[row[number]]) else {})})
            for row in map(_plain, rows)
        ]
        if lines:
            file = Lines(self.path / self.kind.discarded.name, number)
            file.rewind(sys.maxsize)  # only removes an incomplete last line left by a crash
            file.append(lines)
            file.sync()  # before the lines leave the record
            file.close()
            self._discarded = file.count

    def file(self, name: str, value: Any) -> epath.Path:
        """Writes a custom JSON file to the folder, atomically.

        Args:
            name: name of the file, such as `sites.json`.
            value: contents of the file. If the contents are a JSON object, the versions of the schema and of jax-sdc,
                and the host, are added.

        Returns:
            Path of the file.

        Raises:
            RecordError: the name is one of the record's own files.
        """
        own = {MANIFEST, SUMMARY, LOCK, DISCARDED, *(file.name for file in self.kind.files)}
        if name in own or not name or name != os.path.basename(name):
            raise RecordError(
                f"{name!r} is not a valid name for an additional file; give a plain name that the record does not use"
            )
        if isinstance(value, Mapping):
            write_sealed(self.path / name, _stamped("jax-sdc record part", value, lasting=True))
        else:
            write_text(self.path / name, to_text(value))
        return self.path / name

    def flush(self) -> None:
        """Writes all lines buffered for an object store; does nothing on a disk."""
        for file in self._files.values():
            file.flush()

    def sync(self) -> None:
        """Writes all lines to stable storage, before a checkpoint or summary that depends on them."""
        for file in self._files.values():
            file.sync()

    def finish(self, summary: Given) -> None:
        """Writes `summary.json`, which marks the record as complete.

        Args:
            summary: verdict and totals. The versions of the schema and of jax-sdc, the host, and the length and last
                checksum of each file of lines are added.

        Raises:
            RecordError: the record has ended or is closed.
        """
        self._check_open()
        self.sync()
        ends = {name: [file.count, f"{file.checksum:08x}"] for name, file in self._files.items()}
        if self._discarded and self.kind.discarded is not None:
            file = self.path / self.kind.discarded.name
            checksum = end_of(read_content(file, whole=True), start(file))
            ends[file.name] = [self._discarded, f"{checksum:08x}"]
        write_summary(self.path, {**_plain(summary), **({"lines": ends} if ends else {})})
        self._ended = True

    def close(self) -> None:
        """Closes the files and releases the lock, even if the storage is unavailable; the record remains readable."""
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

    def _read(self, file: LineFile) -> list[dict[str, Any]]:
        return list(read_rows(self.path / file.name, file.row, whole=False, key=self.kind.number))

    def _check_open(self) -> None:
        if self._closed or self._ended:
            state = "is closed" if self._closed else "has ended"
            raise RecordError(f"the record {self.path} {state}; resume it to continue writing")


def _content(there: Iterable[str]) -> set[str]:
    """Returns the names in a folder other than those that a start leaves if it ends before its first file exists."""
    return {name for name in there if name != LOCK and temporary_of(name) not in (MANIFEST, *OTHERS)}


@contextmanager
def _locked(folder: AnyPath) -> Iterator[Lock]:
    """Acquires the lock of a folder, and releases the lock only if the block fails."""
    lock = Lock(folder)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def write_summary(folder: AnyPath, summary: Mapping[str, Any]) -> None:
    """Writes `summary.json` with a leading stamp that is the same for every process."""
    write_sealed(epath.Path(folder) / SUMMARY, _stamped(schema.Ending, summary, lasting=True))


def _plain(value: Given) -> dict[str, Any]:
    """Converts a value to a mapping; unset fields of a typed object are omitted."""
    if not isinstance(value, schema.Fields):
        return dict(value)
    found: dict[str, Any] = msgspec.to_builtins(value, enc_hook=to_json)
    return {name: item for name, item in found.items() if item is not None and item != [] and item != {}}


def _stamped(type: "type[schema.Header] | str", value: Mapping[str, Any], *, lasting: bool = False) -> dict[str, Any]:
    """Prepends a stamp, whose fields override those of the value."""
    mine = schema.stamp(type if isinstance(type, str) else str(type.__struct_config__.tag), lasting=lasting)
    return {**mine, **{key: item for key, item in value.items() if key not in mine}}
