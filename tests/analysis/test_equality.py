"""Every number of a record that must agree takes part in the verdict, and what cannot be read is not clean."""

import math
from typing import Any

import pytest

from sdc.analysis.summary import contents_of, summary_of

from .records import manifest, steps, summarize
from .test_summary import REAL, contents


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "clean"),
        ({"loss": None}, "inconclusive"),
        ({"gradient_norm": [1.0] * 3}, "inconclusive"),
        ({"parameter_norm": []}, "inconclusive"),
        ({"gradient_difference": [0.0, 10**400]}, "inconclusive"),
        ({"sites": {}}, "inconclusive"),
        ({"state": None}, "inconclusive"),
        ({"state": {"checked": 5, "mismatched": 0}}, "inconclusive"),
        ({"state": {"checked": 100_000}}, "inconclusive"),
        ({"state": {"checked": 100_000, "mismatched": 0, "undecided": -1}}, "inconclusive"),
        ({"state": {"checked": 100_000, "mismatched": 0, "ranks": [{"mismatched": -3}]}}, "inconclusive"),
        ({"state": {"checked": 100_000, "mismatched": 0, "undecided": 1}}, "corrupt"),
        ({"sites": {"x": {"checked": 9, "mismatched": 0, "severity": 1e9}}}, "corrupt"),
        ({"loss": [2.0, None]}, "inconclusive"),
        ({"loss": [2.0]}, "inconclusive"),
        ({"noise_to_signal": [0.0, 0.3]}, "corrupt"),
        ({"state": {"checked": 9, "mismatched": math.nan}}, "inconclusive"),
        ({"state": {"checked": 9, "mismatched": -1}}, "inconclusive"),
        ({"state": {"checked": 10**400, "mismatched": 0}}, "inconclusive"),
        ({"sites": {"x": {"checked": 9, "mismatched": 0, "nonfinite": 5}}}, "corrupt"),
        ({"state": {"checked": 9, "mismatched": 0, "ranks": [{"twin": 1, "mismatched": 3}]}}, "corrupt"),
        ({"sites": {"x": {"checked": 9, "mismatched": 0, "frequency": 0.5}}}, "corrupt"),
        ({"sites": {"x": {"checked": 9, "mismatched": 0, "unrepeated": 1}}}, "corrupt"),
        ({"step": 7}, "inconclusive"),
    ],
)
def test_numbers_that_must_agree_decide(change: dict[str, Any], verdict: str) -> None:
    """A line that says so anywhere is not clean, and neither is one that cannot be read, or is missing."""
    rows, _ = steps(5)
    rows[3] |= change
    assert summarize(manifest(**REAL), rows, []).verdict == verdict


def test_details_that_cannot_be_read_are_not_clean() -> None:
    detail = {"step": 1, "site": "fwd/ffn", "layer": 0, "mismatched": -1, "checked": 9}
    for change, verdict in (({}, "inconclusive"), ({"mismatched": 0, "severity": 5}, "corrupt")):
        assert summarize(manifest(**REAL), steps(3)[0], [detail | change]).verdict == verdict


def test_what_a_repetition_did_not_show_again_is_named() -> None:
    rows, _ = steps(3)
    rows[1]["sites"]["fwd/ffn"]["unrepeated"] = 2
    rank = {"twin": 1, "data": 0, "model": 0, "mismatched": 0, "unrepeated": 2}
    row = {"step": 1, "site": "fwd/ffn", "layer": 0, "mismatched": 0, "checked": 9, "unrepeated": 2, "ranks": [rank]}
    found = summarize(manifest(**REAL), rows, [row])
    assert (found.verdict, found.first_mismatch_step, found.odd_twins) == ("corrupt", 1, [1])
    assert "2 digests at fwd/ffn whose difference did not recur in the repetition" in found.reason


def test_twins_that_diverged_say_nothing() -> None:
    rows, _ = steps(5)
    rows[4]["loss"] = [math.nan, math.nan]
    found = summarize(manifest(**REAL), rows, [])
    assert (found.verdict, found.reason[:31]) == ("inconclusive", "the final losses are not finite")


def test_layers_beyond_all_models_are_left_out() -> None:
    late = {"step": 1, "site": "fwd/ffn", "layer": 10**9, "checked": 9, "mismatched": 1}
    found = summarize(manifest(layers=10**9), steps(3)[0], [late])
    assert found.verdict == "corrupt"
    assert len(found.layers["fwd/ffn"].mismatched) == 10_000


def test_a_stored_verdict_that_the_lines_do_not_bear_is_told() -> None:
    about, (rows, mismatches) = manifest(**REAL), steps(3)
    said = {"verdict": "corrupt", "reason": "so it is", "state_digest": ["ab"] * 2}
    stored = contents_of(summarize(about, rows, mismatches), None) | said
    found = summary_of(contents(about, rows, mismatches, stored))
    assert found.verdict == "corrupt"
    assert str(found.reason).startswith(
        "summary.json reports corruption (so it is), but the recorded lines do not: no mismatch in"
    )
