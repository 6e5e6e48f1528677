"""What a record tells of losses to come, in the report: numbers where they are known, and a reason elsewhere."""

import copy
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from sdc.analysis import conclude
from sdc.analysis.report import LeftOut, Table
from sdc.analysis.report.canvas import svg
from sdc.analysis.state_losses import advice_table, latest, outlook_figure, outlook_table, sentences
from sdc.checkpoints import Outlook, advise, daly_interval
from sdc.schema import OutlookRow, RunSummary

from .records import about_of, lines_of, manifest, shown, write_run

STEPS, SECONDS = 20, 2.0
PROFILE = [2.0 ** -(part / 4) for part in range(32)]
TIMES = {"held": 0.02, "whole": 0.4, "bandwidth": 1e6}
ABOUT = {"running": {"fraction": 0.25, "losses": []}}
SUMMARY = {"seconds_per_step": SECONDS}


def outlook(step: int, *, known: bool = True) -> dict[str, Any]:
    """After so many steps, with a bound where that is known."""
    losses = [
        {"fraction": part, "steps": part * step, "one_rate": 2.0 * step if known else None, "perturbation": 0.5}
        for part in (0.125, 0.5, 1.0)
    ]
    c = {"c": 0.9, "distance": 3.0} if known else dict.fromkeys(("c", "distance"))
    return {
        "step": step, "every": 4, **c, "losses": losses, "rollback": 8.0, "bytes": 64_000_000, "speeds": PROFILE,
        "timings": TIMES,
    }  # fmt: skip


def rows(**options: Any) -> list[dict[str, Any]]:
    """Lines of a run that saved after every fourth step."""
    found = [{"step": step, "loss": [3.0 - 0.1 * step], "seconds": SECONDS} for step in range(STEPS)]
    saved = range(3, STEPS, 4)
    return [{**row, "outlook": outlook(row["step"] + 1, **options)} if row["step"] in saved else row for row in found]


def test_the_last_outlook_counts() -> None:
    found = shown(outlook_table(lines_of(rows())))
    assert found.rows == (
        ("1/8", "2.5", "40", "0.5", "8"), ("1/2", "10", "40", "0.5", "8"), ("all", "20", "40", "0.5", "8")
    )  # fmt: skip
    assert "after 20 steps" in found.note
    assert "c = 0.9 per step, as if a distance of 3 to an optimum remained. If updates shrink because" in found.note
    assert "This is an estimate, not a bound" in found.note
    assert sentences(lines_of(rows()))[1] == (
        "losing half of the state after 20 steps would cost about 10 steps (40 in any direction, if everything "
        "converges at one rate), and a full rollback would cost 8"
    )
    unknown = shown(outlook_table(lines_of(rows(known=False))))
    assert {row[2] for row in unknown.rows} == {"–"}
    assert "so this estimate is missing" in unknown.note
    assert "one rate" not in sentences(lines_of(rows(known=False)))[1]
    # One in which nothing moved is passed over.
    still = [*rows(), {"step": STEPS, "outlook": {**outlook(STEPS + 1), "losses": [], "speeds": []}}]
    assert latest(lines_of(still)) == msgspec.convert(outlook(STEPS), OutlookRow)
    drawn = shown(outlook_figure(lines_of(rows())))
    assert "1/2 lost" in svg(drawn, "outlook")


def test_advice_is_what_the_functions_say() -> None:
    found = shown(advice_table(about_of({"kind": "train", **ABOUT}), RunSummary(**SUMMARY), lines_of(rows())))
    known = Outlook.of_profile(PROFILE, 64_000_000, STEPS)
    assert [row[0] for row in found.rows[::3]] == ["every 1 hour, 1/8", "every 1 day, 1/8", "every 1 week, 1/8"]
    for row, failure in zip(found.rows[1::3], (3600.0, 86_400.0, 604_800.0), strict=True):
        given: Any = {
            "step_seconds": SECONDS, "save_seconds": (0.02, 0.4), "bandwidth": 1e6, "failure_every": failure,
            "lost": 0.5,
        }  # fmt: skip
        best, here = advise(known, **given), advise(known, **given, fraction=0.25, every=4)
        more = " or more" if best.capped else ""
        assert row[1:3] == (f"1/{round(1 / best.fraction)}" if best.fraction < 1 else "all", f"{best.every:,}{more}")
        assert float(row[3].removesuffix(more)) == pytest.approx(best.every * SECONDS / 60, rel=0.01)
        assert float(row[5].removesuffix(" %")) == pytest.approx(100 * best.waste, rel=0.06)  # two digits
        assert row[6] == "all of it"  # it saves faster than storage takes it
        assert here.waste == 1
        # What is written in 64 s is saved no more often.
        interval = max(daly_interval(0.42, failure), 64.0)
        assert float(row[7]) == pytest.approx(interval / 60, rel=0.01)
        assert float(row[8].removesuffix(" %")) == pytest.approx(
            100 * (0.42 / interval + (interval / 2 + 64) / failure), rel=0.06
        )
    assert found.rows[-1][2] == "20 or more"  # failures once a week
    assert "Or more: longer intervals may waste less, but the run has only 20 steps." in found.note
    assert "waste of this run (1/4, every 4 steps)" in found.header
    assert "2 s per step; 0.02 s for which any save blocks training, and 0.4 s more for a full save" in found.note
    assert "64 MB written at 1 MB/s" in found.note


def test_a_waste_of_everything_is_said_in_words() -> None:
    found = shown(
        advice_table(about_of({"kind": "train", **ABOUT}), RunSummary(seconds_per_step=30_000.0), lines_of(rows()))
    )
    assert found.rows[2][5:7] == ("all of it", "all of it")  # eight failures in a step
    assert "Waste of all of it: failures occur, or saves are due, faster" in found.note


@pytest.mark.parametrize(
    "gone", ["timings", "speeds", "bytes", "seconds_per_step", "held", "bandwidth", "outlook", "losses"]
)
def test_nothing_is_told_where_something_is_missing(gone: str) -> None:
    lines, summary = copy.deepcopy(rows()), dict(SUMMARY)
    for row in lines:
        for place in (row, row.get("outlook", {}), row.get("outlook", {}).get("timings", {})):
            place.pop(gone, None)
    summary.pop(gone, None)
    assert isinstance(
        advice_table(about_of({"kind": "train", **ABOUT}), RunSummary(**summary), lines_of(lines)), LeftOut
    )
    if gone in ("outlook", "losses"):
        assert isinstance(outlook_table(lines_of(lines)), LeftOut)
        assert sentences(lines_of(lines))[1] == ""
        assert isinstance(outlook_figure(lines_of(lines)), LeftOut)
    bare = advice_table(about_of({"kind": "train"}), RunSummary(**SUMMARY), lines_of(rows()))
    assert isinstance(bare, Table)  # only what the run used is not known


PATHS = [*outlook(1), *(f"timings/{name}" for name in TIMES), "losses/0", "losses/0/steps", "speeds/3"]
ODD = st.sampled_from([None, -1, 0, 1e308, 1e-308, math.inf, math.nan, 10**400])


@given(path=st.sampled_from(PATHS), value=ODD)
def test_damaged_numbers_are_no_numbers(path: str, value: Any) -> None:
    """Whatever a line holds, there is a report."""
    lines = copy.deepcopy(rows())
    place: Any = lines[-1]["outlook"]
    *way, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    for part in way:
        place = place[part]
    place[last] = value
    try:
        typed = lines_of(lines)
    except msgspec.ValidationError:  # such a line is refused when the record is read
        return
    for found in (
        outlook_table(typed),
        advice_table(about_of({"kind": "train", **ABOUT}), RunSummary(**SUMMARY), typed),
    ):
        assert isinstance(found, LeftOut) or all(len(row) == len(found.header) for row in found.rows)
        assert isinstance(found, LeftOut) or not {"NaN", "∞", "nan", "NaN %"} & {
            cell for row in found.rows for cell in row
        }
    assert "nan" not in sentences(typed)[1].lower()


def test_the_report_has_them(tmp_path: Path) -> None:
    about = manifest(
        kind="train", twins=None, sync=None, published=None, steps=STEPS,
        suspect={"name": None, "simulated": False, "faults": []}, **ABOUT,
    )  # fmt: skip
    folder = write_run(tmp_path / "run", about, rows())
    assert "losing half of the state after 20 steps would cost about 10 steps" in conclude(folder)["sentence"]
    page = (folder / "report.html").read_text()
    for title in (
        "Predicted cost of losing parts of the state",
        "Recommended saving interval and fraction",
        "Predicted cost of a loss",
    ):
        assert title in page
