"""Estimates the uncertainty of a mismatch frequency, and the number of steps that a run needs to show a burst.

**If elements fail independently** and rarely, the number x of mismatches among n checked elements has a Poisson
distribution with mean f·n·recall. The exact (Garwood) limits of that mean give limits for the frequency f. If there is
no mismatch, the one-sided upper limit is -ln(1 - confidence) / n, which is 3.0/n at 95 % and 4.7/n at 99 % confidence.

**Corruption comes in bursts**, so elements are not independent and these limits are too narrow. `needed_mismatches`
quantifies this effect for a rate that varies between runs. `bootstrap_interval` is valid for bursts. The counts of
neighboring steps depend on each other, but the counts of long stretches of steps hardly do. Therefore the steps are
divided into blocks whose length follows from the correlation of the data, and blocks are drawn with replacement
(Carlstein, Annals of Statistics 14, 1986). Sums of bursts have a skewed distribution, so a percentile interval would be
too low. The difference between a drawn frequency and the measured one is therefore divided by the standard error of the
draw, and the quantiles of this *studentized* difference give the interval ("bootstrap-t": Efron and Tibshirani, An
Introduction to the Bootstrap, 1993, section 12.5).

**If bursts occur at random times**, independently of each other, they form a Poisson process: the number of steps from
one burst to the next is exponentially distributed with mean m, and n steps show no burst with probability exp(-n/m).
This formula requires a *known* m. If m is estimated from k intervals with sum T, the estimate is uncertain for small k.
The ratio 2T/m has a chi-square distribution with 2k degrees of freedom, so a run of n = r T steps, with r fixed
beforehand, shows no burst with probability

    E[exp(-r T/m)] = (1 + r)^-k = (T / (T + n))^k

for any m. Equivalently, the next interval divided by the mean T/k of the observed intervals has an F distribution with
2 and 2k degrees of freedom, whose quantiles are prediction limits (Lawless, Technometrics 13, 1971). To show a burst
with 95 % probability, a run must be 19 times as long as a single observed interval, 5.2 times as long as the mean of
three intervals, 3.5 times the mean of ten, or 3.0 times a known mean. A run that is three times as long as a single
observed interval shows a burst with 75 % probability.

None of these formulas hold if bursts trigger each other, as earthquakes trigger aftershocks, or if their rate changes.

Quantiles are computed with `scipy.special`, which loads four times faster than `scipy.stats`. Only the functions that
need this module import it, so that `sdc --help` need not wait for the import.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

CONFIDENCE = 0.95


def frequency_upper_bound(
    mismatched: int, checked: int, *, confidence: float = CONFIDENCE, recall: float = 1.0
) -> float:
    """Computes the one-sided upper bound on the mismatch frequency: chi2_confidence(2x + 2) / (2 n recall), at most 1.

    Args:
        mismatched: mismatched elements x.
        checked: checked elements n.
        confidence: probability with which the bound holds.
        recall: share of corrupted elements that the check detects; a bitwise comparison detects all.

    Returns:
        Mismatches per element.

    Raises:
        ValueError: no element was checked, more elements mismatched than were checked, or confidence or recall is not a
            valid share.
    """
    from scipy.special import gammainccinv

    _check_counts(mismatched, checked, confidence, recall)
    # Half a quantile of chi-square with 2x + 2 degrees of freedom is a quantile of the gamma distribution of shape x +
    # 1.
    return min(1.0, float(gammainccinv(mismatched + 1, 1 - confidence)) / (checked * recall))


def frequency_interval(
    mismatched: int, checked: int, *, confidence: float = CONFIDENCE, recall: float = 1.0
) -> tuple[float, float]:
    """Computes the two-sided exact (Garwood) interval of the mismatch frequency.

    Args:
        mismatched: mismatched elements x.
        checked: checked elements n.
        confidence: minimum probability with which the interval contains the frequency.
        recall: share of corrupted elements that the check detects.

    Returns:
        Lower and upper limit, in mismatches per element.

    Raises:
        ValueError: as in `frequency_upper_bound`.
    """
    from scipy.special import gammainccinv, gammaincinv

    _check_counts(mismatched, checked, confidence, recall)
    tail = (1 - confidence) / 2
    lower = float(gammaincinv(mismatched, tail)) if mismatched else 0.0
    upper = float(gammainccinv(mismatched + 1, tail))
    return min(1.0, lower / (checked * recall)), min(1.0, upper / (checked * recall))


def proportion_interval(successes: int, trials: int, *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Computes the two-sided exact interval of a proportion (Clopper and Pearson, Biometrika 26, 1934).

    Args:
        successes: number of successes.
        trials: number of independent trials.
        confidence: minimum probability with which the interval contains the proportion.

    Returns:
        Lower and upper limit. At the lower limit, the probability of at least this many successes is (1 - confidence) /
        2; at the upper limit, the probability of at most this many has the same value.

    Raises:
        ValueError: there are no trials, there are more successes than trials, or the confidence is not a valid share.
    """
    from scipy.special import betainccinv, betaincinv

    _check_counts(successes, trials, confidence, 1.0)
    tail = (1 - confidence) / 2
    lower = float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0
    upper = float(betainccinv(successes + 1, trials - successes, tail)) if successes < trials else 1.0
    return lower, upper


def needed_mismatches(*, shape: float = math.inf, confidence: float = CONFIDENCE) -> float:
    """Computes the expected number of mismatches at which it is improbable to observe none. This number replaces the
    3.0 in the bound 3.0/n of a clean run.

    If the rate itself varies between runs and follows a gamma distribution with the given shape, the count is negative
    binomial and P(0) = (1 + mean/shape)^-shape.

    Args:
        shape: shape of the gamma distribution; infinite if elements are independent; the more strongly mismatches are
            concentrated in bursts, the smaller the shape.
        confidence: probability with which a run with the returned expected number shows at least one mismatch.

    Returns:
        Expected number of mismatches.
    """
    if math.isinf(shape):
        return -math.log(1 - confidence)
    return float(shape * ((1 - confidence) ** (-1 / shape) - 1))


def _check_counts(mismatched: int, checked: int, confidence: float, recall: float) -> None:
    if not 0 <= mismatched <= checked or checked == 0:
        raise ValueError(
            f"{mismatched} of {checked} elements mismatched: expected 0 <= mismatched <= checked and checked > 0"
        )
    if not 0 < confidence < 1 or not 0 < recall <= 1:
        raise ValueError(f"confidence {confidence}, recall {recall}: expected 0 < confidence < 1 and 0 < recall <= 1")


MOST = 30  # maximum number of blocks: overly long blocks do little harm; overly short blocks narrow the intervals
LEAST = 8  # a valid interval requires at least this number of blocks with a mismatch
DRAWN = 1999

Counts: TypeAlias = Float[np.ndarray, " steps"]
Sums: TypeAlias = Float[np.ndarray, "*draws blocks"]
Each: TypeAlias = Float[np.ndarray, "*draws"]


def bootstrap_interval(
    mismatched: Sequence[int], checked: Sequence[int], *, confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float] | None:
    """Computes a two-sided interval of a mismatch frequency by a studentized block bootstrap over steps.

    Each block has at least twice the length that `block_length` returns, and there are at most 30 blocks. If steps
    depend on each other, the tails are half as large, because the variance between few dependent blocks is too small.
    In simulations of 95 % intervals with about 1,000 mismatches per step (`make storms STORMS=coverage`, 2,000 runs for
    each process, of which up to 10 % had too few bursts for an interval), the interval contained the true frequency
    with the following probability:

    ============================================================================  ============
    elements independent; rates of steps gamma distributed, shape 1 and 1/2       95.6 to 96.9 %
    spikes in 3 % of 1,350 steps                                                  96.9 %
    bursts of 5 steps, every 45 and every 105 of 1,350 steps                      96.6 %
    bursts of 20 steps, every 60 of 1,350 and every 220 of 4,500 steps            94.7, 96.4 %
    lognormal rates that correlate over 5 and 20 of 1,350, and 50 of 4,500 steps  94.8 to 96.9 %
    ============================================================================  ============

    If the interval misses the true frequency, the true frequency is more often above the interval than below it. The
    limits for independent elements (`frequency_interval`) contain the true frequency in less than 6 % of the runs if
    steps are not independent.

    Args:
        mismatched: mismatched elements of each step, in the order of the steps.
        checked: checked elements of each step.
        confidence: intended probability with which the interval contains the frequency.
        seed: seed of the draws; equal seeds give equal intervals.

    Returns:
        Lower and upper limit, in mismatches per element. None if fewer than 8 blocks have a mismatch.

    Raises:
        ValueError: the two sequences differ in length, a count is invalid, or the confidence is not a valid share.
    """
    x, n = np.asarray(mismatched, np.float64), np.asarray(checked, np.float64)
    if x.shape != n.shape or x.ndim != 1 or not np.all((x >= 0) & (x <= n)):
        raise ValueError(
            f"{x.size} counts of mismatched elements and {n.size} counts of checked elements: expected one of each for "
            "every step, with 0 <= mismatched <= checked"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: expected a share above 0 and below 1")
    x, n = x[n > 0], n[n > 0]
    if not x.any():
        return None
    lasting = block_length(x)
    length = max(math.ceil(len(x) / MOST), 2 * lasting)
    blocks = len(x) // length
    if blocks < LEAST:
        return None
    starts = np.arange(blocks) * len(x) // blocks
    hits, elements = np.add.reduceat(x, starts), np.add.reduceat(n, starts)
    if np.count_nonzero(hits) < LEAST:
        return None
    frequency, error = _estimate(hits, elements)
    drawn = np.random.default_rng(seed).integers(blocks, size=(DRAWN, blocks))
    found, errors = _estimate(hits[drawn], elements[drawn])
    # Draws of equal blocks have no standard error. If no draw has one, every step has the same frequency.
    apart = errors > 1e-9 * found
    if not apart.any():
        return float(frequency), float(frequency)
    # If steps depend on each other, so do blocks, and their variance is too small. Half the tails make up for it.
    tail = (1 - confidence) / (2 if lasting == 1 else 4)
    high, low = np.quantile((found[apart] - frequency) / errors[apart], [tail, 1 - tail])
    return max(0.0, float(frequency - low * error)), min(1.0, float(frequency - high * error))


def block_length(counts: Sequence[float] | Counts) -> int:
    """Returns the block length for a bootstrap of a series of counts, computed from the autocorrelations of the series.

    The method is that of Politis and White, Econometric Reviews 23 (2004), as corrected by Patton, Politis and White,
    Econometric Reviews 28 (2009), for non-overlapping blocks: b = (2 G^2 / D)^(1/3) N^(1/3), where D = 4/3 g(0)^2, and
    G = sum |k| R(k) and g(0) = sum R(k) are sums over the autocovariances R. These are weighted by a flat-top window,
    which is twice as wide as the lag that precedes five consecutive insignificant lags.
    """
    x = np.asarray(counts, np.float64)
    size = len(x)
    if size < 2 or x.min() == x.max():
        return 1
    x = (x - x.mean()) / x.std()
    run = max(5, math.ceil(math.sqrt(math.log10(size))))
    most = min(math.ceil(math.sqrt(size)) + run, size - 1)
    spectrum = np.fft.rfft(x, 1 << (size + most).bit_length())
    correlations = np.fft.irfft(spectrum * spectrum.conj())[: most + 1] / size
    large = np.flatnonzero(np.abs(correlations[1:]) > 2 * math.sqrt(math.log10(size) / size)) + 1
    # The last significant lag before `run` insignificant ones; without such a stretch, the last significant lag.
    edges = [0, *large.tolist(), most + run + 1]
    lag = next(edge for edge, following in itertools.pairwise(edges) if following - edge > run)
    window = min(2 * max(lag, 1), most)
    lags = np.arange(-window, window + 1)
    weighted = np.minimum(1, 2 * (1 - np.abs(lags) / window)) * correlations[np.abs(lags)]
    level = float(weighted.sum())
    if level <= 0:
        return 1
    best = (1.5 * size) ** (1 / 3) * abs(float((weighted * np.abs(lags)).sum()) / level) ** (2 / 3)
    return max(1, math.ceil(min(best, 3 * math.sqrt(size), size / 3)))


def _estimate(hits: Sums, elements: Sums) -> tuple[Each, Each]:
    """Returns the mismatch frequency of each draw of blocks, and its standard error by the delta method."""
    blocks = hits.shape[-1]
    total = elements.sum(-1)
    found = hits.sum(-1) / total
    residuals = hits - found[..., None] * elements
    return found, np.sqrt(blocks / (blocks - 1) * np.square(residuals).sum(-1)) / total


def burn_in_steps(mean_interval: float, *, observed: int | None = None, confidence: float = CONFIDENCE) -> int:
    """Computes the number of steps that show at least one burst with a given probability, if bursts occur at random
    times.

    If the mean m is known, this number is n = -ln(1 - confidence) m. If m is the mean of k observed intervals, it is n
    = k m ((1 - confidence)^(-1/k) - 1), which is m times the quantile of F with 2 and 2k degrees of freedom.

    If no intervals were observed, but k bursts were counted in a run of fixed length T, use T/k as the mean. The
    probability that such a plan fails is at most 1 - confidence (Nelson, IEEE Transactions on Reliability R-19, 1970,
    for a count of zero), averaged over all runs, including those without a burst, for which nothing is planned. The
    plan fails more often if the run showed a burst only by chance, because the mean interval is then much longer than
    the run.

    Args:
        mean_interval: mean number of steps between bursts.
        observed: number of intervals in that mean; None if the mean is known, as in a simulation.
        confidence: probability of seeing a burst.

    Returns:
        Number of steps, rounded up.

    Raises:
        ValueError: the mean interval is not positive, no interval was observed, or the confidence is not a valid share.
    """
    _check_interval(mean_interval, observed, confidence)
    odds = -math.log1p(-confidence)
    intervals = odds if observed is None else observed * math.expm1(odds / observed)
    return math.ceil(
        intervals * mean_interval * (1 - 1e-12)
    )  # prevents rounding from turning 19 intervals into 19 intervals and one step


def probability_seen(steps: float, mean_interval: float, *, observed: int | None = None) -> float:
    """Computes the probability that `steps` steps show a burst; this function is the inverse of `burn_in_steps`.

    Args:
        steps: length of a run.
        mean_interval: mean number of steps between bursts.
        observed: number of intervals in that mean; None if the mean is known.

    Returns:
        1 - exp(-n/m) if the mean is known, otherwise 1 - (1 + n / (k m))^-k.

    Raises:
        ValueError: the number of steps is negative, or one of the conditions listed at `burn_in_steps` holds.
    """
    _check_interval(mean_interval, observed, CONFIDENCE)
    if not steps >= 0:
        raise ValueError(f"{steps} steps: expected at least 0")
    passed = steps / mean_interval
    return -math.expm1(-passed if observed is None else -observed * math.log1p(passed / observed))


def mean_interval_limits(
    steps: float, observed: int, *, ends_with_burst: bool = False, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Computes the two-sided exact interval of the mean number of steps between bursts.

    Args:
        steps: number T of steps in which bursts were counted.
        observed: number k of bursts in these steps.
        ends_with_burst: whether counting stopped with the k-th burst, so that T is a sum of k intervals; otherwise,
            counting stopped after a fixed number of steps, and k is random.
        confidence: probability with which the interval contains the mean: exact if counting stopped with a burst
            (Epstein and Sobel, Journal of the American Statistical Association 48, 1953), otherwise a minimum (Garwood,
            Biometrika 28, 1936).

    Returns:
        Lower and upper limit, in steps: 2T divided by the quantile of chi2(2k) at 1 - a/2 and at a/2, where a = 1 -
        confidence. If the number of steps was fixed, the lower limit uses chi2(2k + 2) instead. The upper limit is
        infinite if no burst was observed.

    Raises:
        ValueError: there are no steps, a count is negative, `ends_with_burst` is set although no burst was observed, or
            the confidence is not a valid share.
    """
    from scipy.special import gammainccinv, gammaincinv

    if not 0 < steps < math.inf or observed < (1 if ends_with_burst else 0):
        least = "at least 1 burst (since a burst ended the count)" if ends_with_burst else "at least 0 bursts"
        raise ValueError(
            f"{observed} bursts in {steps} steps: expected {least}, and a positive, finite number of steps"
        )
    _check_interval(steps, None, confidence)
    tail = (1 - confidence) / 2
    # Half a quantile of chi-square with 2k degrees of freedom is a quantile of the gamma distribution of shape k.
    most = float(gammainccinv(observed if ends_with_burst else observed + 1, tail))
    fewest = float(gammaincinv(observed, tail)) if observed else 0.0
    return steps / most, steps / fewest if fewest else math.inf


def excluded_interval(steps: float, *, confidence: float = CONFIDENCE) -> float:
    """Computes the longest mean interval between bursts, in steps, that a run of `steps` steps without a burst
    excludes.

    The rule of three holds because nothing is estimated here: if the mean interval were this long or shorter, the run
    would show no burst with a probability of at most 1 - confidence.
    """
    return steps / -math.log(1 - confidence)


def count_bursts(steps: Sequence[int], length: int) -> int:
    """Counts the bursts formed by the steps with a mismatch.

    Adjacent steps belong to one burst, as do steps whose distance is at most a fifth of the mean distance between
    bursts. Merging bursts increases the mean distance, so merging is repeated until no more bursts can be merged. If
    mismatches occur at random steps, at most a fifth of these steps are merged, so plans based on the count are
    slightly too long.

    The 95 % plans of `burn_in_steps(length / bursts, observed=bursts)` were simulated for bursts counted over 1,350
    steps. Runs of the planned length showed another mismatch with a probability of at least 97 % if mismatches occurred
    at random steps (1 in 450, 100, 20, 3, or 2) or in bursts of 5 or 20 steps at random times (every 100 or 450 steps).
    The probability was 90 % if bursts of 50 steps, with a mismatch in one step out of 10, occurred every 150 steps.
    """
    gaps = np.diff(np.unique(np.asarray(steps, np.float64)))
    bursts = np.count_nonzero(gaps > 1) + 1
    while (joined := np.count_nonzero(gaps > max(1.0, length / bursts / 5)) + 1) < bursts:
        bursts = joined
    return int(bursts) if len(steps) else 0


def _check_interval(mean_interval: float, observed: int | None, confidence: float) -> None:
    if not 0 < mean_interval < math.inf:
        raise ValueError(f"a mean interval of {mean_interval} steps: expected a finite, positive number")
    if observed is not None and observed < 1:
        raise ValueError(f"observed={observed}: a plan requires at least 1 observed interval")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: expected a share above 0 and below 1")
