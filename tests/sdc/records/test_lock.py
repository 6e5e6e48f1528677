"""One writer at a time, and a dead one is no writer."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc.records import Record, RecordBusy, RecordError, identify
from sdc.records.lock import LOCK, RENEWING, Holder, Lock, _holder, _started

HOLD = """
import sys, time
from sdc.records import Record
record = Record.create(sys.argv[1], {}, kind="twin")
record.line({"step": 0})
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_writer_is_refused_until_the_first_is_dead(tmp_path: Path, writer: Any) -> None:
    message = (
        f"is being written by process {writer.pid} on host {identify().name}, since .*; wait until that process ends"
    )
    with pytest.raises(RecordBusy, match=message):
        Record.resume(tmp_path / "run", {}, at=1)
    with pytest.raises(RecordBusy, match=message):
        Record.create(tmp_path / "run", {}, kind="twin")
    writer.kill()  # not waited for: a process that nobody has asked for its exit code is dead all the same
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
    with Record.resume(tmp_path / "run", {}, at=1) as record:
        assert record.count == 1
        assert json.loads((tmp_path / "run" / LOCK).read_text())["host"]["pid"] == os.getpid()
    assert not list((tmp_path / "run").glob(f"{LOCK}*"))


def test_the_same_process_is_a_second_writer_too(tmp_path: Path) -> None:
    with (
        Record.create(tmp_path, {}, kind="twin"),
        pytest.raises(RecordBusy, match=f"process {os.getpid()} on host"),
    ):
        Record.resume(tmp_path, {}, at=0)
    Record.resume(tmp_path, {}, at=0).close()


def test_a_record_that_nobody_refers_to_holds_no_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    del lock
    Lock(tmp_path).release()  # a holder would be refused
    assert not (tmp_path / LOCK).exists()


def left(tmp_path: Path, *, host: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The lock of a dead process of this host, with changes."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = msgspec.to_builtins(Holder(token="a", started="1", namespace=os.readlink("/proc/self/ns/pid")))
    value = {**mine, **changes, "host": {**mine["host"], "pid": dead.pid, **(host or {})}}
    (tmp_path / LOCK).write_text(json.dumps(value))
    return tmp_path / LOCK


@pytest.mark.parametrize(
    ("host", "changes"),
    [({}, {}), ({"pid": os.getpid()}, {}), ({"boot": None}, {}), ({}, {"namespace": "of another container"})],
    ids=["dead", "another process has its number", "a system without boots", "another container"],
)
def test_locks_of_the_dead_are_taken_over(tmp_path: Path, host: dict[str, Any], changes: dict[str, Any]) -> None:
    """The kernel knows, also of processes of other containers."""
    path = left(tmp_path, host=host, **changes)
    lock = Lock(tmp_path)
    holder = _holder(str(path))
    assert holder is not None
    assert holder.host.pid == os.getpid()
    lock.release()
    assert not path.exists()


def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has no locks."""

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    monkeypatch.setattr("sdc.records.lock.SETTLE", 0.01)
    monkeypatch.setattr("sdc.records.lock.EXPIRY", 0.2)


@pytest.mark.parametrize(
    ("machine", "host", "changes", "free"),
    [
        ("the same", {}, {}, True),
        ("the same", {"pid": os.getpid()}, {"started": _started(os.getpid())}, False),
        ("the same", {"pid": os.getpid(), "boot": "the last start"}, {}, True),
        # Unknown processes, none of which renews its lock. The first may be of another host of that name.
        (None, {"pid": os.getpid(), "boot": "the last start"}, {}, True),
        ("the same", {"boot": None}, {}, True),
        ("the same", {}, {"namespace": "of another container"}, True),
    ],
)
def test_without_the_kernel_rules_tell_who_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str | None, host: Any, changes: Any, free: bool
) -> None:
    without_kernel(monkeypatch)
    monkeypatch.setattr("sdc.schema._machine", lambda: machine)
    path = left(tmp_path, host=host, **changes)
    if free:
        Lock(tmp_path).release()
        assert not path.exists()
    else:
        with pytest.raises(RecordBusy):
            Lock(tmp_path)


def test_of_two_that_find_a_dead_lock_without_the_kernel_the_last_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernel(monkeypatch)
    path = left(tmp_path)
    other = json.dumps(msgspec.to_builtins(Holder(token="b")))
    monkeypatch.setattr("time.sleep", lambda _: path.write_text(other))
    with pytest.raises(RecordBusy):
        Lock(tmp_path)
    assert path.read_text() == other


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("host", [{"name": "elsewhere"}, {"machine": "another of the same name"}])
def test_locks_of_other_hosts_are_taken_over_unless_they_are_renewed(
    tmp_path: Path, host: dict[str, Any], kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        without_kernel(monkeypatch)
    monkeypatch.setattr("sdc.records.lock.EXPIRY", 0.2)
    lock = left(tmp_path, host=host)
    before = lock.read_bytes()
    sleep, beats, tester = time.sleep, iter(range(10**9)), threading.current_thread()

    def renewed(seconds: float) -> None:
        sleep(seconds)
        if threading.current_thread() is tester:  # the thread that renews the locks of this process sleeps longer
            os.utime(lock, ns=(0, next(beats)))

    with monkeypatch.context() as alive:
        alive.setattr(time, "sleep", renewed)
        with pytest.raises(RecordBusy, match="wait until that process ends"):
            Lock(tmp_path)
    assert lock.read_bytes() == before
    Lock(tmp_path).release()
    assert not lock.exists()


def test_a_holder_renews_its_locks(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    path = tmp_path / LOCK
    os.utime(path, ns=(0, 0))
    assert any(thread.name == RENEWING for thread in threading.enumerate())
    lock.renew()
    assert path.stat().st_mtime_ns > 0
    lock.release()
    assert Lock(tmp_path).renew() is None
    lock.renew()  # of another holder now, or gone
    assert not path.exists()


FORK = """
import os, sys, time
from sdc.records import Lock
lock = Lock(sys.argv[1], lasting=True)
ready, done = os.pipe()
if (child := os.fork()) == 0:
    os.write(done, b".")
    time.sleep(60)
os.read(ready, 1)
lock.release()
Lock(sys.argv[1]).release()
os.kill(child, 9)
"""


def test_a_child_keeps_no_lock_of_its_parent(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], check=True, timeout=50)


NESTED = '{"host": {"name": "a"}, "token": "b", "more": ' + 100_000 * "[" + 100_000 * "]" + "}"


@pytest.mark.parametrize("text", ["", "{", "[]", NESTED], ids=["empty", "cut off", "no object", "nested"])
def test_a_lock_that_nobody_holds_is_taken_whatever_it_says(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    Lock(tmp_path).release()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize(
    ("what", "target"),
    [("a pipe", ""), ("a folder", "")]
    + [("a link", target) for target in ("/dev/zero", LOCK, "nothing", "record.json", "record.json/x")],
)
def test_a_lock_that_is_no_file_is_not_waited_for(tmp_path: Path, what: str, target: str) -> None:
    record = Record.create(tmp_path / "run", {}, kind="twin")
    lock = tmp_path / "run" / LOCK
    lock.unlink()
    {"a pipe": os.mkfifo, "a folder": os.mkdir, "a link": lambda path: path.symlink_to(target)}[what](lock)
    record.close()
    with pytest.raises(RecordError, match=f"lock.json is {what}, not a file; delete it"):
        Record.resume(tmp_path / "run", {}, at=0)


def test_a_lock_that_was_removed_and_taken_is_not_released_twice(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    (tmp_path / LOCK).unlink()
    other = Lock(tmp_path)
    lock.release()
    assert (tmp_path / LOCK).exists()
    other.release()
    assert not (tmp_path / LOCK).exists()


def _try(folder: str, start: Any, done: Any, winners: Any) -> None:
    start.wait()
    lock = None
    try:
        lock = Lock(folder)
        winners.put(os.getpid())
    except RecordBusy:
        pass
    done.wait()
    if lock is not None:
        lock.release()


def test_of_many_that_take_over_a_dead_lock_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sdc.records.lock"])
    left(tmp_path)
    start, done, winners = context.Barrier(8), context.Barrier(8), context.SimpleQueue()
    processes = [context.Process(target=_try, args=(str(tmp_path), start, done, winners)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    winners.get()
    assert winners.empty()
