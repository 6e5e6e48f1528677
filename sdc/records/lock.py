"""The lock of a run folder: one writer at a time.

`lock.json` names the host and the process that write. It is created only if there is none. A lock that a dead process
of this very host left behind is taken over; that of another host is not, since nobody here can tell whether it lives.
"""

import datetime
import os
import time
import uuid
import weakref
from pathlib import Path
from typing import Annotated

import msgspec

from .fields import Fields, about
from .identity import Host, identify, stamp
from .storage import AnyPath, RecordError, create_bytes, read_bytes, remove

LOCK = "lock.json"
TRIES = 20
"""A lock is written a moment after it is created; a reader looks as often as this, every 0.05 seconds."""


class RecordBusy(RecordError):
    """A run folder that another process writes."""


class Holder(Fields, kw_only=True):
    """Contents of `lock.json`."""

    host: Annotated[Host, about("who writes the folder")]
    since: Annotated[str | None, about("when the lock was taken, UTC")] = None
    started: Annotated[str | None, about("when that process started, in clock ticks since the system booted")] = None
    namespace: Annotated[str | None, about("the PID namespace of that process")] = None
    token: Annotated[str, about("a random text, different for each lock")]


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def release_all() -> None:
    """Releases every lock of this process, which is about to end without tidying up: another host could not tell."""
    for lock in list(_held):
        lock.release()


class Lock:
    """The right to write a run folder, until it is released, garbage collected, or the process ends."""

    def __init__(self, folder: AnyPath) -> None:
        """Takes the lock of a folder.

        Args:
            folder: must exist.

        Raises:
            RecordBusy: a process that may be alive holds it; the message names host and process.
            OSError: the lock cannot be written.
        """
        path = os.path.join(os.fspath(folder), LOCK)
        mine = _mine()
        for _ in range(TRIES):
            if create_bytes(path, msgspec.json.encode({**stamp(), **msgspec.to_builtins(mine)}) + b"\n"):
                self._release = weakref.finalize(self, _release, path, mine.token, os.getpid())
                _held.add(self)
                return
            holder = _holder(path)
            if holder is None:
                time.sleep(0.05)
            elif _gone(holder):
                _take_away(path, holder)
            else:
                raise RecordBusy(_busy(folder, path, holder))
        raise RecordBusy(f"{path} tells no writer, or one that is gone; remove {path}* if nobody writes that folder")

    def release(self) -> None:
        """Gives the folder free."""
        self._release()


def _mine() -> Holder:
    return Holder(
        host=identify(),
        since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        started=_started(os.getpid()),
        namespace=_namespace(),
        token=uuid.uuid4().hex,
    )


def _busy(folder: AnyPath, path: str, holder: Holder) -> str:
    who = f"process {holder.host.pid} on host {holder.host.name}"
    here = identify()
    elsewhere = (holder.host.name, holder.host.machine, holder.namespace) != (here.name, here.machine, _namespace())
    remedy = f"; if that process is gone, remove {path}" if elsewhere or holder.host.boot is None else ""
    return (
        f"run folder {os.fspath(folder)} is being written by {who}, since {holder.since}{remedy}; "
        "wait until it ends, or use another folder"
    )


def _holder(path: str) -> Holder | None:
    """Who holds a lock; None if it has just gone, or is not written yet."""
    try:
        return msgspec.json.decode(read_bytes(path), type=Holder)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


def _gone(holder: Holder) -> bool:
    """Whether the process that took a lock is known to be dead. What cannot be known counts as alive."""
    here = identify()
    if holder.host.name != here.name or holder.host.machine != here.machine or holder.host.boot is None:
        return False
    if holder.host.boot != here.boot:
        return here.boot is not None and here.machine is not None  # the host has been started anew since
    if holder.namespace != _namespace() or holder.host.pid is None:
        return False
    return _started(holder.host.pid) != holder.started


def _started(pid: int) -> str | None:
    """When a process started; None for one that is no more, or has ended and waits to be asked for its exit code."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ("Z", "X") else fields[18]


def _namespace() -> str | None:
    """Containers on one host count their processes each for themselves."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _take_away(path: str, dead: Holder) -> None:
    """Removes the lock of a dead process, but not the one that somebody else has put in its place since.

    The right to do so is a file too, named after that very lock and created only if there is none.
    """
    claim = f"{path}.{dead.token}"
    if not create_bytes(claim, b""):
        time.sleep(0.05)  # somebody else is at it
        return
    try:
        found = _holder(path)
        if found is not None and found.token == dead.token:
            remove(path)
    finally:
        remove(claim)


def _release(path: str, token: str, pid: int) -> None:
    """A forked child holds no lock, and a lock that somebody removed and took is theirs."""
    try:
        holder = _holder(path) if os.getpid() == pid else None
        if holder is not None and holder.token == token:
            remove(path)
    except (OSError, RecordError):
        pass  # the storage has gone, or something else is in its place; the next writer finds a dead process
