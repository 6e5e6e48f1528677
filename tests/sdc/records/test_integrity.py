"""A record that lost, repeats or changed anything is refused: nothing of it can pass for the whole."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdc.records import Record, RecordError, read_record
from sdc.records.format import FIELD, write_sealed
from sdc.records.record import Contents

LINES = ("steps.jsonl", "mismatches.jsonl", "discarded.jsonl")


def write(path: Path, *, ended: bool, loss: float = 2.5) -> Path:
    """A run that went back once and was continued once."""
    with Record.create(path, {"seed": 0}, kind="twin") as record:
        for step in range(4):
            hit = {"step": step, "site": "fwd/ffn", "severity": loss}
            record.line({"step": step, "loss": [loss, loss]}, [hit] * (step % 2 + 1))
        record.rewind(3)
    with Record.resume(path, {"seed": 0}, at=2, expected=2) as record:
        for step in range(2, 5):
            record.line({"step": step, "loss": [loss, loss]}, [{"step": step, "site": "fwd/attn"}])
        if ended:
            record.finish({"verdict": "clean", "reason": "nothing differs"})
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["ended", "under way"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("record") / "run", ended=request.param)


def same(path: Path, contents: Contents) -> bool:
    """Whether a record is refused, or reads as it did, or as it did some lines ago if it has not ended."""
    try:
        found = read_record(path)
    except RecordError as error:
        return str(path) in str(error)
    ours, theirs = (
        (record.manifest, record.lines, record.details, record.discarded, record.summary)
        for record in (found, contents)
    )
    if contents.ended:  # without its summary a run has not ended, and is never clean
        return ours[:4] == theirs[:4] and (found.summary is None or ours == theirs)
    return found.summary is None and all(a == b[: len(a)] for a, b in zip(ours[1:3], theirs[1:3], strict=True))


def test_a_record_reads_as_it_was_written(whole: Path) -> None:
    contents = read_record(whole)
    assert [row["step"] for row in contents.lines] == list(range(5))
    assert [row["step"] for row in contents.discarded] == [3, 2]
    assert [row.get("details") for row in contents.lines] == [1, 2, 1, 1, 1]
    assert contents.lines[-1]["discarded"] == contents.manifest["discarded"] == 2
    assert FIELD not in {*contents.manifest, *contents.lines[0]}
    if contents.summary is not None:
        counts = {name: count for name, (count, _) in contents.summary["lines"].items()}
        assert counts == {"steps.jsonl": 5, "mismatches.jsonl": 6, "discarded.jsonl": 2}


def test_a_changed_byte_is_found(whole: Path, tmp_path: Path) -> None:
    contents, copy = read_record(whole), tmp_path / "run"
    shutil.copytree(whole, copy)
    tried = 0
    for file in copy.iterdir():
        content = file.read_bytes()
        for place in range(tried % 2, len(content), 2):
            file.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
            assert same(copy, contents), (file.name, place)
            tried += 1
        file.write_bytes(content)
    assert tried > 500


LOSSES: dict[str, Callable[[list[bytes], int], list[bytes]]] = {
    "lost": lambda lines, at: lines[:at] + lines[at + 1 :],
    "repeated": lambda lines, at: lines[: at + 1] + lines[at:],
    "exchanged": lambda lines, at: [*lines[:at], *lines[at : at + 2][::-1], *lines[at + 2 :]],
    "cut": lambda lines, at: lines[:at],
    "cut within": lambda lines, at: [*lines[:at], lines[at][: len(lines[at]) // 2]],
    "empty": lambda lines, at: [],
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", LINES)
def test_lines_that_are_lost_repeated_or_moved_are_found(whole: Path, tmp_path: Path, name: str, loss: str) -> None:
    contents, copy = read_record(whole), tmp_path / "run"
    shutil.copytree(whole, copy)
    lines = (copy / name).read_bytes().splitlines(keepends=True)
    for at in range(len(lines)):
        changed = LOSSES[loss](lines, at)
        (copy / name).write_bytes(b"".join(changed))
        if changed != lines:
            assert same(copy, contents), at
        if name == "discarded.jsonl" and changed != lines:  # what was found in steps that were run again stays found
            with pytest.raises(RecordError):
                read_record(copy)


@pytest.mark.parametrize("name", LINES)
def test_lines_of_another_run_are_found(tmp_path: Path, name: str) -> None:
    """By the summary, which alone knows the lines of its own run."""
    ours, theirs = write(tmp_path / "run", ended=True), write(tmp_path / "other", ended=True, loss=9.0)
    shutil.copy(theirs / name, ours / name)
    with pytest.raises(RecordError, match=name):
        read_record(ours)


def test_a_summary_that_leaves_a_file_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run", ended=True)
    summary = read_record(run).summary
    assert summary is not None
    del summary["lines"]["mismatches.jsonl"]
    write_sealed(run / "summary.json", summary)
    with pytest.raises(RecordError, match=r"summary\.json does not state where mismatches\.jsonl ends"):
        read_record(run)


@pytest.mark.parametrize("name", [*LINES, "manifest.json", "summary.json"])
def test_a_file_that_is_gone(whole: Path, tmp_path: Path, name: str) -> None:
    contents, copy = read_record(whole), tmp_path / "run"
    shutil.copytree(whole, copy)
    (copy / name).unlink(missing_ok=True)
    if name == "summary.json":
        assert not read_record(copy).ended
    elif name == "steps.jsonl" and not contents.ended:
        assert not read_record(copy).lines
    else:
        with pytest.raises(RecordError):
            read_record(copy)


def test_a_run_is_not_continued_over_lost_lines(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    (copy / "summary.json").unlink(missing_ok=True)
    lines = (copy / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "steps.jsonl").write_bytes(b"".join(lines[:3]))
    before = {path: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(RecordError, match=r"steps\.jsonl has 3 of the 4 lines before step 4; restore it"):
        Record.resume(copy, {"seed": 0}, at=4, expected=4)
    assert {path: path.read_bytes() for path in copy.iterdir()} == before
    Record.resume(copy, {"seed": 0}, at=2, expected=2).close()


def test_the_fields_of_the_record_are_its_own(tmp_path: Path) -> None:
    with Record.create(tmp_path, {}, kind="twin") as record:
        for name in ("details", "discarded", "mismatches", FIELD):
            with pytest.raises(RecordError, match=f"cannot have a field '{name}'"):
                record.line({"step": 0, name: 1})
        with pytest.raises(RecordError, match=f"cannot have a field '{FIELD}'"):
            record.file("more.json", {FIELD: 1})


def test_lines_are_on_disk_after_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Any] = []
    monkeypatch.setattr("os.fsync", synced.append)
    with Record.create(tmp_path / "run", {}, kind="twin") as record:
        record.sync()
        synced.clear()
        record.sync()
        assert not synced  # nothing new
        record.line({"step": 0})
        record.sync()
        assert len(synced) == 1  # steps.jsonl alone


def test_what_details_found_stays_found_though_a_crash_cut_off_their_line(tmp_path: Path) -> None:
    with Record.create(tmp_path, {}, kind="twin") as record:
        record.line({"step": 0})
        hit = {"step": 1, "site": "fwd/ffn", "layer": 1, "checked": 64, "mismatched": 4}
        record.line({"step": 1}, [hit, {**hit, "mismatched": 0}])
    lines = (tmp_path / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "steps.jsonl").write_bytes(lines[0])
    with Record.resume(tmp_path, {}, at=1, expected=1):
        pass
    contents = read_record(tmp_path)
    assert contents.details == []
    sites = {"fwd/ffn": {"checked": 64, "mismatched": 4}}
    assert contents.discarded == [{"step": 1, "sites": sites, "mismatches": [hit, {**hit, "mismatched": 0}]}]


def test_what_is_run_again_keeps_its_mismatches(tmp_path: Path) -> None:
    with Record.create(tmp_path, {}, kind="twin") as record:
        hits = [{"step": step, "site": "fwd/ffn", "layer": 1, "mismatched": step} for step in range(4)]
        for hit in hits:
            record.line({"step": hit["step"]}, [hit])
        record.rewind(2)
        record.discard([{"step": 2}], [hits[2]])
        record.line({"step": 2})
    contents = read_record(tmp_path)
    assert [row["step"] for row in contents.discarded] == [2, 3, 2]
    assert contents.details == hits[:2]
    assert [(row["step"], row.get("mismatches")) for row in contents.again.lines] == [
        (2, [hits[2]]), (2, [hits[2]]), (3, [hits[3]])
    ]  # fmt: skip
    assert contents.again.details == [hits[2], hits[2], hits[3]]
    assert [row["step"] for row in contents.attempts.lines] == [0, 1, 2, 2, 2, 3]
    assert contents.attempts.details == [*hits[:2], hits[2], hits[3], hits[2]]
