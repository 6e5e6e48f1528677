"""Where a host stands by one result: what is missing, old, damaged or simulated is never a PASS."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdc.burnin.results import BurninResult
from sdc.schema import Host, identify
from sdc.standing.assessment import standing_of
from sdc.verdict import Verdict
from tests.reports import DAY, make_finding, make_report, put_report

NOW = datetime.datetime.fromisoformat(DAY) + datetime.timedelta(hours=1)


def put(folder: Path, name: str, report: BurninResult) -> Path:
    return put_report(folder, report, name)


def test_the_file_and_its_folder(tmp_path: Path) -> None:
    path = put(tmp_path, "one", make_report(findings=[make_finding()]))
    for place in (path, path.parent):
        found = standing_of(place, any_host=True, now=NOW)
        assert (found.verdict, found.file) == (Verdict.CORRUPT, str(path))
        assert found.reason.startswith("host host-0, device 0 (serial SN-host-0-0), matrix/float32/64x64x64/normal: ")
    path.rename(tmp_path / "renamed.json")
    assert standing_of(tmp_path / "renamed.json", any_host=True, now=NOW).verdict is Verdict.CORRUPT


def test_one_result_is_asked_for_and_never_the_newest_of_several(tmp_path: Path) -> None:
    """The newest may be a PASS that follows a FAIL; which one counts is for the ledger."""
    put(tmp_path, "old", make_report(findings=[make_finding()]))
    put(tmp_path, "new", make_report())
    found = standing_of(tmp_path, any_host=True, now=NOW)
    assert (found.verdict.code, "give the folder of one" in found.reason) == (3, True)
    for name in ("result.json", "pair.json"):
        (tmp_path / name).write_text("{}")
    found = standing_of(tmp_path, any_host=True, now=NOW)
    assert (found.verdict.code, "holds result.json and pair.json" in found.reason) == (3, True)


def test_a_result_of_another_host_decides_nothing(tmp_path: Path) -> None:
    """Hosts that were installed from one image have one identity, but not one name."""
    me = identify()
    path = put(tmp_path, "one", make_report())
    assert "is a result of host-0, not of this host" in standing_of(path, now=NOW).reason
    for host, code in (
        (Host(name=me.name, machine=me.machine), 0),
        (Host(name="another", machine=me.machine, boot=me.boot), 0),
        (Host(name="another", machine=me.machine), 3),
        (Host(name=me.name, machine="another"), 3),
    ):
        result = make_report(host=host.name, machine=host.machine or "none")
        result.host = host
        place = put(tmp_path, f"{host.name} {host.machine} {host.boot}", result)
        assert standing_of(place, now=NOW).verdict.code == code, host


@pytest.mark.parametrize("how", ["cut", "emptied", "no time", "folder", "link to nothing", "pipe", "gone", "bomb"])
def test_a_damaged_result_is_no_pass(how: str, tmp_path: Path) -> None:
    path = put(tmp_path, "one", make_report())
    text = path.read_text()
    if how not in ("cut", "emptied"):
        path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "link to nothing":
        path.symlink_to(tmp_path / "nowhere")
    elif how == "pipe":
        os.mkfifo(path)
    elif how != "gone":
        changed = {"cut": text[: len(text) // 2], "emptied": "", "bomb": "[" * 200_000}
        path.write_text(changed.get(how, text.replace('"ended"', '"over"')))
    assert standing_of(path.parent, any_host=True, now=NOW).verdict.code == 3


@pytest.mark.parametrize(
    ("hours", "max_age", "code"),
    [(1, None, 0), (1, 3600.0, 0), (2, 3600.0, 3), (10_000, None, 0), (-1, None, 3), (0, None, 0)],
)
def test_age(hours: float, max_age: float | None, code: int, tmp_path: Path) -> None:
    ended = datetime.datetime.fromisoformat(make_report().ended)
    for findings, expected in (([], code), ([make_finding()], 1)):  # a failure has no end
        path = put(tmp_path, f"{expected}", make_report(findings=findings))
        found = standing_of(path, max_age, any_host=True, now=ended + datetime.timedelta(hours=hours))
        assert found.verdict.code == expected
        assert expected in (0, 1) or "run sdc burnin again" in found.reason


@pytest.mark.parametrize(
    ("seconds", "said"), [(2, "2 s"), (119, "119 s"), (150, "2 min"), (7200, "2 h"), (1e6, "278 h")]
)
def test_how_old_it_is(seconds: float, said: str, tmp_path: Path) -> None:
    path = put(tmp_path, "one", make_report())
    then = datetime.datetime.fromisoformat(make_report().ended) + datetime.timedelta(seconds=seconds)
    found = standing_of(path, 1.0, any_host=True, now=then)
    assert found.reason == f"the result is {said} old (PASS); run sdc burnin again"
    found = standing_of(path, 2e6, any_host=True, now=then)
    assert found.reason.startswith(
        f"serial SN-host-0-0, serial SN-host-0-1 of host-0 passed at level quick {said} ago (limit 556 h): "
    )


def test_a_simulation_passes_nothing(tmp_path: Path) -> None:
    for findings, word in (([], Verdict.INCONCLUSIVE), ([make_finding()], Verdict.CORRUPT)):
        path = put(tmp_path, word, make_report(simulated=True, findings=findings))
        found = standing_of(path, any_host=True, now=NOW)
        assert (found.verdict, found.simulated) == (word, True)


def test_nothing_and_what_cannot_be_read(tmp_path: Path) -> None:
    assert standing_of(tmp_path).verdict.code == 3
    assert standing_of(tmp_path / "nowhere").verdict.code == 3
    assert "cannot be read (File name too long)" in standing_of(tmp_path / ("x" * 5000)).reason
    (tmp_path / "result.json").write_bytes(b"\x00\xff")
    assert standing_of(tmp_path).verdict.code == 3
    put(tmp_path, "one", make_report(ended="yesterday"))
    assert standing_of(tmp_path / "one", any_host=True).verdict.code == 3


def test_it_takes_neither_jax_nor_numpy(tmp_path: Path) -> None:
    """A health check asks it every minute."""
    path = put(tmp_path, "one", make_report())
    code = (
        "import sys\nfrom sdc.tools.cli import run\n"
        f"assert run(['verdict', '--any-host', {str(path)!r}]) == 0\n"
        "assert not {'jax', 'numpy', 'sdc.records.determinism'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS  serial SN-host-0-0, ")
