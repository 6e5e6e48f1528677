"""The corpus: which files are read, in which order, and one clear line for each that cannot be."""

import json
import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from sdc.train.data import CorpusError, read_corpus


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def message(*paths: str | Path) -> str:
    """The message of the error that reading these paths raises; every one names the setting and is one line."""
    with pytest.raises(CorpusError) as caught:
        read_corpus(paths)
    text = str(caught.value)
    assert text.startswith("corpus=")
    assert "\n" not in text
    return text


def test_standard_library_is_large_and_always_the_same() -> None:
    corpus = read_corpus()
    assert corpus == read_corpus("python") == read_corpus(("python",))
    assert 5e6 < sum(map(len, corpus.documents)) < 20e6
    assert "standard library" in corpus.source
    assert any(document.startswith('r"""JSON (JavaScript Object Notation)') for document in corpus.documents)


def test_standard_library_leaves_out_what_differs_between_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, str | bytes] = {
        "os.py": "1",
        "json/tool.py": "3",
        "json/__init__.py": "2",
        "xml/dom/domreg.py": "4",
        "zipapp.py": "5",
    }
    left_out = [
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "json/__pycache__/tool.cpython-311.pyc",
        "json/notes.txt",
        "lib-dynload/extra.py",
        "site-packages/pip/__init__.py",
        "sitecustomize.py",
        "test/test_json.py",
        "tkinter/__init__.py",
        "unittest/test/test_case.py",
        "venv/__init__.py",
    ]
    write(tmp_path, {**kept, **dict.fromkeys(left_out, "no")})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    assert read_corpus("python").documents == ("2", "3", "1", "4", "5")


def test_standard_library_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "python311.zip"))
    assert message("python").endswith("give your own files")


def test_folder_is_read_sorted_and_without_hidden_or_other_files(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "b.txt": "3",
        "B.md": "1",
        "a/z.py": "2",
        "é.RST": "5",
        "c/d/e.jsonl": '{"text": "4"}\n',
        "empty.txt": "",
        ".git/x.txt": "no",
        ".hidden.txt": "no",
        "image.png": b"\x89PNG\0",
        "notes": "no",
    }
    for order in (files, dict(reversed(files.items()))):
        folder = write(tmp_path / str(len(list(tmp_path.iterdir()))), order)
        assert read_corpus(folder).documents == ("1", "2", "3", "4", "5")


def test_paths_are_read_in_the_given_order_and_may_be_mixed(tmp_path: Path) -> None:
    write(tmp_path, {"b.log": "second", "a.txt": "first", "folder/c.txt": "third"})
    paths: list[str | Path] = [tmp_path / "b.log", str(tmp_path / "a.txt"), tmp_path / "folder"]
    corpus = read_corpus(paths)
    assert corpus.documents == ("second", "first", "third")
    assert corpus.source == ", ".join(map(str, paths))
    mixed = read_corpus((tmp_path / "a.txt", "python"))
    assert mixed.documents == ("first", *read_corpus("python").documents)


def test_a_path_called_python_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"python/a.txt": "mine"})
    monkeypatch.chdir(tmp_path)
    assert read_corpus(Path("python")).documents == ("mine",)
    assert read_corpus("./python").documents == ("mine",)


def test_text_is_not_translated(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "\ufeffone\r\ntwo\u2028\x0c three\n"})
    assert read_corpus(tmp_path).documents == ("one\r\ntwo\u2028\x0c three\n",)


def test_json_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": '{"text": "one\u2028\x85two"}\r\n\n{"text": "three"}'})
    assert read_corpus(tmp_path).documents == ("one\u2028\x85two", "three")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), st.booleans())
def test_json_lines_round_trip(tmp_path_factory: pytest.TempPathFactory, texts: list[str], escaped: bool) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    rows = [json.dumps({"id": 1, "text": text}, ensure_ascii=escaped) for text in (*texts, "end")]
    path.write_bytes("\r\n\n".join(rows).encode())
    assert read_corpus(path).documents == (*filter(None, texts), "end")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": "cut', "line 3: is not valid JSON"),
        (b"[" * 100_000, "line 3: is not valid JSON (it is nested deeper than 100 levels)"),
        (b"[" * 200 + b"]" * 200, "line 3: is not valid JSON (it is nested deeper than 100 levels)"),
        (b'{"txt": "a"}', "line 3: has no text"),
        (b'{"text": ["a"]}', "line 3: has no text"),
        (b'"text"', "line 3: has no text"),
        (b'{"text": "\\ud800"}', "line 3: has an unpaired surrogate"),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, line: bytes, expected: str) -> None:
    write(tmp_path, {"a.jsonl": b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n'})
    assert f"{tmp_path / 'a.jsonl'} {expected}" in message(tmp_path)


def test_missing_path_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'absent'}: does not exist" in message(tmp_path / "absent")
    write(tmp_path, {"a.txt": "a"})
    (tmp_path / "gone.txt").symlink_to(tmp_path / "absent")
    assert f"{tmp_path / 'gone.txt'}: cannot be read" in message(tmp_path)


def test_binary_file_is_named_with_the_offset(tmp_path: Path) -> None:
    write(tmp_path, {"latin1.txt": "abcé".encode("latin-1"), "utf16.txt": "ab".encode("utf-16-le"), "ok.txt": "a"})
    assert f"{tmp_path / 'latin1.txt'}: is not UTF-8 text (byte 0xe9 at offset 3)" in message(tmp_path)
    assert "zero byte at offset 1" in message(tmp_path / "utf16.txt")


@pytest.mark.parametrize("content", [{"a.txt": ""}, {"a.jsonl": '\n{"text": ""}\n'}])
def test_empty_corpus(tmp_path: Path, content: dict[str, str | bytes]) -> None:
    write(tmp_path, content)
    assert f"{tmp_path}: contains no text" in message(tmp_path)


def test_no_path_at_all() -> None:
    assert "contains no text" in message()


def test_folder_without_text(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": "a"})
    assert "has no file with the suffix .jsonl or .md or .py or .rst or .txt" in message(tmp_path)


@pytest.mark.parametrize(("target", "found"), [(None, "a pipe"), ("/dev/zero", "a device")])
def test_what_has_no_end_is_refused_without_reading_it(tmp_path: Path, target: str | None, found: str) -> None:
    path = write(tmp_path / "texts", {"a.txt": "a"}) / "sub.txt"
    os.mkfifo(path) if target is None else path.symlink_to(target)
    assert f"{path}: is {found}, neither a file nor a folder" in message(path)
    assert f"{path}: is {found}, not a file; leave it out" in message(path.parent)


def test_links_to_folders_lead_nowhere(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a", "sub/b.txt": "b"})
    for name in ("one", "sub/two"):
        (tmp_path / name).symlink_to(tmp_path)
    assert read_corpus(tmp_path).documents == ("a", "b")


@pytest.mark.parametrize(
    ("path", "why"), [("x\0", "a path must not contain a zero byte"), (5_000 * "x", "File name too long")]
)
def test_a_path_that_cannot_be(path: str, why: str) -> None:
    assert f"cannot be read ({why}); check the path" in message(path)


def test_a_file_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> bytes:
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", read)
    assert "a.txt: does not fit into memory; give only a part of it" in message(write(tmp_path, {"a.txt": "a"}))


def test_unreadable_file_and_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be read (Too many levels of symbolic links)" in message(tmp_path / "loop")
    write(tmp_path / "text", {"a.txt": "a", "sub/b.txt": "b"})
    scan = os.scandir

    def deny(path: str) -> object:
        if path.endswith("sub"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    # Tests may run as root, whom no permission bit stops.
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", deny)
        assert f"{tmp_path / 'text' / 'sub'}: cannot be read (Permission denied)" in message(tmp_path / "text")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: deny(f"{path}/sub"))
        assert f"{tmp_path / 'text' / 'a.txt'}: cannot be read (Permission denied)" in message(tmp_path / "text")
