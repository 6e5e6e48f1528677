"""Watches: healthy training steps under a guard that checks every one of them; nothing may be found.

The forms vary in their type, mesh, recomputation and seed; every step is new data.
"""

import dataclasses
import itertools
import os
from typing import Any

import jax
import numpy as np

import sdc
from sdc.guarding import Layer, Recomputation, Ring, State
from sdc.records import prepare
from sdc.train import get_config
from sdc.train.programs import initial_state, place, plain, sharded

from .tally import Tally

FORMS = tuple(itertools.product(("float32", "bfloat16"), ("layer", "ffn"), ((1, 1), (2, 1), (1, 2), (2, 2))))
CHUNK = 500  # steps of one form
DEVICES = 4


def run(count: int, seed: int) -> Tally:
    """Runs `count` steps."""
    prepare(cpu_devices=DEVICES, cpu_threads=os.cpu_count(), only_cpu=True)
    tally = Tally("watches")
    for number, start in enumerate(range(0, count, CHUNK)):
        dtype, remat, (data, model) = FORMS[(seed + number) % len(FORMS)]
        steps = min(CHUNK, count - start)
        name = f"{dtype}, {remat} recomputed, {data} × {model} devices, seed {seed + number}"
        report = watched(dtype, remat, data, model, seed + number, steps)
        tally.trials += steps
        tally.seen["steps"] += steps
        for layer in report.layers:
            tally.seen[f"checks of {layer.name}"] += layer.runs
        for finding in report.findings:
            tally.fail("false corrupt", f"{name}: {finding}")
        print(f"  watches: {tally.trials} of {count}", flush=True)
    return tally


def watched(dtype: Any, remat: Any, data: int, model: int, seed: int, steps: int) -> Any:
    """Runs healthy steps of `tiny` with random tokens, and returns the guard's report."""
    config = get_config("tiny").of_type(dtype, remat)
    config = dataclasses.replace(config, sequence_length=64)
    work = sharded(config)
    placement = place(twins=None, data=data, model=model, devices=jax.devices()[: data * model])
    layers: list[Layer] = [Recomputation(), State(seed), Ring(placement.mesh, "data")]
    watch = sdc.guard(jax.jit(plain(work, placement)), placement.mesh, budget=0.99, layers=layers, seed=seed)
    state, draw = initial_state(work, placement, seed), np.random.default_rng(seed)
    shape = (config.microsteps, config.batch_size, config.sequence_length + 1)
    for _ in range(steps):
        tokens = draw.integers(0, config.model.vocab_size, shape).astype(np.int32)
        state, _ = watch(state, jax.device_put(tokens, placement.sharding(jax.P(None, "data", None))))
        jax.block_until_ready(state)  # simulated devices share a pool of threads
    return watch.report()
