"""The names of version 0.1, over `Record` and `read_record`. They go as soon as no caller is left."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from .files import RecordError as RecordError, write_json as write_json
from .identity import stamp
from .kinds import (
    INJECTIONS as INJECTIONS,
    MANIFEST as MANIFEST,
    MISMATCHES as MISMATCHES,
    STEPS as STEPS,
    SUMMARY as SUMMARY,
    TRACE as TRACE,
)
from .lifecycle import Record
from .reading import read_manifest, read_record
from .storage import AnyPath


@dataclasses.dataclass(frozen=True)
class Run:
    """A run record as read from its folder; see `Contents`."""

    path: epath.Path
    manifest: dict[str, Any]
    steps: list[dict[str, Any]]
    mismatches: list[dict[str, Any]]
    summary: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Campaign:
    """The record of a campaign as read from its folder; see `Contents`."""

    path: epath.Path
    manifest: dict[str, Any]
    injections: list[dict[str, Any]]
    summary: dict[str, Any] | None


class RunWriter:
    """Writes a run folder; see `Record`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from sdc.record import RunWriter, read_run
        >>> folder = Path(tempfile.mkdtemp()) / "run"
        >>> with RunWriter.create(folder, {"kind": "twin"}) as writer:
        ...     writer.step({"step": 0, "loss": [2.5, float("nan")]})
        >>> read_run(folder).steps[0]["loss"]
        [2.5, nan]
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.path = record.path

    @classmethod
    def create(
        cls, path: AnyPath, manifest: Mapping[str, Any], details: str | None = MISMATCHES, *, lines: str = STEPS
    ) -> "RunWriter":
        """Starts a new run folder; see `Record.create`."""
        kind = "campaign" if lines == INJECTIONS else "trace" if details == TRACE else "twin"
        return cls(Record.create(path, manifest, kind=str(manifest.get("kind", kind))))

    @classmethod
    def resume(
        cls,
        path: AnyPath,
        step: int,
        manifest: Mapping[str, Any],
        details: str | None = MISMATCHES,
        *,
        lines: str = STEPS,
        key: str = "step",
    ) -> "RunWriter":
        """Continues a run folder at `step`; see `Record.resume`."""
        del details, lines, key  # the kind decides
        return cls(Record.resume(path, manifest, at=step))

    def step(self, row: Mapping[str, Any], details: Iterable[Mapping[str, Any]] = ()) -> None:
        """Appends one line and its details; see `Record.line`."""
        self.record.line(row, details)

    def file(self, name: str, value: Mapping[str, Any]) -> None:
        write_json(self.path / name, value)

    def rewind(self, at: int) -> None:
        raise NotImplementedError

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`, even of a record that is closed."""
        write_json(self.path / SUMMARY, {**stamp(lasting=True), **summary})

    def close(self) -> None:
        """Closes the files; the record stays readable."""
        self.record.close()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_run(path: AnyPath) -> Run:
    """Reads a run folder, finished or not; see `read_record`."""
    found = read_record(path, details=read_kind(path) != "trace")
    steps = [] if found.kind.name == "campaign" else found.lines
    return Run(found.path, found.manifest, steps, found.details, found.summary)


def read_campaign(path: AnyPath) -> Campaign:
    """Reads the folder of a campaign, finished or not; see `read_record`."""
    found = read_record(path, "campaign")
    return Campaign(found.path, found.manifest, found.lines, found.summary)


def read_kind(path: AnyPath) -> str:
    """The kind of run that a folder holds; see `read_manifest`."""
    return str(read_manifest(path)["kind"])
