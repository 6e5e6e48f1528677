"""Documents of text: the standard library's own source by default, or files and folders of text and JSON lines.

Twins on two hosts must train on the same text. Documents therefore come in an order that depends on nothing but the
names of the files, as bytes decoded without any translation of line ends; what is in them is covered by the digest of
the data set built from them (`data.py`).
"""

import dataclasses
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from sdc.records import endless, parse_json
from sdc.settings import SettingError

PYTHON = "python"
"""Name of the default corpus, the standard library."""

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".jsonl"})
"""Files that are read from a folder; a file named by itself is read whatever its suffix."""

# Distributions package these apart (Debian: python3-tk, python3-venv, idle, ...), so one of two twins might lack them.
# sys.stdlib_module_names already leaves out what a build or a host writes for itself (_sysconfigdata, sitecustomize).
_OPTIONAL_MODULES = frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "venv"}
)
_TEST_FOLDERS = frozenset({"test", "tests"})


class CorpusError(SettingError):
    """A corpus that is missing, empty or unreadable; the message says which file and how to mend it."""

    def __init__(self, given: object, problem: str) -> None:
        super().__init__("corpus", given, problem)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on.

    Attributes:
        documents: the texts in a fixed order, none of them empty.
        source: where they come from, for the run record.
    """

    documents: tuple[str, ...]
    source: str


def read_corpus(source: str | Path | Sequence[str | Path] = PYTHON) -> Corpus:
    """Reads a corpus.

    Args:
        source: the string `"python"` for the running interpreter's standard library without its tests and its
            optional parts (about 10 MB), a path, or a sequence of both, read in the given order. A path is a file of
            UTF-8 text (one document), a `.jsonl` file with a `text` field on every line (one document a line), or a
            folder of such files (those of `TEXT_SUFFIXES`, subfolders included, hidden ones not, sorted by relative
            path; folders behind symbolic links are not entered).

    Returns:
        The documents. Files without a character are passed over.

    Raises:
        CorpusError: a path is missing or unreadable, a file is no UTF-8 text, a JSON line is invalid or has no text,
            a folder has no file to read, or there is no text at all.

    Example:
        >>> from sdc.train.corpus import read_corpus
        >>> "def loads(" in "".join(read_corpus("python").documents)
        True
    """
    items = [source] if isinstance(source, str | Path) else list(source)
    documents: list[str] = []
    names: list[str] = []
    for item in items:
        standard_library = item == PYTHON  # a Path never equals a string: Path("python") is a folder of that name
        files = _standard_library() if standard_library else _text_files(Path(item))
        names.append(f"python {platform.python_version()} standard library" if standard_library else str(item))
        for file in files:
            documents.extend(document for document in _documents(file) if document)
    if not documents:
        raise CorpusError(" ".join(map(str, items)), "is empty; give files or folders that hold text")
    return Corpus(tuple(documents), ", ".join(names))


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for name in sys.stdlib_module_names - _OPTIONAL_MODULES:
        module = root / f"{name}.py"
        files.extend([module] if module.is_file() else _walk(root / name))
    files = [file for file in files if file.suffix == ".py" and _TEST_FOLDERS.isdisjoint(file.relative_to(root).parts)]
    if not files:
        raise CorpusError(PYTHON, f"no source text of the standard library in {root}; give files of your own")
    return _sorted(files, root)


def _text_files(path: Path) -> list[Path]:
    try:
        found = endless(path)
    except FileNotFoundError as error:
        raise CorpusError(
            path, "does not exist; give a file or folder of text, or 'python' for the standard library"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if found:
        raise CorpusError(path, f"is {found}, neither a file nor a folder; write its text to a file first")
    if path.is_file():
        return [path]
    files = [file for file in _walk(path) if file.suffix.lower() in TEXT_SUFFIXES]
    if not files:
        suffixes = " ".join(sorted(TEXT_SUFFIXES))
        raise CorpusError(path, f"has no file ending in {suffixes}; name other files of text one by one")
    return _sorted(files, path)


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder that are not hidden; nothing if there is no such folder."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise _unreadable(Path(error.filename), error) from error

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if not name.startswith("."))


def _sorted(files: list[Path], root: Path) -> list[Path]:
    """By relative path, compared as strings of code points: the same on every host, whatever its locale."""
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _documents(path: Path) -> Iterator[str]:
    try:
        if found := endless(path):
            raise CorpusError(path, f"is {found}, not a file; leave it out")
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    except MemoryError as error:
        raise CorpusError(path, "does not fit into memory; give a part of it") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            path,
            f"is not UTF-8 text (byte {data[error.start]:#04x} at offset {error.start}); "
            "convert it to UTF-8 or leave it out",
        ) from error
    if "\0" in text:
        raise CorpusError(path, f"is binary (zero byte at offset {data.index(0)}); leave it out")
    text = text.removeprefix("\ufeff")  # a byte order mark is no part of the text
    if path.suffix.lower() == ".jsonl":
        # JSON strings may hold U+2028 and the like, at which splitlines() would cut.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield _text_field(line, f"{path} line {number}")
    else:
        yield text


def _text_field(line: str, place: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise CorpusError(place, f"is not valid JSON ({error}); mend or remove that line") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise CorpusError(
            place, 'has no text; expected a JSON object whose field \'text\' is a string: {"text": "..."}'
        )
    text: str = row["text"]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusError(
            place, f"has half a surrogate pair in its text (character {error.start}); mend or remove that line"
        ) from error
    return text


def _unreadable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(path, f"cannot be read ({error.strerror}); check the path and its permissions")
