"""Simulated suspects carry the published figures."""

import math

import numpy as np
import pytest

from sdc.faults import nodes
from sdc.faults.fault import When


@pytest.mark.parametrize("name", nodes.NODES)
@pytest.mark.parametrize("layers", [2, 4, 16, 24])
def test_nodes_reproduce_tables_1_and_2(name: str, layers: int) -> None:
    figures = nodes.published(name)
    assert set(figures) == set(nodes.SUBMODULES)
    faults = {fault.site: fault for fault in nodes.node_faults(name, layers=layers, at={"twin": 1})}
    for site, published in figures.items():
        if published.frequency == 0:
            assert site not in faults
            continue
        assert np.size(faults[site].rate) == layers
        # The published figures have three digits; the layers' mean reproduces them to 4 %.
        np.testing.assert_allclose(np.mean(faults[site].rate), published.frequency, rtol=0.04)
        np.testing.assert_allclose(np.max(faults[site].what.severity), 2 * published.severity, rtol=0.04)
        assert faults[site].at == {"twin": 1}


def test_every_published_frequency_is_simulated() -> None:
    silent = {name for name in nodes.NODES if not nodes.node_faults(name, layers=4)}
    assert silent == {"node2", "node3", "node12"}


def test_behaviour_in_time() -> None:
    assert nodes.expected_frequency("node13", 450)["bwd/ffn"] == 0
    assert nodes.expected_frequency("node13", 900)["bwd/ffn"] == pytest.approx(1.21e-10 / 2)
    level = nodes.published("node11")["fwd/attn"].frequency
    assert nodes.expected_frequency("node11", 1)["fwd/attn"] == pytest.approx(5 * level)
    assert nodes.expected_frequency("node11", 5000)["fwd/attn"] == pytest.approx(level, rel=0.01)
    assert nodes.expected_frequency("node14", 10)["bwd/ffn"] == pytest.approx(2.99e-9)
    assert nodes.expected_frequency("healthy", 10) == {}
    for name in nodes.NODES:  # a run of any length is described at once
        figures = nodes.published(name)
        expected = {site: pytest.approx(found.frequency) for site, found in figures.items()}
        assert nodes.expected_frequency(name, 10**18) == expected


@pytest.mark.parametrize(
    "when",
    [When(), When(onset=3), When(burst=4.0, decay=7.0), When(onset=2, burst=1.5, decay=1e-9), When(end=5, burst=2.0),
     When(onset=4, end=9, burst=2.0, decay=math.inf), When(burst=0.5, decay=1e300)],
)  # fmt: skip
def test_the_average_is_that_of_the_steps(when: When) -> None:
    for steps in (0, 1, 2, 5, 9, 40):
        mean = np.mean([when.mean(step) for step in range(steps)]) if steps else 0.0
        assert when.average(steps) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("layers", [1, 3, 5, 32])
def test_resampling_keeps_mean_and_maximum(layers: int) -> None:
    values = np.arange(16.0) ** 2
    np.testing.assert_allclose(nodes.mean_by_layer(values, layers).mean(), values.mean())
    assert nodes.largest_by_layer(values, layers).max() == values.max()


@pytest.mark.parametrize("name", ["node0", "node16", "nodeX", ""])
def test_unknown_suspects(name: str) -> None:
    with pytest.raises(ValueError, match="expected healthy or one of node1 "):
        nodes.node_faults(name, layers=4)
