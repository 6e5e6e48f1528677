"""Runs with a running checkpoint: nothing changes until something is lost, and what is lost comes back."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from sdc.analysis import write_beside
from sdc.record import read_manifest
from sdc.settings import SettingError
from sdc.train import Training, run
from sdc.train.running import Running, saved_step

from .runs import WORKLOAD, execute, lines, loaded

STEPS = 12
PLAIN = Training(workload=WORKLOAD, steps=STEPS, checkpoint_every=8, data=2)
SCAR = dataclasses.replace(PLAIN, running=Running(fraction=0.25))


COPIES = "copies/sdc-copies-*/process-0"


def losing(text: str) -> Training:
    return dataclasses.replace(SCAR, running=Running(fraction=0.25, losses=[text]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    return folder, execute(dataclasses.replace(PLAIN, folder=folder))


def test_saving_changes_nothing(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, found = plain
    told = execute(dataclasses.replace(SCAR, folder=tmp_path / "run"))
    assert lines(tmp_path / "run") == lines(folder)
    assert told["state_digest"] == found["state_digest"]
    assert saved_step(tmp_path / "run") == STEPS
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [str(STEPS)]


def test_partial_recovery_perturbs_less_than_a_full_one(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The step before which nothing was lost is the same; what follows is not."""
    folder, _ = plain
    rows = {}
    for policy in ("partial", "full"):
        run = tmp_path / policy
        execute(dataclasses.replace(losing(f"shards,step=8,fraction=0.5,recover={policy}"), folder=run))
        after = lines(run)
        recovered = after[8].pop("recovered")
        assert after[:9] == lines(folder)[:9]
        assert after[9]["loss"] != lines(folder)[9]["loss"]
        rows[policy] = recovered
        assert read_manifest(run)["suspect"]["simulated"] is True
        assert "simulated" in (run / "report.html").read_text()
    assert rows["partial"]["lost"] == rows["full"]["lost"] >= 1
    assert 0 < rows["partial"]["perturbation"] < rows["full"]["perturbation"]
    assert rows["partial"]["read"] < rows["full"]["read"]
    assert 0 < rows["partial"]["behind"] <= 9
    beside = Path(write_beside(folder, tmp_path / "partial", more=[tmp_path / "full"])["report"]).read_text()
    for policy, told in rows.items():
        assert f"{told['lost']} of {told['blocks']} blocks after step 8, {policy} (simulated)" in beside


def stopped(running: Running, folder: Path) -> Training:
    """A run that ended early, after step 6, as if it had been killed: without a full checkpoint."""
    job = dataclasses.replace(PLAIN, running=running, checkpoint_every=6, folder=folder / "run")
    done: list[int] = []
    run(job, loaded=loaded(job.workload), on_step=lambda row: done.append(row["step"]), stop=lambda: len(done) == 7)
    shutil.rmtree(folder / "run" / "checkpoints")
    return job


def test_a_run_goes_on_from_its_running_checkpoint(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Stopped after a step that was saved, and without the full checkpoint that an orderly end leaves."""
    folder, _ = plain
    half = stopped(Running(fraction=1.0, local_copies=tmp_path / "copies"), tmp_path)
    assert saved_step(tmp_path / "run") == 6
    shutil.rmtree(tmp_path / "copies")
    execute(dataclasses.replace(half, resume=True))
    # Each block is of step 6, as all were saved then: the very state.
    rows = lines(tmp_path / "run")
    told = rows[6].pop("restarted")
    assert rows == lines(folder)
    assert (told["policy"], told["step"], told["steps_lost"], told["behind"]) == ("full", 6, 2, 0)
    assert told["lost"] == told["blocks"] > 0


def test_a_run_goes_on_from_its_own_copy(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Of one step, where the running checkpoint mixes several: to the same bits. It goes when the run is done."""
    folder, _ = plain
    job = stopped(Running(fraction=1 / 6, local_copies=tmp_path / "copies"), tmp_path)
    (place,) = tmp_path.glob(COPIES)
    assert [path.name for path in place.iterdir()] == ["6"]
    assert saved_step(tmp_path / "run") == 8  # later than the copy, and it goes back
    told: list[Any] = []
    again = dataclasses.replace(job, resume=True, checkpoint_every=99)
    run(again, loaded=loaded(job.workload), on_step=told.append, stop=lambda: True)
    assert (told[0]["step"], told[0]["restarted"]["steps_lost"]) == (6, 2)
    assert saved_step(tmp_path / "run") == 6
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    execute(dataclasses.replace(job, resume=True))
    rows = lines(tmp_path / "run")
    restarted = rows[6].pop("restarted")
    assert rows == lines(folder)
    assert (restarted["policy"], restarted["lost"], restarted["read"]) == ("partial", 0, 0)
    assert restarted["processes"][0]["own"]["bytes"] > 0
    assert not list((tmp_path / "copies").iterdir())


def test_a_damaged_copy_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = stopped(Running(fraction=1 / 6, local_copies=tmp_path / "copies"), tmp_path)
    (pieces,) = tmp_path.glob(f"{COPIES}/6/pieces")
    content = bytearray(pieces.read_bytes())
    content[len(content) // 2] ^= 4
    pieces.write_bytes(content)
    execute(dataclasses.replace(job, resume=True))
    assert "is not what it was on the device" in caplog.text
    restarted = lines(tmp_path / "run")[8]["restarted"]
    assert (restarted["policy"], restarted["step"], restarted["steps_lost"]) == ("full", 8, 0)
    assert restarted["behind"] > 0


@pytest.mark.parametrize(
    ("running", "message"),
    [
        (Running(fraction=0.0), "checkpoint_fraction.*expected more than 0 and at most 1"),
        (Running(local_copies=__file__), "local_copies.*is a file; expected a folder on this host"),
        (Running(losses=["shards,step=12"]), "the run has 12 steps, from 0"),
        (Running(losses=["shards,step=1,fraction=2"]), "fraction=2.0: expected more than 0"),
        (Running(losses=["shard,step=1"]), "shard"),
        (Running(losses=["shards,step=1,recover=all"]), "recover"),
    ],
)
def test_wrong_settings(running: Running, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        dataclasses.replace(PLAIN, running=running).check()
    assert isinstance(error.value, ValueError | SettingError)
