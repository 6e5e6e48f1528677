"""Policies, which decide after each step how a run continues. `Golden` compares the run with a recorded trace.

Only a policy can decide to repeat a step or to roll a run back. With a policy, the previous state is kept until the
policy has decided, which requires memory for a second state; without a policy, the state is donated to the step.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from sdc import twins

PATIENCE = 10  # a run gives up after this number of consecutive decisions other than CONTINUE


class Decision(enum.Enum):
    """How a run continues."""

    CONTINUE = "continue"
    """Record the step, and run the next one."""
    RERUN = "rerun"
    """Repeat the step from the same state on the same batch. The line of this attempt goes to `discarded.jsonl`."""
    ROLL_BACK = "roll back"
    """Roll back to the newest checkpoint; the lines of later steps go to `discarded.jsonl`."""
    STOP = "stop"
    """Record the step, save a checkpoint, and end the run."""


class Attempt(NamedTuple):
    """One attempt at a step, the input of a policy.

    Attributes:
        step: number of the step.
        number: number of earlier attempts at the step.
        row: line of the attempt in `steps.jsonl`.
        details: lines of the attempt in the accompanying file.
    """

    step: int
    number: int
    row: Mapping[str, Any]
    details: Sequence[Mapping[str, Any]]


# If a run has several processes, the policies are called in every process, and the decision of process 0 applies
StepPolicy: TypeAlias = Callable[[Attempt], Decision]


class PolicyError(RuntimeError):
    """A policy prevents a run from continuing."""


class Golden:
    """Stops a traced run at the first difference from a recorded trace."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.trace = twins.read_trace(Path(folder))
        self.compared = self.unmatched = 0
        self.found: tuple[int, twins.FirstDifference] | None = None

    def check(self, manifest: Mapping[str, Any]) -> None:
        """Raises an error if a difference from the recorded run would be meaningless."""
        twins.check_comparable(self.trace.manifest, manifest)

    def recall(self, folder: Path, *, before: int) -> None:
        """Compares the steps that a resumed run has already recorded with those of the trace."""
        for step, line in twins.read_trace(folder).lines.items():
            if step < before:
                self(Attempt(step, 0, {}, [line]))

    def __call__(self, attempt: Attempt) -> Decision:
        if self.found is not None:
            return Decision.STOP
        golden = self.trace.lines.get(attempt.step)
        if golden is None:
            self.unmatched += 1
            return Decision.CONTINUE
        self.compared += 1
        (line,) = attempt.details
        if line["digests"] == golden["digests"]:
            return Decision.CONTINUE
        here = dataclasses.replace(self.trace, lines={attempt.step: line})
        first = twins.first_difference(self.trace[attempt.step], here[attempt.step])
        assert first is not None, "the digests differ as text, but not as numbers"
        self.found = attempt.step, first
        return Decision.STOP

    def conclude(self) -> dict[str, Any]:
        path = self.trace.path
        if self.found is not None:
            step, place = self.found
            reason = f"the run first differs from {path} at step {step}: {place}"
            return {"verdict": "corrupt", "reason": reason, "first_difference": place.describe(step)}
        if not self.compared:
            return {"verdict": "inconclusive", "reason": f"{path} and this run have no step in common"}
        more = (
            f"; {self.unmatched:,} further steps are not in that trace and were not compared" if self.unmatched else ""
        )
        return {"verdict": "clean", "reason": f"{self.compared:,} steps agree with {path} in every digest{more}"}
