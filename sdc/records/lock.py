"""The lock of a file or folder, which allows one writer at a time; when a process ends, the kernel releases its locks.

The lock is a file that identifies its holder. On a file system, `flock` determines the holder. An object store has no
`flock`; there, the holder is the process that created the file, which succeeds only if the file does not exist. A lock
left by a dead process of this host is taken over. It is unknown whether a process of another host is alive, so a holder
renews the time of its file every few seconds, and a lock that is not renewed is taken over. In an object store, where
this would be a write every few seconds, a lock of another host stays until it is removed.
"""

import errno
import fcntl
import os
import stat
import threading
import time
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from ..schema import Header, about, identify, now
from .storage import ENDLESS, AnyPath, RecordError, appends, check_owner, create_bytes, read_bytes, remove, write_bytes

LOCK, RENEWING = "lock.json", "sdc-locks"  # file name of a lock, and name of the thread that renews locks
# Seconds after which a lock taken over without the kernel is read again: the last writer holds it.
SETTLE = 0.5
BEAT, EXPIRY = 5.0, 30.0  # seconds between renewals of a lock, and without one after which a foreign lock has expired
_WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # errors of file systems without `flock`


class Holder(Header, kw_only=True, tag="jax-sdc lock"):
    """Contents of `lock.json`."""

    since: Annotated[str | None, about("when the lock was taken, UTC")] = None
    started: Annotated[str | None, about("when the holder started, in clock ticks since the system booted")] = None
    namespace: Annotated[str | None, about("the PID namespace of the holder")] = None
    token: Annotated[str, about("a random string, different for each lock")]

    def __str__(self) -> str:
        return f"process {self.host.pid} on host {self.host.name}"

    @property
    def here(self) -> bool:
        mine = identify()
        return (self.host.name, self.host.machine) == (mine.name, mine.machine)

    @property
    def gone(self) -> bool:
        """Whether the process is known to be dead; False if unknown."""
        mine = identify()
        if not self.here or self.host.boot is None:
            return False
        if self.host.boot != mine.boot:
            return mine.boot is not None and mine.machine is not None  # the host has rebooted since
        return self._comparable and self.host.pid is not None and _started(self.host.pid) != self.started

    @property
    def alive(self) -> bool:
        """Whether the process is known to be alive, perhaps suspended; False if unknown."""
        here = self.here and self.host.boot is not None and self.host.boot == identify().boot
        return here and self._comparable and not self.gone

    @property
    def _comparable(self) -> bool:
        return self.namespace == _namespace()


class RecordBusy(RecordError):
    """Another process is writing the record; `holder` identifies this process, if known."""

    def __init__(self, message: str, holder: Holder | None = None) -> None:
        super().__init__(message)
        self.holder = holder


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def release_all() -> None:
    """Releases every lock that this process holds; for use before it exits without cleanup, and in a forked child."""
    for lock in list(_held):
        lock.release()


def _renew() -> None:
    """Starts the thread that renews the locks of this process, unless it is running."""

    def all_once() -> None:  # a function of its own, since an unreferenced lock is released
        for lock in list(_held):
            lock.renew()

    def renew() -> None:
        while True:
            all_once()
            time.sleep(BEAT)

    if not any(thread.name == RENEWING for thread in threading.enumerate()):
        threading.Thread(target=renew, name=RENEWING, daemon=True).start()


class Lock:
    """The right to write to a folder, until the lock is released or garbage collected, or the process ends."""

    def __init__(self, folder: AnyPath, name: str = LOCK, *, lasting: bool = False) -> None:
        self._folder, self._path = os.fspath(folder), os.path.join(os.fspath(folder), name)
        mine = Holder(
            since=now(),
            started=_started(os.getpid()),
            namespace=_namespace(),
            token=uuid.uuid4().hex,
        )
        content = msgspec.json.encode(mine) + b"\n"
        _check_file(self._path)
        check_owner(self._path)
        handle = self._lock(content, lasting) if appends(self._path) else None
        if handle is None:
            self._write(content, mine.token)
        self._release = weakref.finalize(self, _release, self._path, handle, mine.token, os.getpid(), lasting)
        _held.add(self)
        _renew()

    def renew(self) -> None:
        """Shows other hosts that the holder is alive."""
        if self._release.alive and appends(self._path):
            with suppress(OSError):
                os.utime(self._path, follow_symlinks=False)

    def release(self) -> None:
        self._release()

    def _lock(self, content: bytes, lasting: bool) -> int | None:
        """Returns the open file, locked by the kernel; None if the file system does not support `flock`."""
        while True:
            handle = _open(self._path)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_at(handle, self._path):  # the holder has just removed it
                    os.close(handle)
                    continue
                if os.fstat(handle).st_nlink > 1:  # perhaps a link that another user made to a file of this user
                    os.unlink(self._path)
                    os.close(handle)
                    continue
                found = _parsed(os.pread(handle, 2**16, 0))
                # Locks of a network file system may be local to each host.
                if found is not None and not lasting and not found.here and not _expired(self._path):
                    raise self._busy(found)
                os.fchmod(handle, 0o600)  # earlier versions let everyone read locks
                os.ftruncate(handle, 0)
                os.pwrite(handle, content, 0)
                return handle
            except BlockingIOError:
                holder = _parsed(os.pread(handle, 2**16, 0))
                os.close(handle)
                raise self._busy(holder) from None
            except OSError as error:
                os.close(handle)
                if error.errno not in _WITHOUT:
                    raise
                return None
            except BaseException:
                os.close(handle)
                raise

    def _write(self, content: bytes, token: str) -> None:
        """Acquires the lock by writing the file, without the kernel."""
        if create_bytes(self._path, content):
            return
        holder = _holder(self._path)
        expires = holder is not None and not holder.alive and appends(self._path)
        if holder is not None and not holder.gone and not (expires and _expired(self._path)):
            raise self._busy(holder)
        write_bytes(self._path, content)
        time.sleep(SETTLE)  # another process may have found the same dead holder
        if (last := _holder(self._path)) is None or last.token != token:
            raise self._busy(last)

    def _busy(self, holder: Holder | None) -> RecordBusy:
        who = "another process" if holder is None else f"{holder}, since {holder.since}"
        foreign = holder is not None and not (holder.here and holder.host.boot and holder.namespace == _namespace())
        foreign = foreign and not appends(self._path)
        remedy = f"; if that process is gone, remove {self._path}" if foreign else ""
        return RecordBusy(
            f"run folder {self._folder} is being written by {who}{remedy}; wait until that process ends, or use "
            "another folder",
            holder,
        )


def _expired(path: str) -> bool:
    """Returns whether no process renews a lock, after watching it for `EXPIRY` seconds."""

    def renewed() -> int:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # opening a file on NFS updates its attributes
        try:
            return os.fstat(handle).st_mtime_ns
        finally:
            os.close(handle)

    try:
        before, until = renewed(), time.monotonic() + EXPIRY
        while time.monotonic() < until:
            time.sleep(min(1.0, EXPIRY / 10))
            if renewed() != before:
                return False
    except FileNotFoundError:  # the holder has just released it
        return True
    return True


def _parsed(content: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(content, type=Holder)
    except (msgspec.DecodeError, RecursionError):
        return None


def _holder(path: str) -> Holder | None:
    """Returns the holder of a lock; None if the lock has just been removed or is unreadable."""
    try:
        return _parsed(read_bytes(path))
    except OSError:
        return None


def _check_file(path: str) -> None:
    with suppress(FileNotFoundError):
        if appends(path) and not stat.S_ISREG(kind := os.lstat(path).st_mode):
            what = {**ENDLESS, stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder"}[stat.S_IFMT(kind)]
            raise RecordError(f"{path} is {what}, not a file; delete it")


def _open(path: str) -> int:
    """Opens a file, or creates it if there is none: in shared folders, O_CREAT fails for files of other users.

    Other users cannot open the file: `flock` needs no right to write, so whoever can read a lock can hold it.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o600)


def _is_at(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


def _started(pid: int) -> str | None:
    """Returns when a process started, in clock ticks; None if the process no longer exists or is a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ("Z", "X") else fields[18]


def _namespace() -> str | None:
    """Returns the PID namespace, which matters because containers on one host number their processes independently."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _release(path: str, handle: int | None, token: str, pid: int, lasting: bool) -> None:
    """Removes the lock, except in a forked child, or if another process has acquired the lock since."""
    try:
        if os.getpid() == pid and not lasting:
            if handle is not None and _is_at(handle, path):
                os.unlink(path)
            elif handle is None and (holder := _holder(path)) is not None and holder.token == token:
                remove(path)
    except (OSError, RecordError):
        pass  # the storage is gone, or another file has replaced the lock
    finally:
        if handle is not None:
            os.close(handle)


os.register_at_fork(after_in_child=release_all)  # a forked child keeps no lock of its parent alive
