"""Signs of life: how a process notices that a peer is lost while its main thread waits in a collective."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

from .stopping import PREFIX, Stop

BEAT = 1.0
"""Seconds between two signs of life."""
PATIENCE = 12.0
"""Seconds without a sign of life after which a peer counts as lost. A sign may still come through when a network is cut
in one direction only, and it takes a beat to see it and half of one to look: 15 at most."""
GRACE = 3.0
"""Seconds between a peer's failure and the end of this process, which may be about to fail by itself and say why."""
DONE, FAILED = "done", "failed"
SIGNS = "sdc/alive"

Lost = Callable[[str], None]
"""Told why a run cannot go on. It is called in a thread while the main one waits in a collective that nothing else
ends, so that it must end the process."""


class Watch:
    """Gives signs of life and looks for those of the others, in the runtime's key-value store.

    The store is in process 0. Asking it can hang, if that process is stopped or the network is cut, so that one thread
    asks and another one looks how long ago it was answered.
    """

    def __init__(self, client: Any, timeout: float, lost: Lost, stop: Stop) -> None:
        self._client, self._lost, self._stop = client, lost, stop
        self._ended = threading.Event()
        self._doing = "at the start"
        self._contact = time.monotonic()
        self._seen: dict[str, tuple[str, str, float]] = {}
        self.patience = min(PATIENCE, timeout)

    def start(self) -> None:
        """Starts both threads."""
        for target in (self._ask, self._look):
            threading.Thread(target=target, daemon=True, name=f"watch{target.__name__}").start()

    def tell(self, doing: str) -> None:
        """Says what this process does now: a peer that misses it says so."""
        self._doing = doing

    def end(self, word: str) -> None:
        """Stops looking and leaves a last word."""
        self._ended.set()
        try:
            self._client.key_value_set(f"{SIGNS}/{distributed.global_state.process_id}", word, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return  # process 0 is gone, so nobody asks

    def wait_for_the_others(self, seconds: float) -> None:
        """Process 0 carries the runtime: if it left first, the others would think that it was lost."""
        deadline = time.monotonic() + seconds
        while distributed.global_state.process_id == 0 and time.monotonic() < deadline:
            words = self._signs(SIGNS).values()
            if sum(word in (DONE, FAILED) for word in words) == distributed.global_state.num_processes:
                time.sleep(BEAT)  # the others leave now
                return
            time.sleep(0.1)

    def wait_for_a_loss(self) -> None:
        """A collective failed, most likely since a peer was lost: waits as long as it takes to know which, and end."""
        time.sleep(self.patience + 2 * BEAT)

    def missing(self) -> str:
        """The peer from which nothing came for the longest time; process 0 if all of them are heard, as it carries the
        words of all others."""
        now = time.monotonic()
        silent = {process: now - since for process, (_, word, since) in self._seen.items() if word != DONE}
        late = [process for process, seconds in silent.items() if seconds > 3 * BEAT]
        return max(late, key=silent.__getitem__, default="0")

    def _ask(self) -> None:
        beat, me = 0, distributed.global_state.process_id
        while not self._ended.wait(BEAT):
            beat += 1
            try:
                self._client.key_value_set(f"{SIGNS}/{me}", f"{beat} {self._doing}", allow_overwrite=True)
                signs = self._signs(SIGNS)
                self._stop.agree(self._client, self._signs(PREFIX), self.patience)
            except jax.errors.JaxRuntimeError:
                continue
            now = time.monotonic()
            for key, value in signs.items():
                process, (count, _, doing) = key.rpartition("/")[2], value.partition(" ")
                if process not in self._seen or self._seen[process][0] != value:
                    self._seen[process] = (value, doing or count, now)
            self._contact = now

    def _look(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(BEAT / 2):
            now = time.monotonic()
            if now - last > self.patience / 2:  # this process itself stood still, and could hear nobody
                self._contact = now
                self._seen = {process: (value, doing, now) for process, (value, doing, _) in self._seen.items()}
            last = now
            if now - self._contact > self.patience:
                self._tell_lost("0", self._seen.get("0", ("", "", 0.0))[1])
            for process, (value, doing, since) in list(self._seen.items()):
                if value == FAILED and now - since > GRACE:
                    self._give_up(f"process {process} ended early, and its output says why; nothing can be said")
                # silent while the store answered: if it does not, process 0 is the one that is lost
                if value not in (DONE, FAILED) and self._contact - since > self.patience:
                    self._tell_lost(process, doing)

    def _tell_lost(self, process: str, doing: str) -> None:
        told = f", last heard {doing}" if doing else ""
        self._give_up(
            f"process {process} was lost (no sign of life for {self.patience:g} s{told}); nothing can be said"
        )

    def _give_up(self, message: str) -> None:
        if not self._ended.is_set():
            self._lost(message)

    def _signs(self, prefix: str) -> dict[str, str]:
        return dict(self._client.key_value_dir_get(f"{prefix}/"))
