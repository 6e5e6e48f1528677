"""Files of lines that grow while a run goes on."""

import os
import time
from collections.abc import Callable, Iterable
from typing import IO, Protocol

from .files import numbered, read_content
from .integrity import end_of, link
from .storage import AnyPath, appends, sync_folder, write_bytes

REWRITE_SECONDS = 30.0
"""An object cannot grow. It is written anew at most this often, and at the end."""
SHARE = 10
"""It is also written anew so seldom that this takes at most a tenth of the time."""


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
    """Opens a file of lines at its end, in the way that its storage allows.

    Args:
        path: the file, which need not exist.
        key: the field with the number of a line.
        start: the checksum before the first line, see `integrity.start`.
    """
    return AppendedLines(path, key, start) if appends(path) else RewrittenLines(path, key, start)


def seal_lines(path: AnyPath, key: str, start: int) -> None:
    """Gives checksums to the lines of a file that has none, which an older version wrote."""
    if content := read_content(path, whole=False):
        bare = [line for line, _ in numbered(os.fspath(path), content, key=key)]
        write_bytes(path, b"".join(_linked(bare, start)[0]))


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
