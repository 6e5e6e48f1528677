"""The verdict: one enum for every tool, the words that people read, and the exit codes that scripts read.

A verdict follows from a result and from nothing else: whoever reads a file judges anew, and a stored word never beats
what the file counts. Nothing is clean because nothing was checked: that is inconclusive.
"""

from collections.abc import Iterable
from enum import IntEnum, StrEnum

__all__ = ["SIMULATED", "Exit", "Verdict", "exit_code", "gravest"]

# What to do with a host after a rehearsal.
SIMULATED = "nothing with the host: these faults are simulated"


class Exit(IntEnum):
    """Exit codes of every command."""

    CLEAN = 0
    CORRUPT = 1
    USAGE = 2
    INCONCLUSIVE = 3


class Verdict(StrEnum):
    """What follows from a result, the gravest first. A run that compares nothing has none (`None`)."""

    CORRUPT = "corrupt"
    INCONCLUSIVE = "inconclusive"
    CLEAN = "clean"

    @property
    def code(self) -> Exit:
        """The exit code."""
        return Exit[self.name]

    @property
    def acceptance(self) -> str:
        """The word for a device or host that was tested: FAIL, INCONCLUSIVE or PASS."""
        return {Verdict.CORRUPT: "FAIL", Verdict.CLEAN: "PASS"}.get(self, "INCONCLUSIVE")

    @property
    def fitness(self) -> str:
        """The word for an environment that was examined: NOT FIT, INCONCLUSIVE or FIT."""
        return {Verdict.CORRUPT: "NOT FIT", Verdict.CLEAN: "FIT"}.get(self, "INCONCLUSIVE")


def gravest(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    """The gravest of some verdicts; None where there is no verdict among them."""
    order = list(Verdict)
    return min((each for each in verdicts if each is not None), key=order.index, default=None)


def exit_code(verdict: str | None) -> int:
    """The exit code of a verdict; 0 where nothing was to be compared."""
    return int(Exit.CLEAN if verdict is None else Verdict(verdict).code)
