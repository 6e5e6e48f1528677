"""Theory of three aggregation methods: PAFT, lossy collectives and DropCompute. The functions do not need JAX.

**PAFT** (*Capturing and Mitigating Gradient Aggregation Errors for Fault-Tolerant Distributed Training*). M workers run
SGD with rates eta_s; worker m's aggregated gradient has an error e_m ~ N(0, sigma^2) in each of d elements.

**Erratum.** The paper prints lemma 3.1 with the factor (M + 1)/M. If the e_m are independent, theta_m - mean(theta) is
-sum_s eta_s (e_m - mean(e)), whose variance for each element is (1 - 1/M) sigma^2 sum_s eta_s^2. The correct factor is
therefore (M - 1)/M. The paper also omits d; this module applies the lemma to each element and multiplies the result by
d. A simulation with M = 4, d = 1000, sigma = 0.5, eta = 0.1 and 300 steps gives 562; the exact form gives 562.5, and
the printed form gives 937.5.

**Lossy collectives** (Weintraub, Banner, Orda, *Distributed Training under Packet Loss*, 2025). A copy of a shard is
renewed with probability 1 - p at each step and kept otherwise; its age a (the number of steps since its renewal, at
least 0) has the distribution P(a) = (1 - p) p^a.

**Erratum.** The paper prints the limit of the drift between two copies as 2p/(1 + p) s^2. This form ignores the fact
that a stale copy may already have been stale in earlier steps. For p = 0.1, 0.2 and 0.4, a simulation gives 0.203,
0.418 and 0.960; the exact form gives 0.202, 0.417 and 0.952, and the printed form gives 0.182, 0.333 and 0.571.

The functions for PAFT take these arguments:

    sigma, workers, dimension   sigma, M, d
    rates, rate                 eta_s of each step since replicas were equal, eta_t of the last one
    period, steps               H, maximum number of steps between synchronizations, and T
    distance                    ||theta_0 - theta*||_2
    gradient_noise              sigma_g, root of the expected squared norm of a worker's gradient minus its mean
    smoothness, convexity       L and mu of the loss

This module has only the exact forms; `sdc study paft` and `sdc study lossy` compare the exact and the printed forms
with measurements.

**DropCompute** (Giladi et al., NeurIPS 2023, which is the source of the equation numbers): the speedup of a compute
threshold, from the mean and the variance of the latency of a micro-batch. `sdc.aggregation.speedup` computes the
speedup from measured latencies. The functions for DropCompute take the same arguments, and raise ValueError if one is
out of range:

    mu, sigma       mean and standard deviation of the latency of a micro-batch, in seconds
    micro_batches   M, micro-batches of a worker in an iteration
    workers         N
    serial          Tc, seconds of the rest of an iteration, such as the all-reduce
    threshold       tau, seconds of compute after which a worker stops
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()
_EULER = 0.57721566490153286


def divergence(sigma: float, rates: Sequence[float] | np.ndarray, *, workers: int, dimension: int = 1) -> float:
    """Returns E||mean_k(theta_k) - theta_m||^2 after steps with these rates that start from equal replicas (lemma 3.1,
    equation 6).

        d (M - 1)/M sigma^2 sum_s eta_s^2

    The same formula holds after a synchronization, with the rates of the steps since then; this is the exact form of
    lemma 4.1.
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
    """Returns `divergence` after each step; if a step ends with a synchronization, the value is that before the
    synchronization."""
    squares = np.square(np.asarray(rates, np.float64))
    total = np.cumsum(squares)
    if period is not None:
        _check_period(period)
        starts = np.arange(len(squares)) // period * period
        total -= np.where(starts > 0, total[np.maximum(starts - 1, 0)], 0.0)
    return _factor(sigma, workers, dimension) * total


def divergence_bound(sigma: float, rate: float, period: int, *, workers: int, dimension: int = 1) -> float:
    """Returns a bound on the divergence with at most `period` steps between synchronizations (lemma 4.1, equation 9).

    4 H d (M - 1)/M sigma^2 eta_t^2,    if eta_s <= 2 eta_t for the steps s since the last synchronization
    """
    _check_period(period)
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
    """Returns a bound on (1/T) sum_t eta_t E(f(mean theta_t) - f*) without synchronization (theorem 3.2, equation 7).

        2 ||theta_0 - theta*||^2 / T + 2 (sigma_g^2 + sigma^2) / (T M) sum_t eta_t^2
            + 4 L sigma^2 (M - 1) / (T M) sum_t eta_t sum_{s<t} eta_s^2

    Here, sigma^2 and sigma_g^2 refer to whole vectors, and are therefore d times the variance of an element.
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
    """Returns a bound on E f(theta^) - f* with synchronization (theorem 4.2, equation 10), for rates 4 / (mu (a + t)).

        mu a^3 / (2 S) ||theta_0 - theta*||^2 + 4 T (T + 2a) (sigma_g^2 + sigma^2) / (mu M S)
            + 256 T / (mu^2 S) (M - 1)/M sigma^2 H L

    with a = max(16 L / mu, H), S = sum_{t<T} (a + t)^2, and theta^ the mean of all theta_t^m weighted with (a + t)^2.
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
    """Returns a = max(16 L / mu, H) for the rates 4 / (mu (a + t)) for which theorem 4.2 holds (corollary 4.3)."""
    return max(16 * smoothness / convexity, float(period))


def _factor(sigma: float, workers: int, dimension: int) -> float:
    if not 0 <= sigma < math.inf or dimension < 0:
        raise ValueError(f"sigma={sigma}, dimension={dimension}: expected numbers of at least 0")
    if workers < 2:
        raise ValueError(f"workers={workers}: expected at least two workers")
    return dimension * sigma**2 * (workers - 1) / workers


def _check_period(period: int) -> None:
    if period < 1:
        raise ValueError(f"period={period}: expected at least 1 step")


def pair_drift(p: float, square: float = 1.0) -> float:
    """Returns lim E[D^2] for the difference D between two replicas' copies of a shard whose owner makes random steps.

        2 p / (1 - p^2) s^2

    This is s^2 E|a - b| for the ages a, b of the two copies.
    """
    _check_loss(p)
    return 2 * p / (1 - p**2) * square


def owner_drift(p: float, square: float = 1.0) -> float:
    """Returns lim E[D^2] for the difference D between a copy and an owner that makes random steps: s^2 E[a] = p/(1 - p)
    s^2."""
    _check_loss(p)
    return p / (1 - p) * square


def steady_drift(p: float, move: float) -> float:
    """Returns lim E[D^2] for two copies of a shard whose owner moves by the same v at every step.

        2 p / (1 - p)^2 v^2

    This is v^2 E[(a - b)^2], which is v^2 times twice the variance of an age.
    """
    _check_loss(p)
    return 2 * p / (1 - p) ** 2 * move**2


def own_weight(p: float, workers: int) -> float:
    """Returns the mean weight of an owner's own gradient, which always arrives, in a lossy mean.

        E[1 / (1 + Bin(N - 1, 1 - p))] = (1 - p^N) / (N (1 - p))

    All weights sum to 1, so the mean is unbiased for gradients with the same expectation. If the gradients differ and
    are considered fixed, the mean is biased toward the owner's gradient, which has this weight instead of 1/N.
    """
    _check_loss(p)
    return (1 - p**workers) / (workers * (1 - p))


def _check_loss(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"p={p!r}: expected a probability between 0 and 1")
    if p == 1:
        raise ValueError("p=1: no packet arrives, so the drift has no limit; give a probability below 1")


def expected_iteration_time(mu: float, sigma: float, micro_batches: int, workers: int, serial: float = 0.0) -> float:
    """Returns the mean duration of an iteration without a threshold, in seconds: equation (7), after Bailey et al.
    (2014).

        E[T] + Tc ~ sqrt(M) sigma ((1 - g) Phi^-1(1 - 1/N) + g Phi^-1(1 - 1/(e N))) + M mu + Tc

    with the Euler-Mascheroni constant g: the mean of the largest of N normal variables. The term added to M mu is 7.9 %
    too small for two workers, and too large by 0.8 % for three, 2.5 % for eight and 0.7 % for 200. For one worker, the
    result is M mu + Tc.

    Example:
        >>> round(expected_iteration_time(0.45, 0.2, 12, 200), 2)
        7.32
    """
    _check_latency(mu, sigma, micro_batches, serial)
    if workers < 1:
        raise ValueError(f"workers={workers}: expected at least one worker")
    mean = micro_batches * mu + serial
    if workers == 1:
        return mean
    # Phi^-1(1 - p) = -Phi^-1(p) keeps the digits of a small p.
    largest = -(1 - _EULER) * _NORMAL.inv_cdf(1 / workers) - _EULER * _NORMAL.inv_cdf(1 / (math.e * workers))
    return mean + math.sqrt(micro_batches) * sigma * largest


def expected_completed(mu: float, sigma: float, micro_batches: int, threshold: float) -> float:
    """Returns the mean number of micro-batches that a worker completes: equations (5) and (10).

        E[Mdone] ~ sum_{m=1..M} Phi((tau - m mu) / sqrt(m sigma²))

    The formula is exact for normal latencies.

    Example:
        >>> round(expected_completed(0.45, 0.2, 12, 5.4), 2)
        11.16
    """
    _check_latency(mu, sigma, micro_batches)
    if not threshold > 0:
        raise ValueError(f"threshold={threshold}: expected a time above 0; pass math.inf to drop nothing")
    return _expected_completed(mu, sigma, micro_batches, threshold)


def expected_speedup(
    mu: float,
    sigma: float,
    micro_batches: int,
    workers: int,
    serial: float,
    threshold: float,
    iteration_time: float | None = None,
) -> float:
    """Returns the effective speedup from the mean and the variance of the latency: equation (11).

        E[S] ~ E[Mdone]/M (E[T] + Tc) / (min(tau, E[T]) + Tc)

    The paper includes Tc in the E[T] of equation (7), but adds it again to min(tau, E[T]); here T is compute time, as
    in equation (6).

    Args:
        iteration_time: measured E[T] + Tc, used instead of equation (7). The measured value is more accurate if
            latencies are not normal, since the time of the slowest of many workers depends on the tail of the
            latencies.

    Example:
        >>> round(expected_speedup(0.45, 0.2, 12, 200, 0.0, 5.9), 3)
        1.206
    """
    predicted = expected_iteration_time(mu, sigma, micro_batches, workers, serial)
    if iteration_time is None:
        iteration_time = predicted
    elif not serial < iteration_time < math.inf:
        raise ValueError(
            f"iteration_time={iteration_time}: expected the time of a whole iteration, longer than serial={serial}"
        )
    share = expected_completed(mu, sigma, micro_batches, threshold) / micro_batches
    return share * iteration_time / min(threshold + serial, iteration_time)


def analytic_threshold(mu: float, sigma: float, micro_batches: int, serial: float) -> float:
    """Returns the optimal threshold, in seconds, for a large number of workers, from the mean and the variance of the
    latency (appendix C.2).

        tau* = argmax_tau (1/(tau + Tc)) sum_{m=1..M} Phi((tau - m mu)/sqrt(m sigma²)),  tau > M mu/2

    The threshold does not depend on the number of workers, since it is assumed to be below the time of the slowest
    worker. With few workers, tau* can exceed that time, in which case no micro-batches are dropped. If sigma approaches
    mu and Tc is small, normal latencies are often negative, and tau* is the limit M mu/2. In this case, use
    measurements and `select_threshold` instead.

    Example:
        >>> round(analytic_threshold(0.45, 0.2, 12, 0.0), 2)
        4.39
    """
    _check_latency(mu, sigma, micro_batches, serial)
    mean, spread = micro_batches * mu, math.sqrt(micro_batches) * sigma
    if sigma == 0:
        return math.nextafter(mean, math.inf)
    # Beyond nine standard deviations, nothing is dropped in double precision. If sigma is small, the sum is a staircase
    # with the optimum at its last step, which may be between two points of the first grid.
    lowest, highest = math.nextafter(mean / 2, math.inf), mean + 9 * spread
    last_step = np.linspace(max(lowest, mean - 9 * spread), highest, 512)
    grid = np.sort(np.concatenate([np.linspace(lowest, highest, 2048), last_step]))
    # Near its maximum, the function is constant up to rounding over a relative width of 1e-8, so use five grids, each
    # 32 times finer than the previous one.
    for _ in range(6):
        best = int(np.argmax([_expected_completed(mu, sigma, micro_batches, tau) / (tau + serial) for tau in grid]))
        threshold = float(grid[best])
        grid = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 65)
    return threshold


def _expected_completed(mu: float, sigma: float, micro_batches: int, threshold: float) -> float:
    if sigma == 0:
        return float(sum(m * mu < threshold for m in range(1, micro_batches + 1)))
    scale = sigma * math.sqrt(2)
    return sum(math.erfc((m * mu - threshold) / (scale * math.sqrt(m))) for m in range(1, micro_batches + 1)) / 2


def _check_latency(mu: float, sigma: float, micro_batches: int, serial: float = 0.0) -> None:
    if not 0 < mu < math.inf or not 0 <= sigma < math.inf:
        raise ValueError(
            f"mu={mu}, sigma={sigma}: expected a finite mean above 0 and a finite standard deviation of at least 0"
        )
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: expected at least one micro-batch")
    if not 0 <= serial < math.inf:
        raise ValueError(f"serial={serial}: expected a finite time of at least 0")
