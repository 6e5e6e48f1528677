"""The bound of theorem 3.2 against iterations that are really perturbed."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from sdc.analysis import error_floor, fit_convergence, iteration_cost_bound
from sdc.checkpoints.outlook import iterations_bound

RNG = np.random.default_rng(2019)
FACTORS = st.floats(0.05, 0.999)
SIZES = st.dictionaries(st.integers(0, 40), st.floats(0.0, 10.0), max_size=5)


def needed(factors: np.ndarray, start: np.ndarray, epsilon: float, perturbed: dict[int, np.ndarray]) -> int:
    """Iterations of `x * factors`, whose optimum is 0, until the error stays below epsilon."""
    x, last = start.astype(float), 0
    for iteration in range(20_000):
        if np.linalg.norm(x) >= epsilon:
            last = iteration + 1
        elif iteration > max(perturbed, default=-1):
            return last
        x = (x + perturbed.get(iteration, 0.0)) * factors
    raise AssertionError("it does not converge")


@given(distance=st.floats(1e-3, 1e3), c=FACTORS, sizes=SIZES)
def test_the_formula(distance: float, c: float, sizes: dict[int, float]) -> None:
    total = sum(c**-at * size for at, size in sizes.items())
    bound = iteration_cost_bound(distance, c, sizes)
    assert bound == pytest.approx(math.log(1 + total / distance) / math.log(1 / c), abs=1e-6, rel=1e-6)
    for epsilon in (1e-6, 10.0):
        more = iterations_bound(distance, c, epsilon, sizes) - iterations_bound(distance, c, epsilon)
        assert more == pytest.approx(bound, abs=1e-6, rel=1e-6)


@given(c=st.floats(0.3, 0.99), sizes=st.dictionaries(st.integers(0, 20), st.floats(0.1, 10.0), min_size=1, max_size=3))
def test_it_is_tight_for_the_adversary(c: float, sizes: dict[int, float]) -> None:
    """Every error shrinks by c, and each perturbation points away from the optimum: equality."""
    x = 1.0
    for iteration in range(21):
        x = (x + sizes.get(iteration, 0.0)) * c
    behind = 21 - math.log(x) / math.log(c)  # iterations by which the unperturbed sequence would be at x
    assert iteration_cost_bound(1.0, c, sizes) == pytest.approx(behind, abs=1e-6)


@pytest.mark.parametrize("when", [(50,), (0, 20, 100)])
def test_it_holds_in_expectation(when: tuple[int, ...]) -> None:
    """Gradient descent on a random quadratic problem in four dimensions, 1,000 trials with normal perturbations."""
    basis, _ = np.linalg.qr(RNG.normal(size=(4, 4)))
    curvature = np.asarray([0.05, 0.1, 0.4, 1.0])
    rate = 2 / (curvature.min() + curvature.max())
    factor = np.eye(4) - rate * basis @ np.diag(curvature) @ basis.T
    c = float(np.linalg.norm(factor, 2))
    start = RNG.normal(size=4)
    deltas = {at: RNG.normal(size=(1000, 4)) for at in when}
    sizes = {at: float(np.linalg.norm(delta, axis=1).mean()) for at, delta in deltas.items()}
    y = np.tile(start, (1000, 1))
    for iteration in range(200):
        y = (y + deltas.get(iteration, 0.0)) @ factor.T
        errors = np.linalg.norm(y, axis=1)
        least = errors.mean() - 3 * errors.std() / math.sqrt(1000)
        so_far = {at: size for at, size in sizes.items() if at <= iteration}
        assert least <= 0 or iteration + 1 <= iterations_bound(float(np.linalg.norm(start)), c, least, so_far)


def test_what_is_printed_of_iterations_that_were_needed_is_wrong() -> None:
    """The start lies in a fast direction, the perturbation in a slow one: it costs a hundred times the bound."""
    factors, start, epsilon = np.asarray([0.5, 0.99]), np.asarray([1.0, 0.0]), 1e-6
    delta = {5: np.asarray([0.0, 0.1])}
    measured = needed(factors, start, epsilon, delta) - needed(factors, start, epsilon, {})
    bound = iteration_cost_bound(1.0, 0.99, {5: 0.1})
    assert measured > 100 * bound
    # Between upper bounds it is right, as it was proved.
    assert needed(factors, start, epsilon, delta) <= iterations_bound(1.0, 0.99, epsilon) + bound + 1


def test_perturbed_at_every_iteration() -> None:
    """The floor is reached by the adversary."""
    c, size, x = 0.9, 0.01, 1.0
    for _ in range(500):
        x = (x + size) * c
    assert x == pytest.approx(error_floor(c, size)) == pytest.approx(0.09)


def test_convergence_while_it_runs() -> None:
    """Of four dimensions, once only the slowest direction is left; and what a perturbation then costs."""
    factors, x = np.asarray([0.2, 0.5, 0.8, 0.97]), np.asarray([5.0, 5.0, 2.0, 1.0])
    path = [x := x * factors for _ in range(120)]
    found = fit_convergence([float(np.linalg.norm(b - a)) for a, b in itertools.pairwise(path[60:])])
    assert found is not None
    assert found.c == pytest.approx(0.97, abs=1e-4)
    assert found.distance == pytest.approx(np.linalg.norm(path[-1]), rel=1e-2)
    away = path[-1] / np.linalg.norm(path[-1])
    for size in (0.01, 0.1, 1.0):
        measured = needed(factors, path[-1] + size * away, 1e-6, {}) - needed(factors, path[-1], 1e-6, {})
        assert found.cost(size) == pytest.approx(measured, abs=1.5)


def test_what_does_not_converge_has_no_cost() -> None:
    assert fit_convergence([1.0] * 20) is None
    assert fit_convergence([1.1**k for k in range(20)]) is None
    assert fit_convergence([0.0] * 20) is None
    assert fit_convergence(np.random.default_rng(0).exponential(size=20)) is None
    for movements in ([1.0] * 7, [1.0] * 8 + [math.nan], [1.0] * 8 + [-1.0]):
        with pytest.raises(ValueError, match="expected at least 8 finite lengths"):
            fit_convergence(movements)


def test_far_perturbations_do_not_overflow() -> None:
    bound = iteration_cost_bound(1.0, 0.01, {10_000: 1.0})
    assert bound == pytest.approx(10_000, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iteration_cost_bound(0.0, 0.5, {}), "distance=0.0"),
        (lambda: iteration_cost_bound(1.0, 1.0, {}), "c=1.0: expected a number between 0 and 1"),
        (lambda: iteration_cost_bound(1.0, math.nan, {}), "c=nan"),
        (lambda: iteration_cost_bound(1.0, 0.5, {-1: 1.0}), "at iteration -1"),
        (lambda: iteration_cost_bound(1.0, 0.5, {2.5: 1.0}), "at iteration 2.5: expected"),  # type: ignore[dict-item]
        (lambda: iteration_cost_bound(1.0, 0.5, {0: math.inf}), "a perturbation of inf"),
        (lambda: iterations_bound(1.0, 0.5, 0.0), "epsilon=0.0"),
        (lambda: error_floor(0.5, -1.0), "size=-1.0"),
        (lambda: iterations_bound(1.0, 0.5, math.nan), "epsilon=nan"),
    ],
)
def test_out_of_range(call: Callable[[], float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_fit_is_the_line_of_least_squares() -> None:
    """Beside SciPy's own, and so is what counts as shrinking, on both sides of its limit."""
    given = []
    for noise in (0.05, *[0.4] * 40):
        lengths = 0.97 ** np.arange(24) * np.exp(noise * RNG.normal(size=24))
        found, fit = fit_convergence(lengths.tolist()), stats.linregress(np.arange(24), np.log(lengths))
        given.append(found is not None)
        assert given[-1] == (fit.slope + stats.t.ppf(0.975, 22) * fit.stderr < 0)
        if found is not None:
            np.testing.assert_allclose(found.c, np.exp(fit.slope), rtol=1e-12)
            last = np.exp(fit.intercept + 23 * fit.slope)
            np.testing.assert_allclose(found.distance, last * found.c / (1 - found.c), rtol=1e-10)
    assert given[0]
    assert 5 < sum(given) < 36
