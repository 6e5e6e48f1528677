"""Ratings of items by users: MovieLens 100K, files as MovieLens ships them, and tables as Jester ships them.

Letters of shapes:

    n  ratings     U  users     I  items
"""

import dataclasses
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64, Int32
from numpy.typing import NDArray

from sdc.settings import SettingError

from .. import freeze
from .archives import Archive, DataError, read_file, read_member
from .parsing import Numbers, first_line, parse_numbers

MOVIELENS = "movielens-100k"
"""100,000 ratings of 1,682 films by 943 users, from 1 to 5."""

MOVIELENS_ARCHIVE = Archive(
    "neighbors==0.2.1",
    "neighbors/data/movielens100k.csv",
    "4cee70466ec9b2c39ff51e15853e12e481a31c92977db7e7e614b40a1ef31cc8",
)
"""Where they lie."""

UNRATED = 99
"""What stands in a table of Jester where there is no rating."""

_SEPARATORS = ("::", "\t", ",")
_LARGEST_ID = 2**53  # up to here, float64 tells whole numbers apart


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings, one of an item by a user at most. The arrays are read-only; every user and every item has a rating.

    Attributes:
        users: who rated, from 0.
        items: what was rated, from 0.
        values: the ratings.
        source: where they come from, for the run record.
        digest: SHA-256 (hexadecimal) over the three arrays.
    """

    users: Int32[np.ndarray, "n"]
    items: Int32[np.ndarray, "n"]
    values: Float32[np.ndarray, "n"]
    source: str
    digest: str

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of users and of items."""
        return 1 + int(self.users.max()), 1 + int(self.items.max())


def read_ratings(source: str | Path = MOVIELENS, folder: Path | None = None) -> Ratings:
    """Reads ratings, in the order of the file.

    Args:
        source: `"movielens-100k"`, from the archive `neighbors==0.2.1`. Anything else, and any `Path`: a file, packed
            if its name ends in `.gz`. With three or four columns, rows of user, item, rating and perhaps a time,
            between commas, tabs or `::`, as MovieLens ships `ratings.csv`, `u.data` and `ratings.dat`. With more than
            five, a table as of Jester: a row per user, of the number of ratings and then a rating from -10 to 10 of
            each item, or 99 for none; they are rescaled to 0 to 10. A first line of names is passed over. Users and
            items that have ratings are numbered from 0, in the order of their numbers in the file.
        folder: where the archive lies; by default `jax-sdc/archives` in XDG_CACHE_HOME or ~/.cache.

    Returns:
        The ratings.

    Raises:
        DataError: the archive or the file is missing or damaged, or a row is no row of ratings.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from sdc.train.iterative.ratings import read_ratings
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "ratings.csv"
        ...     _ = file.write_text("user,item,rating\\n7,30,4.5\\n7,10,1\\n9,30,2\\n")
        ...     ratings = read_ratings(file)
        >>> ratings.users.tolist(), ratings.items.tolist(), ratings.values.tolist(), ratings.shape
        ([0, 0, 1], [1, 0, 1], [4.5, 1.0, 2.0], (2, 2))
    """
    if source == MOVIELENS:  # a Path never equals a string: Path("movielens-100k") is a file of that name
        data = read_member(MOVIELENS_ARCHIVE, folder)
        return _triples(parse_numbers(data, ",", MOVIELENS), f"MovieLens 100K ({MOVIELENS_ARCHIVE.requirement})")
    data = read_file(Path(source))
    first = first_line(data)
    separator = next((separator for separator in _SEPARATORS if separator in first), ",")
    numbers = parse_numbers(data, separator, source)
    columns = numbers.values.shape[1]
    if columns in (3, 4):
        return _triples(numbers, str(source))
    if columns > 5:
        return _table(numbers, str(source))
    raise DataError(
        source,
        f"has {columns} columns; expected user, item, rating and perhaps a time between commas, tabs or ::, or more "
        "than 5 columns as Jester has",
    )


def most_active(ratings: Ratings, users: int, items: int) -> Ratings:
    """The ratings among the items with the most ratings and the users with the most ratings of these.

    Of two that have as many, the one with the lower number is taken. Both are numbered anew from 0, in the same order,
    and the ratings keep theirs.

    Args:
        ratings: ratings to choose from.
        users: number of users to keep.
        items: number of items to keep.

    Raises:
        SettingError: there are not as many, or a user or an item would be kept without a rating.

    Example:
        >>> from sdc.train.iterative.ratings import Ratings, most_active
        >>> users, items = np.array([0, 0, 1, 2, 2], np.int32), np.array([0, 2, 1, 1, 2], np.int32)
        >>> ratings = Ratings(users, items, np.arange(5, dtype=np.float32), "example", "")
        >>> kept = most_active(ratings, users=1, items=2)
        >>> kept.values.tolist(), kept.source
        ([3.0, 4.0], 'example, 1 users and 2 items with the most ratings')
    """
    for name, wanted, there in zip(("users", "items"), (users, items), ratings.shape, strict=True):
        if not 1 <= wanted <= there:
            raise SettingError(
                name, wanted, f"expected 1 to {there}, as many as have ratings; take fewer or other data"
            )
    some = np.isin(ratings.items, _leading(ratings.items, items))
    some &= np.isin(ratings.users, _leading(ratings.users[some], users))
    kept = _ratings(
        ratings.users[some],
        ratings.items[some],
        ratings.values[some],
        f"{ratings.source}, {users} users and {items} items with the most ratings",
    )
    for name, wanted, there in zip(("users", "items"), (users, items), kept.shape, strict=True):
        if there != wanted:
            raise SettingError(name, wanted, f"only {there} have ratings among those kept; take other numbers of both")
    return kept


def _leading(numbers: Int32[np.ndarray, "n"], count: int) -> NDArray[np.intp]:
    """The most frequent of some numbers."""
    return np.argsort(-np.bincount(numbers), kind="stable")[:count]


def _triples(numbers: Numbers, source: str) -> Ratings:
    ids = numbers.values[:, :2]
    bad = ((ids != np.floor(ids)) | (np.abs(ids) >= _LARGEST_ID)).any(1)
    numbers.refuse(bad, "whole numbers of a user and an item")
    ratings = _ratings(ids[:, 0], ids[:, 1], numbers.values[:, 2], source)
    _, first = np.unique(ratings.users * np.int64(ratings.shape[1]) + ratings.items, return_index=True)
    repeated = np.ones(len(ids), bool)
    repeated[first] = False
    numbers.refuse(repeated, "one rating of an item by a user")
    return ratings


def _table(numbers: Numbers, source: str) -> Ratings:
    counts, table = numbers.values[:, 0], numbers.values[:, 1:]
    items = table.shape[1]
    bad = (counts != np.floor(counts)) | (counts < 0) | (counts > items)
    numbers.refuse(bad, f"the number of ratings first, from 0 to {items}")
    rated = table != UNRATED
    numbers.refuse((rated & (np.abs(table) > 10)).any(1), f"ratings from -10 to 10, or {UNRATED} for none")
    if not rated.any():
        raise DataError(source, "has no rating; give a file that does")
    users, columns = np.nonzero(rated)
    return _ratings(users, columns, (table[rated] + 10) / 2, source)


def _ratings(
    users: Float64[np.ndarray, "n"] | Int32[np.ndarray, "n"] | NDArray[np.intp],
    items: Float64[np.ndarray, "n"] | Int32[np.ndarray, "n"] | NDArray[np.intp],
    values: Float64[np.ndarray, "n"] | Float32[np.ndarray, "n"],
    source: str,
) -> Ratings:
    users, items = (np.unique(ids, return_inverse=True)[1].astype(np.int32) for ids in (users, items))
    values = values.astype(np.float32)
    return Ratings(users, items, values, source, freeze(users, items, values))
