"""Runs with a running checkpoint: nothing changes until something is lost, and what is lost comes back."""

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from sdc.analysis import write_beside
from sdc.records import read_manifest, read_record
from sdc.settings import SettingError
from sdc.train import Checkpoints, Training, Workload, run
from sdc.train.keeper import Running, saved_step
from tests.train.runs import MINI, WORKLOAD, execute, lines, loaded

STEPS = 12
PLAIN = Training(workload=WORKLOAD, steps=STEPS, checkpoint_every=8, data=2)
SCAR = dataclasses.replace(PLAIN, running=Running(fraction=0.25))


COPIES = "copies/sdc-copies-*"


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
    assert Checkpoints(tmp_path / "run" / "checkpoints", every=1).steps == [STEPS]


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
    # What goes back by n steps at most costs n at most; everything costs more than a half of it.
    predicted = {policy: told["predicted"]["steps"] for policy, told in rows.items()}
    assert 0 < predicted["partial"] < predicted["full"] <= 9
    beside = Path(write_beside(folder, tmp_path / "partial", more=[tmp_path / "full"]).report).read_text()
    for policy, told in rows.items():
        assert f"{told['lost']} of {told['blocks']} blocks after step 8, {policy} (simulated)" in beside


def outlooks(folder: Path) -> dict[int, Any]:
    return {row["step"]: row["outlook"] for row in read_record(folder, "train").lines if "outlook" in row}


def test_each_save_tells_what_a_loss_would_cost(
    plain: tuple[Path, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss that was predicted at a save is the one that is simulated there: by the same blocks, and none other."""
    caplog.set_level(logging.INFO, "sdc.checkpoints")
    job = dataclasses.replace(losing("shards,step=9,fraction=1"), folder=tmp_path / "run")
    execute(job)
    assert "losing half of the state would cost" in caplog.text
    assert 2 <= len([line for line in caplog.messages if "losing half" in line]) < 6  # at the start, and at the end
    assert caplog.messages[-1].startswith("after 12 steps, losing half of the state would cost on average 1 steps")
    told = outlooks(tmp_path / "run")
    assert list(told) == [1, 3, 5, 7, 9, 11]
    for step, found in told.items():
        assert (found["step"], found["every"], found["rollback"]) == (step + 1, 2, 4)
        costs = found["losses"]
        assert [one["fraction"] for one in costs] == [0.125, 0.5, 1]
        assert 0 <= costs[0]["steps"] <= costs[1]["steps"] <= costs[2]["steps"] <= step + 1
        assert (costs[0]["steps"] == 0) == (step == 9)  # all was given back just before
        assert costs[1]["perturbation"] == pytest.approx(0.5**0.5 * costs[2]["perturbation"])
        assert found["c"] is found["distance"] is costs[0]["one_rate"] is None  # too few saves
        assert len(found["speeds"]) == 32
        assert (found["timings"] is None) == (step < 7)  # at the fourth save three are known
    assert told[1]["losses"][2]["steps"] == pytest.approx(2)  # nothing was saved before
    assert min(told[11]["timings"].values()) > 0
    # All was lost after step 9: the loss was foreseen two steps before, for steps that are as long.
    lost = lines(tmp_path / "run")[9]["recovered"]["predicted"]["steps"]
    assert 0 < lost <= told[7]["losses"][2]["steps"] + 2
    # Blocks that were given back have not moved since they were.
    assert told[11]["losses"][2]["steps"] == pytest.approx(2)
    report = (tmp_path / "run" / "report.html").read_text()
    for title in (
        "Predicted cost of losing parts of the state",
        "Recommended saving interval and fraction",
        "Predicted cost of a loss",
    ):
        assert title in report
    for words in (
        "would cost about",
        "Daly (2006)",
        "every 1 week, 1/8",
        "updates do not shrink in this way, or too few saves",
    ):
        assert words in report


def test_a_run_in_which_nothing_moves(tmp_path: Path) -> None:
    """And one with a single save: nothing is told that is not known, and nothing fails."""
    optimizer = dataclasses.replace(MINI.optimizer, learning_rate=0.0)
    still = Workload(config=dataclasses.replace(MINI, name="still", optimizer=optimizer))
    job = dataclasses.replace(PLAIN, workload=still, running=Running(fraction=1.0), checkpoint_every=3)
    execute(dataclasses.replace(job, folder=tmp_path / "still"))
    told = outlooks(tmp_path / "still")
    assert list(told) == [2, 5, 8, 11]
    assert all(found["losses"] == found["speeds"] == [] and found["c"] is None for found in told.values())
    execute(dataclasses.replace(PLAIN, running=Running(fraction=1.0), checkpoint_every=STEPS, folder=tmp_path / "once"))
    assert outlooks(tmp_path / "once")[STEPS - 1]["losses"][2]["steps"] == pytest.approx(STEPS)
    for name, titles in (("still", ("parts of the state", "fraction")), ("once", ("fraction",))):
        page = (tmp_path / name / "report.md").read_text()
        for title in titles:
            assert f"{title}: too few saves were made, or no parameter changed" in page
        assert ("would cost about" in page) == (name == "once")


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
    # All blocks went back to step 6, and moved from there.
    assert outlooks(tmp_path / "run")[11]["losses"][2]["steps"] == pytest.approx(6)
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
    assert "does not match the digest that was computed on the device" in caplog.text
    restarted = lines(tmp_path / "run")[8]["restarted"]
    assert (restarted["policy"], restarted["step"], restarted["steps_lost"]) == ("full", 8, 0)
    assert restarted["behind"] > 0
    # However old what it went back to: it moves from there.
    assert outlooks(tmp_path / "run")[8]["losses"][2]["steps"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("running", "message"),
    [
        (Running(fraction=0.0), "checkpoint_fraction.*expected more than 0 and at most 1"),
        (Running(local_copies=__file__), "local_copies.*is a file; expected a folder on this host"),
        (Running(losses=["shards,step=12"]), "expected a step from 0 to 11"),
        (Running(losses=["shards,step=1,fraction=2"]), "fraction=2.0: expected more than 0"),
        (Running(losses=["shard,step=1"]), "shard"),
        (Running(losses=["shards,step=1,recover=all"]), "recover"),
    ],
)
def test_wrong_settings(running: Running, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        dataclasses.replace(PLAIN, running=running).check()
    assert isinstance(error.value, ValueError | SettingError)
