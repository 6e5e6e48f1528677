"""The fifteen unhealthy nodes of the study, simulated.

Frequencies and severities by layer are the published ones (Ma et al. 2025, arXiv:2502.12340, tables 1, 2 and 6 to 9).
What the study does not publish is modelled: severities, how few elements a severe step hits, the course in time, load,
silent nodes, node 9, and models of other than 16 layers. docs/faults.md says how, point by point; the parameters are
fitted by `sdc.train.studies._nodes`, and sdc/nodes/data/sdc_fitted.csv lists them with their intervals.

`node11:uniform` is the model of before: every step as severe as the worst, whatever is synchronized.
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
# What is synchronized, and so how hard a node works: computation, parameters, or nothing.
Load: TypeAlias = Literal["compute", "params", "none"]

FREAK = 1e9  # severities above this are taken as those of a single microstep
ONSET = 450  # the first step with a mismatch of node 13, in a run without synchronization
_BURST = {10: (4.0, 5.0), 11: (4.0, 5.0)}
_SPIKE = {7: 1 / 50, 14: 1 / STEPS}


@dataclasses.dataclass(frozen=True, repr=False)
class SuspectName:
    """A simulated suspect, as its name has it: `node11`, `node11:uniform`, `node4(times=1e6)`. `repr` writes it."""

    name: str  # `healthy`, a node, or a profile of silicon
    model: str = TAILED  # or `UNIFORM`
    times: float = 1.0  # what the rates are multiplied by; 1 for the published ones

    def __post_init__(self) -> None:
        if not 0 < self.times < math.inf:
            raise ValueError(f"times={self.times:g}: expected a positive number")

    def __repr__(self) -> str:
        head = self.name if self.model == TAILED else f"{self.name}:{self.model}"
        return write_term(self, {head: form(SuspectName, name=self.name, model=self.model)})

    def departs(self) -> str:
        """What a rate that was not published is, in words; empty for published ones."""
        if self.times == 1 or self.name not in NODES:
            return ""
        low, high = rate_interval(self.name)
        where = "inside" if low <= self.times <= high else "outside"
        return (
            f"the rates of {self.name} are multiplied by {self.times:g}, which lies {where} what its published counts "
            f"leave open, {low:.3g} to {high:.3g} times"
        )


def parse_suspect(text: str) -> SuspectName:
    """A suspect from its name."""
    head = re.split(r"[,(]", text)[0].strip()
    name, colon, model = head.partition(":")
    if name == "silicon":
        silicon_frequency(head)  # refuses a profile that does not exist
        name, model = head, TAILED
    elif name != HEALTHY and name not in NODES:
        raise ValueError(
            f"unknown suspect {name!r}; expected {HEALTHY}, one of {NODES[0]} ... {NODES[-1]}, or {', '.join(SILICON)}"
            f"{' (in small letters, without spaces)' if ''.join(name.lower().split()) in NODES else ''}"
        )
    elif colon and (name == HEALTHY or model not in (UNIFORM, TAILED)):
        raise ValueError(
            f"suspect {head!r}: no model {model!r}; a node has one besides its own, as in node11:{UNIFORM}"
        )
    forms = {head: form(SuspectName, name=name, model=model or TAILED)}
    suspect: SuspectName = read_term("suspect", text.strip(), forms, example="node4(times=1e6)", noun="suspect").value
    if name == HEALTHY and text.strip() != HEALTHY:
        raise ValueError(f"suspect {text!r}: a healthy device has no rates to multiply")
    return suspect


def node_faults(
    name: str,
    *,
    layers: int,
    at: Mapping[str, int] | None = None,
    where: Callable[[str], Where] = str,
    sync: Load = "compute",
) -> list[Fault]:
    """The faults of a simulated node.

    Args:
        name: `node1` to `node15`, such a name with `:uniform` or `(times=X)` (see `parse_suspect`), a profile of
            `SILICON`, or `healthy`.
        layers: number of layers of the model that it will run.
        at: the device that is the node, such as `{"twin": 1}`; by default every device.
        where: which sites stand for a submodule of the study (see `SUBMODULES`). By default its name is a pattern of
            names of probes: outputs named `attn` and `ffn` by `sdc.probe`.
        sync: what of the node is synchronized with a healthy one, which decides how hard it works.

    Returns:
        One fault per submodule that the study saw corrupted, its rates and severities by layer; none for `healthy`.

    Raises:
        ValueError: there is no such node, or there are no layers.
    """
    suspect = parse_suspect(name)
    if not isinstance(layers, int) or layers < 1:
        raise ValueError(f"layers={layers!r}: expected a whole number of layers, at least one")
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
    """Every step as severe as the worst: elements uniform in (0, 2 severity]."""
    when, faults = behaviour(name, uniform=True), []
    for site, figures in published_layers(name).items():
        kind = Relative(tuple((2 * largest_by_layer(figures.severity, layers)).tolist()))
        faults.append(Fault(kind, tuple(mean_by_layer(figures.frequency, layers).tolist()), site, when=when))
    return faults


def _tailed(name: str, layers: int, sync: Load) -> list[Fault]:
    when, few, tail = behaviour(name, sync), fitted()["few"].value, fitted()["tail"].value
    tables = published_layers(name) or (silent() if sync != "compute" else {})
    faults = []
    for site, figures in tables.items():
        severity = figures.severity
        freak = severity.max() > FREAK
        if freak:
            severity = tables[f"fwd/{site.partition('/')[2]}"].severity
        if freak and sync == "compute":  # one element of the 4,500 steps, in one of them
            worst = Relative(tuple((2 * largest_by_layer(figures.severity, layers)).tolist()))
            rate = 1 / (ELEMENTS * MICROSTEPS * STEPS)
            faults.append(Fault(worst, rate, site, when=When(spike=1 / STEPS)))
        least = least_node_severity(name, dataclasses.replace(figures, severity=severity), tail=tail, few=few)
        # Of fewer layers the most severe one would be milder.
        kind = Tailed(least * (16 / layers) ** tail, tail, few)
        faults.append(Fault(kind, tuple(mean_by_layer(figures.frequency, layers).tolist()), site, when=when))
    return faults


def least_node_severity(name: str, figures: Layers, *, tail: float, few: float) -> float:
    """The least severity of a node's steps at a site, from the largest ones of the layers.

    Layers are taken as alike: the study observed no trends over them (its appendix C.2), and their largest severities
    scatter as independent draws do.
    """
    spike = behaviour(name).spike
    hits = figures.frequency * ELEMENTS * MICROSTEPS / spike
    return least_severity(
        figures.severity, hits, steps=max(1, round(STEPS * spike)), cells=32 * MICROSTEPS, tail=tail, few=few
    )


def silent() -> dict[str, Layers]:
    """A node of which nothing was seen: ln 2 elements of the whole run, with a changed last bit, anywhere."""
    places = len(SUBMODULES) * 16
    rate = math.log(2) / (ELEMENTS * MICROSTEPS * STEPS * places)
    return {site: Layers(np.full(16, rate), np.full(16, LAST_BIT)) for site in SUBMODULES}


def behaviour(name: str, sync: Load = "compute", *, uniform: bool = False) -> When:
    """How a node's faults go in time, in the model of docs/faults.md or in the uniform one."""
    number = node_number(name)
    burst, decay = _BURST.get(number, (0.0, 1.0))
    known = None if uniform else fitted().get(f"bursts/{NODES[number - 1]}")
    spike = _SPIKE.get(number, 1.0 if known is None else min(1.0, known.value / STEPS))
    spike = spike if uniform or sync == "compute" else 1.0
    onset = ONSET if number == 13 and (uniform or sync == "none") else 0
    return When(burst=burst, decay=decay, spike=spike, onset=onset)


@dataclasses.dataclass(frozen=True)
class FittedValue:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


@functools.cache
def fitted() -> Mapping[str, FittedValue]:
    """Parameters of the nodes by name; `sdc study nodes` fits them anew."""
    rows = read_table("sdc_fitted.csv")
    return {row["parameter"]: FittedValue(float(row["value"]), float(row["low"]), float(row["high"])) for row in rows}


def rate_interval(name: str) -> tuple[float, float]:
    """By what a node's rates may be multiplied within what its published counts leave open, at 95 %.

    The exact interval of a Poisson mean over its number of bursts, or of elements where these are fewer.
    """
    from scipy.special import gammainccinv, gammaincinv

    counts = sum(figures.counts.sum() for figures in published_layers(name).values())
    events = min(counts, STEPS * behaviour(name).spike)
    if not counts:
        return 0.0, float(gammainccinv(1, 0.025)) / math.log(2)
    events = max(1.0, round(events))
    return float(gammaincinv(events, 0.025)) / events, float(gammainccinv(events + 1, 0.025)) / events


def expected_frequency(name: str, steps: int, *, sync: Load = "compute") -> dict[str, float]:
    """What the frequency of a simulated suspect comes to on average over its first `steps` steps, by site."""
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
        # How much of rates there can be, as no element is hit twice: the mean of min(rate (1 + few) u^few, 1) over u.
        rates = layers.frequency * suspect.times
        most = np.minimum(rates, 1.0) / when.spike * (1 + few)
        edge = np.maximum(most, 1.0) ** (-1 / max(few, 1e-9))  # with a draw beyond it, everything is hit
        left[site] = float(when.spike * np.mean(most * edge ** (1 + few) / (1 + few) + 1 - edge) / rates.mean())
    figures = published(suspect.name).items()
    return {site: min(known.frequency * level * left.get(site, 1.0), 1.0) for site, known in figures}


def mean_by_layer(values: Float64[np.ndarray, "published"], layers: int) -> Float64[np.ndarray, "layers"]:
    """Resamples figures by layer to another number of layers so that their mean stays."""
    edges = np.linspace(0, len(values), layers + 1)
    totals = np.interp(edges, np.arange(len(values) + 1), np.concatenate([[0.0], np.cumsum(values)]))
    return np.diff(totals) / np.diff(edges)


def largest_by_layer(values: Float64[np.ndarray, "published"], layers: int) -> Float64[np.ndarray, "layers"]:
    """Resamples figures by layer to another number of layers so that their maximum stays."""
    edges = np.linspace(0, len(values), layers + 1)
    return np.asarray([values[int(a) : int(np.ceil(b))].max() for a, b in itertools.pairwise(edges)])


def smallest_draws(
    hits: Float64[np.ndarray, "layers"], *, steps: int, few: float
) -> Float64[np.ndarray, "layers quantiles"]:
    """The smallest draw u of a run, of the steps that hit anything: 100 equally likely values for each layer.

    A step hits an element with the probability 1 - exp(-hits (1 + few) u^few). With q(x) the probability that a step
    has u < x and hits one, no step of the run is below x with the probability (1 - q(x))^steps, about exp(-steps q(x)).

    Values lie in (0, 1], given that a step of the run hits anything; `hits` are those expected in a step.
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

    `largest` are zero where nothing was hit. Of a step's `cells`, devices times microsteps, the largest mean counts.
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
    """
    each, used = np.maximum(hits / cells, 1.0), np.clip(hits, 1, cells)
    many = 1 + np.sqrt(2 * np.log(cells) / (3 * each))
    return np.where(each > 1, np.minimum(many, 2.0), 2 * used / (used + 1))
