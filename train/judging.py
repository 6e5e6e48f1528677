"""Judges: asked after each step of a run, they say how it goes on.

A step is run again, or the run rolled back, only where a judge asks for it. The state is then kept until the judge has
answered, which costs the memory of a second state; without a judge it is given away to the step.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

PATIENCE = 10
"""Answers in a row that keep a run from going on, after which it gives up."""


class Answer(enum.Enum):
    """How a run goes on."""

    CONTINUE = "continue"
    """Record the step, and do the next one."""
    RERUN = "rerun"
    """Run the same step again, from the same state and on the same batch. Its line of this time goes to
    `discarded.jsonl`."""
    ROLL_BACK = "roll back"
    """Go back to the newest checkpoint; the lines of the steps since then go to `discarded.jsonl`."""
    STOP = "stop"
    """Record the step, save a checkpoint, and end the run."""


class Judged(NamedTuple):
    """What a judge is shown.

    Attributes:
        step: number of the step.
        attempt: how often it has been run again before.
        row: its line in `steps.jsonl`.
        details: its lines in the file beside that.
    """

    step: int
    attempt: int
    row: Mapping[str, Any]
    details: Sequence[Mapping[str, Any]]


Judge: TypeAlias = Callable[[Judged], Answer]
"""In a run of several processes all are asked, and all do what the first one's says."""


class JudgeError(RuntimeError):
    """A judge that does not let a run go on."""
