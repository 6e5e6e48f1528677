"""What is fitted to the published tables is found again in simulated ones, and the committed values are fitted ones.

Scatter is stated with each comparison. Draws are the same each time, so that nothing here fails by chance.
"""

import csv
import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from sdc.analysis.statistics import proportion_interval
from sdc.nodes import simulated_nodes as nodes
from sdc.nodes.published_tables import (
    ELEMENTS,
    MICROSTEPS,
    NODES,
    ONE_ELEMENT,
    STEPS,
    SUBMODULES,
    Layers,
    published_layers,
    published_noise,
)
from sdc.train.studies import _nodes as comparisons
from sdc.train.studies._nodes import SILENT_RUNS, NoiseModel, Severities, fit_bursts, severities

Tables = dict[str, dict[str, Layers]]


def simulated_tables(tails: Mapping[tuple[str, str], float], few: float, rng: np.random.Generator) -> Tables:
    """Tables with the published frequencies, and the largest severities of runs whose steps have Pareto tails, which
    depend on the node and the direction."""
    found: Tables = {}
    for name in NODES:
        spike, found[name] = nodes.behaviour(name).spike, {}
        for site, figures in published_layers(name).items():
            hits = figures.frequency * ELEMENTS * MICROSTEPS / spike
            u = rng.random((max(1, round(STEPS * spike)), 16))
            hit = rng.random(u.shape) < -np.expm1(-hits * (1 + few) * u**few)
            smallest = np.where(hit, u, np.inf).min(0)
            known = np.isfinite(smallest)
            tail, smallest = tails[name, site.partition("/")[0]], np.where(known, smallest, 1.0)
            read = nodes.largest_mean(np.maximum(hits * (1 + few) * smallest**few, 1.0), 32 * MICROSTEPS)
            severity = np.where(known, rng.random() * read * smallest**-tail, 0.0)
            if known.any():
                found[name][site] = Layers(np.where(known, figures.frequency, 0.0), severity)
    return found


def drawn_tails(rng: np.random.Generator) -> dict[tuple[str, str], float]:
    """Tails of all nodes from a common distribution for each direction."""
    return {
        (name, direction): math.exp(rng.normal(math.log(middle), 0.4))
        for name in NODES for direction, middle in (("fwd", 1.1), ("bwd", 0.8))
    }  # fmt: skip


@pytest.mark.parametrize("few", [0.0, 2.2])
def test_the_tails_are_found_again(few: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 10 % and five standard errors on average; credible intervals of 95 % hold them, less simulation error."""
    rng, held, errors = np.random.default_rng(0), [], []
    for _ in range(8):
        tails = drawn_tails(rng)
        tables = simulated_tables(tails, few, rng)
        monkeypatch.setattr(comparisons, "usual", tables.__getitem__)
        fit = Severities(few)
        for key, estimate in fit.tails().items():
            _, name, direction = key.split("/")
            true = tails[name, direction]
            held.append(estimate.low <= true <= estimate.high)
            errors.append(math.log(estimate.value / true))
            assert estimate.low <= estimate.value <= estimate.high
    assert abs(np.mean(errors)) < 0.1 + 5 * np.std(errors) / math.sqrt(len(errors))
    assert np.std(errors) < 0.35
    assert proportion_interval(sum(held), len(held), confidence=0.999)[1] >= 0.95


def test_evidence_prefers_what_was_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, right = np.random.default_rng(1), 0
    for few in (0.0, 2.0):
        tails = {(name, direction): 0.9 for name in NODES for direction in ("fwd", "bwd")}
        tables = simulated_tables(tails, few, rng)
        monkeypatch.setattr(comparisons, "usual", tables.__getitem__)
        right += Severities(few).evidence > Severities(2.0 - few).evidence
    assert right == 2


def test_draws_are_those_of_the_posterior() -> None:
    fit, rng = severities(2.2), np.random.default_rng(0)
    drawn = fit.draw("node11", 4000, rng)
    assert set(drawn) == set(SUBMODULES)
    for direction in ("fwd", "bwd"):
        known = fit.tails()[f"tail/node11/{direction}"]
        (tail, least), (same, other) = drawn[f"{direction}/attn"], drawn[f"{direction}/ffn"]
        np.testing.assert_array_equal(tail, same)  # the tail is that of the direction
        assert (least != other).any()
        assert tail.mean() == pytest.approx(known.value, abs=5 * tail.std() / math.sqrt(4000))
        assert np.mean((known.low <= tail) & (tail <= known.high)) >= 0.94
        # The more a severity grows, the smaller was the smallest one.
        assert np.corrcoef(tail, np.log(least))[0, 1] < 0
        site = f"{direction}/attn"
        plain = nodes.least_node_severity("node11", published_layers("node11")[site], tail=known.value, few=2.2)
        assert abs(math.log(np.median(least) / plain)) < 1
    assert fit.draw("node12", 10, rng) == {}


def burst_tables(bursts: int, few: float, rng: np.random.Generator, mean: float = 1e4) -> dict[str, Layers]:
    """Counts of a node that is hit in so many steps, each as severe and so as rich in elements as it happens."""
    share = ((1 + few) * rng.random((len(SUBMODULES), bursts, 16)) ** few).mean(1)
    counts = rng.poisson(mean * share)
    return {site: Layers(row * ONE_ELEMENT, np.ones(16)) for site, row in zip(SUBMODULES, counts, strict=True)}


@pytest.mark.parametrize("few", [0.8, 1.7])
@pytest.mark.parametrize("bursts", [6, 100])
def test_the_bursts_are_found_again(bursts: int, few: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of 1/estimate to five standard errors and 5 %; intervals of 95 % hold it, less simulation error."""
    rng, found = np.random.default_rng(0), []
    for _ in range(300):
        tables = burst_tables(bursts, few, rng)
        monkeypatch.setattr(comparisons, "published_layers", lambda name, tables=tables: tables)
        found.append(fit_bursts("node4", few=few))
    rates = np.asarray([1 / estimate.value for estimate in found if estimate is not None])
    assert rates.size == 300
    assert abs(rates.mean() * bursts - 1) < 5 * rates.std() * bursts / math.sqrt(300) + 0.05
    covered = sum(estimate.low <= bursts <= estimate.high for estimate in found if estimate is not None)
    assert proportion_interval(covered, 300, confidence=0.999)[1] >= 0.93


def test_where_bursts_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)

    def fit(tables: Mapping[str, Layers]) -> nodes.FittedValue | None:
        monkeypatch.setattr(comparisons, "published_layers", lambda name: tables)
        return fit_bursts("node4", few=1.7)

    assert fit({}) is None  # nothing was seen
    often = 1.1e-6 / ONE_ELEMENT
    assert fit(burst_tables(3, 1.7, rng, often)) is None  # in every step
    assert fit(burst_tables(3, 1.7, rng, often / 2)) is not None
    assert fit({site: Layers(np.full(16, 50 * ONE_ELEMENT), np.ones(16)) for site in SUBMODULES}) is None
    trend = 1e4 + 50 * np.arange(16)  # which neighbouring layers do not see
    assert fit({"fwd/attn": Layers(trend * ONE_ELEMENT, np.ones(16))}) is None
    one = fit(burst_tables(1, 1.7, rng))
    assert one is not None
    assert 1 <= one.low <= one.value < 2
    assert one.high < 4


def committed() -> dict[str, tuple[str, str, str]]:
    path = Path(nodes.__file__).with_name("data") / "sdc_fitted.csv"
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return {row["parameter"]: (row["value"], row["low"], row["high"]) for row in csv.DictReader(lines)}


def half_a_digit(text: str) -> float:
    return 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9


def test_committed_values_are_the_fitted_ones() -> None:
    """To their digits, given `few`, which takes minutes: `sdc study nodes` checks it."""
    rows = committed()
    few = float(rows.pop("few")[0])
    bursts = {f"bursts/{name}": fit_bursts(name, few=few) for name in NODES}
    found = severities(few).tails() | {name: estimate for name, estimate in bursts.items() if estimate is not None}
    assert set(found) == set(rows)
    for name, estimate in found.items():
        for text, value in zip(rows[name], (estimate.value, estimate.low, estimate.high), strict=True):
            assert float(text) == value or abs(float(text) - value) <= half_a_digit(text), name
    assert {name: nodes.fitted()[name].value for name in rows} == {name: float(row[0]) for name, row in rows.items()}


MODEL = NoiseModel(fews=(0.5, 1.5), responses=(0.3, 3.0), roundings=(0.01, 0.03), scatters=(0.2, 0.4), runs=5)
SOME = ("node1", "node3", "node4", "node7", "node11", "node12", "node14")


@functools.cache
def simulated() -> dict[str, np.ndarray]:
    """Worst ratios of trainings of a fiftieth of the length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparisons, "PARAMETER_STEPS", 50)
        return {name: MODEL.simulate(name) for name in SOME}


@dataclasses.dataclass(frozen=True)
class Fit:
    """Stands for `Severities`, with draws that are given."""

    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]
    evidence: float = 0.0

    def draw(self, name: str, runs: int, rng: np.random.Generator) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        return self.pairs


def test_a_simulation_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "PARAMETER_STEPS", 50)
    first = simulated()["node11"]
    assert first.shape == (2, 2, 2, 5)
    np.testing.assert_array_equal(MODEL.simulate("node11"), first)
    other = NoiseModel(MODEL.fews, MODEL.responses, MODEL.roundings, MODEL.scatters, MODEL.runs, seed=1)
    assert (other.simulate("node11") != first).any()


def test_noise_grows_with_its_causes() -> None:
    for name, found in simulated().items():
        assert (np.diff(found, axis=1) >= 0).all(), name  # the response
        assert (np.diff(found, axis=2) >= 0).all(), name  # the rounding
    # Node 11 is wrong in every microstep: rounding alone is so much, whatever else comes on top.
    for place, rounding in enumerate(MODEL.roundings):
        assert (simulated()["node11"][:, :, place] >= math.log10(rounding) - 1e-6).all()
    # Half of the runs of a silent node show nothing, and of the fiftieth of a run nearly all.
    assert simulated()["node12"].shape[-1] == SILENT_RUNS
    assert np.median(simulated()["node12"]) == -16
    assert np.median(simulated()["node11"]) > np.median(simulated()["node4"])


def test_the_noise_is_that_of_a_plain_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with one layer and site, so many hits that nothing scatters, and steps that are all alike."""
    rate, severity = 1e-3, 0.5
    tables = {"bwd/ffn": Layers(np.asarray([rate]), np.asarray([severity]))}
    monkeypatch.setattr(comparisons, "PARAMETER_STEPS", 3)
    monkeypatch.setattr(comparisons, "usual", lambda name: tables)
    fit = Fit({"bwd/ffn": (np.zeros(2), np.full(2, severity))})
    monkeypatch.setattr(comparisons, "severities", lambda few: fit)
    model = NoiseModel(fews=(0.0,), responses=(0.3, 3.0), roundings=(0.01,), scatters=(0.2,), runs=2)
    expected = [[0.5 * math.log10(response * rate * 4 / 3 * severity**2 + 0.01**2)] * 2 for response in (0.3, 3.0)]
    np.testing.assert_allclose(model.simulate("node11")[0, :, 0], expected, rtol=1e-4)


def test_weights_are_probabilities() -> None:
    weights = MODEL.weights(simulated())
    assert weights.shape == (2, 2, 2, 2)
    assert weights.sum() == pytest.approx(1)
    assert (weights >= 0).all()
    estimates = MODEL.estimates(simulated())
    for place, (name, values) in enumerate(
        {"few": MODEL.fews, "response": MODEL.responses, "rounding": MODEL.roundings,
         "scatter": MODEL.scatters}.items()
    ):  # fmt: skip
        first, second = weights.sum(tuple(axis for axis in range(4) if axis != place))
        assert estimates[name].value == values[int(second > first)]
        assert estimates[name].low == (0 if first >= 0.025 else values[1]), "unbounded at an end of the grid"
        assert estimates[name].high == (math.inf if first < 0.975 else values[0])


@pytest.mark.parametrize("name", ["node11", "node4"])
def test_a_prediction_does_not_know_its_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = MODEL.predict(name, simulated())
    assert before.published == published_noise(name)
    assert before.low < before.median < before.high
    for figure, inside in ((before.high * 1.01, False), (before.median, True), (before.low * 0.99, False)):
        monkeypatch.setattr(comparisons, "published_noise", lambda n, f=figure: f if n == name else published_noise(n))
        after = MODEL.predict(name, simulated())
        assert (after.low, after.median, after.high) == (before.low, before.median, before.high)
        assert (after.published, after.inside) == (figure, inside)
    # The others' it does know.
    monkeypatch.setattr(comparisons, "published_noise", lambda n: published_noise(n) * (1 if n == name else 30))
    assert MODEL.predict(name, simulated()).median > before.median


def test_predictions_hold_what_they_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ratios that are simulated from the model, intervals of 95 % hold 95 %, less simulation error.

    Ratios of all nodes are made at a point of the grid, with its scatter; each is predicted from the others. At 99.9 %,
    taking the 300 predictions as independent.
    """
    rng = np.random.default_rng(0)
    monkeypatch.setattr(comparisons, "severities", lambda few: Fit({}))
    shape = (2, 2, 2, 300)
    own = {name: rng.normal(rng.uniform(-4, -1), 0.05, shape) for name in NODES}
    for axis, effect in enumerate((0.1, 0.25, 0.2)):  # what the parameters do to nodes, to each its own
        for found in own.values():
            found += rng.uniform(0, 2 * effect) * np.arange(2).reshape([2 if a == axis else 1 for a in range(4)])
    model = NoiseModel(MODEL.fews, MODEL.responses, MODEL.roundings, MODEL.scatters, runs=300)
    inside = []
    for _ in range(20):
        *point, scatter = rng.integers(0, 2, 4)
        ratios = {
            name: 10 ** (rng.choice(found[tuple(point)]) + model.scatters[scatter] * rng.standard_normal())
            for name, found in own.items()
        }
        monkeypatch.setattr(comparisons, "published_noise", ratios.__getitem__)
        inside += [model.predict(name, own, draws=1000).inside for name in NODES]
    low, high = proportion_interval(sum(inside), len(inside), confidence=0.999)
    assert low <= 0.95 <= high
