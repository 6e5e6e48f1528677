"""Heartbeats of the processes of a run, detection of lost peers, and one common end.

Nothing here uses JAX or a clock: the methods of `Watch` are steps (`sdc.exchanges`), which `train.cluster` performs in
threads with the runtime's store, and tests in simulated time. All keys are below one folder of the store, so that one
request reads them at one moment:

    alive/P     "BEAT ACTIVITY" of process P; `DONE` once it knows the end of the run, `FAILED` if it ends early
    stop/why    why the run stops early: the first request stays
    passed/P    number of steps that process P had passed when it learned of the request
    arrived/P   process P has reached the end of the run
    end         "PROCESS SENTENCE" or "- SENTENCE": the end of the run; the first value stays, and all report it

The store is in process 0, so a store that does not answer means that process 0 is lost. If process 0 dies between the
first and the last reading of `end`, the processes that have read it report it, and the others that process 0 was lost.
"""

from collections.abc import Callable
from typing import NamedTuple

from sdc.exchanges import Pause, Read, Set, Steps

from .stopping import PATIENCE as LAST_STEP, Stop

ROOT = "sdc/watch"
END, WHY = f"{ROOT}/end", f"{ROOT}/stop/why"
DONE, FAILED, FINISHED = "done", "failed", "- finished"

BEAT = 1.0  # seconds between heartbeats
# Seconds without a heartbeat after which a peer counts as lost. Detection takes at most 15 seconds in total: one more
# heartbeat may arrive if the network is cut in only one direction, and the checks take up to one and a half intervals.
PATIENCE = 12.0
# Seconds between a peer's failure and the end of this process, which may itself fail in the meantime and report a more
# specific reason
GRACE = 3.0


class Sign(NamedTuple):
    """What a peer last published: the value, when this process first read it, for how long the store has answered
    without a new one, and the number of values so far."""

    value: str = ""
    since: float = 0.0
    silence: float = 0.0
    number: int = 0

    @property
    def doing(self) -> str:
        """The last activity."""
        return self.value.partition(" ")[2] or "at the start"


class Watch:
    """What one process knows of the others.

    Three threads perform the steps: `asking` and `looking` each in a thread of its own, since a request to the store
    hangs if process 0 is stopped or the network is cut, and `finishing` or `failing` in the main thread.
    """

    def __init__(self, me: int, count: int, stop: Stop, patience: float = PATIENCE) -> None:
        self.doing = "at the start"  # the current activity of this process
        self.end: str | None = None
        self.hurry: Callable[[], object] = lambda: None  # ends the pause of `asking`
        self.patience = patience
        self._me, self._count, self._stop = me, count, stop
        self._peers = {peer: Sign() for peer in range(count) if peer != me}
        self._proposal: str | None = None
        self._arrived, self._failed = False, False
        self._passed: int | None = None  # steps passed when this process learned of a request to stop
        self._announced = False  # whether the store knows that this process ends
        self._answers = 0
        self._answered: float | None = None  # time of the last answer of the store
        self._ticked: float | None = None  # time of the last look
        # Seconds for which this process was last suspended, and the numbers of the signs before.
        self._suspended, self._before = 0.0, self._numbers()
        self._interrupted: float | None = None  # time since which the run has been stopping

    def asking(self) -> Steps[None]:
        """Publishes what this process has to say and reads what the others say, until all know the end."""
        beat, published = 0, set[str]()
        while not self._known():
            busy = self._proposal or self._passed is not None or self._arrived or self._failed or self.end
            yield Pause(self._pace() if busy else BEAT)
            beat += 1
            word = FAILED if self._failed else DONE if self.end else f"{beat} {self.doing}"
            news = {
                END: self.end or self._proposal,
                WHY: self._stop.asked if self._passed is None else None,
                f"{ROOT}/passed/{self._me}": None if self._passed is None else str(self._passed),
                f"{ROOT}/arrived/{self._me}": "yes" if self._arrived else None,
            }
            try:  # the end before the sign that this process knows it
                for key, value in news.items():
                    if value and key not in published:  # once each: with slow answers, every request delays an end
                        yield Set(key, value, overwrite=False)
                        published.add(key)
                yield Set(f"{ROOT}/alive/{self._me}", word)
                values = yield Read(ROOT)
            except RuntimeError:
                continue  # `looking` notices that the store does not answer
            self._announced = word in (DONE, FAILED)
            self._heard(values, (yield Pause()))

    def looking(self) -> Steps[str | None]:
        """Judges the peers until the run has ended; returns the reason to give up, or None if the run has finished or
        failed in the main thread."""
        deaf, answers = 0.0, 0
        self._ticked = yield Pause()
        while self.end is None and not self._failed:
            before = yield Pause()
            now = yield Pause(BEAT / 2)
            self._notice(now)
            deaf, answers = (deaf + min(now - before, BEAT)) * (answers == self._answers), self._answers
            if deaf > self.patience:
                return self.blame(now)  # no store learns of it
            if self._proposal is None:
                self._proposal = self._judge(now)
        if self._failed or self.end == FINISHED:
            return None
        yield from self._leaving(GRACE + 2 * BEAT)
        return None if self._failed else self.sentence()

    def finishing(self) -> Steps[None]:
        """Waits at the end of the run until the run has finished in all processes. If one of them is lost, the wait
        lasts until `looking` returns the reason, which ends the process."""
        self._arrived = True
        self.hurry()
        while self.end != FINISHED:
            yield Pause(self._pace())
        yield from self._leaving(self.patience)

    def confirming(self) -> Steps[None]:
        """Waits, after a collective has failed, until all peers are certainly alive. If one of them is not, the wait
        lasts until `looking` returns the reason."""
        numbers = self._numbers()
        while self.end is not None or not all(self._alive_since(numbers).values()):
            yield Pause(BEAT / 2)

    def failing(self) -> Steps[None]:
        """Announces that this process ends early, and gives the others time to read it."""
        self._failed = True
        yield from self._leaving(GRACE + 3 * BEAT)

    def _leaving(self, seconds: float) -> Steps[None]:
        """Waits until the store knows that this process ends. Process 0, without which the others would consider it
        lost, waits until all others end."""
        self.hurry()
        deadline = (yield Pause()) + seconds
        while not self._known() and (yield Pause(self._pace())) < deadline:
            pass
        if self._me == 0:
            yield Pause(BEAT)  # the others end now

    def blame(self, now: float) -> str:
        """Ends the run for a process that cannot reach the store, and returns the reason."""
        self._notice(now)
        if self.end is None:
            self._proposal = self._proposal or self._lost(0)
            self.end = self._proposal
        return self.sentence()

    def sentence(self) -> str:
        """Returns the reason for which the run has ended, as this process reports it."""
        process, _, sentence = str(self.end).partition(" ")
        own = process == str(self._me) and self.end != self._proposal
        return f"the others gave up on this process: {sentence}" if own else sentence

    def _pace(self) -> float:
        # Few processes look often, and many once per beat, so that the store in process 0 can answer.
        return BEAT * min(1.0, max(0.05, self._count / 20))

    def _known(self) -> bool:
        """Returns whether the store, and for process 0 all peers, know that this process ends."""
        peers = self._peers.values() if self._me == 0 else ()
        return self._announced and all(sign.value in (DONE, FAILED) or sign.silence > self.patience for sign in peers)

    def _notice(self, now: float) -> None:
        """Notices a suspension of this process, which received nothing meanwhile."""
        if self._ticked is not None and now - self._ticked > self.patience / 2:
            self._suspended = now - self._ticked
            self._before = self._numbers()
        self._ticked = now

    def _heard(self, values: dict[str, str], now: float) -> None:
        """Takes in all values of the store."""
        # A gap between two answers accuses nobody: the store or this process may have been suspended.
        gap = min(now - (now if self._answered is None else self._answered), 2 * BEAT)
        self._answers, self._answered = self._answers + 1, now
        for peer, sign in self._peers.items():
            value = values.get(f"{ROOT}/alive/{peer}", "")
            new = Sign(value, now, 0.0, sign.number + 1)
            self._peers[peer] = sign._replace(silence=sign.silence + gap) if value == sign.value else new
        why = values.get(WHY)
        if why is not None and self._passed is None:
            self._passed, self._interrupted = self._stop.hold(why), now
        passed = [values.get(f"{ROOT}/passed/{process}") for process in range(self._count)]
        if None not in passed:
            self._stop.release(max(map(int, filter(None, passed))) + 1)
        if self._proposal is None and all(f"{ROOT}/arrived/{process}" in values for process in range(self._count)):
            self._proposal = FINISHED
        if self.end is None:
            self.end = values.get(END)

    def _numbers(self) -> dict[int, int]:
        return {peer: sign.number for peer, sign in self._peers.items()}

    def _alive_since(self, numbers: dict[int, int]) -> dict[int, bool]:
        """Returns for each peer whether it is certainly alive: a peer that is gone may have left one sign in an
        answer of the store, one in the store, and one in the network, but not four."""
        return {peer: sign.number > numbers[peer] + 3 for peer, sign in self._peers.items()}

    def _judge(self, now: float) -> str | None:
        """Returns the end to propose, or None as long as nothing is wrong."""
        if self._interrupted is not None and self._stop.pending and now - self._interrupted > LAST_STEP:
            return f"- {self._stop.late()}"
        for peer, sign in sorted(self._peers.items(), key=lambda one: -one[1].silence):
            failed = sign.value == FAILED and now - sign.since > GRACE
            if failed or (sign.value not in (DONE, FAILED) and sign.silence > self.patience):
                return self._lost(peer)
        return None

    def _lost(self, peer: int) -> str:
        """Returns the end for a peer that has failed or is silent.

        A process that was suspended itself does not accuse a silent peer that it has not heard since: that peer may
        have ended in the meantime.
        """
        last = self._peers.get(peer, Sign())
        if last.value == FAILED:
            return f"{peer} process {peer} ended early; see its output for the reason"
        if self._suspended and not self._alive_since(self._before).get(peer):
            since = f"was suspended for {self._suspended:.0f} s, and has not heard from process {peer} since"
            return f"{self._me} process {self._me} {since}"
        since = f"no heartbeat for {self.patience:g} s; last reported activity: {last.doing}"
        return f"{peer} process {peer} was lost ({since})"
