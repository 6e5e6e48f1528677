"""The verdict: one enum for every tool, with the words that people read and the exit codes that scripts read.

A verdict follows from a result alone: readers of a file derive the verdict again from the counts, which take precedence
over a stored verdict. A result without checks is inconclusive, not clean.
"""

import decimal
import math
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import NamedTuple

__all__ = ["SIMULATED", "Exit", "Judgement", "Verdict", "exit_code", "gravest", "limit"]

# Next step for a host after a rehearsal.
SIMULATED = "no action on the host, because these faults are simulated"


class Exit(IntEnum):
    """Exit codes of every command."""

    CLEAN = 0
    CORRUPT = 1
    USAGE = 2
    INCONCLUSIVE = 3


class Verdict(StrEnum):
    """Verdicts in order of severity, the most severe first. A run that compares nothing has no verdict (`None`)."""

    CORRUPT = "corrupt"
    INCONCLUSIVE = "inconclusive"
    CLEAN = "clean"

    @property
    def code(self) -> Exit:
        """Exit code of this verdict."""
        return Exit[self.name]

    @property
    def acceptance(self) -> str:
        """The verdict of an acceptance test on a device or host: FAIL, INCONCLUSIVE or PASS."""
        return {Verdict.CORRUPT: "FAIL", Verdict.CLEAN: "PASS"}.get(self, "INCONCLUSIVE")

    @property
    def fitness(self) -> str:
        """The verdict on an environment: NOT FIT, INCONCLUSIVE or FIT."""
        return {Verdict.CORRUPT: "NOT FIT", Verdict.CLEAN: "FIT"}.get(self, "INCONCLUSIVE")


class Judgement(NamedTuple):
    """A verdict (None if nothing is compared), and the reason for it in words."""

    verdict: Verdict | None
    reason: str

    def marked(self) -> "Judgement":
        """Returns this judgement on a step with simulated faults."""
        return self._replace(reason=f"with simulated faults, {self.reason}")

    def __str__(self) -> str:
        return f"{self.verdict or 'no verdict'}: {self.reason}"


def gravest(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    """Returns the most severe of the given verdicts; None if all are None."""
    order = list(Verdict)
    return min((each for each in verdicts if each is not None), key=order.index, default=None)


def exit_code(verdict: str | None) -> int:
    """Returns the exit code of a verdict; 0 for None, the verdict of a run that compares nothing."""
    return int(Exit.CLEAN if verdict is None else Verdict(verdict).code)


def limit(value: float, digits: int, *, up: bool) -> str:
    """Formats an upper limit, rounded up, or a lower limit, rounded down, so that it holds as it is printed.

    Example:
        >>> from sdc.verdict import limit
        >>> limit(4.60517, 2, up=True), limit(450.64, 3, up=False)
        ('4.7', '450')
    """
    if math.isfinite(value):
        rounding = decimal.ROUND_CEILING if up else decimal.ROUND_FLOOR
        near = decimal.Context(prec=14).create_decimal_from_float(value)  # 19, not 19.000000000000004
        value = float(decimal.Context(prec=digits, rounding=rounding).plus(near))
    return f"{value:.{digits}g}"
