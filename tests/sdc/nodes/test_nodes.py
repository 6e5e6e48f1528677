"""Simulated suspects carry the published figures, and behave in time as the study says."""

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc.faults.fault import Fault, When
from sdc.faults.kinds import Relative, Tailed
from sdc.nodes import simulated_nodes as nodes
from sdc.nodes.published_tables import (
    ELEMENTS,
    LAST_BIT,
    MICROSTEPS,
    NODES,
    STEPS,
    SUBMODULES,
    published,
    published_accuracy,
    published_disagreement,
    published_layers,
    published_noise,
)
from sdc.nodes.silicon import SILICON, silicon_faults
from sdc.nodes.simulated_nodes import largest_mean, least_severity, smallest_draws

SILENT = {"node2", "node3", "node12"}
RARE = {"node4", "node5", "node6", "node8", "node13"}
ALL_ELEMENTS = ELEMENTS * MICROSTEPS * STEPS


def usual(name: str, **settings: Any) -> dict[Any, Fault]:
    """The faults but for that of node 9's freak."""
    return {fault.site: fault for fault in nodes.node_faults(name, **settings) if isinstance(fault.what, Tailed)}


def freaks(name: str, sync: nodes.Load) -> list[Fault]:
    return [fault for fault in nodes.node_faults(name, layers=16, sync=sync) if not isinstance(fault.what, Tailed)]


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("layers", [2, 4, 16, 24])
def test_nodes_reproduce_table_1(name: str, layers: int) -> None:
    figures = published(name)
    assert set(figures) == set(SUBMODULES)
    faults = usual(name, layers=layers, at={"twin": 1})
    for site, known in figures.items():
        if known.frequency == 0:
            assert site not in faults
            continue
        assert np.size(faults[site].rate) == layers
        # The published figures have three digits; the layers' mean reproduces them to 4 %.
        np.testing.assert_allclose(np.mean(faults[site].rate), known.frequency, rtol=0.04)
        assert faults[site].at == {"twin": 1}
    for sync in ("params", "none"):
        for site, fault in usual(name, layers=layers, sync=sync).items():
            expected = figures[str(site)].frequency or math.log(2) / (ALL_ELEMENTS * 64)
            np.testing.assert_allclose(np.mean(fault.rate), expected, rtol=0.04)


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("layers", [2, 4, 16, 24])
def test_the_uniform_model_reproduces_tables_1_and_2(name: str, layers: int) -> None:
    faults = {fault.site: fault for fault in nodes.node_faults(f"{name}:uniform", layers=layers, at={"twin": 1})}
    for site, known in published(name).items():
        if known.frequency == 0:
            assert site not in faults
            continue
        what = faults[site].what
        assert type(what) is Relative
        np.testing.assert_allclose(np.mean(faults[site].rate), known.frequency, rtol=0.04)
        np.testing.assert_allclose(np.max(what.severity), 2 * known.severity, rtol=0.04)
        assert np.size(faults[site].rate) == np.size(what.severity) == layers
        assert faults[site].at == {"twin": 1}
        if layers == 16:  # each layer's own
            tables = published_layers(name)[site]
            np.testing.assert_allclose(faults[site].rate, tables.frequency)
            np.testing.assert_allclose(what.severity, 2 * tables.severity)


@pytest.mark.parametrize("name", sorted(set(NODES) - SILENT))
def test_severities_are_tailed_as_was_fitted(name: str) -> None:
    """Fewer layers are each more severe, so that the largest of all stays: n draws' largest grows as n^tail."""
    few = nodes.fitted()["few"].value
    found = {layers: usual(name, layers=layers) for layers in (4, 16)}
    for site, fault in found[16].items():
        tail = nodes.fitted()[f"tail/{name}/{str(site).partition('/')[0]}"].value
        fewer = found[4][site].what
        assert isinstance(fault.what, Tailed)
        assert isinstance(fewer, Tailed)
        assert (fault.what.tail, fault.what.few) == (tail, few)
        assert fewer.severity == pytest.approx(np.asarray(fault.what.severity) * 4**tail)
        # The least severity is below the largest of 4,500 steps, and what was seen is no less than a last bit.
        assert 0 < float(np.max(fault.what.severity)) <= max(published(name)[str(site)].severity, LAST_BIT)


def spikes(name: str, sync: nodes.Load) -> set[float]:
    return {fault.when.spike for fault in nodes.node_faults(name, layers=4, sync=sync)}


def test_computation_synchronization_makes_corruption_rarer() -> None:
    assert spikes("node7", "compute") == {1 / 50}
    assert spikes("node14", "compute") == {1 / STEPS}
    for name in RARE:
        assert spikes(name, "compute") == {nodes.fitted()[f"bursts/{name}"].value / STEPS}
    for name in ("node1", "node10", "node11", "node15"):
        assert spikes(name, "compute") == {1.0}
    for name in NODES:
        for sync in ("params", "none"):
            assert spikes(name, sync) == {1.0}


def test_what_computation_synchronization_does_not_show() -> None:
    assert {name for name in NODES if not nodes.node_faults(name, layers=4)} == SILENT
    for name in SILENT:
        assert nodes.node_faults(f"{name}:uniform", layers=4, sync="none") == []
        for sync in ("params", "none"):
            faults = nodes.node_faults(name, layers=16, sync=sync)
            assert {fault.site for fault in faults} == set(SUBMODULES)
            # At even odds nothing is seen: exp(-ln 2) = 1/2.
            assert sum(np.sum(fault.rate) for fault in faults) * ALL_ELEMENTS == pytest.approx(math.log(2))
    onsets = {
        (name, sync): {fault.when.onset for fault in nodes.node_faults(name, layers=4, sync=sync)}
        for name in NODES for sync in ("compute", "params", "none")
    }  # fmt: skip
    assert {place for place, onset in onsets.items() if onset not in ({0}, set())} == {("node13", "none")}
    assert onsets["node13", "none"] == {450}
    bursts = {name for name in NODES if any(fault.when.burst for fault in nodes.node_faults(name, layers=4))}
    assert bursts == {"node10", "node11"}


def test_the_freak_of_node_9() -> None:
    """The severity of 9.63e12 is that of one element of a layer's 4,500 steps, and of no other node or load."""
    found = {(name, sync): freaks(name, sync) for name in NODES for sync in ("compute", "params", "none")}
    assert {place for place, faults in found.items() if faults} == {("node9", "compute")}
    rates = {fault.site: fault for fault in found["node9", "compute"]}
    assert set(rates) == {"bwd/attn", "bwd/ffn"}
    for site, fault in rates.items():
        assert fault.rate == pytest.approx(1 / ALL_ELEMENTS)
        assert fault.when == When(spike=1 / STEPS)
        assert isinstance(fault.what, Relative)
        assert np.max(fault.what.severity) == pytest.approx(2 * published("node9")[str(site)].severity, rel=0.04)
    for sync in ("compute", "none"):
        kinds = {site: fault.what for site, fault in usual("node9", layers=16, sync=sync).items()}
        assert all(isinstance(what, Tailed) and float(np.max(what.severity)) < 1 for what in kinds.values())


@pytest.mark.parametrize("model", ["", ":uniform"])
@pytest.mark.parametrize("times", [0.5, 3.0, 1e6])
def test_rates_are_multiplied(times: float, model: str) -> None:
    plain = nodes.node_faults(f"node4{model}", layers=4)
    more = nodes.node_faults(f"node4{model},times={times:g}", layers=4)
    for fault, other in zip(plain, more, strict=True):
        np.testing.assert_allclose(other.rate, np.asarray(fault.rate) * times)
        assert (other.what, other.site, other.when) == (fault.what, fault.site, fault.when)
    for fault in nodes.node_faults("node11,times=1e6", layers=4):
        assert np.max(fault.rate) <= 1  # no element is hit twice


@pytest.mark.parametrize("name", SILICON)
def test_profiles_of_silicon_are_suspects(name: str) -> None:
    assert nodes.node_faults(name, layers=3, at={"twin": 1}) == silicon_faults(name, layers=3, at={"twin": 1})
    plain, more = nodes.node_faults(name, layers=3), nodes.node_faults(f"{name},times=2", layers=3)
    assert [fault.rate for fault in more] == [2 * fault.rate for fault in plain]
    frequency, twice = (nodes.expected_frequency(f"{name}{times}", 10) for times in ("", ",times=2"))
    assert twice == {site: 2 * value for site, value in frequency.items()}


def test_nobody_is_healthier() -> None:
    assert nodes.node_faults("healthy", layers=4) == []
    assert nodes.expected_frequency("healthy", 10) == {}
    assert nodes.parse_suspect("healthy") == nodes.SuspectName("healthy")


def test_behaviour_in_time() -> None:
    assert nodes.expected_frequency("node13", 450, sync="none")["bwd/ffn"] == 0
    assert nodes.expected_frequency("node13", 900, sync="none")["bwd/ffn"] == pytest.approx(1.21e-10 / 2)
    assert nodes.expected_frequency("node13", 900)["bwd/ffn"] == pytest.approx(1.21e-10)
    assert nodes.expected_frequency("node13:uniform", 900)["bwd/ffn"] == pytest.approx(1.21e-10 / 2)
    level = published("node11")["fwd/attn"].frequency
    assert nodes.expected_frequency("node11", 1)["fwd/attn"] == pytest.approx(5 * level)
    assert nodes.expected_frequency("node11", 5000)["fwd/attn"] == pytest.approx(level, rel=0.01)
    assert nodes.expected_frequency("node14", 10)["bwd/ffn"] == pytest.approx(2.99e-9)
    assert nodes.expected_frequency("node14,times=3", 10)["bwd/ffn"] == pytest.approx(3 * 2.99e-9)
    for name in NODES:  # a run of any length is described at once
        expected = {site: pytest.approx(found.frequency) for site, found in published(name).items()}
        assert nodes.expected_frequency(name, 10**18) == expected


@pytest.mark.parametrize(
    ("name", "sync"),
    [
        ("node4,times=1e6", "compute"),
        ("node4,times=1e6", "none"),
        ("node11,times=100", "none"),
        ("node11,times=1e6", "none"),
        ("node8:uniform,times=1e8", "none"),
    ],
)
def test_no_frequency_is_above_what_is_possible(name: str, sync: nodes.Load) -> None:
    """Rates are bounded where a node is scaled: means over a million draws, exact to a percent."""
    u = np.random.default_rng(0).random(1_000_000)
    expected = nodes.expected_frequency(name, 10**9, sync=sync)
    for fault in nodes.node_faults(name, layers=16, sync=sync):
        share = (1 + fault.what.few) * u**fault.what.few if isinstance(fault.what, Tailed) else np.ones_like(u)
        spike = fault.when.spike
        means = [spike * np.minimum(rate / spike * share, 1).mean() for rate in np.atleast_1d(fault.rate)]
        # Table 1 is the mean of table 6 to 4 %.
        assert expected[str(fault.site)] == pytest.approx(np.mean(means), rel=0.05)
        assert expected[str(fault.site)] <= 1


@pytest.mark.parametrize(
    "when",
    [When(), When(onset=3), When(burst=4.0, decay=7.0), When(onset=2, burst=1.5, decay=1e-9), When(end=5, burst=2.0),
     When(onset=4, end=9, burst=2.0, decay=math.inf), When(burst=0.5, decay=1e300)],
)  # fmt: skip
def test_the_average_is_that_of_the_steps(when: When) -> None:
    for steps in (0, 1, 2, 5, 9, 40):
        mean = np.mean([when.mean(step) for step in range(steps)]) if steps else 0.0
        assert when.average(steps) == pytest.approx(mean, rel=1e-12)


def poisson_below(count: int, mean: float) -> float:
    """P(X <= count)."""
    return sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1))


@pytest.mark.parametrize(("name", "events"), [("node15", 5), ("node14", 1), ("node4", 3), ("node7", 90)])
def test_the_interval_of_rates_is_exact(name: str, events: int) -> None:
    low, high = (limit * events for limit in nodes.rate_interval(name))
    assert 1 - poisson_below(events - 1, low) == pytest.approx(0.025)
    assert poisson_below(events, high) == pytest.approx(0.025)


def test_what_departs_from_the_published_counts() -> None:
    low, high = nodes.rate_interval("node15")
    for times, where in ((low * 0.99, "outside"), (low * 1.01, "inside"), (high * 0.99, "inside"), (1e6, "outside")):
        told = nodes.SuspectName("node15", times=times).departs()
        assert f"multiplied by {times:g}, a factor {where} the 95 % interval" in told
        assert f"published counts allow, {low:.3g} to {high:.3g}" in told
    assert nodes.SuspectName("node15").departs() == ""
    assert nodes.SuspectName("silicon:gpu", times=5.0).departs() == ""  # of which no counts are published
    low, high = nodes.rate_interval("node2")  # nothing was seen: up to -ln 0.025 elements, of ln 2 that are simulated
    assert (low, high) == (0, pytest.approx(-math.log(0.025) / math.log(2)))
    low, high = nodes.rate_interval("node1")  # in all of the 4,500 steps
    assert (low, high) == (pytest.approx(1 - 1.96 / math.sqrt(STEPS), rel=1e-3), pytest.approx(1.03, rel=1e-2))


@pytest.mark.parametrize("layers", [1, 3, 5, 32])
def test_resampling_keeps_mean_and_maximum(layers: int) -> None:
    values = np.arange(16.0) ** 2
    np.testing.assert_allclose(nodes.mean_by_layer(values, layers).mean(), values.mean())
    assert nodes.largest_by_layer(values, layers).max() == values.max()


@pytest.mark.parametrize("name", ["node0", "node16", "nodeX", "", "node11;times=3"])
def test_unknown_suspects(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown suspect '.*expected healthy, one of node1 .* or silicon:gpu"):
        nodes.node_faults(name, layers=4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("silicon:GPU", "unknown profile 'silicon:GPU'; expected one of silicon:gpu"),
        ("Node 11", "lower case, without spaces"),
        ("healthy,times=3", "no rates to multiply"),
    ],
)
def test_near_names_are_told_what_is_meant(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        nodes.node_faults(name, layers=4)


@pytest.mark.parametrize("layers", [0, -1, 2.5])
def test_layers_are_whole(layers: Any) -> None:
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        nodes.node_faults("node11", layers=layers)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("node11:foo", "suspect 'node11:foo': unknown model 'foo'; expected tailed or uniform, as in node11:uniform"),
        ("healthy:uniform", "suspect 'healthy:uniform': unknown model 'uniform'"),
        ("node11,speed=2", "suspect 'node11,speed=2': unknown key 'speed'; suspect node11 takes times"),
        ("node11,times=x", "suspect 'node11,times=x': times=x: expected a number"),
        ("node11:uniform,times=0", "suspect 'node11:uniform,times=0': times=0: expected a positive number"),
        ("silicon:gpu,times=nan", "times=nan: expected a positive number"),
        ("node4,times=-1", "times=-1: expected a positive number"),
        ("node4,times", "'times' is not of the form key=value; write 'node4(times=...)'"),
    ],
)
def test_what_a_suspect_cannot_be(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        nodes.parse_suspect(name)
    assert "\n" not in str(caught.value)


def test_figures_by_layer_are_those_of_the_study() -> None:
    for name in NODES:
        tables, known = published_layers(name), published(name)
        assert set(tables) == {site for site, figures in known.items() if figures.frequency}
        for site, figures in tables.items():
            assert figures.frequency.shape == figures.severity.shape == (16,)
            assert ((figures.frequency > 0) == (figures.severity > 0)).all()
            # Three digits each, and one figure that differs by 2 %.
            assert figures.frequency.mean() == pytest.approx(known[site].frequency, rel=0.006)
            assert figures.severity.max() == pytest.approx(known[site].severity, rel=0.022)
            assert figures.counts == pytest.approx(figures.frequency / 2.39e-14)
    # Rows of appendix C: node 15 has five elements in layers 6, 13 and 16.
    assert published_layers("node15")["bwd/ffn"].counts.round().nonzero()[0].tolist() == [5, 12, 15]


def test_noise_and_disagreement_are_those_of_the_study() -> None:
    noise = {name: published_noise(name) for name in NODES}
    assert max(noise, key=noise.__getitem__) == "node11"  # 5.1 %, the abstract's
    assert noise["node11"] == 0.051
    assert noise["node3"] == 1.34e-15
    assert sorted(noise.values())[1] == 0.000416
    for name in NODES:
        shares = published_disagreement(f"{name}:uniform")
        assert set(shares) == {"CosmosQA", "MathQA", "ScienceQA", "OpenbookQA", "BoolQ", "RACE"}
        assert all(0 <= share <= 1 for share in shares.values())
        assert shares == published_disagreement(name)
    assert set(published_disagreement("node2").values()) == {0.0}
    assert published_disagreement("node6")["CosmosQA"] == 1.0  # a loss that is no number
    assert (published_accuracy("node6")["RACE"], published_accuracy("healthy")["RACE"]) == (0.0, 0.8747)
    assert published_disagreement("another order")["MathQA"] == 0.5675
    for read in (published, published_layers, published_noise, published_disagreement):
        with pytest.raises(ValueError, match="unknown node 'node16'"):
            read("node16")


def smallest(hits: float, steps: int, few: float, runs: int, rng: np.random.Generator) -> np.ndarray:
    """Smallest draw of the steps that hit anything, in those of many runs in which any does."""
    u = rng.random((runs, steps))
    hit = rng.poisson(hits * (1 + few) * u**few) > 0
    found = np.where(hit, u, np.inf).min(1)
    return np.asarray(found[np.isfinite(found)])


@pytest.mark.parametrize(("hits", "steps"), [(1e-3, 30), (0.02, 300), (1.0, 50), (1e4, 300), (3.0, 1)])
@pytest.mark.parametrize("few", [0.0, 0.7, 2.0])
def test_smallest_draws_are_those_of_simulated_runs(hits: float, steps: int, few: float) -> None:
    """Quantiles are within what 99.9 % of samples keep (Kolmogorov), and half of one of the hundred.

    For a single step the formula's exponential, where it should be a power, is exact in neither: 0.1 is allowed.
    """
    [quantiles] = smallest_draws(np.asarray([hits]), steps=steps, few=few)
    drawn = smallest(hits, steps, few, 100_000 if hits < 1e-2 else 5000, np.random.default_rng(0))
    below = (drawn[:, None] <= quantiles).mean(0)
    distance = np.abs(below - (np.arange(100) + 0.5) / 100).max()
    assert distance < 1.95 / math.sqrt(drawn.size) + 0.005 + (0.1 if steps == 1 else 0.0)


@given(
    st.lists(st.floats(-9, 12), min_size=1, max_size=4),
    st.integers(1, 100_000),
    st.floats(0, 5),
)
def test_smallest_draws_are_quantiles(powers: list[float], steps: int, few: float) -> None:
    hits = 10.0 ** np.sort(powers)
    found = smallest_draws(hits, steps=steps, few=few)
    assert found.shape == (len(hits), 100)
    assert ((found > 0) & (found <= 1)).all()
    assert (np.diff(found, axis=1) >= 0).all()
    # More hits or steps leave smaller draws; rounding and the grid of u allow for a thousandth.
    assert (np.diff(np.log(found), axis=0) < 1e-3).all()
    longer = smallest_draws(hits, steps=2 * steps, few=few)
    assert (longer <= found * (1 + 1e-3)).all()


def largest_of_runs(
    hits: float, *, steps: int, cells: int, tail: float, few: float, runs: int, rng: np.random.Generator
) -> np.ndarray:
    """The largest severity of runs: means of the elements of each cell, the largest of cells and steps."""
    found = np.zeros(runs)
    for run in range(runs):
        u = rng.random(steps)
        counts = rng.poisson(hits * (1 + few) * u**few / cells, (cells, steps))
        # The mean of n uniform numbers: exactly for a few, normal for many.
        sums = np.where(
            counts < 30,
            2
            * np.cumsum(np.concatenate([np.zeros((1, cells, steps)), rng.random((30, cells, steps))]), 0)[
                np.minimum(counts, 29), np.arange(cells)[:, None], np.arange(steps)
            ],
            counts + np.sqrt(counts / 3) * rng.standard_normal((cells, steps)),
        )
        means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        found[run] = np.max(u**-tail * means.max(0))
    return found


@pytest.mark.parametrize(
    ("hits", "few", "tail"),
    [(0.01, 0.0, 0.5), (50.0, 0.0, 0.5), (1.0, 1.7, 1.17), (50.0, 1.7, 1.17), (5000.0, 1.7, 1.17), (8.0, 0.7, 1.0),
     (5000.0, 0.7, 0.0)],
)  # fmt: skip
def test_the_least_severity_is_recovered(hits: float, few: float, tail: float) -> None:
    """Five standard errors of the mean logarithm over 400 runs, and a quarter for what is taken as simpler than it is.

    These are `largest_mean` and that the worst step is the one with the smallest draw.
    """
    least, steps, cells = 0.037, 60, 8
    rng = np.random.default_rng(0)
    runs = largest_of_runs(hits, steps=steps, cells=cells, tail=tail, few=few, runs=400, rng=rng)
    found = least_severity(least * runs, np.full(400, hits), steps=steps, cells=cells, tail=tail, few=few)
    scatter = np.log(runs[runs > 0]).std() / math.sqrt((runs > 0).sum())
    assert abs(math.log(found / least)) < 5 * scatter + 0.25


@given(st.floats(1e-6, 1e6), st.floats(-3, 8), st.floats(0, 3), st.floats(0, 2))
@settings(max_examples=30)
def test_severities_scale(factor: float, power: float, few: float, tail: float) -> None:
    """What is so many times as severe has so much higher a least one, and layers without a hit say nothing."""
    rng = np.random.default_rng(0)
    largest, hits = rng.random(5) + 0.1, np.full(5, 10.0**power)

    def fit(largest: np.ndarray, hits: np.ndarray) -> float:
        return least_severity(largest, hits, steps=100, cells=16, tail=tail, few=few)

    known = fit(largest, hits)
    assert fit(factor * largest, hits) == pytest.approx(factor * known)
    silent = np.zeros(1)
    assert fit(np.concatenate([largest, silent]), np.concatenate([hits, silent])) == pytest.approx(known)
    assert fit(np.concatenate([largest, silent]), np.concatenate([hits, hits[:1]])) == pytest.approx(known)
    assert known <= largest.max() * (1 + 1e-9)  # none of these is below the least


@pytest.mark.parametrize("cells", [2, 16, 512])
@pytest.mark.parametrize("each", [0.05, 0.5, 1.0, 3.0, 30.0, 3000.0])
def test_the_largest_mean_is_nearly_that_of_simulated_cells(cells: int, each: float) -> None:
    """To 20 %, which is little beside a tail: its draws scatter by a factor of three from run to run."""
    rng = np.random.default_rng(0)
    hits = max(1, round(cells * each))
    found = []
    for _ in range(100):
        if hits > 100 * cells:
            means = 1 + rng.standard_normal(cells) / math.sqrt(3 * hits / cells)
        else:
            of = rng.integers(0, cells, hits)
            counts = np.bincount(of, minlength=cells)
            sums = np.bincount(of, 2 * rng.random(hits), minlength=cells)
            means = sums[counts > 0] / counts[counts > 0]
        found.append(means.max())
    [expected] = largest_mean(np.asarray([float(hits)]), cells)
    assert expected == pytest.approx(np.mean(found), rel=0.2)


@given(st.floats(-2, 12), st.integers(2, 4096))
def test_the_largest_mean_is_possible(power: float, cells: int) -> None:
    [found] = largest_mean(np.asarray([10.0**power]), cells)
    assert 1 <= found <= 2
