"""Every command once, in a form that ends within seconds: a result, or a refusal where a result takes longer."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sdc.tools.parse import COMMANDS
from tests.tools.command import sdc

MINI = "--config mini --steps 1"
# In the order in which they run: some read what others wrote. Words of each command, and its exit code.
SMALLEST: dict[str, tuple[str, int]] = {
    "twin": (f"{MINI} --placement vmap --sync none --run {{}}/twin", 0),
    "train": (f"{MINI} --run {{}}/train --tensorboard {{}}/train/metrics", 0),
    "checkpoint": ("show {}/train/checkpoints", 0),
    "report": ("{}/train", 0),
    "trace": (f"{{}}/trace {MINI} --where boundary(1)", 0),
    "diff": ("{}/trace {}/trace", 3),  # a comparison of a trace with itself
    "burnin": ("--devices 2 --only transfers --rounds 1 --run {}/burnin", 0),
    "verdict": ("{}/burnin", 0),
    "fleet": ("summarize {}/burnin --output {}/fleet", 3),
    "golden": ("record {}/new.golden --devices 2 --only transfers --rounds 1", 0),
    "pool": (f"--twins 3 {MINI} --run {{}}/pool", 3),  # of one host
    "pair": ("--resolve {}/nowhere", 2),
    "campaign": ("--config mini --steps 2 --follow 1 --injections 2 --where probes --run {}/campaign", 0),
    "abft": ("study --config nowhere", 2),
    "study": ("paft --steps 1", 2),
    "estimate": ("--target nowhere", 2),
    "doctor": ("--seconds 5", 3),
    "bench": ("record --config mini --steps 1", 0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smoke")


def test_there_is_one_of_each() -> None:
    assert set(SMALLEST) == set(COMMANDS)


@pytest.mark.parametrize("command", SMALLEST)
def test_the_smallest_run(command: str, folder: Path) -> None:
    words, expected = SMALLEST[command]
    code, _, err = sdc(command, *words.format(*[folder] * 2).split())
    assert code == expected, err
    assert "Traceback" not in err


def test_tensorboard_reads_the_scalars_of_a_run(folder: Path) -> None:
    read = EventAccumulator(str(folder / "train" / "metrics")).Reload()
    (row,) = map(json.loads, (folder / "train" / "steps.jsonl").read_text().splitlines())
    assert {name: [event.value for event in read.Scalars(name)] for name in ("loss", "learning_rate")} == {
        "loss": [pytest.approx(row["loss"][0], rel=1e-6)],
        "learning_rate": [pytest.approx(row["learning_rate"], rel=1e-6)],
    }
