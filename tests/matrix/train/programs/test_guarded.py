"""`sdc train --guard`: the training is the same, and what the guard finds is in the record, before and after a stop."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sdc.records import read_record
from sdc.train import Checks, Training
from sdc.train.specs import Guarding
from tests.train.runs import MINI, WORKLOAD, execute, lines

STEPS = 24
RECOMPUTED = dataclasses.replace(WORKLOAD, config=MINI.of_type(None, "layer"))
GUARDED = Training(workload=RECOMPUTED, steps=STEPS, data=2, guard=Guarding(budget=0.9))
FLIPS = "bitflip,rate=1e-6,bits=22,where=products"


@pytest.fixture(autouse=True)
def _free(free_checks: None) -> None: ...


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain") / "run"
    return execute(dataclasses.replace(GUARDED, guard=None, folder=folder))


def test_a_healthy_run_is_clean_and_has_the_bits_of_one_without_a_guard(plain: dict[str, Any], tmp_path: Path) -> None:
    found = execute(dataclasses.replace(GUARDED, folder=tmp_path / "run"))
    assert plain["verdict"] is None
    assert plain["guard"] is None
    assert found["verdict"] == "clean"
    assert found["state_digest"] == plain["state_digest"]
    assert {layer["name"]: layer["why_not"] for layer in found["guard"]["layers"]} == dict.fromkeys(
        ("witness", "ring", "abft", "state", "metrics"), ""
    )
    assert not found["guard"]["findings"]
    assert "with 95 % confidence, at most" in found["reason"]


def test_simulated_faults_are_found_and_marked(plain: dict[str, Any], tmp_path: Path) -> None:
    job = dataclasses.replace(GUARDED, faults=[FLIPS], folder=tmp_path / "run")
    found = execute(job)
    assert found["verdict"] == "corrupt"
    assert found["simulated"]
    assert {one["layer"] for one in found["guard"]["findings"]} >= {"witness", "abft"}
    assert all(0 <= one["step"] < STEPS for one in found["guard"]["findings"])
    rows = lines(tmp_path / "run")
    assert sum(len(row.get("findings", [])) for row in rows) >= len(found["guard"]["findings"]) - 2
    unguarded = execute(dataclasses.replace(job, guard=None, folder=tmp_path / "unguarded"))
    assert found["state_digest"] == unguarded["state_digest"] != plain["state_digest"]
    page = (tmp_path / "run" / "report.md").read_text()
    assert "simulated" in page
    assert "Findings of the guard" in page


def test_a_step_that_never_repeats_is_found_at_once(tmp_path: Path) -> None:
    often = dataclasses.replace(GUARDED, faults=["bitflip,rate=1e-2,bits=22,where=products"], steps=4)
    found = execute(dataclasses.replace(often, folder=tmp_path / "run"))
    assert found["verdict"] == "corrupt"
    assert "repetition: the step computed other bits from the same inputs, first at fwd/" in found["reason"]
    stopped = {layer["name"]: layer["why_not"] for layer in found["guard"]["layers"]}
    assert stopped == {
        "state": "", "metrics": "", **dict.fromkeys(("witness", "ring", "abft"), "the step did not repeat itself")
    }  # fmt: skip


def test_findings_outlast_a_stop_and_later_steps_alone_are_bounded(plain: dict[str, Any], tmp_path: Path) -> None:
    job = dataclasses.replace(GUARDED, folder=tmp_path / "run", checkpoint_every=4)
    seen: list[int] = []

    def stop() -> bool:
        seen.append(1)
        return len(seen) == STEPS // 2

    begun = execute(job, stop=stop)
    assert begun["verdict"] == "inconclusive"
    assert read_record(tmp_path / "run").summary is None
    found = execute(dataclasses.replace(job, resume=True))
    assert found["state_digest"] == plain["state_digest"]
    assert found["guard"]["steps"] == STEPS - STEPS // 2
    assert f"{STEPS // 2} steps before the run was resumed" in (tmp_path / "run" / "report.md").read_text()


def test_the_guard_leaves_checksums_to_a_step_that_has_them(tmp_path: Path) -> None:
    found = execute(dataclasses.replace(GUARDED, data=1, steps=6, checks=Checks(), folder=tmp_path / "run"))
    assert [layer["name"] for layer in found["guard"]["layers"]] == ["witness", "ring", "state", "metrics"]
    assert found["abft"]["checked"] > 0


def test_a_run_that_ended_keeps_its_evidence_when_it_is_resumed(tmp_path: Path) -> None:
    job = dataclasses.replace(GUARDED, folder=tmp_path / "run")
    first = execute(job)
    again = execute(dataclasses.replace(job, resume=True))
    assert again["verdict"] == first["verdict"] == "clean"
    assert again["guard"] == first["guard"]
    longer = execute(dataclasses.replace(job, resume=True, steps=STEPS + 4))
    assert longer["guard"]["steps"] == 4
    assert longer["verdict"] == "inconclusive"  # four steps are no evidence for all of them


def test_steps_that_checksums_repeat_are_watched_once(tmp_path: Path) -> None:
    faults = ["bitflip,rate=2e-7,bits=27,where=products"]
    found = execute(dataclasses.replace(GUARDED, data=1, checks=Checks(), faults=faults, folder=tmp_path / "run"))
    assert found["abft"]["flagged"] > 0  # after a suspicious step ran again
    assert found["guard"]["steps"] == STEPS
    rows = lines(tmp_path / "run")
    named = [(row["step"], one["step"]) for row in rows for one in row.get("findings", []) if one["layer"] == "witness"]
    assert named
    assert all(row == step for row, step in named)  # the line of a step waits for its checks
