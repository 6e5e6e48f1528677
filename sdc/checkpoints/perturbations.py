"""What perturbations of an iterate cost, for iterations that converge linearly.

Qiao, Aragam, Zhang, Xing: Fault Tolerance in Iterative-Convergent Machine Learning, ICML 2019, sections 3 and B.1:

    x_{k+1} = f(x_k),   ||f(x) - x*|| <= c ||x - x*||,   0 < c < 1                                   (3), (5)
    y_{k+1} = f(y_k + delta_k),   y_0 = x_0

A recovery after a fault is such a perturbation, and so is a wrong number that nobody noticed. All statements are about
upper bounds of iterations: kappa(x, eps) = log(||x_0 - x*|| / eps) / log(1/c) iterations suffice for an error below eps
without perturbations, and kappa(y, eps) with them. The *iteration cost* is the difference of the two, and not that of
the iterations that were needed: a run whose start happens to lie in a direction in which f converges faster than by c
needs fewer than kappa, and a perturbation in a slow direction then costs more than the bound of the cost.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.special import stdtrit


class Convergence(NamedTuple):
    """How an iteration converges, by how far its iterates moved.

    Attributes:
        c: factor by which the error shrinks in an iteration.
        interval: 95 % of c, if what the movements depart from a geometric series by is independent noise.
        distance: from the last iterate to the optimum.
    """

    c: float
    interval: tuple[float, float]
    distance: float

    def cost(self, size: float) -> float:
        """Iterations that a perturbation of this size costs now: equation (6), seen from the last iterate.

        log(1 + ||delta|| / ||x_T - x*||) / log(1/c), which is (6) with ||x_T - x*|| = c^T ||x_0 - x*||.

        Args:
            size: ||delta||, 0 or more.

        Raises:
            ValueError: it is out of its range.
        """
        return iteration_cost_bound(self.distance, self.c, {0: size})


LEAST = 8
"""Movements that a fit needs."""
ROUNDS = 50
"""In which a fit must settle; five are usual."""
SETTLED = 1e-9
"""Change of the rate, relative to it, that is none."""


class Intervals(NamedTuple):
    """How far blocks moved, each in intervals that follow one another."""

    blocks: Int[np.ndarray, "intervals"]  # which block it was; each has a distance to its optimum of its own
    begins: Int[np.ndarray, "intervals"]  # steps at which intervals begin
    spans: Int[np.ndarray, "intervals"]  # their steps, above 0
    lengths: Float[np.ndarray, "intervals"]  # L2 norms of the movements, finite and above 0


def fit_convergence(movements: Sequence[float]) -> Convergence | None:
    """Estimates c and the distance to the optimum while an iteration runs, from ||x_{k+1} - x_k||.

    What the paper's section 7 names as future work. If the error is c^k v for one direction v, as it is in the end, the
    iterates move by (1 - c) c^k ||v||: the logarithms lie on a line of slope log c, and the optimum is another 1 / (1 -
    c) movements of the last length away, less that movement.

    Args:
        movements: lengths of successive movements, the newest last: at least `LEAST`, all finite and at least 0.

    Returns:
        None if nothing says that the iteration converges linearly: the interval of c reaches 1, or nothing moves.

    Raises:
        ValueError: there are too few movements, or one is no length.

    Example:
        >>> from sdc.analysis import fit_convergence
        >>> found = fit_convergence([0.9**k for k in range(20)])
        >>> round(found.c, 6), round(found.distance, 6)
        (0.9, 1.215767)
        >>> round(found.cost(found.distance), 1)  # as far off as it is now: until the error has halved
        6.6
    """
    lengths = np.asarray(movements, float)
    if lengths.ndim != 1 or lengths.size < LEAST or not (np.isfinite(lengths) & (lengths >= 0)).all():
        raise ValueError(f"movements={movements}: expected {LEAST} or more lengths, finite and at least 0")
    if not lengths.all():
        return None
    # By hand: scipy.stats takes a second to import, and a millisecond for this, while a training waits.
    x, y = np.arange(lengths.size) - (lengths.size - 1) / 2, np.log(lengths)
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    error = math.sqrt(float(rest @ rest) / (lengths.size - 2) / float(x @ x))
    if (found := _factor(slope, error, lengths.size - 2)) is None:
        return None
    c, interval = found
    last = math.exp(float(y.mean()) + slope * float(x[-1]))
    return Convergence(c, interval, last * c / (1 - c))


def fit_intervals(moved: Intervals) -> tuple[float, tuple[float, float]] | None:
    """Estimates c from movements of blocks in intervals of any lengths, by least squares of their logarithms.

    A block whose error is c^k v moves from step s to step s + a by (c^s - c^(s + a)) ||v||. c is that of a step and the
    same for all blocks, ||v|| of each its own. What movements depart from that by is noise of each interval, or common
    to all intervals that end at the same step: the larger of both errors counts. Returns c and 95 % of it; None if
    nothing says that it is below 1, or there are too few ends or degrees of freedom.
    """
    _, block, counts = np.unique(moved.blocks, return_inverse=True, return_counts=True)
    ends, end = np.unique(moved.begins + moved.spans, return_inverse=True)
    freedom = len(block) - len(counts) - 1
    if freedom < LEAST - 2 or len(ends) < LEAST:
        return None

    def own(values: Float[np.ndarray, "intervals"]) -> Float[np.ndarray, "intervals"]:
        return values - (np.bincount(block, values) / counts)[block]

    # By Gauss and Newton, from the mean speeds at the middles. A mean speed is above that at the middle by sinh(x) / x.
    middles, speeds = own(moved.begins + moved.spans / 2), own(np.log(moved.lengths / moved.spans))
    rate, times, above = 0.0, middles, np.zeros(len(block))
    for _ in range(ROUNDS):
        rest, moment = speeds + rate * middles - above, float(times @ times)
        if not moment:
            return None
        change = -float(times @ rest) / moment
        rate += change
        if not 0 < rate < math.inf:
            return None
        if abs(change) <= SETTLED * rate:
            break
        x = rate * moved.spans / 2
        above = own(x + np.log(-np.expm1(-2 * x) / (2 * x)))
        times = middles - own(moved.spans / 2 * (1 / np.tanh(x) - 1 / x))
    else:
        return None
    alone = float(rest @ rest) / freedom / moment
    together = np.bincount(end, times * rest) / moment
    common = float(together @ together) * len(block) / freedom * len(ends) / (len(ends) - 1)
    return _factor(-rate, math.sqrt(max(alone, common)), min(freedom, len(ends) - 2))


def _factor(slope: float, error: float, freedom: int) -> tuple[float, tuple[float, float]] | None:
    """c and 95 % of it, by its logarithm; None if they reach 1."""
    reach = float(stdtrit(freedom, 0.975)) * error
    c, low, high = (math.exp(one) for one in (slope, slope - reach, slope + reach))
    return (c, (low, high)) if c > 0 and high < 1 else None


def iterations_bound(
    distance: float, c: float, epsilon: float, perturbations: Mapping[int, float] | None = None
) -> float:
    """Iterations after which the expected error is below a number: kappa, proof of theorem 3.2, equations (11), (12).

    It holds from the last perturbation on; it is negative where the start is closer than that. `distance` is ||x_0 -
    x*||, c the factor by which the error shrinks at least in an iteration, and `perturbations` has E||delta_k|| by the
    iteration k, from 0, before which it happens.
    """
    _check(distance, c)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon}: expected a finite number above 0")
    return _log_error(distance, c, perturbations) / -math.log(c) - math.log(epsilon) / -math.log(c)


def iteration_cost_bound(distance: float, c: float, perturbations: Mapping[int, float]) -> float:
    """The most iterations that perturbations cost: theorem 3.2, equation (6).

        iota <= log(1 + Delta_T / ||x_0 - x*||) / log(1/c),   Delta_T = sum_k c^-k E||delta_k||

    Whatever epsilon is; with equality if f shrinks every error by c and each perturbation points away from x*.

    Args:
        distance: ||x_0 - x*||, above 0.
        c: factor by which the error shrinks at least, in an iteration; between 0 and 1.
        perturbations: E||delta_k|| by iteration k, from 0, before which it happens.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> from sdc.analysis import iteration_cost_bound
        >>> round(iteration_cost_bound(1.0, 0.5, {0: 1.0}), 9)  # twice as far away: one iteration more
        1.0
    """
    _check(distance, c)
    return (_log_error(distance, c, perturbations) - math.log(distance)) / -math.log(c)


def error_bound(distance: float, c: float, iterations: int, perturbations: Mapping[int, float]) -> float:
    """The largest expected error after so many iterations: lemma A.1, equation (7).

    E||y_k - x*|| <= c^k (||x_0 - x*|| + sum_{l < k} c^-l E||delta_l||)
    """
    _check(distance, c)
    if iterations < 0:
        raise ValueError(f"iterations={iterations}: expected at least 0")
    so_far = {at: size for at, size in perturbations.items() if at < iterations}
    return math.exp(iterations * math.log(c) + _log_error(distance, c, so_far))


def error_floor(c: float, size: float) -> float:
    """The error below which nobody can come if every iteration is perturbed: example 3.3, equation (13).

        lim sup E||y_k - x*|| <= c / (1 - c) * Delta

    Args:
        c: see `iteration_cost_bound`.
        size: Delta, the largest E||delta_k||, 0 or more.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> from sdc.analysis import error_floor
        >>> round(error_floor(0.9, 0.01), 9)
        0.09
    """
    _check(1.0, c)
    if not 0 <= size < math.inf:
        raise ValueError(f"size={size}: expected a finite number of at least 0")
    return c / (1 - c) * size


def perpetual_cost_bound(distance: float, c: float, size: float, epsilon: float) -> float:
    """The most iterations that perturbations of every iteration cost: equation (14).

        iota <= log((1 - F / ||x_0 - x*||) / (1 - F / eps)) / log(1/c),   F = c / (1 - c) * Delta

    Args:
        distance: ||x_0 - x*||, above F.
        c: see `iteration_cost_bound`.
        size: Delta, see `error_floor`.
        epsilon: the error that is to be reached, above F.

    Returns:
        Iterations; infinity where epsilon is at most F, and cannot be reached for certain.

    Raises:
        ValueError: a number is out of its range, or the start is closer than F: then there is no bound.
    """
    floor = error_floor(c, size)
    _check(distance, c)
    if distance <= floor:
        raise ValueError(f"distance={distance}: expected more than the floor c / (1 - c) * size = {floor}")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon}: expected a finite number above 0")
    if epsilon <= floor:
        return math.inf
    return (math.log1p(-floor / distance) - math.log1p(-floor / epsilon)) / -math.log(c)


def _log_error(distance: float, c: float, perturbations: Mapping[int, float] | None) -> float:
    """log(||x_0 - x*|| + Delta_T), where c^-k alone may be too large for a number."""
    terms = [math.log(distance)]
    for at, size in (perturbations or {}).items():
        if at < 0 or at != int(at) or not 0 <= size < math.inf:
            given = f"a perturbation of {size} at iteration {at}"
            raise ValueError(f"{given}: expected finite sizes, and whole iterations from 0")
        if size:
            terms.append(math.log(size) - at * math.log(c))
    largest = max(terms)
    return largest + math.log(sum(math.exp(term - largest) for term in terms))


def _check(distance: float, c: float) -> None:
    if not 0 < distance < math.inf:
        raise ValueError(f"distance={distance}: expected a finite number above 0")
    if not 0 < c < 1:
        raise ValueError(f"c={c}: expected a number between 0 and 1")
