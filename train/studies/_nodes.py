"""Compares the simulated nodes with the published values of the real nodes, after fitting parameters.

Three quantities are fitted, the first two of them together, and `sdc study nodes` prints them next to the values in
`sdc/nodes/data/sdc_fitted.csv`:

- `Severities`: the tail of the severities of each node in each direction, from the spread of its largest severities
  between layers (tables 8, 9);
- `NoiseModel`: the share of elements in severe steps (`few`), from the worst noise-to-signal ratios (figure 5, equation
  5) and the evidence of `Severities`. Of the probable values, the nodes use one with which the losses of small models
  coincide (figure 6). As a test, the model predicts the ratio of each node from the ratios of the other nodes;
- `fit_bursts`: the number of steps in which a node with few mismatches is struck, from the spread of its counts between
  layers (tables 6, 7).

In the noise model, a step has ||g' - g||^2 / ||g||^2 = response sum over sites of (share of elements struck) 4/3 V^2 +
rounding^2 (share of microsteps struck). The first term is linear: V is the mean relative change, and 4/3 V^2 is the
mean square of changes that are uniform in (0, 2 V]; in the forward pass, normalization limits the effect of one element
on its token of 4,096 elements. The second term is the response of bfloat16 arithmetic: after any changed bit, however
small the change, the rest of a microstep is rounded differently. Both factors (response and rounding) are the same for
all nodes.

`experiment` also trains small models on the nodes, and `find_node` returns the step in which a pair or a pool detects a
node.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64, Int
from scipy.ndimage import gaussian_filter1d
from scipy.special import logsumexp

import sdc
from sdc.faults import SMALLEST, Fault, Relative, Tailed, When
from sdc.nodes import (
    ELEMENTS,
    FREAK,
    LAST_BIT,
    MICROSTEPS,
    NODES,
    ONE_ELEMENT,
    PARAMETER_STEPS,
    STEPS,
    SUBMODULES,
    FittedValue,
    Layers,
    Load,
    behaviour,
    expected_frequency,
    fitted,
    largest_mean,
    node_faults,
    node_number,
    none_below,
    published,
    published_layers,
    published_noise,
    silent,
)

from .. import FullLoad, TrainConfig, Workload, batches, get_config, programs
from ..programs import TrainState
from .flags import flagged_share
from .measurements import Compared, Drifting, NodesFit, NodesMeasured, Predicted, Quantity, Response
from .parts import RecordedParts
from .settings import SIZES, WINDOW, NodesStudy

# Number of elements per step under parameter synchronization, in the two layers that each published layer represents.
STEP_ELEMENTS = ELEMENTS * 256 * 2
CELLS = 32 * MICROSTEPS  # number of means: devices times microsteps
# Probability that a node does not follow the model, which prevents one outlier from dominating the fit. The ratio of
# such a node is uniform within `DECADES` powers of ten.
ODD = 0.05
DECADES = 20.0
TAILS = np.geomspace(0.2, 6.0, 35)  # the grid of inverse tail indices
CELL = math.sqrt(TAILS[1] / TAILS[0])
MIDDLES, SPREADS = np.geomspace(0.3, 3.0, 24), np.geomspace(0.05, 1.5, 12)  # of the tails of all nodes in a direction
WIDTH = 0.05
LEVELS = np.arange(-25.0, 12.0, WIDTH)  # the grid of logarithms of the smallest severity
BINS = 1600  # of logarithms of severities over the smallest one, from -20 to 60
SILENT_RUNS = 2000  # one in twenty has no noise at all, which decides the lower end of the interval
LARGEST = 35.0  # logarithm of the relative change above which float32 would not hold the square of a sum
STRAY = 0.01  # probability that a layer departs from the model of severities
CORRELATED = 20_000  # number of steps over which the frequencies of submodules are correlated


def usual(name: str) -> dict[str, Layers]:
    """Returns the frequencies and severities of a node by layer; forward severities replace those that stem from a
    single microstep (node 9, backward)."""
    tables = published_layers(name)
    return {
        site: dataclasses.replace(figures, severity=tables[f"fwd/{site.partition('/')[2]}"].severity)
        if figures.severity.max() > FREAK
        else figures
        for site, figures in tables.items()
    }


class Severities:
    """The posterior of the tails of all nodes given tables 8 and 9 and `few`: a hierarchical model.

    The largest severity of a layer is the smallest possible severity of its submodule times u^-tail, where u is the
    smallest of the draws for the steps in which the layer is struck (`none_below`), times the largest mean over
    the cells (`largest_mean`). The tail is that of the node in this direction (forward or backward); the logarithms of
    the tails of all nodes in a direction are normal. The logarithms of the smallest severities, the mean of that normal
    distribution and the logarithm of its standard deviation have flat priors on a grid. A layer departs from the model
    with a probability of 1 %.

    Attributes:
        evidence: logarithm of the probability density of the tables, up to a constant.
    """

    def __init__(self, few: float) -> None:
        self._levels: dict[tuple[str, str], Float64[np.ndarray, "tails levels"]] = {}
        for name in NODES:
            bursts = fit_bursts(name, few=few)
            spike = behaviour(name).spike if bursts is None else bursts.value / STEPS
            for site, figures in usual(name).items():
                self._levels[name, site] = _level_likelihood(figures, spike=spike, few=few)
        self.evidence = 0.0
        self._tails: dict[tuple[str, str], Float64[np.ndarray, "tails"]] = {}
        for direction in ("fwd", "bwd"):
            self._share(direction)

    def _share(self, direction: str) -> None:
        """Computes the posterior of the tails of all nodes in one direction, by sums over the grid of their common
        mean and standard deviation."""
        own: dict[str, Float64[np.ndarray, "tails"]] = {}
        for (name, site), levels in self._levels.items():
            if site.startswith(direction):
                own[name] = own.get(name, 0.0) + logsumexp(levels, axis=1)
        apart = np.log(TAILS) - np.log(MIDDLES)[:, None, None]
        prior = -((apart / np.asarray(SPREADS)[:, None]) ** 2) / 2
        prior -= logsumexp(prior, axis=2, keepdims=True)
        given = {name: logsumexp(prior + likelihood, axis=2) for name, likelihood in own.items()}
        total = sum(given.values())
        self.evidence += float(logsumexp(total))
        for name, likelihood in own.items():
            weights = logsumexp((total - given[name])[..., None] + prior + likelihood, axis=(0, 1))
            self._tails[name, direction] = np.exp(weights - logsumexp(weights))

    def tails(self) -> dict[str, FittedValue]:
        """Returns the tail of each node and direction, `tail/NODE/fwd`, and its 95 % credible interval.

        An interval that reaches an end of the grid is open there.
        """
        found = {}
        for (name, direction), weights in self._tails.items():
            first, last = np.searchsorted(np.cumsum(weights), [0.025, 0.975])
            # A point stands for the values near it.
            low = TAILS[first] / CELL if first else 0.0
            high = TAILS[last] * CELL if last < len(TAILS) - 1 else math.inf
            found[f"tail/{name}/{direction}"] = FittedValue(float(weights @ TAILS), float(low), float(high))
        return found

    def draw(
        self, name: str, runs: int, rng: np.random.Generator
    ) -> dict[str, tuple[Float64[np.ndarray, "runs"], Float64[np.ndarray, "runs"]]]:
        """Draws the tail and the smallest severity of each submodule of a node from the posterior, for each run."""
        chosen = {
            direction: rng.choice(len(TAILS), runs, p=weights)
            for (other, direction), weights in self._tails.items()
            if other == name
        }
        found = {}
        for (other, site), levels in self._levels.items():
            if other == name:
                tails = chosen[site.partition("/")[0]]
                sums = np.cumsum(np.exp(levels - levels.max(1, keepdims=True)), axis=1)
                wanted = rng.random(runs) * sums[tails, -1]
                level = np.asarray([np.searchsorted(sums[t], w) for t, w in zip(tails, wanted, strict=True)])
                found[site] = TAILS[tails], np.exp(LEVELS[level])
        return found


severities = functools.cache(Severities)


def _level_likelihood(figures: Layers, *, spike: float, few: float) -> Float64[np.ndarray, "tails levels"]:
    """Returns the log-likelihood of the largest severities of a submodule's layers, for each tail and each logarithm of
    the smallest severity on the grid."""
    hits = figures.frequency * ELEMENTS * MICROSTEPS / spike
    known = (figures.severity > 0) & (hits > 0)
    hits, seen = hits[known], np.log(figures.severity[known])
    u, none = none_below(hits, steps=max(1, round(STEPS * spike)), few=few)
    shares = -np.diff(np.exp(none), prepend=1.0) / -np.expm1(none[:, -1:])
    read = np.log(largest_mean(np.maximum(hits[:, None] * (1 + few) * u**few, 1.0), CELLS))
    found = np.empty((len(TAILS), len(LEVELS)))
    # For each layer, a histogram of log severity - log smallest severity, smoothed by the width of its bins.
    bins = np.arange(len(hits))[:, None] * BINS
    places = np.round((seen[:, None] - LEVELS) / WIDTH).astype(int) + BINS // 4
    inside = (places >= 0) & (places < BINS)
    places = np.where(inside, places, 0) + bins
    for row, tail in enumerate(TAILS):
        at = np.clip(np.round((read - tail * np.log(u)) / WIDTH).astype(int) + BINS // 4, 0, BINS - 1) + bins
        drawn = np.bincount(at.ravel(), shares.ravel(), BINS * len(hits)).reshape(-1, BINS) / WIDTH
        density = gaussian_filter1d(drawn, 1.0, axis=1, mode="constant").ravel()[places]
        found[row] = np.log((1 - STRAY) * density * inside + STRAY / len(LEVELS) / WIDTH).sum(0)
    return found


def fit_bursts(name: str, *, few: float) -> FittedValue | None:
    """Estimates in how many of the 4,500 steps a node is struck, from the spread of its counts between adjacent layers.

    A layer's count is a sum over bursts whose sizes are distributed as (1 + few) u^few, with a squared coefficient of
    variation of few^2 / (2 few + 1). For a sum over n bursts, this coefficient is divided by n, and the sampling of
    independent elements adds 1/count. Taking differences between adjacent layers removes trends. The interval is the
    chi-square interval of a variance.
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
    # A sum of squared differences of adjacent values has two thirds of the degrees of freedom of independent squares.
    free = freedom * 2 / 3
    limits = [2 * float(gammainccinv(free / 2, tail)) / free for tail in (0.975, 0.025)]
    value, low, high = (float(np.clip(size / (excess / freedom) * limit, 1, STEPS)) for limit in (1.0, *limits))
    return FittedValue(value, low, high)


@dataclasses.dataclass(frozen=True)
class NoiseModel:
    """A model of the worst noise-to-signal ratios of nodes, on a grid of parameters."""

    # Share of elements in severe steps; the prior is uniform, as for the parameters below
    fews: Sequence[float] = tuple(np.linspace(0.0, 3.0, 13))
    responses: Sequence[float] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    roundings: Sequence[float] = tuple(10 ** np.linspace(-2.3, -1.3, 11))
    # Spread of nodes around the model, in powers of ten
    scatters: Sequence[float] = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
    runs: int = 40  # number of simulated training runs for each node and few; silent nodes have `SILENT_RUNS`
    seed: int = 0  # seed of the draws

    def simulate(self, name: str) -> Float64[np.ndarray, "fews responses roundings runs"]:
        """Returns log10 of the worst noise-to-signal ratios of simulated training runs of 2,500 steps on a node."""
        rng = np.random.default_rng([self.seed, NODES.index(name)])
        if not (sites := usual(name)):
            return self._simulate_silent(rng)
        frequency = np.asarray([figures.frequency for figures in sites.values()])
        u = rng.random((self.runs, PARAMETER_STEPS, *frequency.shape), np.float32)
        np.maximum(u, np.float32(SMALLEST), out=u)
        drawn = _rates(frequency, self.runs, rng)
        forward = np.asarray([site.startswith("fwd") for site in sites])[:, None]
        found = np.empty((len(self.fews), len(self.responses), len(self.roundings), self.runs))
        for row, few in enumerate(self.fews):
            hits = drawn * ((1 + few) * u**few) * STEP_ELEMENTS
            rare = hits < 30
            if rare.any():
                hits[rare] = rng.poisson(hits[rare])
            rounded = -np.expm1(-hits.sum((2, 3)) / 256)
            pairs = severities(few).draw(name, self.runs, rng)
            tail, least = np.asarray([pairs[site] for site in sites], np.float32).transpose(1, 2, 0)
            level = np.log(least)[:, None, :, None] - tail[:, None, :, None] * np.log(u)
            square = 4 / 3 * np.exp(2 * np.clip(level, math.log(LAST_BIT), LARGEST))
            square = np.where(forward, np.minimum(square, 4096), square)  # the model's width
            linear = (hits * square).mean(3).sum(2) / STEP_ELEMENTS
            found[row] = self._worst(linear, rounded)
        return found

    def _simulate_silent(self, rng: np.random.Generator) -> Float64[np.ndarray, "fews responses roundings runs"]:
        """Simulates a node without observed mismatches: a few last bits in all, at any place."""
        frequency = np.asarray([figures.frequency for figures in silent().values()])
        rate = _rates(frequency, SILENT_RUNS, rng).sum((2, 3)) * STEP_ELEMENTS
        hits = rng.poisson(np.broadcast_to(rate, (SILENT_RUNS, PARAMETER_STEPS)))
        linear = hits * (4 / 3 * LAST_BIT**2 / frequency.shape[1] / STEP_ELEMENTS)
        found = self._worst(linear, -np.expm1(-hits / 256))
        return np.broadcast_to(found, (len(self.fews), *found.shape))

    def _worst(
        self, linear: Float[np.ndarray, "runs steps"], rounded: Float[np.ndarray, "runs steps"]
    ) -> Float64[np.ndarray, "responses roundings runs"]:
        worst = [
            [np.max(response * linear + rounding**2 * rounded, axis=1) for rounding in self.roundings]
            for response in self.responses
        ]
        return np.log10(np.maximum(np.sqrt(np.asarray(worst, np.float64)), 1e-16))

    def weights(
        self, simulated: Mapping[str, Float64[np.ndarray, "fews responses roundings runs"]]
    ) -> Float64[np.ndarray, "fews responses roundings scatters"]:
        """Returns the posterior of the grid points, given tables 8 and 9 and the published ratios of the nodes; the
        weights sum to 1."""
        total = np.zeros((*map(len, (self.fews, self.responses, self.roundings, self.scatters)),))
        total += np.asarray([severities(few).evidence for few in self.fews]).reshape(-1, 1, 1, 1)
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
        """Predicts the ratio of a node from the ratios of the other nodes, given that the node follows the model (19 of
        20 nodes are assumed to do so)."""
        rng = np.random.default_rng([self.seed, 1, NODES.index(name)])
        weights = self.weights({other: found for other, found in simulated.items() if other != name})
        points = np.unravel_index(rng.choice(weights.size, draws, p=weights.reshape(-1)), weights.shape)
        own = simulated[name][points[:3]][np.arange(draws), rng.integers(0, simulated[name].shape[-1], draws)]
        drawn = 10 ** (own + np.asarray(self.scatters)[points[3]] * rng.standard_normal(draws))
        low, median, high = np.quantile(drawn, [0.025, 0.5, 0.975])
        return Predicted(published_noise(name), float(median), float(low), float(high))

    def estimates(self, simulated: Mapping[str, Float64[np.ndarray, "..."]]) -> dict[str, FittedValue]:
        """Returns the most probable value and the 95 % interval of each parameter, given all nodes. An interval that
        reaches an end of the grid is unbounded there (all parameters are positive).

        `few` has several modes: each node reaches one hit in its worst step at another value of it.
        """
        weights = self.weights(simulated)
        found = {}
        axes = {
            "few": self.fews, "response": self.responses, "rounding": self.roundings, "scatter": self.scatters,
        }  # fmt: skip
        for axis, (parameter, values) in enumerate(axes.items()):
            of = weights.sum(tuple(other for other in range(weights.ndim) if other != axis))
            levels = np.cumsum(of)
            first, last = (min(int(np.searchsorted(levels, share)), len(values) - 1) for share in (0.025, 0.975))
            low, high = values[first] if first else 0.0, values[last] if last < len(values) - 1 else math.inf
            found[parameter] = FittedValue(float(values[int(of.argmax())]), float(low), float(high))
        return found


def _rates(
    frequency: Float64[np.ndarray, "sites layers"], runs: int, rng: np.random.Generator
) -> Float64[np.ndarray, "runs 1 sites layers"]:
    """Draws frequencies from their posterior given the counts, with Jeffreys' prior."""
    counts = frequency / ONE_ELEMENT
    if counts.sum() < 0.999:  # no count was observed, and ln 2 is the median of the posterior
        return frequency * rng.standard_exponential((runs, 1, 1, 1)) / math.log(2)
    few = (counts > 0) & (counts < 1000)
    drawn = rng.gamma(np.where(few, counts + 0.5, 1), size=(runs, 1, *counts.shape))
    return np.where(few, drawn, counts) * ONE_ELEMENT


# Largest relative difference between the study's own tables for the same value (node 5, bwd/attn: 0.0047 in table 2,
# 0.0048 in table 9); intervals are widened by it.
ROUNDING = 0.022


def compare_figure(
    node: str, quantity: Quantity, place: str, figure: float, simulated: Float64[np.ndarray, "runs"], note: str = ""
) -> Compared:
    """Compares a published value with simulated runs, by its two-sided p-value among them."""
    low, median, high = np.quantile(simulated, [0.025, 0.5, 0.975]).tolist()
    low, high = low * (1 - ROUNDING), high * (1 + ROUNDING)
    below, above = np.mean(simulated <= figure * (1 + ROUNDING)), np.mean(simulated >= figure * (1 - ROUNDING))
    runs = len(simulated)
    p = min(1.0, 2 * (float(min(below, above)) * runs + 1) / (runs + 1))  # never 0: the figure counts as one more run
    return Compared(node, quantity, place, figure, median, low, high, low <= figure <= high, p, note)


def compare_tables(name: str, *, runs: int = 1000, seed: int = 0) -> list[Compared]:
    """Compares tables 1, 2 and 6 to 9 of the study with simulated runs of a node (4,500 steps at the study's size).

    The function simulates the faults that `node_faults` returns for 16 layers: the number of elements struck in each
    step and layer, and the severity of each step. These quantities do not depend on the values of tensors, so the
    function needs no tensors. Each run has tails and smallest severities of its own, drawn from the posterior
    (`Severities.draw`), which has seen these tables: the p-values are posterior-predictive. `name` may also be that of
    a simpler model of a node (`node11:uniform`), whose severities are given.
    """
    base = name.partition(":")[0]
    rng = np.random.default_rng([seed, NODES.index(base)])
    faults: dict[str, list[Fault]] = {}
    for fault in node_faults(name, layers=16):
        faults.setdefault(str(fault.site), []).append(fault)
    tables, found = published_layers(base), []
    drawn = severities(fitted()["few"].value).draw(base, runs, rng)
    spikes: dict[When, Bool[np.ndarray, "runs struck"]] = {}  # a device's submodules are struck together
    for site, figures in published(base).items():
        if site not in faults:
            found.append(Compared(base, "frequency", site, 0.0, 0.0, 0.0, 0.0, True, note="nothing seen"))
            continue
        frequency, severity = np.zeros((2, runs, 16))
        for fault in faults[site]:
            if fault.when not in spikes:
                counts = rng.binomial(STEPS, fault.when.spike, runs)
                spikes[fault.when] = np.arange(max(1, counts.max())) < counts[:, None]
            for layer in range(16):
                shares, severities_seen = _layer(fault, layer, spikes[fault.when], drawn[site], rng)
                frequency[:, layer] += shares
                severity[:, layer] = np.maximum(severity[:, layer], severities_seen)
        found.append(compare_figure(base, "frequency", site, figures.frequency, frequency.mean(1)))
        found.append(compare_figure(base, "severity", site, figures.severity, severity.max(1)))
        table = tables[site]
        for layer in np.flatnonzero(table.frequency).tolist():  # elsewhere, both have no mismatch
            place = f"{site}, layer {layer + 1}"
            rows: tuple[tuple[Quantity, Any, Any], ...] = (
                ("frequency by layer", table.frequency, frequency),
                ("severity by layer", table.severity, severity),
            )
            for quantity, of, simulated in rows:
                found.append(compare_figure(base, quantity, place, float(of[layer]), simulated[:, layer]))
    return found


def _layer(
    fault: Fault,
    layer: int,
    struck: Bool[np.ndarray, "runs struck"],
    drawn: tuple[Float64[np.ndarray, "runs"], Float64[np.ndarray, "runs"]],
    rng: np.random.Generator,
) -> tuple[Float64[np.ndarray, "runs"], Float64[np.ndarray, "runs"]]:
    """Returns the mean frequency and the largest severity of a layer in each run, given the steps in which the fault
    strikes, and the tail and the smallest severity of each run."""
    when, kind = fault.when, fault.what
    rate = float(np.broadcast_to(np.asarray(fault.rate, np.float64), 16)[layer]) / when.spike
    course: Any = 1.0
    if when.spike == 1:
        course = np.asarray([when.mean(step) for step in range(STEPS)], np.float32)
    share: Any = 1.0
    if isinstance(kind, Tailed):
        u = np.maximum(rng.random(struck.shape, np.float32), np.float32(SMALLEST))
        tail, least = (values[:, None].astype(np.float32) for values in drawn)
        share, mean = np.float32(1 + kind.few) * u ** np.float32(kind.few), least * u**-tail
    else:
        assert isinstance(kind, Relative)
        mean = np.full(struck.shape, float(np.broadcast_to(kind.severity, 16)[layer]) / 2)
    expected = np.minimum(rate * course * share, 1.0) * struck * (ELEMENTS * MICROSTEPS)
    rare = np.nonzero(expected < 1e6)
    expected[rare] = rng.poisson(expected[rare])
    mean = np.where(expected > 0, mean, 0.0)
    # The severity of a step is the maximum of the means, at most twice `mean`: most steps cannot be the worst one.
    near = np.nonzero((mean > 0) & (2 * mean >= mean.max(1, keepdims=True)))
    worst = np.zeros(len(mean))
    largest = np.maximum(mean[near] * largest_mean(expected[near], CELLS), LAST_BIT)
    np.maximum.at(worst, near[0], largest.astype(np.float64))
    return expected.sum(1, dtype=np.float64) / (STEPS * ELEMENTS * MICROSTEPS), worst


def compare_time(name: str, *, runs: int = 100, seed: int = 0) -> list[Compared]:
    """Compares the study's description of a node's behavior over time with simulated runs."""
    rng = np.random.default_rng([seed, 1, node_number(name)])
    hit = "number of steps with a mismatch, out of 4,500"
    claims: list[tuple[str, Float64[np.ndarray, "runs"], Callable[[float, float], bool], str]] = []
    if name == "node7":
        words = "figure 3: spikes, and no mismatch during most of the steps"
        few = _steps_hit(name, "compute", runs, rng)
        claims.append((hit, few, lambda low, high: 0 < low < high < STEPS / 2, words))
    elif name == "node14":
        few, every = (_steps_hit(name, sync, runs, rng) for sync in ("compute", "params"))
        share = "share of steps with a mismatch, with synchronized parameters"
        claims.append((hit, few, lambda low, high: low <= 1 <= high, "appendix D.2: a singular spike"))
        claims.append((share, every / PARAMETER_STEPS, lambda low, _: low > 0.999, "section 9: at every step"))
    elif name in ("node10", "node11"):
        [fault] = [fault for fault in node_faults(name, layers=16) if fault.site == "fwd/attn"]
        course = np.asarray([fault.when.mean(step) for step in range(500)])
        kind = fault.what
        assert isinstance(kind, Tailed)
        u = rng.random((runs, len(course), 16))
        frequency = ((1 + kind.few) * u**kind.few) @ np.asarray(fault.rate) * course
        first = frequency[:, :5].mean(1) / frequency[:, 100:].mean(1)
        words = "figure 4: large initial spikes"
        claims.append(
            ("frequency in the first five steps, relative to steps 100 and later", first, lambda low, _: low > 1, words)
        )
    elif name == "node13":
        note = "figure 6: no mismatch before step 450; an input of the model, so this is not a test"
        where, onset = "first step with a mismatch, without synchronization", float(behaviour(name, "none").onset)
        return [Compared(name, "time", where, None, onset, note=note)]
    rows = []
    for where, simulated, agrees, words in claims:
        low, median, high = np.quantile(simulated, [0.025, 0.5, 0.975]).tolist()
        rows.append(Compared(name, "time", where, None, median, low, high, agrees(low, high), note=words))
    return rows


def _steps_hit(name: str, sync: Load, runs: int, rng: np.random.Generator) -> Float64[np.ndarray, "runs"]:
    """Returns the number of steps of each run in which any element is struck."""
    larger, steps = (1, STEPS) if sync == "compute" else (16 * 2, PARAMETER_STEPS)  # microsteps times layers
    none = np.ones((runs, steps))
    spikes: dict[When, Bool[np.ndarray, "runs steps"]] = {}
    for fault in node_faults(name, layers=16, sync=sync):
        if not isinstance(fault.what, Tailed):
            continue
        spike = spikes.setdefault(fault.when, rng.random((runs, steps)) < fault.when.spike)
        for rate in np.broadcast_to(np.asarray(fault.rate), 16):
            share = (1 + fault.what.few) * rng.random((runs, steps)) ** fault.what.few
            none *= np.exp(-rate * larger * ELEMENTS * MICROSTEPS / fault.when.spike * share * spike)
    return (rng.random((runs, steps)) > none).sum(1).astype(np.float64)


def correlation(name: str, *, seed: int = 0) -> float | None:
    """Returns the correlation of the mismatch frequencies of a node's submodules over the steps.

    The result is the mean correlation coefficient over pairs of submodules, computed from sums over the layers,
    excluding the initial burst. The result is None if fewer than two submodules are struck in `CORRELATED` steps.
    """
    rng = np.random.default_rng([seed, node_number(name)])
    spikes: dict[When, Bool[np.ndarray, "steps"]] = {}
    sums = []
    for fault in node_faults(name, layers=16):
        if isinstance(fault.what, Tailed):
            if fault.when not in spikes:
                spikes[fault.when] = rng.random(CORRELATED) < fault.when.spike
            shares = (1 + fault.what.few) * rng.random((16, CORRELATED)) ** fault.what.few
            sums.append(np.broadcast_to(np.asarray(fault.rate), 16) @ shares * spikes[fault.when])
    sums = [total for total in sums if total.any()]
    if len(sums) < 2:
        return None
    return float(np.corrcoef(sums)[np.triu_indices(len(sums), 1)].mean())


SEVERE = 10.0  # mean relative change of the struck elements when the response to severity is measured
SHARE = 1e-3  # share of elements struck in that measurement


def sized(layers: int, width: int, length: int, *, steps: int) -> TrainConfig:
    """Returns a small configuration in bfloat16, with four microsteps of one sequence each.

    The learning rate warms up for the same share of the steps as in the study: 2,000 of 2,500 (appendix B.3).
    """
    config = get_config("tiny").of_type("bfloat16")
    model = dataclasses.replace(
        config.model, layers=layers, width=width, ffn_width=4 * width, heads=4, kv_heads=2, head_dim=width // 4
    )
    optimizer = dataclasses.replace(
        config.optimizer, learning_rate=3e-4, warmup_steps=steps * 4 // 5, total_steps=steps * 40
    )
    return dataclasses.replace(
        config, model=model, optimizer=optimizer, sequence_length=length, batch_size=1, microsteps=4
    )


class SmallModel:
    """A small model and its healthy training run: the states before each step and after the last, the gradients and the
    losses."""

    def __init__(self, config: TrainConfig, steps: int, seed: int) -> None:
        self.config, dataset = Workload(config=config, seed=seed).load()
        rows = dataset.chunks[: steps * self.config.microsteps]
        self.tokens = jnp.asarray(rows.reshape(steps, self.config.microsteps, 1, -1), jnp.int32)
        self.steps, self.key = steps, jax.random.key(seed + 1)
        healthy = self._compile([])
        self.states = [programs.init_state(self.config, jax.random.key(seed))]
        self.gradients, self.losses = [], []
        for number in range(steps):
            state, loss, gradient = healthy(self.states[-1], self.tokens[number])
            self.states.append(state)
            self.gradients.append(gradient)
            self.losses.append(float(loss))

    def _compile(self, faults: Sequence[Fault]) -> Callable[[TrainState, Array], tuple[TrainState, Array, Any]]:
        step = functools.partial(programs.device_step, config=self.config)

        def run(state: TrainState, tokens: Int[Array, "microsteps batch length"]) -> tuple[TrainState, Array, Any]:
            def device(state: TrainState, tokens: Any) -> Any:
                if not faults:
                    return step(state, tokens)
                return sdc.inject(step, faults)(sdc.Moment(self.key, state.step), state, tokens)[0]

            over_model = jax.vmap(device, (None, None), axis_name=programs.MODEL, axis_size=1)
            over_data = jax.vmap(over_model, (None, None), axis_name=programs.DATA, axis_size=1)
            new, metrics = jax.tree.map(lambda leaf: leaf[0, 0], over_data(state, tokens))
            return new, metrics.loss, metrics.gradient

        return jax.jit(run)

    def responses(self) -> Response:
        """Measures how gradients respond to wrong last bits in a few elements, and to severe errors at each
        submodule."""
        windows = [When(onset=k * WINDOW, end=(k + 1) * WINDOW) for k in range(len(SUBMODULES) + 1)]
        # 64 wrong last bits in a microstep; the response hardly depends on their number.
        few = 64 / (self._elements * len(SUBMODULES))
        faults = [Fault(Relative(2 * LAST_BIT), few, site, when=windows[0]) for site in SUBMODULES]
        faults += [
            Fault(Relative(2 * SEVERE), SHARE, site, when=when)
            for site, when in zip(SUBMODULES, windows[1:], strict=True)
        ]
        noise = self._noise(self._compile(faults)).reshape(-1)[: WINDOW * len(windows)].reshape(-1, WINDOW)
        middle = np.median(noise, axis=1)
        linear = (middle[1:] ** 2 / (SHARE * 4 / 3 * SEVERE**2)).tolist()
        return Response(self._name, float(middle[0]), dict(zip(SUBMODULES, linear, strict=True)))

    def train(self, node: str) -> Drifting | None:
        """Trains on a simulated node, with and without synchronized parameters; returns None if the study provides no
        fault rate for the node."""
        if not published_layers(node):
            return None
        step = self._compile(scaled_faults(node, self.config.model.layers, self._elements, sync="params"))
        noise = self._noise(step)
        state, distances, losses = self.states[0], [], []
        if behaviour(node, "none").onset >= self.steps:  # the node is clean for the whole run without synchronization
            nothing = np.zeros(self.steps)
            return Drifting(node, self._name, noise, nothing, nothing)
        for number in range(self.steps):
            state, loss, _ = step(state, self.tokens[number])
            distances.append(_norm(state.params, self.states[number + 1].params))
            losses.append(abs(float(loss) - self.losses[number]) / self.losses[number])
        return Drifting(node, self._name, noise, np.asarray(distances), np.asarray(losses))

    @property
    def _name(self) -> str:
        model = self.config.model
        return f"{model.layers} layers of width {model.width}, {self.config.sequence_length} tokens"

    @property
    def _elements(self) -> int:
        """Number of elements of a submodule's outputs per microstep."""
        return self.config.model.layers * self.config.model.width * self.config.sequence_length

    def _noise(self, step: Callable[..., Any]) -> Float[np.ndarray, "steps"]:
        """Returns the noise-to-signal ratios of gradients that are computed from the healthy states (equation 5 before
        the maximum)."""
        found = []
        for number in range(self.steps):
            gradient = step(self.states[number], self.tokens[number])[2]
            found.append(_norm(gradient, self.gradients[number]) / _norm(self.gradients[number]))
        return np.asarray(found)


def scaled_faults(node: str, layers: int, elements: int, *, sync: Load, microsteps: int = 1) -> list[Fault]:
    """Returns the faults of a node, scaled to strike the same share of microsteps as in the study's model of 32 layers.

    Args:
        node: the node.
        layers: number of layers of the model.
        elements: number of elements of a submodule's outputs in a microstep, summed over the layers.
        sync: kind of synchronization with a healthy node.
        microsteps: number of the study's microsteps that are one here.
    """
    faults = node_faults(node, layers=layers, sync=sync)
    theirs = sum(2 * figures.frequency.sum() for figures in published_layers(node).values()) * ELEMENTS * microsteps
    ours = sum(float(np.mean(fault.rate)) for fault in faults if fault.rate is not None) * elements
    times = max(1.0, min(theirs, 3.0) / ours)  # with 3 strikes on average, 95 % of microsteps are struck
    return [dataclasses.replace(f, rate=tuple(np.minimum(np.asarray(f.rate) * times, 1).tolist())) for f in faults]


def _norm(tree: Any, less: Any = None) -> float:
    """Returns the norm of a tree, or of its difference from another tree."""
    tree = tree if less is None else jax.tree.map(jnp.subtract, tree, less)
    return math.sqrt(sum(float(jnp.sum(jnp.square(leaf.astype(jnp.float32)))) for leaf in jax.tree.leaves(tree)))


def experiment(study: NodesStudy, kept: RecordedParts) -> Generator[str, None, NodesMeasured]:
    """Fits the parameters, simulates runs at the study's size, and trains small models."""
    model = NoiseModel(seed=study.seed)
    simulated: dict[str, Float64[np.ndarray, "fews responses roundings runs"]] = {}

    def fit() -> NodesFit:
        few = fitted()["few"].value
        bursts = {f"bursts/{node}": fit_bursts(node, few=few) for node in NODES}
        estimates = {**model.estimates(simulated), **severities(few).tails()}
        return NodesFit(
            predicted={node: model.predict(node, simulated) for node in NODES},
            estimates=estimates | {name: found for name, found in bursts.items() if found is not None},
            together={node: correlation(node, seed=study.seed) for node in study.nodes},
            flagged={node: flagged_share(node, seed=study.seed) for node in study.nodes},
        )

    for node in NODES:
        if not kept.on_record:
            simulated[node] = model.simulate(node)
        yield f"noise of {node}"
    found = kept("fit", NodesFit, fit)
    yield "fit"

    rows: list[Compared] = []

    def compare(node: str) -> list[Compared]:
        given = {"runs": study.runs, "seed": study.seed}
        return [*compare_tables(node, **given), *compare_time(node, **given)]

    for node in study.nodes:
        title = f"tables of {node}"
        rows += kept(title, list[Compared], functools.partial(compare, node))
        noise = found.predicted[node]
        rows.append(Compared(node, "noise", "", noise.published, noise.median, noise.low, noise.high, noise.inside))
        yield title

    @functools.cache
    def small(size: tuple[int, int, int]) -> SmallModel:
        return SmallModel(sized(*size, steps=study.steps), study.steps, study.seed)

    def respond(size: tuple[int, int, int]) -> Response:
        return small(size).responses()

    def train(node: str) -> list[Drifting]:
        trained = small(SIZES[0]).train(node)
        return [] if trained is None else [trained]

    responses, trainings = [], []
    for size in SIZES:
        title = "responses of a model with {} layers".format(*size)
        responses.append(kept(title, Response, functools.partial(respond, size)))
        yield title
    for node in study.nodes:
        title = f"training on {node}"
        trained = kept(title, list[Drifting], functools.partial(train, node))
        rows += _drift(node, next(iter(trained), None))
        trainings += trained
        yield title
    return NodesMeasured(
        study=study,
        rows=tuple(rows),
        **vars(found),
        used=fitted(),
        responses=tuple(responses),
        trainings=tuple(trainings),
    )


def _drift(node: str, trained: Drifting | None) -> list[Compared]:
    """Compares a small model with figure 6, in which parameters drift apart step by step while loss curves coincide."""
    words = {
        "drift": "figure 6: drifts away incrementally",
        "loss": "figure 6: identical to the healthy curve, by which `few` was chosen",
    }
    if trained is None or not trained.distances.any():
        return [
            Compared(node, name, "", None, None, note=f"{said}; no mismatch occurred, since the run is too short")  # type: ignore[arg-type]
            for name, said in words.items()
        ]
    quarter, half, last = (trained.distances[len(trained.distances) * part // 4 - 1] for part in (1, 2, 4))
    worst = float(trained.losses.max())
    return [
        Compared(node, "drift", "", None, float(last), None, None, bool(quarter <= half <= last),
                 note=f"{words['drift']}; simulated: {quarter:.2g} after a quarter, {half:.2g} after half of them"),
        Compared(node, "loss", "", None, worst, None, None, worst < 0.01, note=words["loss"]),
    ]  # fmt: skip


PARTS = ("state", "gradient")


@dataclasses.dataclass(frozen=True)
class NodeFound:
    """The result of a simulated node in a pair or a pool."""

    node: str  # name of the node, as given
    steps: int  # number of steps run: up to the first difference, or all
    found: bool  # whether a difference was found
    first: int | None  # step of the first difference, from 0
    sites: tuple[str, ...]  # submodules that differed in that step; empty if only gradient or state differed
    # Hosts that differ from the reference; the node is the last one. With at least three hosts, the majority is the
    # reference.
    twins: tuple[int, ...]
    mismatched: int  # number of elements that differ at submodules in that step
    checked: int  # number of elements compared at submodules per step
    expected: float  # number of wrong elements that the model of the node predicts for the requested steps


def find_node(node: str, steps: int, *, twins: int = 2, config: str | TrainConfig = "tiny", seed: int = 0) -> NodeFound:
    """Runs the first stage of a pair or a pool whose last host is a simulated node, until a difference is detected.

    All twins are on one device. The program is compiled once per node, which takes seconds regardless of the number of
    steps. See `sdc.nodes.parse_suspect` for names of nodes; the rates of `node4(times=1e6)` are a million times those
    of `node4`. Two twins form a pair; three or more form a pool.
    """
    workload = Workload(config=config, seed=seed)
    job = FullLoad(workload=workload, steps=steps, twins=twins, placement="vmap", suspect=node)
    chosen, dataset = job.load()
    placement = programs.place(twins=twins, data=1, model=1, kind="vmap", devices=jax.devices()[:1])
    program = job.program(chosen, placement, donate=True)
    source = batches(dataset, batch_size=chosen.batch_size, microsteps=chosen.microsteps)
    state, checked, each, hits = program.init(seed), 0, 0.0, dict[str, int]()
    first: int | None = None
    odd: tuple[int, ...] = ()
    for number in range(steps):
        state, out = program.step(state, programs.place_batch(next(source), placement), number)
        state, seen = program.observe(state, out)
        row, details = program.rows(number, out, seen)
        sites = row["sites"]
        checked = sum(site["checked"] for site in sites.values())
        # Every twin except the reference is compared with the reference; the node is one of these twins.
        each = checked / (twins - 1) / max(len(sites), 1)
        wrong = {name: site["mismatched"] + site.get("unrepeated", 0) for name, site in sites.items()}
        hits = {name: count for name, count in wrong.items() if count}
        if hits or any(row[part]["mismatched"] for part in PARTS):
            ranks = [*(rank for line in details for rank in line["ranks"])]
            ranks += [rank for part in PARTS for rank in row[part].get("ranks", ())]
            first, odd = number, tuple(sorted({int(rank["twin"]) for rank in ranks}))
            break
    expected = sum(frequency * each for frequency in expected_frequency(node, steps, sync="params").values()) * steps
    done = steps if first is None else first + 1
    return NodeFound(node, done, first is not None, first, tuple(hits), odd, sum(hits.values()), checked, expected)
