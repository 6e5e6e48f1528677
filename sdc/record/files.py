"""Files of a record: strict JSON, written whole or not at all."""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RecordError(ValueError):
    """A run folder that cannot be read, written or continued; the message says which and how to mend it."""


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
