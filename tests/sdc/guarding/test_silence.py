"""Bounds from checks that found nothing, and delays, hold in simulations."""

import math

import numpy as np
import pytest

from sdc.guarding import LayerReport, expected_delay, most_wrong

RNG = np.random.default_rng(0)


def checked(windows: list[int], wrong: np.ndarray) -> bool:
    """Returns whether one random step of some window is wrong."""
    start = 0
    for window in windows:
        if wrong[start + RNG.integers(window)]:
            return True
        start += window
    return False


@pytest.mark.parametrize("burst", [1, 30, 200])
def test_the_bound_holds_for_independent_and_for_bursty_faults(burst: int) -> None:
    windows = [40] * 20 + [100] * 12
    whole = sum(windows)
    steps = {40: 800, 100: 1200}
    bound = math.ceil(most_wrong(steps)) + 1
    missed, trials = 0, 2_000
    for _ in range(trials):
        wrong = np.zeros(whole, bool)
        while wrong.sum() < bound:
            start = RNG.integers(whole)
            wrong[start : start + burst] = True
        missed += not checked(windows, wrong)
    # A rate of 5 %, with three standard deviations of the simulation.
    assert missed / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_the_bound_is_sharp_for_spread_faults_where_few_checks_are() -> None:
    bound = most_wrong({100: 10_000})
    assert (1 - 1 / 100) ** bound == pytest.approx(0.05, rel=0.02)
    assert most_wrong({1: 50}) == pytest.approx(3, abs=0.01)  # every step was computed again, and 50 were right
    assert most_wrong({0: 70, 1: 50}) == pytest.approx(73, abs=0.01)  # 70 steps could not be checked
    assert most_wrong({50: 10}) == 10  # too few checks to say anything
    assert most_wrong({100: 10_000}, recall=0.5) == pytest.approx(2 * bound, rel=0.01)


@pytest.mark.parametrize("window", [1, 5, 50])
def test_the_bound_holds_for_computations_that_are_wrong_independently(window: int) -> None:
    checks = 200
    rate = most_wrong({window: checks * window}) / (checks * window)
    missed = np.mean([not (RNG.random(checks) < rate).any() for _ in range(4_000)])
    assert missed <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4_000)


@pytest.mark.parametrize(("burst", "window"), [(1, 20), (10, 20), (20, 20), (60, 20)])
def test_delays_are_those_of_the_formula(burst: int, window: int) -> None:
    rate, delays = 0.02, []
    for _ in range(600):
        start = int(RNG.integers(window))  # the fault begins somewhere in a window, with a burst
        step, chosen, left = start, int(RNG.integers(window)), burst if burst > 1 else 0
        while True:
            if step % window == 0:
                chosen = step + int(RNG.integers(window))
            if left <= 0 and RNG.random() < rate / burst / (1 - rate):
                left = burst
            if left and step == chosen:
                break
            left = max(left - 1, 0)
            step += 1
        delays.append(step - start)
    assert np.mean(delays) == pytest.approx(expected_delay(window, rate, burst=burst), rel=0.2)


def test_without_faults_or_checks_nothing_is_found() -> None:
    assert expected_delay(10, 0.0) == math.inf
    assert expected_delay(10, 0.1, recall=0.0) == math.inf


def test_each_computation_of_a_check_can_be_wrong() -> None:
    report = LayerReport("a", "", "", 100, 0.0, {10: 1000}, 1.0, computations=2)
    assert report.delay(0.1) == expected_delay(10, 1 - 0.9**2)
    assert report.delay(0.1, burst=30) == expected_delay(10, 0.1, burst=30)
