"""Confidence in a mismatch frequency, and the time to wait for a burst.

**If elements fail independently** and rarely, the mismatches x of n checked elements are Poisson distributed with mean
f·n·recall, and exact (Garwood) limits of that mean give limits of the frequency f. Without a mismatch the one-sided
upper limit is -ln(1 - confidence) / n: 3.0/n at 95 %, 4.6/n at 99 %.

**Corruption comes in bursts**, so elements are not independent and these limits are too narrow. `needed_mismatches`
quantifies this if the rate varies between runs. `bootstrap_interval` is valid under bursts: counts of neighbouring
steps are dependent, those of long stretches hardly. So the steps are divided into blocks whose length follows from
the correlation of the data, and blocks are drawn with replacement (Carlstein, Annals of Statistics 14, 1986). Sums
of bursts
are skewed, so a percentile interval would be too low; therefore the difference of a drawn frequency from the
measured one is divided by its own standard error, and the quantiles of *that* give the interval (studentized,
"bootstrap-t": Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 12.5).

**Bursts at random times**, independent of each other, are a Poisson process: the steps from one to the next are
exponential variables of mean m, and n steps show none with a probability of exp(-n/m). This holds if m is *known*. If m
is estimated from k intervals with sum T, a small k makes it uncertain. For a plan of n = r T steps with r fixed
beforehand, 2T/m has a chi-square distribution of 2k degrees of freedom, so the plan shows no burst with probability

    E[exp(-r T/m)] = (1 + r)^-k = (T / (T + n))^k

for any m: the next interval, divided by the mean T/k of those observed, has the F distribution of 2 and 2k degrees
of freedom, whose quantiles are prediction limits (Lawless, Technometrics 13, 1971). For 95 % the plan needs 19 times a
single observed interval, 5.1 times the mean of three, 3.5 times the mean of ten, and 3.0 times a known mean. Three
times a single observed interval show a burst with 75 % probability.

If bursts trigger each other, as aftershocks do, or if their rate changes, none of these formulas hold.

Quantiles are those of SciPy's distributions, taken from `scipy.special`, which loads four times faster than
`scipy.stats`; functions import it, so that `sdc --help` does not wait for it.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from sdc.burnin import BurstOutlook

CONFIDENCE = 0.95


def frequency_upper_bound(
    mismatched: int, checked: int, *, confidence: float = CONFIDENCE, recall: float = 1.0
) -> float:
    """Computes the one-sided upper bound of the mismatch frequency: chi2_confidence(2x + 2) / (2 n recall), at most 1.

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
        Lower and upper limit: the proportions at which at least, and at most, this many successes have the probability
        (1 - confidence) / 2.

    Raises:
        ValueError: there are no trials, more successes than trials, or the confidence is not a valid share.
    """
    from scipy.special import betainccinv, betaincinv

    _check_counts(successes, trials, confidence, 1.0)
    tail = (1 - confidence) / 2
    lower = float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0
    upper = float(betainccinv(successes + 1, trials - successes, tail)) if successes < trials else 1.0
    return lower, upper


def needed_mismatches(*, shape: float = math.inf, confidence: float = CONFIDENCE) -> float:
    """Computes the expected number of mismatches at which observing none is improbable. This number replaces 3.0 in the
    numerator of a clean run's bound.

    If the rate itself varies between runs and follows a gamma distribution with the given shape, the count is negative
    binomial and P(0) = (1 + mean/shape)^-shape.

    Args:
        shape: shape of the gamma distribution; infinite means independent elements, smaller means burstier.
        confidence: probability with which such a run shows a mismatch.

    Returns:
        Expected number of mismatches.
    """
    if math.isinf(shape):
        return -math.log(1 - confidence)
    return float(shape * ((1 - confidence) ** (-1 / shape) - 1))


def _check_counts(mismatched: int, checked: int, confidence: float, recall: float) -> None:
    if not 0 <= mismatched <= checked or checked == 0:
        raise ValueError(
            f"{mismatched} of {checked} elements mismatched: expected 0 <= mismatched <= checked, checked > 0"
        )
    if not 0 < confidence < 1 or not 0 < recall <= 1:
        raise ValueError(f"confidence {confidence} and recall {recall}: expected shares above 0, confidence below 1")


MOST = 30  # maximum number of blocks: overly long blocks cost little; overly short ones narrow the intervals
LEAST = 8  # minimum number of blocks with a mismatch: with fewer, no interval is valid
DRAWN = 1999

Counts: TypeAlias = Float[np.ndarray, " steps"]
Sums: TypeAlias = Float[np.ndarray, "*draws blocks"]
Each: TypeAlias = Float[np.ndarray, "*draws"]


def bootstrap_interval(
    mismatched: Sequence[int], checked: Sequence[int], *, confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float] | None:
    """Computes a two-sided interval of a mismatch frequency by a studentized block bootstrap over steps.

    Each block is at least twice as long as `block_length` returns, and there are at most 30 blocks. In simulations at
    95 %, with 2,000 runs per line and about 1,000 mismatches per step, the interval contains the true frequency with
    probability

    ================================================================================  =======
    elements independent (1 mismatch per step, or 1 in 20 steps); 1,350 steps         96 %
    rates of steps gamma distributed: shape 1, 60 and 1,350 steps; 1/2, 200 steps     94-96 %
    spikes in 1.5 % and 3 % of 1,350 steps, their heights gamma of shape 1 and 1/2    95-96 %
    bursts of 5 steps on average, every 105 and every 45 of 1,350 steps               93 %
    bursts of 20 steps, every 470 and every 220 of 4,500 steps                        93-95 %
    bursts of 20 steps, every 60 of 1,350 steps                                       92 %
    a lognormal rate that correlates over 5 of 1,350 steps                            93 %
    a lognormal rate that correlates over 20 of 1,350 and 50 of 4,500 steps           91-92 %
    ================================================================================  =======

    If the interval misses the true frequency, the true frequency is more often above the interval than below it. The
    limits for independent elements (`frequency_interval`) contain the true frequency with the same probability in the
    first line, but in less than 6 % of the runs in all other lines.

    Args:
        mismatched: mismatched elements of each step, in the order of the steps.
        checked: checked elements of each step.
        confidence: intended probability with which the interval contains the frequency.
        seed: seed of the draws; equal seeds give equal intervals.

    Returns:
        Lower and upper limit, in mismatches per element. None if too few blocks have a mismatch: an interval needs at
        least 8 bursts.

    Raises:
        ValueError: the numbers of counts differ, a count is invalid, or the confidence is not a valid share.
    """
    x, n = np.asarray(mismatched, np.float64), np.asarray(checked, np.float64)
    if x.shape != n.shape or x.ndim != 1 or not np.all((x >= 0) & (x <= n)):
        raise ValueError(
            f"{x.size} counts of mismatches and {n.size} of checked elements: expected one of each for every step, "
            "with 0 <= mismatched <= checked"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: expected a share above 0 and below 1")
    x, n = x[n > 0], n[n > 0]
    length = max(math.ceil(len(x) / MOST), 2 * block_length(x)) if x.any() else len(x) + 1
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
    tail = (1 - confidence) / 2
    high, low = np.quantile((found[apart] - frequency) / errors[apart], [tail, 1 - tail])
    return max(0.0, float(frequency - low * error)), min(1.0, float(frequency - high * error))


def block_length(counts: Sequence[float] | Counts) -> int:
    """Returns the block length for a bootstrap of a series of counts, from its autocorrelations.

    Politis and White, Econometric Reviews 23 (2004), corrected by Patton, Politis and White, Econometric Reviews 28
    (2009), for non-overlapping blocks: b = (2 G^2 / D)^(1/3) N^(1/3), with D = 4/3 g(0)^2, where G = sum |k| R(k)
    and g(0) = sum R(k) over autocovariances R, with a flat-top window of twice the lag that precedes five consecutive
    insignificant lags.
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
    """Returns the frequencies of drawn blocks and the standard errors of these ratios, by the delta method."""
    blocks = hits.shape[-1]
    total = elements.sum(-1)
    found = hits.sum(-1) / total
    residuals = hits - found[..., None] * elements
    return found, np.sqrt(blocks / (blocks - 1) * np.square(residuals).sum(-1)) / total


# Steps between bursts, each observed once (arXiv:2502.12340, section 6.2 and figure 6; section 4.2 and figure 3), and
# whether the observation ended with the burst.
PUBLISHED = {"node 13": (450, True), "node 14": (4500, False)}


def burn_in_steps(mean_interval: float, *, observed: int | None = None, confidence: float = CONFIDENCE) -> int:
    """Computes the number of steps that show at least one burst with a given probability, for bursts at random times.

    If the mean m is known: n = -ln(1 - confidence) m. If m is the mean of k observed intervals: n = k m ((1 -
    confidence)^(-1/k) - 1), which is m times the quantile of F with 2 and 2k degrees of freedom.

    If, instead of intervals, k bursts were observed in a run of fixed length T, use T/k as the mean. Over all runs,
    including those without a burst, for which nothing is planned, such a plan fails with a probability of at most 1 -
    confidence (Nelson, IEEE Transactions on Reliability R-19, 1970, for a count of zero). It fails more often for runs
    that show a burst by chance, because the mean interval is then much longer than the run.

    Args:
        mean_interval: mean number of steps between bursts.
        observed: number of intervals in that mean; None if the mean is known, as in a simulation.
        confidence: probability of seeing a burst.

    Returns:
        Number of steps, rounded up.

    Raises:
        ValueError: the interval is not positive, no interval was observed, or the confidence is not a valid share.
    """
    _check_interval(mean_interval, observed, confidence)
    odds = -math.log1p(-confidence)
    intervals = odds if observed is None else observed * math.expm1(odds / observed)
    return math.ceil(
        intervals * mean_interval * (1 - 1e-12)
    )  # prevents rounding from turning 19 intervals into 19 intervals and one step


def probability_seen(steps: float, mean_interval: float, *, observed: int | None = None) -> float:
    """Computes the probability that `steps` steps show a burst; this is the inverse of `burn_in_steps`.

    Args:
        steps: length of a run.
        mean_interval: mean number of steps between bursts.
        observed: number of intervals in that mean; None if the mean is known.

    Returns:
        1 - exp(-n/m) if the mean is known, otherwise 1 - (1 + n / (k m))^-k.

    Raises:
        ValueError: as in `burn_in_steps`, or the number of steps is below zero.
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
        steps: steps over which bursts were counted, T.
        observed: bursts among them, k.
        ends_with_burst: whether counting stopped with the k-th burst, so that T is a sum of k intervals; otherwise it
            stopped after a fixed number of steps, and k is random.
        confidence: probability with which the interval contains the mean: exact if counting stopped with a burst
            (Epstein and Sobel, Journal of the American Statistical Association 48, 1953), otherwise a minimum (Garwood,
            Biometrika 28, 1936).

    Returns:
        Lower and upper limit, in steps: 2T / chi2(2k) with the quantiles at 1 - a/2 and at a/2, where a = 1 -
        confidence. If the number of steps was fixed, the lower limit is 2T / chi2(2k + 2). The upper limit is infinite
        if no burst was observed.

    Raises:
        ValueError: there are no steps, a count is negative, a burst is said to have ended the count but none was
            observed, or the confidence is not a valid share.
    """
    from scipy.special import gammainccinv, gammaincinv

    if not 0 < steps < math.inf or observed < (1 if ends_with_burst else 0):
        least = "at least 1 burst, since one ended the count" if ends_with_burst else "at least 0 bursts"
        raise ValueError(f"{observed} bursts in {steps} steps: expected {least}, in a positive number of steps")
    _check_interval(steps, None, confidence)
    tail = (1 - confidence) / 2
    # Half a quantile of chi-square with 2k degrees of freedom is a quantile of the gamma distribution of shape k.
    most = float(gammainccinv(observed if ends_with_burst else observed + 1, tail))
    fewest = float(gammaincinv(observed, tail)) if observed else 0.0
    return steps / most, steps / fewest if fewest else math.inf


def excluded_interval(steps: float, *, confidence: float = CONFIDENCE) -> float:
    """Computes the longest mean interval, in steps, that a run of `steps` steps without a burst excludes.

    Nothing is estimated here, so the rule of three holds: if bursts were this frequent, a run of this length would show
    none with a probability of at most 1 - confidence.
    """
    return steps / -math.log(1 - confidence)


def count_bursts(steps: Sequence[int], length: int) -> int:
    """Counts the bursts in the steps with a mismatch.

    Adjacent steps form one burst, as do steps separated by fewer clean steps than a fifth of the mean distance between
    bursts. Merging increases the mean distance, so it is repeated until no more bursts can be merged. If mismatches
    occur at random steps, at most a fifth of these steps is merged, so plans based on the count are slightly too long.

    Plans for 95 % by `burn_in_steps(length / bursts, observed=bursts)` were simulated for counts over 1,350 steps. Runs
    of the planned length showed a mismatch again with a probability of at least 97 % if mismatches occurred at random
    steps (1 in 450, 100, 20, 3, 2) or in bursts of 5 or 20 steps at random times (every 100 or 450 steps), and of 90 %
    if bursts of 50 steps, with a mismatch in one step out of 10, occurred every 150 steps.
    """
    gaps = np.diff(np.unique(np.asarray(steps, np.float64)))
    bursts = np.count_nonzero(gaps > 1) + 1
    while (joined := np.count_nonzero(gaps > max(1.0, length / bursts / 5)) + 1) < bursts:
        bursts = joined
    return int(bursts) if len(steps) else 0


def burst_outlooks(steps: int, published: Iterable[str] = tuple(PUBLISHED)) -> list[BurstOutlook]:
    """Computes the probability that `steps` training steps show a burst of each published node, and the limits of this
    probability for the exact limits (95 %) of the mean interval between bursts.

    The probability is that of at least one burst of a Poisson process, averaged over the uncertainty of one observed
    interval.
    """
    found = []
    for node in published:
        interval, ends = PUBLISHED[node]
        low, high = mean_interval_limits(interval, 1, ends_with_burst=ends)
        found.append(
            BurstOutlook(
                node=node,
                interval=interval,
                steps=steps,
                probability=probability_seen(steps, interval, observed=1),
                low=-math.expm1(-steps / high),
                high=-math.expm1(-steps / low),
            )
        )
    return found


def _check_interval(mean_interval: float, observed: int | None, confidence: float) -> None:
    if not 0 < mean_interval < math.inf:
        raise ValueError(f"a mean interval of {mean_interval} steps: expected a positive number")
    if observed is not None and observed < 1:
        raise ValueError(f"observed={observed}: expected at least 1 interval, which a plan requires")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: expected a share above 0 and below 1")
