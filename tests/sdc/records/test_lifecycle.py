"""A record from its creation to its end, of every kind."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc.records import KINDS, FolderTaken, Record, RecordError, json_schema, read_manifest, read_record
from sdc.records.lines import Pace, unlink
from sdc.schema import MismatchRow, RunManifest, RunSummary, StepRow, package_version
from sdc.tools.launch import check_folder
from sdc.verdict import Verdict

OLD = Path(__file__).parent / "records_1"
NEEDED: dict[str, dict[str, Any]] = {
    "trace.jsonl": {"digests": ""},
    "parts.jsonl": {"what": "criterion", "workload": "regression", "found": {}},
}
"""What a line must hold beside its number."""


def write(path: Path, kind: str, numbers: range) -> None:
    known = KINDS[kind]
    with Record.create(path, {"seed": 1}, kind=kind) as record:
        for number in numbers if known.lines else ():
            row = {known.number: number, **NEEDED.get(known.lines.name, {})}
            record.line(row, [row | NEEDED.get(known.details.name, {})] if known.details else ())
        record.finish({"verdict": None})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_lives_the_same_life(tmp_path: Path, kind: str) -> None:
    known = KINDS[kind]
    write(tmp_path / "run", kind, range(5))
    with Record.resume(tmp_path / "run", {"seed": 2}, at=3) as record:
        assert not read_record(tmp_path / "run").ended
        assert record.count == (3 if known.lines else 0)
        path = record.file("further.json", {"a": float("inf")})
        record.finish({"verdict": "clean"})
        assert record.ended
    contents = read_record(tmp_path / "run", kind)
    numbers = [row[known.number] for row in contents.lines]
    assert numbers == ([0, 1, 2] if known.lines else [])
    assert [row[known.number] for row in contents.details] == (numbers if known.details else [])
    assert contents.ended
    for written in (contents.manifest, contents.summary, json.loads(path.read_text())):
        assert written is not None
        assert (written["schema"], written["version"]) == (1, package_version("jax-sdc"))
        # A result is the same file whichever process wrote it.
        process = {"boot", "pid", "process"} if written is contents.manifest else set()
        assert set(written["host"]) == {"name", "machine"} | process
    assert contents.manifest["host"]["process"] == 0
    assert (contents.manifest["seed"], contents.manifest["resumed_at"]) == (2, [3])
    files = set(json_schema()["files"][kind]) - {"lock.json"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == files | {"further.json"}


def test_types_and_mappings_write_the_same_record(tmp_path: Path) -> None:
    row, hit = {"step": 0, "loss": [1.0, math.inf]}, {"step": 0, "site": "fwd/ffn"}
    with Record.create(tmp_path / "a", {"created": "then", "seed": 1}, kind="twin") as record:
        record.line(row, [hit])
        record.finish({"verdict": "clean"})
    with Record.create(tmp_path / "b", RunManifest(kind="twin", created="then", seed=1)) as record:
        record.line(msgspec.convert(row, StepRow), [msgspec.convert(hit, MismatchRow)])
        record.finish(RunSummary(verdict=Verdict.CLEAN))
    a, b = (read_record(tmp_path / name) for name in "ab")
    assert (a.manifest, a.lines, a.details, a.summary) == (b.manifest, b.lines, b.details, b.summary)


def test_the_time_of_creation_stays(tmp_path: Path) -> None:
    Record.create(tmp_path / "run", {"created": "then"}, kind="twin").close()
    for at in (0, 0):
        Record.resume(tmp_path / "run", {"created": "now"}, at=at).close()
    manifest = read_manifest(tmp_path / "run")
    assert (manifest["created"], manifest["resumed_at"]) == ("then", [0, 0])


def test_a_run_is_rolled_back_while_it_goes_on(tmp_path: Path) -> None:
    with Record.create(tmp_path, {}, kind="twin") as record:
        for step in range(4):
            record.line({"step": step, "loss": 1.0}, [{"step": step, "site": "x", "severity": 1e-05}])
        before = (tmp_path / "steps.jsonl").read_bytes()
        record.rewind(2)
        assert record.count == 2
        assert (tmp_path / "steps.jsonl").read_bytes() == b"".join(before.splitlines(keepends=True)[:2])
        record.line({"step": 2, "loss": 3.0})
        assert [row["step"] for row in read_record(tmp_path).lines] == [0, 1, 2]
    assert [row["step"] for row in read_record(tmp_path).details] == [0, 1]


def test_what_is_over_is_over(tmp_path: Path) -> None:
    record = Record.create(tmp_path, {}, kind="twin")
    record.finish({"verdict": None})
    for act in (lambda: record.line({"step": 0}), lambda: record.rewind(0), lambda: record.finish({})):
        with pytest.raises(RecordError, match="has ended; resume it"):
            act()
    record.close()
    record.close()
    with pytest.raises(RecordError, match="is closed; resume it"):
        record.line({"step": 0})


def test_what_a_kind_does_not_have_is_refused(tmp_path: Path) -> None:
    with Record.create(tmp_path / "a", {}, kind="campaign") as record:
        with pytest.raises(RecordError, match="'campaign' has no details"):
            record.line({"injection": 0}, [{"injection": 0}])
        for name in ("manifest.json", "injections.jsonl", "lock.json", "../x.json", ""):
            with pytest.raises(RecordError, match="is not a valid name for an additional file"):
                record.file(name, {})
    with Record.create(tmp_path / "b", {}, kind="abft study") as record, pytest.raises(RecordError, match="no lines"):
        record.line({"step": 0})
    with pytest.raises(RecordError, match="kind of record 'dance' is unknown; expected one of twin"):
        Record.create(tmp_path / "c", {}, kind="dance")
    with pytest.raises(RecordError, match="cannot be resumed as 'twin'"):
        Record.resume(tmp_path / "a", {"kind": "twin"}, at=0)
    with pytest.raises(RecordError, match="holds a record of kind 'campaign'; give the folder of a twin or train"):
        read_record(tmp_path / "a", "twin", "train")
    assert not (tmp_path / "c").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(FolderTaken, match="give another folder, or resume the run in it") as caught:
        Record.create(tmp_path, {}, kind="twin")
    assert caught.value.path == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_start_that_was_killed_before_its_manifest_can_be_repeated(tmp_path: Path) -> None:
    """Neither a restart nor `--resume` would be possible in a folder that is taken and has no manifest."""
    for name in ("lock.json", ".manifest.json.a1b2c3d4"):
        (tmp_path / name).touch()
    assert Record.is_free(tmp_path)
    check_folder(tmp_path, resume=False, kind="twin")
    with Record.create(tmp_path, {}, kind="twin"):
        assert {path.name for path in tmp_path.iterdir()} > {"manifest.json", "lock.json"}
    assert not list(tmp_path.glob(".*"))
    for number, name in enumerate((".manifest.json", "notes", ".manifest.json.bak")):
        (folder := tmp_path / str(number)).mkdir()
        (folder / name).touch()
        assert not Record.is_free(folder)


def test_a_damaged_record_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    write(tmp_path / "run", "twin", range(2))
    (tmp_path / "run" / "mismatches.jsonl").write_text('{"step": 0, "ranks": 5}\n')
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(
        RecordError, match=r"mismatches\.jsonl line 1 is damaged \(field ranks: expected array, got int\)"
    ):
        Record.resume(tmp_path / "run", {}, at=1)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("kind", ["twin", "trace", "campaign"])
def test_records_of_version_1_are_read_and_continued(tmp_path: Path, kind: str) -> None:
    def bare(path: Path) -> Any:
        return {name: value for name, value in json.loads(path.read_text()).items() if name != "checksum"}

    contents = read_record(OLD / kind, kind)
    number, names = contents.kind.number, [file.name for file in contents.kind.files]
    assert contents.manifest == bare(OLD / kind / "manifest.json")
    assert contents.summary == bare(OLD / kind / "summary.json")
    raw = {name: [unlink(line)[0] for line in (OLD / kind / name).read_bytes().splitlines()] for name in names}
    assert contents.lines == list(map(json.loads, raw[names[-1]]))
    assert contents.details == (list(map(json.loads, raw[names[0]])) if len(names) > 1 else [])
    copy = tmp_path / "run"
    copy.mkdir()
    for path in (OLD / kind).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    Record.resume(copy, contents.manifest, at=1).close()
    manifest = read_manifest(copy)
    assert (manifest["schema"], manifest["created"]) == (1, contents.manifest["created"])
    for name in names:
        kept = [line for line in raw[name] if json.loads(line)[number] < 1]
        assert [unlink(line)[0] for line in (copy / name).read_bytes().splitlines()] == kept
        assert 0 < len(kept) < len(raw[name])


@pytest.mark.parametrize(
    ("changes", "writer"),
    [
        ({"schema": 4, "version": "9.1"}, "jax-sdc 9.1, which wrote it"),
        ({"schema": 4, "environment": {"packages": {"jax-sdc": "9.2"}}}, "the version of jax-sdc that wrote it"),
        ({"schema": 4, "version": package_version("jax-sdc")}, "the version of jax-sdc that wrote it"),
        ({"schema": 4}, "the version of jax-sdc that wrote it"),
        ({"schema": True}, "the version of jax-sdc that wrote it"),
        ({"schema": "2"}, "the version of jax-sdc that wrote it"),
    ],
)
def test_another_schema_is_refused_with_its_writer(tmp_path: Path, changes: dict[str, Any], writer: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"kind": "twin", **changes}))
    for act in (lambda: read_record(tmp_path), lambda: Record.resume(tmp_path, {}, at=0)):
        with pytest.raises(RecordError, match=rf"has layout .* reads layout 1; read it with {writer}, or restore it"):
            act()


def test_a_line_on_record_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "run", "twin", range(3))
    file = tmp_path / "run" / "steps.jsonl"
    file.write_text(file.read_text() + file.read_text().splitlines(keepends=True)[1])
    with pytest.raises(RecordError, match=r"steps.jsonl line 4 does not match its checksum"):
        read_record(tmp_path / "run")
    with Record.create(tmp_path / "twice", {}, kind="train") as record:
        for step in (0, 1, 1):
            record.line({"step": step})
    with pytest.raises(RecordError, match=r"steps.jsonl line 3 has step 1 after step 1; restore it or start"):
        read_record(tmp_path / "twice")


def test_objects_are_written_seldom_and_more_seldom_where_it_takes_long() -> None:
    now, done = 0.0, []

    def flush() -> None:
        nonlocal now
        done.append(now)
        now += 5.0

    pace = Pace(30.0, lambda: now)
    while now < 200:
        pace.run(flush)
        now += 1.0
    assert done == [30.0, 85.0, 140.0, 195.0]  # 50 seconds after the 5 that each took


def test_records_are_read_and_written_without_jax(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import sdc.records.record, sdc.records.determinism, sdc.records.layout\n"
        "from sdc.records import *\n"
        "with Record.create(sys.argv[1], {}, kind='twin') as record:\n"
        "    record.line({'step': 0})\n"
        "    record.finish(stamp())\n"
        "json_schema(), differences([{}, {'a': 1}]), read_record(sys.argv[1])\n"
        "assert 'jax' not in sys.modules, 'jax is imported'\n"
        "assert 'numpy' not in sys.modules, 'numpy is imported'\n"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert read_record(tmp_path / "run").ended


def test_discarded_lines_outlive_a_crash(tmp_path: Path) -> None:
    """A line that a crash cut off is dropped, and those written later are not joined to it."""
    with Record.create(tmp_path / "run", {}, kind="twin") as record:
        record.discard([{"step": 4, "loss": 1.0}])
        with (tmp_path / "run" / "discarded.jsonl").open("a") as file:
            file.write('{"step": 5, "lo')
        record.discard([{"step": 6, "loss": 2.0}])
    assert [row["step"] for row in read_record(tmp_path / "run").discarded] == [4, 6]
    with (
        Record.create(tmp_path / "campaign", {}, kind="campaign") as record,
        pytest.raises(RecordError, match="does not keep discarded lines"),
    ):
        record.discard([{"injection": 0}])


def test_a_number_that_no_run_reaches_is_refused(tmp_path: Path) -> None:
    with Record.create(tmp_path, {}, kind="twin") as record:
        record.line({"step": 2**70})
    with pytest.raises(RecordError, match=r"steps\.jsonl line 1.*step"):
        read_record(tmp_path)
