"""Early end of a run with several processes: all processes stop after the same step, even if only one of them received
the request.

Processes do not communicate between steps. A single process therefore cannot simply stop, since the other processes
would wait for it in the next step. The process that received the request publishes the request in the runtime's store.
Each process then blocks its main thread at the end of its current step until all processes have published their step
numbers. All processes stop one step after the most advanced process.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from jax._src import distributed

PREFIX = "sdc/stop"
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

    patience = PATIENCE

    def __init__(self, too_late: Callable[[], None] = lambda: None) -> None:
        """Starts without a request to stop."""
        self.asked: str | None = None
        self._too_late = too_late
        self._passed = 0
        self._last: int | None = None
        self._agreed = False
        self._several = False
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def among(self, several: bool) -> None:
        """Sets whether the run has several processes, which must agree on the last step."""
        self._several = several

    def ask(self, why: str) -> None:
        """Requests an early end; may be called from any thread, and more than once."""
        with self._lock:
            if self.asked is not None:
                return
            self.asked = why
            if not self._several:
                self._last = self._passed + 1
        self._timer = threading.Timer(PATIENCE, self._too_late)
        self._timer.daemon = True
        self._timer.start()

    def reached(self) -> bool:
        """Returns whether to end now; the main thread calls this method after each step."""
        with self._lock:
            self._passed += 1
            end = self._last is not None and self._passed >= self._last
        if end:
            self.over()
        return end

    def over(self) -> None:
        """Marks the run as ended, so that a request no longer times out."""
        if self._timer is not None:
            self._timer.cancel()

    def agree(self, client: Any, said: dict[str, str], patience: float) -> None:
        """Agrees with all processes on the last step if any of them has received a request to stop."""
        if self._agreed or not (said or self.asked):
            return
        me = distributed.global_state.process_id
        if not said:
            client.key_value_set(f"{PREFIX}/why", str(self.asked), allow_overwrite=True)
        self.ask(said.get(f"{PREFIX}/why", str(self.asked)))
        self._agreed = True
        with self._lock:  # keeps the main thread from passing the end of a step meanwhile
            client.key_value_set(f"{PREFIX}/passed/{me}", str(self._passed), allow_overwrite=True)
            deadline = time.monotonic() + patience
            passed = [
                client.blocking_key_value_get(
                    f"{PREFIX}/passed/{peer}", max(1, int(1000 * (deadline - time.monotonic())))
                )
                for peer in range(distributed.global_state.num_processes)
            ]
            self._last = max(map(int, passed)) + 1
