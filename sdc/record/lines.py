"""Files of lines that grow while a run goes on."""

import os
import time
from collections.abc import Callable, Iterable
from typing import IO, Protocol

from .files import numbered
from .storage import AnyPath, appends, read_bytes, write_bytes

REWRITE_SECONDS = 30.0
"""An object cannot grow. It is written anew at most this often, and at the end."""
SHARE = 10
"""It is also written anew so seldom that this takes at most a tenth of the time."""


class Lines(Protocol):
    """A file of lines, each with a number.

    Attributes:
        count: lines in the file.
    """

    count: int

    def append(self, lines: Iterable[str]) -> None:
        """Appends lines. On a disk they are handed to the system before this returns."""

    def rewind(self, at: int) -> None:
        """Drops the lines numbered `at` and higher."""

    def flush(self) -> None:
        """Writes what is not written yet."""

    def close(self) -> None:
        """Writes what is not written yet, and closes the file."""


def open_lines(path: AnyPath, key: str) -> Lines:
    """Opens a file of lines at its end, in the way that its storage allows.

    Args:
        path: the file, which need not exist.
        key: the field with the number of a line.
    """
    return AppendedLines(path, key) if appends(path) else RewrittenLines(path, key)


class AppendedLines:
    """Lines in a file that can be appended to; see `Lines`."""

    def __init__(self, path: AnyPath, key: str) -> None:
        self._path, self._key = path, key
        self._file = self._open()
        self.count = _content(path).count(b"\n")

    def append(self, lines: Iterable[str]) -> None:
        data = [line.encode("utf-8") + b"\n" for line in lines]
        self._file.writelines(data)
        self._file.flush()
        self.count += len(data)

    def rewind(self, at: int) -> None:
        self._file.close()
        kept = _below(self._path, _content(self._path), self._key, at)
        write_bytes(self._path, b"".join(kept))
        self._file = self._open()
        self.count = len(kept)

    def flush(self) -> None:
        """Does nothing: each line is written at once."""

    def close(self) -> None:
        self._file.close()

    def _open(self) -> IO[bytes]:
        return open(self._path, "ab")


class RewrittenLines:
    """Lines in an object that can only be replaced; see `Lines`. They wait in memory for `flush`."""

    def __init__(self, path: AnyPath, key: str) -> None:
        self._path, self._key = path, key
        self._lines = [line + b"\n" for line in _content(path).split(b"\n")[:-1]]
        self._changed = True
        self.count = len(self._lines)

    def append(self, lines: Iterable[str]) -> None:
        self._lines += [line.encode("utf-8") + b"\n" for line in lines]
        self.count, self._changed = len(self._lines), True

    def rewind(self, at: int) -> None:
        self._lines = _below(self._path, b"".join(self._lines), self._key, at)
        self.count, self._changed = len(self._lines), True
        self.flush()

    def flush(self) -> None:
        if self._changed:
            write_bytes(self._path, b"".join(self._lines))
            self._changed = False

    def close(self) -> None:
        self.flush()


class Pace:
    """Says when it is time to write objects anew.

    Args:
        seconds: time from the end of one writing to the next.
        clock: tells seconds.
    """

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


def _content(path: AnyPath) -> bytes:
    try:
        return read_bytes(path)
    except FileNotFoundError:
        return b""


def _below(path: AnyPath, content: bytes, key: str, at: int) -> list[bytes]:
    """The lines numbered below `at`, as they are, and without a last one that a crash cut off."""
    return [line + b"\n" for line, row in numbered(os.fspath(path), content, key=key) if row[key] < at]
