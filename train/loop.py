"""The training loop: batches in, steps out, a line in the record for each, a checkpoint now and then."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from sdc.record.records import RunWriter

from .checkpoints import Checkpoints
from .placement import Placement
from .step import BATCH_SPEC


class Batches(Protocol):
    """An endless iterator of global batches whose position can be saved."""

    def __next__(self) -> Int[np.ndarray, "microsteps batch length"]: ...

    def get_state(self) -> dict[str, Any]: ...


Advance = Callable[[Any, Array, int], tuple[Any, Mapping[str, Any], Sequence[Mapping[str, Any]]]]
"""`(state, batch, step) -> (state, row of steps.jsonl, rows of the file of details beside it)`."""


def run_steps(
    state: Any,
    advance: Advance,
    *,
    steps: range,
    batches: Batches,
    placement: Placement,
    writer: RunWriter | None,
    checkpoints: Checkpoints,
    on_step: Callable[[Mapping[str, Any]], None],
    ended: Callable[[], bool] = lambda: False,
) -> Any:
    """Runs the steps of a run.

    Args:
        state: what `advance` carries on; it is what checkpoints hold.
        advance: one step and its measurements.
        steps: numbers of the steps.
        batches: at the position of the first step.
        placement: where the batch goes.
        writer: the run record; None in processes that do not write it.
        checkpoints: saved when due, and after the last step.
        on_step: told of each row, for the progress display.
        ended: asked after each step; true ends the run early.

    Returns:
        The last state; all checkpoints are on disk.

    Raises:
        CheckpointError: one cannot be written. It comes when the next one is due, or at the end.
    """
    with checkpoints:
        for step in steps:
            tokens = place_batch(next(batches), placement)
            started = time.perf_counter()
            state, row, details = advance(state, tokens, step)
            row = {"step": step, **row, "seconds": time.perf_counter() - started}
            if writer is not None:
                writer.step(row, details)
            last = ended() or step + 1 == steps.stop
            checkpoints.save(step + 1, state, batches.get_state(), force=last)
            on_step(row)
            if last:
                break
    return state


def place_batch(tokens: Int[np.ndarray, "microsteps batch length"], placement: Placement) -> Array:
    """A global batch on the mesh; each process takes its part of the batch that all of them hold."""
    sharding = NamedSharding(placement.mesh, BATCH_SPEC)
    return jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])
