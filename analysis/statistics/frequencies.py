"""How sure a mismatch frequency is if elements fail independently.

Mismatches are counted: x of n checked elements. If elements fail independently and rarely, x is Poisson distributed
with mean f·n·recall, and exact (Garwood) limits of that mean give limits of the frequency f. Without a mismatch the
one-sided upper limit is -ln(1 - confidence) / n: 3.0/n at 95 %, 4.6/n at 99 %.

Corruption comes in bursts, so elements are not independent and these limits are too narrow. `needed_mismatches` says by
how much if the rate varies between runs. An interval that holds under bursts is in `bootstrap`, and what a number of
steps says of bursts at random times in `burst_intervals`.

Quantiles are those of SciPy's distributions, taken from `scipy.special`, which loads in a quarter of the time of
`scipy.stats`; functions import it, so that `sdc --help` does not wait for it.
"""

import math

CONFIDENCE = 0.95


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
    from scipy.special import gammainccinv

    _validate(mismatched, checked, confidence, recall)
    # Half a quantile of chi-square with 2x + 2 degrees of freedom is one of the gamma distribution of shape x + 1.
    return min(1.0, float(gammainccinv(mismatched + 1, 1 - confidence)) / (checked * recall))


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
    from scipy.special import gammainccinv, gammaincinv

    _validate(mismatched, checked, confidence, recall)
    tail = (1 - confidence) / 2
    lower = float(gammaincinv(mismatched, tail)) if mismatched else 0.0
    upper = float(gammainccinv(mismatched + 1, tail))
    return min(1.0, lower / (checked * recall)), min(1.0, upper / (checked * recall))


def proportion_interval(successes: int, trials: int, *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two-sided exact interval of a proportion (Clopper and Pearson, Biometrika 26, 1934).

    Args:
        successes: successes among the trials.
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
    from scipy.special import betainccinv, betaincinv

    _validate(successes, trials, confidence, 1.0)
    tail = (1 - confidence) / 2
    lower = float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0
    upper = float(betainccinv(successes + 1, trials - successes, tail)) if successes < trials else 1.0
    return lower, upper


def needed_mismatches(*, shape: float = math.inf, confidence: float = CONFIDENCE) -> float:
    """Expected mismatches at which seeing none is improbable: the numerator that replaces 3.0 in a clean run's bound.

    If the rate itself varies between runs as a gamma distribution of the given shape, the count is negative binomial
    and P(0) = (1 + mean/shape)^-shape.

    Args:
        shape: shape of the gamma distribution; infinite means independent elements, smaller means burstier.
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


def _validate(mismatched: int, checked: int, confidence: float, recall: float) -> None:
    if not 0 <= mismatched <= checked or checked == 0:
        raise ValueError(
            f"{mismatched} of {checked} elements mismatched: expected 0 <= mismatched <= checked, checked > 0"
        )
    if not 0 < confidence < 1 or not 0 < recall <= 1:
        raise ValueError(f"confidence {confidence} and recall {recall}: expected shares above 0, confidence below 1")
