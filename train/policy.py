"""Policies: asked after each step of a run, they decide how it goes on. `Golden` compares with a recorded trace.

A step is run again, or the run rolled back, only where a policy asks for it. The state is then kept until the policy
has decided, which costs the memory of a second state; without a policy it is given away to the step.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from sdc import twins

PATIENCE = 10  # decisions in a row that keep a run from going on, after which it gives up


class Decision(enum.Enum):
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


class Attempt(NamedTuple):
    """A step that was run, as a policy sees it.

    Attributes:
        step: number of the step.
        number: how often it has been run again before.
        row: its line in `steps.jsonl`.
        details: its lines in the file beside that.
    """

    step: int
    number: int
    row: Mapping[str, Any]
    details: Sequence[Mapping[str, Any]]


# In a run of several processes all are asked, and all do what the first one's says
StepPolicy: TypeAlias = Callable[[Attempt], Decision]


class PolicyError(RuntimeError):
    """A policy that does not let a run go on."""


class Golden:
    """Stops a traced run where it parts from a recorded trace."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.trace = twins.read_trace(Path(folder))
        self.compared = self.unmatched = 0
        self.found: tuple[int, twins.FirstDifference] | None = None

    def check(self, manifest: Mapping[str, Any]) -> None:
        """Refuses to compare with a run whose difference would mean nothing."""
        twins.check_comparable(self.trace.manifest, manifest)

    def recall(self, folder: Path, *, before: int) -> None:
        """Compares the steps that a resumed run has on record already."""
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
        assert first is not None, "digests that differ as text"
        self.found = attempt.step, first
        return Decision.STOP

    def conclude(self) -> dict[str, Any]:
        path = self.trace.path
        if self.found is not None:
            step, place = self.found
            reason = f"it parts from {path} at step {step}: {place}"
            return {"verdict": "corrupt", "reason": reason, "first_difference": place.describe(step)}
        if not self.compared:
            return {"verdict": "inconclusive", "reason": f"{path} has none of its steps"}
        more = f"; {self.unmatched:,} more steps are not in it, and were not compared" if self.unmatched else ""
        return {"verdict": "clean", "reason": f"{self.compared:,} steps agree with {path} in every digest{more}"}
