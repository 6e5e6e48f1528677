"""`sdc bench lockstep`: what lock-step costs when nothing is wrong."""

import statistics
import time
from typing import Any

import jax

from sdc.train import get_config
from sdc.train.programs import TwinProgram, place, sharded

from .collectives import collectives
from .command import BenchOptions
from .timing import made_up_tokens, ratio

DEVICES = 2
"""Simulated CPU devices."""
SYNCS = ("none", "compute")
BARS = {"step_ratio": 1.10, "peak_memory_ratio": 1.10, "bytes_per_probe": 64.0}


def measure(options: BenchOptions) -> dict[str, Any]:
    """Measures what gated lock-step costs twins when nothing is wrong, against twins without synchronization."""
    result: dict[str, Any] = {}
    config = get_config(options.config or "bench")
    for dtype in options.dtypes:
        typed = config.of_type(dtype)
        # One device per twin; a single accelerator runs both under vmap.
        devices = jax.devices()[:2]
        placement = place(twins=2, data=1, model=1, kind="mesh" if len(devices) == 2 else "vmap", devices=devices)
        result[dtype] = _measure(
            {sync: TwinProgram(sharded(typed), placement, sync=sync) for sync in SYNCS}, options.steps
        )
    return result


def _measure(programs: dict[str, TwinProgram], steps: int) -> dict[str, Any]:
    key = jax.random.key(1)
    placement = programs["none"].placement
    tokens = made_up_tokens(programs["none"].work.config, placement)
    compiled = {
        sync: program.compiled.lower(program.abstract(), (program.batch, jax.eval_shape(jax.random.key, 0))).compile()
        for sync, program in programs.items()
    }
    step: dict[str, list[float]] = {sync: [] for sync in programs}
    whole: dict[str, list[float]] = {sync: [] for sync in programs}
    states = {sync: program.init(0) for sync, program in programs.items()}

    for number in range(steps + 2):
        for sync, program in programs.items():
            started = time.perf_counter()
            state, metrics, reports = jax.block_until_ready(program.compiled(states[sync], (tokens, key)))
            stepped = time.perf_counter()
            states[sync], observed = jax.block_until_ready(program.compiled_observation(state, metrics.gradient))
            ended = time.perf_counter()
            if sync == "compute":
                _check_that_it_worked(reports[0], observed)
            if number >= 2:
                step[sync].append(stepped - started)
                whole[sync].append(ended - started)

    twins = range(placement.mesh.size)  # one device per twin
    crossing = [c for c in collectives(compiled["compute"].as_text() or "") if c.crosses(twins) and not c.conditional]
    memory = {sync: _peak(program) for sync, program in compiled.items()}
    return {
        "step_seconds": {sync: statistics.median(values) for sync, values in step.items()},
        "step_ratio": ratio(step["none"], step["compute"]),
        "whole_step_seconds": {sync: statistics.median(values) for sync, values in whole.items()},
        "whole_step_ratio": ratio(whole["none"], whole["compute"]),
        "peak_bytes": memory,
        "peak_memory_ratio": memory["compute"] / memory["none"],
        "bytes_per_probe": sum(size for c in crossing for size in c.sizes) / len(reports[0]),
    }


def _check_that_it_worked(mismatches: Any, observed: Any) -> None:
    """A benchmark of a comparison that compares nothing would be a fine figure."""
    checked = sum(int(m.difference.checked.sum()) for m in mismatches.values())
    wrong = sum(int(m.difference.mismatched.sum()) for m in [*mismatches.values(), observed["state"]])
    assert checked > 0
    if wrong:
        raise RuntimeError(f"{wrong} elements differ between the twins of this benchmark: this machine corrupts data")


def _peak(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return int(
        analysis.temp_size_in_bytes
        + analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
