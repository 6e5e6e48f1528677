"""`sdc bench guard`: what a witness and a guard cost, as ratios to the plain step."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

import sdc
from sdc.guarding import comparable, witnessed_share
from sdc.program import recomputations
from sdc.train import TrainConfig
from sdc.train.programs import initial_state, place, plain, sharded

from . import harness
from .command import BenchOptions

BARS = {
    "witness": 1.02,
    "guard_overhead": 0.01,
    "guard_overhead_upper": 0.015,
}
DEVICES = 8
CHUNK = 5  # steps of a loop with a guard, after as many without one
CHUNKS = 100


def measure(options: BenchOptions) -> dict[str, Any]:
    """Measures the witness in each dtype, and the guard in float32."""
    found: dict[str, Any] = {}
    for dtype in options.dtypes:
        config = harness.config_of(options, dtype).of_type(None, "layer")
        found[dtype] = witness_costs(config, options.steps)
    found["float32"] = found.get("float32", {}) | guard_costs(harness.config_of(options).of_type(None, "layer"))
    return found


def witness_costs(config: TrainConfig, steps: int) -> dict[str, float]:
    """Returns the time of a step with a witness, and of the comparisons alone, relative to the plain step; what is
    compared; and how many comparisons of healthy steps differ."""
    step, arguments = harness.reference_step(config)
    compared = sdc.witness(step)
    runs = harness.compiled(
        {"plain": step, "witness": compared, "witness_alone": lambda *args: compared(*args)[1]}, *arguments
    )
    _, witnessed = runs["witness"]()
    listed = recomputations(step, *arguments, where=comparable)
    return {
        **harness.ratios(harness.take_turns(runs, steps)),
        "witness_share": witnessed_share(witnessed),
        "witness_share_of_twice": listed.covered / listed.twice,
        "witness_false_alarms": sum(int(np.sum(one.differs)) for one in witnessed.values()),
    }


def guard_costs(config: TrainConfig) -> dict[str, float]:
    """Returns the overhead of a guard with the default budget on simulated devices, with an interval of 95 %.

    Simulated devices share the cores, so processor time counts. Loops with and without the guard take turns; its start,
    in which it compiles and calibrates, is excluded.
    """
    config = _with_batch(config)
    work, placement = sharded(config), place(twins=None, data=DEVICES, model=1, devices=jax.devices()[:DEVICES])
    step = jax.jit(plain(work, placement))
    state, batch = initial_state(work, placement, 0), harness.made_up_tokens(config, placement)
    watch = sdc.guard(step, placement.mesh)
    seconds: dict[str, list[float]] = {"plain": [], "guarded": []}
    states = dict.fromkeys(seconds, state)
    for number in range(CHUNKS + 1):
        for name, run in (("plain", step), ("guarded", watch)):
            started = time.process_time()
            for _ in range(CHUNK):
                states[name], _ = run(states[name], batch)
                jax.block_until_ready(states[name])  # simulated devices share a pool of threads
            if number:  # the first chunk warms up
                seconds[name].append(time.process_time() - started)
    report = watch.report()
    alone, guarded = (np.asarray(own) for own in seconds.values())
    rng = np.random.default_rng(0)
    drawn = rng.integers(CHUNKS, size=(2_000, CHUNKS))
    means = guarded[drawn].sum(1) / alone[drawn].sum(1) - 1
    return {
        "guard_overhead": float(guarded.sum() / alone.sum() - 1),
        "guard_overhead_lower": float(np.quantile(means, 0.025)),
        "guard_overhead_upper": float(np.quantile(means, 0.975)),
        "guard_overhead_stated": report.overhead,
        "guard_checks": float(sum(layer.runs for layer in report.layers)),
        "guard_findings": float(len(report.findings)),
        "guard_start_seconds": report.start_up,
        "guard_steps": float(report.steps),
    }


def _with_batch(config: TrainConfig) -> TrainConfig:
    """Returns the configuration with at least one sequence for each device."""
    return dataclasses.replace(config, batch_size=max(config.batch_size, DEVICES))


BENCHMARKS = {"guard": harness.Benchmark(measure, BARS, DEVICES)}
