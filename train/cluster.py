"""Runs of several processes: joining them, noticing when one is lost, and whether they may be compared.

JAX's own runtime carries the data. A process that waits for a lost peer inside a collective would wait for ever, so
threads look for signs of life of the others (`Watch`). When one is lost, they call `lost`: it has to end the process.
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

BEAT = 1.0  # seconds between two signs of life
# Seconds without a sign of life after which a peer counts as lost. A sign may still come through when a network is cut
# in one direction only, and it takes a beat to see it and half of one to look: 15 at most.
PATIENCE = 12.0
# Seconds between a peer's failure and the end of this process, which may be about to fail by itself and say why
GRACE = 3.0
DONE, FAILED = "done", "failed"
SIGNS = "sdc/alive"

# Told why a run cannot go on. It is called in a thread while the main one waits in a collective that nothing else ends,
# so that it must end the process.
Lost = Callable[[str], None]


_watch: "Watch | None" = None


@contextmanager
def joined(peers: Peers, prepare: Callable[[int], None], lost: Lost, stop: Stop | None = None) -> Iterator[None]:
    """Joins the processes of a run for the time of the block."""
    global _watch
    peers.check()
    stop, timeout = stop or Stop(), peers.timeout
    watch: Watch | None = None
    _watch = None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM away from the command, and do nothing with it.
    jax.config.update("jax_enable_preemption_service", False)
    late = f"a peer did not come within {timeout:g} s"
    mend = "start all processes, or wait longer for them"
    guard = threading.Timer(timeout, lambda: lost(f"{late}{peers.tried()}; {mend}"))
    guard.daemon = True
    guard.start()
    try:
        # JAX's own limit is longer: it would abort the process.
        count = _initialize(peers, int(timeout) + 60, lambda: lost(unreachable()))
        if count > 1:
            watch = _watch = Watch(distributed.global_state.client, timeout, lost, stop)
            stop.among(several=True)
            watch.start()
        prepare(count)
        try:
            devices = list(jax.devices())  # this is when the processes find one another
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
                f"processes have different numbers of devices ({dict(sorted(counts.items()))}); twins need the same"
            )
        yield
        multihost_utils.sync_global_devices("end")
    except jax.errors.JaxRuntimeError as error:
        # Most likely since a peer was lost: as long as it takes to know which, and end.
        time.sleep(watch.patience + 2 * BEAT)
        watch.end(FAILED)
        raise Unreachable(
            f"the run failed although all processes are alive ({first_line(error)}); nothing can be said"
        ) from error
    except BaseException:
        watch.end_early()
        raise
    else:
        watch.end(DONE)
        watch.wait_for_the_others(watch.patience)
    finally:
        _watch = None


def tell(doing: str) -> None:
    """Says what this process does now, for the message of its peers if it is lost; nothing where it has none."""
    if _watch is not None:
        _watch.doing = doing


def unreachable() -> str:
    """What to say when the runtime gives up, since its service in process 0 cannot be reached."""
    return f"process {'0' if _watch is None else _watch.missing()} was lost; nothing can be said"


def _initialize(peers: Peers, patience: int, gave_up: Callable[[], None]) -> int:
    """Starts JAX's runtime where peers or the environment name a cluster; returns the number of processes."""
    while not peers.known():
        time.sleep(BEAT)
    # Where it can, the runtime calls a function, rather than to abort the process with a stack trace.
    library: Any = getattr(distributed, "_jax", None)
    make: Any = getattr(library, "get_distributed_runtime_client", None)
    told = make is not None and "missed_heartbeat_callback" in (make.__doc__ or "")
    if told:
        library.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *_: gave_up())
    try:
        jax.distributed.initialize(peers.coordinator, peers.processes, peers.process, initialization_timeout=patience)
    except Exception as error:
        if isinstance(error, ValueError) and peers.coordinator is None:
            return 1  # no cluster was named or detected
        raise Unreachable(f"cannot join the other processes{peers.tried()} ({first_line(error)})") from error
    finally:
        if told:
            library.get_distributed_runtime_client = make
    return int(distributed.global_state.num_processes or 1)


class Watch:
    """Gives signs of life and looks for those of the others, in the runtime's key-value store.

    `doing` says what this process does now: a peer that misses it says so. The store is in process 0. Asking it can
    hang, if that process is stopped or the network is cut, so that one thread asks and another one looks how long ago
    it was answered.
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
        """Stops looking and leaves a last word."""
        self._ended.set()
        try:
            self._client.key_value_set(f"{SIGNS}/{distributed.global_state.process_id}", word, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return  # process 0 is gone, so nobody asks

    def end_early(self) -> None:
        """Says to the others that this process ends, and gives them the time to hear it."""
        self.end(FAILED)
        self.wait_for_the_others(GRACE + 2 * BEAT)

    def wait_for_the_others(self, seconds: float) -> None:
        """Process 0 carries the runtime: if it left first, the others would think that it was lost."""
        deadline = time.monotonic() + seconds
        while distributed.global_state.process_id == 0 and time.monotonic() < deadline:
            words = self._signs(SIGNS).values()
            if sum(word in (DONE, FAILED) for word in words) == distributed.global_state.num_processes:
                time.sleep(BEAT)  # the others leave now
                return
            time.sleep(0.1)

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
            if now - last > self.patience / 2:  # this process itself stood still, and could hear nobody
                self._contact = now
                self._seen = {process: (value, doing, now) for process, (value, doing, _) in self._seen.items()}
            last = now
            if now - self._contact > self.patience:
                self._give_up("0", self._seen.get("0", ("", "", 0.0))[1])
            for process, (value, doing, since) in list(self._seen.items()):
                if value == FAILED and now - since > GRACE:
                    self._give_up(process)
                # silent while the store answered: if it does not, process 0 is the one that is lost
                if value not in (DONE, FAILED) and self._contact - since > self.patience:
                    self._give_up(process, doing)

    def _give_up(self, process: str, doing: str | None = None) -> None:
        """With what it did: it is silent; without: it failed."""
        why = f"process {process} ended early, and its output says why"
        if doing is not None:
            last = f", last heard {doing}" if doing else ""
            why = f"process {process} was lost (no sign of life for {self.patience:g} s{last})"
        if not self._ended.is_set():
            self._lost(f"{why}; nothing can be said")

    def _signs(self, prefix: str) -> dict[str, str]:
        return dict(self._client.key_value_dir_get(f"{prefix}/"))


class Incomparable(RuntimeError):
    """Processes, or runs, of which a difference would mean nothing."""


def as_read(manifest: Mapping[str, Any]) -> Any:
    """A manifest as it is read from its file, in which infinity is a text."""
    return json.loads(json.dumps(to_json(manifest), default=str))


def changes(
    then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str], words: tuple[str, str] = ("then", "now")
) -> list[str]:
    """The entries in which two manifests differ, in words."""
    found = differences([as_read({key: manifest.get(key) for key in keys}) for manifest in (then, now)])
    return [each.describe(words) for each in found]


def check_resumed(
    folder: Path, noun: str, then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]
) -> None:
    """Refuses to go on with a record of other settings."""
    if changed := changes(then, now, keys, (f"the {noun} had", "now")):
        raise RecordError(
            f"{folder} is another {noun} ({'; '.join(changed[:5])}); resume it with its own settings and on its own "
            "machine, or name another folder"
        )


def rows_in_order(folder: Path, kind: str, key: str) -> list[Any]:
    """Lines of a record whose parts may be written in any order, by their number: from the first on without a gap."""
    rows = {getattr(row, key): row for row in read_record(folder, kind).lines.typed}
    return [rows[number] for number in itertools.takewhile(rows.__contains__, itertools.count())]


def check_comparable(manifest: Mapping[str, Any]) -> None:
    """Refuses processes that differ in anything that decides what they compute, line by line."""
    own = {key: value for key, value in manifest.items() if key not in ("command", "created", "host")}
    lines = differences([json.loads(text) for text in everyone(json.dumps(own))])
    if lines:
        raise Incomparable(
            "the processes are not comparable, so that no difference between them would mean anything:\n  "
            + "\n  ".join(line.describe() for line in lines)
            + "\nmake them equal and start again"
        )
