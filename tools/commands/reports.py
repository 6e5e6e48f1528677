"""`sdc report` of runs, `sdc diff` of two traces, and `sdc checkpoint` of certified checkpoints."""

import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tyro

from sdc import analysis, burnin, checkpoints, tools, twins
from sdc.analysis import report as pages, studies
from sdc.records import MANIFEST, read_manifest
from sdc.settings import SettingError
from sdc.verdict import Verdict, exit_code, gravest

from .. import CommandError, ResultCommand, gently, run_errors, usage_errors
from .verdict import seconds_of


@dataclasses.dataclass(frozen=True)
class ReportCommand(ResultCommand):
    """Writes the report of a run, or of several runs side by side.

    Example: sdc report runs/demo
    Example: sdc report runs/plain runs/partial runs/full

    Writes report.html and report.md into the folder of a run, finished or not, and prints a summary of the run. Given a
    folder of runs, it writes a report of each run, and an index.html in which the most severe runs come first. Given
    two to six runs, it writes one page, beside-FIRST.html, into the folder of the last run. Given the folder of a
    burn-in, it writes its page. The exit code is that of the most severe run: 0 clean, 1 corruption found, 2 bad usage,
    3 inconclusive.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folder, a folder of run folders, or several run folders."""
    output: Path | None = None
    """Folder for the page of several runs; by default that of the last run."""


@dataclasses.dataclass(frozen=True)
class DiffCommand(ResultCommand):
    """Finds the first step and operation in which two traces differ.

    Example: sdc diff runs/golden runs/suspect
    Example: sdc diff runs/golden runs/suspect --output runs/difference

    Exit codes: 0 the traces agree, 1 they differ, 2 bad usage or a damaged trace, 3 they cannot be compared.
    """

    run_a: Annotated[Path, tyro.conf.Positional]
    """Run folder of a trace."""
    run_b: Annotated[Path, tyro.conf.Positional]
    """Run folder of another trace of the same program."""
    output: Path | None = None
    """Folder for a report of the comparison, diff.html and diff.md; by default none is written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointCommand(ResultCommand):
    """Inspects certified checkpoints of any program that uses Orbax.

    Example: sdc checkpoint verify runs/my-training/checkpoints --step 100
    Example: sdc checkpoint scrub runs/my-training/checkpoints --every 1h

    Exit codes: 0 every checkpoint was restored exactly as it was saved, 1 at least one was not, 2 bad usage, 3 at least
    one could not be compared (no certificate, or unreadable files).
    """

    action: tyro.conf.Positional[Literal["show", "verify", "scrub", "certify"]]
    """List checkpoints and their states (show), restore and compare them (verify), do so slowly and mark those that
    differ as damaged, also while a run saves and deletes checkpoints (scrub), or certify the present contents of
    checkpoints that have no certificate (certify)."""
    folder: tyro.conf.Positional[str]
    """Folder that an Orbax checkpointer wrote, with one folder for each step."""
    step: Annotated[tuple[int, ...], tyro.conf.UseAppendAction] = ()
    """Step of a checkpoint to inspect; may be repeated. By default, all checkpoints are inspected."""
    every: str | None = None
    """Interval between the starts of two scrubs, such as 1h, until SIGTERM or SIGINT; by default, one scrub."""
    rate: float = 2.0**26
    """Bytes of arrays that a scrub reads per second."""


def report(options: ReportCommand) -> int:
    if not options.runs:
        raise CommandError("RUNS: expected a run folder, a folder of run folders, or several run folders")
    first, *more = options.runs
    if not more and options.output is not None:
        raise CommandError(
            "--output: the report of one run is in its own folder; give several runs, or leave the flag out"
        )
    # Folders without a run are refused before `sdc.analysis` imports JAX.
    with usage_errors():
        several = os.path.isdir(first) and not os.path.exists(first / MANIFEST) and any(first.glob(f"*/{MANIFEST}"))
        if not more and os.path.isfile(first / burnin.RESULT) and not os.path.exists(first / MANIFEST):
            tested = burnin.BURN_IN.read(first)
            page = str(analysis.write_burnin_report(tested, first))
            shown = {**msgspec.to_builtins(tested), "report": page}
            tools.show(shown, analysis.burnin_report(tested), as_json=options.json)
            return tested.verdict.code
        for folder in options.runs if more or not several else ():
            read_manifest(folder)
        if more or several:
            result = (
                analysis.write_beside(first, more[0], options.output, more=more[1:])
                if more
                else analysis.write_overview(first)
            )
            tools.show(msgspec.to_builtins(result), _several(result), as_json=options.json)
            return exit_code(result.verdict)
        found = analysis.draw_conclusion(first, write=False)
    tools.show(found.contents, found.report, as_json=options.json)
    return exit_code(found.verdict)


def _several(result: "analysis.Overview") -> "Iterator[pages.Part]":
    """Yields a line for each run, and the settings that differ."""
    for one in result.runs:
        yield pages.Text(f"{one.run}  {one.sentence}", lead=one.label, tone=one.verdict or "")
    if isinstance(result, analysis.RunsBeside):
        for name, values in result.settings.items():
            yield pages.Text(f"  {name}: {' | '.join(values)}")


def diff(options: DiffCommand) -> int:
    with usage_errors():
        for folder in (options.run_a, options.run_b):  # refused before JAX is imported, if not a trace
            read_manifest(folder, "trace")
    with usage_errors():
        a, b = twins.read_trace(options.run_a), twins.read_trace(options.run_b)
    with run_errors(options.run_a, resumable=False):
        found = twins.diff(a, b)
        result = analysis.describe_difference(a, b, found)
        page = analysis.difference_page(a, b, found, result)
        written = {}
        if options.output is not None:
            written["report"] = str(pages.write_page(page, options.output / "diff.html"))
    tools.show({**msgspec.to_builtins(result), **written}, page, as_json=options.json)
    return result.verdict.code


def checkpoint(options: CheckpointCommand) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # computes only digests
    if options.action == "scrub":
        return _Scrub(options).run()
    if options.every is not None:
        raise CommandError(f"--every {options.every}: only scrub repeats; leave the flag out")
    if options.rate != CheckpointCommand.rate:
        raise CommandError(f"--rate {options.rate:g}: only scrub limits its rate; leave the flag out")
    audits: list[checkpoints.Audit] = []
    with usage_errors():
        steps = _steps(options)
    with tools.CountProgress("checkpoint", len(steps)) as progress:
        for step in steps:
            found = checkpoints.audit(options.folder, step, restore=options.action == "verify")
            if options.action == "certify" and found.status is None and "there is no certificate" in found.problem:
                with usage_errors():
                    checkpoints.certify_folder(options.folder, step)
                found = checkpoints.audit(options.folder, step, restore=False)
            audits.append(found)
            progress.advance(f"step {step}")
    counted = [one for one in audits if not one.remains] or audits
    verdict = gravest(one.verdict().verdict for one in counted)
    shown = verdict if options.action == "verify" else None
    rows = [dataclasses.asdict(one) for one in audits]
    tools.show({"verdict": shown, "checkpoints": rows}, _listed(shown, rows), as_json=options.json)
    return exit_code(verdict)


def _steps(options: CheckpointCommand) -> Sequence[int]:
    """Returns the steps to inspect."""
    there = checkpoints.checkpoints_in(options.folder)
    if unknown := sorted({*options.step} - {*there}):
        raise ValueError(f"--step {unknown[0]}: {options.folder} has the steps {', '.join(map(str, there))}")
    return options.step or there


HIGHEST_RATE = 2.0**40  # bytes per second: no storage of a machine reads faster
SETTLE = 1.0  # seconds before a checkpoint that could not be compared, or differs, is compared again


class _Scrub:
    """Compares all checkpoints of a folder, once or at intervals, until a signal."""

    def __init__(self, options: CheckpointCommand) -> None:
        with usage_errors():
            self._interval = None if options.every is None else seconds_of(options.every, "every")
            if not 1 <= options.rate <= HIGHEST_RATE:
                raise SettingError("rate", options.rate, f"expected 1 to {HIGHEST_RATE:.0f} bytes per second")
        self._options = options
        self._ended = threading.Event()
        self._free = 0.0  # when the next read may begin
        self._results: dict[int, dict[str, Any]] = {}
        self._problem = ""  # why the last round could not list the checkpoints, so that earlier results prove nothing

    def run(self) -> int:
        """Scrubs until the end, and returns the exit code that follows from the last result of each checkpoint."""
        gently(lambda _: self._ended.set())
        again = "" if self._options.every is None else f", every {self._options.every}"
        self._say(f"scrubbing {self._options.folder} at {studies.size(round(self._options.rate))} per second{again}")
        rounds = 0
        while not self._ended.is_set():
            began = time.monotonic()
            whole = self._round()
            rounds += whole
            if self._interval is None:
                break
            self._ended.wait(max(0.0, began + self._interval - time.monotonic()))
        counts = Counter(row["result"] for row in self._results.values())
        partly = counts["unreadable"] or any(row["uncovered"] for row in self._results.values())
        verdict = Verdict.CLEAN
        if counts["damaged"]:
            verdict = Verdict.CORRUPT
        elif partly or self._problem or not rounds or not counts["clean"] + counts["repaired"]:
            verdict = Verdict.INCONCLUSIVE
        rows = [row for _, row in sorted(self._results.items())]
        found = ", ".join(f"{count} {result}" for result, count in counts.items()) or "no checkpoints"
        more = f"; {self._problem}" if self._problem else "" if rounds else "; interrupted"
        tools.show(
            {"verdict": verdict, "rounds": rounds, "rate": self._options.rate, "checkpoints": rows},
            [pages.Text(f"{found}{more}", lead=verdict.upper(), tone=verdict)],
            as_json=self._options.json,
        )
        return verdict.code

    def _round(self) -> bool:
        """Scrubs each checkpoint once; returns whether the round was not interrupted."""
        try:
            steps = _steps(self._options)
        except (ValueError, OSError) as error:
            if self._interval is None:
                raise CommandError(str(error)) from error
            self._problem = str(error)  # perhaps the run has not saved anything yet
            self._say(self._problem)
            return True
        self._problem = ""
        self._results = {step: row for step, row in self._results.items() if step in steps}
        with tools.CountProgress("checkpoint", len(steps)) as progress:
            for step in steps:
                row = self._scrubbed(step)
                if row is None:
                    return False
                self._results[step] = row
                size = f"{row['covered']:,} arrays, {studies.size(row['bytes'])}"
                size += f"; not certified: {', '.join(row['uncovered'])}" if row["uncovered"] else ""
                why = row["problem"].removeprefix(f"step {step}: ")
                self._say(f"step {step}: {row['result']} ({why or size})")
                progress.advance(f"step {step}")
        return True

    def _scrubbed(self, step: int) -> "dict[str, Any] | None":
        """Scrubs one checkpoint, twice if it is not clean: storage may fail for a moment, a run may be writing the
        certificate, and this process may be the one that is wrong. Returns None if a signal interrupts."""
        for _ in range(2):
            try:
                found = checkpoints.audit(self._options.folder, step, pace=self._wait)
            except _Ended:
                return None
            if found.compared and not found.problem:
                break
            if self._ended.wait(SETTLE):
                return None
        return {**dataclasses.asdict(found), "result": found.mark(self._options.folder)}

    def _wait(self, size: int) -> None:
        """Waits until `size` more bytes may be read."""
        now = time.monotonic()
        if self._ended.wait(max(0.0, self._free - now)):
            raise _Ended
        self._free = max(self._free, now) + size / self._options.rate

    def _say(self, line: str) -> None:
        if not self._options.json:
            tools.write(line)


class _Ended(BaseException):
    """A signal ended the scrub; not an Exception, which an audit would count as a problem of the checkpoint."""


def _listed(verdict: Verdict | None, rows: list[dict[str, Any]]) -> "Iterator[pages.Part]":
    """Yields a table with a row for each checkpoint, then the problems of the checkpoints, and the verdict."""
    cells = []
    for row in rows:
        status = row["status"] or {"state": "-", "reasons": [], "history": True}
        by = ", ".join(status["reasons"]) + ("" if status["history"] else " (history not verified)")
        found = "not compared" if not row["compared"] else "differs" if row["wrong"] else "as saved"
        found = "-" if row["compared"] and not row["wrong"] and row["problem"] else found
        cells.append(
            (row["step"], status["state"], by or "-", f"{row['covered']:,}", studies.size(row["bytes"]), found)
        )
    yield pages.Table("Checkpoints", ("step", "state", "by", "arrays", "size", "restored"), tuple(cells))
    for row in rows:
        which = f"step {row['step']}: "
        if row["problem"]:
            yield pages.Text(f"{which}{row['problem'].removeprefix(which)}")
        if row["uncovered"]:
            yield pages.Text(f"{which}not certified: {', '.join(row['uncovered'])}")
    if verdict is not None:
        yield pages.Text("", lead=verdict.upper(), tone=verdict)
