"""`sdc bench campaign`: injections through one program, against a run and a program of its own for each."""

import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

import sdc
from sdc.campaigns import Campaign
from sdc.program import named
from sdc.train import CampaignJob, Loaded, Workload, make_campaign
from sdc.train.programs import Placement, initial_state, place, plain, sharded

from .command import BenchOptions

BARS = {"speedup": 10.0, "injections_in_10_minutes": 1000.0}
ALONE = 3
"""Injections that are also run on their own."""


def measure(options: BenchOptions) -> dict[str, Any]:
    """Measures both ways on the reference workload, on the same injections."""
    injections = 10 * options.steps
    job = CampaignJob(workload=Workload(config=options.config or "tiny"), injections=injections, batch=1)
    loaded = job.load()
    placement = place(twins=None, data=1, model=1, devices=jax.devices()[:1])
    started = time.perf_counter()
    runner = make_campaign(job, loaded, placement)
    ready = time.perf_counter()
    rows = list(runner.run(range(injections)))
    ended = time.perf_counter()
    alone = float(np.mean([_alone(loaded, placement, runner, number) for number in range(ALONE)]))
    process = float(np.mean([_process(loaded.config.name, runner, number) for number in range(ALONE)]))
    together = (ended - ready) / injections
    thousand = together + (ready - started) / 1000
    return {
        "float32": {
            "setup_seconds": ready - started,
            "seconds_per_injection": together,
            "seconds_per_run_of_its_own": process,
            "seconds_per_program_of_its_own": alone,
            "speedup": process / thousand,
            "speedup_without_start_up": alone / together,
            "injections_in_10_minutes": (600 - (ready - started)) / together,
            "steps_per_injection": float(np.mean([1 + row["followed"] for row in rows])),
        }
    }


def _process(config: str, runner: Campaign, number: int) -> float:
    """Seconds of a training run, as a process, of the steps that an injection needs: at the least a run of its own."""
    steps = runner.plan(number).step + 1 + runner.follow
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", "--config", config, "--steps", str(steps), "--run", f"{folder}/run"]
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "from sdc.tools.cli import main; main()", *command], check=True, capture_output=True
        )
        return time.perf_counter() - started


def _alone(loaded: Loaded, placement: Placement, runner: Campaign, number: int) -> float:
    """Seconds of one injection as a run of its own: compiles a step with this fault, and starts at step 0."""
    work = sharded(loaded.config)
    whole, state = plain(work, placement), initial_state(work, placement, runner.seed)
    injection = runner.plan(number)
    where = named(injection.row["site"])
    jax.clear_caches()  # a run of its own begins with none
    started = time.perf_counter()
    nothing = sdc.no_strike(room=int(np.size(injection.strike.elements)), axes=sorted(injection.strike.device))

    def step(hit: Any, state: Any, tokens: Any) -> Any:
        strike = jax.tree.map(lambda a, b: jax.numpy.where(hit, a, b), injection.strike, nothing)
        return sdc.strike(whole, where)(strike, state, tokens)[0]

    run = jax.jit(step)
    for place_in_time in range(injection.step + 1 + runner.follow):
        state, metrics = run(place_in_time == injection.step, state, runner.batches[place_in_time])
        float(metrics.loss)
    return time.perf_counter() - started
