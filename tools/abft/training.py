"""The reference workload on one device, step by step, for measurements of its products."""

import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from sdc.record.determinism import prepare
from sdc.train.config import check
from sdc.train.data import batches
from sdc.train.loop import place_batch
from sdc.train.placement import place
from sdc.train.programs.device import initial_state, plain, sharded

from ..errors import usage_errors
from .options import CalibrateOptions, StudyOptions, workload_of


def start(options: StudyOptions | CalibrateOptions) -> None:
    """Starts the devices, after a look at the flags.

    Raises:
        CommandError: one of them makes no sense.
    """
    with usage_errors():
        if options.steps < 1:
            raise ValueError(f"--steps {options.steps}: expected at least 1")
        if not options.dtypes:
            raise ValueError("--dtypes: expected float32, bfloat16 or both")
        prepare(cpu_devices=1, cpu_threads=os.cpu_count())


def train(
    options: StudyOptions | CalibrateOptions,
    dtype: Literal["float32", "bfloat16"],
    transform: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[tuple[Any, Callable[..., Any], tuple[Any, Any]]]:
    """Trains for the steps asked for; yields the reports of the transformed step, the plain step, and its arguments.

    Args:
        options: of the command.
        dtype: of activations.
        transform: of a step, which returns `(out, reports)` then.
    """
    with usage_errors():
        config, dataset = workload_of(options, dtype).load()
        check(config, 1, 1)
        work, placement = sharded(config), place(twins=None, data=1, model=1, devices=jax.devices()[:1])
        step = plain(work, placement)
        source = batches(dataset, batch_size=config.batch_size, microsteps=config.microsteps)
    run = jax.jit(transform(step))
    state = initial_state(work, placement, options.seed)
    for _ in range(options.steps):
        tokens = place_batch(next(source), placement)
        arguments = state, tokens
        (state, _), reports = run(*arguments)
        yield reports, step, arguments
