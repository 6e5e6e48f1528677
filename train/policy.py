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


class Golden:
    """Stops a traced run where it parts from a recorded trace.

    Args:
        folder: folder of the recorded trace.

    Raises:
        RecordError: the folder holds no trace, or a damaged one.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.trace = twins.read_trace(Path(folder))
        self.compared = 0
        self.found: tuple[int, "twins.FirstDifference"] | None = None

    def check(self, manifest: Mapping[str, Any]) -> None:
        """Refuses to compare with a run whose difference would mean nothing.

        Raises:
            NotComparable: with what differs.
        """
        twins.check_comparable(self.trace.manifest, manifest)

    def recall(self, folder: Path, *, before: int) -> None:
        """Judges the steps that a resumed run has on record already.

        Args:
            folder: folder of the run.
            before: number of the step at which the run goes on.
        """
        for step, line in twins.read_trace(folder).lines.items():
            if step < before:
                self(Judged(step, 0, {}, [line]))

    def __call__(self, judged: Judged) -> Answer:
        if self.found is not None:
            return Answer.STOP
        golden = self.trace.lines.get(judged.step)
        if golden is None:
            return Answer.CONTINUE
        self.compared += 1
        (line,) = judged.details
        if line["digests"] == golden["digests"]:
            return Answer.CONTINUE
        here = dataclasses.replace(self.trace, lines={judged.step: line})
        first = twins.first_difference(self.trace[judged.step], here[judged.step])
        assert first is not None, "digests that differ as text"
        self.found = judged.step, first
        return Answer.STOP

    def conclude(self) -> dict[str, Any]:
        """Verdict, reason, and the first difference if there is one."""
        path = self.trace.path
        if self.found is not None:
            step, place = self.found
            return {
                "verdict": "corrupt",
                "reason": f"it parts from {path} at step {step}: {place}",
                "first_difference": {"step": step, **place.describe()},
            }
        if not self.compared:
            return {"verdict": "inconclusive", "reason": f"{path} has none of its steps"}
        return {"verdict": "clean", "reason": f"{self.compared:,} steps agree with {path} in every digest"}
