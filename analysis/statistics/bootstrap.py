"""An interval of a mismatch frequency that holds although mismatches come in bursts: a block bootstrap over steps.

The counts of neighbouring steps depend on each other, those of long stretches hardly. So the steps are cut into
blocks, as long as the data's own correlation asks for, and blocks are drawn with replacement (Carlstein, Annals of
Statistics 14, 1986). Sums of bursts are skewed, and a percentile interval would be too low as a whole; so the
difference of a drawn frequency from the measured one is divided by its own standard error, and the quantiles of *that*
make the interval (studentized, "bootstrap-t": Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section
12.5).
"""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from .frequencies import CONFIDENCE

MOST = 30
"""Blocks at most: longer blocks than needed cost little, shorter ones than needed make intervals too narrow."""
LEAST = 8
"""Blocks with a mismatch at least: with fewer no interval holds."""
DRAWN = 1999

Counts: TypeAlias = Float[np.ndarray, " steps"]
Sums: TypeAlias = Float[np.ndarray, "*draws blocks"]
Each: TypeAlias = Float[np.ndarray, "*draws"]


def bootstrap_interval(
    mismatched: Sequence[int], checked: Sequence[int], *, confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float] | None:
    """Two-sided interval of a mismatch frequency, by a studentized block bootstrap over steps.

    Blocks are at least twice as long as `block_length` says, and at most 30. Simulated at 95 %, with 2,000 runs for
    each line and about 1,000 mismatches a step, it holds the true frequency with

    ================================================================================  =======
    elements independent (a mismatch a step, or one in 20 steps); 1,350 steps         96 %
    rates of steps gamma distributed: shape 1, 60 and 1,350 steps; 1/2, 200 steps     94-96 %
    spikes in 1.5 % and 3 % of 1,350 steps, their heights gamma of shape 1 and 1/2    95-96 %
    bursts of 5 steps on average, every 105 and every 45 of 1,350 steps               93 %
    bursts of 20 steps, every 470 and every 220 of 4,500 steps                        93-95 %
    bursts of 20 steps, every 60 of 1,350 steps                                       92 %
    a lognormal rate that correlates over 5 of 1,350 steps                            93 %
    a lognormal rate that correlates over 20 of 1,350 and 50 of 4,500 steps           91-92 %
    ================================================================================  =======

    Where it fails, the truth is above it more often than below. Limits of independent elements (`frequency_interval`)
    hold it in the first line, and in all others with less than 6 %.

    Args:
        mismatched: mismatched elements of each step, in the order of the steps.
        checked: checked elements of each step.
        confidence: probability with which the interval is to hold the frequency.
        seed: seed of the draws; equal seeds give equal intervals.

    Returns:
        Lower and upper limit, in mismatches per element. None where too few blocks have a mismatch, so that nothing
        can be said: with 8 bursts at the least there can be an interval, with fewer there is none.

    Raises:
        ValueError: the numbers of counts differ, a count is no count, or the confidence is no share.

    Example:
        >>> spikes = [1000 * (step % 100 == 40) for step in range(1350)]
        >>> low, high = bootstrap_interval(spikes, [10**6] * 1350)
        >>> low < 1.04e-5 < high
        True
        >>> bootstrap_interval([0] * 1349 + [1000], [10**6] * 1350) is None  # one spike
        True
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
    # Draws of blocks that are all alike have no error. If no draw has one, the frequency is that of every step.
    apart = errors > 1e-9 * found
    if not apart.any():
        return float(frequency), float(frequency)
    tail = (1 - confidence) / 2
    high, low = np.quantile((found[apart] - frequency) / errors[apart], [tail, 1 - tail])
    return max(0.0, float(frequency - low * error)), min(1.0, float(frequency - high * error))


def block_length(counts: Sequence[float] | Counts) -> int:
    """Length of blocks for a bootstrap of a series of counts, chosen by its autocorrelations.

    Politis and White, Econometric Reviews 23 (2004), corrected by Patton, Politis and White, Econometric Reviews 28
    (2009), for blocks that do not hang over: b = (2 G^2 / D)^(1/3) N^(1/3), with D = 4/3 g(0)^2, where G = sum |k| R(k)
    and g(0) = sum R(k) over autocovariances R, with a flat-top window of twice the lag after which no five in a row are
    significant.

    Args:
        counts: one for each step.

    Returns:
        Steps: 1 where neighbours are not correlated, a third of the series and 3 sqrt(N) at most.

    Example:
        >>> import random
        >>> draw = random.Random(0)
        >>> block_length([draw.random() for _ in range(1000)]) < 5
        True
        >>> 10 < block_length([step // 40 % 2 for step in range(1000)]) < 100
        True
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
    # The last significant lag before `run` lags that are not; without such a stretch, the last one of all.
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
    """Frequencies of drawn blocks, and their standard errors: those of a ratio, by the delta method."""
    blocks = hits.shape[-1]
    total = elements.sum(-1)
    found = hits.sum(-1) / total
    residuals = hits - found[..., None] * elements
    return found, np.sqrt(blocks / (blocks - 1) * np.square(residuals).sum(-1)) / total
