"""Runs with several processes: connecting the processes, detecting lost peers, and checking comparability.

JAX's runtime transfers the data. A process that waits for a lost peer inside a collective would wait forever, so
threads monitor the heartbeats of the other processes (`Watch`). When a peer is lost, a monitoring thread calls `lost`,
which must end the process.
"""

import functools
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed
from jax.experimental import multihost_utils

from sdc.multihost import Unreachable, everyone, first_line
from sdc.records import RecordError, differences, read_record, to_json

from .peers import Peers
from .stopping import PREFIX, Stop

BEAT = 1.0  # seconds between heartbeats
# Seconds without a heartbeat after which a peer counts as lost. Detection takes at most 15 seconds in total: one more
# heartbeat may arrive if the network is cut in only one direction, and the checks take up to one and a half intervals.
PATIENCE = 12.0
# Seconds between a peer's failure and the end of this process, which may itself fail in the meantime and report a more
# specific reason
GRACE = 3.0
DONE, FAILED = "done", "failed"
SIGNS = "sdc/alive"

# Callback that receives the reason why a run cannot continue. A monitoring thread calls it while the main thread is
# blocked in a collective that nothing else can end, so the callback must end the process.
Lost = Callable[[str], None]


_watch: "Watch | None" = None


@contextmanager
def joined(peers: Peers, prepare: Callable[[int], None], lost: Lost, stop: Stop | None = None) -> Iterator[None]:
    """Connects the processes of a run for the duration of the `with` block."""
    global _watch
    peers.check()
    stop, timeout = stop or Stop(), peers.timeout
    watch: Watch | None = None
    _watch = None
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
            watch = _watch = Watch(distributed.global_state.client, timeout, lost, stop)
            stop.among(several=True)
            watch.start()
        prepare(count)
        try:
            devices = list(jax.devices())  # the processes connect to each other here
        except Exception as error:
            raise Unreachable(f"cannot start the devices ({first_line(error)})") from error
    except BaseException:
        if watch is not None:
            watch.end_early()
        raise
    finally:
        guard.cancel()
    if watch is None:
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
        multihost_utils.sync_global_devices("end")
    except jax.errors.JaxRuntimeError as error:
        # A peer was probably lost, so `Watch` gets time to identify the peer and end the process.
        time.sleep(watch.patience + 2 * BEAT)
        watch.end(FAILED)
        raise Unreachable(
            f"the run failed although all processes are alive ({first_line(error)}); no verdict is possible"
        ) from error
    except BaseException:
        watch.end_early()
        raise
    else:
        watch.end(DONE)
        watch.wait_for_the_others(watch.patience)
    finally:
        _watch = None


def announce(doing: str) -> None:
    """Publishes the current activity of this process, which the peers report if this process is lost. Without peers,
    the function does nothing."""
    if _watch is not None:
        _watch.doing = doing


def unreachable() -> str:
    """Returns the message for a runtime that gives up because its service in process 0 is unreachable."""
    return f"process {'0' if _watch is None else _watch.missing()} was lost; no verdict is possible"


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


class Watch:
    """Sends heartbeats and monitors those of the other processes, through the runtime's key-value store.

    `doing` is the current activity of this process, which the peers report if this process is lost. The store is in
    process 0. A request to the store can hang if process 0 is stopped or the network is cut, so one thread sends
    requests and another checks how long ago the store last answered.
    """

    def __init__(self, client: Any, timeout: float, lost: Lost, stop: Stop) -> None:
        self._client, self._lost, self._stop = client, lost, stop
        self._ended = threading.Event()
        self.doing = "at the start"
        self._contact = time.monotonic()
        self._seen: dict[str, tuple[str, str, float]] = {}
        self.patience = min(PATIENCE, timeout)

    def start(self) -> None:
        for target in (self._ask, self._look):
            threading.Thread(target=target, daemon=True, name=f"watch{target.__name__}").start()

    def end(self, word: str) -> None:
        """Stops monitoring and announces how this process ends (`DONE` or `FAILED`)."""
        self._ended.set()
        try:
            self._client.key_value_set(f"{SIGNS}/{distributed.global_state.process_id}", word, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return  # process 0 is gone, so no process reads the store

    def end_early(self) -> None:
        """Announces to the other processes that this process is ending early, and gives them time to read the
        announcement."""
        self.end(FAILED)
        self.wait_for_the_others(GRACE + 2 * BEAT)

    def wait_for_the_others(self, seconds: float) -> None:
        """Makes process 0, which runs the service, wait for the other processes, which would consider process 0 lost if
        it ended first."""
        deadline = time.monotonic() + seconds
        while distributed.global_state.process_id == 0 and time.monotonic() < deadline:
            words = self._signs(SIGNS).values()
            if sum(word in (DONE, FAILED) for word in words) == distributed.global_state.num_processes:
                time.sleep(BEAT)  # the others end now
                return
            time.sleep(0.1)

    def missing(self) -> str:
        """Returns the peer that has been silent for the longest time, or process 0 if no peer is silent, since process
        0 relays all heartbeats."""
        now = time.monotonic()
        silent = {process: now - since for process, (_, word, since) in self._seen.items() if word != DONE}
        late = [process for process, seconds in silent.items() if seconds > 3 * BEAT]
        return max(late, key=silent.__getitem__, default="0")

    def _ask(self) -> None:
        beat, me = 0, distributed.global_state.process_id
        while not self._ended.wait(BEAT):
            beat += 1
            try:
                self._client.key_value_set(f"{SIGNS}/{me}", f"{beat} {self.doing}", allow_overwrite=True)
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
            if now - last > self.patience / 2:  # this process itself was suspended and received nothing
                self._contact = now
                self._seen = {process: (value, doing, now) for process, (value, doing, _) in self._seen.items()}
            last = now
            if now - self._contact > self.patience:
                self._give_up("0", self._seen.get("0", ("", "", 0.0))[1])
            for process, (value, doing, since) in list(self._seen.items()):
                if value == FAILED and now - since > GRACE:
                    self._give_up(process)
                # A peer is lost if it is silent while the store answers; if the store does not answer, process 0 is
                # lost.
                if value not in (DONE, FAILED) and self._contact - since > self.patience:
                    self._give_up(process, doing)

    def _give_up(self, process: str, doing: str | None = None) -> None:
        """Calls `lost`; `doing` is the last activity of a silent peer, and None for a peer that failed."""
        why = f"process {process} ended early; see its output for the reason"
        if doing is not None:
            last = f"; last reported activity: {doing}" if doing else ""
            why = f"process {process} was lost (no heartbeat for {self.patience:g} s{last})"
        if not self._ended.is_set():
            self._lost(f"{why}; no verdict is possible")

    def _signs(self, prefix: str) -> dict[str, str]:
        return dict(self._client.key_value_dir_get(f"{prefix}/"))


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
