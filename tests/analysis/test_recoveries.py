"""What was lost: in the report, marked as simulated or real, and what it cost beside a run that lost nothing."""

from pathlib import Path
from typing import Any

import pytest

from sdc.analysis import conclude, write_beside
from sdc.analysis.report import LeftOut, Table
from sdc.analysis.state_losses import losses, losses_compared, losses_table, sentences
from sdc.records import read_record
from sdc.tools import cli
from sdc.verdict import Exit

from .records import lines_of, manifest, shown, write_run

STEPS = 20
SIMULATED = {
    "simulated": True, "policy": "partial", "lost": 3, "blocks": 8, "bytes": 3_000, "read": 3_100, "behind": 5,
    "initial": 0, "older": 0, "perturbation": 0.25,
}  # fmt: skip
PREDICTED = {"steps": 3.25, "one_rate": 12.0}
OWN, NONE = {"own": {"shards": 4, "bytes": 700}}, {"own": {"shards": 0, "bytes": 0}}
REAL = {
    "simulated": False, "policy": "partial", "step": 8, "steps_lost": 3, "lost": 2, "blocks": 8, "bytes": 2_000,
    "read": 2_200, "behind": 4, "initial": 0, "older": 0, "processes": [OWN, NONE],
}  # fmt: skip


def costs(runs: list[tuple[str, list[dict[str, Any]]]]) -> Table | None:
    return losses_compared([(title, lines_of(lines)) for title, lines in runs])


def rows(*, after: int = STEPS, late: int = 0, told: dict[int, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """A loss that falls by a tenth a step; after one of them it is where it was so many steps before."""
    curve = [10 - 0.1 * (step if step <= after else step - late) for step in range(STEPS)]
    return [{"step": step, "loss": [loss], **(told or {}).get(step, {})} for step, loss in enumerate(curve)]


def train(folder: Path, lines: list[dict[str, Any]], *, simulated: bool = False) -> Path:
    faults = ["shards,step=9"] if simulated else []
    about = manifest(
        kind="train", twins=None, sync=None, published=None, steps=STEPS, running={"fraction": 0.125, "losses": faults},
        suspect={"name": "losses" if simulated else None, "simulated": simulated, "faults": faults},
    )  # fmt: skip
    return write_run(folder, about, lines)


def test_what_a_loss_cost_is_counted() -> None:
    told = {9: {"recovered": SIMULATED}}
    runs = [
        ("plain", rows()),
        ("partial", rows(after=9, late=3, told={9: {"recovered": {**SIMULATED, "predicted": PREDICTED}}})),
        ("full", rows(after=9, late=7, told={9: {"recovered": {**SIMULATED, "policy": "full"}}})),
        ("real", rows(after=7, late=2, told={8: {"restarted": REAL}})),
        ("never", rows(after=9, late=90, told={9: {"recovered": {**SIMULATED, "predicted": {"steps": 6.5}}}})),
        ("restored", rows(told={step: {"discarded": 4} for step in range(6, STEPS)})),
    ]
    found = costs(runs)
    assert found is not None
    what = "of 8 blocks after step"
    assert [row[0] for row in found.rows] == [title for title, _ in runs]
    assert found.rows[0][1:3] == ("8.1", "nothing")
    # A run that falls back by n steps does n of them again.
    assert found.rows[1][1:] == (
        "8.4", f"3 {what} 9, partial (simulated)", "9", "0.3", "3", "4", "0", "3", "3.25", "12"
    )  # fmt: skip
    assert found.rows[2][1:] == ("8.8", f"3 {what} 9, full (simulated)", "9", "0.7", "7", "8", "0", "7", "–", "–")
    assert found.rows[3][1:] == ("8.3", f"2 {what} 7, partial (real)", "9.2", "0.2", "2", "3", "3", "5", "–", "–")
    assert found.rows[4][6:] == ("never", "0", "–", "6.5", "–")
    # From a full checkpoint nothing is different, and four steps are done again.
    assert found.rows[5][2:4] == ("everything after step 5, full checkpoint (real)", "9.4")
    assert found.rows[5][4:] == ("0", "0", "1", "4", "4", "–", "–")
    assert costs(runs[:1]) is None
    # Where the loss does not fall for certain, nothing is told in steps.
    flat = [{**row, "loss": [9 + (-1) ** row["step"]]} for row in rows()]
    level = costs([("plain", flat), ("lost", [{**row, **told.get(row["step"], {})} for row in flat])])
    assert level is not None
    assert level.rows[1][4:6] == ("0", "–")
    alone = costs(runs[1:2])
    assert alone is not None
    assert alone.rows[0][3:] == ("–", "–", "–", "–", "0", "–", "3.25", "12")


def test_simulated_and_real_are_told_apart() -> None:
    """Also in one line, and where a record does not say: there was no other loss then."""
    both = rows(told={8: {"restarted": REAL, "recovered": {**SIMULATED, "simulated": None}}})
    assert [(one.after, one.kind) for one in losses(lines_of(both))] == [(7, "real"), (8, "simulated")]
    found = shown(losses_table(lines_of(both)))
    assert found.rows[0] == ("after step 7", "real", "partial", "2 of 8", "2,000", "2,200", "700", "0", "4", "–", "3")
    assert found.rows[1][1:6] == ("simulated", "partial", "3 of 8", "3,000", "3,100")
    assert found.rows[1][6:] == ("–", "0", "5", "0.25", "0")
    assert "2 losses of parts of the state (1 simulated and 1 real)" in sentences(lines_of(both))[0]
    assert isinstance(losses_table(lines_of(rows())), LeftOut)
    assert sentences(lines_of(rows()))[0] == ""


@pytest.mark.parametrize("simulated", [True, False])
def test_the_report_says_what_was_lost(simulated: bool, tmp_path: Path) -> None:
    told = {9: {"recovered": SIMULATED}} if simulated else {8: {"restarted": REAL}}
    folder = train(tmp_path / "run", rows(told=told), simulated=simulated)
    said = conclude(folder)["sentence"]
    words = {
        True: "3 of 8 blocks were lost after step 9 (simulated), and recovered",
        False: "restarted at step 8: 2 of 8 blocks and 3 steps were lost (real)",
    }[simulated]
    assert words in said
    page = (folder / "report.html").read_text()
    assert words in page
    assert "Parts of the state that were lost" in page
    assert ("[simulated faults] Parts of the state that were lost" in page) == simulated
    assert ("deliberately discarded" in page) == simulated
    assert ("real: nothing was injected" in page) != simulated


def test_three_runs_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(tmp_path / "plain", rows())
    partial, full = (
        train(
            tmp_path / policy,
            rows(after=9, late=late, told={9: {"recovered": {**SIMULATED, "policy": policy}}}),
            simulated=True,
        )
        for policy, late in (("partial", 3), ("full", 7))
    )
    assert cli.run(["report", str(plain), str(partial), str(full)]) == Exit.CLEAN
    told = capsys.readouterr().out
    assert "3 of 8 blocks were lost after step 9 (simulated), and recovered" in told
    assert "running.losses:  | shards,step=9 | shards,step=9" in told
    found = write_beside(plain, partial, more=[full])
    assert [Path(each.run) for each in found.runs] == [plain, partial, full]
    assert Path(found.report) == full / "beside-plain-partial.html"
    page = Path(found.report).read_text()
    assert "plain beside partial beside full" in page
    assert "Losses of the runs" in page
    assert "[simulated faults] Cost of the losses" in page
    assert "3 of 8 blocks after step 9, full (simulated)" in page
    assert read_record(plain).ended
    assert "Cost of the losses" not in Path(write_beside(plain, train(tmp_path / "b", rows())).report).read_text()
