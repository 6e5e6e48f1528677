"""Means and ratios of trials that share starts, with intervals over the starts."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

RESAMPLES = 4000


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, percent: bool = False) -> str:
        """For a table."""
        scale, unit = (100, " %") if percent else (1, "")
        return f"{scale * self.value:.3g}{unit} [{scale * self.low:.3g}, {scale * self.high:.3g}]"


def mean_interval(values: Float[np.ndarray, "starts trials"]) -> Interval:
    """Mean of trials that share starts: 95 % of Student's t over the starts' means. What is no number is left out."""
    means = np.asarray([row[np.isfinite(row)].mean() for row in values if np.isfinite(row).any()])
    if len(means) < 2:
        return Interval(float("nan"), float("nan"), float("nan"))
    reach = float(stats.t.ppf(0.975, len(means) - 1)) * means.std(ddof=1) / np.sqrt(len(means))
    return Interval(float(means.mean()), float(means.mean() - reach), float(means.mean() + reach))


def ratio_interval(top: Float[np.ndarray, "starts trials"], bottom: Float[np.ndarray, "starts trials"]) -> Interval:
    """Ratio of two means over the same starts: 95 % of the bootstrap over starts. What is no number is left out."""
    pairs = np.asarray([(np.nanmean(a), np.nanmean(b)) for a, b in zip(top, bottom, strict=True)])
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if len(pairs) < 2:
        return Interval(float("nan"), float("nan"), float("nan"))
    drawn = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    sums = pairs[drawn].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return Interval(float(pairs[:, 0].sum() / pairs[:, 1].sum()), float(low), float(high))
