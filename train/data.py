"""Training text: documents, tokens, chunks in a fixed order, and batches whose position can be saved.

Twins on two hosts must train on the same text. The order of documents therefore depends only on the file names, and
bytes are decoded without converting line endings; the digest of the data set covers the text itself. As in the SDC
study (appendix B.1), the text is tokenized, joined and cut into chunks of the sequence length, which are shuffled once
with a fixed seed. Every epoch has the same order, so the batch of a step depends only on the data set and the step
number.
"""

import dataclasses
import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Int32

from sdc.records import endless, parse_json
from sdc.settings import SettingError

if TYPE_CHECKING:
    import grain

PYTHON = "python"  # name of the default corpus, the standard library

# Suffixes of the files that are read from a folder; a file given explicitly may have any suffix.
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".jsonl"})

# Linux distributions package these modules separately (Debian: python3-tk, python3-venv, idle, ...), so the host of one
# twin might lack them. sys.stdlib_module_names already excludes files that a build or a host generates (_sysconfigdata,
# sitecustomize).
_OPTIONAL_MODULES = frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "venv"}
)


class DataError(SettingError):
    """Data are missing or damaged; the message identifies them and states the remedy."""

    of: ClassVar[str] = "data"

    def __init__(self, given: object, problem: str) -> None:
        super().__init__(self.of, given, problem)

    @classmethod
    def unreadable(cls, path: str | Path, error: OSError) -> "DataError":
        """Returns the error for a file that the operating system cannot read."""
        return cls(path, f"cannot be read ({error.strerror}); check the path and its permissions")


class CorpusError(DataError):
    """A corpus is missing, empty, unreadable or too short."""

    of = "corpus"


class TokenizerError(DataError):
    """A tokenizer cannot be loaded or used."""

    of = "tokenizer"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on."""

    documents: tuple[str, ...]  # the nonempty texts in a fixed order
    source: str  # origin of the documents, for the run record


def read_corpus(source: str | Path | Sequence[str | Path] = PYTHON) -> Corpus:
    """Reads the parts of a corpus in the given order: `python` (the standard library without its tests and optional
    parts, 10 MB), UTF-8 text files, `.jsonl` files with a document in the field `text` of every line, and folders of
    such files."""
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
        raise CorpusError(" ".join(map(str, items)), "contains no text; give files or folders of text")
    return Corpus(tuple(documents), ", ".join(names))


def files_below(folder: Path, error_of: type[DataError]) -> list[Path]:
    """Returns all files below a folder except hidden ones; symbolic links to folders are not followed.

    The files are sorted by the code points of their relative paths, so the order does not depend on the locale of a
    host.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error_of.unreadable(error.filename, error) from error

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += (Path(parent, name) for name in files if not name.startswith("."))
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for name in sys.stdlib_module_names - _OPTIONAL_MODULES:
        module = root / f"{name}.py"
        files += (
            [module] if module.is_file() else files_below(root / name, CorpusError) if (root / name).exists() else []
        )
    files = [
        file for file in files if file.suffix == ".py" and {"test", "tests"}.isdisjoint(file.relative_to(root).parts)
    ]
    if not files:
        raise CorpusError(PYTHON, f"has no source files of the standard library in {root}; give your own files")
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _text_files(path: Path) -> list[Path]:
    try:
        found = endless(path)
    except FileNotFoundError as error:
        raise CorpusError(
            path, "does not exist; give a file or folder of text, or 'python' for the standard library"
        ) from error
    except OSError as error:
        raise CorpusError.unreadable(path, error) from error
    if found:
        raise CorpusError(path, f"is {found}, neither a file nor a folder; write its text to a file first")
    if path.is_file():
        return [path]
    files = [file for file in files_below(path, CorpusError) if file.suffix.lower() in TEXT_SUFFIXES]
    if not files:
        suffixes = " or ".join(sorted(TEXT_SUFFIXES))
        raise CorpusError(path, f"has no file with the suffix {suffixes}; give files with other suffixes individually")
    return files


def _documents(path: Path) -> Iterator[str]:
    try:
        if found := endless(path):
            raise CorpusError(path, f"is {found}, not a file; leave it out")
        data = path.read_bytes()
    except OSError as error:
        raise CorpusError.unreadable(path, error) from error
    except MemoryError as error:
        raise CorpusError(path, "does not fit into memory; give only a part of it") from error
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
    text = text.removeprefix("\ufeff")  # a byte order mark is not part of the text
    if path.suffix.lower() != ".jsonl":
        yield text
        return
    # JSON strings may contain U+2028 and similar characters, at which splitlines() would split.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _text_field(line, f"{path} line {number}")


def _text_field(line: str, place: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise CorpusError(place, f"is not valid JSON ({error}); correct or remove that line") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise CorpusError(
            place, 'has no text; expected a JSON object whose field \'text\' is a string: {"text": "..."}'
        )
    text: str = row["text"]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusError(
            place, f"has an unpaired surrogate in its text (character {error.start}); correct or remove that line"
        ) from error
    return text


BYTES = "bytes"  # name of the default tokenizer

# Names of the token between documents in different tokenizer families, tried in this order.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

_EXPECTED = "expected the tokenizer.json that the Hugging Face tokenizers package saves"


class Tokenizer(Protocol):
    """Interface of a tokenizer for the data pipeline."""

    @property
    def vocab_size(self) -> int: ...  # tokens are 0 to `vocab_size - 1`

    @property
    def end_of_text(self) -> int: ...  # the token between documents

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """Returns the tokens of a text, without special tokens at its ends."""

    def decode(self, tokens: Sequence[int] | Int32[np.ndarray, "tokens"]) -> str:
        """Returns the text that tokens represent; `end_of_text` represents no text."""


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: tokens 0 to 255 are bytes, and 256 is the end of text.

    Example:
        >>> from sdc.train.data import ByteTokenizer
        >>> ByteTokenizer().encode("né").tolist(), ByteTokenizer().decode([110, 195, 169, 256])
        ([110, 195, 169], 'né')
    """

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | Int32[np.ndarray, "tokens"]) -> str:
        """Returns the text that the bytes encode; invalid UTF-8, which a model may generate, becomes U+FFFD."""
        return bytes(int(token) for token in tokens if token < self.end_of_text).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A wrapper around `tokenizers.Tokenizer`. Text may contain the name of the end-of-text token, which is encoded as
    that token, so separators in files are kept."""

    def __init__(self, tokenizer: Any, source: Path) -> None:
        # Tokenizer files often keep these settings of their original model, but documents must be neither truncated nor
        # padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        known = [vocabulary[name] for name in END_OF_TEXT if name in vocabulary]
        if not known:
            raise TokenizerError(source, f"has no end-of-text token; add one of {' '.join(END_OF_TEXT)}")
        self._tokenizer, self._source = tokenizer, source
        self.end_of_text = known[0]
        self.vocab_size = max(vocabulary.values()) + 1  # not the number of tokens, since token numbers may have gaps

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except Exception as error:  # the package raises Exception itself
            raise TokenizerError(
                self._source, f"cannot encode the corpus ({_one_line(error)}); choose another tokenizer"
            ) from error

    def decode(self, tokens: Sequence[int] | Int32[np.ndarray, "tokens"]) -> str:
        """Returns the text of the tokens; special tokens are omitted."""
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text


def load_tokenizer(spec: str | Path = BYTES) -> Tokenizer:
    """Loads the tokenizer `bytes`, or a tokenizer from a Hugging Face `tokenizer.json` file."""
    if spec == BYTES:
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        raise TokenizerError(path, "is a folder; give the path of the tokenizer.json in it")
    try:
        if found := endless(path):
            raise TokenizerError(path, f"is {found}, not a file; {_EXPECTED}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TokenizerError(path, "does not exist; give 'bytes' or a tokenizer.json") from error
    except OSError as error:
        raise TokenizerError.unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise TokenizerError(path, f"is not a tokenizer.json (not UTF-8 text); {_EXPECTED}") from error
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise TokenizerError(path, f"is not a tokenizer.json (invalid JSON: {error}); {_EXPECTED}") from error
    if not isinstance(fields, dict) or "model" not in fields:
        raise TokenizerError(path, f"is not a tokenizer.json (it has no field 'model'); {_EXPECTED}")
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(
            path,
            f'needs the tokenizers package, which is not installed; run pip install "jax-sdc[text]", or use {BYTES}',
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises Exception itself
        raise TokenizerError(path, f"is not a tokenizer.json ({_one_line(error)}); {_EXPECTED}") from error
    return HuggingFaceTokenizer(tokenizer, path)


def padded_vocab(tokenizer: Tokenizer) -> int:
    """Returns the number of embedding rows for a tokenizer: a multiple of 64, so that the rows divide evenly over a
    mesh."""
    return -(-tokenizer.vocab_size // 64) * 64


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A tokenized, chunked and shuffled corpus."""

    # int32 [chunks, length + 1], read-only, in training order. Inputs are `chunk[:-1]`, targets `chunk[1:]`: each chunk
    # begins with the last token of the previous chunk of the text, so that every token is predicted once. A remainder
    # at the end of the text that is shorter than a chunk is dropped.
    chunks: Int32[np.ndarray, "chunks length+1"]
    # SHA-256 (hexadecimal) of the chunks in order, which depends on text, tokenizer, length and seed: twins with equal
    # digests train on the same data
    digest: str
    tokens: int  # number of tokens in the corpus, including an end-of-text token after each document
    documents: int  # number of documents in the corpus
    source: str  # description of the text's origin

    def describe(self) -> dict[str, Any]:
        """Returns the manifest fields of the data set."""
        return {
            "source": self.source, "documents": self.documents, "tokens": self.tokens, "digest": self.digest,
        }  # fmt: skip

    def require(self, *, batch_size: int, microsteps: int) -> None:
        """Checks that the data set suffices for at least one batch; see `batches`."""
        chunks, length = batch_size * microsteps, int(self.chunks.shape[1]) - 1
        if len(self.chunks) < chunks:
            raise CorpusError(
                self.source,
                f"has {self.tokens} tokens, but one batch needs {chunks * length + 1} "
                f"({microsteps} microsteps × {batch_size} sequences × {length} tokens, plus one); "
                "give more text, or a configuration with a smaller batch",
            )


def make_dataset(corpus: Corpus, tokenizer: Tokenizer, sequence_length: int, *, seed: int) -> Dataset:
    """Tokenizes and joins the documents of a corpus, cuts the tokens into chunks, and shuffles the chunks once.

    Each document is followed by the end-of-text token. A corpus shorter than a chunk results in a data set without
    chunks, for which `batches` raises CorpusError.
    """
    assert sequence_length >= 1, sequence_length
    if seed < 0:
        raise SettingError("seed", seed, "expected a whole number of at least 0")
    end = np.array([tokenizer.end_of_text], np.int32)
    tokens = np.concatenate(
        [part for document in corpus.documents for part in (tokenizer.encode(document), end)], dtype=np.int32
    )
    if len(tokens) > sequence_length:
        windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)[::sequence_length]
    else:
        windows = np.zeros((0, sequence_length + 1), np.int32)
    # NumPy guarantees the same permutation only within one version; a different order gives a different digest.
    chunks = windows[np.random.default_rng(seed).permutation(len(windows))]
    chunks.flags.writeable = False
    digest = hashlib.sha256(f"int32 {chunks.shape}".encode())
    digest.update(chunks.astype("<i4", copy=False).data)
    return Dataset(chunks, digest.hexdigest(), len(tokens), len(corpus.documents), corpus.source)


def batches(dataset: Dataset, *, batch_size: int, microsteps: int) -> "grain.DatasetIterator":
    """Returns an endless iterator over global batches, which are equal in all processes: int32 [microsteps, batch_size,
    length + 1].

    Chunks left over at the end of an epoch are dropped; every epoch has the same order. The state of the iterator is
    the number of batches returned; `set_state()` moves to any position, even backwards, at no cost.
    """
    assert min(batch_size, microsteps) >= 1, (batch_size, microsteps)
    dataset.require(batch_size=batch_size, microsteps=microsteps)
    import grain  # Imported here since grain imports JAX, which is not needed to make and check a data set.

    # Batches are made in the caller's thread, because worker processes would be forked from a process in which JAX runs
    # threads.
    return iter(
        grain.MapDataset.source(dataset.chunks)
        .batch(batch_size, drop_remainder=True)
        .batch(microsteps, drop_remainder=True)
        .repeat()
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
