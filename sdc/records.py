"""The run record: one folder a run, JSON and JSON lines, safe against crashes.

    manifest.json      what ran: configuration, versions, devices, program fingerprint, data digest
    steps.jsonl        one line a step
    mismatches.jsonl   one line a step, microstep, site and layer with a mismatch
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


class RunWriter:
    """Writes a run folder; use it as a context manager.

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

    def __init__(self, path: Path) -> None:
        self.path = path
        self._steps: IO[str] = (path / STEPS).open("a", encoding="utf-8")
        self._mismatches: IO[str] = (path / MISMATCHES).open("a", encoding="utf-8")

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any]) -> "RunWriter":
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
            return cls(path)
        except OSError as error:
            raise RecordError(f"cannot write run folder {path}: {error.strerror}; name another with --run") from error

    @classmethod
    def resume(cls, path: Path, step: int, manifest: Mapping[str, Any]) -> "RunWriter":
        """Continues a run folder at `step`: lines of that step and later ones are dropped, and so is the summary.

        The new manifest stands in for the old one, but for the time of creation; `resumed_at` lists the steps at which
        the run was continued.

        Raises:
            RecordError: there is no readable run in the folder.
        """
        run = read_run(path)
        history = {key: run.manifest[key] for key in ("created", "resumed_at") if key in run.manifest}
        continued = [*history.get("resumed_at", []), step]
        write_json(path / MANIFEST, {"schema": SCHEMA, **manifest, **history, "resumed_at": continued})
        (path / SUMMARY).unlink(missing_ok=True)
        write_lines(path / STEPS, (row for row in run.steps if row["step"] < step))
        write_lines(path / MISMATCHES, (row for row in run.mismatches if row["step"] < step))
        return cls(path)

    def step(self, row: Mapping[str, Any], mismatches: Iterable[Mapping[str, Any]] = ()) -> None:
        """Appends one step and its mismatches; both are on disk when this returns."""
        self._mismatches.writelines(encode(mismatch) + "\n" for mismatch in mismatches)
        self._mismatches.flush()
        self._steps.write(encode(row) + "\n")
        self._steps.flush()

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`, which marks the run as ended."""
        write_json(self.path / SUMMARY, summary)

    def close(self) -> None:
        """Closes the files; the record stays readable."""
        self._steps.close()
        self._mismatches.close()

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
    if not (path / MANIFEST).is_file():
        raise RecordError(f"{path} is no run folder (it has no {MANIFEST}); give the folder that --run named")
    manifest = _read_json(path / MANIFEST)
    if manifest.get("schema") != SCHEMA:
        raise RecordError(
            f"{path / MANIFEST} has schema {manifest.get('schema')!r}, this version reads schema {SCHEMA}; "
            "read it with the version of jax-sdc that wrote it"
        )
    summary = _read_json(path / SUMMARY) if (path / SUMMARY).is_file() else None
    ended = summary is not None
    steps, mismatches = (_read_lines(path / name, whole=ended) for name in (STEPS, MISMATCHES))
    return Run(path, manifest, steps, mismatches, summary)


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = _from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        raise RecordError(f"{path} is damaged ({error}); restore it or start the run anew") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path} is damaged (expected a JSON object); restore it or start the run anew")
    return value


def _read_lines(path: Path, *, whole: bool) -> list[dict[str, Any]]:
    """Reads JSON lines; where they must be `whole`, a last line that is cut off is damage, not the trace of a crash."""
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
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise RecordError(f"{path} line {number} is damaged (no step number); remove that line or restore the file")
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
