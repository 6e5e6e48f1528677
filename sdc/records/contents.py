"""Records as they are read: whole, or of a run that goes on."""

import collections
import dataclasses
import itertools
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from etils import epath

from ..schema import (
    CampaignManifest,
    CampaignSummary,
    DiscardedRow,
    Header,
    InjectionRow,
    Manifest,
    MismatchRow,
    PartRow,
    RunManifest,
    RunSummary,
    StepRow,
    StudyManifest,
    TraceManifest,
)
from .format import Format
from .layout import DISCARDED, MANIFEST, SUMMARY, Kind, LineFile, kind_of
from .lines import Rows, read_rows, start
from .storage import AnyPath, RecordError, names, reason

OTHERS = {
    "result.json": "; it is of a burn-in, which sdc verdict {path} and sdc fleet summarize {path} read",
    "pair.json": "; it is of a pair of hosts, which sdc verdict {path} and sdc pair --resolve {path} read",
    "pool.json": "; it is of a pool of hosts, which sdc verdict {path} and sdc pair --resolve {path} read",
}
"""What is no record, by its file, and who reads it."""


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
    lines: Sequence[dict[str, Any]]
    details: Sequence[dict[str, Any]]
    summary: dict[str, Any] | None
    discarded: Sequence[dict[str, Any]] = ()

    @cached_property
    def run(self) -> RunManifest:
        """`manifest.json` of twins, of a training run or of a trace."""
        return msgspec.convert(self.manifest, RunManifest if self.kind.name != "trace" else TraceManifest)

    @cached_property
    def campaign(self) -> CampaignManifest:
        """`manifest.json` of a campaign."""
        return msgspec.convert(self.manifest, CampaignManifest)

    @cached_property
    def study(self) -> StudyManifest:
        """`manifest.json` of a study or an estimate."""
        return msgspec.convert(self.manifest, StudyManifest)

    @cached_property
    def steps(self) -> list[StepRow]:
        """Lines of `steps.jsonl`."""
        return _rows(self.lines, self.kind.lines).typed

    @cached_property
    def mismatches(self) -> list[MismatchRow]:
        """Lines of `mismatches.jsonl`; none where the details are others."""
        file = self.kind.details
        return _rows(self.details, file).typed if file is not None and file.row is MismatchRow else []

    @cached_property
    def discarded_steps(self) -> list[DiscardedRow]:
        """Lines of `discarded.jsonl`."""
        return _rows(self.discarded, self.kind.discarded).typed

    @cached_property
    def injections(self) -> list[InjectionRow]:
        """Lines of `injections.jsonl`."""
        return _rows(self.lines, self.kind.lines).typed

    @cached_property
    def parts(self) -> list[PartRow]:
        """Lines of `parts.jsonl`."""
        return _rows(self.lines, self.kind.lines).typed

    @cached_property
    def run_summary(self) -> RunSummary | None:
        """`summary.json` of twins, of a training run or of a trace."""
        return None if self.summary is None else msgspec.convert(self.summary, RunSummary)

    @cached_property
    def campaign_summary(self) -> CampaignSummary | None:
        """`summary.json` of a campaign."""
        return None if self.summary is None else msgspec.convert(self.summary, CampaignSummary)

    @property
    def ended(self) -> bool:
        """Whether the run wrote its summary."""
        return self.summary is not None

    @property
    def again(self) -> "Contents":
        """What was run again, as a record of its own: lines in the order of their numbers, with their mismatches."""
        lines = _rows(self.discarded, self.kind.discarded).by(self.kind.number)
        return dataclasses.replace(self, lines=lines, details=_mismatches(lines), discarded=())

    @property
    def attempts(self) -> "Contents":
        """Every time that a step was run: what is on record and what was run again, in the order of their numbers."""
        lines, gone = _rows(self.lines, self.kind.lines), _rows(self.discarded, self.kind.discarded)
        details = _rows(self.details, self.kind.details) + _mismatches(gone)
        return dataclasses.replace(self, lines=(gone + lines).by(self.kind.number), details=details, discarded=())


def _rows(rows: Sequence[dict[str, Any]], file: LineFile | None) -> Rows:
    """Lines with their types."""
    if isinstance(rows, Rows):
        return rows
    return Rows([], []) if file is None else Rows.of(list(rows), file.row)


def _mismatches(lines: Rows) -> Rows:
    """What was beside discarded lines."""
    beside = [row for line in lines for row in line.get("mismatches") or ()]
    return Rows.of(beside, MismatchRow)


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
    kind = kind_of(manifest["kind"])
    folder = epath.Path(path)
    summary = None
    if SUMMARY in names(folder):
        try:
            summary = _fields(folder / SUMMARY, kind.summary)
        except RecordError as error:
            raise RecordError(f"{error}, or remove it and resume the run, which writes it anew") from error

    ends = (summary or {}).get("lines") or {}

    def rows(file: LineFile | None) -> Rows:
        if file is None:
            return Rows([], [])
        if ends and file.name not in ends and file is not kind.discarded:
            raise _lost(folder / SUMMARY, f"does not say where {file.name} ends")
        ended = summary is not None and file is not kind.discarded
        return read_rows(
            folder / file.name, file.row, whole=ended, key=kind.number, start=start(file.name), end=ends.get(file.name)
        )

    lines = rows(kind.lines)
    if kind.lines is not None:
        _check_order(folder / kind.lines.name, [getattr(row, kind.number) for row in lines.typed], kind.number)
    beside, discarded = rows(kind.details) if details else Rows([], []), rows(kind.discarded)
    contents = Contents(folder, kind, manifest, lines, beside, summary, discarded)
    _check_counts(contents, details=details)
    return contents


def read_manifest(path: AnyPath, *kinds: str) -> dict[str, Any]:
    """Reads the manifest of a record, and nothing else. It takes, and raises, what `read_record` does."""
    file = epath.Path(path) / MANIFEST
    try:
        inside = names(path)
    except NotADirectoryError:
        inside = []
    except OSError as error:
        raise RecordError(f"{os.fspath(path)} cannot be read ({reason(error)}); mend that and try again") from error
    if MANIFEST not in inside:
        other = next((said for name, said in OTHERS.items() if name in inside), "").format(path=os.fspath(path))
        raise RecordError(f"{os.fspath(path)} is no run folder (it has no {MANIFEST}{other}); give the folder of a run")
    kind = kind_of(_fields(file, Manifest)["kind"])
    if kinds and kind.name not in kinds:
        raise RecordError(
            f"{os.fspath(path)} holds a record of kind {kind.name!r}; give the folder of a {' or '.join(kinds)}"
        )
    return _fields(file, kind.manifest)


def _fields(file: epath.Path, type: type[Header]) -> dict[str, Any]:
    """The fields of a manifest or a summary, those that its type does not name as well."""
    known = Format(type=type, noun="record of a run", remedy="restore it or start the run anew")
    place = os.fspath(file)
    return known.load(known.content(place), place)


def _check_counts(record: Contents, *, details: bool) -> None:
    """Whole lines can be lost at the end of a file, where no checksum of a later line tells it."""
    kind, lines = record.kind, _rows(record.lines, record.kind.lines).typed
    known = max([record.manifest.get("discarded") or 0, *(getattr(row, "discarded", None) or 0 for row in lines)])
    if len(record.discarded) < known:
        raise _lost(record.path / DISCARDED, f"has {len(record.discarded)} of {known} lines")
    if kind.details is not None and details:
        rows = _rows(record.details, kind.details).typed
        beside = collections.Counter(getattr(row, kind.number) for row in rows)
        for row in lines:
            number, count = getattr(row, kind.number), row.details or 0
            if beside[number] != count:
                problem = f"has {beside[number]} lines of {kind.number} {number}, which has {count}"
                raise _lost(record.path / kind.details.name, problem)


def _lost(file: epath.Path, problem: str) -> RecordError:
    return RecordError(f"{os.fspath(file)} {problem}; restore it or start the run anew")


def _check_order(file: epath.Path, numbers: list[int], key: str) -> None:
    """What is on record twice would be counted twice."""
    for line, (before, number) in enumerate(itertools.pairwise(numbers), start=2):
        if number <= before:
            raise RecordError(
                f"{os.fspath(file)} line {line} is of {key} {number}, after {key} {before}; remove what is repeated or "
                "restore the file"
            )
