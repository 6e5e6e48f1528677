"""`sdc burnin`: every verdict as exit code, JSON, JUnit and metrics; early ends; short tests that add up."""

import contextlib
import errno
import json
import os
import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest

from sdc import records
from sdc.burnin.judgement import BURN_IN, judge
from sdc.burnin.pair import PAIR, POOL
from sdc.burnin.results import EVENTS, RESULT, BurninResult, BurninSettings
from sdc.burnin.session import Session
from sdc.schema import PAGE
from sdc.standing import Ledger, standing_here
from sdc.tools import cli, runtime
from sdc.tools.commands import burnin
from sdc.tools.commands.burnin import LedgerAccount
from sdc.verdict import Verdict
from tests.reports import make_finding, make_report
from tests.tools.command import Started

FAST = "--only transfers --rounds 1"


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the started devices, and a lock folder of its own, so that other burn-ins on this machine do not matter."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(records, "prepare", lambda **_: None)


def test_a_folder_is_no_golden_register(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["burnin", "--golden", str(tmp_path), "--run", str(tmp_path / "run")]) == 2
    assert f"--golden {tmp_path}: is a folder, not the file of a golden register" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []  # the error comes before anything runs


def test_who_reads_a_burn_in_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (
        (RESULT, "it holds a burn-in, which sdc verdict {} and sdc fleet summarize {} read"),
        (PAIR, "it holds the run of a pair of hosts, which sdc verdict {} and sdc pair --resolve {} read"),
        (POOL, "it holds the run of a pool of hosts, which sdc verdict {} and sdc pair --resolve {} read"),
    ):
        folder = tmp_path / name.removesuffix(".json")
        folder.mkdir()
        (folder / name).touch()
        for command in (["diff", folder, folder], *([["report", folder]] if name != RESULT else ())):
            assert cli.run(list(map(str, command))) == 2
            assert words.format(folder, folder) in capsys.readouterr().err


def test_short_tests_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDC_LEDGER", str(tmp_path / "ledger.sqlite"))
    words = f"burnin --only transfers --devices 4 --run {tmp_path / 'run'} --rounds"
    assert cli.run([*words.split(), "1"]) == 0
    first = BURN_IN.read(tmp_path / "run")
    assert cli.run([*words.split(), "3", "--resume"]) == 0
    ran = BURN_IN.read(tmp_path / "run")
    time.sleep(1.1)  # times are whole seconds
    assert cli.run([*words.split(), "3", "--resume"]) == 0
    both = BURN_IN.read(tmp_path / "run")
    assert (both.ended, both.verdict) == (ran.ended, "clean")  # nothing ran
    assert (both.id, both.created) == (first.id, first.created)
    assert [row.runs for row in both.workloads] == [3] * len(first.workloads)
    capsys.readouterr()
    assert cli.run([*words.split(), "4", "--resume", "--fault", "bitflip,rate=1e-5"]) == 2
    assert "simulated faults were none" in capsys.readouterr().err
    assert cli.run([*words.split(), "4"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert BURN_IN.read(tmp_path / "run") == both
    assert cli.run(["verdict"]) == 0  # what was refused is not a burn-in without a result
    capsys.readouterr()
    (tmp_path / "run" / RESULT).write_text("{}")
    assert cli.run([*words.split(), "4", "--resume"]) == 2
    assert "is not a result of sdc burnin" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()  # the disk was full
    assert cli.run([*words.replace("/run", "/empty").split(), "1", "--resume"]) == 0


@pytest.mark.parametrize("error", [errno.EINTR, errno.EIO])
def test_a_broken_log_ends_it_in_one_line_and_it_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """From the first event on: a folder without a result could be neither started in again nor resumed."""
    words = ["burnin", *FAST.split(), "--devices", "2", "--run", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(Session, "_log", lambda *_: (_ for _ in ()).throw(OSError(error, os.strerror(error))))
        assert cli.run(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"sdc: error: cannot write to {tmp_path / 'run'} ({os.strerror(error)}); make room there")
    assert cli.run([*words, "--resume"]) == 0
    (tmp_path / "run" / RESULT).rename(tmp_path / "run" / f".{RESULT}.a1b2c3d4")  # killed before the first result
    for name in (EVENTS, PAGE):
        (tmp_path / "run" / name).unlink()
    assert cli.run(words) == 0


def test_the_ledger_decides_until_a_failure_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pass and a rehearsal add to it, a failure stays, a burn-in that was killed leaves it inconclusive."""
    monkeypatch.setenv("SDC_LEDGER", str(tmp_path / "ledger.sqlite"))

    def said(*words: str) -> tuple[int, str]:
        code = cli.run(list(words))
        return code, "".join(capsys.readouterr())

    assert said("verdict")[0] == 3
    words = ["burnin", *FAST.split(), "--devices", "2", "--run"]
    assert cli.run([*words, str(tmp_path / "first")]) == 0
    assert cli.run([*words, str(tmp_path / "second"), "--fault", "bitflip,rate=1e-2"]) == 1
    capsys.readouterr()
    code, line = said("verdict", "--max-age", "1h")
    assert (code, line[:6]) == (0, "PASS  ")
    assert "passed at level quick, only transfers" in line
    assert str(tmp_path / "first" / RESULT) in line

    report = BURN_IN.read(tmp_path / "first")
    device = report.devices[1]
    finding = make_finding(report.workloads[0].workload, devices=(device.index,))
    report.workloads[1].differences = 1
    with Ledger(tmp_path / "ledger.sqlite", write=True) as ledger:
        ledger.add(judge(msgspec.structs.replace(report, findings=[finding])), begun="")
    assert cli.run([*words, str(tmp_path / "third")]) == 0
    assert "sdc verdict still reports FAIL: " in capsys.readouterr().err
    code, line = said("verdict")
    assert (code, line[:6]) == (1, "FAIL  ")
    name = line[6 : line.index(": ")]
    assert said("verdict", "--format", "nagios")[0] == 2
    assert said("fleet", "acknowledge", name, "--reason", " ", "--by", "me")[0] == 2
    assert said("fleet", "acknowledge", "serial 7", "--reason", "none", "--by", "me")[0] == 2
    code, line = said("fleet", "acknowledge", f"{name}, {name}", "--reason", "reseated", "--by", "me")
    assert (code, line.startswith("recorded; this host is now INCONCLUSIVE: ")) == (0, True)
    assert "is no file, expected a ledger" in said("verdict", "--ledger", str(tmp_path))[1]
    assert "in all families, only in transfers" in said("verdict")[1]
    code, text = said("fleet", "ledger", "--json")
    entries = json.loads(text)["entries"]
    assert [entry["kind"] for entry in entries] == [
        "begun", "result", "result", "begun", "result", "result", "result", "result", "begun", "result", "result",
        "acknowledged",
    ]  # fmt: skip
    assert [entry["number"] for entry in entries if entry.get("simulated")] == [4, 5, 6]
    assert "reseated" in said("fleet", "ledger")[1]

    with monkeypatch.context() as patch:
        patch.setattr(burnin, "_burn", lambda *_: 1 / 0)  # as if killed
        assert cli.run([*words, str(tmp_path / "fourth")]) == 3
    capsys.readouterr()
    code, line = said("verdict")
    assert (code, "the burn-in that began at" in line) == (3, True)
    (tmp_path / "ledger.sqlite").write_bytes(b"x" * 9000)
    assert said("fleet", "ledger")[0] == said("verdict")[0] == 3
    assert cli.run([*words, str(tmp_path / "fifth")]) == 3
    assert "the ledger could not announce this burn-in" in capsys.readouterr().out
    (tmp_path / "ledger.sqlite").unlink()
    assert cli.run([*words, str(tmp_path / "fifth"), "--resume"]) == 3  # nothing is left to run
    assert said("verdict")[0] == said("verdict", str(tmp_path / "fifth"))[0] == 3
    assert cli.run([*words, str(tmp_path / "sixth")]) == 0
    assert said("verdict")[0] == 0


def test_ended_by_a_signal_it_says_what_is_known(tmp_path: Path) -> None:
    """While it runs, no other burn-in may test its devices; afterwards it can be resumed."""
    words = ("burnin", "--only", "transfers", "--devices", "2", "--run", str(tmp_path / "run"))
    started = Started((*words, "--minutes", "5"), None)
    until = time.monotonic() + 60
    while not (tmp_path / "run" / RESULT).exists():
        assert time.monotonic() < until
        assert not started.ended, started.end()
        time.sleep(0.1)
    under_way = BURN_IN.read(tmp_path / "run")
    assert (under_way.verdict.acceptance, under_way.stopped) == ("INCONCLUSIVE", "under way")
    code, _, err = Started(("burnin", "--only", "transfers", "--devices", "2"), None).end()
    assert code == 2
    assert "is being tested by process" in err

    asked = time.monotonic()
    started.send(signal.SIGTERM)
    code, out, _ = started.end()
    assert time.monotonic() - asked < 5
    assert code == 3
    assert "stopped by SIGTERM" in out
    ended = BURN_IN.read(tmp_path / "run")
    assert ended.stopped == "SIGTERM"

    code, out, err = Started((*words, "--rounds", str(ended.rounds + 1), "--resume"), None).end()
    assert code == 0, err
    assert BURN_IN.read(tmp_path / "run").rounds == ended.rounds + 1


def test_a_ledger_that_is_in_use_gets_the_failure_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdc.standing.ledger.PATIENCE", 0.01)
    path = tmp_path / "ledger.sqlite"
    broken = make_report(machine=records.identify().machine, findings=[make_finding()])
    account = LedgerAccount(path)
    assert account.begin("quick", simulated=False, file=tmp_path / RESULT) == []
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        account.add(broken, None, ended=False)
        assert "another process is using it; try again" in (account.problem or "")
        late = LedgerAccount(path)
        assert len(late.begin("quick", simulated=False, file=tmp_path / RESULT)) == 1
        late.add(broken, None)
        assert late.problem is not None
    for each in (account, late):
        each.add(broken, None)
        assert each.problem is None
    assert standing_here(path).verdict is Verdict.CORRUPT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_has_room_for_a_failure(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], check=False).returncode:
        pytest.skip("this system allows no mounts")
    try:
        account = LedgerAccount(disk / "ledger.sqlite")
        assert account.begin("quick", simulated=False, file=tmp_path / RESULT) == []

        def fill() -> None:
            with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(512))

        fill()
        account.add(make_report(machine=records.identify().machine, findings=[make_finding()]), None)
        assert account.problem is None
        assert standing_here(disk / "ledger.sqlite").verdict is Verdict.CORRUPT
        fill()
        late = LedgerAccount(disk / "other.sqlite")
        assert "free some space" in str(late.begin("quick", simulated=False, file=tmp_path / RESULT))
        assert not (disk / "other.sqlite").exists()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize(
    ("fault", "room", "code"),
    [((), 2_000, 2), (("--fault", "bitflip,rate=1e-5"), 2_000, 2), (("--fault", "bitflip,rate=1e-5"), 6_000, 1)],
)
def test_on_a_full_disk_it_says_what_is_known(fault: tuple[str, ...], room: int, code: int, tmp_path: Path) -> None:
    """A limit on the size of files simulates it. Findings are not lost, and nothing passes."""
    words = ("burnin", *FAST.split(), "--devices", "2", "--run", str(tmp_path / "run"), *fault)
    got, out, err = Started(words, room).end()
    assert got == code, err
    assert f"cannot write to {tmp_path / 'run'} (File too large)" in err
    assert "Traceback" not in err
    assert ("FAIL" in out, "device 1, transfers/" in out, "SIMULATION" in out) == (code == 1, code == 1, code == 1)
    assert "PASS" not in out
    assert cli.run(["verdict", str(tmp_path / "run")]) == 3


def test_a_difference_is_saved_at_once(tmp_path: Path) -> None:
    session = Session(BurninSettings(level="quick"), tmp_path)
    session._result, session._written = make_report(findings=[make_finding()]), time.monotonic()
    session._handle({"event": "difference"})
    assert BURN_IN.read(tmp_path).verdict is Verdict.CORRUPT


@pytest.mark.parametrize("full", [EVENTS, RESULT])
def test_a_difference_is_reported_if_a_file_cannot_be_written(full: str, tmp_path: Path) -> None:
    """As on a full disk: neither file depends on the other one, and the ledger on neither."""
    (tmp_path / full).mkdir()
    reported: list[BurninResult] = []
    session = Session(BurninSettings(level="quick"), tmp_path, on_result=reported.append)
    session._result, session._written = make_report(findings=[make_finding()]), time.monotonic()
    session._handle({"event": "difference"})
    assert [result.verdict for result in reported] == [Verdict.CORRUPT]
    assert (tmp_path / (EVENTS if full == RESULT else RESULT)).is_file()


def test_a_finding_is_never_lost(tmp_path: Path) -> None:
    """Neither by a signal during the burn-in, nor by one before the devices of the resumed burn-in have started, nor if
    these devices cannot be used."""
    fault, run = ("--fault", "bitflip,rate=1e-5"), ("--run", str(tmp_path / "a"))
    words = ("burnin", "--only", "transfers", "--devices", "2", *fault, *run)
    started = Started((*words, "--minutes", "5"), None)
    until = time.monotonic() + 60
    while not ((tmp_path / "a" / RESULT).exists() and BURN_IN.read(tmp_path / "a").findings):
        assert time.monotonic() < until
        time.sleep(0.1)
    asked = time.monotonic()
    started.send(signal.SIGTERM)
    code, out, _ = started.end()
    assert time.monotonic() - asked < 5
    assert code == 1
    assert "FAIL" in out
    before = BURN_IN.read(tmp_path / "a")
    for end in (Session.known, Session.without):
        again = Session(before.settings, tmp_path / "a", resume=True)
        end(again, "a driver that does not answer")
        found = BURN_IN.read(tmp_path / "a")
        assert (found.verdict, found.findings, found.workloads) == ("corrupt", before.findings, before.workloads)
        assert any("a driver that does not answer" in sentence for sentence in found.sentences)


def test_a_finding_decides_the_exit_code_even_if_a_device_does_not_end_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["burnin", *FAST.split(), "--devices", "2", "--fault", "bitflip,rate=1e-2", "--run", str(tmp_path / "a")]
    assert cli.run(words) == 1
    found = BURN_IN.read(tmp_path / "a")
    codes: list[int] = []
    ended = threading.Event()

    def wait(*_: object) -> BurninResult:
        assert runtime._gentle is not None
        runtime._gentle("SIGTERM")
        assert ended.wait(20)
        return found

    monkeypatch.setattr(runtime, "_gentle", None)
    monkeypatch.setattr(burnin, "_burn", wait)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    cli.run([*words, "--resume"])
    assert codes == [1]


@pytest.mark.parametrize("how", ["pipe", "folder", "link"])
def test_a_log_that_is_no_file_is_no_hang(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["burnin", *FAST.split(), "--devices", "2", "--run", str(tmp_path / "run")]
    assert cli.run(words) == 0
    log = tmp_path / "run" / EVENTS
    log.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: os.symlink("/dev/zero", path)}[how](log)
    capsys.readouterr()
    assert cli.run([*words, "--resume"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{EVENTS} is not a file; delete it")


def test_killed_it_leaves_what_was_known(tmp_path: Path) -> None:
    words = ("burnin", "--only", "transfers", "--devices", "2", "--run", str(tmp_path / "run"))
    started = Started((*words, "--minutes", "5"), None)
    while not (tmp_path / "run" / RESULT).exists() and not started.ended:
        time.sleep(0.05)
    started.kill()
    assert BURN_IN.read(tmp_path / "run").verdict.acceptance == "INCONCLUSIVE"
    assert cli.run(["verdict", str(tmp_path / "run")]) == 3
