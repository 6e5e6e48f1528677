"""Runs of several processes: joining them, noticing when one is lost, and whether they may be compared.

JAX's own runtime carries the data. A process that waits for a lost peer inside a collective would wait for ever, so
threads look whether the others are alive (`watch`). When one is not, they call `lost`, which has to end the process.
"""

import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed
from jax.experimental import multihost_utils

from sdc.multihost import Unreachable, everyone, first_line
from sdc.records import differences, to_json

from .peers import Peers, route
from .stopping import Stop
from .watch import BEAT, DONE, FAILED, GRACE, Lost, Watch

_watch: Watch | None = None


@contextmanager
def joined(peers: Peers, prepare: Callable[[int], None], lost: Lost, stop: Stop | None = None) -> Iterator[None]:
    """Joins the processes of a run for the time of the block."""
    global _watch
    peers.check()
    stop, _watch = stop or Stop(), None
    timeout = peers.timeout
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM away from the command, and do nothing with it.
    jax.config.update("jax_enable_preemption_service", False)
    late = f"a peer did not come within {timeout:g} s"
    with _Guard(timeout, lambda: lost(f"{late}{peers.tried()}; start all processes, or wait longer for them")):
        # JAX's own limit is longer: it would abort the process.
        count = _initialize(peers, int(timeout) + 60, lambda: lost(unreachable()))
        if count > 1:
            _watch = Watch(distributed.global_state.client, timeout, lost, stop)
            stop.among(several=True)
            _watch.start()
        try:
            prepare(count)
            devices = _devices()
        except BaseException:
            if _watch is not None:
                _end_early(_watch)
            raise
    if _watch is None:
        yield
        return
    watch = _watch
    try:
        counts = Counter(device.process_index for device in devices)
        if len(set(counts.values())) > 1:
            raise Incomparable(
                f"processes have different numbers of devices ({dict(sorted(counts.items()))}); twins need the same"
            )
        yield
        multihost_utils.sync_global_devices("end")
    except jax.errors.JaxRuntimeError as error:
        watch.wait_for_a_loss()
        watch.end(FAILED)
        raise Unreachable(
            f"the run failed although all processes are alive ({first_line(error)}); nothing can be said"
        ) from error
    except BaseException:
        _end_early(watch)
        raise
    else:
        watch.end(DONE)
        watch.wait_for_the_others(watch.patience)
    finally:
        _watch = None


def _end_early(watch: Watch) -> None:
    """Says to the others that this process ends, and gives them the time to hear it."""
    watch.end(FAILED)
    watch.wait_for_the_others(GRACE + 2 * BEAT)


def tell(doing: str) -> None:
    """Says what this process does now, for the message of its peers if it is lost; nothing where it has none."""
    if _watch is not None:
        _watch.tell(doing)


def unreachable() -> str:
    """What to say when the runtime gives up, since its service in process 0 cannot be reached."""
    return f"process {'0' if _watch is None else _watch.missing()} was lost; nothing can be said"


def _await_name(peers: Peers) -> None:
    """Waits until the name of the coordinator has an address: where a cluster is just starting it may have none yet."""
    while peers.coordinator is not None and route(peers.coordinator).address is None:
        time.sleep(BEAT)


class _Guard:
    """Ends the process if a block takes too long."""

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _initialize(peers: Peers, patience: int, gave_up: Callable[[], None]) -> int:
    """Starts JAX's runtime where peers or the environment name a cluster; returns the number of processes."""
    _await_name(peers)
    try:
        with _told_of_its_end(gave_up):
            jax.distributed.initialize(
                peers.coordinator, peers.processes, peers.process, initialization_timeout=patience
            )
    except Exception as error:
        if isinstance(error, ValueError) and peers.coordinator is None:
            return 1  # no cluster was named or detected
        raise Unreachable(f"cannot join the other processes{peers.tried()} ({first_line(error)})") from error
    return int(distributed.global_state.num_processes or 1)


@contextmanager
def _told_of_its_end(gave_up: Callable[[], None]) -> Iterator[None]:
    """Has the runtime call a function where it would abort the process with a stack trace, if it can do so."""
    library: Any = getattr(distributed, "_jax", None)
    make = getattr(library, "get_distributed_runtime_client", None)
    if make is None or "missed_heartbeat_callback" not in (make.__doc__ or ""):
        yield
        return
    library.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *_: gave_up())
    try:
        yield
    finally:
        library.get_distributed_runtime_client = make


def _devices() -> list[jax.Device]:
    """All devices of all processes; this is when the processes find one another."""
    try:
        return list(jax.devices())
    except Exception as error:
        raise Unreachable(f"cannot start the devices ({first_line(error)})") from error


class Incomparable(RuntimeError):
    """Processes, or runs, of which a difference would mean nothing."""


def as_read(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest as it is read from its file, in which infinity is a text."""
    found: dict[str, Any] = json.loads(json.dumps(to_json(manifest), default=str))
    return found


def changes(then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str], words: tuple[str, str]) -> list[str]:
    """The entries in which two manifests differ, in words."""
    found = differences([as_read({key: manifest.get(key) for key in keys}) for manifest in (then, now)])
    return [each.describe(words) for each in found]


def check_comparable(manifest: Mapping[str, Any]) -> None:
    """Twins on several processes must agree on everything that decides what they compute.

    Raises:
        Incomparable: they do not; with what differs, line by line.
    """
    own = {key: value for key, value in manifest.items() if key not in ("command", "created", "host")}
    lines = differences([json.loads(text) for text in everyone(json.dumps(own))])
    if lines:
        raise Incomparable(
            "the processes are not comparable, so that no difference between them would mean anything:\n  "
            + "\n  ".join(line.describe() for line in lines)
            + "\nmake them equal and start again"
        )
