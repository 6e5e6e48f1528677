"""Archives of a package index: where they are looked for, what is read of them, and what is refused."""

import gzip
import itertools
import os
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from sdc.train.data import DataError
from sdc.train.iterative import archives as archives_module
from sdc.train.iterative.archives import Archive, read_file, read_member, read_members

from .packed import ARCHIVE, CSV, MEMBERS, PIP, message, sha256, source_archive, wheel


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("some_pack-1.0-py3-none-any.whl", wheel()),
        ("some_pack-1.0-cp311-cp311-manylinux_2_17_x86_64.whl", wheel()),
        ("some_pack-1.0.tar.gz", source_archive("some_pack-1.0")),
        ("some-pack-1.0.tar.gz", source_archive("some-pack-1.0/src")),
    ],
    ids=["any", "version", "source", "src"],
)
def test_any_archive_of_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes) -> None:
    place = tmp_path / "jax-sdc" / "archives"
    place.mkdir(parents=True)
    (place / name).write_bytes(data)
    assert read_member(ARCHIVE, place) == CSV
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_member(ARCHIVE) == CSV
    lines = [f"{sha256(MEMBERS[path])}  {path}\n" for path in ("pack/a/one.md", "pack/b/two.md")]
    several = Archive("some-pack==1.0", "pack/*.md", sha256("".join(lines).encode()))
    assert list(read_members(several, place)) == ["pack/a/one.md", "pack/b/two.md"]


def test_other_releases_and_bad_archives_are_passed_over(tmp_path: Path) -> None:
    for name in ("some_pack-1.0.1-py3-none-any.whl", "some_pack-11.0-py3-none-any.whl", "other-1.0-py3-none-any.whl"):
        (tmp_path / name).write_bytes(wheel())
    text = message(lambda: read_member(ARCHIVE, tmp_path))
    assert text == (
        f"data=some-pack==1.0: neither some_pack-1.0-*.whl nor some_pack-1.0.tar.gz is in {tmp_path}; "
        f"pack/data.csv (SHA-256 {sha256(CSV)}) is needed; {PIP.format(tmp_path)}"
    )
    (tmp_path / "some_pack-1.0-cp311-none-any.whl").write_bytes(wheel({"pack/data.csv": CSV[:-1]}))
    assert f"has SHA-256 {sha256(CSV[:-1])}, expected {sha256(CSV)}; {PIP.format(tmp_path)}" in message(
        lambda: read_member(ARCHIVE, tmp_path)
    )
    (tmp_path / "some_pack-1.0-cp312-none-any.whl").write_bytes(wheel())
    assert read_member(ARCHIVE, tmp_path) == CSV


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("py3-none-any.whl", b"", "is damaged (File is not a zip file)"),
        ("py3-none-any.whl", wheel()[:-30], "is damaged (File is not a zip file)"),
        ("py3-none-any.whl", wheel().replace(b"PK\3\4", b"PK\0\0"), "is damaged (Bad magic number for file header)"),
        ("py3-none-any.whl", wheel().replace(b"\x14\0\0\0\x08", b"\x14\0\0\0\x77"), "is damaged ("),
        ("py3-none-any.whl", wheel({"pack/other.csv": CSV}), f"has no pack/data.csv (SHA-256 {sha256(CSV)})"),
        (".tar.gz", b"", "is damaged (empty file)"),
        (".tar.gz", b"text", "is damaged (Not a gzipped file (b'te'))"),
        (".tar.gz", source_archive("some_pack-1.0")[:-20], "is damaged (Compressed file ended"),
        (".tar.gz", gzip.compress(b"text" * 512, mtime=0), "is damaged ("),
        (".tar.gz", source_archive("some_pack-1.0/lib"), "has no pack/data.csv"),
    ],
    ids=itertools.count(),
)
def test_damaged_archive_is_named(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    path = tmp_path / f"some_pack-1.0{'' if name.startswith('.') else '-'}{name}"
    path.write_bytes(data)
    text = message(lambda: read_member(ARCHIVE, tmp_path))
    assert text.startswith(f"data={path}: {expected}")
    assert text.endswith(f"; {PIP.format(tmp_path)}")


@settings(max_examples=200)
@given(st.booleans(), st.integers(0, 10_000), st.integers(0, 255), st.booleans())
def test_no_damage_gives_other_contents(
    tmp_path_factory: pytest.TempPathFactory, zipped: bool, place: int, byte: int, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    data = bytearray(wheel() if zipped else source_archive("some_pack-1.0"))
    place %= len(data)
    data[place:] = b"" if cut else bytes([byte]) + data[place + 1 :]
    (folder / ("some_pack-1.0-py3-none-any.whl" if zipped else "some_pack-1.0.tar.gz")).write_bytes(data)
    try:
        found = read_member(ARCHIVE, folder)
    except DataError as error:
        found = str(error).encode()
    assert found == CSV or (found.startswith(f"data={folder}".encode()) and b"\n" not in found)


def test_what_stands_in_the_place_of_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some_pack-1.0-py3-none-any.whl"
    path.mkdir()
    assert "cannot be read (Is a directory)" in message(lambda: read_member(ARCHIVE, tmp_path))
    path.rmdir()
    os.mkfifo(path)
    assert "is a pipe, not a file" in message(lambda: read_member(ARCHIVE, tmp_path))
    for folder in (tmp_path / "nowhere", path, Path("no where")):
        quoted = "'no where'" if folder == Path("no where") else folder
        assert message(partial(read_member, ARCHIVE, folder)).endswith(PIP.format(quoted))
    assert "is not a valid path" in message(lambda: read_member(ARCHIVE, Path("\0")))

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert "no home folder for a cache; set XDG_CACHE_HOME" in message(lambda: read_member(ARCHIVE))


@pytest.mark.parametrize("name", ["some_pack-1.0-py3-none-any.whl", "some_pack-1.0.tar.gz", "ratings.csv.gz"])
def test_a_small_file_may_not_unpack_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(archives_module, "LARGEST", 1 << 20)
    bomb = bytes(3 << 20)
    (tmp_path / name).write_bytes(wheel({"pack/data.csv": bomb}) if name.endswith(".whl") else gzip.compress(bomb))
    read = (lambda: read_file(tmp_path / name)) if "csv" in name else (lambda: read_member(ARCHIVE, tmp_path))
    assert message(read).startswith(f"data={tmp_path / name}: unpacks to more than 1,048,576 bytes")
