"""NVIDIA GPUs by NVML: the module `pynvml` of the package nvidia-ml-py, the extra `nvml`."""

import importlib
from collections.abc import Mapping
from typing import Any

from .base import Described, SensorBackend, SensorEvent, Sensors, Silent, attempt

IDLE = 0x1
SLOWED = {
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
"""Bits of what NVML calls clocks event reasons, or throttle reasons."""
MOST = 64
"""Events that are taken at a time from one device."""


def open_nvml(described: Described, library: Any = None) -> "Nvml | None":
    """NVML for those devices that have NVIDIA's UUID; `Silent` where the module or a driver is missing for them."""
    wanted = {
        index: str(device["uuid"])
        for index, device in enumerate(described)
        if str(device.get("uuid", "")).startswith("GPU-")
    }
    if not wanted:
        return None
    try:
        library = library or importlib.import_module("pynvml")
        library.nvmlInit()
    except ImportError as error:
        raise Silent("pynvml is not installed; install jax-sdc[nvml]") from error
    except Exception as error:  # an NVMLError of the library that was just imported
        raise Silent(str(error)) from error
    return Nvml(library, wanted)


class Nvml(SensorBackend):
    """What NVML reports."""

    def __init__(self, library: Any, wanted: Mapping[int, str]) -> None:
        self._library = library
        found = {index: attempt(library.nvmlDeviceGetHandleByUUID, identity) for index, identity in wanted.items()}
        self._handles = {index: handle for index, handle in found.items() if handle is not None}
        # One set for each device: an event then belongs to it also where it does not name it.
        self._sets = {index: self._listen(handle) for index, handle in self._handles.items()}

    def _listen(self, handle: Any) -> Any:
        library = self._library
        if (events := attempt(library.nvmlEventSetCreate)) is None:
            return None
        try:
            library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, events)
        except Exception:  # a virtual or an old device has no events
            attempt(library.nvmlEventSetFree, events)
            return None
        return events

    def read(self, index: int, *, between: bool) -> Sensors | None:
        if (handle := self._handles.get(index)) is None:
            return None
        nvml = self._library
        power = attempt(nvml.nvmlDeviceGetPowerUsage, handle)
        bits = attempt(_reasons(nvml), handle)
        idle = between and bits is not None and bits & IDLE
        return Sensors(
            temperature=_number(attempt(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)),
            power=None if power is None else power / 1000,
            clock=None if idle else _number(attempt(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)),
            memory_clock=_number(attempt(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM)),
            slowed=None if bits is None else [word for bit, word in SLOWED.items() if bits & bit],
            **({} if between else self._counters(handle)),
        )

    def _counters(self, handle: Any) -> dict[str, int | None]:
        nvml = self._library
        kinds = {"corrected": "NVML_MEMORY_ERROR_TYPE_CORRECTED", "uncorrected": "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"}
        found: dict[str, int | None] = {
            name: attempt(nvml.nvmlDeviceGetTotalEccErrors, handle, getattr(nvml, kind), nvml.NVML_VOLATILE_ECC)
            for name, kind in kinds.items()
        }
        # Rows are remapped from Ampere on, pages were retired before.
        rows = attempt(nvml.nvmlDeviceGetRemappedRows, handle)
        found["retired"] = self._pages(handle) if rows is None else rows[0] + rows[1]
        return found

    def _pages(self, handle: Any) -> int | None:
        nvml = self._library
        causes = ("MULTIPLE_SINGLE_BIT_ECC_ERRORS", "DOUBLE_BIT_ECC_ERROR")
        pages = [
            attempt(nvml.nvmlDeviceGetRetiredPages, handle, getattr(nvml, f"NVML_PAGE_RETIREMENT_CAUSE_{cause}"))
            for cause in causes
        ]
        known = [len(each) for each in pages if each is not None]
        return sum(known) if known else None

    def events(self) -> list[SensorEvent]:
        nvml = self._library
        found = []
        for index, events in self._sets.items():
            for _ in range(MOST if events is not None else 0):
                if (event := attempt(nvml.nvmlEventSetWait, events, 0)) is None:
                    break  # a timeout without waiting: NVML keeps what is reported until somebody asks
                found.append(SensorEvent(index, f"Xid {int(event.eventData)}"))
        return found

    def close(self) -> None:
        for events in self._sets.values():
            if events is not None:
                attempt(self._library.nvmlEventSetFree, events)
        attempt(self._library.nvmlShutdown)


def _reasons(nvml: Any) -> Any:
    """They were called throttle reasons before driver 535."""
    return getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
        nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
