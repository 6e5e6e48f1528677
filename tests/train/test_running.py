"""Runs with a running checkpoint: nothing changes until something is lost, and what is lost comes back."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from sdc.record import read_manifest
from sdc.settings import SettingError
from sdc.train import Training
from sdc.train.running import Running, saved_step

from .runs import WORKLOAD, execute, lines

STEPS = 12
PLAIN = Training(workload=WORKLOAD, steps=STEPS, checkpoint_every=8, data=2)
SCAR = dataclasses.replace(PLAIN, running=Running(fraction=0.25))


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


def test_a_run_goes_on_from_its_running_checkpoint(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Stopped after a step that was saved, and without the full checkpoint that an orderly end leaves."""
    folder, _ = plain
    half = dataclasses.replace(SCAR, running=Running(fraction=1.0), checkpoint_every=6, folder=tmp_path / "run")
    from sdc.train import run

    from .runs import loaded

    done: list[int] = []
    run(half, loaded=loaded(half.workload), on_step=lambda row: done.append(row["step"]), stop=lambda: len(done) == 5)
    assert saved_step(tmp_path / "run") == 6
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    execute(dataclasses.replace(half, resume=True))
    # Each block is of step 6, as all were saved then: the very state.
    assert lines(tmp_path / "run") == lines(folder)


@pytest.mark.parametrize(
    ("running", "message"),
    [
        (Running(fraction=0.0), "checkpoint_fraction.*expected more than 0 and at most 1"),
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
