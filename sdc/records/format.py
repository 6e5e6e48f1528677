"""Files: strict JSON with checksums, written whole or not at all, and checked against both when they are read.

A `Format` is one kind of file: its name, its type and what to do when it cannot be read. The object in memory is the
file. JSON knows no NaN and no infinity: they are written as the strings "NaN", "Infinity" and "-Infinity" and read back
as numbers.

The checksum is a CRC-32, of a whole file or of a line together with all lines before it, so that a line that was lost,
repeated, edited or put elsewhere no longer fits. It finds every change of up to 32 neighbouring bits and misses one in
4e9 of all others. It guards against accidents, not against somebody who computes it anew.
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
from .storage import AnyPath, RecordError as RecordError, read_bytes, reason, write_bytes

FIELD = "checksum"  # name of the field; it is the last one of an object, and no other may have that name
DEEPEST = 100  # lists and objects within one another. Records need seven.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
ODD = tuple(f'"{word}"'.encode() for word in NON_FINITE)
REMEDY = "restore it or start the run anew"

_TEXT = re.compile(rb',\n "checksum": "([0-9a-f]{8})"\n\}\n')
_LENGTH = len(b',\n "checksum": "01234567"\n}\n')
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_SHALLOW = 12  # levels of lists and objects, of which a result needs five


def seal(text: bytes) -> bytes:
    """Adds its checksum to the text of a JSON object with a field, as `to_text` writes it."""
    return b'%s,\n "%s": "%08x"\n}\n' % (text[: -len(b"\n}\n")], FIELD.encode(), zlib.crc32(text))


def is_sound(text: bytes) -> bool:
    """Whether the text of a JSON file has a checksum, and the right one."""
    cut = max(0, len(text) - _LENGTH)
    found = _TEXT.fullmatch(text, cut)
    return found is not None and zlib.crc32(b"\n}\n", zlib.crc32(memoryview(text)[:cut])) == int(found[1], 16)


def parse_json(text: str | bytes, decode: Callable[[Any], Any] = json.loads) -> Any:
    """The value of a JSON text; a ValueError where it is no JSON, or is nested deeper than `DEEPEST`."""
    too_deep = ValueError(f"it is nested deeper than {DEEPEST} levels")
    try:
        value = decode(text)
    except RecursionError:
        raise too_deep from None
    # The most levels that a text can have, which a line of a record has not: to count them takes no time.
    most = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    level = [value] if most > DEEPEST else []
    for _ in range(DEEPEST):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in inner for item in (each.values() if isinstance(each, dict) else each)]
    if any(isinstance(each, dict | list) for each in level):
        raise too_deep
    return value


def to_json(value: Any) -> Any:
    """A value in strict JSON's terms; see the module for non-finite numbers.

    Args:
        value: mappings, structs, sequences, arrays, numbers, texts and paths, within one another.

    Returns:
        The same of dictionaries, lists and plain values.
    """
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
    if isinstance(value, msgspec.Struct):
        return to_json(msgspec.to_builtins(value, enc_hook=to_json))
    return value


def from_json(value: Any) -> Any:
    """A value with its non-finite numbers as numbers."""
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
    """Writes a JSON object with its checksum, whole or not at all."""
    if FIELD in value:
        raise RecordError(f"{os.fspath(path)} cannot have a field {FIELD!r}, which the record adds; name it otherwise")
    write_bytes(path, seal(to_text(value).encode("utf-8")))


def read_json(path: AnyPath) -> dict[str, Any]:
    """Reads a JSON object of any format without its checksum, if it has one; a RecordError says what is damaged."""
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
            f"{place} is a folder, expected a file; name the file itself, or put it in its place"
        ) from error
    except OSError as error:
        raise RecordError(f"{place} cannot be read ({reason(error)}); mend that and try again") from error


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
    """Which field of a JSON value is not what its `msgspec.Struct` asks for, and why; None for a value that fits."""
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
    """A kind of file. Its name is the `tag` of its type, and its version the default of the type's field `schema`."""

    type: type[T]
    noun: str  # what such a file is, for "FILE is no ..."
    remedy: str  # what to do about a file that cannot be used
    source: str = ""  # what to give instead of a file that is missing; by default the remedy
    names: tuple[str, ...] = ()  # what such a file is called in a folder that may be given in its place
    sealed: bool = True  # whether a file must have a checksum; one that it has is checked anyway
    contradictions: Callable[[T], Iterable[str]] = lambda _: ()  # what in a value cannot be so, in words

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
        """Writes a file whole or not at all; a ValueError where the value contradicts itself."""
        if problem := next(iter(self.contradictions(value)), None):
            raise ValueError(f"this {self.noun} contradicts itself: {problem}")
        write_bytes(path, self.encode(value))

    def read(self, path: AnyPath) -> T:
        """Reads a file, or the one of these names in a folder; a RecordError says in one line what is wrong with it."""
        place = os.fspath(path)
        if self.names and os.path.isdir(place):
            inside = [os.path.join(place, name) for name in self.names]
            found = next(filter(os.path.exists, inside), None if len(inside) > 1 else inside[0])
            if found is None:
                raise RecordError(
                    f"{place} is a folder that holds no {' or '.join(self.names)}; {self.source or self.remedy}"
                )
            place = found
        return self.decode(_content(place, self.source or self.remedy), place)

    def decode(self, content: bytes, place: str) -> T:
        """The value of a file's content; `place` is for messages. It raises what `read` does."""
        value = self._certain(content) or msgspec.convert(self._fields(content, place), self.type)
        if problem := next(iter(self.contradictions(value)), None):
            raise RecordError(f"{place} contradicts itself: {problem}; {self.remedy}")
        return value

    def fields(self, path: AnyPath) -> dict[str, Any]:
        """The fields of a file as JSON has them, those that its type does not name as well."""
        place = os.fspath(path)
        return self._fields(_content(place, self.source or self.remedy), place)

    @cached_property
    def _head(self) -> re.Pattern[bytes]:
        """How a file of this version begins, if this project wrote it."""
        mine = f'{{\n "format": {msgspec.json.encode(self.name).decode()},\n "schema": {self.version},\n'
        return re.compile(re.escape(mine.encode()) + rb' "version": "[^"\n]*",\n "host": \{')

    def _certain(self, content: bytes) -> T | None:
        """A value that leaves no doubt, decoded at once; None for what has to be looked at closely.

        A fleet reads a thousand files of 3 MB, and walking through each value by value takes several times as long.
        """
        if not self._head.match(content) or not is_sound(content) or any(word in content for word in ODD):
            return None
        brackets = content.translate(None, _NO_BRACKETS)  # those in words included, they close level by level
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
            raise RecordError(f"{place} is no {self.noun} (its format is {format!r}); {self.remedy}")
        known = isinstance(writer, str) and writer != package_version("jax-sdc")
        wrote = f"jax-sdc {writer}, which" if known else "the version of jax-sdc that"
        back = f"read it with {wrote} wrote it, or {self.remedy}"
        if type(schema) is not int or schema != self.version:
            raise RecordError(f"{place} has layout {schema!r}, this version of jax-sdc reads {self.version}; {back}")
        if format is None:
            raise RecordError(f"{place} is no {self.noun} (its format is None); {self.remedy}")
        sealed = FIELD in found
        missing = [f"object missing required field {name}" for name in ("version", "host") if name not in found]
        wrong = ["its checksum is wrong"] if sealed and not is_sound(content) else []
        unsealed = ["it has no checksum"] if self.sealed and not sealed else []
        unfit = misfit(found, self.type)
        if problem := next(filter(None, (*wrong, *missing, unfit, *unsealed)), None):
            if problem == unfit and sealed:  # as it was written
                raise RecordError(f"{place} has other fields than this version of jax-sdc reads ({problem}); {back}")
            raise RecordError(f"{place} is damaged ({problem}); {self.remedy}")
        found.pop(FIELD, None)
        return found
