"""Code that benchmarks share: programs, interleaved timing, and ratios of times."""

import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sdc.train import TrainConfig, get_config
from sdc.train.programs import Placement, described_batch, initial_state, place, plain, sharded

from .command import BenchOptions

# `ru_maxrss` of a process is at least that of its parent; Linux counts the process's own peak separately (VmHWM).
COMMAND = (
    "import re, resource, sys\n"
    "from pathlib import Path\n"
    "from sdc.tools.cli import run\n"
    "code = run(sys.argv[1:])\n"
    "status = Path('/proc/self/status')\n"
    "own = re.search(r'VmHWM:\\s*(\\d+)', status.read_text()) if status.is_file() else None\n"
    "peak = int(own[1]) if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    "print(peak / 1024, file=sys.stderr)\n"
    "raise SystemExit(code)\n"
)


class Benchmark(NamedTuple):
    """A benchmark of `sdc bench`."""

    measure: Callable[[BenchOptions], dict[str, Any]]  # returns figures by column, usually a dtype
    bars: Mapping[str, float]  # upper bounds of figures, lower bounds of speedups; see BENCHMARKS.md
    devices: int = 1  # simulated CPU devices


def config_of(options: BenchOptions, dtype: Any = "float32") -> TrainConfig:
    return get_config(str(options.config)).of_type(dtype)


def made_up_tokens(config: TrainConfig, placement: Placement) -> jax.Array:
    """Returns a batch of random tokens, on the devices of a placement."""
    batch = described_batch(config, placement)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, batch.shape).astype(np.int32)
    return jax.device_put(tokens, batch.sharding)


def reference_step(config: TrainConfig) -> tuple[Callable[..., Any], tuple[Any, jax.Array]]:
    """Returns the plain training step for one device, and its arguments: a state and a batch."""
    work, placement = sharded(config), place(twins=None, data=1, model=1, devices=jax.devices()[:1])
    return plain(work, placement), (initial_state(work, placement, 0), made_up_tokens(config, placement))


def compiled(variants: Mapping[str, Callable[..., Any]], *arguments: Any) -> dict[str, Callable[[], Any]]:
    """Compiles programs for these arguments; the returned functions run them."""
    return {
        name: functools.partial(jax.jit(fn).lower(*arguments).compile(), *arguments) for name, fn in variants.items()
    }


def seconds_of(work: Callable[[], Any], *, anew: bool = False) -> float:
    """Returns the duration of a call in seconds; `anew` clears JAX's caches first."""
    if anew:
        jax.clear_caches()
    started = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - started


def tracing_seconds(step: Callable[..., Any], *arguments: Any) -> float:
    return seconds_of(lambda: jax.make_jaxpr(lambda *args: step(*args))(*arguments), anew=True)


def take_turns(runs: Mapping[str, Callable[[], Any]], steps: int) -> dict[str, list[float]]:
    """Returns the durations of each run in seconds; the runs take turns `steps` times, after two warm-up rounds."""
    rounds = [{name: seconds_of(run) for name, run in runs.items()} for _ in range(steps + 2)]
    return {name: [each[name] for each in rounds[2:]] for name in runs}


def ratio(plain: list[float], other: list[float]) -> float:
    """Returns the median of the ratios of consecutive measurements, which are taken under the same load of the
    machine."""
    return statistics.median(b / a for a, b in zip(plain, other, strict=True))


def ratios(seconds: Mapping[str, list[float]], base: str = "plain") -> dict[str, float]:
    """Returns the ratios of all other programs' times to those of the base."""
    return {name: ratio(seconds[base], own) for name, own in seconds.items() if name != base}


def command_costs(words: Sequence[object], code: int = 0) -> tuple[float, float]:
    """Runs a command in a process that must end with this code; returns its duration in seconds and its peak memory in
    MB."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return time.perf_counter() - started, float(done.stderr.splitlines()[-1])
