"""Runs with a way of aggregation, from Python objects: what they simulate, write down, replay and resume."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from sdc.train import Training, run
from sdc.train.programs.replicas import packed, unpacked

from ..runs import WORKLOAD, execute, lines, loaded

JOB = Training(workload=WORKLOAD, data=4, steps=3)


def test_shadow_names_the_faulty_rank(tmp_path: Path) -> None:
    faulty = ("bitflip,rate=1e-3,site=bwd/ffn,data=1",)
    found = execute(dataclasses.replace(JOB, steps=8, aggregate="shadow", faults=faulty, folder=tmp_path / "run"))
    assert found["verdict"] == "corrupt"
    assert found["shadow"]["suspects"] == [1]
    assert found["simulated"]
    report = (tmp_path / "run" / "report.md").read_text()
    assert "SIMULATED" in report
    assert "rank 1 was wrong" in report
    assert "Ranks compared by the shadow" in report


def test_lost_packets_are_logged_and_replayed(tmp_path: Path) -> None:
    spec = "dropcompute,threshold=0.15,latency=exponential,mean=0.1+lossy,p=0.2,packet=64"
    folder = tmp_path / "run"
    first = execute(dataclasses.replace(JOB, aggregate=spec, folder=folder))
    rows = lines(folder)
    assert all(0.1 < row["aggregation"]["gradient_loss"] < 0.3 for row in rows)
    assert any(min(row["aggregation"]["completed"]) < 2 for row in rows)
    report = (folder / "report.md").read_text()
    assert "Lost packets" in report
    assert "Completed micro-batches per step" in report
    assert "Drift between copies" in (folder / "report.html").read_text()
    replay = f"dropcompute,replay={folder}+lossy,packet=64,replay={folder}"
    again = execute(dataclasses.replace(JOB, aggregate=replay, folder=tmp_path / "again"))
    assert again["state_digest"] == first["state_digest"]
    assert [row["loss"] for row in lines(tmp_path / "again")] == [row["loss"] for row in rows]
    longer = dataclasses.replace(JOB, aggregate=replay, steps=4, folder=tmp_path / "longer")
    with pytest.raises(ValueError, match="a log of 3 steps is too short for the 4 of this run"):
        run(longer, loaded=loaded(WORKLOAD))


def test_noise_and_paft_resume_to_the_same_bits(tmp_path: Path) -> None:
    """The schedule, the divergence and the noise go on where they were."""
    job = dataclasses.replace(JOB, steps=6, checkpoint_every=3)
    job = dataclasses.replace(job, aggregate="noise,sigma=0.01+paft,initial_period=2,max_period=3")
    whole = execute(dataclasses.replace(job, folder=tmp_path / "run"))
    two = dataclasses.replace(job, folder=tmp_path / "two")
    execute(dataclasses.replace(two, steps=3))
    assert execute(dataclasses.replace(two, resume=True))["state_digest"] == whole["state_digest"]
    rows = lines(tmp_path / "two")
    assert [row["aggregation"]["synchronizations"] for row in rows][-1] >= 1
    assert rows[0]["aggregation"]["divergence"] is None  # nothing was measured before the first synchronization
    assert rows[0]["aggregation"]["expected_divergence"] is None
    assert min(rows[-1]["aggregation"]["divergence"]) > 0
    assert "Synchronization of parameters" in (tmp_path / "two" / "report.md").read_text()


def test_logs_survive_their_text() -> None:
    log = np.random.default_rng(0).integers(0, 256, (3, 3, 17), np.uint8)
    np.testing.assert_array_equal(unpacked(packed(log)), log)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dropcompute,threshold=1", "a real clock needs one process of one device"),
        ("dropcompute,micro_batches=3,latency=constant,seconds=1", "choose a divisor of 2"),
        ("noise,sigma=1,workers=4", "expected numbers from 0 to 3"),
        ("shadow,spares=3", "expected at least 5 data ranks"),
        ("lossy,parity=0", r"aggregate=lossy\(parity=0\): parity=0"),
        ("paft,max_period=99999999999", "expected at most"),
        ("lossy,replay=nowhere", "nowhere is not a run folder"),
    ],
)
def test_methods_that_do_not_fit_the_run(text: str, message: str, tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, aggregate=text, folder=tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        run(job, loaded=loaded(WORKLOAD))
    assert not (tmp_path / "run").exists()


def test_methods_that_look_at_one_model_rank(tmp_path: Path) -> None:
    spec = "lossy,p=0.1,packet=9,reliable=0.5"
    job = Training(workload=WORKLOAD, data=2, model=2, aggregate=spec, folder=tmp_path / "run")
    with pytest.raises(ValueError, match="give one model rank"):
        run(job, loaded=loaded(WORKLOAD))
