"""Published figures beside the simulated nodes': they are told to agree where they do, and only there."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdc
from sdc.faults.fault import Fault, When
from sdc.faults.kinds import Relative, Tailed
from sdc.nodes import simulated_nodes as nodes
from sdc.nodes.published_tables import SUBMODULES, published, published_layers
from sdc.train.studies import _nodes as comparisons
from sdc.train.studies._nodes import compare_figure, compare_tables
from sdc.train.studies.measurements import Compared

RUNS = 30
DENSE, RARE, SILENT = "node11", "node4", "node12"


@functools.cache
def compared(name: str) -> list[Compared]:
    return compare_tables(name, runs=RUNS)


def rows(name: str, quantity: str) -> dict[str, Compared]:
    return {row.place: row for row in compared(name) if row.quantity == quantity}


@pytest.mark.parametrize("name", [DENSE, RARE])
def test_every_published_figure_has_its_row(name: str) -> None:
    for place, row in (rows(name, "frequency") | rows(name, "severity")).items():
        known = published(name)[place]
        assert row.published == (known.severity if row.quantity == "severity" else known.frequency)
    assert set(rows(name, "frequency")) == set(rows(name, "severity")) == set(SUBMODULES)
    for site, figures in published_layers(name).items():
        for quantity, table in (("frequency by layer", figures.frequency), ("severity by layer", figures.severity)):
            found = rows(name, quantity)
            assert [found[f"{site}, layer {layer}"].published for layer in range(1, 17)] == table.tolist()
        largest = [row.simulated for place, row in rows(name, "severity by layer").items() if place.startswith(site)]
        worst = rows(name, "severity")[site].simulated
        assert worst is not None
        assert worst >= np.max(largest)  # in each run the worst of the layers
    assert len(compared(name)) == 4 * (2 + 2 * 16)
    for row in compared(name):
        assert row.node == name
        assert row.low is not None
        assert row.high is not None
        assert row.simulated is not None
        assert row.published is not None
        assert row.low <= row.simulated <= row.high
        assert row.agrees == (row.low <= row.published <= row.high)


@pytest.mark.parametrize("name", [DENSE, RARE])
def test_simulated_nodes_agree(name: str) -> None:
    """Intervals of 95 % from 30 runs are short: of layers, 90 % of the frequencies and 85 % of the severities."""
    assert all(row.agrees for row in rows(name, "frequency").values())
    by_layer = [row.agrees for row in rows(name, "frequency by layer").values()]
    assert np.mean(by_layer) >= 0.9
    assert np.mean([row.agrees for row in rows(name, "severity by layer").values()]) >= 0.85
    # A dense node's mean over 4,500 steps hardly scatters, that of one in some steps by more than its size.
    row = rows(name, "frequency")["fwd/attn"]
    assert row.low is not None
    assert row.high is not None
    spread = row.high / max(row.low, 1e-300)
    assert spread < 1.15 if name == DENSE else spread > 2


def test_a_silent_node_agrees_by_silence() -> None:
    assert [(row.place, row.quantity) for row in compared(SILENT)] == [(site, "frequency") for site in SUBMODULES]
    for row in compared(SILENT):
        assert (row.published, row.simulated, row.agrees, row.note) == (0.0, 0.0, True, "nothing seen")


def test_the_same_seed_gives_the_same_comparison() -> None:
    assert compare_tables("node15", runs=10) == compare_tables("node15", runs=10)
    assert compare_tables("node15", runs=10) != compare_tables("node15", runs=10, seed=1)


def test_wrong_rates_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(name: str, **settings: Any) -> list[Fault]:
        return nodes.node_faults(f"{name},times=2", **settings)

    monkeypatch.setattr(comparisons, "node_faults", twice)
    found = [row for row in compare_tables(DENSE, runs=10) if row.quantity.startswith("frequency")]
    assert len(found) == 4 * 17
    assert not any(row.agrees for row in found)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_wrong_severities_do_not_agree(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = comparisons.Severities.draw

    def other(fit: Any, *given: Any) -> Any:
        return {site: (tail, factor * least) for site, (tail, least) in right(fit, *given).items()}

    monkeypatch.setattr(comparisons.Severities, "draw", other)
    found = compare_tables(DENSE, runs=10)
    assert all(row.agrees for row in found if row.quantity == "frequency")
    assert np.mean([row.agrees for row in found if row.quantity == "severity by layer"]) < 0.5


def test_the_uniform_model_is_told_from_the_node() -> None:
    """Every step as severe as the worst: of the many draws of node 1, the largest hardly scatter about one value."""
    found = compare_tables("node1:uniform", runs=10)
    assert {row.node for row in found} == {"node1"}
    assert all(row.agrees for row in found if row.quantity == "frequency")
    tailed, uniform = (
        [math.log(row.high / row.low) for row in some if row.quantity == "severity" and row.low and row.high]
        for some in (compare_tables("node1", runs=10), found)
    )
    assert max(uniform) < 0.5 < min(tailed)


def test_a_figure_is_inside_or_outside() -> None:
    simulated = np.arange(1001.0)

    def agrees(figure: float) -> bool | None:
        return compare_figure("node4", "frequency", "fwd/attn", figure, simulated).agrees

    row = compare_figure("node4", "severity", "fwd/ffn", 700.0, simulated, "a note")
    assert row.p == pytest.approx(2 * 317 / 1002)  # 685 and more, 2.2 % below the figure, and the figure
    assert row == Compared(
        "node4", "severity", "fwd/ffn", 700.0, 500.0, pytest.approx(24.45), pytest.approx(996.45), True, row.p, "a note"
    )
    # Widened by 2.2 %, because the study's own tables differ by 2.1 % in one figure.
    assert [agrees(figure) for figure in (24.4, 24.5, 996.4, 996.5)] == [False, True, True, False]


SIZE, CELLS, STEPS, BATCH = 64, 8, 30, 100


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Tailed(0.3, 0.5), 0.02, "fwd/p", when=When(spike=0.2)),
        Fault(Tailed(0.3, 1.0, 1.5), 0.05, "fwd/p", when=When(burst=3.0, decay=5.0)),
        Fault(Relative(0.6), 0.05, "fwd/p", when=When(onset=10)),
    ],
    ids=["spikes", "burst", "uniform"],
)
def test_numbers_are_those_of_a_simulation_of_elements(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of one layer, drawn without tensors, beside those of a tensor that `inject` corrupts.

    Frequencies to five standard errors. Of severities, medians and quartiles over the runs: to 30 %, beside the
    scatter of quantiles, for `largest_mean`, which is an approximation.
    """
    step = sdc.inject(lambda x: sdc.probe(x, "p"), [fault])

    def one(key: Any, now: Any) -> tuple[Any, Any]:
        change = jnp.abs(step(sdc.Moment(key, now), jnp.ones((CELLS, SIZE)))[0] - 1)
        count = jnp.sum(change > 0, 1)
        return jnp.sum(count), jnp.max(jnp.sum(change, 1) / jnp.maximum(count, 1).astype(jnp.float32))

    over_steps = jax.vmap(one, (None, 0))
    run = jax.jit(jax.vmap(over_steps, (0, None)))
    counts, severities = run(jax.random.split(jax.random.key(0), BATCH), jnp.arange(STEPS))
    frequency, severity = np.asarray(counts).mean(1) / (CELLS * SIZE), np.asarray(severities).max(1)

    for name, value in (("ELEMENTS", SIZE * CELLS), ("MICROSTEPS", 1), ("CELLS", CELLS)):
        monkeypatch.setattr(comparisons, name, value)
    rng, runs = np.random.default_rng(0), 2000
    spikes = rng.random((runs, STEPS)) < fault.when.spike
    drawn = np.full(runs, fault.what.tail if isinstance(fault.what, Tailed) else 0.0), np.full(runs, 0.3)
    monkeypatch.setattr(comparisons, "STEPS", STEPS)
    shares, largest = comparisons._layer(fault, 0, spikes, drawn, rng)

    assert abs(frequency.mean() - shares.mean()) < 5 * math.hypot(
        frequency.std() / math.sqrt(BATCH), shares.std() / math.sqrt(runs)
    )
    assert frequency.std() == pytest.approx(shares.std(), rel=5 / math.sqrt(BATCH))
    assert fault.rate is not None
    assert shares.mean() == pytest.approx(fault.rate * fault.when.average(STEPS), rel=0.1)
    order = np.sort(severity)
    for share in (0.25, 0.5, 0.75):
        # Order statistics that hold the quantile at 99.9 %.
        about = 3.3 * math.sqrt(BATCH * share * (1 - share))
        low, high = (order[int(np.clip(BATCH * share + sign * about, 0, BATCH - 1))] for sign in (-1, 1))
        assert low / 1.3 <= np.quantile(largest, share) <= high * 1.3


@pytest.mark.parametrize(("name", "figures"), [("node7", 1), ("node10", 1), ("node11", 1), ("node14", 2), ("node4", 0)])
def test_the_course_in_time_agrees(name: str, figures: int) -> None:
    assert [row.agrees for row in comparisons.compare_time(name, runs=40)] == [True] * figures


@pytest.mark.parametrize("name", ["node7", "node11", "node14"])
def test_another_course_in_time_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def steady(*args: Any, **kwargs: Any) -> list[Fault]:
        return [dataclasses.replace(fault, when=When()) for fault in nodes.node_faults(*args, **kwargs)]

    monkeypatch.setattr(comparisons, "node_faults", steady)
    assert not comparisons.compare_time(name, runs=40)[0].agrees


def test_what_was_put_in_is_not_judged() -> None:
    [row] = comparisons.compare_time("node13", runs=20)
    assert (row.simulated, row.agrees) == (450, None)
    assert "not a test" in row.note


def test_submodules_go_together_in_spikes_only() -> None:
    together = {name: comparisons.correlation(name) for name in ("node1", "node2", "node7", "node13")}
    assert together["node7"] is not None
    assert together["node7"] > 0.9
    assert together["node1"] is not None
    assert abs(together["node1"]) < 0.05
    assert together["node2"] is None
    assert together["node13"] is None  # hit at a single submodule
