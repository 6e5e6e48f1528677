"""What is predicted of a rehearsal is what comes of it."""

import math

import msgspec
import numpy as np
import pytest

from sdc.burnin.programs import Programs
from sdc.burnin.rehearsal import (
    SITES,
    chance_of_round,
    chance_of_run,
    faults_of,
    matching,
    node_outlooks,
    rehearsed,
    rounds_for,
)
from sdc.burnin.results import Tally
from sdc.burnin.rounds import burn_in
from sdc.burnin.workloads.workload import BurninWorkload
from sdc.faults import BitFlip, Fault, Tailed, When
from sdc.nodes.published_tables import NODES
from sdc.settings import SettingError


@pytest.mark.parametrize("spike", [1.0, 0.1])
@pytest.mark.parametrize("few", [0.0, 1.7])
def test_the_chance_of_a_run_is_that_of_its_model(spike: float, few: float) -> None:
    """Against a simulation of 200,000 runs in plain NumPy: within five standard deviations."""
    random, n, rate = np.random.default_rng(0), 500, 1e-3
    what = Tailed(severity=0.1, tail=1.0, few=few) if few else BitFlip()
    fault = Fault(what, rate=rate, site="*", when=When(spike=spike))
    u = random.random(200_000)
    rates = np.minimum(rate / spike * (1 + few) * u**few, 1.0)
    seen = (random.random(u.size) < spike) & (random.binomial(n, rates) > 0)
    chance = chance_of_run(fault, n)
    assert abs(seen.mean() - chance) < 5 * math.sqrt(chance * (1 - chance) / u.size)


def test_rounds_until_a_fault_is_seen(programs: Programs, few: list[BurninWorkload]) -> None:
    """Of 60 burn-ins of one round: as many find it as predicted, within four standard deviations."""
    work = [workload for workload in few if workload.family == "memory"]
    fault = Fault(BitFlip(), rate=0.01, site="memory/*", at={"device": 2})
    chance = chance_of_round([fault], work)
    assert 0.4 < chance < 0.6
    found = sum(
        bool(burn_in(work, programs.devices, rounds=1, inject=[fault], programs=programs, seed=seed).findings)
        for seed in range(60)
    )
    assert abs(found - 60 * chance) < 4 * math.sqrt(60 * chance * (1 - chance))


def test_a_fault_hits_the_workloads_of_its_name_on_its_device(few: list[BurninWorkload]) -> None:
    (work,) = (workload for workload in few if workload.family == "memory")
    there, elsewhere, everywhere = (
        Fault(BitFlip(), rate=rate, site=site, at=at)
        for rate, site, at in (
            (0.1, "memory/*", {"device": 2}), (0.2, "ordering/*", {"device": 2}), (0.3, "memory/*", {})
        )
    )  # fmt: skip
    for device, rates in ((2, [0.1, 0.3]), (1, [0.3])):
        hits = faults_of([there, elsewhere, everywhere], work, device)
        assert [fault.rate for fault in hits] == rates
        assert all((fault.at, fault.site) == ({}, "*") for fault in hits)


def test_every_node_strikes_workloads() -> None:
    for node in NODES:
        faults = rehearsed(node, (), 3)
        assert {fault.site for fault in faults} <= set(SITES.values())
        assert all(fault.at == {"device": 3} for fault in faults)
        names = ["attention/x", "matrix/x", "training/x"]
        assert matching(faults, names) == faults
        with pytest.raises(SettingError, match="matches none of the selected workloads, such as ordering/x"):
            matching(faults, ["ordering/x"])
    assert rehearsed("healthy", (), 3) == matching([], []) == []
    with pytest.raises(SettingError, match="both simulate"):
        rehearsed("node1", ["bitflip,rate=1"], 0)


def test_rounds_for_a_confidence() -> None:
    assert [rounds_for(chance) for chance in (0.0, 0.5, 0.95, 1.0)] == [math.inf, 5, 1, 1]
    chances = [0.01, 0.1, 0.3]
    for chance in chances:
        assert 1 - (1 - chance) ** rounds_for(chance) >= 0.95 > 1 - (1 - chance) ** (rounds_for(chance) - 1)


def test_outlooks_are_those_of_rehearsed_rounds(few: list[BurninWorkload]) -> None:
    """Of the device that was checked least; what a device reads as zeros or ran while throttled does not count."""
    rounds = {0: 3, 1: 7}
    tallies = [
        Tally(workload=each.name, device=device, family=each.family, work=1.0, runs=runs, elements=runs * each.elements)
        for device, runs in rounds.items() for each in few
    ]  # fmt: skip
    found = {one.node: one for one in node_outlooks(tallies)}
    assert list(found) == list(NODES)
    for node, one in found.items():
        chance = chance_of_round(rehearsed(node, (), 0), few)
        assert one.probability == pytest.approx(1 - (1 - chance) ** 3)
        assert 0 <= one.low <= one.probability <= one.high <= 1
    assert found["node2"].low == 0  # nothing was seen of it
    for attribute in ("void", "zeros"):
        less = [msgspec.structs.replace(one, **{attribute: one.device == 1}) for one in tallies]
        assert {one.probability for one in node_outlooks(less)} == {0.0}
    assert {one.probability for one in node_outlooks([])} == {0.0}
