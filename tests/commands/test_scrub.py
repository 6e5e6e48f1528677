"""`sdc checkpoint scrub` beside a run that saves and deletes checkpoints, and after it."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.tools.command import Started, lines, sdc, start, wait

TRAIN = ("train", "--config", "mini", "--checkpoint-every", 1)


def output(process: Started) -> str:
    return process.out.read_text() if process.out.exists() else ""


def scrubbed(process: Started) -> list[str]:
    """Returns the results so far."""
    said = [line.split() for line in output(process).splitlines()]
    return [words[2] for words in said if words[0] == "step"]


def test_beside_a_run(tmp_path: Path) -> None:
    """The run saves a checkpoint after each step and deletes one, and is not disturbed; a checkpoint that is not there
    any more is gone, not damaged. A signal ends the scrub."""
    run = tmp_path / "run"
    scrub = start("checkpoint", "scrub", run / "checkpoints", "--every", "0.1s", "--rate", 1e9)
    wait(scrub, lambda: "is not a folder" in output(scrub))
    train = start(*TRAIN, "--steps", 60, "--run", run)
    wait(scrub, lambda: train.ended)
    assert train.end()[0] == 0
    done = len(scrubbed(scrub))
    wait(scrub, lambda: len(scrubbed(scrub)) >= done + 4)
    scrub.send(signal.SIGTERM)
    code, out, err = scrub.end()
    assert code == 0, err
    assert "Traceback" not in err
    assert out.splitlines()[-1] == "CLEAN  2 clean"
    assert set(scrubbed(scrub)) <= {"clean", "gone", "unreadable"}
    assert len(lines(run)) == 60


def test_damage_and_repair(tmp_path: Path) -> None:
    """A run resumes from the newest checkpoint that is sound, and names the other one."""
    run = tmp_path / "run"
    folder = run / "checkpoints"
    assert sdc(*TRAIN, "--steps", 3, "--run", run)[0] == 0
    shutil.copytree(folder / "3", tmp_path / "sound")
    shutil.rmtree(folder / "3" / "state")
    shutil.copytree(folder / "2" / "state", folder / "3" / "state")  # readable, but of another step
    code, out, err = sdc("checkpoint", "scrub", folder)
    assert code == 1, err
    assert "step 3: damaged (state/" in out
    assert "CORRUPT  1 clean, 1 damaged" in out
    shutil.copytree(run, tmp_path / "other")
    code, _, err = sdc(*TRAIN, "--steps", 4, "--run", run, "--resume")
    assert code == 0, err
    assert f"checkpoint {folder / '3'} is damaged" in err
    assert json.loads((run / "manifest.json").read_text())["resumed_at"] == [2]
    assert sdc("checkpoint", "scrub", folder)[0] == 0  # step 3 was repeated and saved again

    other = tmp_path / "other" / "checkpoints"
    shutil.rmtree(other / "3")
    shutil.copytree(tmp_path / "sound", other / "3")
    code, out, _ = sdc("checkpoint", "scrub", other)
    assert code == 0
    assert "step 3: repaired" in out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_slow_scrub(tmp_path: Path, how: signal.Signals) -> None:
    run = tmp_path / "run"
    assert sdc(*TRAIN, "--steps", 2, "--run", run)[0] == 0
    scrub = start("checkpoint", "scrub", run / "checkpoints", "--rate", 1000)
    wait(scrub, lambda: "scrubbing" in output(scrub))
    scrub.send(how)
    code, out, _ = scrub.end()
    assert code == 3
    assert out.splitlines()[-1] == "INCONCLUSIVE  no checkpoints; interrupted"
