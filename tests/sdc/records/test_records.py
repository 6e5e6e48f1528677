"""Run records survive crashes and say clearly what is wrong with them."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdc.records import layout as kinds, stamp
from sdc.records.format import RecordError, to_text, write_sealed, write_text
from sdc.records.record import Record, read_record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    with Record.create(path, {"kind": "twin"}) as record:
        for step in range(3):
            rows = [{"step": step, "site": "fwd/attn"}] if step else []
            record.line({"step": step, "loss": np.float32([1.5, math.nan]), "norm": math.inf}, rows)
    return path


def test_round_trip(folder: Path) -> None:
    run = read_record(folder)
    assert {"schema": 1, "kind": "twin"}.items() <= run.manifest.items()
    assert [row["step"] for row in run.lines] == [0, 1, 2]
    assert run.lines[0]["loss"][0] == 1.5
    assert math.isnan(run.lines[0]["loss"][1])
    assert run.lines[0]["norm"] == math.inf
    assert [row["step"] for row in run.details] == [1, 2]
    assert run.summary is None


def test_files_are_strict_json(folder: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = (folder / kinds.STEPS).read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["step"] for line in lines] == [0, 1, 2]


def test_the_summary_ends_a_run(folder: Path) -> None:
    with Record.resume(folder, {"kind": "twin"}, at=3) as record:
        record.finish({"verdict": "clean", "values": np.arange(2)})
    summary = read_record(folder).summary
    assert summary is not None
    assert {"schema": 1, "verdict": "clean", "values": [0, 1]}.items() <= summary.items()


def test_a_last_line_cut_off_by_a_crash_is_passed_over(folder: Path) -> None:
    with (folder / kinds.STEPS).open("a") as file:
        file.write('{"step": 3, "lo')
    assert len(read_record(folder).lines) == 3


@pytest.mark.parametrize("name", [kinds.STEPS, kinds.MISMATCHES])
def test_a_record_cut_off_after_its_end_is_an_error(folder: Path, name: str) -> None:
    with Record.resume(folder, {"kind": "twin"}, at=3) as record:
        record.finish({"verdict": "clean"})
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-5])
    with pytest.raises(RecordError, match=f"{name} is cut off after line {whole.count(10) - 1}"):
        read_record(folder)
    (folder / name).unlink()
    with pytest.raises(RecordError, match="is missing although the run has ended"):
        read_record(folder)


def test_resuming_drops_what_will_be_done_again(folder: Path) -> None:
    with (folder / kinds.STEPS).open("a") as file:
        file.write('{"step": 3, "lo')
    with Record.resume(folder, {"kind": "twin"}, at=3) as record:
        record.finish({"verdict": "clean"})
    with Record.resume(folder, {"kind": "twin", "steps": 9}, at=2) as record:
        record.line({"step": 2, "loss": [9.0]})
    run = read_record(folder)
    assert [row["step"] for row in run.lines] == [0, 1, 2]
    assert run.lines[2]["loss"] == [9.0]
    assert [row["step"] for row in run.details] == [1]
    assert run.summary is None
    assert run.manifest["steps"] == 9
    assert run.manifest["resumed_at"] == [3, 2]


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1}', '{"step": "one"}'])
def test_a_damaged_line_in_the_middle_is_an_error(folder: Path, line: str) -> None:
    path = folder / kinds.STEPS
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest]) + "\n")
    with pytest.raises(RecordError, match=r"steps\.jsonl line 2 is damaged"):
        read_record(folder)


@pytest.mark.parametrize("name", [kinds.MANIFEST, kinds.SUMMARY])
@pytest.mark.parametrize("content", ["", "[]", '{"schema": 99}', "\x00", "[" * 100_000])
def test_a_damaged_or_foreign_file(folder: Path, content: str, name: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(RecordError, match=rf"{name} (is damaged|has layout 99)"):
        read_record(folder)


def sealed(format: str, **fields: Any) -> Callable[[Path], None]:
    return lambda path: write_sealed(path, {**stamp(format), **fields})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            kinds.MANIFEST,
            sealed("jax-sdc record", kind="twin", twins="two"),
            "has different fields from those that this version of jax-sdc reads (field twins: ",
        ),
        (
            kinds.SUMMARY,
            sealed("jax-sdc record summary", steps=[]),
            "has different fields from those that this version of jax-sdc reads (field steps: ",
        ),
        (kinds.STEPS, Path.mkdir, "cannot be read (Is a directory); correct the cause and try again"),
        (
            kinds.MANIFEST,
            Path.mkdir,
            "is a folder, not a file; give the path of a file, or replace the folder with the file",
        ),
        (kinds.SUMMARY, "", "is damaged (it is empty); "),
        (kinds.MANIFEST, os.mkfifo, "is a pipe, not a file; replace it with a regular file"),
        (
            kinds.SUMMARY,
            lambda path: path.symlink_to("/dev/zero"),
            "is a device, not a file; replace it with a regular file",
        ),
        (kinds.STEPS, os.mkfifo, "is a pipe, not a file"),
        (kinds.MISMATCHES, os.mkfifo, "is a pipe, not a file"),
        (kinds.DISCARDED, os.mkfifo, "is a pipe, not a file"),
        (kinds.STEPS, lambda path: path.symlink_to(path), "cannot be read (Too many levels of symbolic links)"),
    ],
)
def test_the_file_at_fault_is_named(
    folder: Path, name: str, content: str | Callable[[Path], None], message: str
) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if isinstance(content, str):
        path.write_text(content)
    else:
        content(path)
    with pytest.raises(RecordError, match=re.escape(f"{path} {message}")):
        read_record(folder)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not a run folder"):
        read_record(tmp_path / "nothing")


def test_an_existing_folder_is_never_overwritten(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"already exists; give another folder, or resume the run in it"):
        Record.create(folder, {"kind": "twin"})
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="already exists"):
        Record.create(tmp_path / "file", {"kind": "twin"})
    with pytest.raises(RecordError, match="cannot write run folder"):
        Record.create(tmp_path / "file" / "run", {"kind": "twin"})


def test_a_failed_write_leaves_the_old_file(folder: Path) -> None:
    before = (folder / kinds.MANIFEST).read_bytes()
    with pytest.raises(TypeError):
        write_text(folder / kinds.MANIFEST, to_text({"bad": object()}))
    assert (folder / kinds.MANIFEST).read_bytes() == before
    assert not list(folder.glob(".*"))
