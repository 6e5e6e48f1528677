"""The training loop: batches in, steps out, a line in the record for each, a checkpoint now and then, a judge asked."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from sdc.multihost import everyone
from sdc.records import Record

from .checkpoints import Checkpoints
from .cluster import tell
from .judging import PATIENCE, Answer, Judge, Judged, JudgeError
from .placement import Placement
from .programs import Program, Rows
from .running import Keeper
from .step import BATCH_SPEC

FAILURE = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|CANCELLED|ABORTED|DEADLINE_EXCEEDED): ")
"""How the runtime's own errors begin."""


class Batches(Protocol):
    """An endless iterator of global batches whose position can be saved."""

    def __next__(self) -> Int[np.ndarray, "microsteps batch length"]: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


class StepFailed(RuntimeError):
    """A step that raised an error: a fault of the program, and not of what it was given."""


class Done(NamedTuple):
    """How a run ended.

    Attributes:
        state: the last one.
        steps: number of steps on record, those of an earlier part of the run among them.
        reruns: steps that a judge had run again, counted.
        rollbacks: steps after which the run went back, and the steps it went back to.
        stopped: whether it was asked to end before it was done.
    """

    state: Any
    steps: int
    reruns: int
    rollbacks: list[tuple[int, int]]
    stopped: bool


def run_steps(
    program: Program,
    state: Any,
    *,
    steps: range,
    batches: Batches,
    record: Record | None,
    checkpoints: Checkpoints,
    keeper: Keeper | None = None,
    judge: Judge | None = None,
    on_step: Callable[[Mapping[str, Any]], None] = lambda row: None,
    stop: Callable[[], bool] = lambda: False,
) -> Done:
    """Runs the steps of a run.

    Args:
        program: what is run; it must not donate the state if the judge may have a step run again.
        state: state before the first of the steps.
        steps: numbers of the steps.
        batches: iterator of batches, at the position of the first step.
        record: record of the run; None in processes that do not write it.
        checkpoints: saved when due, and after the last step.
        keeper: its running checkpoint and copies are saved when they are due, in the place of others before the last
            step.
        judge: asked after each step.
        on_step: told of each row that is recorded, for the progress display.
        stop: asked after each step that is recorded whether to end early; answers alike in all processes.

    Raises:
        CheckpointError: a checkpoint cannot be written; told when the next one is due.
        JudgeError: the judge does not let the run go on.
        StepFailed: a step did.
    """
    number, reruns, impatient, stopped = steps.start, 0, 0, False
    rollbacks: list[tuple[int, int]] = []
    while number < steps.stop:
        tell(f"in step {number}")
        tokens = place_batch(next(batches), program.placement)
        attempt, answer = 0, Answer.RERUN
        while answer is Answer.RERUN:
            new, rows = _advance(program, state, tokens, number, attempt)
            answer = _agreed(judge, Judged(number, attempt, *rows))
            if record is not None and answer in (Answer.RERUN, Answer.ROLL_BACK):
                record.discard([rows.row], rows.details)
            attempt, impatient = attempt + 1, 0 if answer in (Answer.CONTINUE, Answer.STOP) else impatient + 1
            if impatient > PATIENCE:
                raise JudgeError(f"the judge kept the run from going on at step {number} for {PATIENCE} times")
        reruns += attempt - 1
        if answer is Answer.ROLL_BACK:
            if checkpoints.latest is None:
                raise JudgeError(f"the judge rolled the run back at step {number}, but there is no checkpoint yet")
            state, position = checkpoints.restore(program.abstract())
            batches.set_state(position)
            rollbacks.append((number, checkpoints.latest))
            number = checkpoints.latest
            if record is not None:
                record.rewind(number)
            continue
        state = new
        if keeper is not None:
            state, losses = keeper.recovered(state, number)
            rows = rows._replace(row={**rows.row, **losses})
        if record is not None:
            record.line(*rows)
        tell(f"at the end of step {number}")
        stopped = stop()
        last = stopped or answer is Answer.STOP or number + 1 == steps.stop
        due = (checkpoints if keeper is None else keeper).due(number + 1)
        if record is not None and (last or due):
            record.sync()  # a run that goes on from the checkpoint needs the lines before it
        if keeper is not None and due:
            keeper.save(state, number + 1, batches.get_state())
        if keeper is None or last:
            checkpoints.save(number + 1, state, batches.get_state(), force=last)
        on_step(rows.row)
        number += 1
        if last:
            break
    return Done(state, number, reruns, rollbacks, stopped and number < steps.stop)


def _advance(program: Program, state: Any, tokens: Array, number: int, attempt: int) -> tuple[Any, Rows]:
    """One step, and what the record has of it."""
    started = time.perf_counter()
    try:
        new, out = program.step(state, tokens, number)
        new, seen = program.observe(new, out)
        row, details = program.rows(number, out, seen)
    except ValueError as error:
        if jax.process_count() > 1 and FAILURE.match(str(error)):
            # Some calls of the runtime tell a lost peer so: it is for `joined` to find out which it was.
            raise jax.errors.JaxRuntimeError(str(error)) from error
        raise StepFailed(f"step {number} failed: {error}") from error
    again = {"attempts": attempt + 1} if attempt else {}
    return new, Rows({"step": number, **row, **again, "seconds": time.perf_counter() - started}, details)


def _agreed(judge: Judge | None, judged: Judged) -> Answer:
    """What the first process's judge says, in all processes."""
    if judge is None:
        return Answer.CONTINUE
    answer = judge(judged)
    if not isinstance(answer, Answer):
        raise JudgeError(f"the judge answered {answer!r} at step {judged.step}; expected an Answer")
    return Answer(everyone(answer.value)[0])


def place_batch(tokens: Int[np.ndarray, "microsteps batch length"], placement: Placement) -> Array:
    """A global batch on the mesh; each process takes its part of the batch that all of them hold."""
    sharding = NamedSharding(placement.mesh, BATCH_SPEC)
    return jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])
