"""An early end that all processes of a run take after the same step, though only one of them was asked.

Between steps the processes do not talk, so that one which is asked cannot just stop: the others would wait for it in
the next step. It tells them through the runtime's store; each then holds its main thread at the next step's end until
all have said how far they are; and all stop one step after the one that is farthest.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from jax._src import distributed

PREFIX = "sdc/stop"
PATIENCE = 10.0  # seconds until a run that was asked to end, and has not come to the end of a step, is ended at once


class Stop:
    """Whether a run is to end early, and after which step.

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
        """Begins without a wish to stop."""
        self.asked: str | None = None
        self._too_late = too_late
        self._passed = 0
        self._last: int | None = None
        self._agreed = False
        self._several = False
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def among(self, several: bool) -> None:
        """Says whether there are peers, with whom the step is agreed."""
        self._several = several

    def ask(self, why: str) -> None:
        """Asks for an early end; from any thread, once or several times."""
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
        """Whether to end now. The main thread asks after each step."""
        with self._lock:
            self._passed += 1
            end = self._last is not None and self._passed >= self._last
        if end:
            self.over()
        return end

    def over(self) -> None:
        """The run ends by itself: nothing is too late any more."""
        if self._timer is not None:
            self._timer.cancel()

    def agree(self, client: Any, said: dict[str, str], patience: float) -> None:
        """Agrees with all processes on the last step, where any of them wants to stop."""
        if self._agreed or not (said or self.asked):
            return
        me = distributed.global_state.process_id
        if not said:
            client.key_value_set(f"{PREFIX}/why", str(self.asked), allow_overwrite=True)
        self.ask(said.get(f"{PREFIX}/why", str(self.asked)))
        self._agreed = True
        with self._lock:  # the main thread does not pass the end of a step meanwhile
            client.key_value_set(f"{PREFIX}/passed/{me}", str(self._passed), allow_overwrite=True)
            deadline = time.monotonic() + patience
            passed = [
                client.blocking_key_value_get(
                    f"{PREFIX}/passed/{peer}", max(1, int(1000 * (deadline - time.monotonic())))
                )
                for peer in range(distributed.global_state.num_processes)
            ]
            self._last = max(map(int, passed)) + 1
