"""`sdc bench aggregation`: the cost of the methods of `sdc.aggregation` without faults, relative to plain training.

Eight workers train a transformer with Adam; each worker has one simulated device. Each worker has a batch of the
configuration's size and holds all parameters. One process runs all programs in turns. Time spent waiting for another
device is included, as in data parallelism.

Two processes measure the gain from a compute threshold and compare it with the gain that the theory predicts from their
latencies. The processes communicate over Gloo on this machine, and sleep before each micro-batch for the time in
`delays`. They train without a threshold, agree on the best threshold, and train again with this threshold and the same
delays.
"""

import functools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sdc import aggregation
from sdc.multihost import everyone
from sdc.records import prepare
from sdc.train import Peers, TrainConfig, joined
from sdc.train.programs import DATA, cross_entropy, init_params, logits, place

from .. import give_up, keep_standard_output, leave_at_once
from .command import BenchOptions
from .harness import Benchmark, config_of, ratio, ratios, seconds_of, take_turns

WORKERS = 8
PERIOD = 10
# Noise in the mean gradient of the embedding. It makes replicas drift, and PAFT derives its period from the drift.
SIGMA = 1e-7
RATE, PACKET = 0.1, 375  # share of lost packets, and float32 elements in a packet of 1,500 bytes
ADAM = optax.adam(3e-4)
PROCESSES, MICRO_BATCHES, ITERATIONS, WARM_UP = 2, 12, 15, 2
BASE = 0.03  # seconds of a micro-batch without delay
LIMIT = 300.0  # time limit for all processes, in seconds
START = f"from {__name__} import follow; follow()"
BARS = {
    "paft_sync_period_10": 1.05,
    "paft_dynamic": 1.03,
    "paft_dynamic_overlapped": 1.03,
    "paft_sync_extra_copies": 0.0,
    "paft_dynamic_extra_copies": 1.0,
    "paft_dynamic_overlapped_extra_copies": 1.0,
    "lossy_p_0.1": 1.10,
    "lossy_p_0.1_whole_shards": 1.10,
    "shadow_compare": 1.02,
    "dropcompute_error": 0.05,
    "select_threshold_2048x100x12_seconds": 2.0,
}
Tree = Any
Step = Callable[[Tree, Tree, Any], tuple[Tree, Tree]]  # `(params, state, tokens) -> (params, state)` of one worker


class _Method(NamedTuple):
    """A training method: functions that initialize a worker and execute its step."""

    init: Callable[[Tree], Tree]
    step: Step


class _Workers:
    """A training run; each call executes the next step of all workers."""

    def __init__(self, config: TrainConfig, mesh: Mesh, method: _Method) -> None:
        shape = WORKERS, config.batch_size, config.sequence_length + 1
        tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
        self._tokens = jax.device_put(tokens, NamedSharding(mesh, P(DATA)))

        def start(tokens: Any) -> tuple[Tree, Tree]:
            del tokens
            params = init_params(config.model, jax.random.key(0))
            return params, method.init(params)

        self.params, self.state = _on(mesh, start)(self._tokens)
        step = _on(mesh, method.step, donate=(0, 1))
        self._compiled = step.lower(self.params, self.state, self._tokens).compile()

    def __call__(self) -> Tree:
        self.params, self.state = self._compiled(self.params, self.state, self._tokens)
        return self.params

    @property
    def state_of_one(self) -> Tree:
        """The state of the first worker."""
        return jax.tree.map(lambda x: jax.device_get(x.addressable_data(0))[0], self.state)

    @property
    def copies(self) -> float:
        """Memory that a device needs beyond the arguments of the step, as a number of copies of its parameters or
        gradient."""
        memory: Any = self._compiled.memory_analysis()
        working = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return float(working / (sum(leaf.nbytes for leaf in jax.tree.leaves(self.params)) // WORKERS))


def _extra_copies(runs: dict[str, _Workers]) -> dict[str, float]:
    """Returns how much more memory each run needs than the first run, as a number of copies of the parameters."""
    first, *others = runs
    return {f"{name}_extra_copies": runs[name].copies - runs[first].copies for name in others}


def measure(options: BenchOptions) -> dict[str, Any]:
    config, steps = config_of(options), options.steps
    start = functools.partial(_Workers, config, place(twins=None, data=WORKERS, model=1).mesh)

    def gradient(params: Tree, tokens: Any) -> Tree:
        def loss(params: Tree) -> Any:
            return jnp.mean(cross_entropy(logits(config.model, params, tokens[:, :-1]), tokens[:, 1:]))

        return jax.grad(loss)(params)

    found = _paft(start, gradient, steps) | _lossy(start, gradient, steps) | _shadow(start, gradient, steps)
    found |= _dropcompute()
    # Selects the threshold from 100 iterations of 2,048 workers with 12 micro-batches.
    latencies = np.asarray(aggregation.BoundedLogNormal(0.3).sample(jax.random.key(0), (100, 2048, 12)))
    seconds = (seconds_of(lambda: aggregation.select_threshold(latencies, 0.5)) for _ in range(3))
    return {"float32": found | {"select_threshold_2048x100x12_seconds": statistics.median(seconds)}}


def _paft(start: Callable[[_Method], _Workers], gradient: Any, steps: int) -> dict[str, Any]:
    """Measures PAFT in blocks of `PERIOD` steps; with a fixed period, each block has exactly one average."""
    methods = {
        "plain": _averaging(gradient, ADAM),
        "paft_sync_period_10": _averaging(gradient, aggregation.paft_sync(ADAM, DATA, PERIOD)),
        "paft_dynamic": _averaging(gradient, aggregation.paft(ADAM, DATA)),
        "paft_dynamic_overlapped": _averaging(gradient, aggregation.paft(ADAM, DATA), around=aggregation.overlapped),
    }
    runs = {name: start(method) for name, method in methods.items()}
    blocks = max(1, 2 * steps // PERIOD)
    seconds = take_turns(runs, blocks * PERIOD)
    blocked = {name: np.reshape(times, (blocks, PERIOD)).sum(axis=1).tolist() for name, times in seconds.items()}
    fixed, dynamic = runs["paft_sync_period_10"].state_of_one[1], runs["paft_dynamic"].state_of_one[1]
    assert min(fixed.divergence.measured, dynamic.divergence.measured) > 0, (
        "the replicas never differed, or never synchronized"
    )
    memory = _extra_copies(runs)
    return {
        "plain_seconds": statistics.median(seconds["plain"]),
        **ratios(blocked),
        "paft_dynamic_period": int(dynamic.period),
        "paft_dynamic_synchronizations": int(dynamic.synchronizations),
        "paft_dynamic_steps": int(dynamic.step),
        "paft_sync_extra_copies": memory.pop("paft_sync_period_10_extra_copies"),
        **memory,
    }


def _lossy(start: Callable[[_Method], _Workers], gradient: Any, steps: int) -> dict[str, Any]:
    """Measures lossy ZeRO-2 relative to lossless ZeRO-2."""
    lossy = functools.partial(aggregation.lossy_zero2, ADAM, DATA, RATE, RATE)
    methods = {
        "lossless": _Method(*plain_zero2(gradient, ADAM, DATA, WORKERS)),
        "lossy_p_0.1": _local(gradient, lossy(packet=PACKET)),
        "lossy_p_0.1_whole_shards": _local(gradient, lossy()),
    }
    runs = {name: start(method) for name, method in methods.items()}
    seconds = take_turns(runs, steps)
    report = runs["lossy_p_0.1"].state_of_one.report
    assert max(abs(loss - RATE) for loss in (report.gradient_loss, report.parameter_loss)) < RATE / 10
    return {
        "lossless_seconds": statistics.median(seconds["lossless"]),
        **ratios(seconds, "lossless"),
        **_extra_copies(runs),
    }


def _shadow(start: Callable[[_Method], _Workers], gradient: Any, steps: int) -> dict[str, Any]:
    """Measures a shadow replica relative to the same ranks without the comparison and without the last rank's
    gradient."""
    watched = aggregation.shadow(gradient, DATA)

    def idle(params: Tree, state: Tree, tokens: Any) -> tuple[Tree, Tree]:
        works = lax.axis_index(DATA) < WORKERS - 1
        own = gradient(params, tokens)
        mean = jax.tree.map(lambda x: lax.psum(jnp.where(works, x, 0), DATA) / jnp.float32(WORKERS - 1), own)
        return _step(ADAM, mean, params, state)

    def compared(params: Tree, state: Tree, tokens: Any) -> tuple[Tree, Tree]:
        inner, roles, _ = state
        mean, roles, report = watched(roles, params, tokens)
        params, inner = _step(ADAM, mean, params, inner)
        return params, (inner, roles, report.differed)

    def init(params: Tree) -> Tree:
        return ADAM.init(params), aggregation.init_shadow(WORKERS), jnp.bool_(False)

    runs = {"idle": start(_Method(ADAM.init, idle)), "shadow": start(_Method(init, compared))}
    seconds = take_turns(runs, 2 * steps)
    roles = runs["shadow"].state_of_one[1]
    assert roles.checked.sum() == 2 * steps + 2, "a step compared nothing"
    if roles.differed.any():
        raise RuntimeError(
            "two ranks of this benchmark computed different gradients from the same rows: this machine corrupts data"
        )
    return {
        "shadow_seconds": statistics.median(seconds["shadow"]),
        "shadow_compare": ratio(seconds["idle"], seconds["shadow"]),
    }


def _step(
    optimizer: optax.GradientTransformation, gradient: Tree, params: Tree, state: Tree, **extra: Any
) -> tuple[Tree, Tree]:
    updates, state = optimizer.update(gradient, state, params, **extra)
    return optax.apply_updates(params, updates), state


def _averaging(gradient: Any, optimizer: Any, around: Callable[[Any], Step] = lambda step: step) -> _Method:
    """Returns the method of data parallelism: each worker adds noise to its gradient, and the optimizer receives the
    mean.

    Noise in one leaf is enough to make replicas drift, and costs almost no time.
    """

    def noisy(params: Tree) -> Tree:
        return {name: jax.tree.map(lambda _, name=name: name == "embedding", part) for name, part in params.items()}

    whole = optax.chain(optax.masked(aggregation.gradient_noise(DATA, SIGMA), noisy), optimizer)

    def step(params: Tree, state: Tree, tokens: Any, **extra: Any) -> tuple[Tree, Tree]:
        return _step(whole, lax.pmean(gradient(params, tokens), DATA), params, state, **extra)

    return _Method(whole.init, around(step))


def _local(gradient: Any, optimizer: Any) -> _Method:
    """Returns a method whose optimizer receives each worker's own gradient."""

    def step(params: Tree, state: Tree, tokens: Any) -> tuple[Tree, Tree]:
        return _step(optimizer, gradient(params, tokens), params, state)

    return _Method(optimizer.init, step)


def _on(mesh: Mesh, fn: Callable[..., Any], donate: tuple[int, ...] = ()) -> Any:
    """Compiles a function of one worker for arrays with a leading axis of workers."""

    def one(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], fn(*jax.tree.map(lambda x: x[0], args)))

    placed = jax.shard_map(one, mesh=mesh, in_specs=P(DATA), out_specs=P(DATA), check_vma=False)
    return jax.jit(placed, donate_argnums=donate)


def plain_zero2(
    gradient: Callable[[Tree, Any], Tree], optimizer: optax.GradientTransformation, axis_name: str, workers: int
) -> tuple[Callable[[Tree], Tree], Callable[[Tree, Tree, Any], tuple[Tree, Tree]]]:
    """Returns the functions that initialize a worker of lossless ZeRO-2 and execute its step.

    These functions are the reference for `lossy_zero2` here and in tests. Each worker updates its own shards of all
    leaves, and sends these shards to the other workers.
    """

    def cut(leaf: Any) -> Any:
        shard = -(-leaf.size // workers)
        return jnp.pad(leaf.reshape(-1), (0, shard * workers - leaf.size)).reshape(workers, shard)

    def mine(tree: Tree) -> Tree:
        me = lax.axis_index(axis_name)
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(cut(leaf), me, keepdims=False), tree)

    def join(shard: Any, leaf: Any) -> Any:
        return lax.all_gather(shard, axis_name).reshape(-1)[: leaf.size].reshape(leaf.shape)

    def step(params: Tree, state: Tree, batch: Any) -> tuple[Tree, Tree]:
        sums = jax.tree.map(lambda leaf: lax.psum_scatter(cut(leaf), axis_name), gradient(params, batch))
        mean = jax.tree.map(lambda leaf: leaf / jnp.float32(workers), sums)
        updates, state = optimizer.update(mean, state, mine(params))
        shards = optax.apply_updates(mine(params), updates)
        return jax.tree.map(join, shards, params), state

    return lambda params: optimizer.init(mine(params)), step


class _Trained(NamedTuple):
    latencies: list[list[list[float]]]  # of completed micro-batches, [iterations][processes][completed]
    compute: np.ndarray  # seconds until the all-reduce, [iterations, processes]
    whole: np.ndarray  # seconds with the all-reduce, [iterations, processes]

    @property
    def completed(self) -> int:
        """Number of completed micro-batches."""
        return sum(len(times) for iteration in self.latencies for times in iteration)

    @property
    def throughput(self) -> float:
        return self.completed / float(self.whole.max(axis=1).sum())


def _dropcompute() -> dict[str, float]:
    """Starts the processes of DropCompute and returns their figures."""
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


def follow() -> None:
    """Runs one of the processes of DropCompute; its command-line arguments are ADDRESS and NUMBER."""
    address, number = sys.argv[1], int(sys.argv[2])
    peers = Peers(coordinator=address, processes=PROCESSES, process=number, timeout=60.0)

    def ready(processes: int) -> None:
        keep_standard_output()
        prepare(cpu_devices=1, only_cpu=True)

    with joined(peers, ready, give_up):
        found = _process(number)
    if number == 0:
        sys.stdout.write(json.dumps(found))
    leave_at_once(0)


def _process(number: int) -> dict[str, float]:
    delays = np.asarray(
        aggregation.BoundedLogNormal(BASE).sample(jax.random.key(number), (ITERATIONS, MICRO_BATCHES))
    ).tolist()
    plain = _train(math.inf, delays)
    latencies = np.asarray(plain.latencies)
    serial = plain.whole.max(axis=1) - plain.compute.max(axis=1)
    choice = aggregation.select_threshold(latencies, serial)
    if len(set(everyone(repr(choice)))) > 1:
        raise RuntimeError("processes with the same latencies chose different thresholds")
    limited = _train(choice.threshold, delays)
    gained = limited.throughput / plain.throughput
    predicted = aggregation.effective_speedup(latencies, serial, choice.threshold)
    return {
        "dropcompute_measured": gained,
        "dropcompute_predicted": predicted,
        "dropcompute_ratio": gained / predicted,
        "dropcompute_error": abs(gained / predicted - 1),
        "dropcompute_threshold_seconds": choice.threshold,
        "dropcompute_iteration_seconds": float(plain.whole.max(axis=1).mean()),
        "dropcompute_serial_seconds": float(serial.mean()),
        "dropcompute_drop_rate": 1 - limited.completed / latencies.size,
        "dropcompute_drop_rate_predicted": choice.drop_rate,
    }


def _train(threshold: float, delays: list[list[float]]) -> _Trained:
    """Trains with these delays after warm-up iterations, which compile the step; returns the same result in all
    processes."""
    mesh = jax.make_mesh((PROCESSES,), (DATA,), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"a": jnp.full((8, 64), 0.1), "b": jnp.full((64, 1), 0.1)}
    batches = list(jax.random.normal(jax.random.key(jax.process_index()), (MICRO_BATCHES, 32, 8)))

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(jnp.tanh(batch @ params["a"]) @ params["b"] - 1.0))

    def update(total: Any, completed: Any, params: Any) -> Any:
        total, completed, params = jax.tree.map(lambda x: x[0], (total, completed, params))
        mean = aggregation.combine(total, DATA, completed, MICRO_BATCHES).gradient
        return jax.tree.map(lambda p, g: (p - 0.01 * g)[None], params, mean)

    join = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P(DATA), out_specs=P(DATA), check_vma=False))
    watch = aggregation.Stopwatch(aggregation.accumulate(loss), threshold)
    own: list[tuple[list[float], float, float]] = []
    for waits in [[0.0] * MICRO_BATCHES] * WARM_UP + delays:
        started = time.perf_counter()
        mine = watch.run(aggregation.gradient_sum(params), batches, params, delays=waits)
        sums = aggregation.to_workers((mine.carry, jnp.int32(mine.completed), params), DATA, mesh)
        params = jax.block_until_ready(aggregation.from_workers(join(*sums)))
        own.append((list(mine.latencies), mine.seconds, time.perf_counter() - started))
    rows = [json.loads(text) for text in everyone(json.dumps(own[WARM_UP:]))]
    latencies, compute, whole = (
        [[process[i][field] for process in rows] for i in range(len(delays))] for field in range(3)
    )
    return _Trained(latencies, np.asarray(compute), np.asarray(whole))


BENCHMARKS = {"aggregation": Benchmark(measure, BARS, devices=WORKERS)}
