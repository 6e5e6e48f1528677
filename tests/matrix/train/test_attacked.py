"""Runs that something happens to from outside: no clean verdict comes of it, and no wait without an end."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from sdc.analysis import conclude
from sdc.records import RecordError, read_record
from sdc.train import Incomparable, Twins, loop, run
from sdc.train.checkpoints import Checkpoints
from sdc.train.programs import TwinProgram
from sdc.train.stopping import Stop
from tests.train.runs import WORKLOAD, execute, loaded

STEPS = 3
HEALTHY = Twins(workload=WORKLOAD, steps=STEPS, sync="params", checkpoint_every=2)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("attacked") / "run"
    return folder, execute(dataclasses.replace(HEALTHY, folder=folder))


def test_bits_that_flip_while_the_last_checkpoint_is_written_are_found(
    healthy: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert healthy[1]["verdict"] == "clean"
    digest = TwinProgram.digest

    def struck(self: TwinProgram, state: Any) -> list[str]:
        flat, tree = jax.tree.flatten(state)
        place = next(i for i, leaf in enumerate(flat) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 2)
        flat[place] = flat[place].at[1].add(1e-3)  # of the second twin
        return digest(self, jax.tree.unflatten(tree, flat))

    monkeypatch.setattr(TwinProgram, "digest", struck)
    found = execute(dataclasses.replace(HEALTHY, folder=tmp_path / "run"))
    assert found["verdict"] == "corrupt"
    assert "the twins' final states differ" in found["reason"]


def test_a_run_is_not_resumed_over_lost_lines(tmp_path: Path) -> None:
    """Lines that were lost could have been those that showed the corruption."""
    job = dataclasses.replace(HEALTHY, folder=tmp_path / "run", suspect="node11")
    stop = Stop()
    stop.ask("SIGTERM")
    record = run(job, loaded=loaded(WORKLOAD), stop=stop.reached)
    assert record is not None
    assert not record.ended
    assert conclude(record.path)["verdict"] == "corrupt"
    assert Checkpoints(tmp_path / "run" / "checkpoints", every=1).latest == 1  # after the step at which it was asked
    (tmp_path / "run" / "steps.jsonl").write_text("")
    with pytest.raises(RecordError, match=r"steps\.jsonl has 0 of the 1 lines before step 1; restore it"):
        run(dataclasses.replace(job, resume=True), loaded=loaded(WORKLOAD))


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(healthy: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    job = dataclasses.replace(HEALTHY, folder=tmp_path / "run")
    stop = Stop()
    stop.ask("SIGINT")
    run(job, loaded=loaded(WORKLOAD), stop=stop.reached)
    assert conclude(tmp_path / "run")["verdict"] == "inconclusive"
    resumed = execute(dataclasses.replace(job, resume=True))
    assert resumed["state_digest"] == healthy[1]["state_digest"]
    assert (resumed["verdict"], resumed["steps"]) == ("clean", STEPS)


def test_a_damaged_summary_does_not_rule(healthy: tuple[Path, dict[str, Any]]) -> None:
    summary = healthy[0] / "summary.json"
    kept = summary.read_text()
    summary.write_text(kept.replace('"clean"', '"corrupt"'))
    with pytest.raises(RecordError, match="its checksum is wrong"):
        conclude(healthy[0])
    summary.write_text(kept)


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ({"resume": True}, "resume: process 0 has False, process 1 has True"),
        ({"from step": 2}, "from step: process 0 has 0, process 1 has 2"),
        ({"run": "/elsewhere"}, "process 1 has /elsewhere"),
        ({"steps": 9}, "steps: process 0 has 3, process 1 has 9"),
    ],
)
def test_processes_that_are_about_to_do_different_things(
    peer: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "everyone", lambda text, at="": [text, json.dumps(json.loads(text) | peer)])
    with pytest.raises(Incomparable, match=message):
        run(dataclasses.replace(HEALTHY, folder=tmp_path / "run"), loaded=loaded(WORKLOAD))
    assert not (tmp_path / "run").exists()


def test_hosts_are_counted(healthy: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    manifest = read_record(healthy[0]).manifest
    assert manifest["hosts"] == 1
    assert [device["rank"] for device in manifest["devices"]] == [
        {"twin": twin, "data": 0, "model": 0} for twin in range(2)
    ]
    assert healthy[1]["rehearsal"]
    job = dataclasses.replace(HEALTHY, folder=tmp_path / "run", require_processes=2)
    with pytest.raises(Incomparable, match="require_processes=2: the twins are on 1 distinct host, so"):
        run(job, loaded=loaded(WORKLOAD))
