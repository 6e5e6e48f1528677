"""Readings of a burn-in from its beginning to its end; and a driver that fails or hangs does no harm."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from sdc.burnin.sensors.base import Course, Described, SensorBackend, SensorEvent, Sensors, Silent, driver_errors
from sdc.burnin.sensors.monitor import Monitor

GPUS = [{"kind": "NVIDIA H100", "uuid": f"GPU-{index}"} for index in range(2)]
CPUS = [{"kind": "cpu"}, {"kind": "cpu"}]


class Fake(SensorBackend):
    """A source that reports what it is given."""

    def __init__(self, read: Callable[[int, bool], Sensors | None], events: Iterable[list[SensorEvent]] = ()) -> None:
        self._read, self._events, self.closed = read, iter(events), False

    def read(self, index: int, *, between: bool) -> Sensors | None:
        return self._read(index, between)

    def events(self) -> list[SensorEvent]:
        return next(self._events, [])

    def close(self) -> None:
        self.closed = True


def test_readings_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdc.burnin.sensors.monitor.MOST_READINGS", 8)
    count, asked = iter(range(1000)), threading.Event()

    def read(index: int, between: bool) -> Sensors | None:
        number = next(count)
        if number > 80:
            asked.set()
        return Sensors(power=float(number) if between else -1.0)

    with Monitor(GPUS[:1], every=0.001, sources={"fake": lambda _: Fake(read)}) as monitor:
        assert asked.wait(10)
    (course,) = monitor.courses()
    assert course is not None
    powers = [one.power for one in course.readings]
    assert 4 <= len(powers) <= 8
    steps = {b - a for a, b in itertools.pairwise(power for power in powers if power is not None)}
    assert len(steps) == 1
    assert min(steps) >= 8


def test_a_course_has_before_between_and_after() -> None:
    degrees, asked = iter([40.0, 70.0, 65.0]), threading.Event()

    def read(index: int, between: bool) -> Sensors | None:
        if index == 1:
            return None
        found = Sensors(temperature=next(degrees, 50.0), clock=900.0 if between else 100.0)
        if not between:
            found.uncorrected = 0
        elif found.temperature == 65.0:
            asked.set()
        return found

    xid = SensorEvent(0, "Xid 48")
    fake = Fake(read, [[xid], [xid, SensorEvent(None, "machine check: 1 exceptions")]])
    more = Fake(lambda index, between: None, [[SensorEvent(0, "Xid 79: gone")], []])
    with Monitor(GPUS, every=0.01, sources={"fake": lambda _: fake, "more": lambda _: more}) as monitor:
        assert asked.wait(5)
    first, second = monitor.courses()
    assert first is not None
    assert (first.source, first.before.temperature, first.after.temperature) == ("fake", 40.0, 50.0)
    assert (first.hottest, first.slowest) == (70.0, 900.0)  # 100 MHz were of an idle device
    assert first.samples >= 2
    assert (first.before.uncorrected, first.after.uncorrected) == (0, 0)
    assert first.events == ["Xid 48 (2 times)", "machine check: 1 exceptions", "Xid 79: gone"]
    assert second is not None
    assert (second.samples, second.before, second.events) == (0, Sensors(), ["machine check: 1 exceptions"])
    assert monitor.notes() == []
    assert fake.closed


def test_an_xid_is_told_once() -> None:
    one = Fake(lambda index, between: Sensors(power=1.0), [[SensorEvent(0, "Xid 48")]])
    other = Fake(lambda index, between: None, [[SensorEvent(0, "Xid 48: pid=1")]])
    with Monitor(GPUS[:1], sources={"nvml": lambda _: one, "log": lambda _: other}) as monitor:
        pass
    (course,) = monitor.courses()
    assert course is not None
    assert course.events == ["Xid 48: pid=1"]


def test_the_first_that_tells_is_taken() -> None:
    sources = {
        "none": lambda _: None,
        "dumb": lambda _: Fake(lambda index, between: None),
        "good": lambda _: Fake(lambda index, between: Sensors(power=1.0)),
        "late": lambda _: Fake(lambda index, between: Sensors(power=2.0)),
    }
    with Monitor(CPUS, sources=sources) as monitor:
        pass
    assert [course and course.before for course in monitor.courses()] == [Sensors(power=1.0)] * 2


def test_what_fails_is_said_and_does_no_harm() -> None:
    def cannot(described: Described) -> Any:
        raise Silent("install it")

    def breaks(described: Described) -> Any:
        raise OSError("no device")

    def loses(index: int, between: bool) -> Sensors:
        if between:
            raise RuntimeError("GPU is lost")
        return Sensors(power=1.0)

    sources = {"a": cannot, "b": breaks, "c": lambda _: Fake(loses)}
    with Monitor(CPUS[:1], every=0.01, sources=sources) as monitor:
        time.sleep(0.1)
    assert monitor.notes() == [
        "a: install it",
        "b reports nothing: OSError: no device",
        "c stopped reporting: RuntimeError: GPU is lost",
    ]


@pytest.mark.parametrize("when", ["opening", "before", "between"])
def test_a_driver_that_hangs_holds_up_nothing(when: str) -> None:
    free = threading.Event()

    def read(index: int, between: bool) -> Sensors:
        if when == ("between" if between else "before"):
            free.wait()
        return Sensors(power=2.0 if between else 1.0)

    def opener(described: Described) -> Fake:
        if when == "opening":
            free.wait()
        return Fake(read)

    began = time.monotonic()
    with Monitor(CPUS[:1], every=0.01, sources={"stuck": opener}, patience=0.1) as monitor:
        time.sleep(0.05)
    assert time.monotonic() - began < 2
    (course,), (note,) = monitor.courses(), monitor.notes()
    if when == "between":
        assert course is not None
        assert course.after == Sensors(power=1.0)
        assert "its last reading is used" in note
    else:
        assert course is None
        assert note == "stuck did not respond within 0.1 s and will not be read again"
    free.set()  # what it tells now comes too late
    for thread in threading.enumerate():
        if thread.name == "stuck":
            thread.join(5)
    assert monitor.courses() == [course]
    assert monitor.notes() == [note]


def test_errors_in_words() -> None:
    def errors(before: Sensors, after: Sensors, *events: str) -> list[str]:
        return list(driver_errors(Course(source="nvml", before=before, after=after, samples=1, events=list(events))))

    known = Sensors(corrected=1, uncorrected=0, retired=4)
    assert errors(known, Sensors(corrected=9, uncorrected=0, retired=4)) == []
    assert errors(known, Sensors(uncorrected=2, retired=5)) == [
        "2 new memory errors that ECC could not correct",
        "1 new retired memory pages or remapped rows",
    ]
    (again,) = errors(Sensors(uncorrected=3), Sensors(uncorrected=0))
    assert again.endswith("3 before, 0 after, so the driver restarted")
    assert errors(known, Sensors()) == ["nvml no longer reports readings of the device"]
    assert errors(known, known, "Xid 79 (2 times)", "Xid 13", "Xid 48: pid=1", "machine check: 1 exceptions") == [
        "Xid 79 (2 times) (the GPU has fallen off the bus)",
        "Xid 13",
        "Xid 48: pid=1",
        "machine check: 1 exceptions",
    ]
