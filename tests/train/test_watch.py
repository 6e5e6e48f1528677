"""Peers that are lost, and an early end that all take alike, with a store in the place of the runtime's."""

import random
import threading
import time
from typing import Any

import pytest

from sdc.train import cluster, stopping
from sdc.train.cluster import DONE, FAILED, SIGNS, Watch
from sdc.train.stopping import Stop


class Store:
    """What JAX's client does with keys and values."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.hangs = threading.Event()
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        while self.hangs.is_set():
            time.sleep(0.01)
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        with self._changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000), key
            return self.values[key]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(cluster, "BEAT", 0.02)
    monkeypatch.setattr(cluster, "PATIENCE", 0.4)
    monkeypatch.setattr(cluster, "GRACE", 0.1)
    return []


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("beating", None),
        ("silent", "process 1 was lost (no heartbeat for 0.4 s; last reported activity: in step 7)"),
        (FAILED, "process 1 ended early; see its output for the reason"),
        (DONE, None),
        ("the store hangs", "process 0 was lost (no heartbeat for 0.4 s"),
    ],
)
def test_what_is_said_of_a_peer(told: list[str], peer: str, message: str | None) -> None:
    store = Store()
    watching = Watch(store, 300.0, told.append, Stop())
    watching.start()
    deadline = time.monotonic() + 1.2
    for beat in range(1000):
        word = {"silent": "1 in step 7", FAILED: FAILED, DONE: DONE}.get(peer, f"{beat} in step {beat}")
        store.key_value_set(f"{SIGNS}/1", word)
        if peer == "the store hangs" and beat == 3:
            store.hangs.set()
            break
        if told or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    while not told and time.monotonic() < deadline:
        time.sleep(0.02)
    store.hangs.clear()
    watching.end(DONE)
    if message is None:
        assert not told
    else:
        assert told[0].startswith(message)
        assert told[0].endswith("no verdict is possible")


def test_a_store_that_hangs_after_a_late_sign_is_the_one_that_is_lost(told: list[str]) -> None:
    store = Store()
    store.key_value_set(f"{SIGNS}/1", "1 in step 7")
    watching = Watch(store, 300.0, told.append, Stop())
    watching.start()
    time.sleep(0.25)  # the store answers, and the peer's sign is old already when it stops to
    store.hangs.set()
    deadline = time.monotonic() + 2
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    store.hangs.clear()
    watching.end(DONE)
    assert told[0].startswith("process 0 was lost")


@pytest.mark.parametrize("seed", range(4))
def test_all_processes_stop_after_the_same_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Main threads in step with one another, as collectives keep them, and watches that look in now and then."""
    count, store, draw = 3, Store(), random.Random(seed)
    me = threading.local()

    class State:
        num_processes = count

        @property
        def process_id(self) -> int:
            return int(me.index)

    monkeypatch.setattr(stopping.distributed, "global_state", State())
    stops = [Stop() for _ in range(count)]
    step = threading.Barrier(count)
    passed: list[int | None] = [None] * count

    def main(process: int) -> None:
        for number in range(10_000):
            step.wait(10)  # no process can finish a step that another one has not begun
            if stops[process].reached():
                passed[process] = number
                return

    def look(process: int, delay: float) -> None:
        me.index = process
        time.sleep(delay)
        while passed[process] is None:
            said = dict(store.key_value_dir_get(f"{stopping.PREFIX}/"))
            stops[process].agree(store, said, 10.0)
            time.sleep(0.01)

    for stop in stops:
        stop.among(several=True)
    threads = [threading.Thread(target=main, args=(process,)) for process in range(count)]
    threads += [threading.Thread(target=look, args=(process, draw.random() / 10)) for process in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    stops[draw.randrange(count)].ask("SIGTERM")
    for thread in threads:
        thread.join(20)
    assert len(set(passed)) == 1
    assert passed[0] is not None
    assert {stop.asked for stop in stops} == {"SIGTERM"}


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
