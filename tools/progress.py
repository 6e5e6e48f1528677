"""A live line on a terminal while a run goes on; nothing where there is no terminal."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows step, loss, mismatches and time left on standard error."""

    def __init__(self, steps: int, *, first: int, show: bool) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (show and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=steps, completed=first, text="compiling")
        self._mismatched = 0

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows a row of `steps.jsonl`."""
        parts = [*row.get("sites", {}).values(), row.get("state", {}), row.get("gradient", {})]
        self._mismatched += sum(part.get("mismatched", 0) for part in parts)
        text = f"loss {float(row['loss'][0]):.4f}"
        if "sites" in row:
            text += f"  [red]{self._mismatched:,} mismatches[/]" if self._mismatched else "  [green]no mismatch[/]"
        self._bar.update(self._task, completed=row["step"] + 1, text=text)


class InjectionProgress:
    """Shows injections done, outcomes so far and time left on standard error."""

    def __init__(self, injections: int, *, first: int) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("injection"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=injections, completed=first, text="compiling")
        self._outcomes: Counter[str] = Counter()

    def __enter__(self) -> "InjectionProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows a row of `injections.jsonl`."""
        self._outcomes[row["outcome"]] += 1
        text = "  ".join(f"{name} {count:,}" for name, count in sorted(self._outcomes.items()))
        self._bar.update(self._task, completed=row["injection"] + 1, text=text)
