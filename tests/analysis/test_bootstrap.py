"""Intervals that hold under bursts: their coverage by simulation, and when there is none.

500 runs: a share of 95 % is off by 2.9 % in three of a thousand. What is asserted is that far below 94.5 %; the storm
`coverage` has 2,000 runs, and other intervals too.
"""

import time

import numpy as np
import pytest
from jaxtyping import Int

from sdc.analysis.statistics import frequency_interval
from sdc.analysis.statistics.intervals import LEAST, block_length, bootstrap_interval
from tests.storms.coverage import CHECKED, MEAN, RATES, intervals, of_frequency

RUNS = 500
SPIKES = "spikes in 3 % of 1,350 steps"


def counts(kind: str) -> Int[np.ndarray, "runs steps"]:
    draw = np.random.default_rng(1)
    return draw.poisson(MEAN * RATES[kind](RUNS, draw))


@pytest.mark.parametrize("kind", RATES)
def test_the_interval_contains_the_frequency_under_bursts(kind: str) -> None:
    held = of_frequency(RATES[kind], RUNS, np.random.default_rng(1))
    assert len(held) > 0.85 * RUNS
    assert 0.915 <= held.mean() < 0.99


@pytest.mark.parametrize("kind", ["gamma, 1,350 steps", SPIKES, "bursts of 5 steps every 45, 1,350 steps"])
def test_limits_of_independent_elements_do_not(kind: str) -> None:
    totals = counts(kind).sum(1).tolist()
    limits = [frequency_interval(total, CHECKED * 1350) for total in totals]
    assert np.mean([low <= MEAN / CHECKED <= high for low, high in limits]) < 0.1


def test_an_interval_is_about_as_wide_as_bursts_make_it() -> None:
    """Of spikes in 3 % of 1,350 steps, of exponential heights, the relative error is sqrt(2 / (0.03 * 1350)) = 22 %."""
    found = [bootstrap_interval(row, [CHECKED] * 1350) for row in counts(SPIKES)[:100].tolist()]
    widths = [limits[1] / limits[0] for limits in found if limits]
    assert np.exp(2 * 1.96 * 0.22) * 0.8 < np.median(widths) < np.exp(2 * 1.96 * 0.22) * 1.5


@pytest.mark.parametrize(
    ("counts", "there"),
    [
        ([0] * 1350, False),
        ([0] * 700 + [500] + [0] * 649, False),  # one spike
        ([0] * 400 + [500] * 30 + [0] * 920, False),  # one burst of 30 steps
        ([500 * (step % 200 == 0) for step in range(1350)], False),  # seven
        ([500 * (step // 200 % 2) for step in range(1350)], False),  # seven stretches, not 30 blocks
        ([500 * (step % 45 == 44) for step in range(1350)], True),  # thirty
        ([3] * (LEAST - 1), False),
        (np.random.default_rng(9).poisson(4, 100).tolist(), True),
        ([], False),
    ],
)
def test_too_few_bursts_and_too_short_runs_have_no_interval(counts: list[int], there: bool) -> None:
    assert (bootstrap_interval(counts, [CHECKED] * len(counts)) is not None) is there


def test_what_is_the_same_at_every_step_is_known() -> None:
    assert bootstrap_interval([5] * 100, [1000] * 100) == (0.005, 0.005)
    low, high = bootstrap_interval([5] * 99 + [6], [1000] * 100) or (0.0, 0.0)
    assert 0.0049 < low <= 0.00501 <= high < 0.0052


def test_limits_are_frequencies_and_scale_with_what_was_checked() -> None:
    draw = np.random.default_rng(2)
    counts = draw.poisson(5 * draw.gamma(1, 1, 200)).tolist()
    low, high = bootstrap_interval(counts, [1000] * 200) or (0.0, 0.0)
    assert 0 < low < sum(counts) / 200_000 < high < 1
    assert bootstrap_interval(counts, [10_000] * 200) == pytest.approx((low / 10, high / 10))
    assert bootstrap_interval(counts, [1000] * 200) == (low, high)
    assert bootstrap_interval(counts, [1000] * 200, seed=1) == pytest.approx((low, high), rel=0.05)
    narrow = bootstrap_interval(counts, [1000] * 200, confidence=0.5) or (0.0, 0.0)
    assert low < narrow[0] < narrow[1] < high
    # Steps without a check say nothing.
    some = [count if step % 2 else 0 for step, count in enumerate(counts)]
    checked = [1000 if step % 2 else 0 for step in range(200)]
    assert bootstrap_interval(some, checked) == bootstrap_interval(counts[1::2], [1000] * 100)
    # A step that checked twice as much counts twice as much.
    frequency = (sum(counts[:100]) + 2 * sum(counts[100:])) / 300_000
    low, high = bootstrap_interval(counts[:100] + [2 * x for x in counts[100:]], [1000] * 100 + [2000] * 100) or (0, 0)
    assert low < frequency < high


@pytest.mark.parametrize(("lasting", "low", "high"), [(1, 1, 4), (10, 15, 60), (40, 40, 150)])
def test_blocks_are_as_long_as_the_data_correlate(lasting: int, low: int, high: int) -> None:
    """Between the lag at which correlation is lost and a third of the series."""
    draw = np.random.default_rng(3)
    lengths = [block_length(np.repeat(draw.gamma(1, 1, 3000 // lasting), lasting)) for _ in range(20)]
    assert low <= np.median(lengths) <= high


def test_blocks_of_a_known_process_are_as_long_as_they_ought_to_be() -> None:
    """Of an autoregression with coefficient r, (2 G^2 / D)^(1/3) = (1.5 (2r / (1 - r^2))^2)^(1/3): 12.6 at 0.7."""
    draw = np.random.default_rng(4)
    lengths = []
    for _ in range(40):
        series = np.zeros(3000)
        noise = draw.normal(size=3000)
        for step in range(1, 3000):
            series[step] = 0.7 * series[step - 1] + noise[step]
        lengths.append(block_length(series))
    ideal = (1.5 * (2 * 0.7 / (1 - 0.49)) ** 2) ** (1 / 3) * 3000 ** (1 / 3)
    assert np.mean(lengths) == pytest.approx(ideal, rel=0.1)


def test_constants_and_short_series_have_blocks_of_one_step() -> None:
    assert [block_length(counts) for counts in ([], [3], [3, 3, 3], [1, 2])] == [1, 1, 1, 1]


def test_a_report_is_not_made_slow() -> None:
    """Half a millisecond for 1,350 steps; ten times that here, for a machine that does other things too."""
    counts = np.random.default_rng(5).poisson(MEAN, 20_000)
    for steps, most in ((1350, 0.01), (20_000, 0.05)):  # blocks are at most as many, however long a run is
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            bootstrap_interval(counts[:steps].tolist(), [CHECKED] * steps)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < most


@pytest.mark.parametrize(
    ("mismatched", "checked", "confidence"),
    [([1, 2], [10], 0.95), ([11], [10], 0.95), ([-1], [10], 0.95), ([1], [10], 1.0), ([1], [10], 0.0)],
)
def test_impossible_counts_and_shares_are_refused(mismatched: list[int], checked: list[int], confidence: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        bootstrap_interval(mismatched, checked, confidence=confidence)


def test_other_intervals_contain_what_they_estimate() -> None:
    """With few trials; `make storms STORMS=coverage` has 2,000. Fitted values: tests/train/test_node_fits.py."""
    for number, (name, simulate) in enumerate(intervals().items()):
        if not name.startswith(("frequency", "fitted")):
            held = simulate(300, np.random.default_rng([2, number]))
            assert held.mean() > 0.9, name
