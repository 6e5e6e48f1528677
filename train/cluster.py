"""Runs of several processes: joining them, and noticing when one is lost.

JAX's own runtime carries the data. A process that waits for a lost peer inside a collective would wait for ever, so a
thread looks whether the others are alive. When one is not, it calls `lost`, which has to end the process.
"""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax._src import distributed
from jax.experimental import multihost_utils

from .multihost import first_line
from .peers import Peers
from .processes import Incomparable

BEAT = 1.0
"""Seconds between two signs of life."""
PATIENCE = 15.0
"""Seconds without a sign of life after which a peer counts as lost."""
GRACE = 3.0
"""Seconds between a peer's failure and the end of this process, which may be about to fail by itself and say why."""
DONE, FAILED = "done", "failed"

Lost = Callable[[str], None]
"""Told why a run cannot go on. It is called in a thread while the main one waits in a collective that nothing else
ends, so that it must end the process."""


class Unreachable(RuntimeError):
    """Processes that cannot be joined, or a peer that was lost: nothing can be said of the hardware."""


@contextmanager
def joined(peers: Peers, prepare: Callable[[int], None], lost: Lost) -> Iterator[None]:
    """Joins the processes of a run for the time of the block.

    Args:
        peers: where they are; without a coordinator JAX's cluster detection is used (Slurm, Kubernetes, Cloud TPU), and
            the process goes on alone where that finds nothing.
        prepare: told the number of processes before JAX starts its devices.
        lost: called when a peer does not come or is lost.

    Raises:
        SettingError: see `Peers.check`.
        Unreachable: the processes cannot be joined, or a collective failed.
        Incomparable: they have different numbers of devices.
    """
    peers.check()
    timeout = peers.timeout
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    message = f"a peer did not come within {timeout:g} s; start all processes, or wait longer for them"
    with _Guard(timeout, functools.partial(lost, message)):
        # JAX's own limit is longer: it would abort the process.
        count = _initialize(peers, int(timeout) + 60)
        prepare(count)
        devices = _devices()
    if count == 1:
        yield
        return
    watch = _Watch(timeout, lost)
    watch.start()
    try:
        counts = Counter(device.process_index for device in devices)
        if len(set(counts.values())) > 1:
            raise Incomparable(
                f"processes have different numbers of devices ({dict(sorted(counts.items()))}); twins need the same"
            )
        yield
        multihost_utils.sync_global_devices("end")
    except jax.errors.JaxRuntimeError as error:
        # A collective failed, most likely since a peer was lost; the watch would say so a little later.
        watch.stop(FAILED)
        raise Unreachable(f"the run failed, or a peer was lost ({first_line(error)}); nothing can be said") from error
    except BaseException:
        watch.stop(FAILED)
        watch.wait_for_the_others(GRACE + 2 * BEAT)
        raise
    else:
        watch.stop(DONE)
        watch.wait_for_the_others(watch.patience)


class _Guard:
    """Ends the process if a block takes too long."""

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


class _Watch(threading.Thread):
    """Gives signs of life and looks for those of the others, in the runtime's key-value store."""

    def __init__(self, timeout: float, lost: Lost) -> None:
        super().__init__(daemon=True, name="watch")
        assert distributed.global_state.client is not None
        self._client = distributed.global_state.client
        self._ended = threading.Event()
        self._lost = lost
        self.patience = min(PATIENCE, timeout)

    def run(self) -> None:
        beat = 0
        seen: dict[str, tuple[str, float]] = {}
        own = f"sdc/alive/{jax.process_index()}"
        last_contact = time.monotonic()
        while not self._ended.wait(BEAT):
            beat += 1
            now = time.monotonic()
            try:
                self._client.key_value_set(own, str(beat), allow_overwrite=True)
                signs = dict(self._client.key_value_dir_get("sdc/alive/"))
                last_contact = now
            except jax.errors.JaxRuntimeError:
                if now - last_contact > self.patience / 3 and not self._ended.is_set():
                    self._lost("process 0 was lost; nothing can be said. Start all processes again, to resume")
                continue
            for key, value in signs.items():
                if key not in seen or seen[key][0] != value:
                    seen[key] = (value, now)
            for key, (value, since) in seen.items():
                process, silent = key.rpartition("/")[2], now - since
                if value == FAILED and silent > GRACE and not self._ended.is_set():
                    self._lost(f"process {process} ended early; nothing can be said. Its output says why")
                if value not in (DONE, FAILED) and silent > self.patience and not self._ended.is_set():
                    self._lost(
                        f"process {process} was lost (no sign of life for {self.patience:g} s); nothing can be said. "
                        "Start all processes again, to resume"
                    )

    def stop(self, word: str) -> None:
        """Stops looking and leaves a last word."""
        self._ended.set()
        try:
            self._client.key_value_set(f"sdc/alive/{jax.process_index()}", word, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return  # process 0 is gone, so nobody asks

    def wait_for_the_others(self, seconds: float) -> None:
        """Process 0 carries the runtime: if it left first, the others would think that it was lost."""
        deadline = time.monotonic() + seconds
        while jax.process_index() == 0 and time.monotonic() < deadline:
            words = dict(self._client.key_value_dir_get("sdc/alive/")).values()
            if sum(word in (DONE, FAILED) for word in words) == jax.process_count():
                time.sleep(BEAT)  # the others leave now
                return
            time.sleep(0.1)


def _initialize(peers: Peers, patience: int) -> int:
    """Starts JAX's runtime where peers or the environment name a cluster; returns the number of processes."""
    try:
        jax.distributed.initialize(peers.coordinator, peers.processes, peers.process, initialization_timeout=patience)
    except Exception as error:
        if isinstance(error, ValueError) and peers.coordinator is None:
            return 1  # no cluster was named or detected
        raise Unreachable(f"cannot join the other processes ({first_line(error)})") from error
    return int(distributed.global_state.num_processes or 1)


def _devices() -> list[jax.Device]:
    """All devices of all processes; this is when the processes find one another."""
    try:
        return list(jax.devices())
    except Exception as error:
        raise Unreachable(f"cannot start the devices ({first_line(error)})") from error
