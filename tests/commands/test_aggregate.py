"""`sdc train --aggregate` in real processes, and the specifications that it takes."""

from pathlib import Path

import pytest

from sdc.train import Training
from tests.tools.command import lines, several, summary
from tests.train.runs import WORKLOAD, execute


def test_a_real_run_of_two_processes_replays_bit_for_bit(tmp_path: Path) -> None:
    """The record holds the decisions of two clocks; one process that replays both ends with the same state."""
    spec = "dropcompute,threshold=1e-4,micro_batches=4,correction=count"  # far below a micro-batch: one at most
    common = ("train", "--config", "mini", "--data", 2, "--steps", 3)
    processes = several(2, *common, "--aggregate", spec, "--run", tmp_path / "real")
    for process in processes:
        code, _, err = process.end()
        assert code == 0, err[-3000:]
    rows = lines(tmp_path / "real")
    assert len(rows) == 3
    # 0 if the threshold passed before the first micro-batch was dispatched.
    assert all(one in (0, 1) for row in rows for one in row["aggregation"]["completed"])
    replay = spec.replace("threshold=1e-4", f"replay={tmp_path / 'real'}")
    again = execute(Training(workload=WORKLOAD, data=2, steps=3, aggregate=replay, folder=tmp_path / "again"))
    assert again["state_digest"] == summary("report", tmp_path / "real", code=0)["state_digest"]
    assert again["simulated"]
    other = replay.replace("micro_batches=4", "micro_batches=2")
    with pytest.raises(ValueError, match="its log has 4 micro-batches per step, but this run has 2"):
        execute(Training(workload=WORKLOAD, data=2, steps=3, aggregate=other, folder=tmp_path / "other"))
