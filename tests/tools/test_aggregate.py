"""`sdc train --aggregate`: methods on the reference transformer, as commands and over real processes."""

from pathlib import Path

import numpy as np
import pytest

from sdc.tools.aggregated import _packed, _unpacked
from sdc.train.methods import AUTO, parse_aggregation
from tests.tools.command import end, lines, sdc, several, summary

FOUR = ("train", "--devices", 4, "--data", 4)


def test_a_real_run_of_two_processes_replays_bit_for_bit(tmp_path: Path) -> None:
    """What two clocks decided is in the record; one process that simulates both ends with the same state."""
    spec = "dropcompute,threshold=1e-4,micro_batches=4,correction=count"  # far below a micro-batch: one each
    common = ("train", "--data", 2, "--steps", 3)
    processes = several(2, *common, "--aggregate", spec, "--run", tmp_path / "real")
    for code, _, err in map(end, processes):
        assert code == 0, err[-3000:]
    rows = lines(tmp_path / "real")
    assert [row["aggregation"]["completed"] for row in rows] == [[1, 1]] * 3
    replay = spec.replace("threshold=1e-4", f"replay={tmp_path / 'real'}")
    again = summary(*common, "--devices", 2, "--aggregate", replay, "--run", tmp_path / "again", code=0)
    assert again["state_digest"] == summary("report", tmp_path / "real", code=0)["state_digest"]
    assert again["simulated"]
    other = replay.replace("micro_batches=4", "micro_batches=2")
    code, _, err = sdc(*common, "--devices", 2, "--aggregate", other, "--run", tmp_path / "other")
    assert code == 2
    assert "a log of 4 micro-batches does not fit 2" in err
    code, _, err = sdc(*common[:-1], 4, "--devices", 2, "--aggregate", replay, "--run", tmp_path / "longer")
    assert code == 2
    assert "a log of 3 steps, fewer than --steps 4" in err


def test_shadow_names_the_faulty_rank(tmp_path: Path) -> None:
    faulty = ("--fault", "bitflip,rate=1e-4,site=bwd/ffn,data=1")
    found = summary(*FOUR, "--steps", 8, "--aggregate", "shadow", *faulty, "--run", tmp_path / "run", code=1)
    assert found["verdict"] == "corrupt"
    assert found["shadow"]["suspects"] == [1]
    assert found["simulated"]
    report = (tmp_path / "run" / "report.md").read_text()
    assert "SIMULATED" in report
    assert "rank 1 was wrong" in report
    assert "Ranks compared by the shadow" in report


def test_lost_packets_are_logged_and_replayed(tmp_path: Path) -> None:
    spec = "dropcompute,threshold=0.15,latency=exponential,mean=0.1+lossy,p=0.2,packet=375"
    first = summary(*FOUR, "--steps", 3, "--aggregate", spec, "--run", tmp_path / "run", code=0)
    rows = lines(tmp_path / "run")
    assert all(0.1 < row["aggregation"]["gradient_loss"] < 0.3 for row in rows)
    assert any(min(row["aggregation"]["completed"]) < 2 for row in rows)
    folder = tmp_path / "run"
    report = (folder / "report.md").read_text()
    assert "Lost packets" in report
    assert "Completed micro-batches a step" in report
    assert "Drift between copies" in (folder / "report.html").read_text()
    replay = f"dropcompute,replay={folder}+lossy,packet=375,replay={folder}"
    again = summary(*FOUR, "--steps", 3, "--aggregate", replay, "--run", tmp_path / "again", code=0)
    assert again["state_digest"] == first["state_digest"]
    assert [row["loss"] for row in lines(tmp_path / "again")] == [row["loss"] for row in rows]


def test_noise_and_paft_resume_to_the_same_bits(tmp_path: Path) -> None:
    """The schedule, the divergence and the noise go on where they were."""
    spec = ("--aggregate", "noise,sigma=0.01+paft,initial_period=2,max_period=3", "--checkpoint-every", 3)
    run = summary(*FOUR, "--steps", 6, *spec, "--run", tmp_path / "run", code=0)
    summary(*FOUR, "--steps", 3, *spec, "--run", tmp_path / "two", code=0)
    resumed = summary(*FOUR, "--steps", 6, *spec, "--run", tmp_path / "two", "--resume", code=0)
    assert resumed["state_digest"] == run["state_digest"]
    rows = lines(tmp_path / "two")
    assert [row["aggregation"]["synchronizations"] for row in rows][-1] >= 1
    assert min(rows[-1]["aggregation"]["divergence"]) > 0
    assert "Synchronization of parameters" in (tmp_path / "two" / "report.md").read_text()


def test_spaces_do_not_matter() -> None:
    spaced = parse_aggregation(" noise , sigma = 0.1 + paft , max_period = 20 ")
    plain = parse_aggregation("noise,sigma=0.1+paft,max_period=20")
    assert (spaced.noise, spaced.method) == (plain.noise, plain.method)


def test_specifications() -> None:
    found = parse_aggregation("noise,workers=0+2,sigma=1e-3+dropcompute,threshold=auto,latency=lognormal,mean=1,std=2")
    assert found.noise is not None
    assert found.noise.workers == (0, 2)
    assert found.dropcompute is not None
    assert (found.dropcompute.threshold, found.dropcompute.latency.std) == (AUTO, 2.0)  # type: ignore[union-attr]
    log = np.random.default_rng(0).integers(0, 256, (3, 3, 17), np.uint8)
    np.testing.assert_array_equal(_unpacked(_packed(log)), log)


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
        ("dropcompute,correction=some", "expected none or rate or count"),
        ("noise,workers=a", "whole numbers joined by"),
        ("noise,sigma", "not of the form key=value"),
        ("noise,sigma=1,sigma=2", "given twice"),
        ("paft+lossy", "lossy cannot be combined with paft"),
        ("noise+lossy", "lossy takes the workers' own gradients"),
        ("shadow+noise", "give it alone"),
    ],
)
def test_bad_specifications(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_aggregation(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--aggregate", "dropcompute,threshold=1"), "a real clock needs one process of one device"),
        (("--aggregate", "dropcompute,micro_batches=3,latency=constant,seconds=1"), "choose a divisor of 2"),
        (("--aggregate", "noise,sigma=1,workers=4"), "expected numbers from 0 to 3"),
        (("--aggregate", "shadow,spares=3"), "expected --data 5 or more"),
        (("--aggregate", "lossy,parity=0"), "--aggregate lossy,parity=0: parity=0"),
        (("--aggregate", "paft,max_period=99999999999"), "expected at most"),
        (("--model", 2, "--devices", 8, "--aggregate", "lossy,p=0.1,packet=9,reliable=0.5"), "give --model 1"),
        (("--aggregate", "lossy,replay=nowhere"), "nowhere is no run folder"),
    ],
)
def test_methods_that_do_not_fit_the_run(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, _, err = sdc(*FOUR, "--steps", 2, *flags, "--run", tmp_path / "run")
    assert code == 2, err[-2000:]
    assert message in err
    assert not (tmp_path / "run").exists()
