"""Fits what the study's tables leave open of its nodes: tails, bursts, and what becomes of errors in gradients.

Three things are fitted, and `sdc study nodes` prints them beside what `sdc/nodes/data/sdc_fitted.csv` has:

- `fit_tail`: the index of the severities' tail, from how the largest severities scatter between layers (tables 8, 9);
- `fit_bursts`: in how many steps a rare node is hit, from how its counts scatter between layers (tables 6, 7);
- `NoiseModel`: how few elements are in severe steps, from the worst noise-to-signal ratios (figure 5, equation 5). It
  predicts the ratio of each node from the others', which tests it.

The model of noise: in a step, ||g' - g||^2 / ||g||^2 = response sum over sites of (share of elements hit) 4/3 V^2
+ rounding^2 (share of microsteps hit). The first term is linear: V is the mean relative change, 4/3 V^2 the mean square
of changes uniform in (0, 2 V]; in the forward pass normalization bounds what one element does to its token of 4,096.
The second is how bfloat16 arithmetic answers: a microstep with any changed bit is rounded differently from there on,
however small the change. Both factors are the same for all nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..faults import SMALLEST
from .published_tables import (
    ELEMENTS,
    LAST_BIT,
    MICROSTEPS,
    NODES,
    ONE_ELEMENT,
    PARAMETER_STEPS,
    STEPS,
    Layers,
    published_layers,
    published_noise,
)
from .severities import smallest_draws
from .simulated_nodes import FREAK, FittedValue, behaviour, least_node_severity, silent

if TYPE_CHECKING:
    from jaxtyping import Float64

WIDTH = 4096
STEP_ELEMENTS = ELEMENTS * 256 * 2
"""Elements in a step under parameter synchronization, of the two layers for which each published one stands."""
ODD = 0.05
"""Probability that a node does not follow the model, so that one odd node decides nothing: its ratio is then anything
within `DECADES` powers of ten."""
DECADES = 20.0
NOTHING = 1e-16
"""Stands for no noise at all."""


def usual(name: str) -> dict[str, Layers]:
    """Frequencies and severities of a node by layer, but for severities of a single microstep (node 9, backward)."""
    tables = published_layers(name)
    return {
        site: dataclasses.replace(figures, severity=tables[f"fwd/{site.partition('/')[2]}"].severity)
        if figures.severity.max() > FREAK
        else figures
        for site, figures in tables.items()
    }


def fit_tail(few: float, *, draws: int = 2000, seed: int = 0) -> FittedValue:
    """The inverse index of the severities' tail, from the scatter of the largest severities between layers.

    The largest severity of a layer is the least one times u^-tail with the smallest draw u of the steps that hit it
    (`smallest_draws`), so that the variance of its logarithm between alike layers is tail^2 that of log u. Where layers
    are not alike, the tail is lighter than this. The interval is a bootstrap over the groups of layers (submodules of
    nodes).

    Args:
        few: how few elements are in severe steps; see `Tailed`.
        draws, seed: of the bootstrap.

    Example:
        >>> from sdc.nodes.fitting import fit_tail
        >>> 0.5 < fit_tail(0.0).value < fit_tail(2.0).value
        True
    """
    groups = []
    for name in NODES:
        when = behaviour(name)
        for figures in usual(name).values():
            known = (figures.severity > 0) & (figures.frequency > 0)
            if known.sum() >= 8:
                seen = np.log(figures.severity[known]).var(ddof=1)
                hits = figures.frequency[known] * ELEMENTS * MICROSTEPS / when.spike
                u = np.log(smallest_draws(hits, steps=max(1, round(STEPS * when.spike)), few=few))
                # Each layer scatters by itself, and layers with fewer hits are milder on average.
                expected = u.var(axis=1).mean() + u.mean(axis=1).var(ddof=1)
                groups.append((seen * (known.sum() - 1), expected * (known.sum() - 1)))
    seen, expected = np.asarray(groups).T
    chosen = np.random.default_rng(seed).integers(0, len(groups), (draws, len(groups)))
    low, high = np.quantile(np.sqrt(seen[chosen].sum(1) / expected[chosen].sum(1)), [0.025, 0.975])
    return FittedValue(float(np.sqrt(seen.sum() / expected.sum())), float(low), float(high))


def fit_bursts(name: str, *, few: float) -> FittedValue | None:
    """In how many of the 4,500 steps a node is hit, from the scatter of its counts between neighbouring layers.

    A layer's count is a sum over bursts whose sizes scatter as (1 + few) u^few does, with the squared coefficient of
    variation few^2 / (2 few + 1); so that of a sum over n bursts is this over n, above the 1/count of independent
    elements. Differences of neighbouring layers leave trends out. The interval is that of a variance (chi-square).
    """
    from scipy.special import gammainccinv

    tables = published_layers(name)
    if not tables or max(figures.frequency.mean() for figures in tables.values()) > 1e-6:
        return None
    excess, freedom = 0.0, 0
    for figures in tables.values():
        counts = figures.counts
        mean = counts.mean()
        if mean < 1:
            continue
        excess += float(np.sum(np.diff(counts) ** 2) / 2 / mean**2 - (len(counts) - 1) / mean)
        freedom += len(counts) - 1
    size = few**2 / (2 * few + 1)
    if freedom == 0 or excess <= 0:
        return None
    # A sum of squared differences of neighbours has two thirds of the degrees of freedom of independent squares.
    free = freedom * 2 / 3
    limits = [2 * float(gammainccinv(free / 2, tail)) / free for tail in (0.975, 0.025)]
    value, low, high = (float(np.clip(size / (excess / freedom) * limit, 1, STEPS)) for limit in (1.0, *limits))
    return FittedValue(value, low, high)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What the other nodes predict of one.

    Attributes:
        published: the published worst noise-to-signal ratio.
        median, low, high: the predicted one, with the 95 % interval of prediction.
    """

    published: float
    median: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.published <= self.high


@dataclasses.dataclass(frozen=True)
class NoiseModel:
    """Worst noise-to-signal ratios of nodes, for a grid of parameters.

    Attributes:
        tails: the severities' tail as a multiple of what `fit_tail` says; beforehand as likely as that has it.
        fews: how few elements are in severe steps; beforehand all are alike, as those of the others are.
        responses, roundings: see the top of this file.
        scatters: scatter of nodes about the model, in powers of ten.
        runs: simulated trainings for each node, tail and few.
        seed: decides the draws.
    """

    tails: Sequence[float] = (0.8, 0.9, 1.0, 1.1, 1.2)
    fews: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
    responses: Sequence[float] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    roundings: Sequence[float] = tuple(10 ** np.linspace(-2.3, -1.3, 11))
    scatters: Sequence[float] = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
    runs: int = 20
    seed: int = 0

    def simulate(self, name: str) -> Float64[np.ndarray, "tails fews responses roundings runs"]:
        """log10 of the worst noise-to-signal ratio of trainings of 2,500 steps on a node."""
        rng = np.random.default_rng([self.seed, NODES.index(name)])
        sites = usual(name) or silent()
        frequency = np.asarray([figures.frequency for figures in sites.values()])
        u = rng.random((self.runs, PARAMETER_STEPS, *frequency.shape), np.float32)
        np.maximum(u, np.float32(SMALLEST), out=u)
        drawn = _rates(frequency, self.runs, rng)
        forward = np.asarray([site.startswith("fwd") for site in sites])[:, None]
        found = np.empty((len(self.tails), len(self.fews), len(self.responses), len(self.roundings), self.runs))
        for other, few in enumerate(self.fews):
            hits = drawn * ((1 + few) * u**few) * STEP_ELEMENTS
            rare = hits < 30
            if rare.any():
                hits[rare] = rng.poisson(hits[rare])
            rounded = -np.expm1(-hits.sum((2, 3)) / 256)
            fitted = fit_tail(few, draws=1).value
            for place, multiple in enumerate(self.tails):
                tail = multiple * fitted
                least = [least_node_severity(name, figures, tail=tail, few=few) for figures in sites.values()]
                level = np.asarray(least, np.float32)[:, None] * u ** np.float32(-tail)
                square = 4 / 3 * np.maximum(level, LAST_BIT) ** 2
                square = np.where(forward, np.minimum(square, WIDTH), square)
                linear = (hits * square).mean(3).sum(2) / STEP_ELEMENTS
                worst = [
                    [np.max(response * linear + rounding**2 * rounded, axis=1) for rounding in self.roundings]
                    for response in self.responses
                ]
                found[place, other] = np.log10(np.maximum(np.sqrt(np.asarray(worst)), NOTHING))
        return found

    def weights(
        self, simulated: Mapping[str, Float64[np.ndarray, "tails fews responses roundings runs"]]
    ) -> Float64[np.ndarray, "tails fews responses roundings scatters"]:
        """How likely each point of the grid is, given the published ratios of the nodes; sums to 1."""
        tail = fit_tail(1.0)
        width = math.log(tail.high / tail.low) / 2 / 1.96
        beforehand = -((np.log(np.asarray(self.tails)) / width) ** 2) / 2
        total = np.zeros((*map(len, (self.tails, self.fews, self.responses, self.roundings, self.scatters)),))
        total += beforehand.reshape(-1, 1, 1, 1, 1)
        scatter = np.asarray(self.scatters)
        for name, ratios in simulated.items():
            apart = (np.median(ratios, axis=-1) - math.log10(published_noise(name)))[..., None] / scatter
            density = np.exp(-(apart**2) / 2) / (scatter * math.sqrt(2 * math.pi))
            total += np.log((1 - ODD) * density + ODD / DECADES)
        weights = np.exp(total - total.max())
        return weights / weights.sum()

    def predict(
        self, name: str, simulated: Mapping[str, Float64[np.ndarray, "..."]], *, draws: int = 4000
    ) -> Predicted:
        """What the other nodes predict of one, if it follows the model as 19 of 20 nodes are taken to."""
        rng = np.random.default_rng([self.seed, 1, NODES.index(name)])
        weights = self.weights({other: found for other, found in simulated.items() if other != name})
        points = np.unravel_index(rng.choice(weights.size, draws, p=weights.reshape(-1)), weights.shape)
        own = simulated[name][points[:4]][np.arange(draws), rng.integers(0, self.runs, draws)]
        drawn = 10 ** (own + np.asarray(self.scatters)[points[4]] * rng.standard_normal(draws))
        low, median, high = np.quantile(drawn, [0.025, 0.5, 0.975])
        return Predicted(published_noise(name), float(median), float(low), float(high))

    def estimates(self, simulated: Mapping[str, Float64[np.ndarray, "..."]]) -> dict[str, FittedValue]:
        """The parameters, fitted to all of the nodes: weighted mean, and 95 % interval on the grid."""
        weights = self.weights(simulated)
        found = {}
        axes = {
            "tail": self.tails, "few": self.fews, "response": self.responses, "rounding": self.roundings,
            "scatter": self.scatters,
        }  # fmt: skip
        for axis, (parameter, values) in enumerate(axes.items()):
            of = weights.sum(tuple(other for other in range(weights.ndim) if other != axis))
            levels = np.cumsum(of)
            low, high = (values[min(int(np.searchsorted(levels, share)), len(values) - 1)] for share in (0.025, 0.975))
            found[parameter] = FittedValue(float(of @ np.asarray(values)), float(low), float(high))
        return found


def _rates(
    frequency: Float64[np.ndarray, "sites layers"], runs: int, rng: np.random.Generator
) -> Float64[np.ndarray, "runs 1 sites layers"]:
    """Frequencies as uncertain as the counts behind them are: by Bayes, with Jeffreys' prior."""
    counts = frequency / ONE_ELEMENT
    if counts.sum() < 0.999:  # nothing was seen, and ln 2 is the median of what that leaves open
        return frequency * rng.standard_exponential((runs, 1, 1, 1)) / math.log(2)
    few = (counts > 0) & (counts < 1000)
    drawn = rng.gamma(np.where(few, counts + 0.5, 1), size=(runs, 1, *counts.shape))
    return np.where(few, drawn, counts) * ONE_ELEMENT
