"""What a burn-in costs beside the load itself: digests and comparison, checksums of products, and a whole level."""

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from sdc.burnin import Programs, burn_in
from sdc.burnin.workloads import LEVELS, SMALLEST, BurninWorkload, Level, workloads
from sdc.train import get_config, register_training

from ._fleet import summarize_results
from ._pool import pool_bytes
from .command import BenchOptions

BARS = {
    "digests_share": 0.05,
    "matrix_checked": 1.05,
    "quick_seconds": 60.0,
    "quick_megabytes": 2000.0,
    "pool_bytes": 64.0,
    "summarize_seconds": 10.0,
    "false_alarms": 0,
}
DEVICES = 4
QUICK = (
    "import resource, sys\n"
    "from sdc.tools.cli import run\n"
    "code = run(['burnin', '--level', 'quick', '--devices', '4', '--run', sys.argv[1]])\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, file=sys.stderr)\n"
    "raise SystemExit(code)\n"
)


def measure(options: BenchOptions) -> dict[str, Any]:
    """All figures.

    `digests_share_LEVEL`: time of digests and comparison on the host, as a share of all of it, on one device.
    `matrix_checked_LEVEL`: time of the matrix workloads against the same products unchecked.
    `quick_seconds`, `quick_megabytes`: the command `sdc burnin --level quick --devices 4`, compilation included.
    `pool_bytes`: of digests that a host of a pool exchanges in a step.
    `false_alarms` in so many `rounds` of healthy devices.
    `summarize_seconds`: `sdc fleet summarize` of 1,000 results.
    """
    quick = _quick()
    fleet = summarize_results()
    found: dict[str, Any] = {
        "quick_seconds": quick[0],
        "quick_megabytes": quick[1],
        "pool_bytes": pool_bytes(get_config("tiny")),
        "summarize_seconds": fleet["seconds"],
        "summarize_megabytes": fleet["megabytes"],
    }
    register_training()
    for level in (LEVELS["quick"], _middle()):
        found |= {f"{name}_{level.name}": value for name, value in _costs(level, options.steps).items()}
    products = dataclasses.replace(LEVELS["acceptance"], data=("normal",))
    found["matrix_checked_acceptance"] = _costs(products, 3, only=["matrix"])["matrix_checked"]
    found["false_alarms"], found["rounds"] = _healthy()
    return {"all": found}


def _middle() -> Level:
    """What two cores do in half a minute: matrices of 1,024 rows, and buffers of 16 MB."""
    return dataclasses.replace(LEVELS["prejob"], name="prejob", buffer=2**24, retention=0.0)


def _costs(level: Level, steps: int, *, only: Sequence[str] | None = None) -> dict[str, float]:
    devices = jax.local_devices()[:1]
    programs = Programs(devices)
    found = [each for each in workloads(level, devices, only=only) if not each.multi]
    compared, loaded, checked, plain = 0.0, 0.0, [], []
    for workload in found:
        programs.prepare(workload, 0)
        programs.reference(workload, 0)
        programs.run(workload, 0)
        rounds = [_round(programs, workload) for _ in range(steps)]
        loaded += statistics.median(seconds for seconds, _ in rounds)
        compared += statistics.median(max(whole - seconds, 0.0) for seconds, whole in rounds)
        if workload.family == "matrix":
            pair = _against_unchecked(programs, workload, steps)
            checked.append(pair[0])
            plain.append(pair[1])
    return {
        "digests_share": compared / (compared + loaded),
        "matrix_checked": sum(checked) / sum(plain),
        "load_seconds": loaded,
    }


def _healthy(rounds: int = 1000) -> tuple[int, int]:
    """Findings of rounds of all workloads in the smallest sizes on healthy devices, and how many rounds these were."""
    devices = jax.local_devices()[:DEVICES]
    result = burn_in(workloads(SMALLEST, devices), devices, rounds=rounds)
    return len(result.findings) + len(result.unfinished), result.rounds


def _round(programs: Programs, workload: BurninWorkload) -> tuple[float, float]:
    """Seconds of a run at load, and with digest and comparison."""
    began = time.perf_counter()
    (outcome,) = programs.run(workload, 0, rest=lambda seconds: None)
    return outcome.seconds, time.perf_counter() - began


def _against_unchecked(programs: Programs, workload: BurninWorkload, steps: int) -> tuple[float, float]:
    """Median seconds of the checked program, and of the product alone; they take turns."""
    ready = programs.prepare(workload, 0)
    calls: tuple[Callable[..., Any], ...] = (ready.call, jax.jit(workload.run))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(steps + 1):
        for call, kept in zip(calls, times, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(call(*ready.arguments))
            if turn:
                kept.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def _quick() -> tuple[float, float]:
    """Seconds and megabytes of the command as a process."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", QUICK, str(Path(folder) / "run")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return time.perf_counter() - began, float(done.stderr.splitlines()[-1])
