"""A live line on a terminal while a run goes on; nothing where there is no terminal."""

from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn


class _Line:
    """A bar on standard error, with a text that tells how things stand."""

    def __init__(self, what: str, total: int, *, first: int, show: bool = True) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn(what),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (show and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=total, completed=first, text="compiling")

    def __enter__(self) -> Any:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _tell(self, completed: int, text: str) -> None:
        self._bar.update(self._task, completed=completed, text=text)


class Progress(_Line):
    """Shows step, loss, mismatches and time left."""

    def __init__(self, steps: int, *, show: bool) -> None:
        super().__init__("step", steps, first=0, show=show)
        self._mismatched = self._flagged = 0

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows a row of `steps.jsonl`."""
        parts = [*row.get("sites", {}).values(), row.get("state", {}), row.get("gradient", {})]
        self._mismatched += sum(part.get("mismatched", 0) for part in parts)
        text = f"loss {float(row['loss'][0]):.4f}"
        if "state" in row:
            text += f"  [red]{self._mismatched:,} mismatches[/]" if self._mismatched else "  [green]no mismatch[/]"
        if "abft" in row:
            self._flagged += row["abft"]["flagged"]
            text += f"  [red]{self._flagged:,} rows flagged[/]" if self._flagged else "  [green]no flag[/]"
        self._tell(row["step"] + 1, text)


class InjectionProgress(_Line):
    """Shows injections done, outcomes so far and time left."""

    def __init__(self, injections: int, *, first: int) -> None:
        super().__init__("injection", injections, first=first)
        self._outcomes: Counter[str] = Counter()

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows a row of `injections.jsonl`."""
        self._outcomes[row["outcome"]] += 1
        text = "  ".join(f"{name} {count:,}" for name, count in sorted(self._outcomes.items()))
        self._tell(row["injection"] + 1, text)


class CountProgress(_Line):
    """Shows how many of so many parts are done."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__(what, total, first=0)
        self._done = 0

    def advance(self, text: str) -> None:
        """One more part is done; the text says what comes next."""
        self._done += 1
        self._tell(self._done, text)
