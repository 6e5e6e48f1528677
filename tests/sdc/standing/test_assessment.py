"""Where a host stands by its last result: what is missing, old, damaged or simulated is never a PASS."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdc.burnin.results import BurninResult
from sdc.standing.assessment import standing_of
from sdc.verdict import Verdict
from tests.reports import DAY, make_finding, make_report, put_report

NOW = datetime.datetime.fromisoformat(DAY) + datetime.timedelta(hours=1)


def put(folder: Path, name: str, report: BurninResult) -> Path:
    return put_report(folder, report, name)


def test_the_file_its_folder_and_the_folder_above(tmp_path: Path) -> None:
    path = put(tmp_path, "one", make_report(findings=[make_finding()]))
    for place in (path, path.parent, tmp_path):
        found = standing_of(place, now=NOW)
        assert (found.verdict, found.file) == (Verdict.CORRUPT, str(path))
        assert found.reason.startswith("host host-0, device 0 (serial SN-host-0-0), matrix/float32/64x64x64/normal: ")


def test_the_newest_by_what_results_say_counts(tmp_path: Path) -> None:
    old = put(tmp_path, "old", make_report(created="2026-01-04T00:00:00+00:00", findings=[make_finding()]))
    new = put(tmp_path, "new", make_report())
    os.utime(new, (0, 0))  # a copy, whose own time means nothing
    assert standing_of(tmp_path, now=NOW).verdict is Verdict.CLEAN
    new.write_text(new.read_text().replace("clean", "corrupt"))
    assert standing_of(tmp_path, now=NOW).verdict.code == 3  # the newest is damaged: the older one is not taken for it
    new.unlink()
    assert standing_of(tmp_path, now=NOW).file == str(old)


@pytest.mark.parametrize("how", ["cut", "emptied", "no time", "folder", "link to nothing", "pipe", "gone", "bomb"])
def test_a_damaged_result_does_not_bring_an_older_one_back(how: str, tmp_path: Path) -> None:
    put(tmp_path, "old", make_report())
    new = put(tmp_path, "new", make_report(findings=[make_finding()], created="2026-01-06T00:00:00+00:00"))
    text = new.read_text()
    (new.parent / "events.jsonl").write_text("{}\n")
    if how not in ("cut", "emptied"):
        new.unlink()
    if how == "folder":
        new.mkdir()
    elif how == "link to nothing":
        new.symlink_to(tmp_path / "nowhere")
    elif how == "pipe":
        os.mkfifo(new)
    elif how != "gone":
        changed = {"cut": text[: len(text) // 2], "emptied": "", "bomb": "[" * 200_000}
        new.write_text(changed.get(how, text.replace('"ended"', '"over"')))
    assert standing_of(tmp_path).verdict.code == 3
    assert standing_of(new.parent).verdict.code == 3


@pytest.mark.parametrize(
    ("hours", "max_age", "code"),
    [(1, None, 0), (1, 3600.0, 0), (2, 3600.0, 3), (10_000, None, 0), (-1, None, 3), (0, None, 0)],
)
def test_age(hours: float, max_age: float | None, code: int, tmp_path: Path) -> None:
    put(tmp_path, "one", make_report())
    ended = datetime.datetime.fromisoformat(make_report().ended)
    found = standing_of(tmp_path, max_age, now=ended + datetime.timedelta(hours=hours))
    assert found.verdict.code == code
    assert code == 0 or "run sdc burnin again" in found.reason


@pytest.mark.parametrize(
    ("seconds", "said"), [(2, "2 s"), (119, "119 s"), (150, "2 min"), (7200, "2 h"), (1e6, "278 h")]
)
def test_how_old_it_is(seconds: float, said: str, tmp_path: Path) -> None:
    put(tmp_path, "one", make_report())
    ended = datetime.datetime.fromisoformat(make_report().ended)
    found = standing_of(tmp_path, 1.0, now=ended + datetime.timedelta(seconds=seconds))
    assert found.reason == f"the last result is {said} old (PASS); run sdc burnin again"


def test_a_simulation_says_something_only_where_it_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, "one", make_report(simulated=True, findings=[make_finding()]))
    assert standing_of(tmp_path, now=NOW).verdict.code == 3
    named = standing_of(path.parent, now=NOW)
    assert (named.verdict, named.simulated) == (Verdict.CORRUPT, True)


def test_nothing_and_what_cannot_be_read(tmp_path: Path) -> None:
    assert standing_of(tmp_path).verdict.code == 3
    assert standing_of(tmp_path / "nowhere").verdict.code == 3
    (tmp_path / "result.json").write_bytes(b"\x00\xff")
    assert standing_of(tmp_path).verdict.code == 3
    put(tmp_path, "one", make_report(ended="yesterday"))
    assert standing_of(tmp_path / "one").verdict.code == 3


def test_it_takes_neither_jax_nor_numpy(tmp_path: Path) -> None:
    """A health check asks it every minute."""
    path = put(tmp_path, "one", make_report())
    code = (
        "import sys\nfrom sdc.tools.cli import run\n"
        f"assert run(['verdict', {str(path)!r}]) == 0\n"
        "assert not {'jax', 'numpy', 'sdc.records.determinism'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS  made for tests")
