"""Early end of a run with several processes: all processes stop after the same step, even if only one of them received
the request.

Processes do not communicate between steps. A single process therefore cannot simply stop, since the other processes
would wait for it in the next step. The process that received the request publishes the request in the runtime's store.
Each process then blocks its main thread at the end of its current step until all processes have published their step
numbers. All processes stop one step after the most advanced process. `Watch` exchanges the request and the numbers.
"""

import threading
from collections.abc import Callable

# A run that has not reached the end of a step this many seconds after a request to stop is ended immediately.
PATIENCE = 10.0


class Stop:
    """A request to end a run early, and the agreement on the last step.

    Example:
        >>> from sdc.train.stopping import Stop
        >>> stop = Stop()
        >>> stop.reached()
        False
        >>> stop.ask("SIGTERM")
        >>> stop.reached(), stop.asked
        (True, 'SIGTERM')
    """

    def __init__(self, too_late: Callable[[], None] = lambda: None) -> None:
        """Starts without a request to stop."""
        self.asked: str | None = None
        self._too_late = too_late
        self._passed = 0
        self._last: int | None = None
        self._held = False
        self._several = False
        self._over = False
        self._changed = threading.Condition()
        self._timer: threading.Timer | None = None

    def among(self, several: bool) -> None:
        """Sets whether the run has several processes, which must agree on the last step."""
        with self._changed:
            self._several = several
            if several and self._timer is not None:  # the request came before the others were there
                self._timer.cancel()
                self._last = None

    def ask(self, why: str) -> None:
        """Requests an early end; may be called from any thread, and more than once."""
        with self._changed:
            if self.asked is not None:
                return
            self.asked = why
            if self._several:
                return  # the processes agree that it is too late (`Watch`)
            self._last = self._passed + 1
        self._timer = threading.Timer(PATIENCE, self._too_late)
        self._timer.daemon = True
        self._timer.start()

    def reached(self) -> bool:
        """Returns whether to end now; the main thread calls this method after each step."""
        with self._changed:
            while (end := self.passing()) is None:
                self._changed.wait()
        return end

    def passing(self) -> bool | None:
        """Counts a step and returns whether to end now, or returns None as long as the processes agree on the last
        step."""
        with self._changed:
            if self._held:
                return None
            self._passed += 1
            end = self._last is not None and self._passed >= self._last
        if end:
            self.over()
        return end

    def over(self) -> None:
        """Marks the run as ended, so that a request no longer times out."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    @property
    def pending(self) -> bool:
        """Whether the run has been asked to end, and has not ended."""
        return self.asked is not None and not self._over

    def late(self) -> str:
        """Returns the reason for which a run ends that does not reach the end of a step."""
        return f"interrupted by {self.asked}, and no step finished within {PATIENCE:g} s"

    def hold(self, why: str) -> int:
        """Keeps the main thread from passing the end of a step until `release`; returns the number of steps passed."""
        with self._changed:
            self.asked = why  # of two requests, all processes name the same
            self._held = self._last is None
            return self._passed

    def release(self, last: int) -> None:
        """Sets the last step, on which all processes have agreed."""
        with self._changed:
            self._last, self._held = last, False
            self._changed.notify_all()
