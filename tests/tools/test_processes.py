"""Runs of several processes that lose each other or are not comparable: the survivors end with a message."""

import signal
import time
from pathlib import Path

import pytest

from sdc.records import Record, read_record
from sdc.tools import progress
from sdc.tools.runtime import Onward
from sdc.train import Checkpoints
from tests.tools.command import sdc, several, start, wait

TWIN = ("twin", "--config", "mini", "--devices", 4, "--model", 2, "--steps", 5)


def messages(err: str) -> list[str]:
    """Returns the last messages of a command, without progress, waiting, and the runtime's log.

    The parent of all commands has set a level of that log that a command would not choose.
    """
    lines = [line for line in err.splitlines() if not line.startswith(("step ", "injection ", "waiting "))]
    return [line for line in lines if "coordination_service_agent.cc" not in line]


@pytest.mark.parametrize(("victim", "how"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGKILL)])
def test_a_lost_peer_ends_the_other(victim: int, how: signal.Signals, tmp_path: Path) -> None:
    processes = several(2, *TWIN[:-1], 100_000, "--run", tmp_path / "run", "--timeout", 10)
    steps = tmp_path / "run" / "steps.jsonl"
    wait(processes[victim], lambda: steps.is_file() and steps.stat().st_size > 0)
    processes[victim].send(how)
    sent = time.monotonic()
    code, _, err = processes[1 - victim].end()
    assert time.monotonic() - sent < 15
    processes[victim].kill()
    assert code == 3, err[-2000:]
    (line,) = messages(err)
    assert line.startswith(f"sdc: inconclusive: process {victim} was lost")
    assert f"The record is in {tmp_path / 'run'}; continue with: sdc twin " in line
    assert line.endswith(f"--process {1 - victim} --resume")


def test_a_signal_to_one_process_ends_all_after_the_same_step(tmp_path: Path) -> None:
    processes = several(2, *TWIN[:-1], 100_000, "--run", tmp_path / "run")
    steps = tmp_path / "run" / "steps.jsonl"
    wait(processes[0], lambda: steps.is_file() and steps.stat().st_size > 0)
    processes[1].send(signal.SIGTERM)
    for process in processes:
        code, _, err = process.end()
        assert code == 3, err[-2000:]
        (line,) = messages(err)
        assert line.startswith("sdc: inconclusive: interrupted by SIGTERM. The record is in ")
    record = read_record(tmp_path / "run", "twin")
    assert not record.ended
    assert Checkpoints(tmp_path / "run" / "checkpoints", every=1).steps == [len(record.lines)]
    assert not (tmp_path / "run" / "lock.json").exists()


@pytest.mark.parametrize(
    ("command", "how"),
    [
        (TWIN, signal.SIGTERM),
        (("campaign", "--config", "mini", "--injections", 9, "--where", "probes"), signal.SIGINT),
    ],
)
def test_a_signal_while_compiling_is_not_lost(command: tuple[object, ...], how: signal.Signals, tmp_path: Path) -> None:
    process = start(*command, "--run", tmp_path / "run")
    wait(process, (tmp_path / "run" / "manifest.json").is_file)
    process.send(how)
    code, _, err = process.end()
    assert code == 3, err[-2000:]
    (line,) = messages(err)
    assert line.startswith(f"sdc: inconclusive: interrupted by {how.name}")
    assert line.endswith("--resume")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "lock.json").exists()


def test_a_peer_that_does_not_come(tmp_path: Path) -> None:
    flags = ("--coordinator", "127.0.0.1:9", "--processes", 2, "--process", 1, "--timeout", 3)
    code, _, err = sdc(*TWIN, *flags, "--run", tmp_path / "run")
    assert code == 3
    assert "a peer did not connect within 3 s at 127.0.0.1:9 (127.0.0.1 leads back to this host; give" in err
    assert not (tmp_path / "run").exists()


def test_a_coordinator_whose_name_has_no_address_yet_is_awaited(tmp_path: Path) -> None:
    """This happens while a cluster starts; the reason for waiting is printed at once."""
    flags = ("--coordinator", "gpu-9.invalid:4321", "--processes", 2, "--process", 1, "--timeout", 3)
    code, _, err = sdc(*TWIN, *flags, "--run", tmp_path / "run")
    assert code == 3
    first, last = err.splitlines()
    assert first.startswith("waiting for the other processes at gpu-9.invalid:4321 (gpu-9.invalid has no address on")
    assert last.startswith(
        "sdc: inconclusive: a peer did not connect within 3 s at gpu-9.invalid:4321 (gpu-9.invalid has"
    )
    assert not (tmp_path / "run").exists()


def test_processes_that_are_not_comparable(tmp_path: Path) -> None:
    processes = several(2, *TWIN, "--run", tmp_path / "run")
    processes[1].kill()
    processes[1] = start(*processes[1].arguments, "--dtype", "bfloat16")
    for process in processes:
        code, _, err = process.end()
        assert code == 3, err[-2000:]
        assert "config.model.dtype: process 0 has float32, process 1 has bfloat16" in err
        assert "program.step" in err
    assert not (tmp_path / "run").exists()


def test_processes_that_are_about_to_do_different_things(tmp_path: Path) -> None:
    """One has --resume, the other one does not, and the run folder exists."""
    with Record.create(tmp_path / "run", {}, kind="twin") as record:
        record.line({"step": 0})
    processes = several(2, *TWIN, "--run", tmp_path / "run")
    processes[1].kill()
    processes[1] = start(*processes[1].arguments, "--resume")
    for process in processes:
        code, _, err = process.end()
        assert code == 3, err[-2000:]
        assert "different things (resume: process 0 has False, process 1 has True" in err
    assert [row["step"] for row in read_record(tmp_path / "run").lines] == [0]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["twin", "--steps", "9"], "sdc twin --steps 9 --run {folder} --resume"),
        (["twin", "--run=x y", "--resume"], "sdc twin '--run=x y' --resume"),
        (["trace", "runs/golden", "--where", "probes"], "sdc trace runs/golden --where probes --resume"),
    ],
)
def test_how_to_go_on(words: list[str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["sdc", *words])
    onward = Onward(tmp_path)
    assert onward.how() == "Nothing is on record; run the command again"
    Record.create(tmp_path, {}, kind="twin").close()
    assert onward.how() == f"The record is in {tmp_path}; continue with: {command.format(folder=tmp_path)}"


def test_a_pipe_gets_a_plain_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.05)
    with progress.Progress(20, show=True) as bar:
        time.sleep(0.2)
        bar.update({"step": 4, "loss": [2.5, 2.5], "state": {"mismatched": 3}})
        time.sleep(0.2)
        costs = [{"fraction": 0.5, "steps": 6.25}, {"fraction": 1.0, "steps": 12.5}]
        bar.update({"step": 5, "loss": [2.5], "outlook": {"losses": costs}})
        bar.update({"step": 6, "loss": [2.5], "outlook": {"losses": []}})
        time.sleep(0.2)
    with progress.Progress(20, show=False):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 0 of 20  compiling  ")
    assert any(line.startswith("step 5 of 20  loss 2.5000  3 mismatches  ") for line in lines)
    assert lines[-1].startswith("step 7 of 20  loss 2.5000  half lost: 6.25 steps  ")
    assert len(lines) < 15


@pytest.mark.parametrize(
    ("minutes", "rounds", "shown"), [(None, 7, "burn-in 3 of 7  round 4  "), (2.0, None, "burn-in 0 of 120  round 4  ")]
)
def test_a_burn_in_counts_rounds_or_seconds(
    minutes: float | None, rounds: int | None, shown: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(progress, "EVERY", 0.05)
    with progress.BurninProgress(minutes, rounds) as bar:
        bar.update({"event": "round", "round": 3})
        bar.update({"event": "run", "workload": "memory/random/64"})
        time.sleep(0.2)
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{shown}memory/random/64  no difference  ")
