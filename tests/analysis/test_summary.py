"""Verdict and totals from the lines of a record."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from etils import epath

from sdc.analysis import tables
from sdc.analysis.headline import excluded
from sdc.analysis.report import Table
from sdc.analysis.summary import SUBMODULES, contents_of, summary_of
from sdc.records.layout import kind_of
from sdc.records.lines import Rows
from sdc.records.record import Contents

from .records import ELEMENTS, PUBLISHED, details_of, free_steps, lines_of, manifest, step_row, steps, summarize

RATES = {site: known["frequency"] for site, known in PUBLISHED.items()}
REAL = {"suspect": {"name": None, "simulated": False, "faults": []}, "published": None}


AGREED = {"state_digest": ["ab"] * 2}
"""What the summary of twins says that ended alike."""


def rows_of(rows: Sequence[dict[str, Any]] = ()) -> Rows:
    return Rows(lines_of([*rows]), rows)


def contents(*parts: Any) -> Contents:
    about, rows, mismatches, summary, *discarded = parts
    kind, details = kind_of(about["kind"]), Rows(details_of(mismatches), mismatches)
    return Contents(epath.Path("run"), kind, about, rows_of(rows), details, summary, rows_of(*discarded))


def test_clean_states_the_bound_over_everything_that_was_checked() -> None:
    summary = summarize(manifest(**REAL), *steps(20))
    elements = 20 * 4 * len(SUBMODULES) * ELEMENTS
    assert summary.verdict == "clean"
    assert f"{elements:,} checked elements" in summary.reason
    assert f"below {-math.log(0.05) / elements:.2g}" in summary.reason
    assert "95 %" in summary.reason
    assert summary.first_mismatch_step is None
    assert summary.simulated is False
    site = summary.submodules["fwd/attn"]
    assert site.checked == 20 * 4 * ELEMENTS
    assert (site.frequency, site.severity, site.mismatched) == (0.0, None, 0)
    assert site.frequency_upper_95 == pytest.approx(-math.log(0.05) / site.checked)


def test_corrupt_totals_are_those_of_the_lines() -> None:
    rows, mismatches = steps(20, rates=RATES)
    summary = summarize(manifest(), rows, mismatches)
    assert summary.verdict == "corrupt"
    assert summary.first_mismatch_step == 0
    assert msgspec.to_builtins(summary.published) == PUBLISHED
    assert summary.simulated is True
    for site in SUBMODULES:
        here = [row for row in mismatches if row["site"] == site]
        total = summary.submodules[site]
        assert total.mismatched == total.injected == sum(row["mismatched"] for row in here)
        assert total.frequency == total.mismatched / (20 * 4 * ELEMENTS)
        assert total.severity == max(row["severity"] for row in here)
        layers = summary.layers[site]
        for layer in range(4):
            hits = [row for row in here if row["layer"] == layer]
            assert layers.mismatched[layer] == sum(row["mismatched"] for row in hits)
            assert layers.frequency[layer] == layers.mismatched[layer] / (20 * ELEMENTS)
            assert layers.severity[layer] == max((row["severity"] for row in hits), default=None)
        assert sum(layers.frequency) / 4 == pytest.approx(total.frequency)  # equation (2)
    assert summary.seconds_per_step == 0.5  # a median: compilation in the first step does not count


def test_a_site_in_between_is_listed_apart() -> None:
    rows, mismatches = steps(2)
    rows[1]["sites"]["remat/ffn"] = {"checked": 10, "mismatched": 1, "injected": 1, "severity": 0.5}
    summary = summarize(manifest(), rows, mismatches)
    assert summary.verdict == "corrupt"
    assert summary.first_mismatch_step == 1
    assert summary.other_sites["remat/ffn"].frequency == 0.1
    assert "remat/ffn" in summary.reason
    assert list(summary.submodules) == list(SUBMODULES)


@pytest.mark.parametrize(
    "change",
    [
        {"loss": [2.0, math.nextafter(2.0, 3.0)]},
        {"loss": [0.0, -0.0]},
        {"loss": [math.nan, 2.0]},
        {"loss": [math.inf, 2.0]},
        {"gradient_norm": [1.0, 1.5]},
        {"parameter_norm": [40.0, 40.5]},
        {"parameter_difference": [0.0, 1e-30]},
        {"gradient_difference": [0.0, math.nan]},
        {"state": {"checked": 10, "mismatched": 1}},
        {"gradient": {"checked": 10, "mismatched": 1}},
    ],
)
def test_one_difference_anywhere_is_corruption(change: dict[str, Any]) -> None:
    rows, _ = steps(5)
    rows[3] |= change
    summary = summarize(manifest(**REAL), rows, [])
    assert summary.verdict == "corrupt"
    assert summary.first_mismatch_step == 3


def test_final_states_that_differ_are_corruption() -> None:
    """Bits may change after the last step was compared, as while the last checkpoint is written."""
    about, (rows, mismatches) = manifest(**REAL), steps(3)
    ended = contents_of(summarize(about, rows, mismatches), None)
    for digests, verdict in ((["ab", "ab"], "clean"), (["ab", "ac"], "corrupt"), ([], "inconclusive")):
        found = summary_of(contents(about, rows, mismatches, ended | {"state_digest": digests}))
        assert found.verdict == verdict
    single = contents({**about, "kind": "train"}, rows, [], ended | {"verdict": None, "state_digest": ["ab"]})
    assert summary_of(single).verdict is None
    rows[1]["state"]["mismatched"] = 1  # what is known already is told
    found = summary_of(contents(about, rows, mismatches, ended | {"state_digest": ["ab", "ac"]}))
    assert "1 of " in found.reason


def test_digests_of_all_twins_are_needed() -> None:
    about, (rows, mismatches) = manifest(**REAL), steps(3)
    stored = contents_of(summarize(about, rows, mismatches), {"state_digest": ["ab"] * 2})
    for change, words in (
        ({"state_digest": ["ab"]}, "1 final states for 2 twins"),
        ({"steps": 9}, "3 of the 9 steps are recorded"),
        ({"state_digest": None}, "0 final states for 2 twins"),
    ):
        found = summary_of(contents(about, rows, mismatches, stored | change))
        assert found.verdict == "inconclusive"
        assert words in found.reason


def test_what_was_computed_from_the_lines_stands() -> None:
    about, (rows, mismatches) = manifest(**REAL), steps(3)
    ended = contents_of(summarize(about, rows, mismatches), {"state_digest": ["ab"] * 2})
    stored = {**ended, "submodules": {}, "hosts": 7, "note": "mine"}
    assert contents_of(summary_of(contents(about, rows, mismatches, stored)), stored) == {**ended, "note": "mine"}


@pytest.mark.parametrize(("least", "verdict"), [(None, "clean"), (1, "clean"), (10**12, "inconclusive")])
def test_a_least_number_of_checked_elements(least: int | None, verdict: str) -> None:
    summary = summarize(manifest(**REAL, least_elements=least), *steps(3))
    assert summary.verdict == verdict
    assert ("at least 1,000,000,000,000 are required" in summary.reason) == (verdict != "clean")


HERE, THERE = {"host": "a", "machine": "1"}, {"host": "b", "machine": "2"}


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"environment": {"platform": "cpu"}, "processes": 1}, "a rehearsal"),
        ({"environment": {"platform": "cpu"}, "devices": [HERE, HERE]}, "a rehearsal"),
        ({"environment": {"platform": "cpu"}, "devices": [HERE, THERE]}, None),
        ({"environment": {"platform": "gpu"}, "devices": [HERE, HERE]}, None),
        ({"environment": {"platform": "gpu"}, "processes": 1, "placement": "vmap"}, "twins shared their devices"),
    ],
)
def test_clean_says_what_it_rests_on(about: dict[str, Any], words: str | None) -> None:
    summary = summarize(manifest(**REAL, **about), *steps(3))
    assert summary.verdict == "clean"
    assert summary.rehearsal == (words == "a rehearsal")
    assert words is None or words in summary.reason
    assert ("rehearsal" in summary.reason or "shared" in summary.reason) == (words is not None)


@pytest.mark.parametrize("part", ["state", "gradient"])
def test_the_odd_one_of_three_twins_is_named(part: str) -> None:
    rows, _ = steps(3)
    for row in rows:
        row["sites"] = {}
    ranks = [{"twin": 1, "data": 0, "model": 1, "mismatched": 2}]
    rows[1][part] = {"checked": 100, "mismatched": 2, "ranks": ranks}
    summary = summarize(manifest(**REAL | {"twins": 3}, sync="params"), rows, [])
    assert (summary.odd_twins, summary.first_mismatch_step) == ([1], 1)
    assert summary.reason.startswith("twin 1 differs from the majority in 2 of ")
    two = summarize(manifest(**REAL, sync="params"), rows, [])
    assert (two.odd_twins, two.reason[:16]) == ([1], "the twins differ")


@pytest.mark.parametrize("loss", [[math.nan, -math.nan], [math.inf, math.inf], [3, 3.0]])
def test_equal_losses_are_equal_even_when_not_finite(loss: list[float]) -> None:
    rows, _ = steps(5)
    rows[3]["loss"] = loss
    assert summarize(manifest(**REAL), rows, []).verdict == "clean"


def test_a_mismatch_of_a_step_that_a_crash_cut_off_still_counts() -> None:
    rows, _ = steps(5)
    late = {"step": 5, "microstep": 0, "site": "fwd/attn", "layer": 1, "checked": 9, "mismatched": 1, "injected": 1}
    summary = summarize(manifest(), rows, [late])
    assert summary.verdict == "corrupt"
    assert summary.first_mismatch_step == 5
    assert summary.layers["fwd/attn"].mismatched == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "no step"),
        ([step_row(0), step_row(1)], "nothing was checked"),
        (
            [step_row(0) | {"sites": {"fwd/attn": {"checked": 0}}}],
            "nothing was checked",
        ),
        ([step_row(0) | {"state": {"checked": math.nan, "mismatched": 0}}], "nothing was checked"),
    ],
)
def test_what_was_not_checked_is_not_clean(rows: list[dict[str, Any]], reason: str) -> None:
    summary = summarize(manifest(**REAL), rows, [])
    assert summary.verdict == "inconclusive"
    assert reason in summary.reason


def test_a_fault_that_nothing_saw_is_not_clean() -> None:
    rows, _ = steps(5)
    rows[2]["sites"]["fwd/ffn"]["injected"] = 7
    summary = summarize(manifest(), rows, [])
    assert summary.verdict == "inconclusive"
    assert "7 values" in summary.reason


def test_parameters_alone_make_a_run_clean() -> None:
    row = step_row(0) | {"state": {"checked": 500, "mismatched": 0}, "sites": {"fwd/attn": {"injected": 0}}}
    summary = summarize(manifest(**REAL, sync="params"), [row], [])
    assert summary.verdict == "clean"
    assert "500 checked elements (parameters and optimizer state)" in summary.reason
    assert summary.submodules["fwd/attn"].frequency is None


def test_free_twins_report_drift() -> None:
    rows = free_steps(60)
    summary = summarize(manifest(sync="none"), rows, [])
    assert summary.verdict == "corrupt"
    assert summary.first_mismatch_step == 5
    assert summary.worst_noise_to_signal == max(row["noise_to_signal"][1] for row in rows)  # the spike
    assert summary.parameter_difference == rows[-1]["parameter_difference"][1]
    assert summary.final_loss == rows[-1]["loss"]
    assert summary.submodules["fwd/attn"].injected == 180
    assert summary.layers["fwd/attn"].frequency == [None] * 4
    rows[3]["noise_to_signal"] = [0.0, math.nan]
    assert math.isnan(summarize(manifest(sync="none"), rows, []).worst_noise_to_signal)


def test_training_has_no_verdict() -> None:
    summary = summarize(manifest(kind="train", twins=1, suspect={}, published=None), [step_row(0, 1)], [])
    assert summary.verdict is None
    assert summary.final_loss == step_row(0, 1)["loss"]
    assert summary.worst_noise_to_signal is None


def test_damaged_counts_are_neither_checked_nor_mismatched() -> None:
    rows, mismatches = steps(3, rates=RATES)
    damaged = copy.deepcopy(rows)
    damaged[1]["sites"]["fwd/attn"]["checked"] = math.inf
    before, after = (summarize(manifest(), each, mismatches).submodules["fwd/attn"] for each in (rows, damaged))
    assert after.checked == before.checked - 4 * ELEMENTS
    assert after.mismatched == before.mismatched - rows[1]["sites"]["fwd/attn"]["mismatched"]


def test_a_verdict_is_not_clean_before_its_time() -> None:
    about, (rows, mismatches) = manifest(**REAL), steps(3)
    ended = summarize(about, rows, mismatches)
    assert ended.verdict == "clean"
    whole = contents_of(ended, {"state_digest": ["ab"] * 2})
    assert summary_of(contents(about, rows, mismatches, whole)).verdict == "clean"
    early = summary_of(contents(about, rows, mismatches, None))
    assert early.verdict == "inconclusive"
    assert str(ended.reason) in str(early.reason)
    rows[1]["state"]["mismatched"] = 1
    found = summary_of(contents(about, rows, mismatches, None))
    assert found.verdict == "corrupt"
    for verdict in ("clean", "inconclusive", None):  # what it says of itself does not unsay its lines
        said = summary_of(contents(about, rows, mismatches, {"verdict": verdict, "reason": "none"}))
        assert (said.verdict, said.reason) == ("corrupt", found.reason)


@pytest.mark.parametrize(
    ("coverage", "least", "verdict"),
    [
        (1.0, 0.9, "clean"),
        (0.5, 0.9, "inconclusive"),
        (0.5, 0.5, "clean"),
        (0.0, 0.9, "inconclusive"),
        (0.0, 0.0, "clean"),
    ],
)
def test_products_that_were_not_checked_are_not_clean(coverage: float, least: float, verdict: str) -> None:
    checked = {
        "checked": 64,
        "examined": 0,
        "flagged": 0,
        "confirmed": 0,
        "corrected": 0,
        "nonfinite": 0,
        "margin": 0.1,
    }
    left = {"site": "fwd/ffi_call", "source": "model.py:3 (attention)", "reason": "it cannot be entered", "share": None}
    line = {**checked, "sites": {"fwd/dot_general": checked}, "rows": []}
    line |= {"coverage": coverage, "skipped": [] if coverage == 1 else [left]}
    rows = [{"step": 0, "abft": line}]
    summary = summarize(manifest(**REAL, kind="train", abft={"mode": "detect", "least_coverage": least}), rows, [])
    assert summary.verdict == verdict
    assert ("fwd/ffi_call (model.py:3 (attention)): it cannot be entered" in summary.reason) == (
        verdict == "inconclusive"
    )
    table = tables.products(summary.abft)[1]
    shown = len(table.rows) if isinstance(table, Table) else 0
    assert summary.abft is not None
    assert shown == len(summary.abft.skipped) == (coverage in (0.0, 0.5))


QUIET = dict.fromkeys(("checked", "examined", "flagged", "confirmed", "corrected", "nonfinite"), 0) | {"checked": 64}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({**QUIET, "sites": {"a": QUIET}, "coverage": 1.0}, None),
        ({**QUIET, "sites": {"a": QUIET}, "coverage": None}, "step 1 has no readable coverage"),
        ({**QUIET, "sites": {"a": QUIET}, "coverage": math.nan}, "step 1 has no readable coverage"),
        (
            {**QUIET, "sites": {"a": {**QUIET, "flagged": None}}, "coverage": 1.0},
            "whose sum is not the recorded total (flagged)",
        ),
        (
            {**QUIET, "sites": {"a": QUIET}, "coverage": 1.0, "flagged": 3},
            "whose sum is not the recorded total (flagged)",
        ),
        (
            {**QUIET, "sites": {"a": QUIET}, "coverage": 1.0, "confirmed": math.nan},
            "whose sum is not the recorded total (confirmed)",
        ),
        (
            {**QUIET, "sites": {"a": QUIET, "b": QUIET}, "coverage": 1.0},
            "whose sum is not the recorded total (checked)",
        ),
        (
            {**QUIET, "sites": {"a": QUIET}, "coverage": 1.0, "rows": [{"site": "a", "flagged": 1}]},
            "step 1 lists flagged rows",
        ),
        (None, "step 1 has no counts of its matrix products"),
    ],
)
def test_products_whose_numbers_disagree_are_not_clean(line: dict[str, Any] | None, told: str | None) -> None:
    rows = [{"step": 0, "abft": {**QUIET, "sites": {"a": QUIET}, "coverage": 1.0}}, {"step": 1, "abft": line}]
    summary = summarize(manifest(**REAL, kind="train", abft={"mode": "detect"}), rows, [])
    assert summary.verdict == ("inconclusive" if told else "clean")
    assert (told or "no flag in 128 checked rows") in summary.reason


def test_steps_that_were_run_again_and_agreed_leave_a_run_clean() -> None:
    """As after a resumption: some of the last steps are in the record twice, and the first of them are not."""
    rows, _ = steps(6)
    about = manifest(**REAL)
    stored = contents_of(summarize(about, rows, []), {"state_digest": ["ab"] * 2})
    run = contents(about, rows, [], stored, [rows[4], rows[3], rows[4]])
    assert summary_of(run).verdict == "clean"
    bare = {"step": 4, "loss": [1.0, 1.0]}  # a step at which nothing was compared
    assert summary_of(dataclasses.replace(run, discarded=rows_of([bare]))).verdict == "clean"
    for lines in ([{**rows[4], "loss": [None, 2.0]}], [{**bare, "sites": {"fwd/ffn": {"injected": 2}}}]):
        assert summary_of(dataclasses.replace(run, discarded=rows_of(lines))).verdict == "inconclusive"
    hit = {"step": 4, "site": "fwd/ffn", "mismatched": 1}
    again = summary_of(dataclasses.replace(run, discarded=rows_of([{**bare, "mismatches": [hit]}])))
    assert again.verdict == "corrupt"
    assert "in 1 repeated steps" in again.reason


@pytest.mark.parametrize(
    ("steps_done", "told"),
    [
        (1, "no bursts, since it is too short"),
        (3, "at every step"),
        (30, "every 10 steps or more often"),
        (3000, "every 1e+03 steps"),
    ],
)
def test_which_bursts_are_excluded(steps_done: int, told: str) -> None:
    assert told in excluded(steps_done)
