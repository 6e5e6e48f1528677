"""Each published figure of a node beside the simulated node's: published, simulated, interval, inside or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ..faults import SMALLEST, Fault, Relative, Tailed, When
from .published_tables import (
    ELEMENTS,
    LAST_BIT,
    MICROSTEPS,
    NODES,
    PARAMETER_STEPS,
    STEPS,
    node_number,
    published,
    published_layers,
)
from .severities import largest_mean
from .simulated_nodes import Load, behaviour, node_faults

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

ROUNDING = 0.04
"""By how much the study's own tables of the same figure differ: what an interval is widened by."""
CELLS = 32 * MICROSTEPS
"""Devices times microsteps of a step: the severity of a step is the largest of their means."""

Quantity: TypeAlias = Literal[
    "frequency", "severity", "frequency by layer", "severity by layer", "noise", "time", "drift", "loss"
]


@dataclasses.dataclass(frozen=True)
class Compared:
    """One published figure beside the simulated one.

    Attributes:
        node: the node.
        quantity: what is compared.
        place: submodule, and layer from 1, or empty.
        published: the published figure; None where the study says it in words only.
        simulated: the median of the simulated ones; None where the simulation is too short to say.
        low, high: what holds 95 % of the simulated ones, widened by `ROUNDING`.
        agrees: whether the published figure is inside; None where nothing can be said.
        note: what else there is to say, such as the study's words.
    """

    node: str
    quantity: Quantity
    place: str
    published: float | None
    simulated: float | None
    low: float | None = None
    high: float | None = None
    agrees: bool | None = None
    note: str = ""


def compare_figure(
    node: str, quantity: Quantity, place: str, figure: float, simulated: Float64[np.ndarray, "runs"], note: str = ""
) -> Compared:
    """A published figure beside those of simulated runs.

    Example:
        >>> import numpy as np
        >>> from sdc.nodes.comparing import compare_figure
        >>> compare_figure("node11", "frequency", "fwd/attn", 0.0289, np.linspace(0.028, 0.03, 100)).agrees
        True
    """
    low, median, high = (float(limit) for limit in np.quantile(simulated, [0.025, 0.5, 0.975]))
    low, high = low * (1 - ROUNDING), high * (1 + ROUNDING)
    return Compared(node, quantity, place, figure, median, low, high, low <= figure <= high, note)


def compare_tables(name: str, *, runs: int = 100, seed: int = 0) -> list[Compared]:
    """Tables 1, 2 and 6 to 9 of the study for a node beside simulated runs of 4,500 steps at the study's size.

    What is simulated are the faults that `node_faults` makes for 16 layers: for each step and layer how many of the
    elements are hit, and how severe the step is. The values themselves do not matter for these figures, so that no
    tensors are needed.

    Args:
        name: the node; a model of it (`node11:uniform`) is compared as well.
        runs: simulated runs.
        seed: decides the draws.

    Example:
        >>> from sdc.nodes.comparing import compare_tables
        >>> [row.agrees for row in compare_tables("node11", runs=20) if row.place == "fwd/attn"]
        [True, True]
    """
    base = name.partition(":")[0]
    rng = np.random.default_rng([seed, NODES.index(base)])
    faults: dict[str, list[Fault]] = {}
    for fault in node_faults(name, layers=16):
        faults.setdefault(str(fault.site), []).append(fault)
    tables, found = published_layers(base), []
    spikes: dict[When, Bool[np.ndarray, "runs steps"]] = {}  # a device's submodules are hit together
    for site, figures in published(base).items():
        if site not in faults:
            found.append(Compared(base, "frequency", site, 0.0, 0.0, 0.0, 0.0, True, "nothing seen"))
            continue
        frequency, severity = np.zeros((2, runs, 16))
        for fault in faults[site]:
            when = fault.when
            if when not in spikes:
                spikes[when] = rng.random((runs, STEPS)) < when.spike
            for layer in range(16):
                shares, severities = _layer(fault, layer, spikes[when], rng)
                frequency[:, layer] += shares
                severity[:, layer] = np.maximum(severity[:, layer], severities)
        found.append(compare_figure(base, "frequency", site, figures.frequency, frequency.mean(1)))
        found.append(compare_figure(base, "severity", site, figures.severity, severity.max(1)))
        for layer in range(16):
            place, table = f"{site}, layer {layer + 1}", tables[site]
            of = compare_figure(base, "frequency by layer", place, float(table.frequency[layer]), frequency[:, layer])
            found.append(of)
            of = compare_figure(base, "severity by layer", place, float(table.severity[layer]), severity[:, layer])
            found.append(of)
    return found


def _layer(
    fault: Fault, layer: int, spikes: Bool[np.ndarray, "runs steps"], rng: np.random.Generator
) -> tuple[Float64[np.ndarray, "runs"], Float64[np.ndarray, "runs"]]:
    """Mean frequency and largest severity of a layer in runs."""
    when, kind = fault.when, fault.what
    course = np.asarray([when.mean(step) for step in range(spikes.shape[1])])
    rate = float(np.broadcast_to(np.asarray(fault.rate, np.float64), 16)[layer])
    share: Any = 1.0
    if isinstance(kind, Tailed):
        u = np.maximum(rng.random(spikes.shape), SMALLEST)
        least = float(np.broadcast_to(kind.severity, 16)[layer])
        share, mean = (1 + kind.few) * u**kind.few, least * u**-kind.tail
    else:
        assert isinstance(kind, Relative)
        mean = np.full(spikes.shape, float(np.broadcast_to(kind.severity, 16)[layer]) / 2)
    expected = np.minimum(rate * course / when.spike * share, 1.0) * spikes * (ELEMENTS * MICROSTEPS)
    hits = np.where(expected < 1e6, rng.poisson(np.minimum(expected, 1e6)), expected)
    seen = np.where(hits > 0, np.maximum(mean * largest_mean(hits, CELLS), LAST_BIT), 0.0)
    return hits.mean(1) / (ELEMENTS * MICROSTEPS), seen.max(1)


def compare_time(name: str, *, runs: int = 100, seed: int = 0) -> list[Compared]:
    """What the study says in words of a node's course in time, beside simulated runs.

    Args:
        name: the node.
        runs: simulated runs.
        seed: decides the draws.

    Example:
        >>> from sdc.nodes.comparing import compare_time
        >>> [row.agrees for row in compare_time("node14", runs=20)]
        [True, True]
    """
    rng = np.random.default_rng([seed, 1, node_number(name)])
    if name == "node7":
        steps = _steps_hit(name, "compute", runs, rng)
        return [_in_words(name, "steps with a mismatch, of 4,500", steps, lambda low, high: 0 < low < high < STEPS / 2,
                          "figure 3: spikes, and no mismatch during most of the steps")]  # fmt: skip
    if name == "node14":
        few, all_steps = (_steps_hit(name, sync, runs, rng) for sync in ("compute", "params"))
        return [
            _in_words(name, "steps with a mismatch, of 4,500", few, lambda low, high: low <= 1 <= high,
                      "appendix D.2: a singular spike"),
            _in_words(name, "share of steps with a mismatch, parameters synchronized", all_steps / PARAMETER_STEPS,
                      lambda low, _: low > 0.999, "section 9: at every step"),
        ]  # fmt: skip
    if name in ("node10", "node11"):
        [fault] = [fault for fault in node_faults(name, layers=16) if fault.site == "fwd/attn"]
        course = np.asarray([fault.when.mean(step) for step in range(500)])
        kind = fault.what
        assert isinstance(kind, Tailed)
        u = rng.random((runs, len(course), 16))
        frequency = ((1 + kind.few) * u**kind.few) @ np.asarray(fault.rate) * course
        first = frequency[:, :5].mean(1) / frequency[:, 100:].mean(1)
        return [_in_words(name, "first five steps over steps from 100 on", first, lambda low, _: low > 1,
                          "figure 4: large initial spikes")]  # fmt: skip
    if name == "node13":
        note = "figure 6: none before step 450. Put into the model, so that it tests nothing"
        return [Compared(name, "time", "first step with a mismatch, nothing synchronized", None,
                         float(behaviour(name, "none").onset), note=note)]  # fmt: skip
    return []


def _in_words(
    name: str,
    place: str,
    simulated: Float64[np.ndarray, "runs"],
    agrees: Callable[[float, float], bool],
    words: str,
) -> Compared:
    low, median, high = (float(limit) for limit in np.quantile(simulated, [0.025, 0.5, 0.975]))
    return Compared(name, "time", place, None, median, low, high, agrees(low, high), words)


def _steps_hit(name: str, sync: Load, runs: int, rng: np.random.Generator) -> Float64[np.ndarray, "runs"]:
    """Steps of a run in which anything is hit."""
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


def correlation(name: str, *, steps: int = 20_000, seed: int = 0) -> float | None:
    """How the mismatch frequencies of a node's submodules go together from step to step.

    The mean of the correlation coefficients over pairs of submodules, of sums over the layers, without the burst at the
    start.

    Returns:
        The coefficient; None with fewer than two submodules that are hit in so many steps.

    Example:
        >>> from sdc.nodes.comparing import correlation
        >>> correlation("node7") > 0.5, abs(correlation("node1")) < 0.05
        (True, True)
    """
    rng = np.random.default_rng([seed, node_number(name)])
    spikes: dict[When, Bool[np.ndarray, "steps"]] = {}
    sums = []
    for fault in node_faults(name, layers=16):
        if isinstance(fault.what, Tailed):
            if fault.when not in spikes:
                spikes[fault.when] = rng.random(steps) < fault.when.spike
            shares = (1 + fault.what.few) * rng.random((16, steps)) ** fault.what.few
            sums.append(np.broadcast_to(np.asarray(fault.rate), 16) @ shares * spikes[fault.when])
    sums = [total for total in sums if total.any()]
    if len(sums) < 2:
        return None
    return float(np.corrcoef(sums)[np.triu_indices(len(sums), 1)].mean())
