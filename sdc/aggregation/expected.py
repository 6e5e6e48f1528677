"""What a compute threshold gains in theory: from mean and variance of the latency of a micro-batch.

Giladi et al., DropCompute, NeurIPS 2023; equations by their numbers there. `speedup` has the same from measured
latencies. All functions take the same arguments, and raise a ValueError where one is out of its range:

    mu, sigma       mean and standard deviation of the latency of a micro-batch, in seconds
    micro_batches   M, micro-batches of a worker in an iteration
    workers         N
    serial          Tc, seconds of the rest of an iteration, such as the all-reduce
    threshold       tau, seconds of compute after which a worker stops
"""

import math
from statistics import NormalDist

import numpy as np

from .speedup import check_micro_batches, check_threshold

_NORMAL = NormalDist()
_EULER = 0.57721566490153286


def expected_iteration_time(mu: float, sigma: float, micro_batches: int, workers: int, serial: float = 0.0) -> float:
    """Mean time of an iteration without a threshold: equation (7), after Bailey et al. (2014).

        E[T] + Tc ~ sqrt(M) sigma ((1 - g) Phi^-1(1 - 1/N) + g Phi^-1(1 - 1/(e N))) + M mu + Tc

    with the Euler-Mascheroni constant g: the mean of the largest of N normal variables. What it adds to M mu is 7.9 %
    too small for two workers, 0.8 % too large for three, 2.5 % for eight, 0.7 % for 200. One worker takes M mu + Tc.

    Example:
        >>> round(expected_iteration_time(0.45, 0.2, 12, 200), 2)
        7.32
    """
    _check_latency(mu, sigma, micro_batches)
    _check_serial(serial)
    if workers < 1:
        raise ValueError(f"workers={workers}: expected one worker or more")
    mean = micro_batches * mu + serial
    if workers == 1:
        return mean
    # Phi^-1(1 - p) = -Phi^-1(p) keeps the digits of a small p.
    largest = -(1 - _EULER) * _NORMAL.inv_cdf(1 / workers) - _EULER * _NORMAL.inv_cdf(1 / (math.e * workers))
    return mean + math.sqrt(micro_batches) * sigma * largest


def expected_completed(mu: float, sigma: float, micro_batches: int, threshold: float) -> float:
    """Mean number of micro-batches that a worker completes: equations (5) and (10).

        E[Mdone] ~ sum_{m=1..M} Phi((tau - m mu) / sqrt(m sigma²))

    Exact for normal latencies.

    Example:
        >>> round(expected_completed(0.45, 0.2, 12, 5.4), 2)
        11.16
    """
    _check_latency(mu, sigma, micro_batches)
    check_threshold(threshold)
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
    """Effective speedup from mean and variance of the latency: equation (11).

        E[S] ~ E[Mdone]/M (E[T] + Tc) / (min(tau, E[T]) + Tc)

    The paper counts Tc into the E[T] of equation (7), but adds it once more to min(tau, E[T]); here T is compute time,
    as in equation (6).

    Args:
        iteration_time: E[T] + Tc where it was measured, in place of equation (7); better where latencies are not
            normal, since the slowest of many workers depends on their tail.

    Example:
        >>> round(expected_speedup(0.45, 0.2, 12, 200, 0.0, 5.9), 3)
        1.206
    """
    predicted = expected_iteration_time(mu, sigma, micro_batches, workers, serial)
    if iteration_time is None:
        iteration_time = predicted
    elif not serial < iteration_time < math.inf:
        raise ValueError(
            f"iteration_time={iteration_time}: expected the time of a whole iteration, above its serial={serial}"
        )
    share = expected_completed(mu, sigma, micro_batches, threshold) / micro_batches
    return share * iteration_time / min(threshold + serial, iteration_time)


def analytic_threshold(mu: float, sigma: float, micro_batches: int, serial: float) -> float:
    """The threshold that mean and variance of the latency suggest, for many workers (appendix C.2).

        tau* = argmax_tau (1/(tau + Tc)) sum_{m=1..M} Phi((tau - m mu)/sqrt(m sigma²)),  tau > M mu/2

    The number of workers does not enter: tau is taken to be below the time of the slowest. With few workers tau* can
    lie above it, and then drops nothing. Where sigma reaches mu and Tc is small, normal latencies are often negative
    and tau* is the limit M mu/2: measure instead, with `select_threshold`.

    Example:
        >>> round(analytic_threshold(0.45, 0.2, 12, 0.0), 2)
        4.39
    """
    _check_latency(mu, sigma, micro_batches)
    _check_serial(serial)
    mean, spread = micro_batches * mu, math.sqrt(micro_batches) * sigma
    if sigma == 0:
        return math.nextafter(mean, math.inf)
    # Beyond nine standard deviations nothing is dropped in double precision. If sigma is small, the sum is a staircase
    # whose last step is the best; it may fall between two points of the first grid.
    lowest, highest = math.nextafter(mean / 2, math.inf), mean + 9 * spread
    last_step = np.linspace(max(lowest, mean - 9 * spread), highest, 512)
    grid = np.sort(np.concatenate([np.linspace(lowest, highest, 2048), last_step]))
    # Near its maximum the function is flat to rounding over a relative 1e-8: five grids, each 32 times as fine.
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


def _check_latency(mu: float, sigma: float, micro_batches: int) -> None:
    if not 0 < mu < math.inf or not 0 <= sigma < math.inf:
        raise ValueError(f"mu={mu}, sigma={sigma}: expected a finite mean above 0, a standard deviation of at least 0")
    check_micro_batches(micro_batches)


def _check_serial(serial: float) -> None:
    if not 0 <= serial < math.inf:
        raise ValueError(f"serial={serial}: expected a finite time of at least 0")
