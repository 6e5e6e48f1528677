"""Detections: simulated faults of one of two devices, in training under a guard; which layers find them, and how soon.

For the fifteen nodes of the published study, whose faults strike matrix products, and for faults of production reports,
the mean time to the first finding is compared with the formula of `sdc.guarding.expected_delay`. The share of checks
that find the fault is measured beforehand, by checks alone. Rates at which faults would be too rare or too frequent for
this are multiplied by the stated factor.
"""

import ctypes
import dataclasses
import itertools
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sdc
from sdc.faults import BitFlip, Extreme, Fault, Lattice, Scale
from sdc.guarding import Checksums, Detection, Layer, Recomputation, Replay, Spikes, State, expected_delay, schedule
from sdc.nodes import NODES, node_faults
from sdc.program import direction, products
from sdc.records import prepare
from sdc.train.programs import TrainConfig, initial_state, place, plain, sharded
from sdc.train.specs import submodule_products
from tests.train.runs import MINI

from .tally import Tally

CONFIG: TrainConfig = MINI.of_type(None, "layer")
ONSET = 1000  # the step number from which faults strike; healthy steps have a smaller one
WARM = 320  # steps until the schedule is steady
MOST = 200  # steps of a trial
SELDOM = 0.03  # share of the checks below which a trial does not wait for a layer
ALONE = 300  # checks alone, for the share that finds the fault
WRONG_STEPS = (0.06, 0.35)  # share of the computations of a step that are to be wrong
PRODUCTS = products & direction("fwd", "bwd", "remat")
SUBJECTS: dict[str, Callable[[float], list[Fault]]] = {
    "band of values": lambda times: [Fault(BitFlip(bits=(20,)), 1e-6 * times, PRODUCTS, band=(0.25, 0.5))],
    "neighbours": lambda times: [Fault(Scale(1.5), 1e-7 * times, PRODUCTS, pattern=Lattice(4, 16, 16))],
    "three outcomes": lambda times: [Fault(Extreme(), 1e-7 * times, PRODUCTS)],
    "saved value": lambda times: [Fault(BitFlip(), 1e-7 * times, direction("saved"))],
    "memory at rest": lambda times: [],
    **{name: (lambda times, name=name: _node(name, times)) for name in NODES},
}


def _node(name: str, times: float) -> list[Fault]:
    return node_faults(f"{name}(times={times!r})", layers=2, where=submodule_products, sync="none")


class Trials:
    """A guard over a step with the faults of one subject."""

    def __init__(self, faults: list[Fault], seed: int) -> None:
        faults = [
            dataclasses.replace(
                one, at={"data": 1}, when=dataclasses.replace(one.when, onset=ONSET, burst=0.0)
            )
            for one in faults
        ]  # fmt: skip
        self.draw, self.keys = np.random.default_rng(seed), itertools.count(1)
        work = sharded(CONFIG)
        self.placement = place(twins=None, data=2, model=1, devices=jax.devices()[:2])
        healthy = plain(work, self.placement)

        def faulty(state: Any, tokens: Any, key: Any, when: Any) -> Any:
            return sdc.inject(healthy, faults)(sdc.Moment(key, when), state, tokens)

        self.step = jax.jit(lambda *args: faulty(*args)[0])
        self.events = jax.jit(lambda *args: faulty(*args)[1])
        self.layers: list[Layer] = [Recomputation(), Checksums(), State(seed), Replay(), Spikes()]
        self.found: list[Detection] = []
        self.watch = sdc.guard(
            self.step, self.placement.mesh, budget=0.9, layers=self.layers, seed=seed, on_finding=self.found.append,
            rekey=lambda state, tokens, key, when: (state, tokens, jax.random.fold_in(key, next(self.keys)), when),
        )  # fmt: skip
        self.state = initial_state(work, self.placement, seed)

    def arguments(self, *, active: bool) -> tuple[Any, ...]:
        shape = (CONFIG.microsteps, CONFIG.batch_size, CONFIG.sequence_length + 1)
        tokens = self.draw.integers(0, CONFIG.model.vocab_size, shape).astype(np.int32)
        placed = jax.device_put(tokens, self.placement.sharding(jax.P(None, "data", None)))
        return placed, jax.random.key(next(self.keys)), jnp.int32(ONSET if active else 0)

    def share_of_wrong_steps(self, count: int = 100) -> float:
        wrong = 0
        for _ in range(count):
            events = self.events(self.state, *self.arguments(active=True))
            wrong += any(int(np.sum(event.changed)) for event in events.values())
        return wrong / count

    def advance(self, *, active: bool) -> None:
        self.state, _ = self.watch(self.state, *self.arguments(active=active))
        jax.block_until_ready(self.state)  # simulated devices share a pool of threads
        self.watch.idle()

    def finds(self, layer: Layer) -> float:
        """Returns the share of a layer's checks that find the fault."""
        found = 0
        for _ in range(ALONE):
            given = self.state, *self.arguments(active=True)
            call = self.watch._call(given, {})
            looked = layer.before(call)
            if isinstance(layer, Replay):
                layer.after(self.step(*given), None)
                looked = layer.idle()
            found += any(one.proof for one in layer.judge(looked, 0))
        return found / ALONE

    def flip(self) -> None:
        """Flips a bit of the second device's copy of the state."""
        leaves = [leaf for leaf in jax.tree.leaves(self.state) if leaf.nbytes >= 64]
        sizes = np.array([leaf.nbytes for leaf in leaves], float)
        shard = leaves[self.draw.choice(len(leaves), p=sizes / sizes.sum())].addressable_shards[1].data
        place = int(self.draw.integers(shard.nbytes))
        address = shard.unsafe_buffer_pointer() + place
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))[0] ^= 1 << int(self.draw.integers(8))


def run(count: int, seed: int) -> Tally:
    """Runs `count` trials of each subject."""
    prepare(cpu_devices=2, cpu_threads=os.cpu_count(), only_cpu=True)
    schedule.DENSE, schedule.CREDIT = 1.0, 0  # so that windows keep their length after a finding
    tally, ratios = Tally("detections"), defaultdict[str, list[float]](list)
    for number, name in enumerate(SUBJECTS):
        for layer, found in _subject(name, count, seed + number, tally).items():
            ratios[layer] += found
    for layer, found in ratios.items():
        spread = 1.96 * np.std(found) / np.sqrt(len(found))
        print(
            f"  {layer}: {np.mean(found):.2f} ± {spread:.2f} of the stated delay, over {len(found)} findings",
            flush=True,
        )
    return tally


def _subject(name: str, count: int, seed: int, tally: Tally) -> dict[str, list[float]]:
    """Runs the trials of a subject; returns delays by layer, relative to the formula."""
    times, wrong, at_rest = 1.0, 1.0, name == "memory at rest"
    trials = Trials(SUBJECTS[name](times), seed)
    for _ in range(0 if at_rest else 6):  # until the rate is one at which trials take a few checks
        wrong = trials.share_of_wrong_steps()
        if WRONG_STEPS[0] <= wrong <= WRONG_STEPS[1]:
            break
        times *= min(1e4, max(1e-4, 0.15 / max(wrong, 1e-3))) if wrong < 0.9 else 0.02
        trials = Trials(SUBJECTS[name](times), seed)
    for _ in range(WARM):
        trials.advance(active=False)
    false = [one for one in trials.found if one.proof]
    tally.seen["suspicions of healthy steps"] += len(trials.found) - len(false)
    able = [layer for layer in trials.layers if layer.share and not layer.why_not and (layer.bounds or at_rest)]
    alone = {layer.name: trials.finds(layer) for layer in able if layer.bounds and not at_rest}
    before = {one.name: dict(one.steps) for one in trials.watch.report().layers}
    healthy, delays = jax.tree.map(jnp.copy, trials.state), defaultdict[str, list[float]](list)
    for _ in range(count):
        trials.state = jax.tree.map(jnp.copy, healthy)
        for _ in range(int(trials.draw.integers(5, 25))):
            trials.advance(active=False)
        trials.watch.report()
        trials.found.clear()
        start, firsts = trials.watch.steps, dict[str, int]()
        awaited = {layer.name for layer in able if alone.get(layer.name, 1) >= SELDOM}
        while trials.watch.steps < start + MOST and not firsts.keys() >= awaited:
            if at_rest:
                trials.flip()
            trials.advance(active=True)
            if not at_rest:  # the training does not go on with wrong numbers, which would hide later ones
                trials.state = jax.tree.map(jnp.copy, healthy)
            trials.watch.report()
            for one in trials.found:
                firsts.setdefault("state" if one.layer in ("at rest", "replicas") else one.layer, one.step - start)
        for layer, first in firsts.items():
            delays[layer].append(first + 0.5)
        tally.trials += 1
    for one in false:
        tally.fail("false corrupt", f"{name}, healthy: {one}")
    print(f"  {name}: rate × {times:.3g}, {wrong:.0%} of computations wrong", flush=True)
    relative: dict[str, list[float]] = {}
    for report in trials.watch.report().layers:
        found, share = delays.get(report.name, []), alone.get(report.name)
        line = f"    {report.name}: {len(found)} of {count} found"
        if found and share:
            steps = {window: number - before[report.name].get(window, 0) for window, number in report.steps.items()}
            checked = sum(number / window for window, number in steps.items() if window)
            expected = expected_delay(sum(steps.values()) / checked, share)
            spread = 1.96 * np.std(found) / np.sqrt(len(found))
            line += (
                f", {share:.0%} of checks find it, after {np.mean(found):.1f} ± {spread:.1f} steps "
                f"(formula {expected:.1f})"
            )
            relative[report.name] = [one / expected for one in found]
        print(line, flush=True)
        tally.seen[f"found by {report.name}"] += len(found)
    return relative
