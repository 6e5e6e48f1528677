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
    note: str = ""  # which runs are left out, or what makes the interval doubtful

    def text(self, percent: bool = False) -> str:
        """Formats the estimate and its interval for a table."""
        scale, unit = (100, " %") if percent else (1, "")
        return f"{scale * self.value:.3g}{unit} [{scale * self.low:.3g}, {scale * self.high:.3g}]{self.note}"

    def short(self, scale: float = 1.0) -> str:
        """Formats the estimate and half the width of its interval for a table, as far as known."""
        reach, value = (round(scale * x, 12) + 0.0 for x in (self.high - self.value, self.value))  # no -1e-15, no -0
        return f"{value:.4g}{f' ± {reach:.2g}' if math.isfinite(reach) else ''}{self.note}"


OUTLIER = 0.01  # significance level of the test for an outlier
LEAST_TESTED = 5  # least number of values in which an outlier is looked for; of fewer, two that agree suffice
UNKNOWN = Interval(math.nan, math.nan, math.nan)


def mean_interval(values: Float[np.ndarray, "starts *trials"], confidence: float = 0.95) -> Interval:
    """Returns the mean over the starts (or seeds) and its confidence interval from Student's t. The trials of each
    start are averaged first, without those that are not finite. If there is one value for each seed and one is not
    finite, its run has diverged: the mean is of the others, and the interval is unbounded."""
    means = _means(values)
    means = means[np.isfinite(means)]
    note = _lost(len(means), len(values))
    if len(means) < 2:
        return UNKNOWN._replace(note=note)
    if note and values.ndim == 1:
        return Interval(float(means.mean()), -math.inf, math.inf, note)
    reach = float(stats.t.ppf((1 + confidence) / 2, len(means) - 1)) * means.std(ddof=1) / np.sqrt(len(means))
    note += _outlier(means)
    return Interval(float(means.mean()), float(means.mean() - reach), float(means.mean() + reach), note)


def ratio_interval(top: Float[np.ndarray, "starts trials"], bottom: Float[np.ndarray, "starts trials"]) -> Interval:
    """Returns the ratio of two means over the same starts, and its 95 % confidence interval by Fieller's theorem
    (Fieller, J. R. Stat. Soc. B 16, 1954): the ratios r for which Student's t does not distinguish the mean of
    ``top - r * bottom`` from zero. It is unbounded if `bottom` may be zero. Trials that are not finite are omitted."""
    pairs = np.stack([_means(top), _means(bottom)], axis=1)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    lost = _lost(len(pairs), len(top))
    if len(pairs) < 2:
        return UNKNOWN._replace(note=lost)
    above, below = pairs.mean(axis=0)
    squared = float(stats.t.ppf(0.975, len(pairs) - 1)) ** 2 / len(pairs)
    (of_above, both), (_, of_below) = squared * np.cov(pairs.T)
    value, note = above / below, lost + _outlier(pairs[:, 0] - above / below * pairs[:, 1])
    if (scale := below**2 - of_below) <= 0:
        return Interval(float(value), -math.inf, math.inf, note)
    middle = above * below - both
    reach = math.sqrt(max(middle**2 - scale * (above**2 - of_above), 0.0))
    return Interval(float(value), float((middle - reach) / scale), float((middle + reach) / scale), note)


def _means(values: Float[np.ndarray, "starts *trials"]) -> Float[np.ndarray, "starts"]:
    """Returns the means of the finite trials of each start; NaN for a start without any."""
    finite = [np.atleast_1d(row)[np.isfinite(np.atleast_1d(row))] for row in values]
    return np.asarray([row.mean() if row.size else math.nan for row in finite])


def _lost(left: int, whole: int) -> str:
    return f" ({whole - left} of {whole} not finite)" if left < whole else ""


def _outlier(values: Float[np.ndarray, "starts"]) -> str:
    """Returns the note of an interval one of whose starts is an outlier by Grubbs's test (Technometrics 11, 1969) at
    the level 0.01. Student's t assumes normally distributed starts, and such an interval may be too narrow."""
    count, scatter = len(values), values.std(ddof=1)
    if count < LEAST_TESTED or not scatter > 0:
        return ""
    squared = float(stats.t.isf(OUTLIER / (2 * count), count - 2)) ** 2
    limit = (count - 1) * math.sqrt(squared / (count * (count - 2 + squared)))
    return " (an outlier)" if np.abs(values - values.mean()).max() / scatter > limit else ""


def exceeds(found: Interval, limit: float = 0.0) -> bool | None:
    """Returns whether an interval lies above the limit: None if it contains the limit, or is unknown."""
    return True if found.low > limit else False if found.high < limit else None


def stays_below(found: Interval, limit: float) -> bool | None:
    """Returns whether an interval lies below the limit: None if it contains the limit, or is unknown."""
    return True if found.high < limit else False if found.low > limit else None


def every(answers: Iterable[bool | None]) -> bool | None:
    """Returns False if any answer is no, None if any is undecided or there are no answers, and otherwise True."""
    known = set(answers)
    return False if False in known else None if None in known or not known else True


def line_of(label: str, x: Sequence[float], rows: Iterable[Float[np.ndarray, "seeds"]]) -> Line:
    """Returns a line of the means over the seeds, with their 95 % intervals."""
    means = [mean_interval(row) for row in rows]
    reach = [mean.high - mean.value if math.isfinite(mean.high) else math.nan for mean in means]
    return Line(label, list(x), [mean.value for mean in means], error=reach)
