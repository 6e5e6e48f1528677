"""`sdc bench delay`: what lock-step costs where the network between the twins is slow.

Two processes on two hosts of one machine, between which packets are delayed, train twins with `--exchange probe` and
`step`. Steps with and without the delay take turns, in the same processes.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, get_args

import jax

from sdc.train import get_config
from sdc.train.programs import TwinProgram, place, sharded
from sdc.twins import Exchange
from sdc.verdict import Exit

from .. import CommandError
from .command import BenchOptions
from .network import ADDRESSES, two_hosts
from .timing import made_up_tokens, ratio

BARS = {"step": 1.05, "call": 1.05}
DELAY = 1e-3
"""Seconds from one process to the other."""
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
SAYS = "seconds of a step: "
COMMAND = "from sdc.tools.bench._delay import follow; follow()"


def measure(options: BenchOptions) -> dict[str, Any]:
    """Measures steps with a delay of one millisecond against steps without."""
    return {dtype: _measured(str(options.config), dtype, options.steps) for dtype in options.dtypes}


def _measured(config: str, dtype: str, steps: int) -> dict[str, Any]:
    with two_hosts() as (names, cable):
        workers = [_start(name, config, dtype, number) for number, name in enumerate(names)]
        try:
            seconds: dict[tuple[str, float], list[float]] = {}
            for number in range(steps + 2):
                for exchange in EXCHANGES:
                    for delay in (0.0, DELAY):
                        cable.delay = delay
                        took = _together(workers, exchange)
                        if number >= 2:
                            seconds.setdefault((exchange, delay), []).append(took)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    found: dict[str, Any] = {name: ratio(seconds[name, 0.0], seconds[name, DELAY]) for name in EXCHANGES}
    return found | {f"{name}_seconds": statistics.median(seconds[name, 0.0]) for name in EXCHANGES}


def _start(name: str, config: str, dtype: str, number: int) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", name, sys.executable, "-c", COMMAND, config, dtype, str(number)]
    pipe, environment = subprocess.PIPE, os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _together(workers: Sequence[subprocess.Popen[str]], exchange: Exchange) -> float:
    """Seconds that a step of all processes took."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(exchange + "\n")
        worker.stdin.flush()
    return max(map(_answer, workers))


def _answer(worker: subprocess.Popen[str]) -> float:
    assert worker.stdout is not None
    for line in worker.stdout:
        said, _, number = line.partition(SAYS)
        if number and not said:  # collectives print lines of their own
            return float(number)
    raise CommandError("a process of the benchmark has ended; what it said stands above", Exit.INCONCLUSIVE)


def follow() -> None:
    """One of the processes: makes a step for each line of standard input, and says how long it took."""
    from sdc.records import prepare

    config, dtype, process = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{ADDRESSES[0]}:4321", 2, int(process))
    prepare(cpu_devices=1, cpu_threads=os.cpu_count(), only_cpu=True)
    placement = place(twins=2, data=1, model=1)
    work = sharded(get_config(config).of_type(dtype))  # type: ignore[arg-type] # of the flag of the same type
    tokens, key = made_up_tokens(work.config, placement), jax.random.key(1)
    programs: dict[str, TwinProgram] = {
        exchange: TwinProgram(work, placement, exchange=exchange, sync="compute") for exchange in EXCHANGES
    }
    states = {exchange: program.init(0) for exchange, program in programs.items()}
    for line in sys.stdin:
        exchange = line.strip()
        started = time.perf_counter()
        out = programs[exchange].compiled(states[exchange], (tokens, key))
        states[exchange], _, reports = jax.block_until_ready(out)
        sys.stdout.write(f"{SAYS}{time.perf_counter() - started}\n")
        sys.stdout.flush()
        found = [report.difference.mismatched for report in reports[0].values()]
        if any(int(part.data.sum()) for rows in found for part in rows.addressable_shards):
            raise RuntimeError("elements differ between the twins of this benchmark: this machine corrupts data")
