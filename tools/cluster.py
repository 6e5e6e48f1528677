"""Runs of several processes: joining them, noticing when one is lost, and exchanging words.

JAX's own runtime carries the data. A process that waits for a lost peer inside a collective would wait for ever, so a
thread looks whether the others are alive, and ends this process with exit code 3 and a message when one is not.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from .errors import CommandError, Exit

BEAT = 1.0
"""Seconds between two signs of life."""
PATIENCE = 15.0
"""Seconds without a sign of life after which a peer counts as lost."""
GRACE = 3.0
"""Seconds between a peer's failure and the end of this process, which may be about to fail by itself and say why."""
DONE, FAILED = "done", "failed"


@contextmanager
def joined(
    coordinator: str | None, processes: int | None, process: int | None, timeout: float, prepare: Callable[[int], None]
) -> Iterator[None]:
    """Joins the processes of a run for the time of the block.

    Args:
        coordinator: `HOST:PORT` of process 0; None to use JAX's cluster detection (Slurm, Kubernetes, Cloud TPU), and
            to go on alone where it finds nothing.
        processes: number of processes.
        process: number of this one.
        timeout: seconds to wait for the others.
        prepare: told the number of processes before JAX starts its devices.
    """
    given = [value is not None for value in (coordinator, processes, process)]
    if any(given) and not all(given):
        raise CommandError("--coordinator, --processes and --process belong together; give all three or none")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise CommandError(
            f"--process {process}: expected a number from 0 to {processes - 1} (--processes {processes})"
        )
    if coordinator is not None and not _is_address(coordinator):
        raise CommandError(f"--coordinator {coordinator!r}: expected HOST:PORT, as in 10.0.0.1:4321")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _end_aborts_well()
    message = f"a peer did not come within {timeout:g} s; start all processes, or raise --timeout"
    with _Guard(timeout, message):
        # JAX's own limit is longer: it would abort the process.
        count = _initialize(coordinator, processes, process, int(timeout) + 60)
        if count > 1:
            _keep_standard_output()
        prepare(count)
        devices = _devices()
    if count == 1:
        yield
        return
    watch = _Watch(timeout)
    watch.start()
    try:
        counts = Counter(device.process_index for device in devices)
        if len(set(counts.values())) > 1:
            raise CommandError(
                f"processes have different numbers of devices ({dict(sorted(counts.items()))}); twins need the same",
                Exit.INCONCLUSIVE,
            )
        yield
        multihost_utils.sync_global_devices("end")
    except jax.errors.JaxRuntimeError as error:
        # A collective failed, most likely since a peer was lost; the watch would say so a little later.
        watch.stop(FAILED)
        raise CommandError(
            f"the run failed, or a peer was lost ({_first_line(error)}); nothing can be said", Exit.INCONCLUSIVE
        ) from error
    except BaseException:
        watch.stop(FAILED)
        watch.wait_for_the_others(GRACE + 2 * BEAT)
        raise
    else:
        watch.stop(DONE)
        watch.wait_for_the_others(watch.patience)


def leave_at_once(code: int) -> None:
    """Ends a process of several without the runtime's farewell, which would wait for lost peers."""
    if distributed.global_state.client is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def everyone(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


class _Guard:
    """Ends the process if a block takes too long."""

    def __init__(self, seconds: float, message: str) -> None:
        self._timer = threading.Timer(seconds, _give_up, [message])
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


class _Watch(threading.Thread):
    """Gives signs of life and looks for those of the others, in the runtime's key-value store."""

    def __init__(self, timeout: float) -> None:
        super().__init__(daemon=True, name="watch")
        assert distributed.global_state.client is not None
        self._client = distributed.global_state.client
        self._ended = threading.Event()
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
                    _give_up("process 0 was lost; nothing can be said. Start all processes again with --resume")
                continue
            for key, value in signs.items():
                if key not in seen or seen[key][0] != value:
                    seen[key] = (value, now)
            for key, (value, since) in seen.items():
                if value == FAILED and now - since > GRACE and not self._ended.is_set():
                    _give_up(f"process {key.rpartition('/')[2]} ended early; nothing can be said. Its output says why")
                if value not in (DONE, FAILED) and now - since > self.patience and not self._ended.is_set():
                    _give_up(
                        f"process {key.rpartition('/')[2]} was lost (no sign of life for {self.patience:g} s); "
                        "nothing can be said. Start all processes again with --resume"
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


def _keep_standard_output() -> None:
    """Gloo writes on standard output, which belongs to the command: it gets standard error instead."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding="utf-8")


def _aborted(_: int) -> None:
    os.write(2, b"sdc: inconclusive: the runtime gave up on a lost peer (its log is above); nothing can be said\n")
    os._exit(Exit.INCONCLUSIVE)


_ABORTED = ctypes.CFUNCTYPE(None, ctypes.c_int)(_aborted)
"""Kept alive as long as the module: the C library holds its address."""


def _end_aborts_well() -> None:
    """The runtime aborts the process when process 0 is lost: let that end with exit code 3 and a message.

    Python's own signal handlers do not run in an abort, so this one is set below it.
    """
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _ABORTED)


def _give_up(message: str) -> None:
    print(f"sdc: inconclusive: {message}", file=sys.stderr, flush=True)
    os._exit(Exit.INCONCLUSIVE)


def _initialize(coordinator: str | None, processes: int | None, process: int | None, patience: int) -> int:
    """Starts JAX's runtime where flags or the environment name a cluster; returns the number of processes."""
    try:
        jax.distributed.initialize(coordinator, processes, process, initialization_timeout=patience)
    except Exception as error:
        if isinstance(error, ValueError) and coordinator is None:
            return 1  # no cluster was named or detected
        raise CommandError(f"cannot join the other processes ({_first_line(error)})", Exit.INCONCLUSIVE) from error
    return int(distributed.global_state.num_processes or 1)


def _devices() -> list[jax.Device]:
    """All devices of all processes; this is when the processes find one another."""
    try:
        return list(jax.devices())
    except Exception as error:
        raise CommandError(f"cannot start the devices ({_first_line(error)})", Exit.INCONCLUSIVE) from error


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon and port.isdecimal() and 0 < int(port) < 65536)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
