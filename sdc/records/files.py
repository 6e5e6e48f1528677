"""Files of a record: strict JSON, written whole or not at all, and checked when they are read, against their checksums
and their types.

JSON knows no NaN and no infinity: they are written as the strings "NaN", "Infinity" and "-Infinity" and read back as
numbers. Where the storage fails, functions here raise as `storage` says.
"""

import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from .integrity import FIELD, check_line, end_of, is_sound, seal, unlink
from .parsing import parse_json
from .storage import AnyPath, RecordError as RecordError, read_bytes, reason, write_bytes

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WORDS = (b'"NaN"', b'Infinity"')


def encode(value: Any) -> str:
    """One line of strict JSON; see the module for non-finite numbers."""
    return json.dumps(to_json(value), allow_nan=False, ensure_ascii=False)


def write_json(path: AnyPath, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_text(path, to_text(value))


def write_sealed(path: AnyPath, value: Mapping[str, Any]) -> None:
    """Writes a JSON object with its checksum, whole or not at all.

    Raises:
        RecordError: the object has a field of that name.
    """
    if FIELD in value:
        raise RecordError(f"{os.fspath(path)} cannot have a field {FIELD!r}, which the record adds; name it otherwise")
    write_bytes(path, seal(to_text(value).encode("utf-8")))


def write_text(path: AnyPath, text: str) -> None:
    """Writes a text file whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def read_json(path: AnyPath, type: type | None = None, *, sealed: bool = False) -> dict[str, Any]:
    """Reads a JSON object; see the module for non-finite numbers.

    Args:
        path: the file.
        type: what the object must be, if that is known. Fields that it does not name are kept.
        sealed: the object must have a checksum. One that it has is checked anyway, and left out.

    Raises:
        RecordError: it is damaged; the message names the field.
    """
    remedy = "restore it or start the run anew"
    try:
        content = read_bytes(path)
        if not content.strip():
            raise ValueError("it is empty")
        value = from_json(parse_json(content.decode("utf-8")))
    except IsADirectoryError as error:
        raise RecordError(
            f"{os.fspath(path)} is a folder, expected a file; name the file itself, or put it in its place"
        ) from error
    except (ValueError, OSError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{os.fspath(path)} is damaged ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise RecordError(f"{os.fspath(path)} is damaged (expected a JSON object); {remedy}")
    if type is not None and (problem := misfit(value, type)):
        raise RecordError(f"{os.fspath(path)} is damaged ({problem}); {remedy}")
    if (sealed or FIELD in value) and not is_sound(content):
        problem = "its checksum is wrong" if FIELD in value else "it has no checksum"
        raise RecordError(f"{os.fspath(path)} is damaged ({problem}); {remedy}")
    value.pop(FIELD, None)
    return value


def read_lines(
    path: AnyPath,
    *,
    whole: bool,
    key: str = "step",
    type: type | None = None,
    start: int | None = None,
    end: tuple[int, str] | None = None,
) -> list[dict[str, Any]]:
    """Reads JSON lines.

    Args:
        path: the file.
        whole: the file must be there and end with a whole line. If not, a last line that is cut off is the trace of a
            crash, and passed over.
        key: the field with the number of a line.
        type: what each line must be, if that is known. Fields that it does not name are kept, but for checksums.
        start: the checksum before the first line; None for a file that has no checksums.
        end: how many lines there must be, and the checksum of the last one in hexadecimal, if that is known.

    Raises:
        RecordError: a line is damaged, missing, or has no number under `key`; the message names line and field.
    """
    content = read_content(path, whole=whole)
    rows = [row for _, row in numbered(path, content, key=key, type=type, start=start)]
    if start is not None and end is not None and (found := (len(rows), f"{end_of(content, start):08x}")) != tuple(end):
        raise RecordError(
            f"{os.fspath(path)} has {found[0]} lines (checksum {found[1]}), but the run ended with {end[0]} "
            f"({end[1]}); restore it or start the run anew"
        )
    return rows


def read_content(path: AnyPath, *, whole: bool) -> bytes:
    """The bytes of a file of lines; see `read_lines`."""
    try:
        content = read_bytes(path)
    except FileNotFoundError as error:
        if whole:
            raise RecordError(
                f"{os.fspath(path)} is missing although the run has ended; restore it or start the run anew"
            ) from error
        return b""
    except OSError as error:
        raise RecordError(f"{os.fspath(path)} cannot be read ({reason(error)}); mend that and try again") from error
    if whole and not content.endswith(b"\n") and content:
        lines = content.count(b"\n")
        raise RecordError(f"{os.fspath(path)} is cut off after line {lines}; restore it or start the run anew")
    return content


def numbered(
    path: AnyPath, content: bytes, *, key: str, type: type | None = None, start: int | None = None
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a file, each as its bytes without the checksum, and as the JSON object that it holds.

    `path` is for messages. What follows the last newline of the content was cut off by a crash. For the rest, and what
    is raised, see `read_lines`.
    """
    before, shared = start, _Shared()
    for number, whole in enumerate(io.BytesIO(content), start=1):  # split at once, they would be in memory twice
        if not whole.endswith(b"\n"):
            return
        line = whole[:-1]
        bare, _ = unlink(line)
        row, problem = _row(bare, key, type, shared)
        if problem is not None:
            raise RecordError(
                f"{os.fspath(path)} line {number} is damaged ({problem}); remove that line or restore the file"
            )
        if before is not None and (before := check_line(line, before)) is None:
            raise RecordError(
                f"{os.fspath(path)} line {number} does not fit its checksum: it was changed, or lines before it are "
                "missing or were changed; restore the file or start the run anew"
            )
        yield bare, row


class _Shared:
    """Decodes lines. Objects within them that are alike are one object: of a healthy run most of them are."""

    MOST = 4096
    """Different objects that are remembered; a run that has more has few alike."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def __call__(self, line: bytes) -> Any:
        try:
            parts = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except msgspec.ValidationError:  # no object
            return msgspec.json.decode(line)
        return {name: self._value(bytes(part)) for name, part in parts.items()}

    def _value(self, text: bytes) -> Any:
        if not text.startswith(b"{"):
            return msgspec.json.decode(text)
        if text not in self._known:
            value = msgspec.json.decode(text)
            if len(self._known) == self.MOST:
                return value
            self._known[text] = value
        return self._known[text]


def _row(line: bytes, key: str, type: type | None, decode: Callable[[bytes], Any]) -> tuple[dict[str, Any], str | None]:
    """A line as an object, and what is wrong with it. What is right is read fast, what is not is looked at closely."""
    problem: str | None = None
    try:
        row = parse_json(line, decode)
        if type is not None:
            msgspec.json.decode(line, type=type)
    except ValueError as error:
        try:
            row = from_json(parse_json(line))
        except ValueError as worse:
            return {}, str(worse)
        problem = str(error) if type is None or not isinstance(row, dict) else misfit(row, type)
    if not isinstance(row, dict) or not isinstance(row.get(key), int):
        return {}, f"no {key} number"
    return (from_json(row) if any(word in line for word in _WORDS) else row), problem


def misfit(value: Any, type: type) -> str | None:
    """Which field of a JSON value is not what its `msgspec.Struct` asks for, and why; None for a value that fits.

    Example:
        >>> from sdc.records.files import misfit
        >>> from sdc.records.rows import StepRow
        >>> misfit({"step": 3, "sites": {"fwd/attn": {"checked": "many"}}}, StepRow)
        "field sites[...].checked: expected int | float | null, got str"
        >>> misfit({"step": 3, "remark": "a field of one's own"}, StepRow)
    """
    try:
        msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        message, _, field = str(error).partition(" - at `$")
        place = field.rstrip("`").removeprefix(".")
        expected = r"expected clean, corrupt, inconclusive or null, got \1"
        message = re.sub(r"^Invalid enum value (.*)$", expected, message).replace("`", "")
        message = message[:1].lower() + message[1:]
        return f"field {place}: {message}" if place else message
    return None


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
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def from_json(value: Any) -> Any:
    """A value with its non-finite numbers as numbers."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    return value


def to_text(value: Any) -> str:
    """A value as the text of a JSON file."""
    return json.dumps(to_json(value), allow_nan=False, ensure_ascii=False, indent=1) + "\n"
