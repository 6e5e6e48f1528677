"""What benchmarks share: what they run, times of programs that take turns, and their ratios."""

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

# `ru_maxrss` of a process is at least what its parent had: Linux counts its own peak (VmHWM) apart.
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
    """What `sdc bench` measures under a name."""

    measure: Callable[[BenchOptions], dict[str, Any]]  # figures by column, mostly of a type of numbers
    bars: Mapping[str, float]  # what figures should not exceed, or of a speed-up at least be; see BENCHMARKS.md
    devices: int = 1  # simulated ones of a CPU


def config_of(options: BenchOptions, dtype: Any = "float32") -> TrainConfig:
    return get_config(str(options.config)).of_type(dtype)


def made_up_tokens(config: TrainConfig, placement: Placement) -> jax.Array:
    """A batch of random tokens, placed."""
    batch = described_batch(config, placement)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, batch.shape).astype(np.int32)
    return jax.device_put(tokens, batch.sharding)


def reference_step(config: TrainConfig) -> tuple[Callable[..., Any], tuple[Any, jax.Array]]:
    """The training step on one device, without any tool, and its arguments: a state and a batch."""
    work, placement = sharded(config), place(twins=None, data=1, model=1, devices=jax.devices()[:1])
    return plain(work, placement), (initial_state(work, placement, 0), made_up_tokens(config, placement))


def compiled(variants: Mapping[str, Callable[..., Any]], *arguments: Any) -> dict[str, Callable[[], Any]]:
    """Programs, compiled, that run on these arguments."""
    return {
        name: functools.partial(jax.jit(fn).lower(*arguments).compile(), *arguments) for name, fn in variants.items()
    }


def seconds_of(work: Callable[[], Any], *, anew: bool = False) -> float:
    """Seconds that something takes; of tracing and compiling `anew`, where nothing is known from before."""
    if anew:
        jax.clear_caches()
    started = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - started


def tracing_seconds(step: Callable[..., Any], *arguments: Any) -> float:
    return seconds_of(lambda: jax.make_jaxpr(lambda *args: step(*args))(*arguments), anew=True)


def take_turns(runs: Mapping[str, Callable[[], Any]], steps: int) -> dict[str, list[float]]:
    """Seconds of each run, after two rounds that are not counted."""
    rounds = [{name: seconds_of(run) for name, run in runs.items()} for _ in range(steps + 2)]
    return {name: [each[name] for each in rounds[2:]] for name in runs}


def ratio(plain: list[float], other: list[float]) -> float:
    """Median of the ratios of neighbours in time, which share what else the machine does."""
    return statistics.median(b / a for a, b in zip(plain, other, strict=True))


def ratios(seconds: Mapping[str, list[float]], base: str = "plain") -> dict[str, float]:
    """Of all but the base, the ratio to it."""
    return {name: ratio(seconds[base], own) for name, own in seconds.items() if name != base}


def command_costs(words: Sequence[object], code: int = 0) -> tuple[float, float]:
    """Seconds and megabytes of a command as a process, which must end with this code."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return time.perf_counter() - started, float(done.stderr.splitlines()[-1])
