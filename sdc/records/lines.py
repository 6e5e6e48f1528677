"""Files of lines: JSON objects with numbers, each with a checksum over itself and all lines before it."""

import io
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO, Any, Protocol

import msgspec

from .format import DEEPEST, FIELD, ODD, from_json, misfit, parse_json
from .storage import AnyPath, RecordError, appends, read_bytes, reason, sync_folder, write_bytes

_LINE = re.compile(rb', "checksum": "([0-9a-f]{8})"\}$')
REWRITE_SECONDS = 30.0
"""An object cannot grow. It is written anew at most this often, and at the end."""
SHARE = 10
"""It is also written anew so seldom that this takes at most a tenth of the time."""


def start(name: str) -> int:
    """The checksum that stands before the first line of a file of that name."""
    return zlib.crc32(name.encode())


def link(line: bytes, before: int) -> tuple[bytes, int]:
    """Adds its checksum to a line, which has at least one field; returns both. `before`: the checksum before it."""
    value = zlib.crc32(line, before)
    return b'%s, "%s": "%08x"}' % (line[:-1], FIELD.encode(), value), value


def unlink(line: bytes) -> tuple[bytes, int | None]:
    """A line as it was before `link`, and its checksum; None where it has none."""
    found = _LINE.search(line)
    return (line, None) if found is None else (line[: found.start()] + b"}", int(found[1], 16))


def check_line(line: bytes, before: int) -> int | None:
    """The checksum of a line if it is right; None if there is none or another."""
    bare, found = unlink(line)
    return found if found is not None and zlib.crc32(bare, before) == found else None


def end_of(content: bytes, before: int) -> int:
    """The checksum of the last whole line of a file; `before` where there is none."""
    whole = content[: content.rfind(b"\n") + 1]
    found = unlink(whole[whole.rfind(b"\n", 0, -1) + 1 : -1])[1]
    return before if found is None else found


class Rows(Sequence[dict[str, Any]]):
    """Lines of a file. `typed` has them as their type; by themselves they are JSON objects, decoded when asked for.

    Objects within the typed ones that are alike are one object: do not change them.
    """

    def __init__(self, typed: list[Any], raw: Sequence[bytes | dict[str, Any]]) -> None:
        self.typed, self._raw = typed, raw

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], type: type) -> "Rows":
        """From JSON objects."""
        return cls(msgspec.convert(rows, list[type]), rows)  # type: ignore[valid-type]

    def by(self, number: str) -> "Rows":
        """In the order of their numbers."""
        order = sorted(range(len(self)), key=lambda place: getattr(self.typed[place], number))
        return Rows([self.typed[place] for place in order], [self._raw[place] for place in order])

    def __add__(self, other: "Rows") -> "Rows":
        return Rows([*self.typed, *other.typed], [*self._raw, *other._raw])

    def __len__(self) -> int:
        return len(self._raw)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Rows(self.typed[place], self._raw[place])
        row = self._raw[place]
        return from_json(msgspec.json.decode(row)) if isinstance(row, bytes) else row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def read_rows(
    path: AnyPath, type: type, *, whole: bool, key: str, start: int, end: tuple[int, str] | None = None
) -> Rows:
    """Reads JSON lines; a RecordError names the line and field that is damaged or missing."""
    content = read_content(path, whole=whole)
    typed, raw = [], []
    for line, row in numbered(path, content, key=key, type=type, start=start):
        typed.append(row)
        raw.append(line)
    if end is not None and (found := (len(raw), f"{end_of(content, start):08x}")) != tuple(end):
        raise RecordError(
            f"{os.fspath(path)} has {found[0]} lines (checksum {found[1]}), but the run ended with {end[0]} "
            f"({end[1]}); restore it or start the run anew"
        )
    return Rows(typed, raw)


def read_content(path: AnyPath, *, whole: bool) -> bytes:
    """The bytes of a file of lines; see `read_rows`."""
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
    path: AnyPath, content: bytes, *, key: str, start: int, type: type | None = None
) -> Iterator[tuple[bytes, Any]]:
    """The whole lines of a file: each as its bytes without the checksum, and as its type, or as a JSON object.

    What follows the last newline was cut off by a crash. See `read_rows`.
    """
    before: int | None = start
    decode: Callable[[bytes], Any] = msgspec.json.decode if type is None else _Shared(type)
    for number, whole in enumerate(io.BytesIO(content), start=1):  # split at once, they would be in memory twice
        if not whole.endswith(b"\n"):
            return
        line = whole[:-1]
        bare, _ = unlink(line)
        row, problem = _row(bare, key, type, decode)
        if problem is not None:
            raise RecordError(
                f"{os.fspath(path)} line {number} is damaged ({problem}); remove that line or restore the file"
            )
        assert before is not None
        if (before := check_line(line, before)) is None:
            raise RecordError(
                f"{os.fspath(path)} line {number} does not fit its checksum: it was changed, or lines before it are "
                "missing or were changed; restore the file or start the run anew"
            )
        yield bare, row


class _Shared:
    """Decodes lines. Parts of them that are alike are one object: of a healthy run most of them are."""

    MOST = 4096
    """Different objects that are remembered; a run that has more has few alike."""
    SHORT = 16
    """Bytes of a list that may be like others, such as `[0.0, 0.0]`."""

    def __init__(self, type: type) -> None:
        self._type: msgspec.json.Decoder[Any] = msgspec.json.Decoder(type)
        self._parts = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known: dict[tuple[str, bytes], Any] = {}

    def __call__(self, line: bytes) -> Any:
        row = self._type.decode(line)
        if line.count(b"{") > 1:
            for name, part in self._parts.decode(line).items():
                key, value = (name, bytes(part)), getattr(row, name, None)
                alike = key[1][:1] == b"{" or (key[1][:1] == b"[" and len(key[1]) <= self.SHORT)
                if alike and value is not None and (len(self._known) < self.MOST or key in self._known):
                    setattr(row, name, self._known.setdefault(key, value))
        return row


def _row(line: bytes, key: str, type: type | None, decode: Callable[[bytes], Any]) -> tuple[Any, str | None]:
    """A line decoded, and what is wrong with it. What is right is read fast, what is odd is looked at closely."""
    if not any(word in line for word in ODD) and line.count(b"[") + line.count(b"{") <= DEEPEST:
        with suppress(ValueError, RecursionError):
            row = decode(line)
            if type is not None or (isinstance(row, dict) and isinstance(row.get(key), int)):
                return row, None
    try:
        found = from_json(parse_json(line, msgspec.json.decode))
    except ValueError as error:
        return None, str(error)
    if not isinstance(found, dict) or not isinstance(found.get(key), int):
        return None, f"no {key} number"
    if type is None:
        return found, None
    problem = misfit(found, type)
    return (None, problem) if problem else (msgspec.convert(found, type), None)


class Lines(Protocol):
    """A file of lines, each with a number and a checksum over itself and all lines before it.

    Attributes:
        count: lines in the file.
        checksum: that of the last line.
    """

    count: int
    checksum: int

    def append(self, lines: Iterable[str]) -> None:
        """Appends lines. On a disk they are handed to the system before this returns."""

    def rewind(self, at: int) -> None:
        """Drops the lines numbered `at` and higher; a RecordError where a line is damaged."""

    def flush(self) -> None:
        """Writes what is not written yet."""

    def sync(self) -> None:
        """Writes what is not written yet, to where it outlives the machine's sudden end."""

    def close(self) -> None:
        """Writes what is not written yet, and closes the file."""


def open_lines(path: AnyPath, key: str, start: int) -> Lines:
    """Opens a file of lines at its end, in the way that its storage allows; `start` is its first checksum."""
    return AppendedLines(path, key, start) if appends(path) else RewrittenLines(path, key, start)


class AppendedLines:
    """Lines in a file that can be appended to; see `Lines`."""

    def __init__(self, path: AnyPath, key: str, start: int) -> None:
        self._path, self._key, self._start = path, key, start
        self._new = self._unsynced = True
        content = read_content(path, whole=False)  # what is no file is told before it is opened
        self.count = content.count(b"\n")
        self.checksum = end_of(content, start)
        self._file = self._open()

    def append(self, lines: Iterable[str]) -> None:
        data, self.checksum = _linked((line.encode("utf-8") for line in lines), self.checksum)
        if data:
            self._file.writelines(data)
            self._file.flush()
            self.count += len(data)
            self._unsynced = True

    def rewind(self, at: int) -> None:
        self._file.close()
        kept = _below(self._path, read_content(self._path, whole=False), self._key, self._start, at)
        write_bytes(self._path, b"".join(kept))
        self._new = self._unsynced = True
        self._file = self._open()
        self.count, self.checksum = len(kept), end_of(b"".join(kept[-1:]), self._start)

    def flush(self) -> None:
        """Does nothing: each line is written at once."""

    def sync(self) -> None:
        if self._unsynced:
            os.fsync(self._file.fileno())
            if self._new:
                sync_folder(os.path.dirname(os.fspath(self._path)))
            self._unsynced = self._new = False

    def close(self) -> None:
        self._file.close()

    def _open(self) -> IO[bytes]:
        return open(self._path, "ab")


class RewrittenLines:
    """Lines in an object that can only be replaced; see `Lines`. They wait in memory for `flush`."""

    def __init__(self, path: AnyPath, key: str, start: int) -> None:
        self._path, self._key, self._start = path, key, start
        content = read_content(path, whole=False)
        self._lines = [line + b"\n" for line in content.split(b"\n")[:-1]]
        self._changed = True
        self.count, self.checksum = len(self._lines), end_of(content, start)

    def append(self, lines: Iterable[str]) -> None:
        data, self.checksum = _linked((line.encode("utf-8") for line in lines), self.checksum)
        self._lines += data
        self.count, self._changed = len(self._lines), True

    def rewind(self, at: int) -> None:
        self._lines = _below(self._path, b"".join(self._lines), self._key, self._start, at)
        self.count, self._changed = len(self._lines), True
        self.checksum = end_of(b"".join(self._lines[-1:]), self._start)
        self.flush()

    def flush(self) -> None:
        if self._changed:
            write_bytes(self._path, b"".join(self._lines))
            self._changed = False

    def sync(self) -> None:
        self.flush()

    def close(self) -> None:
        self.flush()


class Pace:
    """Says when it is time to write objects anew: `seconds` after the last time, later where it took long."""

    def __init__(self, seconds: float = REWRITE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._next = clock() + seconds

    def run(self, flush: Callable[[], None]) -> None:
        """Calls `flush` if it is time, and waits longer after it where it took long."""
        started = self._clock()
        if started >= self._next:
            flush()
            ended = self._clock()
            self._next = ended + max(self._seconds, SHARE * (ended - started))


def _linked(lines: Iterable[bytes], checksum: int) -> tuple[list[bytes], int]:
    """Lines with their checksums, and the last of these."""
    linked = []
    for line in lines:
        whole, checksum = link(line, checksum)
        linked.append(whole + b"\n")
    return linked, checksum


def _below(path: AnyPath, content: bytes, key: str, start: int, at: int) -> list[bytes]:
    """The lines numbered below `at`, with checksums, and without a last one that a crash cut off."""
    bare = [line for line, row in numbered(os.fspath(path), content, key=key, start=start) if row[key] < at]
    return _linked(bare, start)[0]
