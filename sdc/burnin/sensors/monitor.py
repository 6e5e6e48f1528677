"""Monitors the temperature, power, clocks and errors of devices during a burn-in, using all available sources.

The driver of a failing device may raise an exception or block, but neither may affect the burn-in. Each source is
therefore read by its own daemon thread, for which the burn-in waits at most a few seconds.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType

import msgspec

from .base import Course, Described, Opener, Reading, SensorBackend, Sensors, Silent
from .kernel import open_hwmon, open_kernel_log
from .libraries import open_amd_smi, open_nvml, open_tpu_metrics

# Sources by name. A device's readings come from the first source that knows it; its errors come from all sources.
SOURCES: Mapping[str, Opener] = MappingProxyType(
    {
        "nvml": open_nvml,
        "amdsmi": open_amd_smi,
        "tpumonitoring": open_tpu_metrics,
        "hwmon": open_hwmon,
        "kernel log": open_kernel_log,
    }
)
PATIENCE = 5.0  # seconds to wait for all sources before a burn-in, and again after it
MOST = 32  # maximum number of distinct errors listed for a device
MOST_READINGS = 240  # of a device that are kept


class Monitor:
    """A context manager that reads the sensors of devices every `every` seconds."""

    def __init__(
        self,
        described: Described,
        every: float = 1.0,
        sources: Mapping[str, Opener] = SOURCES,
        *,
        patience: float = PATIENCE,
    ) -> None:
        self._devices, self._patience = len(described), patience
        self._watches = [_Watch(name, opener, described, every) for name, opener in sources.items()]

    def __enter__(self) -> "Monitor":
        until = time.monotonic() + self._patience
        for watch in self._watches:
            watch.start()
        for watch in self._watches:
            if not watch.ready.wait(max(0.0, until - time.monotonic())):
                watch.give_up(f"{watch.name} did not respond within {self._patience:g} s and will not be read again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        until = time.monotonic() + self._patience
        for watch in self._watches:
            watch.over.set()
        for watch in self._watches:
            watch.join(max(0.0, until - time.monotonic()))
            if watch.is_alive() and not watch.given_up:
                watch.give_up(
                    f"{watch.name} did not respond within {self._patience:g} s after the burn-in, so its last reading "
                    "is used",
                    keep=True,
                )

    def courses(self) -> list[Course | None]:
        """Returns the readings and errors so far for each device, or None for a device that no source knows."""
        return [self._course(index) for index in range(self._devices)]

    def notes(self) -> list[str]:
        """Returns notes on sources that are unavailable or have stopped reporting, with the reasons."""
        return [note for watch in self._watches for note in list(watch.notes)]

    def _course(self, index: int) -> Course | None:
        reports = [(watch.name, *watch.said(index)) for watch in self._watches]
        course = next((course for _, course, _ in reports if course is not None), None)
        counts = {text: count for _, _, texts in reports for text, count in texts.items()}
        # NVML gives the number of an Xid; the kernel's log gives the same number with more details.
        words = [
            text if count == 1 else f"{text} ({count} times)"
            for text, count in counts.items()
            if not any(other.startswith(f"{text}:") for other in counts)
        ]
        if course is None and words:
            by = next(name for name, _, texts in reports if texts)
            course = Course(source=by, before=Sensors(), after=Sensors(), samples=0)
        if course is not None:
            course.events = words[:MOST] + [f"and {len(words) - MOST} more"] * (len(words) > MOST)
        return course


class _Watch(threading.Thread):
    def __init__(self, name: str, opener: Opener, described: Described, every: float) -> None:
        super().__init__(name=name, daemon=True)
        self.ready, self.over, self.given_up = threading.Event(), threading.Event(), False
        self.notes: list[str] = []
        self._opener, self._described, self._every = opener, described, every
        self._lock = threading.Lock()
        self._courses: dict[int, Course] = {}
        self._events: Counter[tuple[int | None, str]] = Counter()
        self._begun = time.monotonic()
        self._stride = 1  # every how many readings one is kept

    def give_up(self, note: str, *, keep: bool = False) -> None:
        """Stops waiting for the source and ignores its later reports."""
        with self._lock:
            self.given_up = True
            self.notes.append(note)
            if not keep:
                self._courses.clear()
                self._events.clear()
        self.over.set()

    def said(self, index: int) -> tuple[Course | None, dict[str, int]]:
        """Returns a device's readings so far, and how often each error of the device or the host was reported."""
        with self._lock:
            known = self._courses.get(index)
            events = {text: count for (device, text), count in self._events.items() if device in (index, None)}
            if known is not None:
                known = msgspec.structs.replace(known, readings=list(known.readings))
            return known, events

    def run(self) -> None:
        source: SensorBackend | None = None
        failed = "reports nothing"
        try:
            if (source := self._opener(self._described)) is not None:
                failed = "stopped reporting"
                self._watch(source)
        except Exception as error:  # an exception in a driver's library ends only its own reports
            said = f": {error}" if isinstance(error, Silent) else f" {failed}: {type(error).__name__}: {error}"
            with self._lock:
                if not self.given_up:
                    self.notes.append(f"{self.name}{said}")
        finally:
            self.ready.set()
            if source is not None:
                source.close()

    def _watch(self, source: SensorBackend) -> None:
        for index in range(len(self._described)):
            if (found := source.read(index, between=False)) is not None:
                course = Course(
                    source=self.name, before=found, after=found, samples=0, hottest=found.temperature,
                    strongest=found.power,
                )  # fmt: skip
                with self._lock:
                    if not self.given_up:
                        self._courses[index] = course
        self.ready.set()
        while not self.over.wait(self._every):
            self._ask(source, between=True)
        self._ask(source, between=False)

    def _ask(self, source: SensorBackend, *, between: bool) -> None:
        reported = source.events()
        with self._lock:
            if not self.given_up:
                self._events.update((each.device, each.text) for each in reported)
            known = list(self._courses)
        for index in known:
            found = source.read(index, between=between) or Sensors()
            with self._lock:
                if self.given_up or (course := self._courses.get(index)) is None:
                    return
                course.after = found
                course.hottest = _of(max, course.hottest, found.temperature)
                course.strongest = _of(max, course.strongest, found.power)
                if between:  # before and after, the device is idle
                    course.samples += 1
                    course.slowest = _of(min, course.slowest, found.clock)
                    self._keep(course, found)

    def _keep(self, course: Course, found: Sensors) -> None:
        """Keeps one of `_stride` readings; when there are too many, drops every other one and doubles the stride."""
        if course.samples % self._stride == 0:
            seconds = round(time.monotonic() - self._begun, 1)
            course.readings.append(
                Reading(seconds=seconds, temperature=found.temperature, power=found.power, clock=found.clock)
            )
        if len(course.readings) > MOST_READINGS:
            self._stride *= 2
            for each in self._courses.values():
                each.readings = each.readings[1::2]


def _of(choose: Callable[[list[float]], float], *values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None
