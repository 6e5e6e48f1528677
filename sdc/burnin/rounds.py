"""The burn-in itself: rounds of all workloads on all devices, until a duration or a number of rounds is reached."""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeAlias, cast, get_args

import jax
import msgspec
import numpy as np

from sdc.faults import Fault
from sdc.settings import SettingError

from ..twins import ALGORITHM
from .examination import Place, Suspicion, Vote, confirm, examine, vote
from .golden_register import GoldenSubject, left_over, mark_of
from .host import surroundings
from .programs import Programs, RunOutcome
from .rehearsal import check_faults
from .reproduce import sum_of
from .results import ON_REQUEST, Accepted, BurninResult, BurninSettings, CheckedDevice, Ended, Finding, GoldenUse, Tally
from .workloads import BurninWorkload, keeps_subnormals

DETAILED = 4  # number of differences per workload and device that are examined by reruns; later ones are only counted
NAP = 0.05  # seconds between checks of `stop`
LIMIT = 1800.0  # seconds after which an unresponsive device is no longer used; large programs compile in less time
THREADS = 8  # threads for each device; a thread that waits for a hung device is lost
SMALL = 2**24  # maximum size in bytes of outputs that are kept; for larger outputs, only differing elements are listed
STEPS = 16  # bins per doubling of a time: medians have a resolution of 4 %
Listener: TypeAlias = Callable[
    [Mapping[str, Any]], None
]  # receives an event for each round, run, finding and end, as JSON


class Kept(NamedTuple):
    """A finding with its right and wrong outputs, if they are small enough to keep, and the SHA-256 of both."""

    finding: Finding
    outputs: tuple[list[np.ndarray], list[np.ndarray]] | None
    sums: tuple[str, str] | None


def planned_result(
    workloads: Sequence[BurninWorkload],
    devices: Sequence[jax.Device],
    described: Sequence[Mapping[str, Any]] = (),
    **fields: Any,
) -> BurninResult:
    """Returns a result in which nothing has run yet.

    `described` is the result of `sdc.records.describe_devices`; `fields` are further fields of the result.
    """
    known = described or [{"kind": device.device_kind} for device in devices]
    result = BurninResult(**fields)
    result.devices = [
        msgspec.convert({**each, "index": index}, CheckedDevice) for index, each in enumerate(known[: len(devices)])
    ]
    result.workloads = [
        Tally(
            workload=workload.name, device=index, family=workload.family, alike=workload.alike, work=workload.work,
            unit=workload.unit,
        )
        for workload in workloads
        for index in range(len(devices))
    ]  # fmt: skip
    return result


def burn_in(
    workloads: Sequence[BurninWorkload],
    devices: Sequence[jax.Device],
    *,
    minutes: float | None = None,  # duration; a run that is in progress at its end is completed
    rounds: int | None = None,  # number of rounds; an alternative to `minutes`
    golden: Mapping[str, str] | None = None,  # digests by `GoldenSubject.key`, as returned by `recorded`
    accept: Iterable[str] = (),  # "repeat" accepts repetition as the only evidence
    on_event: Listener = lambda event: None,
    stop: Callable[[], bool] = lambda: False,  # called before each run and during waits, by several threads
    inject: Sequence[Fault] = (),  # simulated faults, for rehearsals
    fresh: int | None = None,  # seed of the data after the first rounds; None to use the same data in all rounds
    repeats: int = 2,  # rounds with the same data
    pauses: Sequence[float] = (
        0.0,
    ),  # seconds to wait before each run, one value per round, in turn; 0 for constant load
    programs: Programs | None = None,  # programs compiled by earlier burn-ins on these devices
    seed: int = 0,  # seed from which simulated faults are drawn
    clock: Callable[[], float] = time.monotonic,
    result: BurninResult | None = None,  # updated during the burn-in; pass an earlier result to resume its burn-in
    kept: dict[str, Kept] | None = None,  # filled with the outputs of the first finding of each workload
    limit: float = LIMIT,  # seconds after which a device that does not answer is no longer used
) -> BurninResult:
    """Runs workloads repeatedly on devices, and compares their outputs; returns a result without a verdict.

    `judge` derives the verdict. If a device fails, the affected workloads end, and the result states why; a failure
    does not count as a difference.
    """
    accepted = [accept] if isinstance(accept, str) else list(accept)
    unknown = sorted(set(accepted) - set(get_args(Accepted)))
    names = [workload.name for workload in workloads]
    for wrong, setting, given, problem in (
        (not devices, "devices", None, "expected at least one device"),
        (len(set(devices)) != len(devices), "devices", devices, "expected distinct devices"),
        ((minutes is None) == (rounds is None), "minutes", minutes, "expected either minutes or rounds, but not both"),
        (minutes is not None and not minutes > 0, "minutes", minutes, "expected a positive number"),
        (rounds is not None and rounds < 1, "rounds", rounds, "expected at least 1"),
        (repeats < 2, "repeats", repeats, "expected at least 2: runs with equal data are compared"),
        (not pauses or min(pauses) < 0, "pauses", pauses, "expected at least one pause, and no negative pauses"),
        (unknown, "accept", unknown and unknown[0], f"expected {' or '.join(get_args(Accepted))}"),
        (
            programs is not None and programs.devices != tuple(devices), "programs", None,
            "were compiled for other devices; omit this argument",
        ),
        (len(set(names)) != len(names), "workloads", names, "expected distinct names"),
    ):  # fmt: skip
        if wrong:
            raise SettingError(setting, given, problem)
    check_faults(inject, devices, workloads)
    if result is None:
        asked = BurninSettings(level="", dtypes=(), accept=tuple(accepted), faults=tuple(map(str, inject)))
        result = planned_result(workloads, devices, settings=asked)
    programs, kept = programs or Programs(devices), {} if kept is None else kept
    running = _BurnIn(
        workloads, programs, golden, inject, on_event, stop, seed, clock, result, kept, limit, fresh, repeats
    )
    return running.go(minutes, rounds, pauses)


def seed_of(fresh: int, data: int) -> int:
    """Returns the seed of the data set with a number; number 0 is that of the first rounds, which `fresh` does not
    affect."""
    return int(np.random.SeedSequence([fresh, data]).generate_state(1)[0])


def step_of(seconds: float) -> int:
    """Returns the logarithmic bin of a time in seconds."""
    return round(math.log2(max(seconds, 1e-9)) * STEPS)


def median_of(times: Counter[int]) -> float:
    rank, runs = 0, times.total()
    for step, count in sorted(times.items()):
        rank += count
        if 2 * rank >= runs:
            return float(2.0 ** (step / STEPS))
    return 0.0


@dataclasses.dataclass
class _BurnIn:
    workloads: Sequence[BurninWorkload]
    programs: Programs
    given: Mapping[str, str] | None
    faults: Sequence[Fault]
    on_event: Listener
    stop: Callable[[], bool]
    seed: int
    clock: Callable[[], float]
    result: BurninResult
    kept: dict[str, Kept]
    limit: float
    fresh: int | None
    repeats: int

    def __post_init__(self) -> None:
        devices = self.programs.devices
        self.kinds = {index: f"{device.platform} {device.device_kind}" for index, device in enumerate(devices)}
        self.golden: dict[str, dict[int, str]] = {}
        self.tallies = self.result.tallies
        self.times = {place: Counter({step_of(tally.median): tally.runs}) for place, tally in self.tallies.items()}
        self.moments = dict.fromkeys(self.kinds, 0)
        for tally in self.result.workloads:
            self.moments[tally.device] += tally.runs
        self.last = math.inf
        self.digests: dict[tuple[str, int], str] = {}  # with the present data, unless those of the first rounds
        self.uncompared: dict[tuple[str, int], RunOutcome] = {}  # the first runs with the present data
        self.pool = ThreadPoolExecutor(max_workers=THREADS * len(devices))

    def go(self, minutes: float | None, rounds: int | None, pauses: Sequence[float]) -> BurninResult:
        began, before = self.clock(), self.result.seconds
        try:
            self._prepare()
            if minutes is not None:
                self.last = self.clock() + 60 * minutes
            while not self._over() and (rounds is None or self.result.rounds < rounds):
                if not any(self._indices(workload) for workload in self.workloads):
                    break
                pause = pauses[self.result.rounds % len(pauses)]
                self.result.seconds = before + self.clock() - began
                data, since = divmod(self.result.rounds, self.repeats)
                seed = seed_of(self.fresh, data) if self.fresh is not None and data else None
                if not since:
                    self.digests, self.uncompared = {}, {}
                self.on_event({"event": "round", "round": self.result.rounds})
                for workload in self.workloads:
                    self._rest(pause)
                    if self._over():
                        break
                    if seed is None or not self._has_standard(workload):
                        self._turn(workload, standard=True)
                    else:
                        self._turn(dataclasses.replace(workload, seed=seed), standard=False)
                else:
                    self.result.rounds += 1
        finally:
            self.pool.shutdown(wait=not self.result.hung, cancel_futures=True)
        self.result.seconds = before + self.clock() - began
        return self.result

    def _each(self, function: Callable[[Place], Any], places: Sequence[Place]) -> list[Any]:
        """Calls a function for all places concurrently; returns results or exceptions (TimeoutError if too slow)."""
        futures = [self.pool.submit(function, place) for place in places]
        wait(futures, timeout=self.limit)
        slow = TimeoutError(f"no answer within {self.limit:g} s")
        self.result.hung |= not all(future.done() for future in futures)
        return [(future.exception() or future.result()) if future.done() else slow for future in futures]

    def _over(self) -> bool:
        if self.stop():
            self.result.stopped = ON_REQUEST
        return self.result.stopped is not None or self.clock() >= self.last

    def _rest(self, seconds: float) -> None:
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0 and not self.stop():
            time.sleep(min(left, NAP))

    def _indices(self, workload: BurninWorkload) -> list[Place]:
        """Returns the devices on which a workload runs; None means all devices together."""
        places: list[Place] = [None] if workload.multi else list(range(len(self.programs.devices)))
        return [place for place in places if not self.result.has_ended(workload.name, self._devices_of(place))]

    def _has_standard(self, workload: BurninWorkload) -> bool:
        """Returns whether a workload has run with the data of the first rounds as often as it must on all its devices;
        after a resumption, counts may have begun anew."""
        indices = [index for place in self._indices(workload) for index in self._devices_of(place)]
        return all(self.tallies[workload.name, index].standard >= self.repeats for index in indices)

    def _devices_of(self, place: Place) -> range:
        return range(len(self.programs.devices)) if place is None else range(place, place + 1)

    def _note(self, text: str) -> None:
        """Adds a note, unless the result of a resumed burn-in already contains it."""
        if text not in self.result.notes:
            self.result.notes.append(text)

    def _prepare(self) -> None:
        """Compiles all programs, places all data, and looks up the golden digests of these programs."""
        used: set[str] = set()
        environment = mark_of(surroundings(self.programs.devices))
        for workload in self.workloads:
            if self._over():
                return
            self.on_event({"event": "compile", "workload": workload.name})
            places = self._indices(workload)
            prepared = self._each(functools.partial(self.programs.prepare, workload), places)
            for place, ready in zip(places, prepared, strict=True):
                try:
                    if isinstance(ready, Exception):
                        raise ready
                    for index in self._devices_of(place):
                        self.programs.reference(workload, index)
                except Exception as error:  # raised by the compiler or the device, or for lack of host memory
                    self._end(workload, place, error)
                    continue
                for index in self._devices_of(place):
                    # The key contains everything known here that determines the bits.
                    key = GoldenSubject(
                        workload=workload.name, shard=index if workload.multi else None, seed=workload.seed,
                        program=ready.fingerprint, algorithm=ALGORITHM, kind=self.kinds[index], environment=environment,
                    ).key  # fmt: skip
                    tally = self.tallies[workload.name, index]
                    if tally.key not in (None, key):
                        # Evidence about one program says nothing about another, so the counts restart.
                        self._note(
                            f"the program of {workload.name} on device {index} changed, so {tally.runs:,} earlier runs "
                            "do not count"
                        )
                        tally.begin_anew()
                    tally.key = key
                    if self.given is not None and key in self.given:
                        used.add(key)
                        self.golden.setdefault(workload.name, {})[index] = self.given[key]
        if self.given is not None:
            foreign, unneeded = left_over(set(self.given) - used, {workload.name for workload in self.workloads})
            known = self.result.golden or GoldenUse()
            self.result.golden = msgspec.structs.replace(known, foreign=len(foreign), unneeded=len(unneeded))
            if foreign:
                self._note(
                    f"{len(foreign)} golden digests belong to other programs or devices, and were not compared; one "
                    f"of them is {foreign[0]}"
                )
            if unneeded:
                self._note(f"{len(unneeded)} golden digests belong to workloads that were not selected")
        first = {kind: device for device, kind in reversed(self.kinds.items())}
        for dtype in dict.fromkeys(each.dtype for each in self.workloads if each.data == "subnormal"):
            for kind, index in first.items():
                # A device that fails here also fails in its workloads, where the failure is recorded.
                with contextlib.suppress(RuntimeError):
                    if not keeps_subnormals(dtype, self.programs.devices[index]):
                        self._note(f"{kind} flushes subnormal {dtype} numbers to zero, so the subnormal data are zeros")
                        self._mark_zeros(kind, dtype)

    def _mark_zeros(self, kind: str, dtype: str) -> None:
        names = {each.name for each in self.workloads if (each.data, each.dtype) == ("subnormal", dtype)}
        for (name, index), tally in self.tallies.items():
            if name in names and self.kinds[index] == kind:
                tally.zeros = True

    def _run(self, workload: BurninWorkload, place: Place) -> list[RunOutcome]:
        moment = max(self.moments[index] for index in self._devices_of(place))
        for index in self._devices_of(place):
            self.moments[index] = moment + 1
        return self.programs.run(workload, place, faults=self.faults, moment=moment, seed=self.seed, rest=self._rest)

    def _turn(self, workload: BurninWorkload, *, standard: bool) -> None:
        """Runs a workload once on every device, with the data of the first rounds (`standard`) or with others."""
        places = self._indices(workload)
        done = self._each(functools.partial(self._run, workload), places)
        outcomes: list[RunOutcome] = []
        for place, each in zip(places, done, strict=True):
            if isinstance(each, Exception):
                self._end(workload, place, each)
            else:
                outcomes += each
        if not outcomes:
            return
        references = {
            outcome.device: known.digest
            for outcome in outcomes
            if (known := self.programs.reference(workload, outcome.device)) is not None
        }
        golden = self.golden.get(workload.name, {}) if standard else {}
        before = {
            device: self.tallies[workload.name, device].digest
            if standard
            else self.digests.get((workload.name, device))
            for device in self.kinds
        }
        digests = {outcome.device: outcome.digest for outcome in outcomes}
        voted = vote(digests, self.kinds) if workload.alike else Vote({}, (), ())
        suspicions = examine(outcomes, voted, before=before, golden=golden, references=references)
        compared = {*voted.odd, *voted.agreed, *itertools.chain(*voted.ties)}
        for outcome in outcomes:
            key = workload.name, outcome.device
            self.on_event(
                {
                    "event": "run", "round": self.result.rounds, "workload": workload.name, "device": outcome.device,
                    "seed": workload.seed, "digest": outcome.digest, "seconds": outcome.seconds,
                }
            )  # fmt: skip
            repeated = before[outcome.device] is not None
            if standard or repeated or outcome.device in compared or outcome.right is not None:
                if (first := self.uncompared.pop(key, None)) is not None:
                    self._count(first, Vote({}, (), ()), {}, standard=False, repeated=False)
                self._count(outcome, voted, golden, standard=standard, repeated=repeated)
            else:  # the run counts as checked once another run with the same data has been compared with it
                self.uncompared[key] = dataclasses.replace(outcome, outputs=None)
            if standard:
                self.tallies[key].digest = self.tallies[key].digest or outcome.digest
            else:
                self.digests.setdefault(key, outcome.digest)
        for suspicion in suspicions:
            self._follow(workload, suspicion, outcomes, standard)

    def _count(
        self, outcome: RunOutcome, voted: Vote, golden: Mapping[int, str], *, standard: bool, repeated: bool
    ) -> None:
        place = outcome.workload, outcome.device
        tally, times = self.tallies[place], self.times[place]
        times[step_of(outcome.seconds)] += 1
        tally.fastest = min(tally.fastest, outcome.seconds) if tally.runs else outcome.seconds
        tally.median = median_of(times)
        tally.runs += 1
        tally.standard += standard
        tally.repeated += repeated
        tally.voted += outcome.device in voted.odd or outcome.device in voted.agreed
        tally.referred += outcome.right is not None
        tally.golden += outcome.device in golden
        for name in ("elements", "seconds", "simulated"):
            setattr(tally, name, getattr(tally, name) + getattr(outcome, name))
        for name, count in outcome.checks._asdict().items():
            setattr(tally, name, getattr(tally, name) + count)

    def _follow(
        self, workload: BurninWorkload, suspicion: Suspicion, outcomes: Sequence[RunOutcome], standard: bool
    ) -> None:
        """Reruns a workload whose outputs differed and keeps the finding; a device's later differences are only
        counted."""
        tallies = {device: self.tallies[workload.name, device] for device in self.kinds}
        for device in suspicion.devices:
            tallies[device].differences += 1
        if all(tallies[device].differences > DETAILED for device in suspicion.devices):
            return

        # On record before the reruns, during which a failing device may take the process with it.
        self.on_event({"event": "difference", "workload": workload.name, "devices": list(suspicion.devices)})

        def run(place: Place) -> list[RunOutcome] | Exception:
            (done,) = self._each(functools.partial(self._run, workload), [place])
            return cast("list[RunOutcome] | Exception", done)

        confirmed = confirm(workload, suspicion, outcomes, run, self.programs, self.result.rounds)
        for place, error in confirmed.errors:
            self._end(workload, place, error)
        for device, digest in confirmed.baselines.items():
            if standard:
                tallies[device].digest = digest
            else:
                self.digests[workload.name, device] = digest
        finding = confirmed.finding
        finding.simulated = sum(outcome.simulated for outcome in outcomes if outcome.device in finding.devices)
        if finding.kinds == ("repeat",) and not finding.simulated:  # the earlier runs may have been wrong
            finding.simulated = sum(tallies[device].simulated for device in finding.devices)
        if workload.name not in self.kept:
            kept, sums = None, None
            if confirmed.outputs is not None:
                right, wrong = (list(map(np.asarray, jax.tree.leaves(each))) for each in confirmed.outputs)
                kept = (right, wrong) if sum(array.nbytes for array in right) <= SMALL else None
                sums = sum_of(right), sum_of(wrong)
            self.kept[workload.name] = Kept(finding, kept, sums)
        self.result.findings.append(finding)
        self.on_event({"event": "finding", "workload": workload.name, "devices": list(finding.devices)})

    def _end(self, workload: BurninWorkload, place: Place, error: Exception) -> None:
        """Ends a failed workload on a device, or all workloads on a device that no longer answers."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, TimeoutError):  # a device that did not answer is not used again
            lost = [] if place is None else [place]
        else:
            lost = [index for index in self._devices_of(place) if not _alive(self.programs.devices[index])]
        ends: list[tuple[str | None, Place, str]] = [(None, index, f"device lost: {reason}") for index in lost]
        if place is None or place not in lost:
            ends.append((workload.name, place, reason))
        for name, device, why in ends:
            end = Ended(workload=name, device=device, round=self.result.rounds, reason=why)
            self.result.unfinished.append(end)
            self.on_event({"event": "ended", "workload": name, "device": device, "reason": why})


def _alive(device: jax.Device) -> bool:
    try:
        return int(jax.device_put(1, device) + jax.device_put(1, device)) == 2
    except Exception:  # a lost device may raise anything
        return False
