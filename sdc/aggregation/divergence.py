"""Theory of PAFT: how far replicas drift apart under noisy all-reduces, and what convergence is left.

Capturing and Mitigating Gradient Aggregation Errors for Fault-Tolerant Distributed Training. M workers run SGD with
rates eta_s; worker m's aggregated gradient has an error e_m ~ N(0, sigma^2) for each of d elements.

**Erratum.** The paper prints lemma 3.1 with the factor (M + 1)/M. With e_m independent, theta_m - mean(theta) is
-sum_s eta_s (e_m - mean(e)), whose variance is (1 - 1/M) sigma^2 sum_s eta_s^2 for each element: the factor is
(M - 1)/M. The paper also leaves out d; it is read here as a statement about one element and multiplied by d. Simulation
decides: with M = 4, d = 1000, sigma = 0.5, eta = 0.1 and 300 steps it finds 562, the exact form gives 562.5 and the
printed one 937.5. Only the exact form is here; `sdc study paft` compares both with what it measures.
"""

import math
from collections.abc import Sequence

import numpy as np

from .workers import check_some


def divergence(sigma: float, rates: Sequence[float] | np.ndarray, *, workers: int, dimension: int = 1) -> float:
    """E||mean_k(theta_k) - theta_m||^2 after steps with these rates, from equal replicas (lemma 3.1, equation 6).

        d (M - 1)/M sigma^2 sum_s eta_s^2

    The same holds since the last synchronization, with the rates of the steps since then; that is lemma 4.1 exactly.

    Args:
        sigma: standard deviation of the error of each element.
        rates: learning rate of each step since replicas were equal.
        workers: M.
        dimension: d, number of parameters.

    Raises:
        ValueError: sigma or the dimension is negative, or there are fewer than two workers.
    """
    factor = _factor(sigma, workers, dimension)
    return factor * float(np.sum(np.square(np.asarray(rates, np.float64))))


def divergence_over_time(
    sigma: float,
    rates: Sequence[float] | np.ndarray,
    *,
    workers: int,
    dimension: int = 1,
    period: int | None = None,
) -> np.ndarray:
    """`divergence` after each step, just before the synchronization where there is one.

    Args:
        sigma, rates, workers, dimension: see `divergence`.
        period: steps from one synchronization to the next, the first after so many steps; None for none.

    Returns:
        float64, one number a step.
    """
    squares = np.square(np.asarray(rates, np.float64))
    total = np.cumsum(squares)
    if period is not None:
        check_some("period", period, "steps")
        starts = np.arange(len(squares)) // period * period
        total -= np.where(starts > 0, total[np.maximum(starts - 1, 0)], 0.0)
    return _factor(sigma, workers, dimension) * total


def divergence_bound(sigma: float, rate: float, period: int, *, workers: int, dimension: int = 1) -> float:
    """A bound of the divergence with at most `period` steps between synchronizations (lemma 4.1, equation 9).

        4 H d (M - 1)/M sigma^2 eta_t^2,    if eta_s <= 2 eta_t for the steps s since the last synchronization

    Args:
        sigma, workers, dimension: see `divergence`.
        rate: eta_t, of the last step.
        period: H.
    """
    check_some("period", period, "steps")
    return 4 * period * _factor(sigma, workers, dimension) * rate**2


def noisy_bound(
    sigma: float,
    rates: Sequence[float] | np.ndarray,
    *,
    workers: int,
    distance: float,
    gradient_noise: float,
    smoothness: float,
) -> float:
    """A bound of (1/T) sum_t eta_t E(f(mean theta_t) - f*) without synchronization (theorem 3.2, equation 7).

        2 ||theta_0 - theta*||^2 / T + 2 (sigma_g^2 + sigma^2) / (T M) sum_t eta_t^2
            + 4 L sigma^2 (M - 1) / (T M) sum_t eta_t sum_{s<t} eta_s^2

    sigma^2 and sigma_g^2 are of whole vectors here (for noise of each element: d sigma^2).

    Args:
        sigma: root of the expected squared norm of the error.
        rates: learning rate of each step.
        workers: M.
        distance: ||theta_0 - theta*||_2.
        gradient_noise: sigma_g, root of the expected squared norm of a worker's gradient about its mean.
        smoothness: L.
    """
    factor = _factor(sigma, workers, 1)
    eta = np.asarray(rates, np.float64)
    before = np.concatenate([[0.0], np.cumsum(np.square(eta))[:-1]])
    variance = (gradient_noise**2 + sigma**2) / workers
    terms = 2 * distance**2, 2 * variance * np.sum(np.square(eta)), 4 * smoothness * factor * np.sum(eta * before)
    return float(sum(terms) / len(eta))


def paft_bound(
    sigma: float,
    period: int,
    steps: int,
    *,
    workers: int,
    distance: float,
    gradient_noise: float,
    smoothness: float,
    convexity: float,
) -> float:
    """A bound of E f(theta^) - f* with synchronization (theorem 4.2, equation 10), for rates 4 / (mu (a + t)).

        mu a^3 / (2 S) ||theta_0 - theta*||^2 + 4 T (T + 2a) (sigma_g^2 + sigma^2) / (mu M S)
            + 256 T / (mu^2 S) (M - 1)/M sigma^2 H L

    with a = max(16 L / mu, H), S = sum_{t<T} (a + t)^2, and theta^ the mean of all theta_t^m weighted with (a + t)^2.

    Args:
        period: H, most steps from one synchronization to the next.
        steps: T.
        convexity: mu, of the strongly convex f.
        sigma, workers, distance, gradient_noise, smoothness: see `noisy_bound`.
    """
    if period < 1 or steps < 1 or not 0 < convexity <= smoothness:
        raise ValueError(
            f"period={period}, steps={steps}, convexity={convexity}, smoothness={smoothness}: "
            "expected period and steps of at least 1, and 0 < convexity <= smoothness"
        )
    a = schedule_offset(period, smoothness=smoothness, convexity=convexity)
    total = float(np.sum(np.square(a + np.arange(steps, dtype=np.float64))))
    variance = (gradient_noise**2 + sigma**2) / workers
    return (
        convexity * a**3 / (2 * total) * distance**2
        + 4 * steps * (steps + 2 * a) * variance / (convexity * total)
        + 256 * steps / (convexity**2 * total) * _factor(sigma, workers, 1) * period * smoothness
    )


def schedule_offset(period: int, *, smoothness: float, convexity: float) -> float:
    """a = max(16 L / mu, H) of the rates 4 / (mu (a + t)) for which theorem 4.2 holds (corollary 4.3)."""
    return max(16 * smoothness / convexity, float(period))


def _factor(sigma: float, workers: int, dimension: int) -> float:
    if not 0 <= sigma < math.inf or dimension < 0:
        raise ValueError(f"sigma={sigma}, dimension={dimension}: expected numbers of at least 0")
    if workers < 2:
        raise ValueError(f"workers={workers}: expected two or more")
    return dimension * sigma**2 * (workers - 1) / workers
