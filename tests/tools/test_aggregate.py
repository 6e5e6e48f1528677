"""`sdc train --aggregate` in real processes, and the specifications that it takes."""

from pathlib import Path

import pytest

from sdc.aggregation.delays import parse_latency
from sdc.aggregation.methods import parse_aggregation
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
    with pytest.raises(ValueError, match="a log of 4 micro-batches does not fit 2"):
        execute(Training(workload=WORKLOAD, data=2, steps=3, aggregate=other, folder=tmp_path / "other"))


def test_spaces_do_not_matter() -> None:
    spaced = parse_aggregation(" noise , sigma = 0.1 + paft , max_period = 20 ")
    plain = parse_aggregation("noise,sigma=0.1+paft,max_period=20")
    assert (spaced.noise, spaced.method) == (plain.noise, plain.method)


def test_specifications() -> None:
    found = parse_aggregation("noise,workers=0+2,sigma=1e-3+dropcompute,threshold=auto,latency=lognormal,mean=1,std=2")
    assert found.noise is not None
    assert found.noise.workers == (0, 2)
    assert found.dropcompute is not None
    assert found.dropcompute.threshold == "auto"
    assert found.dropcompute.latency == parse_latency("lognormal,mean=1,std=2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dropcompute,threshold=-1", "threshold=-1: expected seconds above 0, inf, or auto"),
        ("dropcompute,threshold=nan", "threshold=nan"),
        ("dropcompute,latency=constant,seconds=1,micro_batches=4", "latency is the last setting"),
        ("lossy,p=1.5", "aggregation 'lossy,p=1.5': p=1.5"),
        ("foo", "unknown method 'foo'"),
        ("paft,period=3", "unknown key 'period'; method paft takes initial_period"),
        ("paft,max_period=x", "max_period=x: expected a whole number"),
        ("paft_sync,sync_state=maybe", "expected true or false"),
        ("dropcompute,correction=some", "expected one of none, rate, count"),
        ("noise,workers=a", "expected whole numbers, as in"),
        ("noise,sigma", "not of the form key=value"),
        ("noise,sigma=1,sigma=2", "given twice"),
        ("paft+lossy", "lossy cannot be combined with paft"),
        ("noise+lossy", "lossy takes the workers' own gradients"),
        ("shadow+noise", "use it alone"),
    ],
)
def test_bad_specifications(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_aggregation(text)
