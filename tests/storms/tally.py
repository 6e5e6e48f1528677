"""What came of the trials of a storm."""

import contextlib
import dataclasses
import io
import re
from collections import Counter
from pathlib import Path

WRONG = ("false clean", "false corrupt", "hang", "traceback", "other bits", "odd exit code")
TRACE = re.compile(
    r"Traceback \(most recent call last\)|\*\*\* Check failure stack trace|^Fatal Python error", re.MULTILINE
)


@dataclasses.dataclass
class Tally:
    """Counts of a storm.

    Attributes:
        name: name of the storm.
        trials: how many were done.
        seen: what came of them, in words.
        wrong: what should not have come of them, one line each, beginning with a word of `WRONG`.
    """

    name: str
    trials: int = 0
    seen: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def note(self, what: str) -> None:
        """Counts something that may happen."""
        self.seen[what] += 1

    def fail(self, what: str, where: str) -> None:
        """Keeps something that must not happen."""
        assert what in WRONG, what
        self.wrong.append(f"{what}: {where}")
        print(f"  WRONG {what}: {where}", flush=True)

    def read(self, text: str, where: str) -> None:
        """Looks for traces in what a process printed."""
        if TRACE.search(text):
            self.fail("traceback", f"{where}\n{text[-3000:]}")

    def lines(self) -> list[str]:
        """The result as text."""
        seen = ", ".join(f"{what} {count}" for what, count in sorted(self.seen.items()))
        wrong = ", ".join(f"{what} {sum(one.startswith(what) for one in self.wrong)}" for what in WRONG)
        return [f"{self.name}: {self.trials} trials", f"  seen: {seen}", f"  wrong: {wrong}", *self.wrong]


def verdict_of(folder: Path) -> str | None:
    """The verdict of a record, by its page's exit code: what `sdc report` says to a script."""
    from sdc.tools import cli

    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(["report", str(folder), "--json"])
    return {0: "clean", 1: "corrupt", 2: "refused", 3: "inconclusive"}.get(code, f"code {code}")
