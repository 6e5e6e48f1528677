"""What benchmarks run, times of programs that take turns, and their ratios."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from sdc.train import TrainConfig
from sdc.train.programs import Placement, described_batch, initial_state, place, plain, sharded


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


def take_turns(runs: Mapping[str, Callable[[], Any]], steps: int) -> dict[str, list[float]]:
    """Seconds of each run, after two rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(steps + 2):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(plain: list[float], other: list[float]) -> float:
    """Median of the ratios of neighbours in time, which share what else the machine does."""
    return statistics.median(b / a for a, b in zip(plain, other, strict=True))
