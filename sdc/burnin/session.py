"""One burn-in of a host from its settings to its files: what is known is on record at any time."""

import contextlib
import dataclasses
import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from sdc.faults import Fault
from sdc.records import RecordError, describe_devices

from ..records import Lock, environment, reason, to_json
from .bundle import write_bundle
from .claiming import claim_names, claimed
from .golden import Register, lookup, read_golden
from .golden_using import itself_alone, usable
from .levels import find_level
from .observed import Result
from .programs import Programs
from .registry import workloads
from .report import BUNDLE, EVENTS, RESULT, GoldenPart, Outlook, Report, Settings, read_report, write_report
from .reporting import Circumstances, clock_shift, report_of, restored
from .rounds import LIMIT, burn_in
from .sensors import Monitor, driver_errors
from .surroundings import surroundings

EVERY = 10.0
"""Seconds from one snapshot of the report to the next."""
STEPS_OF = "training"
"""Family whose runs are training steps."""


class NotOnRecord(Exception):
    """Something differed, and the disk takes no report of it.

    Attributes:
        report: what is known.
    """

    def __init__(self, report: Report, error: OSError) -> None:
        super().__init__(reason(error))
        self.report = report


@dataclasses.dataclass
class Session:
    """A burn-in of the devices of this host.

    Attributes:
        settings: what was asked for.
        folder: where the report, the log and the bundle go; it exists.
        golden: file of golden digests.
        inject: simulated faults.
        resume: whether to go on from the report in the folder.
        command: the command line.
        outlooks: what a number of training steps would have seen of published bursts.
        steps: training steps in a run of a workload of the family `training`.
        doubts: what stands against a PASS from the beginning.
        on_event: is told of what `burn_in` tells.
        on_report: is given each report, those of a burn-in under way too.
        limit: seconds after which a device that does not answer is given up.
    """

    settings: Settings
    folder: Path
    golden: Path | None = None
    inject: Sequence[Fault] = ()
    resume: bool = False
    command: list[str] | None = None
    outlooks: Callable[[int], Sequence[Outlook]] | None = None
    steps: int = 1
    doubts: Sequence[str] = ()
    on_event: Callable[[Mapping[str, Any]], None] = lambda event: None
    on_report: Callable[[Report], None] = lambda report: None
    limit: float = LIMIT

    def __post_init__(self) -> None:
        self.stopped: str | None = None
        self.hung = False
        self._lock = threading.Lock()
        self._written = 0.0
        self._begun = datetime.datetime.now(datetime.UTC)
        self._watch = time.monotonic()
        self._result: Result | None = None
        self._known: Circumstances | None = None
        self._monitor: Monitor | None = None
        self._golden: _Golden | None = None

    def stop(self, why: str) -> None:
        """Asks for the end, from any thread; the run that is at work is finished."""
        self.stopped = self.stopped or why

    def run(self, devices: Sequence[jax.Device]) -> Report:
        """All of it.

        Args:
            devices: of this process.

        Returns:
            The report, which is on record.

        Raises:
            SettingError: another burn-in has one of the devices, or what is continued is another burn-in.
            RecordError: what is continued is damaged, or somebody else writes the folder.
            OSError: the folder cannot be written.
            NotOnRecord: nor can it be any more, and something differed before.
        """
        described = describe_devices(devices)
        earlier = read_report(self.folder) if self.resume else None
        self._known = Circumstances(self.settings, environment(), described, self.command)
        if earlier is not None:
            self._known = dataclasses.replace(self._known, id=earlier.id, created=earlier.created)
        with claimed(claim_names(described)) as problems, self._locked(), Monitor(described) as self._monitor:
            result, programs, golden = self._begin(devices, earlier, problems)
            self._tell({"event": "begin", "devices": described, "workloads": len(result.workloads)})
            try:
                result = burn_in(
                    result.workloads, devices, golden=golden, accept=self.settings.accept, on_event=self._tell,
                    stop=lambda: self.stopped is not None, inject=self.inject, programs=programs, result=result,
                    limit=self.limit, pauses=find_level(self.settings.level).pauses,
                    **self._length(earlier.seconds if earlier else 0.0),
                )  # fmt: skip
                self.hung = result.hung
                report = self.save(final=True)
                if result.findings and not result.hung:
                    self._bundle(report, programs)
                self._log({"event": "end", "verdict": report.verdict.word})
            except OSError as error:
                if not result.findings:
                    raise
                self.stop(f"a disk that takes no more ({reason(error)})")
                raise NotOnRecord(self._report(final=False), error) from error
        return report

    def without(self, reason: str) -> Report:
        """The report where no device could be tested.

        Args:
            reason: why.

        Raises:
            OSError: the folder cannot be written.
        """
        self._known = Circumstances(self.settings, {}, [], self.command)
        self._result = Result([], [], tuple(self.settings.accept), doubts=[reason])
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.save(final=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder is made when all else is right, and nobody else writes it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(self.folder)
        try:
            yield
        finally:
            lock.release()

    def _length(self, seconds: float) -> dict[str, Any]:
        """How long there is still to run."""
        if self.settings.minutes is None:
            return {"rounds": self.settings.rounds}
        return {"minutes": max(self.settings.minutes - seconds / 60, 1e-3)}

    def _begin(
        self, devices: Sequence[jax.Device], earlier: Report | None, problems: Sequence[str]
    ) -> tuple[Result, Programs, Mapping[str, str]]:
        settings, accept, faults = self.settings, tuple(self.settings.accept), tuple(map(str, self.inject))
        found = workloads(settings.level, devices, settings.dtypes, only=settings.only, seed=settings.seed)
        result = Result(found, devices, accept, faults)
        if earlier is not None:
            result = restored(earlier, found, devices, accept=accept, inject=self.inject)
        result.doubts += self.doubts
        result.notes += problems
        if settings.only:
            told = f"only {', '.join(settings.only)} of the level's workloads were asked for"
            result.notes += [told] if told not in result.notes else []
        self._golden = _Golden(self.golden, devices) if self.golden is not None else None
        self._result = result
        return result, Programs(devices), self._golden.digests if self._golden is not None else {}

    def _tell(self, event: Mapping[str, Any]) -> None:
        """Keeps the log, and a report that says what is known so far, in case that nobody gets to say more."""
        if event["event"] != "run":
            self._log(event)
        if event["event"] in ("finding", "ended") or time.monotonic() - self._written > EVERY:
            self.save()
        self.on_event(event)

    def _log(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(to_json({"seconds": round(time.monotonic() - self._watch, 3), **event}))
        with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def known(self, why: str) -> Report:
        """What is known at this moment, on record; for a thread that ends the process.

        Args:
            why: it ends.
        """
        self.stop(why)
        return self.without(f"ended by {why} before the devices had started") if self._result is None else self.save()

    def save(self, *, final: bool = False) -> Report:
        """Writes what is known now; called by other threads too.

        Args:
            final: whether the burn-in has ended. Before that, the report says that it was stopped.
        """
        with self._lock:
            report = self._report(final=final)
            write_report(self.folder / RESULT, report)
            self._written = time.monotonic()
        self.on_report(report)
        return report

    def _report(self, *, final: bool) -> Report:
        assert self._result is not None
        assert self._known is not None
        result = dataclasses.replace(
            self._result, tallies=dict(self._result.tallies), findings=list(self._result.findings),
            ended=list(self._result.ended), notes=list(self._result.notes), doubts=list(self._result.doubts),
            stopped=self._result.stopped or not final,
            stopper=f"stopped by {self.stopped}" if self.stopped else "under way",
        )  # fmt: skip
        courses = self._monitor.courses() if self._monitor is not None else []
        result.notes += self._monitor.notes() if self._monitor is not None else []
        for index, course in enumerate(courses):
            if course is not None:
                result.doubts += [f"device {index}: {error}" for error in driver_errors(course)]
        shift = clock_shift(self._begun, datetime.datetime.now(datetime.UTC), time.monotonic() - self._watch)
        result.notes += [shift] if shift else []
        golden = None
        if self._golden is not None:
            golden = self._golden.part(result)
            result.doubts += self._golden.doubts(result, self._known.described) if final else []
        steps = self._training_steps(result)
        return report_of(
            result, self._known, courses=courses, golden=golden,
            outlooks=self.outlooks(steps) if self.outlooks is not None and steps else (),
            stopped=self.stopped or ("under way" if not final else None),
        )  # fmt: skip

    def _training_steps(self, result: Result) -> int:
        """Steps that each device did at least."""
        training = {workload.name for workload in result.workloads if workload.family == STEPS_OF}
        runs = dict.fromkeys(range(len(result.devices)), 0)
        for (name, device), tally in result.tallies.items():
            runs[device] += tally.runs if name in training else 0
        return self.steps * min(runs.values(), default=0)

    def _bundle(self, report: Report, programs: Programs) -> None:
        """A bundle that cannot be made takes nothing from the verdict."""
        path = self.folder / BUNDLE
        try:
            write_bundle(path, report, self._result, programs)
        except Exception as error:  # a full disk, a device that has gone
            with contextlib.suppress(OSError):
                os.unlink(path)
            self._log({"event": "no bundle", "reason": f"{type(error).__name__}: {error}"})


class _Golden:
    """Golden digests as a burn-in uses them: what is damaged or foreign stands against a PASS."""

    def __init__(self, file: Path, devices: Sequence[jax.Device]) -> None:
        self.file, self.here = file, surroundings(devices)
        self.register: Register | None = None
        self.damage: str | None = None
        try:
            self.register = read_golden(file)
        except (RecordError, OSError) as error:
            self.damage = str(error)
        self.digests = lookup(self.register) if self.register is not None else {}

    def part(self, result: Result) -> GoldenPart:
        """What the report says of them."""
        used = sum(tally.golden > 0 for tally in result.tallies.values())
        return GoldenPart(
            file=str(self.file), used=used, foreign=len(result.foreign), problem=self.damage or self._missing(result)
        )

    def doubts(self, result: Result, described: Sequence[Mapping[str, Any]]) -> list[str]:
        """What stands against a PASS: a file that could not be used, or digests of nobody but the device itself."""
        if self.register is None:
            return [f"the golden digests were not used: {self.damage}"]
        if (missing := self._missing(result)) is not None:
            return [f"golden digests: {missing}"]
        alone = itself_alone(self.register, result.keys, described)
        return [] if alone is None or any(tally.voted for tally in result.tallies.values()) else [alone]

    def _missing(self, result: Result) -> str | None:
        return None if self.register is None else usable(self.register, result.keys.values(), self.here)[1]
