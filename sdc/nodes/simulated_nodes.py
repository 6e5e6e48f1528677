"""Simulations of the study's fifteen unhealthy nodes.

Frequencies and severities by layer are the published ones (Ma et al. 2025, arXiv:2502.12340, tables 1, 2 and 6 to 9).
The following properties are unpublished and therefore modeled: the distribution of severities, the smaller number of
struck elements in severe steps, the course over time, the load, silent nodes, node 9, and neural networks with a number
of layers other than 16. docs/faults.md describes how each property is modeled; `sdc.train.studies._nodes` fits the
parameters, and sdc/nodes/data/sdc_fitted.csv lists the parameters with their intervals.

`node11:uniform` is an older model, in which every step is as severe as the worst one, regardless of synchronization.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from sdc._lazy import np
from sdc.text import form, read_term, write_term

from ..faults import Fault, Relative, Tailed, When
from ..program import Where
from .published_tables import (
    ELEMENTS,
    LAST_BIT,
    MICROSTEPS,
    NODES,
    STEPS,
    SUBMODULES,
    Layers,
    node_number,
    published,
    published_layers,
    read_table,
)
from .silicon import SILICON, silicon_faults, silicon_frequency

if TYPE_CHECKING:
    from jaxtyping import Float64

HEALTHY = "healthy"
TAILED, UNIFORM = "tailed", "uniform"
# The kind of synchronization (of the computation, of the parameters, or none), which determines the load of a node.
Load: TypeAlias = Literal["compute", "params", "none"]

FREAK = 1e9  # severities above this are attributed to a single microstep
ONSET = 450  # the first step with a mismatch of node 13, in a run without synchronization
_BURST = {10: (4.0, 5.0), 11: (4.0, 5.0)}
_SPIKE = {7: 1 / 50, 14: 1 / STEPS}


@dataclasses.dataclass(frozen=True, repr=False)
class SuspectName:
    """The name of a simulated suspect: `node11`, `node11:uniform`, `node4(times=1e6)`. Its `repr` is this name."""

    name: str  # `healthy`, a node, or a profile of silicon
    model: str = TAILED  # or `UNIFORM`
    times: float = 1.0  # factor on the rates; 1 for published rates

    def __post_init__(self) -> None:
        if not 0 < self.times < math.inf:
            raise ValueError(f"times={self.times:g}: expected a positive number")

    def __repr__(self) -> str:
        head = self.name if self.model == TAILED else f"{self.name}:{self.model}"
        return write_term(self, {head: form(SuspectName, name=self.name, model=self.model)})

    def departs(self) -> str:
        """Returns a description of the departure from published rates; empty for published rates."""
        if self.times == 1 or self.name not in NODES:
            return ""
        low, high = rate_interval(self.name)
        where = "inside" if low <= self.times <= high else "outside"
        return (
            f"the rates of {self.name} are multiplied by {self.times:g}, a factor {where} the 95 % interval of "
            f"factors that its published counts allow, {low:.3g} to {high:.3g}"
        )


def parse_suspect(text: str) -> SuspectName:
    """Parses the name of a suspect."""
    head = re.split(r"[,(]", text)[0].strip()
    name, colon, model = head.partition(":")
    if name == "silicon":
        silicon_frequency(head)  # raises for an unknown profile
        name, model = head, TAILED
    elif name != HEALTHY and name not in NODES:
        raise ValueError(
            f"unknown suspect {name!r}; expected {HEALTHY}, one of {NODES[0]} ... {NODES[-1]}, or {', '.join(SILICON)}"
            f"{' (in lower case, without spaces)' if ''.join(name.lower().split()) in NODES else ''}"
        )
    elif colon and (name == HEALTHY or model not in (UNIFORM, TAILED)):
        raise ValueError(
            f"suspect {head!r}: unknown model {model!r}; expected {TAILED} or {UNIFORM}, as in node11:{UNIFORM}"
        )
    forms = {head: form(SuspectName, name=name, model=model or TAILED)}
    suspect: SuspectName = read_term("suspect", text.strip(), forms, example="node4(times=1e6)", noun="suspect").value
    if name == HEALTHY and text.strip() != HEALTHY:
        raise ValueError(f"suspect {text!r}: a healthy device has no rates to multiply; give {HEALTHY} alone")
    return suspect


def node_faults(
    name: str,
    *,
    layers: int,
    at: Mapping[str, int] | None = None,
    where: Callable[[str], Where] = str,
    sync: Load = "compute",
) -> list[Fault]:
    """Returns the faults of a simulated node.

    Args:
        name: `node1` to `node15`, such a name with `:uniform` or `(times=X)` (see `parse_suspect`), a profile of
            `SILICON`, or `healthy`.
        layers: number of layers of the neural network.
        at: the device that simulates the node, such as `{"twin": 1}`; by default, every device.
        where: maps a submodule of the study (see `SUBMODULES`) to sites. By default, the submodule's name is used as a
            pattern of probe names, which matches the probes `attn` and `ffn`.
        sync: kind of synchronization with a healthy node, which determines the load.

    Returns:
        One fault for each submodule in which the study found mismatches, with rates and severities by layer; no faults
        for `healthy`.

    Raises:
        ValueError: there is no such node, or `layers` is less than 1.
    """
    suspect = parse_suspect(name)
    if not isinstance(layers, int) or layers < 1:
        raise ValueError(f"layers={layers!r}: expected a whole number of at least 1")
    if suspect.name == HEALTHY:
        return []
    if suspect.name in SILICON:
        faults = silicon_faults(suspect.name, layers=layers, at=at, where=where)
    elif suspect.model == UNIFORM:
        faults = _uniform(suspect.name, layers)
    else:
        faults = _tailed(suspect.name, layers, sync)
    if suspect.times != 1:
        rates = [np.minimum(np.asarray(fault.rate) * suspect.times, 1.0).tolist() for fault in faults]
        faults = [
            dataclasses.replace(fault, rate=tuple(rate) if isinstance(rate, list) else rate)
            for fault, rate in zip(faults, rates, strict=True)
        ]
    if suspect.name in SILICON:
        return faults
    return [dataclasses.replace(fault, site=where(str(fault.site)), at=dict(at or {})) for fault in faults]


def _uniform(name: str, layers: int) -> list[Fault]:
    """Returns faults for which every step is as severe as the worst: changes are uniform in (0, 2 severity]."""
    when, faults = behaviour(name, uniform=True), []
    for site, figures in published_layers(name).items():
        kind = Relative(tuple((2 * largest_by_layer(figures.severity, layers)).tolist()))
        faults.append(Fault(kind, tuple(mean_by_layer(figures.frequency, layers).tolist()), site, when=when))
    return faults


def _tailed(name: str, layers: int, sync: Load) -> list[Fault]:
    when, few = behaviour(name, sync), fitted()["few"].value
    tables = published_layers(name) or (silent() if sync != "compute" else {})
    faults = []
    for site, figures in tables.items():
        severity, known = figures.severity, fitted().get(f"tail/{name}/{site.partition('/')[0]}")
        tail = 0.0 if known is None else known.value  # a silent node
        freak = severity.max() > FREAK
        if freak:
            severity = tables[f"fwd/{site.partition('/')[2]}"].severity
        if freak and sync == "compute":  # the fault strikes one element in one of the 4,500 steps
            worst = Relative(tuple((2 * largest_by_layer(figures.severity, layers)).tolist()))
            rate = 1 / (ELEMENTS * MICROSTEPS * STEPS)
            faults.append(Fault(worst, rate, site, when=When(spike=1 / STEPS)))
        least = least_node_severity(name, dataclasses.replace(figures, severity=severity), tail=tail, few=few)
        # With fewer layers, the most severe layer would otherwise be milder.
        kind = Tailed(least * (16 / layers) ** tail, tail, few)
        faults.append(Fault(kind, tuple(mean_by_layer(figures.frequency, layers).tolist()), site, when=when))
    return faults


def least_node_severity(name: str, figures: Layers, *, tail: float, few: float) -> float:
    """Returns the minimum severity of a node's steps at a site, computed from the largest severities of the layers.

    Layers are treated as equal, since the study observed no trend over layers (its appendix C.2) and the largest
    severities of the layers scatter as independent draws would.
    """
    spike = behaviour(name).spike
    hits = figures.frequency * ELEMENTS * MICROSTEPS / spike
    return least_severity(
        figures.severity, hits, steps=max(1, round(STEPS * spike)), cells=32 * MICROSTEPS, tail=tail, few=few
    )


def silent() -> dict[str, Layers]:
    """Returns figures for a node without observed mismatches: ln 2 elements per run whose last bit changes."""
    places = len(SUBMODULES) * 16
    rate = math.log(2) / (ELEMENTS * MICROSTEPS * STEPS * places)
    return {site: Layers(np.full(16, rate), np.full(16, LAST_BIT)) for site in SUBMODULES}


def behaviour(name: str, sync: Load = "compute", *, uniform: bool = False) -> When:
    """Returns the time course of a node's faults, in the model of docs/faults.md or in the uniform model."""
    number = node_number(name)
    burst, decay = _BURST.get(number, (0.0, 1.0))
    known = None if uniform else fitted().get(f"bursts/{NODES[number - 1]}")
    spike = _SPIKE.get(number, 1.0 if known is None else min(1.0, known.value / STEPS))
    spike = spike if uniform or sync == "compute" else 1.0
    onset = ONSET if number == 13 and (uniform or sync == "none") else 0
    return When(burst=burst, decay=decay, spike=spike, onset=onset)


@dataclasses.dataclass(frozen=True)
class FittedValue:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@functools.cache
def fitted() -> Mapping[str, FittedValue]:
    """Returns the fitted parameters of the node models by name; `sdc study nodes` repeats the fit."""
    rows = read_table("sdc_fitted.csv")
    return {row["parameter"]: FittedValue(float(row["value"]), float(row["low"]), float(row["high"])) for row in rows}


def rate_interval(name: str) -> tuple[float, float]:
    """Returns the 95 % interval of factors on a node's rates that are compatible with the node's published counts.

    The interval is the exact interval of a Poisson mean, given the number of bursts or, if smaller, the number of
    mismatched elements.
    """
    from scipy.special import gammainccinv, gammaincinv

    counts = sum(figures.counts.sum() for figures in published_layers(name).values())
    events = min(counts, STEPS * behaviour(name).spike)
    if not counts:
        return 0.0, float(gammainccinv(1, 0.025)) / math.log(2)
    events = max(1.0, round(events))
    return float(gammaincinv(events, 0.025)) / events, float(gammainccinv(events + 1, 0.025)) / events


def expected_frequency(name: str, steps: int, *, sync: Load = "compute") -> dict[str, float]:
    """Returns the expected mismatch frequency of a simulated suspect over its first `steps` steps, by site."""
    suspect = parse_suspect(name)
    if suspect.name in SILICON:
        return {site: frequency * suspect.times for site, frequency in silicon_frequency(suspect.name).items()}
    if suspect.name == HEALTHY:
        return {}
    uniform = suspect.model == UNIFORM
    when = behaviour(name, sync, uniform=uniform)
    few, level = 0.0 if uniform else fitted()["few"].value, when.average(steps) * suspect.times
    if not uniform and sync != "compute" and not published_layers(suspect.name):
        return {site: float(figures.frequency.mean()) * level for site, figures in silent().items()}
    left = {}
    for site, layers in (published_layers(suspect.name) if suspect.times != 1 else {}).items():
        # The effective rate, since no element is struck twice: the mean over u of min(rate (1 + few) u^few, 1).
        rates = layers.frequency * suspect.times
        most = np.minimum(rates, 1.0) / when.spike * (1 + few)
        edge = np.maximum(most, 1.0) ** (-1 / max(few, 1e-9))  # draws above it strike every element
        left[site] = float(when.spike * np.mean(most * edge ** (1 + few) / (1 + few) + 1 - edge) / rates.mean())
    figures = published(suspect.name).items()
    return {site: min(known.frequency * level * left.get(site, 1.0), 1.0) for site, known in figures}


def mean_by_layer(values: Float64[np.ndarray, "published"], layers: int) -> Float64[np.ndarray, "layers"]:
    """Resamples figures by layer to another number of layers, preserving their mean."""
    edges = np.linspace(0, len(values), layers + 1)
    totals = np.interp(edges, np.arange(len(values) + 1), np.concatenate([[0.0], np.cumsum(values)]))
    return np.diff(totals) / np.diff(edges)


def largest_by_layer(values: Float64[np.ndarray, "published"], layers: int) -> Float64[np.ndarray, "layers"]:
    """Resamples figures by layer to another number of layers, preserving their maximum."""
    edges = np.linspace(0, len(values), layers + 1)
    return np.asarray([values[int(a) : int(np.ceil(b))].max() for a, b in itertools.pairwise(edges)])


def none_below(
    hits: Float64[np.ndarray, "layers"], *, steps: int, few: float
) -> tuple[Float64[np.ndarray, "draws"], Float64[np.ndarray, "layers draws"]]:
    """Returns draws u in (0, 1], and the logarithm of the probability that no step of the run has a hit and a smaller
    draw, for each layer.

    A step has a hit with probability 1 - exp(-hits (1 + few) u^few), where `hits` is the expected number of hits per
    step. If q(x) is the probability that a step has a hit and u < x, then the probability that this is true of no step
    of the run is (1 - q(x))^steps.
    """
    edges = np.concatenate([[0.0], np.geomspace(1e-7, 1, 2048)])
    middle = (edges[1:] + edges[:-1]) / 2
    seen = -np.expm1(-hits[:, None] * (1 + few) * middle**few)
    below = np.minimum(np.cumsum(seen * np.diff(edges), axis=1), 1 - 1e-12)
    return edges[1:], steps * np.log1p(-below)


def smallest_draws(
    hits: Float64[np.ndarray, "layers"], *, steps: int, few: float
) -> Float64[np.ndarray, "layers quantiles"]:
    """Returns quantiles of the smallest draw u among a run's steps with hits: 100 equally likely values per layer.

    The values lie in (0, 1] and are conditional on at least one step of the run having a hit; see `none_below`.
    """
    draws, none = none_below(hits, steps=steps, few=few)
    quantiles = (np.arange(100) + 0.5) / 100
    # The waiting time is exponentially distributed, conditional on ending before the last step.
    waiting = -np.log1p(quantiles * np.expm1(none[:, -1:]))
    return np.asarray([np.interp(wait, -row, draws) for wait, row in zip(waiting, none, strict=True)])


def least_severity(
    largest: Float64[np.ndarray, "layers"],
    hits: Float64[np.ndarray, "layers"],
    *,
    steps: int,
    cells: int,
    tail: float,
    few: float,
) -> float:
    """Returns the `severity` of a `Tailed` whose largest severities in a run match the observed ones, given by layer.

    Layers are treated as equal except for their numbers of hits; the logarithms of severities are averaged over layers.
    The worst step is assumed to be the step with the smallest draw; this assumption holds if the tail is heavy or there
    are many hits.

    `largest` is zero for layers without hits. A step has one cell for each device and microstep, `cells` in total; the
    severity of the step is the largest mean of a cell.
    """
    known = (largest > 0) & (hits > 0)
    hits = hits[known]
    u = smallest_draws(hits, steps=steps, few=few)
    read = largest_mean(np.maximum(hits[:, None] * (1 + few) * u**few, 1.0), cells)
    return float(np.exp(np.mean(np.log(largest[known]) - np.mean(np.log(read) - tail * np.log(u), axis=1))))


def largest_mean(hits: Float64[np.ndarray, "*n"], cells: int) -> Float64[np.ndarray, "*n"]:
    """Approximates the largest mean of a cell if `hits` changes, each uniform in (0, 2], are spread over the cells.

    With one hit per cell, the largest of n changes is 2 n / (n + 1) on average. With many hits per cell, the means of
    the cells are normal, with variance 1/3 divided by the number of hits in a cell.
    """
    each, used = np.maximum(hits / cells, 1.0), np.clip(hits, 1, cells)
    many = 1 + np.sqrt(2 * np.log(cells) / (3 * each))
    return np.where(each > 1, np.minimum(many, 2.0), 2 * used / (used + 1))
