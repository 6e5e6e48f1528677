"""Watches: healthy training steps under a guard that checks every one of them; nothing may be found.

The forms vary in their type, mesh, recomputation and seed; every step is new data. One form is `sdc train --guard` in
two processes.
"""

import dataclasses
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sdc
from sdc.guarding import Layer, Recomputation, Ring, State
from sdc.records import prepare, read_record
from sdc.train import get_config
from sdc.train.programs import initial_state, place, plain, sharded
from tests.tools.command import several

from .tally import Tally

PROCESSES = None  # instead of a mesh
FORMS = (
    *itertools.product(("float32", "bfloat16"), ("layer", "ffn"), ((1, 1), (2, 1), (1, 2), (2, 2))),
    ("float32", "layer", PROCESSES),
)
CHUNK = 2000  # steps of one form
DEVICES = 4
BUDGET = 0.99


def run(count: int, seed: int) -> Tally:
    """Runs `count` steps."""
    prepare(cpu_devices=DEVICES, cpu_threads=os.cpu_count(), only_cpu=True)
    tally = Tally("watches")
    for number, start in enumerate(range(0, count, CHUNK)):
        dtype, remat, mesh = FORMS[(seed + number) % len(FORMS)]
        steps = min(CHUNK, count - start)
        where = "two processes" if mesh is PROCESSES else "{} × {} devices".format(*mesh)
        name = f"{dtype}, {remat} recomputed, {where}, seed {seed + number}"
        if mesh is PROCESSES:
            runs, findings = watched_processes(dtype, remat, seed + number, steps)
        else:
            runs, findings = watched(dtype, remat, *mesh, seed + number, steps)
        tally.trials += steps
        tally.seen[f"steps, {where}"] += steps
        for layer, checks in runs.items():
            tally.seen[f"checks of {layer}"] += checks
        for layer, proof, what in findings:
            tally.note(f"suspicions of {layer}") if layer == "metrics" else tally.fail(
                "false corrupt", f"{name}: {layer}: {what}{'' if proof else ' (a suspicion)'}"
            )
        print(f"  watches: {tally.trials} of {count}", flush=True)
    return tally


Findings = list[tuple[str, bool, str]]


def watched(dtype: Any, remat: Any, data: int, model: int, seed: int, steps: int) -> tuple[dict[str, int], Findings]:
    """Runs healthy steps of `tiny`, on short sequences of random tokens; returns the checks of each layer, and
    findings."""
    config = get_config("tiny").of_type(dtype, remat)
    config = dataclasses.replace(config, sequence_length=16)
    work = sharded(config)
    placement = place(twins=None, data=data, model=model, devices=jax.devices()[: data * model])
    layers: list[Layer] = [Recomputation(), State(seed), Ring(placement.mesh, "data")]
    watch = sdc.guard(jax.jit(plain(work, placement)), placement.mesh, budget=BUDGET, layers=layers, seed=seed)
    state, draw = initial_state(work, placement, seed), np.random.default_rng(seed)
    shape = (config.microsteps, config.batch_size, config.sequence_length + 1)
    for _ in range(steps):
        tokens = draw.integers(0, config.model.vocab_size, shape).astype(np.int32)
        state, _ = watch(state, jax.device_put(tokens, placement.sharding(jax.P(None, "data", None))))
        jax.block_until_ready(state)  # simulated devices share a pool of threads
    report = watch.report()
    return {layer.name: layer.runs for layer in report.layers}, [
        (one.layer, one.proof, str(one)) for one in report.findings
    ]


def watched_processes(dtype: Any, remat: Any, seed: int, steps: int) -> tuple[dict[str, int], Findings]:
    """Runs `sdc train --guard` in two processes; returns the checks of each layer, and findings."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ("train", "--guard", "--guard-budget", BUDGET, "--dtype", dtype, "--remat", remat, "--data", 2)
        processes = several(2, *words, "--seed", seed, "--steps", steps, "--run", run)
        try:
            for process in processes:
                process.process.join()
            summary = read_record(run).summary
        finally:
            for process in processes:
                process.kill()
        if summary is None or summary.get("guard") is None:
            raise RuntimeError("\n".join(process.err.read_text()[-2000:] for process in processes))
    guard = summary["guard"]
    findings = [(one["layer"], one["proof"], one["what"]) for one in guard["findings"]]
    return {layer["name"]: layer["checks"] for layer in guard["layers"]}, findings
