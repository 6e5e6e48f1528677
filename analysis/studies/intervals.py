"""Means over the starts or seeds of a study, and their confidence intervals."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

from ..report import Line


class Interval(NamedTuple):
    """An estimate and its confidence interval, of 95 % unless stated otherwise."""

    value: float
    low: float
    high: float
    note: str = ""  # which runs are left out

    def text(self, percent: bool = False) -> str:
        """Formats the estimate and its interval for a table."""
        scale, unit = (100, " %") if percent else (1, "")
        return f"{scale * self.value:.3g}{unit} [{scale * self.low:.3g}, {scale * self.high:.3g}]{self.note}"

    def short(self, scale: float = 1.0) -> str:
        """Formats the estimate and half the width of its interval for a table, as far as known."""
        reach = scale * (self.high - self.value)
        return f"{scale * self.value:.4g}{f' ± {reach:.2g}' if math.isfinite(reach) else ''}{self.note}"


UNKNOWN = Interval(math.nan, math.nan, math.nan)


def mean_interval(values: Float[np.ndarray, "starts *trials"], confidence: float = 0.95) -> Interval:
    """Returns the mean over the starts (or seeds) and its confidence interval from Student's t. The trials of each
    start are averaged first, without those that are not finite. If there is one value for each seed and one is not
    finite, its run has diverged: the mean is of the others, and the interval is unbounded."""
    lost = int((~np.isfinite(values)).sum()) if values.ndim == 1 else 0
    note = f" ({lost} of {len(values)} not finite)" if lost else ""
    means = np.asarray([row[np.isfinite(row)].mean() for row in values if np.isfinite(row).any()])
    if len(means) < 2:
        return UNKNOWN._replace(note=note)
    if lost:
        return Interval(float(means.mean()), -math.inf, math.inf, note)
    reach = float(stats.t.ppf((1 + confidence) / 2, len(means) - 1)) * means.std(ddof=1) / np.sqrt(len(means))
    return Interval(float(means.mean()), float(means.mean() - reach), float(means.mean() + reach))


def ratio_interval(top: Float[np.ndarray, "starts trials"], bottom: Float[np.ndarray, "starts trials"]) -> Interval:
    """Returns the ratio of two means over the same starts, and its 95 % confidence interval from a bootstrap over the
    starts. NaN is omitted."""
    pairs = np.asarray([(np.nanmean(a), np.nanmean(b)) for a, b in zip(top, bottom, strict=True)])
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if len(pairs) < 2:
        return UNKNOWN
    drawn = np.random.default_rng(0).integers(len(pairs), size=(4000, len(pairs)))
    sums = pairs[drawn].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return Interval(float(pairs[:, 0].sum() / pairs[:, 1].sum()), float(low), float(high))


def line_of(label: str, x: Sequence[float], rows: Iterable[Float[np.ndarray, "seeds"]]) -> Line:
    """Returns a line of the means over the seeds, with their 95 % intervals."""
    means = [mean_interval(row) for row in rows]
    reach = [mean.high - mean.value if math.isfinite(mean.high) else math.nan for mean in means]
    return Line(label, list(x), [mean.value for mean in means], error=reach)
