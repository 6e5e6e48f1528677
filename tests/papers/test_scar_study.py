"""The study of SCAR on a small training: it goes on where it stopped; its checks fail on methods that are broken."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from sdc.analysis.studies import _scar as findings_of_scar
from sdc.records import to_json
from sdc.records.record import read_record
from sdc.records.storage import RecordError
from sdc.schema import PartRow
from sdc.train.iterative import Documents, topic_model
from sdc.train.studies import Subject
from sdc.train.studies._scar import overhead, record_study
from sdc.train.studies.trials import DoesNotConverge
from tests.train.test_scar_study import STUDY as SMALLER, checks, row, rows, subject

# So many failures that the intervals decide every claim.
STUDY = dataclasses.replace(SMALLER, trials=200, starts=20)


@pytest.fixture(scope="module")
def sound() -> list[PartRow]:
    return rows(STUDY)


def test_all_is_seen_where_few_blocks_move(sound: list[PartRow]) -> None:
    """The bars of the paper, so that the checks below can fail for one reason alone."""
    assert all(checks(sound).values()), checks(sound)
    assert len(checks(sound)) == 7


def test_the_report_says_with_intervals_what_was_published(sound: list[PartRow]) -> None:
    found = findings_of_scar.findings(sound)
    grid = next(grid for grid in found.grids if grid.caption.startswith("Figure 7"))
    assert {row[6] for row in grid.rows} == {"12 to 42 %", "31 to 62 %", "59 to 89 %"}
    assert all("[" in row[5] for row in grid.rows)
    assert len(found.charts) == 5


class Interrupted(Exception):
    """Somebody ends the study."""


def test_it_goes_on_where_it_stopped(tmp_path: Path, sound: list[PartRow]) -> None:
    """With the numbers of a study that was not interrupted; not with other settings."""
    told: list[str] = []

    def stop(title: str) -> None:
        told.append(title)
        if len(told) == 6:
            raise Interrupted

    folder = tmp_path / "study"
    with pytest.raises(Interrupted):
        record_study(STUDY, [subject()], folder, on_part=stop)
    assert len(read_record(folder).lines) == 6
    with pytest.raises(RecordError, match=r"contains another study .*trials.*; resume it with the same settings"):
        record_study(dataclasses.replace(STUDY, trials=20), [subject()], folder, resume=True)
    told.clear()
    record = record_study(STUDY, [subject()], folder, resume=True, on_part=told.append)
    assert len(told) == len(record.lines) == len(STUDY.parts([subject()]))
    assert [row.found for row in record.parts] == [row.found for row in sound]
    summary = findings_of_scar.summary_of(record)
    assert summary.complete
    assert all(check.holds for check in summary.checks)


def test_starts_that_do_not_converge_are_named(sound: list[PartRow]) -> None:
    sound = [row for row in sound if row.start is None or row.start < 5]
    changed = [
        replace(row, found={"failed": "never came there"}) if (row.what, row.start) == ("failures", 2) else row
        for row in sound
    ]
    found = findings_of_scar.findings(changed)
    failed = next(grid for grid in found.grids if grid.caption == "Training runs that did not converge")
    assert [row[2:] for row in failed.rows] == [
        (2, "never came there"), ("all", "only 4 starts converged; an interval needs at least 5")
    ]  # fmt: skip
    assert not any("Figure 7" in grid.caption for grid in found.grids)
    more = [*changed, *(replace(row, start=(row.start or 0) + 5) for row in sound if row.what == "failures")]
    trained = next(grid for grid in findings_of_scar.findings(more).grids if grid.caption == "Training runs")
    assert trained.rows[0][5:7] == (9, 1)


def test_a_trial_that_does_not_converge_is_no_cost(sound: list[PartRow]) -> None:
    """It is counted, and no claim holds of its case."""
    changed = []
    for part in sound:
        if (part.what, part.start) == ("failures", 1):
            cases = [{**case, "costs": [None, *case["costs"][1:]]} for case in part.found["cases"]]
            part = replace(part, found={**part.found, "cases": cases})
        changed.append(part)
    found = findings_of_scar.findings(changed)
    assert [holds for claim, holds in checks(changed).items() if "partial recovery" in claim] == [False]
    grid = next(grid for grid in found.grids if grid.caption.startswith("Figure 7"))
    assert {row[-1] for row in grid.rows} == {1}


def test_documents_are_lost_and_given_back_with_their_tokens() -> None:
    """Figure 9: a real running checkpoint, whose recovery leaves counts that are those of the tokens' topics."""
    rng = np.random.default_rng(0)
    where = np.repeat(np.arange(24, dtype=np.int32), 16)
    words = (where % 3 * 10 + rng.integers(10, size=where.size)).astype(np.int32)
    documents = Documents(words, where, tuple(map(str, range(30))), "made up", "")
    task = topic_model(documents, topics=3, alpha=0.1, beta=0.1)
    found = overhead(Subject("topics", task, 16), 0)
    for way in found.ways.values():
        losses = np.asarray(way.losses)
        assert np.isfinite(losses).all()
        assert losses[-1] < losses[0] - 0.2
    # A full restore after seven iterations is at the fourth, and goes on as from there.
    assert found.traditional.losses[7] == pytest.approx(found.undisturbed[4], rel=1e-6)
    findings = findings_of_scar.findings([row("overhead", "topics", found)])
    (chart,) = msgspec.to_builtins(findings.charts, enc_hook=to_json)
    assert chart["lines"][0]["x"] == list(range(len(found.undisturbed))), "the summary of the study can be written"
    (check,) = findings.checks
    assert check.claim.startswith("Figure 9")
    assert check.holds
    broken = replace(found, scar=found.traditional)  # what is called SCAR restores everything
    (check,) = findings_of_scar.findings([row("overhead", "topics", broken)]).checks
    assert not check.holds


def test_a_loss_that_is_no_number_after_a_failure_is_said() -> None:
    task = dataclasses.replace(
        subject().task,
        step=lambda state, k: {"weights": jnp.where(k >= 12, jnp.nan, 0.9) * state["weights"]},
    )
    with pytest.raises(DoesNotConverge, match="is not finite"):
        overhead(Subject("regression", task, 16), 0)
