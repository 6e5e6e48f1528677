"""Runs with a way of aggregation, from Python objects: what they simulate, write down, replay and resume."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from sdc.train import Training, run
from sdc.train.programs.replicas import packed, unpacked

from ..runs import WORKLOAD, loaded

JOB = Training(workload=WORKLOAD, data=4, steps=3)


def test_logs_survive_their_text() -> None:
    log = np.random.default_rng(0).integers(0, 256, (3, 3, 17), np.uint8)
    np.testing.assert_array_equal(unpacked(packed(log)), log)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dropcompute,threshold=1", "a real clock needs one process with one device"),
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
