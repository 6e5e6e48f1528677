"""Limits against their definitions and recorded values."""

import math
import random

import pytest
from hypothesis import given, strategies as st
from scipy.stats import binom, poisson

from sdc.analysis.statistics import (
    frequency_interval,
    frequency_upper_bound,
    needed_mismatches,
    proportion_interval,
)

# Found by bisection of exact sums, to 1e-12: of 10^12 elements, the upper bound and both limits at 95 %.
RECORDED = {
    1: (4.743864518392002, 0.025317807984289897, 5.571643390938334),
    2: (6.295793621874509, 0.24220927854400998, 7.224687667724538),
    10: (16.962219235724206, 4.795388696131795, 18.390356042014446),
    137: (157.87425166988123, 115.02053443378804, 161.95640468803595),
    500: (538.3764949562587, 457.12857689954944, 545.8092685651332),
}


@pytest.mark.parametrize(("confidence", "numerator"), [(0.95, 2.99573), (0.99, 4.60517)])
def test_without_a_mismatch_the_bound_is_the_rule_of_three(confidence: float, numerator: float) -> None:
    bound = frequency_upper_bound(0, 10**6, confidence=confidence)
    assert bound * 10**6 == pytest.approx(numerator, rel=1e-5)
    assert frequency_upper_bound(0, 10**6, confidence=confidence, recall=0.5) == 2 * bound


@pytest.mark.parametrize("mismatched", RECORDED)
def test_limits_are_those_of_exact_sums(mismatched: int) -> None:
    checked = 10**12
    bound, *limits = RECORDED[mismatched]
    assert frequency_upper_bound(mismatched, checked) * checked == pytest.approx(bound, rel=1e-9)
    interval = [limit * checked for limit in frequency_interval(mismatched, checked)]
    assert interval == pytest.approx(limits, rel=1e-9)


@pytest.mark.parametrize("mismatched", [1, 10, 501, 10**6, 10**9])
def test_at_a_limit_the_tail_is_what_the_confidence_leaves(mismatched: int) -> None:
    checked = 10**12
    bound = frequency_upper_bound(mismatched, checked)
    low, high = frequency_interval(mismatched, checked)
    # A tail of 10^9 counts changes by 3e4 times what its mean changes by, relatively.
    near = {"rel": 1e-9} if mismatched < 10**6 else {"rel": 1e-6}
    assert poisson.cdf(mismatched, bound * checked) == pytest.approx(0.05, **near)
    assert poisson.sf(mismatched - 1, low * checked) == pytest.approx(0.025, **near)
    assert poisson.cdf(mismatched, high * checked) == pytest.approx(0.025, **near)


def test_interval_without_a_mismatch_starts_at_zero() -> None:
    low, high = frequency_interval(0, 1000)
    assert low == 0
    assert high == pytest.approx(3.68888e-3, rel=1e-5)


def test_bounds_hold_as_often_as_they_say() -> None:
    draw, n, frequency, trials = random.Random(1), 400, 0.02, 1500
    found = [sum(draw.random() < frequency for _ in range(n)) for _ in range(trials)]
    held = sum(frequency <= frequency_upper_bound(x, n) for x in found) / trials
    inside = sum(low <= frequency <= high for low, high in (frequency_interval(x, n) for x in found)) / trials
    assert 0.95 <= held < 0.985  # exact limits of a discrete variable hold a little oftener
    assert 0.95 <= inside < 0.985


@given(st.integers(0, 2000), st.integers(1, 10**6), st.floats(0.5, 0.999))
def test_limits_enclose_the_estimate_and_are_frequencies(mismatched: int, more: int, confidence: float) -> None:
    checked = mismatched + more
    low, high = frequency_interval(mismatched, checked, confidence=confidence)
    assert 0 <= low <= mismatched / checked <= high <= 1
    bound = frequency_upper_bound(mismatched, checked, confidence=confidence)
    assert mismatched / checked <= bound <= high
    assert frequency_upper_bound(mismatched, checked + 1, confidence=confidence) <= bound


@pytest.mark.parametrize(
    ("mismatched", "checked", "options"),
    [
        (0, 0, {}),
        (-1, 10, {}),
        (11, 10, {}),
        (0, 10, {"confidence": 1.0}),
        (0, 10, {"confidence": 0.0}),
        (0, 10, {"recall": 0.0}),
        (0, 10, {"recall": 1.1}),
    ],
)
def test_impossible_counts_and_shares_are_refused(mismatched: int, checked: int, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        frequency_upper_bound(mismatched, checked, **options)
    with pytest.raises(ValueError, match="expected"):
        frequency_interval(mismatched, checked, **options)


def test_bursts_make_a_clean_run_weaker_evidence() -> None:
    assert needed_mismatches() == pytest.approx(-math.log(0.05))
    assert needed_mismatches(shape=1) == pytest.approx(19)
    assert needed_mismatches(shape=0.5) == pytest.approx(199.5)
    assert needed_mismatches(shape=1e7) == pytest.approx(needed_mismatches(), rel=1e-4)


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(0, 10, (0.0, 0.3085)), (5, 10, (0.1871, 0.8129)), (10, 1000, (0.0048, 0.0183)), (7, 7, (0.5904, 1.0))],
)
def test_exact_intervals_of_proportions(successes: int, trials: int, expected: tuple[float, float]) -> None:
    """Published values of Clopper and Pearson's interval."""
    assert proportion_interval(successes, trials) == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [
        (0, 10, (0.0, 0.3084971078187606)),
        (1, 10, (0.002528578544461535, 0.44501611702819543)),
        (10, 1000, (0.004805510691065162, 0.018313243055111617)),
        (499, 500, (0.9889075231010147, 0.999949365665993)),
    ],
)
def test_proportion_intervals_are_those_of_exact_sums(
    successes: int, trials: int, expected: tuple[float, float]
) -> None:
    """Recorded from a bisection of exact sums; and the tails of the binomial distribution are half of 5 %."""
    low, high = proportion_interval(successes, trials)
    assert (low, high) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert binom.cdf(successes, trials, high) == pytest.approx(0.025, rel=1e-9)
    if successes:
        assert binom.sf(successes - 1, trials, low) == pytest.approx(0.025, rel=1e-9)


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5])
def test_proportion_intervals_cover(p: float) -> None:
    """The probability that the interval holds the proportion, summed exactly over all counts, is at least 95 %."""
    trials = 40
    covered = 0.0
    for successes in range(trials + 1):
        low, high = proportion_interval(successes, trials)
        if low <= p <= high:
            covered += math.comb(trials, successes) * p**successes * (1 - p) ** (trials - successes)
    assert 0.95 <= covered < 1.0


def test_proportions_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="0 of 0"):
        proportion_interval(0, 0)
