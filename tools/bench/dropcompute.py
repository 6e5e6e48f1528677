"""What a compute threshold gains two real processes, against what the theory predicts of their measured latencies.

The processes train over Gloo on this machine, and stand still before each micro-batch as `delays` says. They do so
without a threshold first, agree on the best one, and do it again with that and the same delays.
"""

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sdc.aggregation import (
    BoundedLogNormal,
    Stopwatch,
    accumulate,
    combine,
    effective_speedup,
    from_workers,
    gradient_sum,
    select_threshold,
    to_workers,
)
from sdc.multihost import everyone
from sdc.records import prepare
from sdc.train import Peers, joined

from .. import give_up, keep_standard_output, leave_at_once

PROCESSES, MICRO_BATCHES, ITERATIONS, WARM_UP = 2, 12, 15, 2
BASE = 0.03
"""Seconds of a micro-batch without delay."""
LIMIT = 300.0
"""Seconds that all of it may take."""
START = "from sdc.tools.bench.dropcompute import main; main()"
AXIS = "data"


class Measured(NamedTuple):
    """Iterations of all processes.

    Attributes:
        latencies: latency of each micro-batch that was completed, [iterations][processes][completed].
        compute: seconds until the all-reduce, [iterations, processes].
        whole: seconds with the all-reduce, [iterations, processes].
    """

    latencies: list[list[list[float]]]
    compute: np.ndarray
    whole: np.ndarray

    @property
    def throughput(self) -> float:
        """Completed micro-batches a second."""
        completed = sum(len(times) for iteration in self.latencies for times in iteration)
        return completed / float(self.whole.max(axis=1).sum())


def measure() -> dict[str, float]:
    """Starts the processes and returns what they found.

    Raises:
        RuntimeError: a process failed; the other one is ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", START, address, str(number)],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"},
                stdout=out if number == 0 else subprocess.DEVNULL,
                stderr=err,
            )
            for number in range(PROCESSES)
        ]
        deadline = time.monotonic() + LIMIT
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes) or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
            codes = [process.wait() for process in processes]
        out.seek(0)
        err.seek(0)
        if any(codes):
            raise RuntimeError(f"the processes of DropCompute ended with {codes}:\n{err.read()[-4000:]}")
        found: dict[str, float] = json.load(out)
        return found


def main() -> None:
    """One of the processes: ADDRESS NUMBER."""
    address, number = sys.argv[1], int(sys.argv[2])
    peers = Peers(coordinator=address, processes=PROCESSES, process=number, timeout=60.0)
    with joined(peers, _prepare, give_up):
        found = _process(number)
    if number == 0:
        sys.stdout.write(json.dumps(found))
    leave_at_once(0)


def _prepare(processes: int) -> None:
    keep_standard_output()
    prepare(cpu_devices=1, only_cpu=True)


def _process(number: int) -> dict[str, float]:
    delays = np.asarray(BoundedLogNormal(BASE).sample(jax.random.key(number), (ITERATIONS, MICRO_BATCHES))).tolist()
    plain = _train(math.inf, delays)
    latencies = np.asarray(plain.latencies)
    serial = plain.whole.max(axis=1) - plain.compute.max(axis=1)
    choice = select_threshold(latencies, serial)
    if len(set(everyone(repr(choice)))) > 1:
        raise RuntimeError("processes that hold the same latencies found different thresholds")
    limited = _train(choice.threshold, delays)
    gained = limited.throughput / plain.throughput
    predicted = effective_speedup(latencies, serial, choice.threshold)
    completed = sum(len(times) for iteration in limited.latencies for times in iteration)
    return {
        "dropcompute_measured": gained,
        "dropcompute_predicted": predicted,
        "dropcompute_ratio": gained / predicted,
        "dropcompute_error": abs(gained / predicted - 1),
        "dropcompute_threshold_seconds": choice.threshold,
        "dropcompute_iteration_seconds": float(plain.whole.max(axis=1).mean()),
        "dropcompute_serial_seconds": float(serial.mean()),
        "dropcompute_drop_rate": 1 - completed / latencies.size,
        "dropcompute_drop_rate_predicted": choice.drop_rate,
    }


def _train(threshold: float, delays: list[list[float]]) -> Measured:
    """Iterations with these delays, after some that compile; the same in all processes."""
    mesh = jax.make_mesh((PROCESSES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"a": jnp.full((8, 64), 0.1), "b": jnp.full((64, 1), 0.1)}
    batches = list(jax.random.normal(jax.random.key(jax.process_index()), (MICRO_BATCHES, 32, 8)))

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(jnp.tanh(batch @ params["a"]) @ params["b"] - 1.0))

    def update(total: Any, completed: Any, params: Any) -> Any:
        total, completed, params = jax.tree.map(lambda x: x[0], (total, completed, params))
        mean = combine(total, AXIS, completed, MICRO_BATCHES).gradient
        return jax.tree.map(lambda p, g: (p - 0.01 * g)[None], params, mean)

    join = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))
    watch = Stopwatch(accumulate(loss), threshold)
    own: list[tuple[list[float], float, float]] = []
    for waits in [[0.0] * MICRO_BATCHES] * WARM_UP + delays:
        started = time.perf_counter()
        mine = watch.run(gradient_sum(params), batches, params, delays=waits)
        sums = to_workers((mine.carry, jnp.int32(mine.completed), params), AXIS, mesh)
        params = jax.block_until_ready(from_workers(join(*sums)))
        own.append((list(mine.latencies), mine.seconds, time.perf_counter() - started))
    rows = [json.loads(text) for text in everyone(json.dumps(own[WARM_UP:]))]
    latencies, compute, whole = (
        [[process[i][field] for process in rows] for i in range(len(delays))] for field in range(3)
    )
    return Measured(latencies, np.asarray(compute), np.asarray(whole))
