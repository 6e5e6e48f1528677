"""Files of strict JSON with checksums. Files are written atomically, and syntax and checksum are verified on reading.

A `Format` describes one kind of file: its name, its type and the remedy for an unreadable file. The object in memory
mirrors the file. JSON has no NaN or infinity: these numbers are written as the strings "NaN", "Infinity" and
"-Infinity", and are read back as numbers.

The checksum is the CRC-32 of a whole file, or of a line together with all lines before it. The checksum therefore no
longer matches if a line was lost, repeated, edited or moved. A CRC-32 detects every change of up to 32 adjacent bits
and misses one in 4e9 of all other changes. The checksum protects against accidents, but not against manipulation, since
anyone can recompute it.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from ..schema import Header, package_version
from .storage import UNREADABLE, AnyPath, RecordError as RecordError, read_bytes, reason, write_bytes

FIELD = "checksum"  # reserved name of the checksum's field, which is the last field of an object
DEEPEST = 100  # maximum nesting of lists and objects. Records need seven levels.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
ODD = tuple(f'"{word}"'.encode() for word in NON_FINITE)
REMEDY = "restore it or start a new run"

_TEXT = re.compile(rb',\n "checksum": "([0-9a-f]{8})"\n\}\n')
_LENGTH = len(b',\n "checksum": "01234567"\n}\n')
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_SHALLOW = 12  # levels of lists and objects; a result needs five


def seal(text: bytes) -> bytes:
    """Adds a checksum to the text of a nonempty JSON object, as written by `to_text`."""
    return b'%s,\n "%s": "%08x"\n}\n' % (text[: -len(b"\n}\n")], FIELD.encode(), zlib.crc32(text))


def is_sound(text: bytes) -> bool:
    """Returns whether the text of a JSON file has a correct checksum."""
    cut = max(0, len(text) - _LENGTH)
    found = _TEXT.fullmatch(text, cut)
    return found is not None and zlib.crc32(b"\n}\n", zlib.crc32(memoryview(text)[:cut])) == int(found[1], 16)


def parse_json(text: str | bytes, decode: Callable[[Any], Any] = json.loads) -> Any:
    """Parses JSON text; raises ValueError if the text is not JSON or is nested deeper than `DEEPEST`."""
    too_deep = ValueError(f"it is nested deeper than {DEEPEST} levels")
    try:
        value = decode(text)
    except RecursionError:
        raise too_deep from None
    # A fast upper bound on the nesting depth; for lines of a record, this bound is at most `DEEPEST`.
    most = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    level = [value] if most > DEEPEST else []
    for _ in range(DEEPEST):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in inner for item in (each.values() if isinstance(each, dict) else each)]
    if any(isinstance(each, dict | list) for each in level):
        raise too_deep
    return value


def to_json(value: Any) -> Any:
    """Converts a value to strict JSON types; the module's docstring describes the form of non-finite numbers.

    Args:
        value: nested mappings, structs, sequences, arrays, numbers, strings and paths.

    Returns:
        The value as dictionaries, lists and plain values.
    """
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, msgspec.Struct):
        return to_json(msgspec.to_builtins(value, enc_hook=to_json))
    return value


def from_json(value: Any) -> Any:
    """Converts the strings that stand for non-finite numbers back to numbers."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def encode(value: Any) -> str:
    return json.dumps(to_json(value), allow_nan=False, ensure_ascii=False)


def to_text(value: Any) -> str:
    return json.dumps(to_json(value), allow_nan=False, ensure_ascii=False, indent=1) + "\n"


def write_text(path: AnyPath, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_sealed(path: AnyPath, value: Mapping[str, Any]) -> None:
    """Writes a JSON object with its checksum, atomically."""
    if FIELD in value:
        raise RecordError(f"{os.fspath(path)} cannot have a field {FIELD!r}, which is reserved; use another name")
    write_bytes(path, seal(to_text(value).encode("utf-8")))


def read_json(path: AnyPath) -> dict[str, Any]:
    """Reads a JSON object of any format and removes its checksum, if any; raises RecordError if the file is damaged."""
    place = os.fspath(path)
    content = _content(place, REMEDY)
    value = _object(content, place, REMEDY)
    if value.pop(FIELD, None) is not None and not is_sound(content):
        raise RecordError(f"{place} is damaged (its checksum is wrong); {REMEDY}")
    return value


def _content(place: str, source: str) -> bytes:
    try:
        return read_bytes(place)
    except FileNotFoundError as error:
        raise RecordError(f"there is no {place}; {source}") from error
    except IsADirectoryError as error:
        raise RecordError(
            f"{place} is a folder, not a file; give the path of a file, or replace the folder with the file"
        ) from error
    except OSError as error:
        raise RecordError(f"{place} {UNREADABLE.format(reason(error))}") from error


def _object(content: bytes, place: str, remedy: str) -> dict[str, Any]:
    try:
        if not content.strip():
            raise ValueError("it is empty")
        found = from_json(parse_json(content.decode("utf-8")))
        if not isinstance(found, dict):
            raise ValueError("expected a JSON object")
        return found
    except ValueError as error:
        raise RecordError(f"{place} is damaged ({error}); {remedy}") from error


def misfit(value: Any, type: type) -> str | None:
    """Returns why a JSON value does not match its `msgspec.Struct`, naming the field; None if the value matches."""
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


T = TypeVar("T", bound=Header)


@dataclass(frozen=True, kw_only=True)
class Format(Generic[T]):
    """A kind of file. Its name is the `tag` of `type`; its version is the default of the field `schema` of `type`."""

    type: type[T]
    noun: str  # noun for such a file, as in "FILE is not a ..."
    remedy: str  # remedy for a file that cannot be used
    source: str = ""  # remedy for a missing file (default: `remedy`)
    names: tuple[str, ...] = ()  # names that `read` looks for if it is given a folder
    sealed: bool = True  # whether a file must have a checksum; an existing checksum is always verified
    contradictions: Callable[[T], Iterable[str]] = lambda _: ()  # descriptions of contradictions in a value

    @property
    def name(self) -> str:
        return str(self.type.__struct_config__.tag)

    @property
    def version(self) -> int:
        return int(next(field.default for field in msgspec.structs.fields(self.type) if field.name == "schema"))

    def encode(self, value: T) -> bytes:
        content = to_text(value).encode()
        return seal(content) if self.sealed else content

    def write(self, path: AnyPath, value: T) -> None:
        """Writes a file atomically; raises ValueError if the value contradicts itself."""
        if problem := next(iter(self.contradictions(value)), None):
            raise ValueError(f"this {self.noun} contradicts itself: {problem}")
        write_bytes(path, self.encode(value))

    def read(self, path: AnyPath) -> T:
        """Reads a file or, in a folder, a file with one of `names`; raises RecordError with a one-line reason."""
        place = os.fspath(path)
        if self.names and os.path.isdir(place):
            try:
                os.listdir(place)
            except OSError as error:
                raise RecordError(f"{place} {UNREADABLE.format(reason(error))}") from error
            inside = [os.path.join(place, name) for name in self.names]
            found = next(filter(os.path.exists, inside), None if len(inside) > 1 else inside[0])
            if found is None:
                raise RecordError(
                    f"{place} is a folder without {' or '.join(self.names)}; {self.source or self.remedy}"
                )
            place = found
        return self.decode(_content(place, self.source or self.remedy), place)

    def decode(self, content: bytes, place: str) -> T:
        """Decodes the content of a file; `place` is the path for messages. Raises the same errors as `read`."""
        value = self._certain(content) or msgspec.convert(self._fields(content, place), self.type)
        if problem := next(iter(self.contradictions(value)), None):
            raise RecordError(f"{place} contradicts itself: {problem}; {self.remedy}")
        return value

    def fields(self, path: AnyPath) -> dict[str, Any]:
        """Returns the fields of a file as JSON, including fields that its type lacks."""
        place = os.fspath(path)
        return self._fields(_content(place, self.source or self.remedy), place)

    @cached_property
    def _head(self) -> re.Pattern[bytes]:
        """Pattern that matches the beginning of each file that this version wrote."""
        mine = f'{{\n "format": {msgspec.json.encode(self.name).decode()},\n "schema": {self.version},\n'
        return re.compile(re.escape(mine.encode()) + rb' "version": "[^"\n]*",\n "host": \{')

    def _certain(self, content: bytes) -> T | None:
        """Decodes unambiguous content directly; returns None if the content needs a detailed check.

        The summary of a fleet reads a thousand files of 3 MB; checking each value would take several times as long.
        """
        if not self._head.match(content) or not is_sound(content) or any(word in content for word in ODD):
            return None
        brackets = content.translate(
            None, _NO_BRACKETS
        )  # brackets, including those in strings, must close level by level
        for _ in range(_SHALLOW):
            brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
        try:
            return None if brackets else msgspec.json.decode(content, type=self.type)
        except (ValueError, RecursionError):
            return None

    def _fields(self, content: bytes, place: str) -> dict[str, Any]:
        found = _object(content, place, self.remedy)
        format, schema, writer = found.get("format"), found.get("schema"), found.get("version")
        if format != self.name and (format is not None or "schema" not in found):
            raise RecordError(f"{place} is not a {self.noun} (its format is {format!r}); {self.remedy}")
        known = isinstance(writer, str) and writer != package_version("jax-sdc")
        wrote = f"jax-sdc {writer}, which" if known else "the version of jax-sdc that"
        back = f"read it with {wrote} wrote it, or {self.remedy}"
        if type(schema) is not int or schema != self.version:
            raise RecordError(
                f"{place} has layout {schema!r}, but this version of jax-sdc reads layout {self.version}; {back}"
            )
        if format is None:
            raise RecordError(f"{place} is not a {self.noun} (its format is None); {self.remedy}")
        sealed = FIELD in found
        missing = [f"object missing required field {name}" for name in ("version", "host") if name not in found]
        wrong = ["its checksum is wrong"] if sealed and not is_sound(content) else []
        unsealed = ["it has no checksum"] if self.sealed and not sealed else []
        unfit = misfit(found, self.type)
        if problem := next(filter(None, (*wrong, *missing, unfit, *unsealed)), None):
            if problem == unfit and sealed:  # the file is as it was written
                raise RecordError(
                    f"{place} has different fields from those that this version of jax-sdc reads ({problem}); {back}"
                )
            raise RecordError(f"{place} is damaged ({problem}); {self.remedy}")
        found.pop(FIELD, None)
        return found
