"""Which of the study's fifteen nodes a burn-in, a pair and a pool catch, simulated at the published rates."""

import functools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from sdc.burnin import Programs, burn_in, chance_of_round, planned_result, rehearsed, rounds_for
from sdc.burnin.workloads import BurninWorkload, workloads
from sdc.nodes import NODES
from sdc.train import register_training
from sdc.train.studies import find_node

from .command import BenchOptions

BARS: dict[str, float] = {}
DEVICES = 3
ROUNDS = 20
STEPS = 20
TRIALS = 3
STRUCK = ("matrix", "attention", "training")
"""Families whose outputs a node's faults strike."""


def measure(options: BenchOptions) -> dict[str, Any]:
    """Rows are nodes. Of the columns:

    `quick chance`: predicted probability that a round of level quick shows the node; `quick 95 %`: predicted rounds
    until it does with 95 %; `quick found`: median round in which it did, of three simulations of at most 20 rounds, and
    `quick missed` those in which it did not. `prejob 95 %`, `acceptance 95 %`: predicted rounds of these levels.
    `pair found`, `pool found`: step in which a pair and a pool of three see it, of at most 20; -1 where they do not.
    `pair expected`: wrong elements that the model of the node predicts in as many steps.
    """
    register_training()
    devices = jax.local_devices()[:DEVICES]
    programs = Programs(devices)
    sizes = {name: workloads(name, devices, only=STRUCK) for name in ("quick", "prejob", "acceptance")}
    columns: dict[str, dict[str, float]] = {}
    for number, node in enumerate(NODES):
        print(f"{node} ({number + 1} of {len(NODES)})", file=sys.stderr, flush=True)
        faults = rehearsed(node, (), DEVICES - 1)
        chances = {name: chance_of_round(faults, found) for name, found in sizes.items()}
        row: dict[str, float] = {"quick chance": chances["quick"]}
        row |= {f"{name} 95 %": float(rounds_for(chance)) for name, chance in chances.items()}
        row |= _simulated(sizes["quick"], faults, programs)
        for name, twins in (("pair", 2), ("pool", 3)):
            seen = find_node(node, STEPS, twins=twins)
            row[f"{name} found"] = -1.0 if seen.first is None else float(seen.first)
            row[f"{name} expected"] = seen.expected
        for name, value in row.items():
            columns.setdefault(name, {})[node] = value
        jax.clear_caches()  # each node is a program of its own
    return columns


def _simulated(found: Sequence[BurninWorkload], faults: Any, programs: Programs) -> dict[str, float]:
    rounds, missed, seconds = [], 0, []
    for trial in range(TRIALS):
        result = planned_result(found, programs.devices)
        findings = result.findings
        began = time.perf_counter()
        burn_in(
            found, programs.devices, rounds=ROUNDS, inject=faults, programs=programs, seed=trial, result=result,
            stop=functools.partial(bool, findings),
        )  # fmt: skip
        seconds.append((time.perf_counter() - began) / (result.rounds + 1))
        if result.findings:
            assert all(finding.devices == (DEVICES - 1,) for finding in result.findings)
            rounds.append(result.findings[0].round + 1)
        else:
            missed += 1
    return {
        "quick found": statistics.median(rounds) if rounds else -1.0,
        "quick missed": float(missed),
        "quick s/round": statistics.median(seconds),
    }
