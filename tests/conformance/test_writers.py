"""Scalars of results in the metric writers of other packages, each with an adapter of one line."""

from pathlib import Path

import jax.numpy as jnp
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import sdc
from sdc.integrations import write_scalars

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.filterwarnings("ignore"),  # of these packages
]
FLAGS = sdc.abft(lambda x: x @ x.T)(jnp.ones((4, 4)))[1]
EXPECTED = {"sdc/checked": 4.0, "sdc/flagged": 0.0}


def test_metrax(tmp_path: Path) -> None:
    from metrax.logging import TensorboardBackend

    board = TensorboardBackend(str(tmp_path))
    write_scalars(lambda step, scalars: [board.log_scalar(*each, step=step) for each in scalars.items()], 7, FLAGS)
    board.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert {name: [(one.step, one.value) for one in found.Scalars(name)] for name in EXPECTED} == {
        name: [(7, value)] for name, value in EXPECTED.items()
    }


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    with wandb.init(project="sdc", dir=tmp_path, mode="offline") as run:
        for number in (7, 8):  # a step is complete when the next begins
            write_scalars(lambda step, scalars: run.log(scalars, step=step), number, FLAGS)
        found = dict(run.summary)
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert found["_step"] == 7
