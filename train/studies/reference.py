"""The reference workload on one device, step by step, for measurements of its products."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from .. import Dataset, TrainConfig, batches
from ..programs import DType, check, initial_state, place, place_batch, plain, sharded

Step = Callable[..., Any]


def reference_steps(
    config: TrainConfig,
    dataset: Dataset,
    dtype: DType,
    transform: Callable[[Step], Step],
    *,
    steps: int,
    seed: int,
) -> Iterator[tuple[Any, Step, tuple[Any, Any]]]:
    """Trains, and hands over what a transformation of the step reports."""
    config = config.of_type(dtype)
    check(config, 1, 1)
    placement = place(twins=None, data=1, model=1, devices=jax.devices()[:1])
    source = batches(dataset, batch_size=config.batch_size, microsteps=config.microsteps)
    work = sharded(config)
    step = plain(work, placement)
    run = jax.jit(transform(step))
    state = initial_state(work, placement, seed)
    for _ in range(steps):
        arguments = state, place_batch(next(source), placement)
        (state, _), reports = run(*arguments)
        yield reports, step, arguments
