"""Shows the progress of a run: a live line on a terminal, or a plain line every ten seconds if the output goes to a
pipe or file."""

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as Bar,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from sdc.results import counted
from sdc.train import Peers

EVERY = 10.0  # seconds between lines if standard error is not a terminal


class _Remaining(TimeRemainingColumn):
    """Shows nothing while the time is unknown, as during compilation."""

    def render(self, task: Task) -> Text:
        return Text() if task.time_remaining is None else super().render(task)


class _Line:
    """A progress bar with a status text on standard error; plain lines if standard error is piped."""

    def __init__(self, what: str, total: int, *, first: int, show: bool = True) -> None:
        console = Console(stderr=True)
        self._what, self._total = what, total
        self._bar = Bar(
            TextColumn(what),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            _Remaining(),
            console=console,
            disable=not (show and console.is_terminal),
        )
        self._piped = show and not console.is_terminal
        self._ended = threading.Event()
        self._task = self._bar.add_task("", total=total, completed=first, text="compiling")
        self._now = first, "compiling"

    def __enter__(self) -> Any:
        self._bar.start()
        if self._piped:
            threading.Thread(target=self._repeat, daemon=True, name="progress").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._bar.stop()

    def _refresh(self, completed: int, text: str) -> None:
        self._now = completed, text
        self._bar.update(self._task, completed=completed, text=text)

    def _repeat(self) -> None:
        started = time.monotonic()
        while not self._ended.wait(EVERY):
            completed, text = self._now
            seconds = time.monotonic() - started
            plain = Text.from_markup(text).plain
            print(f"{self._what} {completed} of {self._total}  {plain}  {seconds:.0f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(peers: Peers) -> Iterator[threading.Event]:
    """Prints every ten seconds that this process is waiting for others; if they cannot be reached yet, prints the first
    line immediately.

    Printing stops when the yielded event is set or the block ends.
    """
    over = threading.Event()

    def repeat() -> None:
        started, before, known = time.monotonic(), "", peers.known()
        while not (known and over.wait(EVERY)):
            tried, seconds = peers.tried(), time.monotonic() - started
            if over.is_set():
                return
            problem, before = "" if tried == before else tried, tried  # printed once
            print(f"waiting for the other processes{problem}  {seconds:.0f} s", file=sys.stderr, flush=True)
            known = True

    threading.Thread(target=repeat, daemon=True, name="waiting").start()
    try:
        yield over
    finally:
        over.set()


class Progress(_Line):
    """Shows the step, the loss, the number of mismatches and the time left."""

    def __init__(self, steps: int, *, show: bool) -> None:
        super().__init__("step", steps, first=0, show=show)
        self._mismatched = self._flagged = 0
        self._half: float | None = None

    def update(self, row: Mapping[str, Any]) -> None:
        parts = [*row.get("sites", {}).values(), row.get("state", {}), row.get("gradient", {})]
        self._mismatched += sum(part.get("mismatched", 0) for part in parts)
        text = f"loss {float(row['loss'][0]):.4f}"
        if "state" in row:
            text += f"  [red]{self._mismatched:,} mismatches[/]" if self._mismatched else "  [green]no mismatch[/]"
        if "abft" in row:
            self._flagged += row["abft"]["flagged"]
            text += f"  [red]{self._flagged:,} rows flagged[/]" if self._flagged else "  [green]no flag[/]"
        for loss in row.get("outlook", {}).get("losses", ()):
            self._half = loss["steps"] if loss["fraction"] == 0.5 else self._half
        if self._half is not None:
            text += f"  half lost: {self._half:.3g} steps"
        self._refresh(row["step"] + 1, text)


class InjectionProgress(_Line):
    """Shows the number of injections, the outcomes so far and the time left."""

    def __init__(self, injections: int, *, first: int) -> None:
        super().__init__("injection", injections, first=first)
        self._outcomes: Counter[str] = Counter()

    def update(self, row: Mapping[str, Any]) -> None:
        self._outcomes[row["outcome"]] += 1
        text = "  ".join(f"{name} {count:,}" for name, count in sorted(self._outcomes.items()))
        self._refresh(row["injection"] + 1, text)


class CountProgress(_Line):
    """Shows how many parts are done, out of a number known in advance."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__(what, total, first=0)
        self._done = 0

    def advance(self, text: str) -> None:
        """Counts one more part as done; the text describes the next part."""
        self._done += 1
        self._refresh(self._done, text)


class StageProgress(_Line):
    """Shows the current stage when the number of stages is not known in advance; thread-safe."""

    def __init__(self, what: str) -> None:
        super().__init__(what, 1, first=0)
        self._begun, self._one = 0, threading.Lock()

    def begin(self, text: str) -> None:
        with self._one:
            self._begun += 1
            self._total = self._begun
            self._bar.update(self._task, total=self._total)
            self._refresh(self._begun - 1, text)


class BurninProgress(_Line):
    """Shows the elapsed time or the number of rounds, the current workload, and the number of differences so far."""

    def __init__(self, minutes: float | None, rounds: int | None) -> None:
        super().__init__("burn-in", round(60 * minutes) if minutes is not None else rounds or 0, first=0)
        self._timed = minutes is not None
        self._began: float | None = None
        self._round = self._found = 0

    def update(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "round":
            self._began = self._began or time.monotonic()
            self._round = event["round"]
        self._found += event["event"] == "finding"
        done = round(time.monotonic() - (self._began or time.monotonic())) if self._timed else self._round
        seen = f"[red]{counted(self._found, 'difference')}[/]" if self._found else "[green]no difference[/]"
        doing = {"compile": "compiling ", "run": f"round {self._round + 1}  "}.get(event["event"])
        if doing is not None:
            self._refresh(done, f"{doing}{event['workload']}  {seen}")
