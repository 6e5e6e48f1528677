"""Numbers out of records, whatever stands in their place."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sdc.analysis import write_report
from sdc.analysis.report.canvas import thin
from sdc.analysis.series import per_site, per_twin, whole, worst

from .records import lines_of, manifest, steps, write_run


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, -1, 0.5])
def test_what_is_no_count_is_none(value: float | None) -> None:
    assert whole(value) is None


def test_counts_stay_exact() -> None:
    assert whole(2**63 + 1) == 2**63 + 1
    assert whole(7.0) == 7


def test_worst_lets_nan_win_over_infinity() -> None:
    assert worst([1.0, None, 3.0]) == 3.0
    assert worst([1.0, math.inf]) == math.inf
    assert math.isnan(worst([math.inf, math.nan]) or 0.0)
    assert worst([None]) is None


LOSSES: list[dict[str, Any]] = [{"loss": [1.0, 2.0]}, {"loss": 3.0}, {}, {"loss": [None, math.inf]}]


def test_per_twin_marks_what_is_missing() -> None:
    rows = lines_of([{"step": step, **row} for step, row in enumerate(LOSSES)])
    table = per_twin(rows, "loss")
    np.testing.assert_array_equal(table, [[1.0, 3.0, np.nan, np.nan], [2.0, np.nan, np.nan, np.inf]])
    assert per_twin(rows, "gradient_norm") is None
    assert per_twin(lines_of([{"step": 0, "loss": [None, None]}]), "loss") is None


def test_per_site_marks_what_is_missing() -> None:
    rows = lines_of([{"step": 0, "sites": {"fwd/attn": {"frequency": 0.5}}}, {"step": 1, "sites": {}}, {"step": 2}])
    np.testing.assert_array_equal(per_site(rows, "fwd/attn", "frequency"), [0.5, np.nan, np.nan])


@given(st.integers(0, 5000), st.integers(0, 2**31))
def test_thinning_keeps_spikes_and_order(length: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    x, y = np.arange(float(length)), draw.normal(size=length)
    y[draw.random(length) < 0.1] = np.nan
    thin_x, thin_y = thin(x, y, limit=200)
    assert len(thin_x) == len(thin_y) <= 200
    assert (np.diff(thin_x) > 0).all()
    np.testing.assert_array_equal(thin_y, y[thin_x.astype(int)])
    if np.isfinite(y).any():
        assert np.nanmax(thin_y) == np.nanmax(y)
        assert np.nanmin(thin_y) == np.nanmin(y)


def test_what_no_axis_can_show_is_drawn_as_infinite() -> None:
    table = per_twin(lines_of([{"step": 0, "loss": [1.7e308, -1e200]}, {"step": 1, "loss": [1e100, math.nan]}]), "loss")
    assert table is not None
    np.testing.assert_array_equal(table, [[np.inf, 1e100], [-np.inf, np.nan]])


@pytest.mark.parametrize("size", [1.7e308, -1e308, 1e200, 5e-324])
def test_numbers_at_the_end_of_their_range_make_a_page(size: float, tmp_path: Path) -> None:
    rows, _ = steps(3)
    for row in rows:
        row |= {"loss": [size / (row["step"] + 1)] * 2, "gradient_norm": [abs(size)] * 2}
        row |= {key: [0.0, abs(size)] for key in ("gradient_difference", "parameter_difference")}
    write_run(tmp_path / "run", manifest(), rows)
    assert write_report(tmp_path / "run").is_file()
