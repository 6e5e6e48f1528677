"""Storage of records: file systems, which append to files, and object stores, which keep whole objects.

Paths go through `etils.epath`, which supports `gs://` and `s3://`. On a local disk and NFS, a file is written under a
temporary name and renamed; an object store replaces an object atomically. docs/run-record.md lists the guarantees of
each kind of storage.

The functions of this module raise OSError if the storage fails, and RecordError if the client of an object store is not
installed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from sdc._lazy import epath

AnyPath: TypeAlias = str | os.PathLike[str]

# Types of objects at a path, other than files, that block when read or have no end.
ENDLESS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # errors for a link to nothing or to itself
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}")  # the random part is that of `tempfile.mkstemp`
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # the client of each object store


class RecordError(ValueError):
    """A run folder cannot be read, written or resumed; the message names the folder and the remedy."""


def appends(path: AnyPath) -> bool:
    """Returns whether files at a path can be appended to: true on a local disk and NFS, false in an object store."""
    return "://" not in os.fspath(path)


def names(folder: AnyPath) -> list[str]:
    """Returns the names in a folder; empty if the folder does not exist. Raises OSError if the path is a file."""
    with _errors(folder):
        try:
            return sorted(path.name for path in _fresh(folder).iterdir())
        except FileNotFoundError:
            return []


def endless(path: AnyPath) -> str | None:
    """Describes an object at a path that may be endless: a pipe, a device, a socket, or a link to one.

    Returns None for a file, a folder, or an object in an object store. Raises OSError if the lookup fails.
    """
    if not appends(path):
        return None
    try:
        return ENDLESS.get(stat.S_IFMT(os.stat(path).st_mode))
    except ValueError as error:
        raise OSError(errno.EINVAL, "a path must not contain a zero byte", os.fspath(path)) from error


def check_files(folder: AnyPath) -> None:
    """Checks that everything in a folder is a file or a folder, before a library reads it: a pipe would block the
    library, and a device has no end. Links are followed; an object store has only objects. Raises RecordError, with
    the name within the folder, for the first object that is something else.
    """
    if not appends(folder):
        return
    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        try:
            there = os.stat(place)
        except FileNotFoundError:  # another process has just deleted it
            continue
        if (there.st_dev, there.st_ino) in seen:  # a link back to a parent
            folders.clear()
            continue
        seen.add((there.st_dev, there.st_ino))
        for path in (os.path.join(place, name) for name in files):
            try:
                found = endless(path)
            except OSError as error:
                if error.errno in LEADS_NOWHERE:  # a link, or a file that another process has just deleted
                    continue
                raise
            if found:
                name = Path(path).relative_to(folder)
                above = [name, *name.parents][-2::-1]  # the outermost link is the one to delete
                link = next((each for each in above if Path(folder, each).is_symlink()), None)
                raise RecordError(
                    f"{name} is {found}, not a file; delete it" if link is None
                    else f"{link} is a link to {found}; delete this link"
                )  # fmt: skip


def own_folder(path: AnyPath) -> Path:
    """Creates a folder that only this user can access, if it does not exist, and returns it.

    Raises OSError for a link, and for a folder that another user owns, can access or can replace: other users must not
    be able to block, read, forge or redirect what a process writes there.
    """
    place = Path(path)
    if foreign := planted(place):
        raise PermissionError(errno.EPERM, foreign, os.fspath(place))
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    there, above = place.lstat(), place.parent.stat()
    if stat.S_ISLNK(there.st_mode) or not stat.S_ISDIR(there.st_mode):
        problem = "is a link or a file; expected a folder"
    elif there.st_uid != os.geteuid() or there.st_mode & 0o077:
        problem = "belongs to another user, or other users have access to it; expected a folder with mode 0700"
    elif above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX and above.st_uid != os.geteuid():
        problem = "can be replaced by other users, who may write to the folder above"
    else:
        return place
    raise PermissionError(errno.EPERM, problem, os.fspath(place))


def planted(path: AnyPath) -> str | None:
    """Returns why another user may have planted a path, and could then read, forge or redirect what is written to it;
    None if not: in a folder to which everyone can write, such as /tmp, a file, folder or link on the path must belong
    to this user, to root, or to the owner of that folder."""
    if not appends(path):
        return None
    given, followed = Path(path).absolute(), Path(os.path.realpath(path))  # `resolve` raises for a link to itself
    for each in (given, *given.parents, followed, *followed.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            owner, above = each.lstat().st_uid, each.parent.stat()
            if above.st_mode & stat.S_IWOTH and owner not in (os.geteuid(), 0, above.st_uid):
                return f"{each} belongs to another user, and everyone can write to {each.parent}"
    return None


def check_owner(path: AnyPath) -> None:
    """Raises RecordError if another user may have planted a path, or if it is a link that leads nowhere, in whose place
    nothing can be created."""
    if problem := planted(path):
        raise RecordError(f"{problem}; choose another folder")
    if appends(path) and os.path.islink(path) and not os.path.exists(path):
        raise RecordError(f"{os.fspath(path)} is a link that leads nowhere; delete it, or choose another path")


def read_bytes(path: AnyPath) -> bytes:
    """Returns the current contents of a file; raises FileNotFoundError if the file does not exist.

    Raises RecordError for an object that may be endless, without opening it, since a pipe would block.
    """
    if found := endless(path):
        raise RecordError(f"{os.fspath(path)} is {found}, not a file; replace it with a regular file")
    with _errors(path):
        return _fresh(path).read_bytes()


def write_bytes(path: AnyPath, data: bytes, *, mode: int = 0o644) -> None:
    """Writes a file atomically; on a disk, the file is written under a temporary name, synced and renamed."""
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
        os.chmod(name, mode)
        os.replace(name, place)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # the error of a full disk does not name the file
            error.filename = os.fspath(place)
        raise


def temporary_of(name: str) -> str | None:
    """Returns the name of the file for which `write_bytes` made a temporary file of this name; None for other names."""
    found = _TEMPORARY.fullmatch(name)
    return found and found[1]


def sync_folder(folder: AnyPath) -> None:
    """Flushes the creations and renames of files in a folder on a disk to stable storage."""
    handle = os.open(os.fspath(folder) or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems do not support this; they write folders immediately
    finally:
        os.close(handle)


def create_bytes(path: AnyPath, data: bytes) -> bool:
    """Writes a file only if the file does not exist; returns whether it was written.

    Only one of several concurrent processes succeeds, because of O_EXCL on a disk and of a conditional write in an
    object store. TensorFlow has no conditional write; with TensorFlow, the file's existence is checked before writing.
    """
    if appends(path):
        beside = f"{os.fspath(path)}.{os.getpid()}-{uuid.uuid4().hex}"  # a process may die before the file is complete
        write_bytes(beside, data)
        try:
            os.link(beside, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(beside)
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


UNREADABLE = "cannot be read ({}); correct the cause and try again"


def reason(error: OSError) -> str:
    return error.strerror or str(error).partition("\n")[0] or type(error).__name__


def _fresh(path: AnyPath) -> epath.Path:
    """Returns a path whose next lookup queries the store, since clients of object stores cache listings with sizes."""
    if not appends(path):
        with suppress(ImportError):  # TensorFlow has no cache
            _filesystem(path).invalidate_cache()
    return epath.Path(path)


def _filesystem(path: AnyPath) -> Any:
    """Returns the client that epath uses for an object store."""
    import fsspec

    scheme = os.fspath(path).partition("://")[0]
    return fsspec.filesystem("gcs", finalize_on_close=True) if scheme == "gs" else fsspec.filesystem(scheme)


@contextmanager
def _errors(path: AnyPath) -> Iterator[None]:
    """Converts errors of object store clients, which have many types, to OSError or RecordError."""
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
