"""Where records lie: file systems that append to files, and object stores that keep whole objects.

Paths go through `etils.epath`, which knows `gs://` and `s3://`. A local disk and NFS write a file beside its place and
rename it; an object store replaces an object whole by itself. docs/run-record.md says what each of them guarantees.

Functions here raise an OSError where the storage fails, and a RecordError where nothing is installed that reaches it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from sdc._lazy import epath

AnyPath: TypeAlias = str | os.PathLike[str]

# What can stand in the place of a file and be read for ever, or waited for.
ENDLESS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # what reaches each object store


class RecordError(ValueError):
    """A run folder that cannot be read, written or continued; the message says which and how to mend it."""


def appends(path: AnyPath) -> bool:
    """Whether files at a path can be appended to: on a local disk and NFS, not in an object store."""
    return "://" not in os.fspath(path)


def names(folder: AnyPath) -> list[str]:
    """Names of what lies in a folder; none where it does not exist. A file in its place is an OSError."""
    with _errors(folder):
        try:
            return sorted(path.name for path in _fresh(folder).iterdir())
        except FileNotFoundError:
            return []


def endless(path: AnyPath) -> str | None:
    """What stands at a path that may have no end, in words: a pipe, a device, a socket, or a link to one.

    None for a file, a folder, and an object of a store. What cannot be looked up is an OSError.
    """
    if not appends(path):
        return None
    try:
        return ENDLESS.get(stat.S_IFMT(os.stat(path).st_mode))
    except ValueError as error:
        raise OSError(errno.EINVAL, "a path holds no zero byte", os.fspath(path)) from error


def read_bytes(path: AnyPath) -> bytes:
    """The contents of a file, as they are now; a FileNotFoundError where there is none.

    What may have no end is a RecordError, and is not opened: a pipe would be waited for.
    """
    if found := endless(path):
        raise RecordError(f"{os.fspath(path)} is {found}, not a file; put the file itself in its place")
    with _errors(path):
        return _fresh(path).read_bytes()


def write_bytes(path: AnyPath, data: bytes) -> None:
    """Writes a file whole or not at all: on a disk beside its place, synced, renamed."""
    if not appends(path):
        with _errors(path):
            _fresh(path).write_bytes(data)
        return
    place = Path(path)
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, place)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say whose
            error.filename = os.fspath(place)
        raise


def sync_folder(folder: AnyPath) -> None:
    """Makes what was created or renamed in a folder on a disk outlive the machine's sudden end."""
    handle = os.open(os.fspath(folder) or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems refuse; they write folders at once
    finally:
        os.close(handle)


def create_bytes(path: AnyPath, data: bytes) -> bool:
    """Writes a file only if there is none; returns whether it did.

    Of several processes that try at the same time one wins: with O_EXCL on a disk, with a conditional write on an
    object store. Where only TensorFlow reaches the store there is no such write: it is looked up before it is written.
    """
    if appends(path):
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return True
    with _errors(path):
        try:
            _filesystem(path).pipe_file(os.fspath(path), data, mode="create")
        except FileExistsError:
            return False
        except ImportError:
            if _fresh(path).exists():
                return False
            _fresh(path).write_bytes(data)
        return True


def remove(path: AnyPath) -> None:
    with _errors(path):
        _fresh(path).unlink(missing_ok=True)


def reason(error: OSError) -> str:
    return error.strerror or str(error).partition("\n")[0] or type(error).__name__


def _fresh(path: AnyPath) -> epath.Path:
    """A path whose next look-up asks the store: clients of object stores remember listings, with sizes of objects."""
    if not appends(path):
        with suppress(ImportError):  # TensorFlow remembers nothing
            _filesystem(path).invalidate_cache()
    return epath.Path(path)


def _filesystem(path: AnyPath) -> Any:
    """The client of an object store, the very one that epath uses."""
    import fsspec

    scheme = os.fspath(path).partition("://")[0]
    return fsspec.filesystem("gcs", finalize_on_close=True) if scheme == "gs" else fsspec.filesystem(scheme)


@contextmanager
def _errors(path: AnyPath) -> Iterator[None]:
    """Clients of object stores raise errors of many kinds."""
    if appends(path):
        yield
        return
    try:
        yield
    except (OSError, RecordError):
        raise
    except ImportError as error:
        package = PACKAGES.get(os.fspath(path).partition("://")[0], "a client of that store")
        raise RecordError(f"{os.fspath(path)} cannot be reached without {package}; install it ({error})") from error
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
