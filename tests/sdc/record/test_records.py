"""Run records survive crashes and say clearly what is wrong with them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from sdc.record import records
from sdc.record.files import RecordError
from sdc.record.records import RunWriter, read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    with RunWriter.create(path, {"kind": "twin"}) as writer:
        for step in range(3):
            rows = [{"step": step, "site": "fwd/attn"}] if step else []
            writer.step({"step": step, "loss": np.float32([1.5, math.nan]), "norm": math.inf}, rows)
    return path


def test_round_trip(folder: Path) -> None:
    run = read_run(folder)
    assert {"schema": 2, "kind": "twin"}.items() <= run.manifest.items()
    assert [row["step"] for row in run.steps] == [0, 1, 2]
    assert run.steps[0]["loss"][0] == 1.5
    assert math.isnan(run.steps[0]["loss"][1])
    assert run.steps[0]["norm"] == math.inf
    assert [row["step"] for row in run.mismatches] == [1, 2]
    assert run.summary is None


def test_files_are_strict_json(folder: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for line in (folder / records.STEPS).read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_the_summary_ends_a_run(folder: Path) -> None:
    with RunWriter.resume(folder, 3, {"kind": "twin"}) as writer:
        writer.summary({"verdict": "clean", "values": np.arange(2)})
    summary = read_run(folder).summary
    assert summary is not None
    assert {"schema": 2, "verdict": "clean", "values": [0, 1]}.items() <= summary.items()


def test_a_last_line_cut_off_by_a_crash_is_passed_over(folder: Path) -> None:
    with (folder / records.STEPS).open("a") as file:
        file.write('{"step": 3, "lo')
    assert len(read_run(folder).steps) == 3


@pytest.mark.parametrize("name", [records.STEPS, records.MISMATCHES])
def test_a_record_cut_off_after_its_end_is_an_error(folder: Path, name: str) -> None:
    with RunWriter.resume(folder, 3, {"kind": "twin"}) as writer:
        writer.summary({"verdict": "clean"})
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-5])
    with pytest.raises(RecordError, match=f"{name} is cut off after line {whole.count(10) - 1}"):
        read_run(folder)
    (folder / name).unlink()
    with pytest.raises(RecordError, match="is missing although the run has ended"):
        read_run(folder)


def test_resuming_drops_what_will_be_done_again(folder: Path) -> None:
    with (folder / records.STEPS).open("a") as file:
        file.write('{"step": 3, "lo')
    with RunWriter.resume(folder, 3, {"kind": "twin"}) as writer:
        writer.summary({"verdict": "clean"})
    with RunWriter.resume(folder, 2, {"kind": "twin", "steps": 9}) as writer:
        writer.step({"step": 2, "loss": [9.0]})
    run = read_run(folder)
    assert [row["step"] for row in run.steps] == [0, 1, 2]
    assert run.steps[2]["loss"] == [9.0]
    assert [row["step"] for row in run.mismatches] == [1]
    assert run.summary is None
    assert run.manifest["steps"] == 9
    assert run.manifest["resumed_at"] == [3, 2]


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1}', '{"step": "one"}'])
def test_a_damaged_line_in_the_middle_is_an_error(folder: Path, line: str) -> None:
    path = folder / records.STEPS
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest]) + "\n")
    with pytest.raises(RecordError, match=r"steps\.jsonl line 2 is damaged"):
        read_run(folder)


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 99}', "\x00"])
def test_a_damaged_or_foreign_manifest(folder: Path, content: str) -> None:
    (folder / records.MANIFEST).write_text(content)
    with pytest.raises(RecordError, match=r"manifest\.json"):
        read_run(folder)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is no run folder"):
        read_run(tmp_path / "nothing")


def test_an_existing_folder_is_never_overwritten(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"exists already; name another folder, or resume the run in it"):
        RunWriter.create(folder, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="exists already"):
        RunWriter.create(tmp_path / "file", {})
    with pytest.raises(RecordError, match="cannot write run folder"):
        RunWriter.create(tmp_path / "file" / "run", {})


def test_a_failed_write_leaves_the_old_file(folder: Path) -> None:
    before = (folder / records.MANIFEST).read_bytes()
    with pytest.raises(TypeError):
        records.write_json(folder / records.MANIFEST, {"bad": object()})
    assert (folder / records.MANIFEST).read_bytes() == before
    assert not list(folder.glob(".*"))
