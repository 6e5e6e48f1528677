"""Schedules: how processes agree in simulated time, with delays, deaths, suspensions, cuts, failures and signals.

A schedule is determined by its seed. Each process performs the steps of `sdc.train.heartbeats`, and its main thread
runs some training steps, which are collectives, exchanges a text, and finishes. In all schedules: every process ends;
all that finish have run the same number of steps; a process that nothing happened to is never blamed; and unless
something happened to process 0, which has the store, all others that nothing happened to end alike.
"""

import heapq
import random
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from sdc.exchanges import Drop, Get, Pause, Read, Set, exchange
from sdc.train.heartbeats import FINISHED, PATIENCE, Watch
from sdc.train.stopping import Stop

from .tally import Tally

LIMIT = 400.0
"""Seconds of simulated time after which a process that has not ended hangs."""
NEVER = float("inf")
KINDS = ("interrupted", "finished", "gave up", "suspended", "was lost", "ended early", "own", "died", "stopped")
"""How a process ends: words of its message, and what happens to those that leave none."""


class Step(NamedTuple):
    """Runs a training step, which all processes must begin; answered with False if it fails."""

    number: int


class Failure(Exception):
    """A failure of a process in its own code."""


class Process:
    """One process of a schedule, and what happened to it."""

    def __init__(self, me: int, count: int) -> None:
        self.stop = Stop()
        self.stop.among(several=True)
        self.watch = Watch(me, count, self.stop)
        self.me = me
        self.hit: str | None = None  # what happened to it, if that is worse than a delay
        self.dead = False
        self.silent = False  # its machine is gone, so that its peers get no error
        self.asleep: list[tuple[float, float]] = []
        self.fails_at = -1
        self.outcome: str | None = None
        self.steps: int | None = None


class Schedule:
    """One run of `count` processes."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.now, self._order, self._events = 0.0, 0, list[tuple[float, int, Process | None, Callable[[], None]]]()
        self.count = draw.choice((2, 2, 3, 3, 4, 5))
        self.processes = [Process(me, self.count) for me in range(self.count)]
        self.values: dict[str, str] = {}
        self._gets: list[tuple[str, Callable[[str], None]]] = []
        self.cuts: list[tuple[int, bool, float, float]] = []  # process, on the way to the store, from, to
        self.delay = draw.choice((0.001, 0.01, 0.2, 0.8))
        self.length = draw.choice((0.05, 0.5, 0.5, 2.0, 14.0))  # seconds of a step
        self.total = draw.choice((1, 5, 12, 30) if self.length < 10 else (1, 3, 5))
        self._begun: dict[int, list[tuple[Process, Callable[[Any], None]]]] = {}
        self._harm()

    def _harm(self) -> None:
        draw = self.draw
        until = min(30.0, self.total * self.length + 3)
        for _ in range(draw.choice((0, 0, 1, 1, 1, 2, 3))):
            victim, at = draw.choice(self.processes), draw.uniform(0, until)
            match draw.choice(("kill", "power", "suspension", "stop", "cut", "failure", "signal", "signal", "signal")):
                case "kill":
                    self.at(at, None, lambda victim=victim: self._die(victim, silent=False))
                case "power":
                    self.at(at, None, lambda victim=victim: self._die(victim, silent=True))
                case "suspension":
                    at = max(at, 0.3)  # once all have started
                    seconds = draw.choice((1.0, 4.0, 7.0, 15.0, 40.0))
                    victim.asleep.append((at, at + seconds))
                    if sum(end - begin for begin, end in victim.asleep) > PATIENCE / 3:  # delays add to it
                        victim.hit = "suspended"
                case "stop":
                    victim.asleep.append((at, NEVER))
                    victim.hit = "stopped"
                case "cut" if victim.me:
                    seconds = draw.choice((1.0, 3.0, 20.0, NEVER))
                    for outward in draw.choice(((True,), (False,), (True, False))):
                        self.cuts.append((victim.me, outward, at, at + seconds))
                    if seconds > PATIENCE / 3:
                        victim.hit = "cut"
                case "failure":
                    victim.fails_at = draw.randrange(self.total + 1)
                case "signal":
                    why = draw.choice(("SIGTERM", "SIGINT"))
                    self.at(at, victim, lambda victim=victim, why=why: victim.stop.ask(why))
                case _:
                    pass

    # time

    def at(self, when: float, process: Process | None, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, process, action))

    def later(self, seconds: float, process: Process | None, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, process, action)

    def run(self) -> None:
        """Runs until all processes have ended that can."""
        for process in self.processes:
            start = self.draw.uniform(0, 0.3)
            self.at(start, process, lambda process=process: self._start(process))
        while self._events and self.now < LIMIT:
            self.now, _, process, action = heapq.heappop(self._events)
            if process is not None:
                if process.dead:
                    continue
                wakes = max((end for begin, end in process.asleep if begin <= self.now < end), default=None)
                if wakes is not None:
                    if wakes < NEVER:
                        self.at(wakes + self.draw.uniform(0, 0.01), process, action)
                    continue
            action()
            if self._over():
                return

    def _over(self) -> bool:
        return all(one.dead or self._stuck(one) for one in self.processes)

    def _stuck(self, process: Process) -> bool:
        return any(begin <= self.now and end == NEVER for begin, end in process.asleep)

    # what happens

    def _die(self, process: Process, silent: bool) -> None:
        if not process.dead:
            process.dead, process.silent = True, silent
            process.hit = process.hit or "died"
            self._left(process)

    def _left(self, process: Process) -> None:
        """The connections of a process that ends are closed, unless its machine is gone."""
        if process.silent:
            return
        for number, waiting in self._begun.items():
            for peer, answer in waiting:
                self.later(self.draw.uniform(0, 2), peer, lambda answer=answer: answer(False))
            self._begun[number] = []
        if process.me == 0:
            self._gets.clear()
            for peer in self.processes[1:]:
                self.later(self.draw.uniform(0, 1), peer, lambda peer=peer: self._aborted(peer))

    def _aborted(self, process: Process) -> None:
        """The runtime of a process has lost the connection to process 0."""
        if process.outcome is None and process.watch.end != FINISHED:  # it then ends within a beat
            self._ends(process, process.watch.blame(self.now))

    def _ends(self, process: Process, outcome: str) -> None:
        if process.outcome is None:
            process.outcome, process.dead = outcome, True
            self._left(process)

    # threads

    def _start(self, process: Process) -> None:
        self._go(process, process.watch.asking(), lambda _: None)
        self._go(process, process.watch.looking(), lambda why: why and self._ends(process, why))
        self._go(process, self._main(process), lambda why: self._ends(process, why))

    def _main(self, process: Process) -> Generator[Any, Any, str]:
        watch, stop = process.watch, process.stop
        try:
            for number in range(self.total):
                watch.doing = f"in step {number}"
                if number == process.fails_at:
                    raise Failure("its own reason")
                if not (yield Step(number)):
                    yield from watch.confirming()
                    raise Failure("the collective failed although all peers are alive")
                while (end := stop.passing()) is None:
                    yield Pause(0.05)
                if end:
                    break
            process.steps = number
            if process.fails_at == self.total:
                raise Failure("its own reason")
            stop.over()
            said = yield from exchange(f"{number}", 0, process.me, self.count)
            assert len(set(said)) == 1, said
            yield from watch.finishing()
            return FINISHED
        except Failure as error:
            process.hit = process.hit or "failed"
            yield from watch.failing()
            return f"own: {error}"
        except RuntimeError:  # of the exchange: the store is gone
            yield from watch.confirming()
        while True:
            yield Pause(NEVER)

    def _go(self, process: Process, steps: Generator[Any, Any, Any], done: Callable[[Any], object]) -> None:
        def resume(answer: Any) -> None:
            try:
                request = steps.throw(answer) if isinstance(answer, RuntimeError) else steps.send(answer)
            except StopIteration as end:
                done(end.value)
                return
            self._perform(process, request, resume)

        resume(None)

    def _perform(self, process: Process, request: Any, resume: Callable[[Any], None]) -> None:
        if isinstance(request, Pause):
            if request.seconds < NEVER:
                self.later(request.seconds, process, lambda: resume(self.now))
        elif isinstance(request, Step):
            self._step(process, request.number, resume)
        else:
            self._send(process, request, resume)

    def _step(self, process: Process, number: int, resume: Callable[[Any], None]) -> None:
        if any(peer.dead and not peer.silent for peer in self.processes):
            self.later(self.draw.uniform(0, 2), process, lambda: resume(False))
            return
        waiting = self._begun.setdefault(number, [])
        waiting.append((process, resume))
        if len(waiting) == self.count:
            del self._begun[number]
            for peer, answer in waiting:
                length = self.length * self.draw.uniform(0.9, 1.1)
                self.later(length, peer, lambda answer=answer: answer(True))

    # the store

    def _send(self, process: Process, request: Any, resume: Callable[[Any], None]) -> None:
        """Sends a request to process 0."""
        host = self.processes[0]

        def refused() -> None:
            resume(RuntimeError("UNAVAILABLE"))

        def arrive() -> None:
            if host.dead:
                if not host.silent:
                    self.later(0.01, process, refused)
                return
            # A suspended process takes its requests when it goes on.
            self.at(self.now, host, lambda: self._store(request, answered))

        def answered(answer: Any) -> None:
            self._travel(process, False, lambda: self.at(self.now, process, lambda: resume(answer)))

        self._travel(process, True, arrive)

    def _travel(self, process: Process, outward: bool, arrive: Callable[[], None]) -> None:
        """Delays a message, and keeps it while the network is cut."""
        delay = 0.0005 if process.me == 0 else self.delay * self.draw.uniform(0.2, 1)
        when = self.now + delay
        for me, way, begin, end in self.cuts:
            if me == process.me and way == outward and begin <= when < end:
                when = end + self.draw.uniform(0, 0.2)
        if when < NEVER:
            self.at(when, None, arrive)

    def _store(self, request: Any, answer: Callable[[Any], None]) -> None:
        match request:
            case Set(key, value, overwrite):
                if overwrite or key not in self.values:
                    self.values[key] = value
                for wanted, waiting in self._gets:
                    if wanted == key:
                        waiting(value)
                self._gets = [(wanted, waiting) for wanted, waiting in self._gets if wanted != key]
                answer(None)
            case Get(key, seconds):
                if key in self.values:
                    answer(self.values[key])
                    return
                entry = (key, answer)
                self._gets.append(entry)

                def expired() -> None:
                    if entry in self._gets:
                        self._gets.remove(entry)
                        answer(None)

                self.later(seconds, self.processes[0], expired)
            case Read(folder):
                answer({key: value for key, value in self.values.items() if key.startswith(f"{folder}/")})
            case Drop(key):
                self.values.pop(key, None)
                answer(None)

    # what must hold

    def wrong(self) -> list[str]:
        """Returns what is wrong, each with an entry of `tally.WRONG`."""
        found = [f"hang: process {one.me}" for one in self.processes if not one.dead and not self._stuck(one)]
        ended = [one for one in self.processes if one.outcome is not None]
        steps = {one.steps for one in ended if one.outcome == FINISHED}
        if len(steps) > 1:
            found.append(f"other bits: processes finish after different steps {steps}")
        early = [one for one in ended if one.outcome == FINISHED and (one.steps or 0) < self.total - 1]
        asked = {one.stop.asked for one in early}  # after the last step, a request may reach only some
        if len(asked) > 1:
            found.append(f"false clean: processes finish for different reasons {asked}")
        whole = {one.me for one in self.processes if one.hit is None}
        for one in ended:
            words = str(one.outcome)
            blamed = {peer.me for peer in self.processes if f"process {peer.me} was" in words
                      or f"process {peer.me} ended" in words}  # fmt: skip
            if any(me == one.me for me, *_ in self.cuts):
                blamed -= {0}
            if blamed & whole:
                found.append(f"false corrupt: process {one.me} says {words}")
            announced = {peer.me for peer in ended if str(peer.outcome).startswith("own") and peer.hit == "failed"}
            if blamed & announced and "was lost" in words and one.hit is None and not self.cuts:
                found.append(f"odd exit code: process {one.me} says {words}, but that process ended early")
        if 0 in whole:
            outcomes = {one.outcome for one in ended if one.me in whole}
            if len(outcomes) > 1:
                found.append(f"false clean: processes end differently: {sorted(map(str, outcomes))}")
        if len(whole) == self.count and {one.outcome for one in ended} - {FINISHED} and self.length < PATIENCE / 2:
            found.append(f"odd exit code: nothing happened, but {ended[0].outcome}")
        return found


def run(count: int, seed: int) -> Tally:
    """Runs `count` schedules."""
    tally = Tally("schedules")
    for number in range(seed * 1_000_000, seed * 1_000_000 + count):
        schedule = Schedule(number)
        schedule.run()
        for words in schedule.wrong():
            what, _, why = words.partition(": ")
            tally.fail(what, f"{why} (schedule {number})")
        for one in schedule.processes:
            tally.note(kind_of(one))
        tally.trials += 1
    return tally


def kind_of(process: Process) -> str:
    """Returns the kind of a process's end."""
    words = process.outcome or process.hit or "hang"
    return next((kind for kind in KINDS if kind in words), words)
