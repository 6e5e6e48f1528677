"""The largest severity of a run scatters as it does in simulated runs, and says what the least one is."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc.nodes.simulated_nodes import largest_mean, least_severity, smallest_draws


def smallest(hits: float, steps: int, few: float, runs: int, rng: np.random.Generator) -> np.ndarray:
    """Smallest draw of the steps that hit anything, in those of many runs in which any does."""
    u = rng.random((runs, steps))
    hit = rng.poisson(hits * (1 + few) * u**few) > 0
    found = np.where(hit, u, np.inf).min(1)
    return np.asarray(found[np.isfinite(found)])


@pytest.mark.parametrize(("hits", "steps"), [(1e-3, 30), (0.02, 300), (1.0, 50), (1e4, 300), (3.0, 1)])
@pytest.mark.parametrize("few", [0.0, 0.7, 2.0])
def test_smallest_draws_are_those_of_simulated_runs(hits: float, steps: int, few: float) -> None:
    """Quantiles are within what 99.9 % of samples keep (Kolmogorov), and half of one of the hundred.

    For a single step the formula's exponential, where it should be a power, is exact in neither: 0.1 is allowed.
    """
    [quantiles] = smallest_draws(np.asarray([hits]), steps=steps, few=few)
    drawn = smallest(hits, steps, few, 100_000 if hits < 1e-2 else 5000, np.random.default_rng(0))
    below = (drawn[:, None] <= quantiles).mean(0)
    distance = np.abs(below - (np.arange(100) + 0.5) / 100).max()
    assert distance < 1.95 / math.sqrt(drawn.size) + 0.005 + (0.1 if steps == 1 else 0.0)


@given(
    st.lists(st.floats(-9, 12), min_size=1, max_size=4),
    st.integers(1, 100_000),
    st.floats(0, 5),
)
def test_smallest_draws_are_quantiles(powers: list[float], steps: int, few: float) -> None:
    hits = 10.0 ** np.sort(powers)
    found = smallest_draws(hits, steps=steps, few=few)
    assert found.shape == (len(hits), 100)
    assert ((found > 0) & (found <= 1)).all()
    assert (np.diff(found, axis=1) >= 0).all()
    # More hits or steps leave smaller draws; rounding and the grid of u allow for a thousandth.
    assert (np.diff(np.log(found), axis=0) < 1e-3).all()
    longer = smallest_draws(hits, steps=2 * steps, few=few)
    assert (longer <= found * (1 + 1e-3)).all()


def largest_of_runs(
    hits: float, *, steps: int, cells: int, tail: float, few: float, runs: int, rng: np.random.Generator
) -> np.ndarray:
    """The largest severity of runs: means of the elements of each cell, the largest of cells and steps."""
    found = np.zeros(runs)
    for run in range(runs):
        u = rng.random(steps)
        counts = rng.poisson(hits * (1 + few) * u**few / cells, (cells, steps))
        # The mean of n uniform numbers: exactly for a few, normal for many.
        sums = np.where(
            counts < 30,
            2
            * np.cumsum(np.concatenate([np.zeros((1, cells, steps)), rng.random((30, cells, steps))]), 0)[
                np.minimum(counts, 29), np.arange(cells)[:, None], np.arange(steps)
            ],
            counts + np.sqrt(counts / 3) * rng.standard_normal((cells, steps)),
        )
        means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        found[run] = np.max(u**-tail * means.max(0))
    return found


@pytest.mark.parametrize(
    ("hits", "few", "tail"),
    [(0.01, 0.0, 0.5), (50.0, 0.0, 0.5), (1.0, 1.7, 1.17), (50.0, 1.7, 1.17), (5000.0, 1.7, 1.17), (8.0, 0.7, 1.0),
     (5000.0, 0.7, 0.0)],
)  # fmt: skip
def test_the_least_severity_is_recovered(hits: float, few: float, tail: float) -> None:
    """Five standard errors of the mean logarithm over 400 runs, and a quarter for what is taken as simpler than it is.

    These are `largest_mean` and that the worst step is the one with the smallest draw.
    """
    least, steps, cells = 0.037, 60, 8
    rng = np.random.default_rng(0)
    runs = largest_of_runs(hits, steps=steps, cells=cells, tail=tail, few=few, runs=400, rng=rng)
    found = least_severity(least * runs, np.full(400, hits), steps=steps, cells=cells, tail=tail, few=few)
    scatter = np.log(runs[runs > 0]).std() / math.sqrt((runs > 0).sum())
    assert abs(math.log(found / least)) < 5 * scatter + 0.25


@given(st.floats(1e-6, 1e6), st.floats(-3, 8), st.floats(0, 3), st.floats(0, 2))
@settings(max_examples=30)
def test_severities_scale(factor: float, power: float, few: float, tail: float) -> None:
    """What is so many times as severe has so much higher a least one, and layers without a hit say nothing."""
    rng = np.random.default_rng(0)
    largest, hits = rng.random(5) + 0.1, np.full(5, 10.0**power)

    def fit(largest: np.ndarray, hits: np.ndarray) -> float:
        return least_severity(largest, hits, steps=100, cells=16, tail=tail, few=few)

    known = fit(largest, hits)
    assert fit(factor * largest, hits) == pytest.approx(factor * known)
    silent = np.zeros(1)
    assert fit(np.concatenate([largest, silent]), np.concatenate([hits, silent])) == pytest.approx(known)
    assert fit(np.concatenate([largest, silent]), np.concatenate([hits, hits[:1]])) == pytest.approx(known)
    assert known <= largest.max() * (1 + 1e-9)  # none of these is below the least


@pytest.mark.parametrize("cells", [2, 16, 512])
@pytest.mark.parametrize("each", [0.05, 0.5, 1.0, 3.0, 30.0, 3000.0])
def test_the_largest_mean_is_nearly_that_of_simulated_cells(cells: int, each: float) -> None:
    """To 20 %, which is little beside a tail: its draws scatter by a factor of three from run to run."""
    rng = np.random.default_rng(0)
    hits = max(1, round(cells * each))
    found = []
    for _ in range(100):
        if hits > 100 * cells:
            means = 1 + rng.standard_normal(cells) / math.sqrt(3 * hits / cells)
        else:
            of = rng.integers(0, cells, hits)
            counts = np.bincount(of, minlength=cells)
            sums = np.bincount(of, 2 * rng.random(hits), minlength=cells)
            means = sums[counts > 0] / counts[counts > 0]
        found.append(means.max())
    [expected] = largest_mean(np.asarray([float(hits)]), cells)
    assert expected == pytest.approx(np.mean(found), rel=0.2)


@given(st.floats(-2, 12), st.integers(2, 4096))
def test_the_largest_mean_is_possible(power: float, cells: int) -> None:
    [found] = largest_mean(np.asarray([10.0**power]), cells)
    assert 1 <= found <= 2
