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
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

SCHEMA = 1
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MANIFEST, STEPS, MISMATCHES, SUMMARY = "manifest.json", "steps.jsonl", "mismatches.jsonl", "summary.json"
TRACE, INJECTIONS = "trace.jsonl", "injections.jsonl"


class RecordError(ValueError):
    """A run folder that cannot be read, written or continued; the message says which and how to mend it."""


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
        >>> from sdc.records import RunWriter, read_run
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


def encode(value: Any) -> str:
    """One line of strict JSON; see the module for non-finite numbers."""
    return json.dumps(to_json(value), allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_text(path, json.dumps(to_json(value), allow_nan=False, ensure_ascii=False, indent=1) + "\n")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of JSON lines whole or not at all."""
    write_text(path, "".join(encode(row) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all: beside its place, synced, renamed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; see the module for non-finite numbers.

    Raises:
        RecordError: it is damaged.
    """
    try:
        value = _from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        raise RecordError(f"{path} is damaged ({error}); restore it or start the run anew") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path} is damaged (expected a JSON object); restore it or start the run anew")
    return value


def read_lines(path: Path, *, whole: bool, key: str = "step") -> list[dict[str, Any]]:
    """Reads JSON lines; where they must be `whole`, a last line that is cut off is damage, not the trace of a crash.

    Raises:
        RecordError: a line is damaged, or has no number under `key`.
    """
    if not path.is_file():
        if whole:
            raise RecordError(f"{path} is missing although the run has ended; restore it or start the run anew")
        return []
    lines = path.read_bytes().split(b"\n")
    if whole and lines[-1]:
        raise RecordError(f"{path} is cut off after line {len(lines) - 1}; restore it or start the run anew")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was cut off by a crash
        try:
            row = _from_json(json.loads(line))
        except ValueError as error:
            raise RecordError(
                f"{path} line {number} is damaged ({error}); remove that line or restore the file"
            ) from error
        if not isinstance(row, dict) or not isinstance(row.get(key), int):
            raise RecordError(
                f"{path} line {number} is damaged (no {key} number); remove that line or restore the file"
            )
        rows.append(row)
    return rows


def to_json(value: Any) -> Any:
    """A value in strict JSON's terms; see the module for non-finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Path):
        return str(value)
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    return value
