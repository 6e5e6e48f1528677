"""Kernel sources: files about AMD GPUs and processors (hwmon, RAS, thermal zones, EDAC), and the kernel's log.

The log contains NVIDIA's Xid errors, AMD's uncorrectable errors, and machine checks of the processor.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from .base import Described, SensorBackend, SensorEvent, Sensors, Silent, amd_addresses, attempt

PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")  # names of hwmon drivers that measure processors
ZONES = re.compile(r"x86_pkg_temp|cpu|soc", re.IGNORECASE)  # thermal zones of processors


def open_hwmon(described: Described, root: str = "/") -> "Hwmon | None":
    """Opens the kernel files about processors and AMD GPUs in the file system whose root is `root`."""
    amd = amd_addresses(described)
    processors = {index for index, device in enumerate(described) if device.get("kind") == "cpu"}
    return Hwmon(Path(root), amd, processors) if amd or processors else None


class Hwmon(SensorBackend):
    def __init__(self, root: Path, amd: Mapping[int, str], processors: set[int]) -> None:
        self._root, self._amd, self._processors = root, amd, processors
        self._checks = self._machine_checks()
        self._throttled = sum(self._throttles())

    def read(self, index: int, *, between: bool) -> Sensors | None:
        if index not in self._amd and index not in self._processors:
            return None
        found = self._of_amd(self._amd[index], between) if index in self._amd else self._of_processor(between)
        return found if found != Sensors() else None

    def _of_amd(self, bus: str, between: bool) -> Sensors:
        folder = self._root / "sys/bus/pci/devices" / bus
        watts = (_numbers(folder, f"hwmon/hwmon*/power1_{name}") for name in ("average", "input"))
        idle = between and _numbers(folder, "gpu_busy_percent") == [0.0]
        found = Sensors(
            temperature=_scaled(max, _numbers(folder, "hwmon/hwmon*/temp*_input"), 1e3),
            power=_scaled(max, next(filter(None, watts), []), 1e6),
            clock=None if idle else _scaled(max, _numbers(folder, "hwmon/hwmon*/freq1_input"), 1e6),
            memory_clock=_scaled(max, _numbers(folder, "hwmon/hwmon*/freq2_input"), 1e6),
        )
        if not between:
            for path in sorted(folder.glob("ras/*_err_count")):  # lines such as `ue: 1` and `ce: 20`
                block = dict(re.findall(r"^(ue|ce):\s*(\d+)", _text(path), re.MULTILINE))
                if len(block) == 2:
                    found.corrected = (found.corrected or 0) + int(block["ce"])
                    found.uncorrected = (found.uncorrected or 0) + int(block["ue"])
            pages = folder / "ras/gpu_vram_bad_pages"
            found.retired = len(_text(pages).split("\n")) - 1 if pages.exists() else None
        return found

    def _of_processor(self, between: bool) -> Sensors:
        system = self._root / "sys"
        drivers = [name.parent for name in system.glob("class/hwmon/hwmon*/name") if _text(name).strip() in PROCESSORS]
        zones = [kind.parent for kind in system.glob("class/thermal/thermal_zone*/type") if ZONES.search(_text(kind))]
        degrees = [value for folder in drivers for value in _numbers(folder, "temp*_input")]
        degrees = degrees or [value for folder in zones for value in _numbers(folder, "temp")]
        clocks = _numbers(system, "devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
        throttles = self._throttles()
        found = Sensors(
            temperature=_scaled(max, degrees, 1e3),
            clock=_scaled(sum, clocks, len(clocks) * 1e3),
            slowed=None if not throttles else ["too hot"] if sum(throttles) > self._throttled else [],
        )
        if not between:
            counts = [_numbers(system, f"devices/system/edac/mc/mc*/{name}_count") for name in ("ce", "ue")]
            found.corrected, found.uncorrected = (int(sum(each)) if each else None for each in counts)
        return found

    def events(self) -> list[SensorEvent]:
        before, self._checks = self._checks, self._machine_checks()
        new = self._checks - before
        return [SensorEvent(None, f"machine check: {new} exceptions")] if new > 0 else []

    def _throttles(self) -> list[float]:
        """Returns how often each processor has been throttled because of its temperature since the system booted."""
        return _numbers(self._root / "sys", "devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count")

    def _machine_checks(self) -> int:
        lines = _text(self._root / "proc/interrupts").splitlines()
        line = next((line for line in lines if line.strip().startswith("MCE:")), "")
        return sum(int(word) for word in line.split()[1:] if word.isdecimal())


def _scaled(choose: Callable[[list[float]], float], values: list[float], unit: float) -> float | None:
    return choose(values) / unit if values else None


def _numbers(folder: Path, pattern: str) -> list[float]:
    """Returns the numbers in the files that match a pattern; skips momentarily unreadable files."""
    found = (attempt(float, _text(path)) for path in sorted(folder.glob(pattern)))
    return [value for value in found if value is not None]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # some drivers raise this for values that are momentarily unavailable
        return ""


LOG = "/dev/kmsg"
LONGEST = 160  # maximum number of characters kept from a line
RECORDS = 10_000  # maximum number of lines read per call, because a failing driver may write endlessly
_ADDRESS = r"(?P<bus>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?"
# Patterns of messages that report hardware errors, and the corresponding texts in the result.
ERRORS = (
    (rf"(?i)NVRM: Xid \(PCI:{_ADDRESS}\): (?P<number>\d+)(?:, ?(?P<rest>.*))?$", "Xid {number}"),
    # A query of the error counters also logs earlier errors and "no uncorrectable errors"; only lines about new errors
    # count.
    (
        rf"(?i)amdgpu {_ADDRESS}: .*?\b(?P<what>[1-9]\d* new uncorrectable hardware errors detected in \w+ block)",
        "{what}",
    ),
    (r"(?i)(?:mce: )?\[Hardware Error\]: (?P<what>.*Machine Check.*|.*Uncorrected.*)$", "machine check: {what}"),
    (r"EDAC \S+: (?P<what>[1-9]\d* UE .*)$", "EDAC: {what}"),
)


def parse_message(text: str) -> tuple[str | None, str] | None:
    """Returns the PCI address of the device (None for the host) and the text of an error that a log message reports.

    The address has the log's format: lower case, four digits for the domain, and no function number.
    """
    for pattern, said in ERRORS:
        if (found := re.search(pattern, text.strip())) is not None:
            named = found.groupdict()
            words = said.format(**named) + (f": {named['rest']}" if named.get("rest") else "")
            return _short_address(named["bus"]) if "bus" in named else None, words[:LONGEST]
    return None


def _short_address(bus: str) -> str:
    domain, _, place = bus.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{place.partition('.')[0]}"


def open_kernel_log(described: Described, path: str = LOG) -> "KernelLog | None":
    """Opens the kernel's log at its end; if the log is unreadable, raises `Silent`, or returns None if no device has a
    PCI address."""
    places = {_short_address(str(device["bus"])): index for index, device in enumerate(described) if device.get("bus")}
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(handle, 0, os.SEEK_END)
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if not places:
            return None
        problem = f"{path} cannot be read ({error.strerror}), so errors that only this log reports are unknown"
        raise Silent(problem) from error
    return KernelLog(handle, places)


class KernelLog(SensorBackend):
    """Errors in the kernel's log, which has no sensor readings. Errors of devices outside the burn-in are ignored."""

    def __init__(self, handle: int, places: Mapping[str, int]) -> None:
        self._handle, self._places = handle, places

    def events(self) -> list[SensorEvent]:
        found = []
        for _ in range(RECORDS):
            try:
                record = os.read(self._handle, 8192)
            except OSError as error:
                if error.errno == errno.EPIPE:  # unread lines were overwritten; continue with the next line
                    continue
                break  # nothing more for now
            if not record:
                break
            for line in record.decode(errors="replace").splitlines():
                # `priority,number,microseconds,flags;message`, then further lines, which begin with a space.
                reported = None if line.startswith(" ") else parse_message(line.partition(";")[2])
                if reported is not None and (reported[0] is None or reported[0] in self._places):
                    found.append(SensorEvent(None if reported[0] is None else self._places[reported[0]], reported[1]))
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._handle)
