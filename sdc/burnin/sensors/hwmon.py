"""AMD GPUs and processors by files of the kernel: hwmon, RAS, thermal zones, EDAC, counters of machine checks."""

import re
from collections.abc import Mapping
from pathlib import Path

from .amd_smi import is_amd
from .base import Described, SensorBackend, SensorEvent, Sensors

PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Names of hwmon drivers that measure processors."""
ZONES = re.compile(r"x86_pkg_temp|cpu|soc", re.IGNORECASE)
"""Thermal zones of processors."""


def open_hwmon(described: Described, root: str = "/") -> "Hwmon | None":
    """Files of the kernel for processors, and for AMD's GPUs, below the root of a file system."""
    amd = {index: str(device["bus"]) for index, device in enumerate(described) if is_amd(device)}
    processors = {index for index, device in enumerate(described) if device.get("kind") == "cpu"}
    return Hwmon(Path(root), amd, processors) if amd or processors else None


class Hwmon(SensorBackend):
    """What files of the kernel report."""

    def __init__(self, root: Path, amd: Mapping[int, str], processors: set[int]) -> None:
        self._root, self._amd, self._processors = root, amd, processors
        self._checks = self._machine_checks()
        self._throttled = self._throttles()

    def read(self, index: int, *, between: bool) -> Sensors | None:
        if index in self._amd:
            found = self._of_amd(self._amd[index], between)
        elif index in self._processors:
            found = self._of_processor(between)
        else:
            return None
        return found if found != Sensors() else None

    def _of_amd(self, bus: str, between: bool) -> Sensors:
        folder = self._root / "sys/bus/pci/devices" / bus
        degrees = self._numbers(folder, "hwmon/hwmon*/temp*_input")
        watts = self._numbers(folder, "hwmon/hwmon*/power1_average") or self._numbers(
            folder, "hwmon/hwmon*/power1_input"
        )
        clock, memory = (self._numbers(folder, f"hwmon/hwmon*/freq{number}_input") for number in (1, 2))
        idle = between and self._numbers(folder, "gpu_busy_percent") == [0.0]
        found = Sensors(
            temperature=max(degrees) / 1e3 if degrees else None,
            power=max(watts) / 1e6 if watts else None,
            clock=max(clock) / 1e6 if clock and not idle else None,
            memory_clock=max(memory) / 1e6 if memory else None,
        )
        if not between:
            blocks = [parse_ras(_text(path)) for path in sorted(folder.glob("ras/*_err_count"))]
            counted = [block for block in blocks if block is not None]
            if counted:
                found.corrected = sum(corrected for corrected, _ in counted)
                found.uncorrected = sum(uncorrected for _, uncorrected in counted)
            pages = folder / "ras/gpu_vram_bad_pages"
            found.retired = len(_text(pages).split("\n")) - 1 if pages.exists() else None
        return found

    def _of_processor(self, between: bool) -> Sensors:
        system = self._root / "sys"
        degrees = [
            value
            for name in system.glob("class/hwmon/hwmon*/name")
            if _text(name).strip() in PROCESSORS
            for value in self._numbers(name.parent, "temp*_input")
        ] or [
            value
            for kind in system.glob("class/thermal/thermal_zone*/type")
            if ZONES.search(_text(kind))
            for value in self._numbers(kind.parent, "temp")
        ]
        clocks = self._numbers(system, "devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
        now = self._throttles()
        found = Sensors(
            temperature=max(degrees) / 1e3 if degrees else None,
            clock=sum(clocks) / len(clocks) / 1e3 if clocks else None,
            slowed=None if now is None else ["too hot"] if now > (self._throttled or 0) else [],
        )
        if not between:
            memory = {name: self._numbers(system, f"devices/system/edac/mc/mc*/{name}_count") for name in ("ce", "ue")}
            found.corrected = int(sum(memory["ce"])) if memory["ce"] else None
            found.uncorrected = int(sum(memory["ue"])) if memory["ue"] else None
        return found

    def events(self) -> list[SensorEvent]:
        before, self._checks = self._checks, self._machine_checks()
        new = self._checks - before
        return [SensorEvent(None, f"machine check: {new} exceptions")] if new > 0 else []

    def _throttles(self) -> int | None:
        """How often processors were slowed because of their temperature, since the system was started."""
        found = self._numbers(self._root / "sys", "devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count")
        return int(sum(found)) if found else None

    def _machine_checks(self) -> int:
        return count_machine_checks(_text(self._root / "proc/interrupts"))

    def _numbers(self, folder: Path, pattern: str) -> list[float]:
        found = []
        for path in sorted(folder.glob(pattern)):
            try:
                found.append(float(_text(path)))
            except ValueError:  # a sensor that has nothing to say at the moment
                continue
        return found


def parse_ras(text: str) -> tuple[int, int] | None:
    """Corrected and uncorrected errors of a block of an AMD GPU, from lines such as `ue: 1` and `ce: 20`."""
    found = {name: int(value) for name, value in re.findall(r"^(ue|ce):\s*(\d+)", text, re.MULTILINE)}
    return (found["ce"], found["ue"]) if {"ce", "ue"} <= set(found) else None


def count_machine_checks(interrupts: str) -> int:
    """Machine check exceptions of all processors, from the text of /proc/interrupts."""
    line = next((line for line in interrupts.splitlines() if line.strip().startswith("MCE:")), "")
    return sum(int(word) for word in line.split()[1:] if word.isdecimal())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # some drivers answer so for what they do not know at the moment
        return ""
