"""A record: created or resumed, written line by line, perhaps rolled back, finished, closed; and as it is read.

Runs, traces, campaigns and studies all live this way. `layout.KINDS` says which files each of them has.
"""

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
from etils import epath

from .. import schema
from .format import FIELD, REMEDY, Format, encode, to_json, to_text, write_sealed, write_text
from .layout import DISCARDED, MANIFEST, SUMMARY, Kind, LineFile, kind_of
from .lines import Lines, Pace, Rows, end_of, read_content, read_rows, start
from .lock import LOCK, Lock
from .storage import AnyPath, RecordError, appends, names, reason, remove

# What is no record, by its file, and who reads it.
OTHERS = {
    "result.json": "; it is of a burn-in, which sdc verdict {path} and sdc fleet summarize {path} read",
    "pair.json": "; it is of a pair of hosts, which sdc verdict {path} and sdc pair --resolve {path} read",
    "pool.json": "; it is of a pool of hosts, which sdc verdict {path} and sdc pair --resolve {path} read",
}
# What a manifest, a line or a summary may be given as: its type, or a mapping, which may have fields of one's own.
Given: TypeAlias = schema.Fields | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Contents:
    """A record as read from its folder.

    The attributes hold JSON as it stands in the files, fields of one's own included; properties such as `run` and
    `steps` hold the same as types. Parts of lines that are alike are one object: do not change them.

    Attributes:
        path: the folder.
        kind: what it holds.
        manifest: contents of `manifest.json`.
        lines: one for each step or injection.
        details: the lines of the file beside it.
        summary: contents of `summary.json`, or None for a record that has not ended.
        discarded: lines that left the record because their steps were run again.
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
        """`manifest.json` of twins, of a training run or of a trace."""
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
        """Lines of `mismatches.jsonl`; none where the details are others."""
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
        """`summary.json` of twins, of a training run or of a trace."""
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
        """What was run again, as a record of its own: lines in the order of their numbers, with their mismatches."""
        lines = self.discarded.by(self.kind.number)
        return dataclasses.replace(self, lines=lines, details=_mismatches(lines), discarded=Rows())

    @property
    def attempts(self) -> "Contents":
        """Every time that a step was run: what is on record and what was run again, in the order of their numbers."""
        lines = (self.discarded + self.lines).by(self.kind.number)
        details = self.details + _mismatches(self.discarded)
        return dataclasses.replace(self, lines=lines, details=details, discarded=Rows())


def _mismatches(lines: Rows) -> Rows:
    """What was beside discarded lines."""
    beside = [row for line in lines for row in line.get("mismatches") or ()]
    return Rows(msgspec.convert(beside, list[schema.MismatchRow]), beside)


def read_record(path: AnyPath, *kinds: str, details: bool = True) -> Contents:
    """Reads a record, ended or not.

    Args:
        path: the folder.
        *kinds: those that are expected; any if none is named.
        details: read the file of details too.

    Returns:
        Its contents. Fields that this version does not know are kept.

    Raises:
        RecordError: there is no record, or one of another kind or of a schema that this version does not read; a file,
            a line or a field is damaged; a line is missing or repeated; or a last line is cut off although the run has
            ended.
    """
    manifest = read_manifest(path, *kinds)
    folder, kind = epath.Path(path), kind_of(manifest["kind"])
    summary = None
    if SUMMARY in names(folder):
        try:
            summary = _fields(folder / SUMMARY, kind.summary)
        except RecordError as error:
            raise RecordError(f"{error}, or remove it and resume the run, which writes it anew") from error
    ends = (summary or {}).get("lines") or {}

    def lost(file: str, problem: str) -> RecordError:
        return RecordError(f"{os.fspath(folder / file)} {problem}; {REMEDY}")

    def rows(file: LineFile | None) -> Rows:
        if file is None:
            return Rows()
        if ends and file.name not in ends and file is not kind.discarded:
            raise lost(SUMMARY, f"does not say where {file.name} ends")
        ended = summary is not None and file is not kind.discarded
        return read_rows(folder / file.name, file.row, whole=ended, key=kind.number, end=ends.get(file.name))

    lines = rows(kind.lines)
    numbers = [getattr(row, kind.number) for row in lines.typed]
    for line, (before, number) in enumerate(itertools.pairwise(numbers), start=2):
        if number <= before and kind.lines is not None:  # what is on record twice would be counted twice
            raise RecordError(
                f"{os.fspath(folder / kind.lines.name)} line {line} is of {kind.number} {number}, after {kind.number} "
                f"{before}; {REMEDY}"
            )
    beside, discarded = rows(kind.details) if details else Rows(), rows(kind.discarded)
    # Whole lines can be lost at the end of a file, where no checksum of a later line shows it.
    known = max([manifest.get("discarded") or 0, *(getattr(row, "discarded", None) or 0 for row in lines.typed)])
    if len(discarded) < known:
        raise lost(DISCARDED, f"has {len(discarded)} of {known} lines")
    if kind.details is not None and details:
        counts = collections.Counter(getattr(row, kind.number) for row in beside.typed)
        for number, row in zip(numbers, lines.typed, strict=True):
            if counts[number] != (count := row.details or 0):
                problem = f"has {counts[number]} lines of {kind.number} {number}, which has {count}"
                raise lost(kind.details.name, problem)
    return Contents(folder, kind, manifest, lines, beside, summary, discarded)


def read_manifest(path: AnyPath, *kinds: str) -> dict[str, Any]:
    """Reads the manifest of a record, and nothing else. It takes, and raises, what `read_record` does."""
    place = os.fspath(path)
    try:
        inside = names(path)
    except NotADirectoryError:
        inside = []
    except OSError as error:
        raise RecordError(f"{place} cannot be read ({reason(error)}); mend that and try again") from error
    if MANIFEST not in inside:
        other = next((said for name, said in OTHERS.items() if name in inside), "").format(path=place)
        raise RecordError(f"{place} is no run folder (it has no {MANIFEST}{other}); give the folder of a run")
    file = epath.Path(path) / MANIFEST
    kind = kind_of(_fields(file, schema.Manifest)["kind"])
    if kinds and kind.name not in kinds:
        raise RecordError(f"{place} holds a record of kind {kind.name!r}; give the folder of a {' or '.join(kinds)}")
    return _fields(file, kind.manifest)


def _fields(file: epath.Path, type: type[schema.Header]) -> dict[str, Any]:
    return Format(type=type, noun="record of a run", remedy=REMEDY).fields(file)


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
        self.path, self.kind, self.manifest = epath.Path(path), kind, dict(manifest)
        self._lock = lock
        self._ended = self._closed = False
        self._pace = Pace()
        self._files: dict[str, Lines] = {}
        for file in kind.files:
            self._files[file.name] = Lines(self.path / file.name, kind.number)
        # What a crash cut off of its last line does not count.
        content = b"" if kind.discarded is None else read_content(self.path / kind.discarded.name, whole=False)
        self._discarded = content.count(b"\n")

    @classmethod
    def create(cls, path: AnyPath, manifest: Given, *, kind: str | None = None) -> "Record":
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
        given = _plain(manifest)
        known = kind_of(given.get("kind") if kind is None else kind)
        folder = epath.Path(path)
        try:
            check_free(folder)
            if appends(folder):  # an object store has no folders, and would make a bucket of a mistyped name
                folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder) as lock:
                if set(names(folder)) - {LOCK}:  # somebody was faster, and is done
                    raise FolderTaken(folder)
                whole = _stamped(schema.Manifest, {"created": schema.now(), **given, "kind": known.name})
                write_sealed(folder / MANIFEST, whole)
                return cls(folder, whole, known, lock)
        except OSError as error:
            raise RecordError(f"cannot write run folder {folder}: {reason(error)}; name another folder") from error

    @classmethod
    def resume(cls, path: AnyPath, manifest: Given, *, at: int, expected: int | None = None) -> "Record":
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
        folder, given = epath.Path(path), _plain(manifest)
        old = read_manifest(folder)
        kind = kind_of(old["kind"])
        if given.get("kind", kind.name) != kind.name:
            raise RecordError(
                f"{folder} holds a record of kind {kind.name!r}, which cannot go on as {given['kind']!r}; "
                "name another folder"
            )
        try:
            with _locked(folder) as lock:
                # Nothing is changed before it was read. What is missing at the end of a run that has not ended, only
                # somebody who knows its length can say.
                found = sum(row[kind.number] < at for row in read_record(folder).lines)
                if kind.lines is not None and expected is not None and found != expected:
                    raise RecordError(
                        f"{folder / kind.lines.name} has {found} of the {expected} lines before {kind.number} {at}; "
                        "restore it, or start the run anew"
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
        """Lines on record: steps or injections."""
        return 0 if self.kind.lines is None else self._files[self.kind.lines.name].count

    @property
    def ended(self) -> bool:
        """Whether the summary is written."""
        return self._ended

    def line(self, row: Given, details: Iterable[Given] = ()) -> None:
        """Appends a line and its details. On a disk the system has both when this returns, details first.

        Args:
            row: the line. It holds its number under `kind.number`.
            details: lines for the file beside it, with the same number.

        Raises:
            RecordError: the record has ended or is closed, or its kind has no such file.
        """
        self._check_open()
        given, lines = _plain(row), [encode(_plain(detail)) for detail in details]
        if self.kind.lines is None or (lines and self.kind.details is None):
            raise RecordError(f"a record of kind {self.kind.name!r} has no {'details' if self.kind.lines else 'lines'}")
        assert isinstance(given.get(self.kind.number), int), f"a line without its number: {self.kind.number}"
        if taken := sorted({"details", "discarded", "mismatches", FIELD} & set(given)):
            raise RecordError(f"a line cannot have a field {taken[0]!r}, which the record adds; name it otherwise")
        beside = {"details": len(lines), "discarded": self._discarded}
        if self.kind.details is not None:
            self._files[self.kind.details.name].append(lines)
        self._files[self.kind.lines.name].append([encode({**given, **{k: v for k, v in beside.items() if v}})])
        self._pace.run(self.flush)

    def rewind(self, at: int) -> None:
        """Takes out the lines numbered `at` and higher, and their details: the run was rolled back.

        Lines of steps are kept in `discarded.jsonl` with their mismatches, for what they found was found.

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
            # Lines, with the totals of their mismatches, that a crash has cut off although it left the mismatches.
            known = {row[number] for row in lines}
            for row in beside:
                if row[number] not in known and row.get("mismatched"):
                    sites = gone.setdefault(row[number], {number: row[number], "sites": {}})["sites"]
                    total = sites.setdefault(str(row.get("site")), {"checked": 0, "mismatched": 0})
                    for key in total:
                        total[key] += row.get(key) or 0
            self.discard(gone.values(), beside)
        # Lines without details would say that nothing was found; details without a line are passed over.
        for file in reversed(self.kind.files):
            self._files[file.name].rewind(at)

    def discard(self, rows: Iterable[Given], details: Iterable[Given] = ()) -> None:
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
            write_text(self.path / name, to_text(value))
        return self.path / name

    def flush(self) -> None:
        """Writes everything that an object store has not got yet; on a disk nothing waits."""
        for file in self._files.values():
            file.flush()

    def sync(self) -> None:
        """Makes all lines outlive the machine's sudden end, as what builds on them does: a checkpoint, the summary."""
        for file in self._files.values():
            file.sync()

    def finish(self, summary: Given) -> None:
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
            file = self.path / self.kind.discarded.name
            checksum = end_of(read_content(file, whole=True), start(file))
            ends[file.name] = [self._discarded, f"{checksum:08x}"]
        write_summary(self.path, {**_plain(summary), **({"lines": ends} if ends else {})})
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

    def _read(self, file: LineFile) -> list[dict[str, Any]]:
        return list(read_rows(self.path / file.name, file.row, whole=False, key=self.kind.number))

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
    write_sealed(epath.Path(folder) / SUMMARY, _stamped(schema.Ending, summary, lasting=True))


def _plain(value: Given) -> dict[str, Any]:
    """As a mapping: of a type what it has, and not what it has not."""
    if not isinstance(value, schema.Fields):
        return dict(value)
    found: dict[str, Any] = msgspec.to_builtins(value, enc_hook=to_json)
    return {name: item for name, item in found.items() if item is not None and item != [] and item != {}}


def _stamped(type: "type[schema.Header] | str", value: Mapping[str, Any], *, lasting: bool = False) -> dict[str, Any]:
    """With a stamp in front, whatever the value says of itself."""
    mine = schema.stamp(type if isinstance(type, str) else str(type.__struct_config__.tag), lasting=lasting)
    return {**mine, **{key: item for key, item in value.items() if key not in mine}}
