"""Runs of several processes that lose each other or are not comparable: the survivors end with a message."""

import time
from pathlib import Path

import pytest

from sdc.records import Record, read_record
from sdc.tools import progress
from sdc.tools.runtime import Onward
from tests.tools.command import several, start

TWIN = ("twin", "--config", "mini", "--devices", 4, "--model", 2, "--steps", 5)


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
    onward.resumable = False
    for file in ("pair.json", "1-step/manifest.json"):  # of a pair
        folder = tmp_path / file.replace("/", "-")
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()
        onward.folder = folder
        assert onward.how() == f"The record is in {folder}"


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
