"""Runs with a way of aggregation, from Python objects: what they simulate, write down, replay and resume."""

import dataclasses
from pathlib import Path

import pytest

from sdc.train import run
from tests.train.programs.test_replicas import JOB
from tests.train.runs import WORKLOAD, execute, lines, loaded


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
    with pytest.raises(ValueError, match="its log of 3 steps is too short for the 4 steps of this run"):
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
