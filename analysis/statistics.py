"""How sure a mismatch frequency is, and how long a burn-in has to be.

Mismatches are counted: x of n checked elements. If elements fail independently and rarely, x is Poisson distributed
with mean f·n·recall, and exact (Garwood) limits of that mean give limits of the frequency f. Without a mismatch the
one-sided upper limit is -ln(1 - confidence) / n: 3.0/n at 95 %, 4.6/n at 99 %.

Corruption comes in bursts, so elements are not independent and these limits are too narrow. Two functions say by how
much: `needed_mismatches` for gamma distributed rates, `burn_in_steps` for bursts at random times.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95

# Above this count the exact sum is replaced by Wilson and Hilferty's approximation of the chi-square quantile, whose
# relative error at 95 % is below 2e-6 there.
EXACT_LIMIT = 500


def frequency_upper_bound(
    mismatched: int, checked: int, *, confidence: float = CONFIDENCE, recall: float = 1.0
) -> float:
    """One-sided upper bound of the mismatch frequency: chi2_confidence(2x + 2) / (2 n recall), at most 1.

    Args:
        mismatched: mismatched elements x.
        checked: checked elements n.
        confidence: probability with which the bound holds.
        recall: share of corrupted elements that the check finds; a bitwise comparison finds all.

    Returns:
        Mismatches per element.

    Raises:
        ValueError: no element was checked, more mismatched than were checked, or confidence or recall is no share.

    Example:
        >>> round(frequency_upper_bound(0, 1_000_000) * 1e6, 3)
        2.996
    """
    _validate(mismatched, checked, confidence, recall)
    return min(1.0, _mean_with_tail(mismatched, 1 - confidence) / (checked * recall))


def frequency_interval(
    mismatched: int, checked: int, *, confidence: float = CONFIDENCE, recall: float = 1.0
) -> tuple[float, float]:
    """Two-sided exact (Garwood) interval of the mismatch frequency.

    Args:
        mismatched: mismatched elements x.
        checked: checked elements n.
        confidence: probability with which the interval holds the frequency, at the least.
        recall: share of corrupted elements that the check finds.

    Returns:
        Lower and upper limit, in mismatches per element.

    Raises:
        ValueError: as for `frequency_upper_bound`.

    Example:
        >>> [round(limit, 2) for limit in frequency_interval(10, 100)]
        [0.05, 0.18]
    """
    _validate(mismatched, checked, confidence, recall)
    tail = (1 - confidence) / 2
    lower = _mean_with_tail(mismatched - 1, 1 - tail) if mismatched else 0.0
    upper = _mean_with_tail(mismatched, tail)
    return min(1.0, lower / (checked * recall)), min(1.0, upper / (checked * recall))


def proportion_interval(successes: int, trials: int, *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two-sided exact interval of a proportion (Clopper and Pearson, Biometrika 26, 1934).

    Args:
        successes: of the trials.
        trials: independent ones.
        confidence: probability with which the interval holds the proportion, at the least.

    Returns:
        Lower and upper limit: the proportions at which so many successes or more, and so many or fewer, have a
        probability of half of what the confidence leaves.

    Raises:
        ValueError: there are no trials, more successes than trials, or the confidence is no share.

    Example:
        >>> [round(limit, 3) for limit in proportion_interval(5, 10)]
        [0.187, 0.813]
    """
    _validate(successes, trials, confidence, 1.0)
    tail = (1 - confidence) / 2
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])  # logarithms of factorials
    chosen = logs[trials] - logs - logs[::-1]  # of binomial coefficients

    def more_than(count: int, p: float) -> float:
        """Probability of more than so many successes."""
        k = np.arange(count + 1)
        return 1.0 - float(np.exp(chosen[: count + 1] + k * math.log(p) + (trials - k) * math.log1p(-p)).sum())

    lower = 0.0 if successes == 0 else _where_rising(lambda p: more_than(successes - 1, p), tail)
    upper = 1.0 if successes == trials else _where_rising(lambda p: more_than(successes, p), 1 - tail)
    return lower, upper


def _where_rising(rising: Callable[[float], float], value: float) -> float:
    """Where a function that rises from 0 to 1 over [0, 1] takes a value."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return (low + high) / 2


def needed_mismatches(*, shape: float = math.inf, confidence: float = CONFIDENCE) -> float:
    """Expected mismatches at which seeing none is improbable: the numerator that replaces 3.0 in a clean run's bound.

    If the rate itself varies between runs as a gamma distribution of the given shape, the count is negative binomial
    and P(0) = (1 + mean/shape)^-shape.

    Args:
        shape: of the gamma distribution; infinite means independent elements, smaller means burstier.
        confidence: probability with which such a run would have shown a mismatch.

    Returns:
        Expected number of mismatches.

    Example:
        >>> [round(needed_mismatches(shape=shape)) for shape in (math.inf, 1, 0.5)]
        [3, 19, 199]
    """
    if math.isinf(shape):
        return -math.log(1 - confidence)
    return float(shape * ((1 - confidence) ** (-1 / shape) - 1))


def burn_in_steps(mean_interval: float, *, confidence: float = CONFIDENCE) -> int:
    """Steps to plan for, so that bursts at random times show at least one: three mean intervals at 95 %.

    Args:
        mean_interval: mean number of steps between bursts.
        confidence: probability of seeing a burst.

    Returns:
        Number of steps, rounded up.

    Example:
        >>> burn_in_steps(450)
        1349
    """
    return math.ceil(-math.log(1 - confidence) * mean_interval)


def excluded_interval(steps: int, *, confidence: float = CONFIDENCE) -> float:
    """Inverse of `burn_in_steps`: a run of `steps` without a burst excludes bursts that come this often or oftener."""
    return steps / -math.log(1 - confidence)


def _validate(mismatched: int, checked: int, confidence: float, recall: float) -> None:
    if not 0 <= mismatched <= checked or checked == 0:
        raise ValueError(
            f"{mismatched} of {checked} elements mismatched: expected 0 <= mismatched <= checked, checked > 0"
        )
    if not 0 < confidence < 1 or not 0 < recall <= 1:
        raise ValueError(f"confidence {confidence} and recall {recall}: expected shares above 0, confidence below 1")


def _mean_with_tail(count: int, tail: float) -> float:
    """The Poisson mean at which P(X <= count) = tail; half the (1 - tail) quantile of chi-square with 2 count + 2."""
    if count == 0:
        return -math.log(tail)
    if count > EXACT_LIMIT:
        spread = 1 / (9 * (count + 1))
        return float((count + 1) * (1 - spread + NormalDist().inv_cdf(1 - tail) * math.sqrt(spread)) ** 3)
    return _bisect(lambda mean: _at_most(count, mean) - tail, float(count + 1))


def _at_most(count: int, mean: float) -> float:
    """P(X <= count) of a Poisson variable."""
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))


def _bisect(falling: Callable[[float], float], guess: float) -> float:
    """The root of a falling function on the positive numbers."""
    low, high = 0.0, guess
    while falling(high) > 0:
        low, high = high, 2 * high
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
        if high - low <= 1e-12 * high:
            break
    return (low + high) / 2
