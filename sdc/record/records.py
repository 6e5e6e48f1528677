"""The run record: one folder a run, JSON and JSON lines, safe against crashes.

    manifest.json      what ran: configuration, versions, devices, program fingerprint, data digest
    steps.jsonl        one line a step
    mismatches.jsonl   one line a step, microstep, site and layer with a mismatch
    trace.jsonl        of a trace, instead: one line a step with its digests
    injections.jsonl   of a campaign, instead of both: one line an injection
    summary.json       verdict and tables; absent while the run is under way

Whole files are written beside their place and renamed, so that a reader sees the old one or the new one. Lines are
appended and flushed; a reader passes over a last line cut off by a crash. JSON knows no NaN and no infinity: they are
written as the strings "NaN", "Infinity" and "-Infinity" and read back as numbers.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from .files import RecordError, encode, read_json, read_lines, write_json, write_lines

SCHEMA = 1
MANIFEST, STEPS, MISMATCHES, SUMMARY = "manifest.json", "steps.jsonl", "mismatches.jsonl", "summary.json"
TRACE, INJECTIONS = "trace.jsonl", "injections.jsonl"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run record as read from its folder.

    Attributes:
        path: the run folder.
        manifest: contents of `manifest.json`.
        steps: lines of `steps.jsonl`.
        mismatches: lines of `mismatches.jsonl`.
        summary: contents of `summary.json`, or None for a run that has not ended.
    """

    path: Path
    manifest: dict[str, Any]
    steps: list[dict[str, Any]]
    mismatches: list[dict[str, Any]]
    summary: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Campaign:
    """The record of a campaign as read from its folder.

    Attributes:
        path: the run folder.
        manifest: contents of `manifest.json`.
        injections: lines of `injections.jsonl`.
        summary: contents of `summary.json`, or None for a campaign that has not ended.
    """

    path: Path
    manifest: dict[str, Any]
    injections: list[dict[str, Any]]
    summary: dict[str, Any] | None


class RunWriter:
    """Writes a run folder; use it as a context manager.

    Args:
        path: the run folder.
        details: name of the file of lines that a step can have beside its own; None for a record of single lines.
        lines: name of the file of lines, one a step, or one an injection.

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

    def __init__(self, path: Path, details: str | None = MISMATCHES, *, lines: str = STEPS) -> None:
        self.path = path
        self._lines: IO[str] = (path / lines).open("a", encoding="utf-8")
        self._details: IO[str] | None = (path / details).open("a", encoding="utf-8") if details else None

    @classmethod
    def create(
        cls,
        path: Path,
        manifest: Mapping[str, Any],
        details: str | None = MISMATCHES,
        *,
        lines: str = STEPS,
    ) -> "RunWriter":
        """Starts a new run folder.

        Raises:
            RecordError: the folder holds a run, or cannot be written.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RecordError(
                f"run folder {path} exists already; name another with --run, or continue that run with --resume"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / MANIFEST, {"schema": SCHEMA, **manifest})
            return cls(path, details, lines=lines)
        except OSError as error:
            raise RecordError(f"cannot write run folder {path}: {error.strerror}; name another with --run") from error

    @classmethod
    def resume(
        cls,
        path: Path,
        step: int,
        manifest: Mapping[str, Any],
        details: str | None = MISMATCHES,
        *,
        lines: str = STEPS,
        key: str = "step",
    ) -> "RunWriter":
        """Continues a run folder at `step`: lines of that step and later ones are dropped, and so is the summary.

        The new manifest stands in for the old one, but for the time of creation; `resumed_at` lists the steps at which
        the run was continued.

        Raises:
            RecordError: there is no readable run in the folder.
        """
        old, _ = _read_ends(path)
        files = [lines, *([details] if details else [])]
        rows = {name: read_lines(path / name, whole=False, key=key) for name in files}
        history = {name: old[name] for name in ("created", "resumed_at") if name in old}
        continued = [*history.get("resumed_at", []), step]
        write_json(path / MANIFEST, {"schema": SCHEMA, **manifest, **history, "resumed_at": continued})
        (path / SUMMARY).unlink(missing_ok=True)
        for name in files:
            write_lines(path / name, (row for row in rows[name] if row[key] < step))
        return cls(path, details, lines=lines)

    def step(self, row: Mapping[str, Any], details: Iterable[Mapping[str, Any]] = ()) -> None:
        """Appends one line and its details; both are on disk when this returns."""
        if self._details is not None:
            self._details.writelines(encode(detail) + "\n" for detail in details)
            self._details.flush()
        self._lines.write(encode(row) + "\n")
        self._lines.flush()

    def file(self, name: str, value: Mapping[str, Any]) -> None:
        write_json(self.path / name, value)

    def rewind(self, at: int) -> None:
        raise NotImplementedError

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`, which marks the run as ended."""
        write_json(self.path / SUMMARY, summary)

    def close(self) -> None:
        """Closes the files; the record stays readable."""
        self._lines.close()
        if self._details is not None:
            self._details.close()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_run(path: Path) -> Run:
    """Reads a run folder, finished or not.

    Raises:
        RecordError: no manifest, a manifest of another schema, a damaged line that is not the last one, or a last line
            that is cut off although the run has ended.
    """
    manifest, summary = _read_ends(path)
    ended = summary is not None
    # A trace has digests in the place of mismatches; they are read by `traces.read_trace`.
    steps = read_lines(path / STEPS, whole=ended)
    mismatches = [] if manifest.get("kind") == "trace" else read_lines(path / MISMATCHES, whole=ended)
    return Run(path, manifest, steps, mismatches, summary)


def read_campaign(path: Path) -> Campaign:
    """Reads the folder of a campaign, finished or not.

    Raises:
        RecordError: see `read_run`.
    """
    manifest, summary = _read_ends(path)
    if manifest.get("kind") != "campaign":
        raise RecordError(f"{path} holds a run of kind {manifest.get('kind')!r}; give the folder of a campaign")
    rows = read_lines(path / INJECTIONS, whole=summary is not None, key="injection")
    return Campaign(path, manifest, rows, summary)


def read_kind(path: Path) -> str:
    """The kind of run that a folder holds.

    Raises:
        RecordError: see `read_run`.
    """
    return str(_read_ends(path)[0].get("kind"))


def _read_ends(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Manifest and summary of a run folder."""
    if not (path / MANIFEST).is_file():
        raise RecordError(f"{path} is no run folder (it has no {MANIFEST}); give the folder that --run named")
    manifest = read_json(path / MANIFEST)
    if manifest.get("schema") != SCHEMA:
        raise RecordError(
            f"{path / MANIFEST} has schema {manifest.get('schema')!r}, this version reads schema {SCHEMA}; "
            "read it with the version of jax-sdc that wrote it"
        )
    return manifest, read_json(path / SUMMARY) if (path / SUMMARY).is_file() else None
