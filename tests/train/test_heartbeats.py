"""Lost peers, and an early end that all processes take alike: in simulated time, and in threads with a store in the
place of the runtime's."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from sdc.train import heartbeats, stopping
from sdc.train.checkpoints import NotWritten
from sdc.train.cluster import Threads, runtime_failure
from sdc.train.heartbeats import DONE, FAILED, ROOT, Watch
from sdc.train.stopping import Stop
from tests.storms import schedules


def test_schedules() -> None:
    """No hang, no two ends, and nobody blamed to whom nothing happened; and every kind of end occurs."""
    seen: Counter[str] = Counter()
    for seed in range(700):
        schedule = schedules.Schedule(seed)
        schedule.run()
        assert not schedule.wrong(), f"schedule {seed}: {schedule.wrong()}"
        seen.update(schedules.kind_of(process) for process in schedule.processes)
    assert {*schedules.KINDS} <= {*seen}, seen


class Store:
    """What JAX's client does with keys and values."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.hangs = threading.Event()
        self._lock = threading.Lock()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        while self.hangs.is_set():
            time.sleep(0.01)
        with self._lock:
            self.values[key] = value if allow_overwrite else self.values.get(key, value)

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        with self._lock:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The reasons for which the process ends."""
    monkeypatch.setattr(heartbeats, "BEAT", 0.02)
    monkeypatch.setattr(heartbeats, "GRACE", 0.1)
    running = threading.active_count()
    yield []
    deadline = time.monotonic() + 5
    while threading.active_count() > running:
        assert time.monotonic() < deadline, "the threads do not end with the run"
        time.sleep(0.01)


def watching(me: int, count: int, store: Store, stop: Stop, heard: list[str], patience: float = 0.4) -> Threads:
    threads = Threads(store, Watch(me, count, stop, patience), heard.append)
    threads.start()
    return threads


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("beating", None),
        ("silent", "process 1 was lost (no heartbeat for 0.4 s; last reported activity: in step 7)"),
        ("never there", "process 1 was lost (no heartbeat for 0.4 s; last reported activity: at the start)"),
        (FAILED, "process 1 ended early; see its output for the reason"),
        ("the store hangs", "process 0 was lost (no heartbeat for 0.4 s; last reported activity: at the start)"),
    ],
)
def test_the_reason_names_the_peer(heard: list[str], peer: str, message: str | None) -> None:
    store = Store()
    threads = watching(2, 3, store, Stop(), heard)
    deadline = time.monotonic() + 1.2
    for beat in range(1000):
        store.key_value_set(f"{ROOT}/alive/0", f"{beat} ", allow_overwrite=True)
        word = {"silent": "1 in step 7", "never there": "", FAILED: FAILED}.get(peer, f"{beat} in step {beat}")
        if word:
            store.key_value_set(f"{ROOT}/alive/1", word, allow_overwrite=True)
        if peer == "the store hangs" and beat == 3:
            store.hangs.set()
            break
        if heard or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    while not heard and time.monotonic() < deadline:
        time.sleep(0.02)
    store.hangs.clear()
    threads.perform(threads.watch.failing())
    assert heard == ([] if message is None else [f"{message}; no verdict is possible"])


@pytest.mark.parametrize("seed", range(4))
def test_all_processes_stop_after_the_same_step(seed: int, heard: list[str]) -> None:
    """Main threads in step with one another, as collectives keep them, and watches that look in now and then."""
    count, store, draw = 3, Store(), random.Random(seed)
    stops = [Stop() for _ in range(count)]
    step = threading.Barrier(count)
    passed: list[int | None] = [None] * count
    asked_early = draw.random() < 0.5
    if asked_early:  # before the others are there
        stops[0].ask("SIGTERM")
    for stop in stops:
        stop.among(several=True)

    def main(process: int) -> None:
        threads = watching(process, count, store, stops[process], heard, patience=5.0)
        for number in range(10_000):
            step.wait(10)  # no process can finish a step that another one has not begun
            if stops[process].reached():
                passed[process] = number
                break
        threads.perform(threads.watch.finishing())

    mains = [threading.Thread(target=main, args=(process,)) for process in range(count)]
    for thread in mains:
        thread.start()
    time.sleep(0.05)
    stops[draw.randrange(count)].ask("SIGINT" if asked_early else "SIGTERM")
    for thread in mains:
        thread.join(20)
    assert len(set(passed)) == 1
    assert passed[0] is not None
    assert len({stop.asked for stop in stops}) == 1
    assert not heard
    assert {store.values[f"{ROOT}/alive/{process}"] for process in range(count)} == {DONE}


def test_a_run_that_does_not_come_to_the_end_of_a_step_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "PATIENCE", 0.05)
    late: list[Any] = []
    slow, quick = Stop(lambda: late.append("slow")), Stop(lambda: late.append("quick"))
    for stop in (slow, quick):
        stop.ask("SIGINT")
        stop.ask("SIGTERM")  # the first one counts
        assert stop.asked == "SIGINT"
    assert quick.reached()
    time.sleep(0.2)
    assert late == ["slow"]


GLOO = "UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer"
NCCL = "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error"


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (jax.errors.JaxRuntimeError("anything"), True),
        (ValueError(GLOO), True),
        (ValueError(NCCL), True),
        (ValueError("UNKNOWN: Error writing local file \"c/0\": Input/output error [os_error_code='5']"), False),
        (ValueError("INTERNAL: Error opening \"zarr3\" driver [source locations='tensorstore/driver.cc:98']"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_a_failed_collective_is_a_failure_of_the_runtime(error: Exception, failed: bool) -> None:
    """The processes then determine which peer was lost, whichever call passes the error on."""
    save = NotWritten("cannot write checkpoint 3")
    save.__cause__ = error
    assert (runtime_failure(error) is error) == failed
    passed_on = failed and not isinstance(error, jax.errors.JaxRuntimeError)
    assert runtime_failure(save) is (error if passed_on else None)
