"""Speedups against algorithm 2 in plain Python, thresholds against all candidates, theory against draws."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from sdc.aggregation import speedup
from sdc.aggregation.delays import BoundedLogNormal, LogNormal, Normal
from sdc.aggregation.speedup import (
    completed,
    drop_rate,
    effective_speedup,
    extra_steps,
    larger_batch,
    mean_completed,
    select_threshold,
)
from sdc.train.studies.theory import analytic_threshold, expected_completed, expected_iteration_time, expected_speedup

RANDOM = np.random.default_rng(0)
TWO = np.array([[[1.0, 1.0], [1.0, 5.0]]])


def algorithm_2(t: Any, serial: Any, threshold: float) -> tuple[float, float]:
    """Mean speedup and mean share of completed micro-batches, as published: loop by loop."""
    iterations, workers, micro_batches = t.shape
    gain = share = 0.0
    for i in range(iterations):
        done = longest = 0.0
        for n in range(workers):
            time = 0.0
            for m in range(micro_batches):
                time += float(t[i, n, m])
                done += (1 if time < threshold else 0) / workers
            longest = max(longest, time)
        gain += (longest + serial[i]) / (min(threshold, longest) + serial[i]) * done / micro_batches / iterations
        share += done / micro_batches / iterations
    return gain, share


def every_candidate(t: Any) -> list[float]:
    times = np.unique(np.cumsum(t, axis=-1))
    return [*np.nextafter(times, math.inf).tolist(), math.inf]


# Few different values, so that cumulative times coincide within and between workers; and any values.
SHAPES = arrays.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=4)
TIMES = st.sampled_from([0.1, 0.2, 0.5, 0.7, 3.0]) | st.floats(0.01, 10)
MEASURED = SHAPES.flatmap(
    lambda shape: st.tuples(
        arrays.arrays(np.float64, shape, elements=TIMES),
        arrays.arrays(np.float64, shape[0], elements=st.sampled_from([0.0, 0.3, 2.0])),
    )
)


@given(MEASURED, st.sampled_from([0.05, 0.5, 1.0, 1.1, 4.0, math.inf]))
def test_speedup_is_that_of_algorithm_2(measured: Any, threshold: float) -> None:
    t, serial = measured
    gain, share = algorithm_2(t, serial, threshold)
    assert effective_speedup(t, serial, threshold) == pytest.approx(gain, rel=1e-12)
    assert drop_rate(t, threshold) == pytest.approx(1 - share, abs=1e-12)
    assert mean_completed(t, threshold) == pytest.approx(share * t.shape[2], abs=1e-12)


@given(MEASURED, st.sampled_from([0.0, 0.5, 0.9]))
def test_selected_threshold_is_the_best_of_all(measured: Any, minimum: float) -> None:
    """Ties go to the larger threshold; no candidate, and no threshold between candidates, is better."""
    t, serial = measured
    values = {tau: algorithm_2(t, serial, tau) for tau in every_candidate(t)}
    allowed = {tau: gain for tau, (gain, share) in values.items() if share >= minimum - 1e-9}
    best = max(allowed.values())
    choice = select_threshold(t, serial, minimum_completed=minimum)
    assert choice.threshold == max(tau for tau, gain in allowed.items() if gain >= best * (1 - 1e-12))
    assert choice.speedup == effective_speedup(t, serial, choice.threshold)
    assert choice.completed == mean_completed(t, choice.threshold)
    assert choice.drop_rate == drop_rate(t, choice.threshold)
    times = np.unique(np.cumsum(t, axis=-1))
    between = [tau for tau in (times[1:] + times[:-1]) / 2 if drop_rate(t, tau) <= 1 - minimum]
    assert all(effective_speedup(t, serial, tau) <= choice.speedup * (1 + 1e-12) for tau in between)


@pytest.mark.parametrize("serial", [0.0, 0.5])
@pytest.mark.parametrize(
    "t",
    [
        RANDOM.lognormal(-1, 0.8, (12, 40, 10)),
        RANDOM.normal(0.45, 0.05, (12, 40, 10)),
        0.45 + 1e-4 * RANDOM.random((12, 40, 10)) + (RANDOM.random((12, 40, 10)) < 0.02),
        0.1 + 1e-9 * RANDOM.random((12, 40, 10)),
    ],
    ids=["lognormal", "normal", "stragglers", "nearly constant"],
)
def test_pruning_keeps_the_best(t: np.ndarray, serial: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,800 candidates make three levels of the branch and bound; it looks at a quarter of them at most."""
    looks: list[int] = []
    evaluate = speedup._equation_6
    monkeypatch.setattr(speedup, "_equation_6", lambda *args: (looks.append(len(args[0])), evaluate(*args))[1])
    choice = select_threshold(t, serial, minimum_completed=0.0)
    a_level = 2 * len(t)  # evaluations: a speedup and a bound for each iteration
    assert len(looks) == 3 * a_level
    assert sum(looks[::a_level]) <= 1200
    values = {tau: effective_speedup(t, serial, tau) for tau in every_candidate(t)}
    best = max(values.values())
    assert choice.threshold == max(tau for tau, value in values.items() if value >= best * (1 - 1e-12))
    assert choice.speedup == values[choice.threshold]


def test_all_workers_find_the_same_threshold() -> None:
    """Also where they hold the workers in another order, or single precision that was widened."""
    random = np.random.default_rng(1)
    t = random.lognormal(-1, 0.8, (6, 32, 8)).astype(np.float32)
    serial = random.random(6)
    choice = select_threshold(t, serial)
    assert choice == select_threshold(t[:, ::-1].astype(np.float64), serial)
    assert choice.threshold < math.inf
    assert select_threshold(t, 0.5) == select_threshold(t, np.full(6, 0.5))


@pytest.mark.parametrize("serial", [0.0, 0.7])
def test_without_variance_nothing_is_dropped(serial: float) -> None:
    """Without serial time all thresholds at a cumulative time tie, but for rounding."""
    for seconds in (0.1, 0.3, 1.0):
        choice = select_threshold(np.full((3, 4, 7), seconds), serial, minimum_completed=0.0)
        assert choice == (math.inf, 1.0, 7.0, 0.0)


def test_least_share_of_completed_micro_batches() -> None:
    """A share that is reached exactly is allowed, also where it has no exact binary number."""
    t = np.ones((1, 10, 1))
    t[0, 7:, 0] = [10, 11, 12]
    assert select_threshold(t, 0.0, minimum_completed=0.7).completed == 0.7
    assert select_threshold(t, 0.0, minimum_completed=0.70001).completed == 1.0
    assert select_threshold(t, 0.0, minimum_completed=1.0).threshold == math.inf


def test_default_share_excludes_absurd_drop_rates() -> None:
    """One quick first micro-batch in ten: without a limit it is all that is computed."""
    t = np.concatenate([np.full((2, 3, 1), 0.001), np.random.default_rng(1).uniform(0.9, 1.1, (2, 3, 9))], axis=2)
    assert select_threshold(t, 0.0, minimum_completed=0.0).drop_rate == pytest.approx(0.9)
    assert select_threshold(t, 0.0).drop_rate <= 0.5


def test_micro_batches_that_took_no_time() -> None:
    assert select_threshold(np.array([[[0.0], [1.0]]]), 0.0).speedup == math.inf
    assert select_threshold(np.zeros((2, 3, 4)), 1.0).threshold == math.inf


def test_completed_is_strictly_below_the_threshold() -> None:
    t = np.array([[1.0, 1.0, 1.0], [0.5, 0.5, 3.0]])
    for threshold, counts in [(0.5, [0, 0]), (1.0, [0, 1]), (2.0, [1, 2]), (2.5, [2, 2]), (9.0, [3, 3])]:
        assert completed(t, threshold).tolist() == counts
    assert completed(t, math.inf).tolist() == [3, 3]
    assert mean_completed(t, 1.0) == 0.5
    assert drop_rate(t, 1.0) == 1 - 0.5 / 3


def draw(latency: Any, *shape: int) -> np.ndarray:
    return np.asarray(latency.sample(jax.random.key(1), shape), np.float64)


def test_speedup_grows_with_the_workers() -> None:
    """In the published delay environment, at the best threshold; and without bound in theory."""
    t = draw(BoundedLogNormal(0.45), 20, 512, 12)
    measured = [select_threshold(t[:, :workers], 0.2).speedup for workers in (1, 4, 32, 512)]
    assert measured == sorted(measured)
    assert measured[0] < 1.15
    assert measured[-1] > 1.35
    threshold = analytic_threshold(0.45, 0.1, 12, 0.2)
    theory = [expected_speedup(0.45, 0.1, 12, workers, 0.2, threshold) for workers in (10, 10**3, 10**6, 10**12)]
    assert (np.diff(theory) > 0.04).all()


NORMAL = Normal(0.45, 0.1)
MU, SIGMA = 0.45, 0.1


@pytest.mark.parametrize("threshold", [2.8, 4.0, 5.0, 5.4, 5.8, 6.3])
def test_expected_completed(threshold: float) -> None:
    """Within five standard errors: equation (5) is exact for normal latencies, and few are clipped at 0."""
    counts = completed(draw(NORMAL, 50_000, 12), threshold)
    error = abs(counts.mean() - expected_completed(MU, SIGMA, 12, threshold))
    assert error <= 5 * counts.std() / math.sqrt(len(counts))


# Relative error of equation (7) in what it adds to M mu, from numerical integration of the mean of the largest of N
# normal variables: it is asymptotic in N.
@pytest.mark.parametrize(("workers", "error"), [(1, 0.0), (2, -0.0788), (3, 0.0077), (8, 0.0249), (200, 0.0071)])
def test_expected_iteration_time(workers: int, error: float) -> None:
    """Within five standard errors of what remains once the known error of equation (7) is taken off."""
    longest = draw(NORMAL, 3000, workers, 12).sum(axis=2).max(axis=1)
    added = (expected_iteration_time(MU, SIGMA, 12, workers, 3.0) - 3.0 - 12 * MU) / (1 + error)
    assert abs(longest.mean() - 12 * MU - added) <= 5 * longest.std() / math.sqrt(len(longest))


@pytest.mark.parametrize("serial", [0.0, 1.5])
@pytest.mark.parametrize("threshold", [4.5, 5.4, 5.9, 20.0])
def test_expected_speedup(threshold: float, serial: float) -> None:
    """Within 0.5 % for normal latencies of 200 workers, with few and with many drops."""
    measured = effective_speedup(draw(NORMAL, 100, 200, 12), serial, threshold)
    assert expected_speedup(MU, SIGMA, 12, 200, serial, threshold) == pytest.approx(measured, rel=0.005)


def test_measured_iteration_time_improves_the_theory() -> None:
    """A heavy tail: by its mean and variance the slowest worker is underestimated."""
    heavy, serial = LogNormal(0.45, 0.45), 0.5
    t = draw(heavy, 100, 200, 12)
    time = float(t.sum(axis=2).max(axis=1).mean()) + serial
    arguments = (heavy.mean, heavy.std, 12, 200, serial, 7.0)
    measured = effective_speedup(t, serial, 7.0)
    assert expected_speedup(*arguments, iteration_time=time) == pytest.approx(measured, rel=0.02)
    assert expected_speedup(*arguments) < 0.9 * measured


@pytest.mark.parametrize("micro_batches", [1, 7, 31])
@pytest.mark.parametrize("sigma", [1e-4, 1e-3, 0.1, 0.3])
@pytest.mark.parametrize("serial", [0.0, 0.1, 5.0])
def test_analytic_threshold_is_the_maximum(micro_batches: int, sigma: float, serial: float) -> None:
    """No threshold of a fine grid above M mu/2 is better, nor one near m mu, nor a little to the left or right."""
    found = analytic_threshold(1.0, sigma, micro_batches, serial)
    gain = lambda tau: expected_completed(1.0, sigma, micro_batches, tau) / (tau + serial)  # noqa: E731
    lowest = micro_batches / 2
    grid = np.linspace(lowest, micro_batches + 9 * sigma * math.sqrt(micro_batches), 3000)[1:]
    steps = np.arange(micro_batches // 2 + 1, micro_batches + 1)
    grid = [*grid, *(steps[:, None] + sigma * np.sqrt(steps)[:, None] * np.linspace(0, 9, 50)).ravel()]
    near = found + sigma * np.array([-0.3, -0.01, 0.01, 0.3])
    assert found > lowest
    assert gain(found) >= max(gain(float(tau)) for tau in [*grid, *near[near > lowest]]) * (1 - 1e-12)


def test_analytic_threshold_is_as_good_as_a_measured_one() -> None:
    """For normal latencies of many workers: within 0.2 % of the best speedup."""
    t = draw(NORMAL, 50, 200, 12)
    analytic = effective_speedup(t, 0.5, analytic_threshold(MU, SIGMA, 12, 0.5))
    best = select_threshold(t, 0.5).speedup
    assert 0.998 * best < analytic <= best


def test_theory_without_variance() -> None:
    assert expected_iteration_time(0.5, 0.0, 4, 100, 1.0) == 3.0
    assert [expected_completed(0.5, 0.0, 4, tau) for tau in (0.5, 0.6, 2.0, 2.1)] == [0, 1, 3, 4]
    threshold = analytic_threshold(0.5, 0.0, 4, 1.0)
    assert expected_completed(0.5, 0.0, 4, threshold) == 4
    assert expected_speedup(0.5, 0.0, 4, 100, 1.0, threshold) == 1.0


@pytest.mark.parametrize("latest", [10.8, 9.6, 12.0, 7.1])
def test_compensation_restores_the_samples(latest: float) -> None:
    """As many micro-batches as without drops, to one step or sample; nothing more where nothing was dropped."""
    steps = 900 + extra_steps(900, latest, 12)
    assert 900 * 12 <= steps * latest + 1e-6 < 900 * 12 + latest
    batch = larger_batch(1024, latest, 12)
    assert 1024 <= batch * latest / 12 + 1e-6 < 1024 + latest / 12
    assert extra_steps(900, 12.0, 12) == 0
    assert larger_batch(1024, 12.0, 12) == 1024


def test_rounding_adds_no_step() -> None:
    """In double precision 90 (4/2.4 - 1) is above 60, and 4200 (12/6.3) above 8000."""
    assert extra_steps(90, 2.4, 4) == 60
    assert larger_batch(4200, 6.3, 12) == 8000
    assert [extra_steps(steps, 10.8, 12) for steps in (9, 90, 900, 9_000_000)] == [1, 10, 100, 1_000_000]
    assert [extra_steps(steps, 3, 4) for steps in (3, 300, 301, 0)] == [1, 100, 101, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: completed(np.array(1.0), 1.0), r"shape \(\)"),
        (lambda: completed(np.ones((3, 0)), 1.0), r"shape \(3, 0\)"),
        (lambda: completed(np.ones(3), 0.0), "threshold=0.0: expected a time above 0"),
        (lambda: completed(np.ones(3), math.nan), "threshold=nan"),
        (lambda: completed(np.array([1.0, -2.0]), 1.0), r"latency -2.0 at \(1,\)"),
        (lambda: completed(np.array([[1.0, math.nan]]), 1.0), r"latency nan at \(0, 1\)"),
        (lambda: mean_completed(np.array([math.inf]), 1.0), r"latency inf at \(0,\)"),
        (lambda: effective_speedup(np.ones((2, 3)), 0.0, 1.0), r"shape \(2, 3\); expected \[iterations, workers"),
        (lambda: effective_speedup(TWO, 0.0, -1.0), "threshold=-1.0"),
        (lambda: effective_speedup(TWO, np.zeros(2), 1.0), r"serial has shape \(2,\).* 1 iterations"),
        (lambda: effective_speedup(TWO, -0.1, 1.0), "serial=-0.1"),
        (lambda: select_threshold(TWO, math.nan), "serial=nan"),
        (lambda: select_threshold(TWO - 2, 0.0), r"latency -1.0 at \(0, 0, 0\)"),
        (lambda: select_threshold(np.zeros((1, 2, 3)), 0.0), "iteration 0 took no time"),
        (lambda: select_threshold(TWO, 0.0, minimum_completed=1.5), "minimum_completed=1.5"),
        (lambda: expected_iteration_time(1.0, 1.0, 12, 0), "workers=0"),
        (lambda: expected_iteration_time(1.0, 1.0, 0, 1), "micro_batches=0"),
        (lambda: expected_iteration_time(1.0, 1.0, 12, 1, -1.0), "serial=-1.0"),
        (lambda: expected_completed(0.0, 1.0, 12, 1.0), "mu=0.0"),
        (lambda: expected_completed(1.0, -1.0, 12, 1.0), "sigma=-1.0"),
        (lambda: expected_completed(1.0, 1.0, 12, 0.0), "threshold=0.0"),
        (lambda: expected_speedup(1.0, 1.0, 12, 4, 2.0, 1.0, iteration_time=2.0), "iteration_time=2.0"),
        (lambda: analytic_threshold(1.0, math.inf, 12, 0.0), "sigma=inf"),
        (lambda: analytic_threshold(1.0, 1.0, 12, math.inf), "serial=inf"),
        (lambda: extra_steps(100, 0.0, 12), "completed=0.0: .*raise the threshold"),
        (lambda: extra_steps(-1, 1.0, 12), "steps=-1"),
        (lambda: larger_batch(100, 13.0, 12), "completed=13.0: .*micro_batches=12"),
        (lambda: larger_batch(100, 1.0, 0), "micro_batches=0"),
        (lambda: larger_batch(0, 1.0, 12), "batch=0"),
    ],
)
def test_bad_arguments_say_what_is_wrong(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
