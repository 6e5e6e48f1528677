"""The burn-in itself: rounds through all workloads on all devices, until they are over or somebody stops them."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, cast

import jax

from sdc.faults import Fault
from sdc.settings import SettingError

from .confirming import Confirmation, confirm
from .corrupting import check_faults
from .data import keeps_subnormals
from .evidence import Finding, Suspicion, devices_kinds, examine, golden_key, vote
from .exporting import kept_outputs
from .golden import mark_of
from .golden_using import left_over
from .observed import ACCEPTED, Ended, Result
from .programs import Outcome, Programs, Ready
from .surroundings import surroundings
from .tally import Tally
from .workload import Workload

DETAILED = 4
"""Differences of a workload on a device that are run again and compared; those after them are counted."""
NAP = 0.05
"""Seconds between two questions whether to stop."""
LIMIT = 1800.0
"""Seconds after which a device that does not answer is given up: a large program compiles in less."""
THREADS = 8
"""Threads for each device: one that waits for a device for ever is not used again."""
Event = Mapping[str, Any]
Place = int | None
"""Index of a device; None for all of them together."""


def burn_in(
    workloads: Sequence[Workload],
    devices: Sequence[jax.Device],
    *,
    minutes: float | None = None,
    rounds: int | None = None,
    golden: Mapping[str, str] | None = None,
    accept: Iterable[str] = (),
    on_event: Callable[[Event], None] | None = None,
    stop: Callable[[], bool] | None = None,
    inject: Sequence[Fault] = (),
    pauses: Sequence[float] = (0.0,),
    programs: Programs | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    result: Result | None = None,
    limit: float = LIMIT,
) -> Result:
    """Runs workloads on devices again and again, and compares what comes of it.

    Args:
        workloads: what to run, as `registry.workloads` gives them.
        devices: devices of this process.
        minutes: how long; the run that is at work when they are over is finished.
        rounds: how often; either this or `minutes`.
        golden: digests by `golden_key`, as `Result.recorded` gives them.
        accept: `"repeat"` accepts that nothing but repetition is compared, which is blind to faults that repeat.
        on_event: is told of each round, run, finding and end, as JSON.
        stop: asked before each run, and while workloads wait, by several threads; what is known then is the result.
        inject: simulated faults, for rehearsals; see `corrupting.check_faults`.
        pauses: seconds before each run, by round in turns; 0 is load that stays.
        programs: what earlier burn-ins on these devices compiled.
        seed: of what simulated faults draw.
        clock: seconds, which never go back.
        result: what an earlier burn-in of the same workloads on the same devices saw, to go on from there; it is
            filled while the burn-in is at work, so that others can look at it.
        limit: seconds after which a device that does not answer is given up.

    Returns:
        What was seen; `verdict.judge` says what follows. A device that fails midway ends what it fails in, with its
        reason: that is no result of its own.

    Raises:
        SettingError: a setting makes no sense, or a fault hits nothing.

    Example:
        >>> import jax
        >>> from sdc.burnin.levels import SMALLEST
        >>> from sdc.burnin.registry import workloads
        >>> from sdc.burnin.rounds import burn_in
        >>> devices = jax.local_devices()[:1]
        >>> result = burn_in(workloads(SMALLEST, devices, only=["ordering"]), devices, rounds=2)
        >>> result.rounds, len(result.findings)
        (2, 0)
    """
    accepted = (accept,) if isinstance(accept, str) else tuple(accept)
    _check(workloads, devices, minutes, rounds, accepted, pauses, programs)
    check_faults(inject, devices, workloads)
    if result is None:
        result = Result(workloads, devices, accepted, tuple(map(str, inject)))
    running = _BurnIn(
        tuple(workloads),
        programs or Programs(devices),
        dict(golden or {}),
        tuple(inject),
        on_event or (lambda event: None),
        stop or (lambda: False),
        seed,
        clock,
        result,
        limit,
    )
    return running.go(minutes, rounds, tuple(pauses))


def _check(
    workloads: Sequence[Workload],
    devices: Sequence[jax.Device],
    minutes: float | None,
    rounds: int | None,
    accept: tuple[str, ...],
    pauses: Sequence[float],
    programs: Programs | None,
) -> None:
    if not devices:
        raise SettingError("devices", None, "expected one device at least")
    if len(set(devices)) != len(devices):
        raise SettingError("devices", devices, "one of them is given twice")
    if (minutes is None) == (rounds is None):
        raise SettingError("minutes", minutes, "expected either minutes or rounds")
    if minutes is not None and not minutes > 0:
        raise SettingError("minutes", minutes, "expected a positive number")
    if rounds is not None and rounds < 1:
        raise SettingError("rounds", rounds, "expected at least 1")
    if not pauses or min(pauses) < 0:
        raise SettingError("pauses", pauses, "expected a number of seconds for each round, 0 or more")
    if unknown := sorted(set(accept) - set(ACCEPTED)):
        raise SettingError("accept", unknown[0], f"expected some of {', '.join(ACCEPTED)}")
    if programs is not None and programs.devices != tuple(devices):
        raise SettingError("programs", None, "were compiled for other devices; leave them out")
    names = [workload.name for workload in workloads]
    if len(set(names)) != len(names):
        raise SettingError("workloads", names, "expected names that differ")


class _BurnIn:
    """A burn-in at work."""

    def __init__(
        self,
        workloads: tuple[Workload, ...],
        programs: Programs,
        golden: dict[str, str],
        faults: tuple[Fault, ...],
        tell: Callable[[Event], None],
        stop: Callable[[], bool],
        seed: int,
        clock: Callable[[], float],
        result: Result,
        limit: float,
    ) -> None:
        self.workloads, self.programs, self.faults = workloads, programs, faults
        self.tell, self.stop, self.seed, self.clock, self.result = tell, stop, seed, clock, result
        self.kinds = devices_kinds(programs.devices)
        self.given = golden
        self.golden: dict[str, dict[int, str]] = {}
        done = [(device, tally.runs) for (_, device), tally in result.tallies.items()]
        self.moments = {index: sum(n for at, n in done if at == index) for index in range(len(programs.devices))}
        self.last = float("inf")
        self.limit = limit
        self.pool = ThreadPoolExecutor(max_workers=THREADS * len(programs.devices))

    def go(self, minutes: float | None, rounds: int | None, pauses: tuple[float, ...]) -> Result:
        """All of it."""
        began, before = self.clock(), self.result.seconds
        try:
            self._prepare()
            if minutes is not None:
                self.last = self.clock() + 60 * minutes
            while not self._over() and (rounds is None or self.result.rounds < rounds) and self._living():
                pause = pauses[self.result.rounds % len(pauses)]
                self.result.seconds = before + self.clock() - began
                self.tell({"event": "round", "round": self.result.rounds})
                for workload in self.workloads:
                    self._rest(pause)
                    if self._over():
                        break
                    self._turn(workload)
                else:
                    self.result.rounds += 1
        finally:
            self.pool.shutdown(wait=not self.result.hung, cancel_futures=True)
        self.result.seconds = before + self.clock() - began
        return self.result

    def _each(self, function: Callable[[Place], Any], places: Sequence[Place]) -> list[Any]:
        """What a function returns for each device, all at the same time; a TimeoutError where there is no answer."""
        futures = [self.pool.submit(function, place) for place in places]
        wait(futures, timeout=self.limit)
        slow = TimeoutError(f"no answer within {self.limit:g} s")
        self.result.hung |= not all(future.done() for future in futures)
        return [future.result() if future.done() else slow for future in futures]

    def _over(self) -> bool:
        if self.stop():
            self.result.stopped = True
        return self.result.stopped or self.clock() >= self.last

    def _rest(self, seconds: float) -> None:
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0 and not self.stop():
            time.sleep(min(left, NAP))

    def _living(self) -> bool:
        return any(self._indices(workload) for workload in self.workloads)

    def _indices(self, workload: Workload) -> list[Place]:
        """Devices that a workload runs on; None stands for all of them together."""
        places: list[Place] = [None] if workload.multi else list(range(len(self.programs.devices)))
        return [place for place in places if not self.result.has_ended(workload.name, place)]

    def _prepare(self) -> None:
        """Compiles everything, places all data, and finds the golden digests that are of these programs."""
        used: set[str] = set()
        environment = mark_of(surroundings(self.programs.devices))
        for workload in self.workloads:
            if self._over():
                return
            self.tell({"event": "compile", "workload": workload.name})
            places = self._indices(workload)
            for place, ready in zip(places, self._each(functools.partial(self._ready, workload), places), strict=True):
                if isinstance(ready, Exception):
                    self._end(workload, place, ready)
                    continue
                if (error := self._unreferred(workload, place)) is not None:
                    self._end(workload, place, error)
                    continue
                for index in self.result.devices_of(place):
                    key = golden_key(workload, ready.fingerprint, self.kinds[index], index, environment)
                    self.result.learn((workload.name, index), key)
                    if key in self.given:
                        used.add(key)
                        self.golden.setdefault(workload.name, {})[index] = self.given[key]
        names = {workload.name for workload in self.result.workloads}
        self.result.foreign, self.result.unneeded = left_over(set(self.given) - used, names)
        self._note_flushed()

    def _ready(self, workload: Workload, place: Place) -> Ready | Exception:
        try:
            return self.programs.prepare(workload, place)
        except Exception as error:  # whatever the compiler or the device throws
            return error

    def _unreferred(self, workload: Workload, place: Place) -> Exception | None:
        """Computes on the host what outputs are compared with; returns what went wrong."""
        try:
            for index in self.result.devices_of(place):
                self.programs.reference(workload, index)
        except Exception as error:  # such as a host that has no memory for it
            return error
        return None

    def _note_flushed(self) -> None:
        """Says where subnormal data act as zeros."""
        first = {kind: device for device, kind in reversed(self.kinds.items())}
        for dtype in dict.fromkeys(each.dtype for each in self.workloads if each.data == "subnormal"):
            for kind, index in first.items():
                try:
                    kept = keeps_subnormals(dtype, self.programs.devices[index])
                except Exception:  # a device that fails here fails in its workloads too, and is recorded there
                    continue
                if not kept:
                    self.result.notes.append(f"{kind} takes subnormal numbers of {dtype} for zero: such data are zeros")

    def _run(self, workload: Workload, place: Place) -> list[Outcome] | Exception:
        """One run; what it throws is a result too."""
        moment = max(self.moments[index] for index in self.result.devices_of(place))
        for index in self.result.devices_of(place):
            self.moments[index] = moment + 1
        try:
            return self.programs.run(
                workload, place, faults=self.faults, moment=moment, seed=self.seed, rest=self._rest
            )
        except Exception as error:  # out of memory, device lost: whatever the runtime throws
            return error

    def _turn(self, workload: Workload) -> None:
        """Runs a workload once on each device, at the same time, and looks at what came out."""
        places = self._indices(workload)
        done = self._each(functools.partial(self._run, workload), places)
        outcomes: list[Outcome] = []
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
        golden = self.golden.get(workload.name, {})
        suspicions = examine(
            outcomes,
            alike=workload.alike,
            kinds=self.kinds,
            before=self.result.baselines(workload.name),
            golden=golden,
            references=references,
        )
        self._count(workload, outcomes, golden)
        for suspicion in suspicions:
            self._follow(workload, suspicion, outcomes)

    def _count(self, workload: Workload, outcomes: Sequence[Outcome], golden: Mapping[int, str]) -> None:
        voted = vote({each.device: each.digest for each in outcomes}, self.kinds)
        heard = {*voted.agreed, *voted.odd} if workload.alike else set()
        for outcome in outcomes:
            tally = self.result.tallies.setdefault((workload.name, outcome.device), Tally())
            tally.add(outcome)
            tally.repeated += tally.baseline is not None
            tally.voted += outcome.device in heard
            tally.referred += outcome.right is not None
            tally.golden += outcome.device in golden
            if tally.baseline is None:
                tally.baseline = outcome.digest
            self.tell(
                {
                    "event": "run",
                    "round": self.result.rounds,
                    "workload": workload.name,
                    "device": outcome.device,
                    "digest": outcome.digest,
                    "seconds": outcome.seconds,
                }
            )

    def _follow(self, workload: Workload, suspicion: Suspicion, outcomes: Sequence[Outcome]) -> None:
        """Runs a difference again, and keeps what was found; those of the same place are counted after a while."""
        tallies = [self.result.tallies[workload.name, device] for device in suspicion.devices]
        for tally in tallies:
            tally.differences += 1
        if all(tally.differences > DETAILED for tally in tallies):
            return

        def run(place: Place) -> list[Outcome] | Exception:
            (done,) = self._each(functools.partial(self._run, workload), [place])
            return cast("list[Outcome] | Exception", done)

        confirmed = confirm(workload, suspicion, outcomes, run, self.programs)
        for place, error in confirmed.errors:
            self._end(workload, place, error)
        for device, digest in confirmed.baselines.items():
            self.result.tallies[workload.name, device].baseline = digest
        self._found(workload, confirmed, outcomes)

    def _found(self, workload: Workload, confirmed: Confirmation, outcomes: Sequence[Outcome]) -> None:
        first = next(outcome for outcome in outcomes if outcome.device == confirmed.devices[0])
        simulated = sum(outcome.simulated for outcome in outcomes if outcome.device in confirmed.devices)
        if confirmed.kinds == ("repeat",) and not simulated:  # it may be the runs before that erred
            simulated = sum(self.result.tallies[workload.name, device].simulated for device in confirmed.devices)
        finding = Finding(
            workload.name,
            confirmed.devices,
            self.result.rounds,
            confirmed.kinds,
            confirmed.persistence,
            first.digest,
            confirmed.expected,
            confirmed.elements,
            first.checks,
            simulated,
            confirmed.note,
            *kept_outputs(confirmed.outputs),
        )
        self.result.findings.append(finding)
        self.tell({"event": "finding", "workload": workload.name, "devices": list(confirmed.devices)})

    def _end(self, workload: Workload, place: Place, error: Exception) -> None:
        """What failed does not run again: a workload on a device, or all of a device that answers no more."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        lost = [index for index in self.result.devices_of(place) if self._is_lost(error, place, index)]
        ends = [Ended(None, index, self.result.rounds, f"device lost: {reason}") for index in lost]
        if place is None or place not in lost:
            ends.append(Ended(workload.name, place, self.result.rounds, reason))
        for end in ends:
            self.result.ended.append(end)
            self.tell({"event": "ended", "workload": end.workload, "device": end.device, "reason": end.reason})

    def _is_lost(self, error: Exception, place: Place, index: int) -> bool:
        """A device that did not answer is not asked again."""
        return place is not None if isinstance(error, TimeoutError) else not _alive(self.programs.devices[index])


def _alive(device: jax.Device) -> bool:
    try:
        return int(jax.device_put(1, device) + jax.device_put(1, device)) == 2
    except Exception:  # it does not matter what a lost device throws
        return False
