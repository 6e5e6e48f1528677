"""A judge that compares a traced run with a recorded trace, so that the healthy node need not run at the same time."""

import dataclasses
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from sdc.twins import FirstDifference, check_comparable, first_difference, read_trace

from .judging import Answer, Judged


class Golden:
    """Stops a traced run where it parts from a recorded trace.

    Args:
        folder: folder of the recorded trace.

    Raises:
        RecordError: the folder holds no trace, or a damaged one.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.trace = read_trace(Path(folder))
        self.compared = 0
        self.found: tuple[int, FirstDifference] | None = None

    def check(self, manifest: Mapping[str, Any]) -> None:
        """Refuses to compare with a run whose difference would mean nothing.

        Raises:
            NotComparable: with what differs.
        """
        check_comparable(self.trace.manifest, manifest)

    def recall(self, folder: Path, *, before: int) -> None:
        """Judges the steps that a resumed run has on record already.

        Args:
            folder: folder of the run.
            before: number of the step at which the run goes on.
        """
        for step, line in read_trace(folder).lines.items():
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
        first = first_difference(self.trace[judged.step], here[judged.step])
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
