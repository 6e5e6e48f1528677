"""Formats: what a file of this project is called, which type it has, and what to do when it cannot be read.

A `Format` writes and reads one kind of file: strict JSON with a checksum, written whole or not at all, whose first
fields are a `Header`. The object in memory is the file.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from .fields import Fields, about
from .files import NON_FINITE, from_json, to_text
from .identity import Host, identify, package_version
from .integrity import FIELD, is_sound, seal
from .parsing import parse_json
from .storage import AnyPath, RecordError, read_bytes, reason, write_bytes

_ODD = tuple(f'"{word}"'.encode() for word in NON_FINITE)
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_SHALLOW = 12
"""Levels of lists and objects, of which a result needs five."""


class Header(Fields, kw_only=True, tag_field="format"):
    """How a file begins: with its format, which is the `tag` of its type, the version of that, and who wrote it."""

    schema: Annotated[int, about("version of this layout, 1")] = 1
    version: Annotated[str, about("version of jax-sdc that wrote the file")] = msgspec.field(
        default_factory=lambda: package_version("jax-sdc")
    )
    host: Annotated[Host, about("who wrote the file")] = msgspec.field(default_factory=identify)


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
        """What the field `format` says."""
        return str(self.type.__struct_config__.tag)

    @property
    def version(self) -> int:
        """What the field `schema` says."""
        return int(next(field.default for field in msgspec.structs.fields(self.type) if field.name == "schema"))

    def encode(self, value: T) -> bytes:
        """The content of a file."""
        content = to_text(msgspec.to_builtins(value)).encode()
        return seal(content) if self.sealed else content

    def write(self, path: AnyPath, value: T) -> None:
        """Writes a file whole or not at all.

        Raises:
            ValueError: the value contradicts itself.
            OSError: it cannot be written.
        """
        if problem := next(iter(self.contradictions(value)), None):
            raise ValueError(f"this {self.noun} contradicts itself: {problem}")
        write_bytes(path, self.encode(value))

    def read(self, path: AnyPath) -> T:
        """Reads a file, or the one of these names in a folder.

        Raises:
            RecordError: it is missing, damaged, of another format or version, or contradicts itself.
        """
        place = self._place(path)
        try:
            content = read_bytes(place)
        except FileNotFoundError as error:
            raise RecordError(f"there is no {place}; {self.source or self.remedy}") from error
        except IsADirectoryError as error:
            raise RecordError(
                f"{place} is a folder, expected a file; name the file itself, or put it in its place"
            ) from error
        except OSError as error:
            raise RecordError(f"{place} cannot be read ({reason(error)}); mend that and try again") from error
        return self.decode(content, place)

    def decode(self, content: bytes, place: str) -> T:
        """The value of a file's content; `place` is for messages. It raises what `read` does."""
        value = self._certain(content) or self._examined(content, place)
        if problem := next(iter(self.contradictions(value)), None):
            raise RecordError(f"{place} contradicts itself: {problem}; {self.remedy}")
        return value

    def _place(self, path: AnyPath) -> str:
        place = os.fspath(path)
        if not self.names or not os.path.isdir(place):
            return place
        inside = [os.path.join(place, name) for name in self.names]
        found = next(filter(os.path.exists, inside), None if len(inside) > 1 else inside[0])
        if found is None:
            raise RecordError(
                f"{place} is a folder that holds no {' or '.join(self.names)}; {self.source or self.remedy}"
            )
        return found

    @cached_property
    def _head(self) -> re.Pattern[bytes]:
        """How a file of this version begins, if this project wrote it."""
        mine = f'{{\n "format": {msgspec.json.encode(self.name).decode()},\n "schema": {self.version},\n'
        return re.compile(re.escape(mine.encode()) + rb' "version": "[^"\n]*",\n "host": \{')

    def _certain(self, content: bytes) -> T | None:
        """A value that leaves no doubt, decoded at once; None for what has to be looked at closely.

        A fleet reads a thousand files of 3 MB, and walking through each value by value takes several times as long.
        """
        sound = self._head.match(content) and is_sound(content)
        if not sound or any(word in content for word in _ODD) or not _is_shallow(content):
            return None
        try:
            return msgspec.json.decode(content, type=self.type)
        except (ValueError, RecursionError):
            return None

    def _examined(self, content: bytes, place: str) -> T:
        """A value, or what is wrong with it."""
        try:
            if not content.strip():
                raise ValueError("it is empty")
            found = parse_json(content.decode("utf-8"))
        except ValueError as error:
            raise RecordError(f"{place} is damaged ({error}); {self.remedy}") from error
        if not isinstance(found, dict):
            raise RecordError(f"{place} is damaged (expected a JSON object); {self.remedy}")
        self._check_head(found, place)
        if FIELD in found and not is_sound(content):
            raise RecordError(f"{place} is damaged (its checksum is wrong); {self.remedy}")
        try:
            if missing := [name for name in ("version", "host") if name not in found]:
                raise msgspec.ValidationError(f"Object missing required field `{missing[0]}`")
            value = msgspec.convert(from_json(found), self.type)
        except msgspec.ValidationError as error:
            raise RecordError(f"{place} is damaged ({error}); {self.remedy}") from error
        if self.sealed and FIELD not in found:
            raise RecordError(f"{place} is damaged (it has no checksum); {self.remedy}")
        return value

    def _check_head(self, found: dict[str, Any], place: str) -> None:
        if found.get("format") != self.name:
            raise RecordError(f"{place} is no {self.noun} (its format is {found.get('format')!r}); {self.remedy}")
        if type(found.get("schema")) is not int or found["schema"] != self.version:
            writer = found.get("version")
            wrote = f"; jax-sdc {writer} wrote it" if isinstance(writer, str) else ""
            raise RecordError(
                f"{place} has layout {found.get('schema')!r}, this version of jax-sdc reads {self.version}{wrote}; "
                f"{self.remedy}"
            )


def _is_shallow(content: bytes) -> bool:
    """Whether brackets in a text, those in its words included, close again and again until none is left."""
    brackets = content.translate(None, _NO_BRACKETS)
    for _ in range(_SHALLOW):
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return not brackets
