"""Writing and reading a file: whatever is wrong with it is one clear line, and nothing passes for the whole."""

import json
import math
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdc.records import Format, RecordError
from sdc.records.format import read_json, seal
from sdc.schema import Header, identify


class Sample(Header, kw_only=True, tag="jax-sdc sample"):
    """A file of the tests."""

    name: str
    values: list[float]


SAMPLE = Format(
    type=Sample,
    noun="sample",
    remedy="make it again",
    source="give a file that a test wrote",
    names=("a.json", "b.json"),
    contradictions=lambda sample: ["it is bad"] if sample.name == "bad" else [],
)
GOOD = Sample(name="good", values=[1.5, 2.0])


def text_of(change: Callable[[dict[str, Any]], Any] = lambda _: None, value: Sample = GOOD) -> bytes:
    """A file whose checksum is right, whatever was changed in it."""
    body = json.loads(SAMPLE.encode(value))
    del body["checksum"]
    change(body)
    return seal(json.dumps(body, indent=1).encode() + b"\n")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    SAMPLE.write(tmp_path / "b.json", GOOD)
    assert SAMPLE.read(tmp_path) == SAMPLE.read(tmp_path / "b.json") == GOOD
    assert text_of() == SAMPLE.encode(GOOD)
    assert list(read_json(tmp_path / "b.json"))[:4] == ["format", "schema", "version", "host"]


def test_numbers_that_json_has_no_word_for(tmp_path: Path) -> None:
    SAMPLE.write(tmp_path / "a.json", Sample(name="odd", values=[math.nan, -math.inf]))
    nan, low = SAMPLE.read(tmp_path).values
    assert math.isnan(nan)
    assert low == -math.inf


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is damaged (it is empty); make it again"),
        (b"\x00\xff", "is damaged ("),
        (b"[" * 100_000, "is damaged (it is nested deeper than 100 levels); make it again"),
        (b"[]", "is damaged (expected a JSON object)"),
        (text_of(lambda body: body.pop("format")), "is not a sample (its format is None); make it again"),
        (text_of(lambda body: body.update(format="other")), "is not a sample (its format is 'other')"),
        (
            text_of(lambda body: body.update(schema=2, version="9.1")),
            "has layout 2, but this version of jax-sdc reads layout 1; read it with jax-sdc 9.1, which wrote it, or "
            "make it again",
        ),
        (text_of(lambda body: body.update(schema=True)), "has layout True, but this version"),
        (text_of(lambda body: body.pop("host")), "is damaged (object missing required field host)"),
        (
            text_of(lambda body: body.update(values=["NaN", "much"])),
            "has different fields from those that this version of jax-sdc reads (field values[1]: expected float, "
            "got str); read",
        ),
        (
            text_of(lambda body: body.update(values=[None])),
            "has different fields from those that this version of jax-sdc reads (field ",
        ),
        (text_of(lambda body: body.update(name="bad")), "contradicts itself: it is bad; make it again"),
        (SAMPLE.encode(GOOD).replace(b"1.5", b"1.6"), "is damaged (its checksum is wrong); make it again"),
        (SAMPLE.encode(GOOD).replace(b"checksum", b"chequesum"), "is damaged (it has no checksum); make it again"),
    ],
)
def test_what_is_wrong_with_a_file(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RecordError) as told:
        SAMPLE.read(tmp_path)
    assert str(told.value).startswith(f"{tmp_path / 'a.json'} {said}")
    assert "\n" not in str(told.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nothing; give a file that a test wrote$") as told:
        SAMPLE.read(tmp_path / "nothing")
    assert isinstance(told.value.__cause__, FileNotFoundError)
    with pytest.raises(RecordError, match=r"is a folder without a\.json or b\.json; give a file"):
        SAMPLE.read(tmp_path)
    (tmp_path / "a.json").mkdir()
    with pytest.raises(RecordError, match="is a folder, not a file; give the path of a file"):
        SAMPLE.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordError, match="is a pipe, not a file"):
        SAMPLE.read(tmp_path / "pipe")


def test_what_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this sample contradicts itself: it is bad"):
        SAMPLE.write(tmp_path / "a.json", Sample(name="bad", values=[]))
    assert not list(tmp_path.iterdir())


def test_a_deep_text_is_looked_at_closely(tmp_path: Path) -> None:
    deep = text_of(lambda body: body.update(more=json.loads("[" * 200 + "]" * 200)))
    (tmp_path / "a.json").write_bytes(deep)
    with pytest.raises(RecordError, match="nested deeper than 100 levels"):
        SAMPLE.read(tmp_path)


def test_a_process_that_has_joined_others_says_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = types.SimpleNamespace(
        distributed=types.SimpleNamespace(is_initialized=lambda: False), process_index=lambda: 3
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert identify().process == 0
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert identify().process == 3
