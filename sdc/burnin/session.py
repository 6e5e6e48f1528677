"""One burn-in of a host, from its settings to its files. The result so far is always kept on disk."""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import msgspec

from sdc.faults import Fault
from sdc.records import RecordError, describe_devices, differences
from sdc.settings import SettingError

from ..records import Lock, environment, reason, to_json
from ..schema import Environment, now
from ..verdict import Verdict
from .bundle import write_bundle
from .golden_register import GOLDEN, Register, itself_alone, lookup, shortfall
from .host import claimed, surroundings
from .identity import candidates, recognize
from .judgement import BURN_IN, judge
from .programs import Programs
from .rehearsal import node_outlooks
from .results import BUNDLE, EVENTS, RESULT, UNDER_WAY, BurninResult, BurninSettings, GoldenUse
from .rounds import Kept, burn_in, planned_result
from .sensors import Monitor, driver_errors
from .workloads import find_level

EVERY = 10.0  # seconds between snapshots of the result
SHIFT = 5.0  # seconds by which the host's clock may be corrected during a burn-in without a note


class NotOnRecord(Exception):
    """A burn-in found a difference, but its result could not be written to disk; the attribute `result` holds that
    result."""

    def __init__(self, result: BurninResult, error: OSError) -> None:
        super().__init__(reason(error))
        self.result = result


@dataclasses.dataclass
class Session:
    # Beginning of a doubt that a resumed burn-in does not share
    UNLISTED: ClassVar[str] = "the ledger could not announce this burn-in, so it does not pass: "

    settings: BurninSettings
    folder: Path  # folder of the result, the log and the bundle
    golden: Path | None = None  # file of golden digests
    inject: Sequence[Fault] = ()
    resume: bool = False  # whether to resume from the result in the folder
    command: list[str] | None = None
    doubts: Sequence[str] = ()  # reasons against a PASS that are known at the start
    on_event: Callable[[Mapping[str, Any]], None] = lambda event: None
    on_result: Callable[[BurninResult], None] = lambda result: None  # also called for intermediate results

    def __post_init__(self) -> None:
        self.stopped: str | None = None
        self._lock = threading.Lock()
        self._written = 0.0
        self._begun = datetime.datetime.now(datetime.UTC)
        self._watch = time.monotonic()
        self._result: BurninResult | None = None
        self._monitor: Monitor | None = None
        self._register: Register | str | None = None  # golden digests, or why their file cannot be read
        self._here: Mapping[str, str] = {}
        self._ended: str | None = None  # when an earlier session ended, if this one has run nothing yet

    @property
    def begun(self) -> bool:
        """Whether the burn-in has been accepted, so that it leaves a result."""
        return self._result is not None

    @property
    def hung(self) -> bool:
        """Whether a device never responded, in which case a thread is still waiting for it."""
        return self._result is not None and self._result.hung

    def stop(self, why: str) -> None:
        """Requests the end of the burn-in after the workload that is running; any thread may call this method."""
        self.stopped = self.stopped or why

    def run(self, devices: Sequence[jax.Device]) -> BurninResult:
        """Runs the burn-in on devices of this process, and returns the result, which is also written to disk.

        Raises `SettingError` if another burn-in holds a device, or if the settings differ from those of the burn-in to
        resume. Raises `RecordError` if the result of that burn-in is damaged, or if another process is writing to the
        folder. If the folder cannot be written to, raises `NotOnRecord` if a difference was already found, and
        `OSError` otherwise.
        """
        settings, described = self.settings, describe_devices(devices)
        earlier = self._earlier()
        with contextlib.ExitStack() as held:
            problems = held.enter_context(claimed(described))
            self.folder.mkdir(parents=True, exist_ok=True)  # only after all other checks
            held.callback(Lock(self.folder).release)
            self._monitor = held.enter_context(Monitor(described))
            found, level = settings.chosen(devices), find_level(settings.level)
            result = planned_result(
                found, devices, described, settings=settings, command=self.command,
                environment=msgspec.convert(environment(), Environment),
                seed=secrets.randbits(32) if settings.seed is None else settings.seed,
            )  # fmt: skip
            if earlier is not None:
                go_on(result, earlier)
                self._ended = earlier.ended
            add(result.doubts, self.doubts)
            add(result.notes, problems)
            if settings.only:
                add(result.notes, [f"only some families of workloads were selected: {', '.join(settings.only)}"])
            length: dict[str, Any] = {"rounds": settings.rounds}
            if settings.minutes is not None:
                length = {"minutes": max(settings.minutes - result.seconds / 60, 1e-3)}
            if self.golden is not None:
                result.golden = GoldenUse(file=str(self.golden))
                self._here = surroundings(devices)
                try:
                    self._register = GOLDEN.read(self.golden)
                except RecordError as error:
                    self._register = str(error)
            self._result, programs, kept = result, Programs(devices), dict[str, Kept]()
            golden = lookup(self._register) if isinstance(self._register, Register) else {}
            self.save()  # before the log: a folder without a result could be neither started in again nor resumed
            self._handle({"event": "begin", "devices": described, "workloads": len(found)})
            try:
                burn_in(
                    found, devices, golden=golden if self.golden is not None else None, accept=settings.accept,
                    on_event=self._handle, stop=lambda: self.stopped is not None, inject=self.inject, programs=programs,
                    result=result, kept=kept, fresh=result.seed, repeats=level.repeats, pauses=level.pauses, **length,
                )  # fmt: skip
                result = self.save(final=True)
                if result.findings and not result.hung:
                    path = self.folder / BUNDLE
                    try:
                        write_bundle(path, result, programs, found, kept)
                    except Exception as error:  # a full disk or a lost device, which does not affect the verdict
                        with contextlib.suppress(OSError):
                            path.unlink()
                        self._log({"event": "no bundle", "reason": f"{type(error).__name__}: {error}"})
                self._log({"event": "end", "verdict": result.verdict.acceptance})
            except OSError as error:
                if not self._result.findings:
                    raise
                self.stop(f"a disk error ({reason(error)})")
                raise NotOnRecord(self._known(final=False), error) from error
        return result

    def without(self, reason: str) -> BurninResult:
        """Saves and returns a result without runs, or without further runs if a burn-in is resumed."""
        self._result = self._earlier() or BurninResult(settings=self.settings, command=self.command)
        add(self._result.doubts, [reason])
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.save(final=True)

    def _earlier(self) -> BurninResult | None:
        """Returns the result of the burn-in to resume."""
        return BURN_IN.read(self.folder) if self.resume else None

    def _handle(self, event: Mapping[str, Any]) -> None:
        """Logs an event and saves the result so far, in case the process is killed."""
        if event["event"] == "run" and self._result is not None:
            self._ended = None
            others = (doubt for doubt in self._result.doubts if not doubt.startswith(Session.UNLISTED))
            self._result.doubts = list(dict.fromkeys((*others, *self.doubts)))  # this session may be announced
        elif event["event"] == "difference":  # its finding follows, and raises if the disk is full
            for write in (functools.partial(self._log, event), self.save):
                with contextlib.suppress(OSError):
                    write()
        else:
            self._log(event)
        if event["event"] in ("finding", "ended") or time.monotonic() - self._written > EVERY:
            self.save()
        self.on_event(event)

    def _log(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(to_json({"seconds": round(time.monotonic() - self._watch, 3), **event}))
        with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def known(self, why: str) -> BurninResult:
        """Saves and returns the result so far; called by a thread that is about to end the process."""
        self.stop(why)
        if self._result is None:
            self._result = self._earlier()
        return self.without(f"ended by {why} before the devices had started") if self._result is None else self.save()

    def save(self, *, final: bool = False) -> BurninResult:
        """Writes the result so far, marked as stopped until the burn-in ends; any thread may call this method. If the
        disk is full, `on_result` is called all the same."""
        result = None
        try:
            with self._lock:
                result = self._known(final=final)
                BURN_IN.write(self.folder / RESULT, result)
                self._written = time.monotonic()
        finally:
            if result is not None:
                self.on_result(result)
        return result

    def _known(self, *, final: bool) -> BurninResult:
        """Returns a copy of the result so far, including its verdict."""
        assert self._result is not None
        live = self._result
        result = msgspec.structs.replace(
            live, ended=self._ended or now(), workloads=list(live.workloads), devices=list(live.devices),
            findings=list(live.findings), unfinished=list(live.unfinished), notes=list(live.notes),
            doubts=list(live.doubts),
        )  # fmt: skip
        if not final or live.stopped is not None:
            result.stopped = self.stopped or live.stopped or UNDER_WAY
        if self._monitor is not None:
            add(result.notes, self._monitor.notes())
            result.devices = [
                msgspec.structs.replace(device, sensors=course)
                for device, course in zip(live.devices, self._monitor.courses(), strict=True)
            ]
        shift = clock_shift(self._begun, datetime.datetime.now(datetime.UTC), time.monotonic() - self._watch)
        add(result.notes, [shift] if shift else [])
        if result.golden is not None and self._register is not None:
            result.golden = msgspec.structs.replace(result.golden, doubt=self._doubt(result, final=final))
        result.outlooks = node_outlooks(result.workloads) if final else []
        return judge(result)

    def _doubt(self, result: BurninResult, *, final: bool) -> str | None:
        """Returns why the golden digests do not allow a PASS (they are unusable, or come only from the tested device),
        else None."""
        if not isinstance(self._register, Register):
            return f"the golden digests were not used: {self._register}"
        if not final:
            return None
        keys = [tally.key for tally in result.workloads if tally.key is not None]
        if (missing := shortfall(self._register, keys, self._here)) is not None:
            return f"golden digests: {missing}"
        if result.stopped is not None or any(tally.voted for tally in result.workloads):
            return None
        return itself_alone(self._register, result)


def clock_shift(begun: datetime.datetime, ended: datetime.datetime, seconds: float) -> str | None:
    """Returns a note if the host's clock was changed relative to the monotonic clock, else None."""
    shift = (ended - begun).total_seconds() - seconds
    if abs(shift) <= SHIFT + 0.01 * seconds:
        return None
    return f"the host's clock was changed by {shift:+.0f} s during the burn-in, so start and end times are inconsistent"


def add(texts: list[str], more: Iterable[str]) -> None:
    """Adds texts that are not in a list yet."""
    texts += dict.fromkeys(text for text in more if text not in texts)


def go_on(result: BurninResult, earlier: BurninResult) -> None:
    """Copies the result of an earlier burn-in with the same workloads, devices and faults into a planned result.

    Counts are copied only if devices, boot and environment are those of the earlier result; otherwise, the burn-in
    begins anew, and a note says why. What was found on the devices is copied in any case. Raises SettingError if the
    devices are others and the earlier burn-in found differences, which would be lost.
    """

    def short(values: Sequence[str | None]) -> str:
        return ", ".join(map(str, values[:3])) + (" ..." if len(values) > 3 else "") if values else "none"

    given = result.settings.seed
    names, before_names = ({row.workload for row in each.workloads} for each in (result, earlier))
    for what, before, here in (
        ("devices", [row.kind for row in earlier.devices], [row.kind for row in result.devices]),
        ("simulated faults", earlier.settings.faults, result.settings.faults),
        ("workloads", sorted(before_names - names), sorted(names - before_names)),
        ("seeds of the data", [str(earlier.seed)], [str(earlier.seed if given is None else given)]),
    ):
        if before != here and (before or what != "workloads"):  # new workloads may be added
            raise SettingError(
                "resume",
                None,
                f"the {what} were {short(before)}, but are now {short(here)}; pass the same flags as before",
            )
    pairs = list(zip(result.devices, earlier.devices, strict=False))
    recognized = [recognize((result, now), (earlier, then)) for now, then in pairs]
    if "other" in recognized:
        swapped = (
            f"device {now.index} was {candidates(earlier, then)[0]}, and is now {candidates(result, now)[0]}"
            for (now, then), known in zip(pairs, recognized, strict=True)
            if known == "other"
        )
        said = f"the devices are not those of the burn-in in this folder ({'; '.join(itertools.islice(swapped, 3))})"
        if earlier.verdict is Verdict.CORRUPT:
            raise SettingError("resume", None, f"{said}, which found differences; begin a burn-in in another folder")
        result.notes.append(f"{said}, so the burn-in began anew")
        return
    result.id, result.created = earlier.id, earlier.created
    result.seed = result.seed if earlier.seed is None else earlier.seed  # earlier versions had none
    result.notes = list(earlier.notes)
    result.doubts = list(earlier.doubts)
    result.findings, result.unfinished = list(earlier.findings), list(earlier.unfinished)
    for device in earlier.devices:
        if device.sensors is not None:
            add(result.doubts, (f"device {device.index}: {error}" for error in driver_errors(device.sensors)))
    done = {place: msgspec.structs.replace(tally) for place, tally in earlier.tallies.items()}
    result.workloads = [done.get((tally.workload, tally.device), tally) for tally in result.workloads]
    changed = differences([msgspec.to_builtins(each.environment) for each in (earlier, result)])
    why = "; ".join(each.describe(("then", "now")) for each in changed[:3])
    if "unknown" in recognized:
        why = "the system was restarted, after which devices without a serial number or UUID cannot be recognized"
    if why:
        add(result.notes, [f"{sum(tally.runs for tally in result.workloads):,} earlier runs do not count: {why}"])
    else:
        result.rounds, result.seconds = earlier.rounds, earlier.seconds
    for tally in result.workloads:
        if why:
            tally.begin_anew()
        elif tally.void:
            void = f"{tally.seconds:.3g} s under load were void, because the device was throttled"
            add(result.notes, [f"device {tally.device}, {tally.workload}: {void}"])
            tally.begin_anew()
