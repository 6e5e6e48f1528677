"""How long to wait: closed forms against the F and chi-square distributions, and every probability by simulation.

Simulations have 20,000 runs, so that a share of 95 % is off by 0.5 % in three of a thousand: `ERROR` is that.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chi2, expon, f as snedecor, poisson

from sdc.analysis.headline import again
from sdc.analysis.statistics.intervals import (
    burn_in_steps,
    count_bursts,
    excluded_interval,
    mean_interval_limits,
    probability_seen,
)
from sdc.verdict import limit

RUNS = 20_000
ERROR = 3 * math.sqrt(0.95 * 0.05 / RUNS)
MEAN = 45_000.0  # steps between bursts; so long that rounding to whole steps is nothing


@pytest.mark.parametrize(
    ("observed", "steps", "times"), [(None, 1349, 2.996), (1, 8550, 19.0), (3, 2315, 5.144), (10, 1572, 3.493)]
)
def test_a_burn_in_takes_as_long_as_the_rate_is_uncertain(observed: int | None, steps: int, times: float) -> None:
    assert burn_in_steps(450, observed=observed) == steps
    assert burn_in_steps(10**9, observed=observed) / 10**9 == pytest.approx(times, abs=1e-3)
    known = expon.ppf(0.95) if observed is None else snedecor.ppf(0.95, 2, 2 * observed)
    assert burn_in_steps(10**9, observed=observed) / 10**9 == pytest.approx(known, rel=1e-6)


def test_many_observations_come_to_a_known_rate() -> None:
    assert burn_in_steps(10**6, observed=10**7) == pytest.approx(burn_in_steps(10**6), rel=1e-5)
    assert probability_seen(3, 1, observed=10**9) == pytest.approx(probability_seen(3, 1), rel=1e-6)


@pytest.mark.parametrize("observed", [None, 1, 3, 10])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_the_probability_is_the_inverse_of_the_plan(observed: int | None, confidence: float) -> None:
    steps = burn_in_steps(MEAN, observed=observed, confidence=confidence)
    assert probability_seen(steps, MEAN, observed=observed) == pytest.approx(confidence, abs=1e-5)
    assert probability_seen(steps - 1, MEAN, observed=observed) < confidence
    assert probability_seen(0, MEAN, observed=observed) == 0


@pytest.mark.parametrize("observed", [None, 1, 3, 10])
def test_plans_show_a_burst_as_often_as_they_say(observed: int | None) -> None:
    """Each run observes its own intervals, plans by their mean alone, and waits for the next burst."""
    draw = np.random.default_rng(1)
    means = np.full(RUNS, MEAN) if observed is None else draw.exponential(MEAN, (RUNS, observed)).mean(1)
    following = draw.exponential(MEAN, RUNS)
    plans = np.asarray([burn_in_steps(mean, observed=observed) for mean in means])
    assert np.mean(following <= plans) == pytest.approx(0.95, abs=ERROR)
    three = np.mean(following <= 3 * means)  # the rule of three intervals, which holds for a known mean only
    assert three == pytest.approx(probability_seen(3, 1, observed=observed), abs=3 * math.sqrt(0.25 / RUNS))
    assert {None: 0.95, 1: 0.75, 3: 0.875, 10: 0.927}[observed] == pytest.approx(three, abs=0.01)


@pytest.mark.parametrize("bursts", [0.3, 1.0, 3.0, 10.0])
def test_plans_of_runs_of_a_fixed_length_hold_at_the_least(bursts: float) -> None:
    """Counted over a fixed number of steps; where none was seen nothing is planned, so that nothing can fail."""
    draw = np.random.default_rng(2)
    seen = draw.poisson(bursts, RUNS)
    following = draw.exponential(1 / bursts, RUNS)  # in lengths of the run
    plan = {k: burn_in_steps(10**6 / k, observed=k) / 10**6 for k in range(1, seen.max() + 1)}
    failed = np.asarray([k > 0 and later > plan[k] for k, later in zip(seen.tolist(), following, strict=True)])
    assert failed.mean() < 0.05 + ERROR
    exact = sum(poisson.pmf(k, bursts) * math.exp(-bursts * plan[k]) for k in plan)
    assert failed.mean() == pytest.approx(exact, abs=ERROR)


@pytest.mark.parametrize("bursts", [1e-3, 0.05, 1.0, 5.0, 20.0, 80.0])
def test_such_plans_never_fail_more_often(bursts: float) -> None:
    """Summed exactly over all counts."""
    counts = np.arange(1, 300)
    plans = np.expm1(-np.log(0.05) / counts)
    assert np.sum(poisson.pmf(counts, bursts) * np.exp(-bursts * plans)) < 0.05


@pytest.mark.parametrize("observed", [1, 3, 10])
def test_limits_of_a_mean_interval_are_those_of_chi_square(observed: int) -> None:
    low, high = mean_interval_limits(900, observed, ends_with_burst=True)
    assert (low, high) == pytest.approx([1800 / chi2.ppf(p, 2 * observed) for p in (0.975, 0.025)], rel=1e-9)
    fixed = mean_interval_limits(900, observed)
    assert fixed == pytest.approx((1800 / chi2.ppf(0.975, 2 * observed + 2), high), rel=1e-9)


@pytest.mark.parametrize("observed", [1, 3, 10])
def test_limits_of_observed_intervals_cover_exactly(observed: int) -> None:
    totals = np.random.default_rng(3).exponential(MEAN, (RUNS, observed)).sum(1)
    low, high = np.transpose([mean_interval_limits(total, observed, ends_with_burst=True) for total in totals])
    assert np.mean((low <= MEAN) & (high >= MEAN)) == pytest.approx(0.95, abs=ERROR)


@pytest.mark.parametrize("bursts", [0.2, 1.0, 3.0, 10.0])
def test_limits_of_counts_in_a_fixed_time_cover_at_least(bursts: float) -> None:
    seen = np.random.default_rng(4).poisson(bursts, RUNS)
    limits = {k: mean_interval_limits(1000, k) for k in range(seen.max() + 1)}
    held = np.mean([limits[k][0] <= 1000 / bursts <= limits[k][1] for k in seen.tolist()])
    assert 0.95 - ERROR <= held < 1
    assert limits[0][1] == math.inf


def test_a_clean_run_excludes_what_it_would_have_shown() -> None:
    excluded = excluded_interval(1350)
    assert excluded == pytest.approx(450.6, abs=0.1)
    clean = np.random.default_rng(5).exponential(excluded, RUNS) > 1350
    assert clean.mean() == pytest.approx(0.05, abs=ERROR)


@pytest.mark.parametrize(
    ("steps", "length", "bursts"),
    [
        ([], 1350, 0),
        ([7], 1350, 1),
        ([7, 8, 9], 1350, 1),
        ([450, 900], 1350, 2),
        ([10, 12, 14, 500, 502, 505, 990, 992], 1350, 3),
        (range(0, 1350, 2), 1350, 675),  # every other step
        ([0, 60, 120, 180, 700], 1350, 5),  # 60 steps are more than a fifth of 270
        ([0, 30, 60, 90, 700], 1350, 2),
        ([9, 7, 8, 8], 1350, 1),
    ],
)
def test_bursts_are_told_apart(steps: list[int], length: int, bursts: int) -> None:
    assert count_bursts(steps, length) == bursts


def hits(kind: str, length: int, draw: np.random.Generator) -> np.ndarray:
    """Which steps have a mismatch: at random, or in bursts at random times that last five or 20 steps on average."""
    if kind == "random":
        return draw.random(length) < 0.01
    lasting, density = {"short": (5, 1.0), "long": (20, 0.5)}[kind]
    hit, step = np.zeros(length, bool), int(draw.exponential(450))
    while step < length:
        stop = step + draw.geometric(1 / lasting)
        hit[step:stop] = draw.random(len(hit[step:stop])) < density
        hit[step] = True
        step = int(stop + draw.exponential(450))
    return hit


@pytest.mark.parametrize("kind", ["random", "short", "long"])
def test_what_was_hit_is_seen_again_in_the_planned_steps(kind: str) -> None:
    """97 % and more; 93 % here for the error of 400 runs. Counting each step as a burst, 60 to 70 % would be."""
    draw, length, seen = np.random.default_rng(6), 1350, []
    for _ in range(400):
        series = hits(kind, 30 * length, draw)
        if bursts := count_bursts(np.flatnonzero(series[:length]).tolist(), length):
            seen.append(series[length:][: burn_in_steps(length / bursts, observed=bursts)].any())
    assert len(seen) > 300
    assert np.mean(seen) > 0.94


def test_advice_says_what_a_plan_rests_on() -> None:
    assert again([700], 1350).startswith("Plan 25,650 more steps")
    assert "based on 1 burst in 1,350 steps" in again([700, 701], 1350)
    advice = again([5, 400, 900], 1350)
    assert advice.startswith(f"Plan {burn_in_steps(450, observed=3):,} more steps")
    assert "3 bursts in 1,350 steps" in advice
    assert "153 to 2,183 steps" in advice


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: burn_in_steps(0), "mean interval of 0"),
        (lambda: burn_in_steps(math.inf), "positive number"),
        (lambda: burn_in_steps(450, observed=0), "observed=0"),
        (lambda: burn_in_steps(450, confidence=1.0), "confidence 1.0"),
        (lambda: probability_seen(-1, 450), "-1 steps"),
        (lambda: probability_seen(math.nan, 450), "nan steps"),
        (lambda: mean_interval_limits(0, 1), "1 bursts in 0 steps"),
        (lambda: mean_interval_limits(10, -1), "at least 0 bursts"),
        (lambda: mean_interval_limits(10, 0, ends_with_burst=True), "at least 1 burst"),
        (lambda: mean_interval_limits(10, 1, confidence=0.0), "confidence 0.0"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


def test_a_limit_holds_as_it_is_printed() -> None:
    drawn = np.random.default_rng(0)
    for value in 10.0 ** drawn.uniform(-30, 30, 1000):
        for digits in (1, 2, 3):
            low, high = (float(limit(value, digits, up=up)) for up in (False, True))
            assert low <= value * (1 + 1e-13)
            assert high >= value * (1 - 1e-13)
            assert high <= low * (1 + 1.001 * 10 ** (1 - digits))  # one unit of the last digit
    assert [limit(math.nextafter(19, 20), 3, up=True), limit(4.60517, 2, up=True)] == ["19", "4.7"]
    assert [limit(450.64, 3, up=False), limit(0.0, 2, up=True), limit(math.inf, 2, up=True)] == ["450", "0", "inf"]
