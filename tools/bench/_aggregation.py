"""`sdc bench aggregation`: what the methods of `sdc.aggregation` cost where nothing is wrong, against plain training.

Eight workers, one simulated device each, train a transformer with Adam, each on a batch of the configuration's size;
each holds all parameters. One process runs all programs, which take turns. What a device waits for another counts as it
does in data parallelism.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sdc.aggregation import (
    BoundedLogNormal,
    gradient_noise,
    init_shadow,
    lossy_zero2,
    overlapped,
    paft,
    paft_sync,
    select_threshold,
    shadow,
)
from sdc.train import TrainConfig, get_config
from sdc.train.programs import DATA, cross_entropy, init_params, logits, place

from . import dropcompute
from .command import BenchOptions
from .timing import ratio, take_turns
from .zero2 import plain_zero2

WORKERS = DEVICES = 8
PERIOD = 10
SIGMA = 1e-7
"""Of the noise in the mean gradient of the embedding. Replicas drift apart by it; PAFT takes its period from that."""
RATE, PACKET = 0.1, 375
"""Share of packets lost, and float32 elements in one of 1,500 bytes."""
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
Step = Callable[[Tree, Tree, Any], tuple[Tree, Tree]]
"""`(params, state, tokens) -> (params, state)` of one worker."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train: how a worker starts, and its step."""

    init: Callable[[Tree], Tree]
    step: Step


class Run:
    """A training under way: each call is a step of all workers, on from the last."""

    def __init__(self, config: TrainConfig, mesh: Mesh, method: Method) -> None:
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
    def copy(self) -> int:
        """Bytes of one worker's parameters, which are those of its gradient too."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params)) // WORKERS

    @property
    def working_bytes(self) -> int:
        """What a device needs beside the arguments of the step."""
        memory: Any = self._compiled.memory_analysis()
        return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)


def measure(options: BenchOptions) -> dict[str, Any]:
    """Measures float32."""
    config = get_config(options.config or "bench")
    mesh = place(twins=None, data=WORKERS, model=1).mesh
    gradient = functools.partial(_gradient, config)
    start = functools.partial(Run, config, mesh)
    return {
        "float32": {
            **_paft(start, gradient, options.steps),
            **_lossy(start, gradient, options.steps),
            **_shadow(start, gradient, options.steps),
            **dropcompute.measure(),
            "select_threshold_2048x100x12_seconds": _select(),
        }
    }


def _paft(start: Callable[[Method], Run], gradient: Any, steps: int) -> dict[str, Any]:
    """Blocks of `PERIOD` steps, so that each has one average at a fixed period."""
    methods = {
        "plain": _averaging(gradient, _adam()),
        "paft_sync": _averaging(gradient, paft_sync(_adam(), DATA, PERIOD)),
        "paft_dynamic": _averaging(gradient, paft(_adam(), DATA)),
        "paft_dynamic_overlapped": _averaging(gradient, paft(_adam(), DATA), around=overlapped),
    }
    runs = {name: start(method) for name, method in methods.items()}
    blocks = max(1, 2 * steps // PERIOD)
    seconds = take_turns(runs, blocks * PERIOD)
    found = {name: np.reshape(times, (blocks, PERIOD)).sum(axis=1).tolist() for name, times in seconds.items()}
    fixed, dynamic = runs["paft_sync"].state_of_one[1], runs["paft_dynamic"].state_of_one[1]
    assert min(fixed.divergence.measured, dynamic.divergence.measured) > 0, "replicas never differed, or never met"
    copy, plain = runs["plain"].copy, runs["plain"].working_bytes
    return {
        "plain_seconds": statistics.median(seconds["plain"]),
        "paft_sync_period_10": ratio(found["plain"], found["paft_sync"]),
        "paft_dynamic": ratio(found["plain"], found["paft_dynamic"]),
        "paft_dynamic_overlapped": ratio(found["plain"], found["paft_dynamic_overlapped"]),
        "paft_dynamic_period": int(dynamic.period),
        "paft_dynamic_synchronizations": int(dynamic.synchronizations),
        "paft_dynamic_steps": int(dynamic.step),
        **{f"{name}_extra_copies": (runs[name].working_bytes - plain) / copy for name in list(runs)[1:]},
    }


def _lossy(start: Callable[[Method], Run], gradient: Any, steps: int) -> dict[str, Any]:
    """Against ZeRO-2 that loses nothing."""
    lossy = functools.partial(lossy_zero2, _adam(), DATA, RATE, RATE)
    methods = {
        "lossless": Method(*plain_zero2(gradient, _adam(), DATA, WORKERS)),
        "lossy_p_0.1": _local(gradient, lossy(packet=PACKET)),
        "lossy_p_0.1_whole_shards": _local(gradient, lossy()),
    }
    runs = {name: start(method) for name, method in methods.items()}
    seconds = take_turns(runs, steps)
    report = runs["lossy_p_0.1"].state_of_one.report
    assert max(abs(loss - RATE) for loss in (report.gradient_loss, report.parameter_loss)) < RATE / 10
    lossless, copy = runs["lossless"].working_bytes, runs["lossless"].copy
    return {
        "lossless_seconds": statistics.median(seconds["lossless"]),
        **{name: ratio(seconds["lossless"], seconds[name]) for name in list(runs)[1:]},
        **{f"{name}_extra_copies": (runs[name].working_bytes - lossless) / copy for name in list(runs)[1:]},
    }


def _shadow(start: Callable[[Method], Run], gradient: Any, steps: int) -> dict[str, Any]:
    """Against the same ranks, of which the last one's gradient is left out and nothing is compared."""
    watched, optimizer = shadow(gradient, DATA), _adam()

    def idle(params: Tree, state: Tree, tokens: Any) -> tuple[Tree, Tree]:
        works = lax.axis_index(DATA) < WORKERS - 1
        own = gradient(params, tokens)
        mean = jax.tree.map(lambda x: lax.psum(jnp.where(works, x, 0), DATA) / jnp.float32(WORKERS - 1), own)
        return _step(optimizer, mean, params, state)

    def compared(params: Tree, state: Tree, tokens: Any) -> tuple[Tree, Tree]:
        inner, roles, _ = state
        mean, roles, report = watched(roles, params, tokens)
        params, inner = _step(optimizer, mean, params, inner)
        return params, (inner, roles, report.differed)

    def init(params: Tree) -> Tree:
        return optimizer.init(params), init_shadow(WORKERS), jnp.bool_(False)

    runs = {"idle": start(Method(optimizer.init, idle)), "shadow": start(Method(init, compared))}
    seconds = take_turns(runs, 2 * steps)
    roles = runs["shadow"].state_of_one[1]
    assert roles.checked.sum() == 2 * steps + 2, "a step compared nothing"
    if roles.differed.any():
        raise RuntimeError("two ranks of this benchmark differ on the same rows: this machine corrupts data")
    return {
        "shadow_seconds": statistics.median(seconds["shadow"]),
        "shadow_compare": ratio(seconds["idle"], seconds["shadow"]),
    }


def _select() -> float:
    """Seconds to find the threshold of 100 iterations of 2,048 workers with 12 micro-batches."""
    latencies = np.asarray(BoundedLogNormal(0.3).sample(jax.random.key(0), (100, 2048, 12)))
    found = []
    for _ in range(3):
        started = time.perf_counter()
        select_threshold(latencies, 0.5)
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def _gradient(config: TrainConfig, params: Tree, tokens: Any) -> Tree:
    """Of one worker's mean loss."""

    def loss(params: Tree) -> Any:
        return jnp.mean(cross_entropy(logits(config.model, params, tokens[:, :-1]), tokens[:, 1:]))

    return jax.grad(loss)(params)


def _adam() -> optax.GradientTransformation:
    return optax.adam(3e-4)


def _step(
    optimizer: optax.GradientTransformation, gradient: Tree, params: Tree, state: Tree, **extra: Any
) -> tuple[Tree, Tree]:
    updates, state = optimizer.update(gradient, state, params, **extra)
    return optax.apply_updates(params, updates), state


def _averaging(gradient: Any, optimizer: Any, around: Callable[[Any], Step] = lambda step: step) -> Method:
    """Data parallelism: an optimizer behind the mean of all gradients, which comes to each worker with some noise.

    Noise on one leaf is enough for replicas to drift, and takes next to no time.
    """

    def noisy(params: Tree) -> Tree:
        return {name: jax.tree.map(lambda _, name=name: name == "embedding", part) for name, part in params.items()}

    whole = optax.chain(optax.masked(gradient_noise(DATA, SIGMA), noisy), optimizer)

    def step(params: Tree, state: Tree, tokens: Any, **extra: Any) -> tuple[Tree, Tree]:
        return _step(whole, lax.pmean(gradient(params, tokens), DATA), params, state, **extra)

    return Method(whole.init, around(step))


def _local(gradient: Any, optimizer: Any) -> Method:
    """An optimizer that takes each worker's own gradient."""

    def step(params: Tree, state: Tree, tokens: Any) -> tuple[Tree, Tree]:
        return _step(optimizer, gradient(params, tokens), params, state)

    return Method(optimizer.init, step)


def _on(mesh: Mesh, fn: Callable[..., Any], donate: tuple[int, ...] = ()) -> Any:
    """A function of one worker, jitted for arrays with a leading axis of workers."""

    def one(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], fn(*jax.tree.map(lambda x: x[0], args)))

    placed = jax.shard_map(one, mesh=mesh, in_specs=P(DATA), out_specs=P(DATA), check_vma=False)
    return jax.jit(placed, donate_argnums=donate)
