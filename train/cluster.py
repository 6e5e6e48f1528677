"""Runs with several processes: connecting the processes, detecting lost peers, and checking comparability.

JAX's runtime transfers the data. A process that waits for a lost peer inside a collective would wait forever, so
threads monitor the heartbeats of the other processes (`sdc.train.heartbeats`). When a peer is lost, a monitoring thread
calls `lost`, which must end the process.
"""

import functools
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed

from sdc.exchanges import Result, Steps
from sdc.multihost import Unreachable, everyone, first_line, perform
from sdc.records import RecordError, differences, read_record, to_json

from .heartbeats import BEAT, PATIENCE, Watch
from .peers import Peers
from .stopping import Stop

# Callback that receives the reason why a run cannot continue. A monitoring thread calls it while the main thread is
# blocked in a collective that nothing else can end, so the callback must end the process.
Lost = Callable[[str], None]


# Errors of files that TensorStore raises have the same prefixes.
FAILED_COLLECTIVE = re.compile(
    "(UNKNOWN|INTERNAL|UNAVAILABLE|CANCELLED|ABORTED|DEADLINE_EXCEEDED): .*"
    "(Gloo|NCCL|RCCL|[Cc]ollective|[Cc]oordination)"
)

_threads: "Threads | None" = None


@contextmanager
def joined(peers: Peers, prepare: Callable[[int], None], lost: Lost, stop: Stop | None = None) -> Iterator[None]:
    """Connects the processes of a run for the duration of the `with` block."""
    global _threads
    peers.check()
    stop, timeout = stop or Stop(), peers.timeout
    threads = _threads = None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's SIGTERM handler would replace the command's handler and do nothing.
    jax.config.update("jax_enable_preemption_service", False)
    late = f"a peer did not connect within {timeout:g} s"
    mend = "start all processes, or increase the timeout"
    guard = threading.Timer(timeout, lambda: lost(f"{late}{peers.tried()}; {mend}"))
    guard.daemon = True
    guard.start()
    try:
        # JAX aborts the process at its own time limit, which is therefore set higher.
        count = _initialize(peers, int(timeout) + 60, lambda: lost(unreachable()))
        if count > 1:
            stop.among(several=True)
            runtime = distributed.global_state
            watch = Watch(runtime.process_id, count, stop, min(PATIENCE, timeout))
            threads = _threads = Threads(runtime.client, watch, lost)
            threads.start()
        prepare(count)
        try:
            devices = list(jax.devices())  # the processes connect to each other here
        except Exception as error:
            raise Unreachable(f"cannot start the devices ({first_line(error)})") from error
    except BaseException:
        if threads is not None:
            threads.perform(threads.watch.failing())
        raise
    finally:
        guard.cancel()
    if threads is None:
        yield
        return
    try:
        counts = Counter(device.process_index for device in devices)
        if len(set(counts.values())) > 1:
            raise Incomparable(
                f"processes have different numbers of devices ({dict(sorted(counts.items()))}); give all "
                "processes the same number"
            )
        yield
        threads.perform(threads.watch.finishing())
    except Exception as error:
        failure = runtime_failure(error)
        if failure is None:
            threads.perform(threads.watch.failing())
            raise
        # A peer was probably lost; a monitoring thread then ends the process.
        threads.perform(threads.watch.confirming())
        threads.perform(threads.watch.failing())
        raise Unreachable(
            f"the run failed although all processes are alive ({first_line(failure)}); no verdict is possible"
        ) from error
    except BaseException:
        threads.perform(threads.watch.failing())
        raise
    finally:
        _threads = None


def runtime_failure(error: BaseException | None) -> BaseException | None:
    """Returns the error of JAX's runtime that `error` is or stems from, or None.

    Some calls of JAX report a failed collective as a ValueError, which other calls, such as a save by Orbax, pass on.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return error
    while error is not None and not FAILED_COLLECTIVE.match(str(error)):
        error = error.__cause__
    return error


def announce(doing: str) -> None:
    """Publishes the current activity of this process, which the peers report if this process is lost. Without peers,
    the function does nothing."""
    if _threads is not None:
        _threads.watch.doing = doing


def unreachable() -> str:
    """Returns the message for a runtime that gives up because its service in process 0 is unreachable."""
    why = "process 0 was lost" if _threads is None else _threads.watch.blame(time.monotonic())
    return f"{why}; no verdict is possible"


def _initialize(peers: Peers, patience: int, gave_up: Callable[[], None]) -> int:
    """Starts JAX's runtime if `peers` or the environment defines a cluster; returns the number of processes."""
    while not peers.known():
        time.sleep(BEAT)
    # A runtime that supports a callback calls it instead of aborting the process with a stack trace.
    library: Any = getattr(distributed, "_jax", None)
    make: Any = getattr(library, "get_distributed_runtime_client", None)
    notifies = make is not None and "missed_heartbeat_callback" in (make.__doc__ or "")
    if notifies:
        library.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *_: gave_up())
    try:
        jax.distributed.initialize(peers.coordinator, peers.processes, peers.process, initialization_timeout=patience)
    except Exception as error:
        if isinstance(error, ValueError) and peers.coordinator is None:
            return 1  # no cluster was given or detected
        raise Unreachable(f"cannot join the other processes{peers.tried()} ({first_line(error)})") from error
    finally:
        if notifies:
            library.get_distributed_runtime_client = make
    return int(distributed.global_state.num_processes or 1)


class Threads:
    """Performs the steps of a `Watch` with the runtime's store, in threads."""

    def __init__(self, client: Any, watch: Watch, lost: Lost) -> None:
        self._client, self.watch, self._lost = client, watch, lost
        self._hurry = threading.Event()
        watch.hurry = self._hurry.set

    def start(self) -> None:
        for target in (self._ask, self._look):
            threading.Thread(target=target, daemon=True, name=f"watch{target.__name__}").start()

    def perform(self, steps: Steps[Result]) -> Result:
        return perform(steps, self._client)

    def _ask(self) -> None:
        perform(self.watch.asking(), self._client, self._pause)

    def _look(self) -> None:
        if (why := perform(self.watch.looking(), self._client)) is not None:
            self._lost(f"{why}; no verdict is possible")

    def _pause(self, seconds: float) -> None:
        self._hurry.wait(seconds)
        self._hurry.clear()


class Incomparable(RuntimeError):
    """Processes or runs cannot be compared, because a difference between them would be meaningless."""


def as_read(manifest: Mapping[str, Any]) -> Any:
    """Returns a manifest as it would be read from its file, in which infinity is a string."""
    return json.loads(json.dumps(to_json(manifest), default=str))


def changes(
    then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str], words: tuple[str, str] = ("then", "now")
) -> list[str]:
    """Describes the entries in which two manifests differ."""
    found = differences([as_read({key: manifest.get(key) for key in keys}) for manifest in (then, now)])
    return [each.describe(words) for each in found]


def check_resumed(
    folder: Path, noun: str, then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]
) -> None:
    """Raises RecordError if the record to resume was written with other settings."""
    if changed := changes(then, now, keys, (f"the {noun} had", "now")):
        raise RecordError(
            f"{folder} contains another {noun} ({'; '.join(changed[:5])}); resume it with the same settings on the "
            "same machine, or give another folder"
        )


def rows_in_order(folder: Path, kind: str, key: str) -> list[Any]:
    """Returns the lines of a record, which may be out of order in the file, sorted by number, up to the first missing
    number."""
    rows = {getattr(row, key): row for row in read_record(folder, kind).lines.typed}
    return [rows[number] for number in itertools.takewhile(rows.__contains__, itertools.count())]


def check_comparable(manifest: Mapping[str, Any]) -> None:
    """Raises Incomparable with a list of all differences if processes differ in anything that affects their results."""
    own = {key: value for key, value in manifest.items() if key not in ("command", "created", "host")}
    lines = differences([json.loads(text) for text in everyone(json.dumps(own))])
    if lines:
        raise Incomparable(
            "the processes are not comparable; differences between their results would be meaningless:\n  "
            + "\n  ".join(line.describe() for line in lines)
            + "\nmake these equal in all processes and start again"
        )
