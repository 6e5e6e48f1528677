"""Policies: a step runs again from the same state and batch, a run goes back, stops, and is the same run after all."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sdc.analysis import conclude
from sdc.records.lines import link, start
from sdc.records.record import write_summary
from sdc.train import Attempt, Decision, PolicyError, Training, Twins, run
from tests.train.runs import WORKLOAD, execute, lines, loaded

JOB = Training(workload=WORKLOAD, steps=4, checkpoint_every=2, faults=("bitflip,rate=1e-4,site=fwd/attn",))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    return folder, execute(dataclasses.replace(JOB, folder=folder))


def without_attempts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "attempts"} for row in rows]


def test_a_step_that_is_run_again_gives_the_same_bits(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    seen: list[Attempt] = []

    def policy(attempt: Attempt) -> Decision:
        seen.append(attempt)
        return Decision.RERUN if attempt.step == 2 and attempt.number < 2 else Decision.CONTINUE

    found = execute(dataclasses.replace(JOB, folder=tmp_path / "run"), policy=policy)
    assert [(attempt.step, attempt.number) for attempt in seen] == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0)]
    first, *others = (attempt for attempt in seen if attempt.step == 2)
    for other in others:
        assert other.row["loss"].tolist() == first.row["loss"].tolist()
        assert other.row["sites"] == first.row["sites"]
    rows = lines(tmp_path / "run")
    assert [row.get("attempts") for row in rows] == [None, None, 3, None]
    assert without_attempts(rows) == lines(plain[0])
    assert found["state_digest"] == plain[1]["state_digest"]
    assert found["judged"] == {"reruns": 2, "rollbacks": []}


def test_a_run_that_goes_back_gives_the_same_bits(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    asked: list[int] = []

    def policy(attempt: Attempt) -> Decision:
        asked.append(attempt.step)
        return Decision.ROLL_BACK if asked.count(3) == 1 and attempt.step == 3 else Decision.CONTINUE

    found = execute(dataclasses.replace(JOB, folder=tmp_path / "run"), policy=policy)
    assert asked == [0, 1, 2, 3, 2, 3]
    assert lines(tmp_path / "run") == lines(plain[0])
    assert lines(tmp_path / "run", "mismatches.jsonl") == lines(plain[0], "mismatches.jsonl")
    assert found["state_digest"] == plain[1]["state_digest"]
    assert [tuple(pair) for pair in found["judged"]["rollbacks"]] == [(3, 2)]


def test_a_run_that_is_stopped_can_be_resumed(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, folder=tmp_path / "run")
    execute(job, policy=lambda attempt: Decision.STOP if attempt.step == 0 else Decision.CONTINUE)
    assert len(lines(tmp_path / "run")) == 1
    resumed = execute(dataclasses.replace(job, resume=True))  # by the program that gives its state away
    assert resumed["state_digest"] == plain[1]["state_digest"]
    assert lines(tmp_path / "run") == lines(plain[0])


def test_twins_are_run_again_too(tmp_path: Path) -> None:
    job = Twins(workload=WORKLOAD, steps=2, suspect="node11", folder=tmp_path / "once")
    once = execute(job, policy=lambda attempt: Decision.CONTINUE)  # the same program, which keeps the state it is given
    again = execute(
        dataclasses.replace(job, folder=tmp_path / "again"),
        policy=lambda attempt: Decision.CONTINUE if attempt.number else Decision.RERUN,
    )
    assert again["state_digest"] == once["state_digest"]
    assert without_attempts(lines(tmp_path / "again")) == lines(tmp_path / "once")
    discarded = lines(tmp_path / "again", "discarded.jsonl")
    beside = [row for line in discarded for row in line.pop("mismatches", ())]
    assert discarded == lines(tmp_path / "once")
    assert beside == lines(tmp_path / "once", "mismatches.jsonl")


def test_what_is_no_policy_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match="policy=3: expected a function"):
        run(JOB, policy=3)  # type: ignore[arg-type]


def write_discarded(folder: Path, row: dict[str, Any]) -> None:
    line, _ = link(json.dumps(row).encode(), start("discarded.jsonl"))
    (folder / "discarded.jsonl").write_bytes(line + b"\n")


def test_what_a_policy_discards_is_not_forgotten(tmp_path: Path) -> None:
    """A fault that struck a discarded attempt only: the steps on record are clean, and the verdict is not."""
    job = Twins(workload=WORKLOAD, steps=2, suspect="healthy", checkpoint_every=1, folder=tmp_path / "run")
    found = execute(job, policy=lambda attempt: Decision.CONTINUE)
    assert found["verdict"] == "clean"
    rows = lines(job.folder)
    rows[1]["sites"]["fwd/ffn"]["mismatched"] = 3
    write_discarded(Path(str(job.folder)), rows[1])
    again = conclude(str(job.folder))
    assert again["verdict"] == "corrupt"
    assert "in 1 repeated steps, the twins differ in 3 of " in again["reason"]
    assert again["submodules"]["fwd/ffn"]["mismatched"] == 0
    rows[1]["sites"]["fwd/ffn"] |= {"mismatched": 0, "injected": 3}  # a fault that no check saw
    write_discarded(Path(str(job.folder)), rows[1])
    write_summary(str(job.folder), found)
    assert conclude(str(job.folder))["verdict"] == "inconclusive"


def test_lines_of_a_run_that_goes_back_are_kept(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    decisions = iter([Decision.CONTINUE, Decision.CONTINUE, Decision.CONTINUE, Decision.ROLL_BACK])
    execute(
        dataclasses.replace(JOB, folder=tmp_path / "run"), policy=lambda attempt: next(decisions, Decision.CONTINUE)
    )
    discarded = lines(tmp_path / "run", "discarded.jsonl")
    assert sorted(row["step"] for row in discarded) == [2, 3]
    discarded.sort(key=lambda row: row["step"])
    beside = [row for line in discarded for row in line.pop("mismatches", ())]
    assert discarded == lines(plain[0])[2:]
    assert beside == [row for row in lines(plain[0], "mismatches.jsonl") if row["step"] >= 2]


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision.RERUN, "10 times in a row"),
        (Decision.ROLL_BACK, "there is no checkpoint yet"),
        (None, "returned None at step 0; expected a Decision"),
    ],
)
def test_a_policy_that_lets_nothing_pass_ends_the_run(decision: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        run(dataclasses.replace(JOB, folder=tmp_path / "run"), loaded=loaded(WORKLOAD), policy=lambda attempt: decision)
