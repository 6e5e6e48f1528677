"""Files of lines: numbered JSON objects, each with a checksum over the line itself and all lines before it."""

import io
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO, Any

import msgspec

from .format import DEEPEST, FIELD, ODD, REMEDY, from_json, misfit, parse_json
from .storage import UNREADABLE, AnyPath, RecordError, appends, read_bytes, reason, sync_folder, write_bytes

_LINE = re.compile(rb', "checksum": "([0-9a-f]{8})"\}$')
REWRITE_SECONDS = 30.0  # minimum seconds between rewrites of an object, which cannot grow; the last rewrite is exempt
SHARE = 10  # rewrites take at most 1/SHARE of the time


def start(path: AnyPath) -> int:
    """Returns the initial checksum of a file, before its first line; this checksum depends on the file's name."""
    return zlib.crc32(os.path.basename(os.fspath(path)).encode())


def link(line: bytes, before: int) -> tuple[bytes, int]:
    """Returns a nonempty line with its checksum, and the checksum; `before` is the checksum of all earlier lines."""
    value = zlib.crc32(line, before)
    return b'%s, "%s": "%08x"}' % (line[:-1], FIELD.encode(), value), value


def unlink(line: bytes) -> tuple[bytes, int | None]:
    """Returns a line as it was before `link`, and its checksum, which is None if the line has none."""
    found = _LINE.search(line)
    return (line, None) if found is None else (line[: found.start()] + b"}", int(found[1], 16))


def end_of(content: bytes, before: int) -> int:
    """Returns the checksum of the last complete line of a file; `before` if there is none."""
    whole = content[: content.rfind(b"\n") + 1]
    found = unlink(whole[whole.rfind(b"\n", 0, -1) + 1 : -1])[1]
    return before if found is None else found


class Rows(Sequence[dict[str, Any]]):
    """Lines of a file: `typed` holds typed objects; the sequence itself decodes JSON objects on access.

    Equal objects within the typed lines are shared, so do not change them.
    """

    def __init__(self, typed: Sequence[Any] = (), raw: Sequence[bytes | dict[str, Any]] = ()) -> None:
        self.typed, self._raw = list(typed), raw

    def by(self, number: str) -> "Rows":
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


def read_rows(path: AnyPath, type: type, *, whole: bool, key: str, end: tuple[int, str] | None = None) -> Rows:
    """Reads JSON lines; raises RecordError, naming the line and the field, if either is damaged or missing."""
    content = read_content(path, whole=whole)
    lines = list(_numbered(path, content, key, type))
    if end is not None and (found := (len(lines), f"{end_of(content, start(path)):08x}")) != tuple(end):
        raise RecordError(
            f"{os.fspath(path)} has {found[0]} lines (checksum {found[1]}), but the run ended with {end[0]} "
            f"lines (checksum {end[1]}); {REMEDY}"
        )
    return Rows([row for _, row in lines], [line for line, _ in lines])


def read_content(path: AnyPath, *, whole: bool) -> bytes:
    """Returns the bytes of a file of lines; a missing file counts as empty unless the file must be `whole`."""
    try:
        content = read_bytes(path)
    except FileNotFoundError as error:
        if whole:
            raise RecordError(f"{os.fspath(path)} is missing although the run has ended; {REMEDY}") from error
        return b""
    except OSError as error:
        raise RecordError(f"{os.fspath(path)} {UNREADABLE.format(reason(error))}") from error
    if whole and not content.endswith(b"\n") and content:
        lines = content.count(b"\n")
        raise RecordError(f"{os.fspath(path)} is cut off after line {lines}; {REMEDY}")
    return content


def _numbered(path: AnyPath, content: bytes, key: str, type: type | None = None) -> Iterator[tuple[bytes, Any]]:
    """Yields the complete lines of a file, each as bytes without the checksum and as a `type` (default: a JSON object).

    Ignores text after the last newline, which is the remainder of a line that a crash interrupted.
    """
    before = start(path)
    decode: Callable[[bytes], Any] = msgspec.json.decode if type is None else _Shared(type)
    for number, whole in enumerate(
        io.BytesIO(content), start=1
    ):  # splitting all lines at once would hold them in memory twice
        if not whole.endswith(b"\n"):
            return
        bare, found = unlink(whole[:-1])
        try:
            row = _row(bare, key, type, decode)
        except ValueError as error:
            raise RecordError(f"{os.fspath(path)} line {number} is damaged ({error}); {REMEDY}") from None
        if found is None or zlib.crc32(bare, before) != found:
            raise RecordError(
                f"{os.fspath(path)} line {number} does not match its checksum: the line was changed, or earlier lines "
                "were changed or are missing; restore the file or start a new run"
            )
        before = found
        yield bare, row


class _Shared:
    """Decodes lines; equal parts of lines share one object, since most parts of a healthy run are equal."""

    MOST = 4096  # maximum number of cached objects; a run with more distinct objects has few equal ones
    SHORT = 16  # maximum length in bytes of a list to cache, such as `[0.0, 0.0]`

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


def _row(line: bytes, key: str, type: type | None, decode: Callable[[bytes], Any]) -> Any:
    """Decodes a line; raises ValueError with the reason if the line is invalid. Valid lines take a fast path."""
    if not any(word in line for word in ODD) and line.count(b"[") + line.count(b"{") <= DEEPEST:
        with suppress(ValueError, RecursionError):
            row = decode(line)
            if type is not None or (isinstance(row, dict) and isinstance(row.get(key), int)):
                return row
    found = from_json(parse_json(line, msgspec.json.decode))
    if not isinstance(found, dict) or not isinstance(found.get(key), int):
        raise ValueError(f"no {key} number")
    if type is not None and (problem := misfit(found, type)):
        raise ValueError(problem)
    return found if type is None else msgspec.convert(found, type)


class Lines:
    """A growing file of lines. On a disk, the operating system has received a line when `append` returns. An object in
    an object store cannot grow, so its lines are buffered until `flush`."""

    def __init__(self, path: AnyPath, key: str) -> None:
        self._path, self._key = path, key
        content = read_content(path, whole=False)  # raises for anything but a file, before opening it
        self.count, self.checksum = content.count(b"\n"), end_of(content, start(path))
        self._file = self._opened() if appends(path) else None
        self._lines = [line + b"\n" for line in content.split(b"\n")[:-1]] if self._file is None else []
        self._new = self._changed = True

    def _opened(self) -> IO[bytes]:
        return open(self._path, "ab")

    def append(self, lines: Iterable[str]) -> None:
        data, self.checksum = _linked((line.encode("utf-8") for line in lines), self.checksum)
        self.count += len(data)
        self._changed |= bool(data)
        if self._file is None:
            self._lines += data
        elif data:
            self._file.writelines(data)
            self._file.flush()

    def rewind(self, at: int) -> None:
        """Removes the lines numbered `at` and higher, and an incomplete last line; raises RecordError if a line is
        damaged."""
        content = b"".join(self._lines)
        if self._file is not None:
            self._file.close()
            content = read_content(self._path, whole=False)
        bare = [line for line, row in _numbered(self._path, content, self._key) if row[self._key] < at]
        kept, self.checksum = _linked(bare, start(self._path))
        self.count, self._new, self._changed = len(kept), True, True
        if self._file is None:
            self._lines = kept
            self.flush()
        else:
            write_bytes(self._path, b"".join(kept))
            self._file = self._opened()

    def flush(self) -> None:
        """Writes buffered lines."""
        if self._file is None and self._changed:
            write_bytes(self._path, b"".join(self._lines))
            self._changed = False

    def sync(self) -> None:
        """Writes buffered lines to stable storage, so that they survive a power failure."""
        self.flush()
        if self._file is not None and self._changed:
            os.fsync(self._file.fileno())
            if self._new:
                sync_folder(os.path.dirname(os.fspath(self._path)))
            self._changed = self._new = False

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()


def _linked(lines: Iterable[bytes], checksum: int) -> tuple[list[bytes], int]:
    linked = []
    for line in lines:
        whole, checksum = link(line, checksum)
        linked.append(whole + b"\n")
    return linked, checksum


class Pace:
    """Schedules rewrites of objects: `seconds` after the last rewrite, or later if the last rewrite took long."""

    def __init__(self, seconds: float = REWRITE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._next = clock() + seconds

    def run(self, flush: Callable[[], None]) -> None:
        """Calls `flush` if a rewrite is due, and increases the interval if the rewrite took long."""
        started = self._clock()
        if started >= self._next:
            flush()
            ended = self._clock()
            self._next = ended + max(self._seconds, SHARE * (ended - started))
