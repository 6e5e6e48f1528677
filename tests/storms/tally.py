"""Outcomes of the trials of a storm."""

import contextlib
import dataclasses
import io
import re
from collections import Counter
from pathlib import Path

WRONG = ("false clean", "false corrupt", "hang", "traceback", "other bits", "odd exit code", "leak", "coverage")
TRACE = re.compile(
    r"Traceback \(most recent call last\)|\*\*\* Check failure stack trace|^Fatal Python error", re.MULTILINE
)


@dataclasses.dataclass
class Tally:
    """Counts of a storm.

    Attributes:
        name: name of the storm.
        trials: number of trials run.
        seen: counts of allowed outcomes.
        wrong: forbidden outcomes, one line each, beginning with an entry of `WRONG`.
    """

    name: str
    trials: int = 0
    seen: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def note(self, what: str) -> None:
        """Counts an allowed outcome."""
        self.seen[what] += 1

    def fail(self, what: str, where: str) -> None:
        """Records a forbidden outcome."""
        assert what in WRONG, what
        self.wrong.append(f"{what}: {where}")
        print(f"  WRONG {what}: {where}", flush=True)

    def read(self, text: str, where: str) -> None:
        """Records a forbidden outcome if a process printed a stack trace."""
        if TRACE.search(text):
            self.fail("traceback", f"{where}\n{text[-3000:]}")

    def lines(self) -> list[str]:
        """Returns the result as text."""
        seen = ", ".join(f"{what} {count}" for what, count in sorted(self.seen.items()))
        wrong = ", ".join(f"{what} {sum(one.startswith(what) for one in self.wrong)}" for what in WRONG)
        return [f"{self.name}: {self.trials} trials", f"  seen: {seen}", f"  wrong: {wrong}", *self.wrong]


def verdict_of(folder: Path) -> str | None:
    """Returns the verdict of a record, by the exit code of `sdc report`."""
    from sdc.tools import cli

    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(["report", str(folder), "--json"])
    return {0: "clean", 1: "corrupt", 2: "refused", 3: "inconclusive"}.get(code, f"code {code}")
