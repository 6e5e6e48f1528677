"""The largest severity of a run: how it scatters, and what it says of a tail (`sdc.faults.Tailed`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float64


def smallest_draws(
    hits: Float64[np.ndarray, "layers"], *, steps: int, few: float
) -> Float64[np.ndarray, "layers quantiles"]:
    """The smallest draw u of a run, of the steps that hit anything: 100 equally likely values for each layer.

    A step hits an element with the probability 1 - exp(-hits (1 + few) u^few). With q(x) the probability that a step
    has u < x and hits one, no step of the run is below x with the probability (1 - q(x))^steps, about exp(-steps q(x)).

    Args:
        hits: expected hits in a step, by layer; positive.
        steps: steps of the run.
        few: see `Tailed`.

    Returns:
        Values in (0, 1], given that a step of the run hits anything.

    Example:
        >>> import numpy as np
        >>> from sdc.nodes.severities import smallest_draws
        >>> [often] = smallest_draws(np.asarray([1e6]), steps=1000, few=0.0)
        >>> round(float(np.median(often)), 6)  # ln 2 / 1000
        0.000693
    """
    edges = np.concatenate([[0.0], np.geomspace(1e-7, 1, 2048)])
    middle = (edges[1:] + edges[:-1]) / 2
    seen = -np.expm1(-hits[:, None] * (1 + few) * middle**few)
    below = np.cumsum(seen * np.diff(edges), axis=1) * steps
    quantiles = (np.arange(100) + 0.5) / 100
    # Exponential waiting, given that it ends before the last step.
    waiting = -np.log1p(quantiles * np.expm1(-below[:, -1:]))
    return np.asarray([np.interp(wait, row, edges[1:]) for wait, row in zip(waiting, below, strict=True)])


def least_severity(
    largest: Float64[np.ndarray, "layers"],
    hits: Float64[np.ndarray, "layers"],
    *,
    steps: int,
    cells: int,
    tail: float,
    few: float,
) -> float:
    """The `severity` of a `Tailed` whose largest severities of a run are, by layer, as those that were seen.

    Layers are taken as alike but for their hits; logarithms are averaged. The worst step is taken to be the one with
    the smallest draw, as it is where the tail is heavy or hits are many.

    Args:
        largest: the largest severity of each layer; zero where nothing was hit.
        hits, steps, few: as of `smallest_draws`.
        cells: devices times microsteps of a step; a step's severity is the largest of their means.
        tail: see `Tailed`.

    Example:
        >>> import numpy as np
        >>> from sdc.nodes.severities import least_severity
        >>> round(least_severity(np.full(16, 7.0), np.full(16, 1e9), steps=4500, cells=1, tail=0.0, few=0.0), 2)
        7.0
    """
    known = (largest > 0) & (hits > 0)
    hits = hits[known]
    u = smallest_draws(hits, steps=steps, few=few)
    read = largest_mean(np.maximum(hits[:, None] * (1 + few) * u**few, 1.0), cells)
    return float(np.exp(np.mean(np.log(largest[known]) - np.mean(np.log(read) - tail * np.log(u), axis=1))))


def largest_mean(hits: Float64[np.ndarray, "*n"], cells: int) -> Float64[np.ndarray, "*n"]:
    """The largest mean of elements uniform in (0, 2], where so many hits are dealt out to cells. An approximation.

    Where cells have one hit each, the largest of n is 2 n / (n + 1) on average; where they have many, their means are
    normal with the variance 1/3 over the number of hits.

    Example:
        >>> import numpy as np
        >>> from sdc.nodes.severities import largest_mean
        >>> largest_mean(np.asarray([1.0, 512.0, 1e9]), 512).round(2).tolist()
        [1.0, 2.0, 1.0]
    """
    each, used = np.maximum(hits / cells, 1.0), np.clip(hits, 1, cells)
    many = 1 + np.sqrt(2 * np.log(cells) / (3 * each))
    return np.where(each > 1, np.minimum(many, 2.0), 2 * used / (used + 1))
