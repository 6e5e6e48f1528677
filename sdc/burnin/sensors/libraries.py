"""Vendors' libraries: NVML (installed by the extra `nvml`), AMD SMI (part of ROCm), and the metrics of libtpu."""

import importlib
from typing import Any

from .base import Described, SensorBackend, SensorEvent, Sensors, Silent, amd_addresses, attempt

IDLE = 0x1
# Bits of NVML's clocks event reasons, formerly called throttle reasons.
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
MOST_EVENTS = 64  # maximum number of events read per call from one device
PERSISTENT = 6  # lowest health score of a TPU link that indicates a persistent problem; 0 is healthy


def _first(*values: Any) -> float | None:
    """Returns the first value that is a number; unsupported values are `N/A` or None."""
    return next((float(value) for value in values if isinstance(value, int | float)), None)


def open_nvml(described: Described, library: Any = None) -> "Nvml | None":
    """Opens NVML for devices with an NVIDIA UUID; raises `Silent` if the Python module or the driver is missing."""
    known = {index: str(device.get("uuid", "")) for index, device in enumerate(described)}
    wanted = {index: identity for index, identity in known.items() if identity.startswith("GPU-")}
    if not wanted:
        return None
    try:
        library = library or importlib.import_module("pynvml")
        library.nvmlInit()
    except ImportError as error:
        raise Silent("pynvml is not installed; install jax-sdc[nvml]") from error
    except Exception as error:  # an NVMLError of the library imported above
        raise Silent(str(error)) from error
    return Nvml(library, wanted)


class Nvml(SensorBackend):
    def __init__(self, library: Any, wanted: dict[int, str]) -> None:
        self._library = library
        found = {index: attempt(library.nvmlDeviceGetHandleByUUID, identity) for index, identity in wanted.items()}
        self._handles = {index: handle for index, handle in found.items() if handle is not None}
        # Each device has its own event set, so an event is assigned to its device even if the event does not identify
        # the device.
        self._sets: dict[int, Any] = {}
        for index, handle in self._handles.items():
            if (events := attempt(library.nvmlEventSetCreate)) is None:
                continue
            try:
                library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, events)
                self._sets[index] = events
            except Exception:  # virtual and old devices have no events
                attempt(library.nvmlEventSetFree, events)

    def read(self, index: int, *, between: bool) -> Sensors | None:
        if (handle := self._handles.get(index)) is None:
            return None
        nvml = self._library
        power = attempt(nvml.nvmlDeviceGetPowerUsage, handle)
        # Before driver 535, event reasons were called throttle reasons.
        names = (f"nvmlDeviceGetCurrentClocks{kind}Reasons" for kind in ("Event", "Throttle"))
        reasons = next(filter(None, (getattr(nvml, name, None) for name in names)), None)
        bits = None if reasons is None else attempt(reasons, handle)
        idle = between and bits is not None and bits & IDLE
        found = Sensors(
            temperature=_first(attempt(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)),
            power=None if power is None else power / 1000,
            clock=None if idle else _first(attempt(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)),
            memory_clock=_first(attempt(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM)),
            slowed=None if bits is None else [word for bit, word in SLOWED.items() if bits & bit],
        )
        if between:
            return found
        for name in ("corrected", "uncorrected"):
            kind = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{name.upper()}")
            setattr(found, name, attempt(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC))
        # GPUs since Ampere remap rows; earlier ones retire pages.
        if (rows := attempt(nvml.nvmlDeviceGetRemappedRows, handle)) is not None:
            found.retired = rows[0] + rows[1]
            return found
        causes = (nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
                  nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)  # fmt: skip
        pages = [attempt(nvml.nvmlDeviceGetRetiredPages, handle, cause) for cause in causes]
        known = [len(each) for each in pages if each is not None]
        found.retired = sum(known) if known else None
        return found

    def events(self) -> list[SensorEvent]:
        found = []
        for index, events in self._sets.items():
            for _ in range(MOST_EVENTS):
                if (event := attempt(self._library.nvmlEventSetWait, events, 0)) is None:
                    break  # a timeout of 0 ms, since NVML queues events until they are read
                found.append(SensorEvent(index, f"Xid {int(event.eventData)}"))
        return found

    def close(self) -> None:
        for events in self._sets.values():
            attempt(self._library.nvmlEventSetFree, events)
        attempt(self._library.nvmlShutdown)


def open_amd_smi(described: Described, library: Any = None) -> "AmdSmi | None":
    """Opens AMD SMI for AMD devices; returns None if the module is not installed or finds no driver."""
    if not (wanted := amd_addresses(described)):
        return None
    try:
        library = library or importlib.import_module("amdsmi")
        library.amdsmi_init()
    except Exception:  # the module is not on PyPI, and may raise any exception if the driver is missing
        return None
    found = {index: attempt(library.amdsmi_get_processor_handle_from_bdf, bus) for index, bus in wanted.items()}
    handles = {index: handle for index, handle in found.items() if handle is not None}
    return AmdSmi(library, handles) if handles else None


class AmdSmi(SensorBackend):
    """Readings from AMD SMI. Errors are read from the kernel's log instead."""

    def __init__(self, library: Any, handles: dict[int, Any]) -> None:
        self._library, self._handles = library, handles

    def read(self, index: int, *, between: bool) -> Sensors | None:
        if (handle := self._handles.get(index)) is None:
            return None
        smi = self._library
        kinds, now = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
        degrees = (attempt(smi.amdsmi_get_temp_metric, handle, kind, now) for kind in (kinds.HOTSPOT, kinds.EDGE))
        power = attempt(smi.amdsmi_get_power_info, handle) or {}
        idle = between and _first((attempt(smi.amdsmi_get_gpu_activity, handle) or {}).get("gfx_activity")) == 0

        def clock(kind: Any) -> float | None:
            known = attempt(smi.amdsmi_get_clock_info, handle, kind) or {}
            return _first(known.get("clk"), known.get("cur_clk"))

        found = Sensors(
            temperature=_first(*degrees),
            power=_first(power.get("current_socket_power"), power.get("average_socket_power")),
            clock=None if idle else clock(smi.AmdSmiClkType.GFX),
            memory_clock=clock(smi.AmdSmiClkType.MEM),
        )
        if not between:
            counts = attempt(smi.amdsmi_get_gpu_total_ecc_count, handle) or {}
            for name in ("corrected", "uncorrected"):
                count = counts.get(f"{name.removesuffix('ed')}able_count")
                setattr(found, name, count if isinstance(count, int) else None)
            pages = attempt(smi.amdsmi_get_gpu_bad_page_info, handle)
            found.retired = len(pages) if isinstance(pages, list) else None
        return found

    def close(self) -> None:
        attempt(self._library.amdsmi_shut_down)


def open_tpu_metrics(described: Described, library: Any = None) -> "TpuMetrics | None":
    """Opens `libtpu.sdk.tpumonitoring`; returns None if there are no TPUs or their library has no metrics."""
    places = [tuple(device["coordinates"]) for device in described if device.get("coordinates")]
    if len(places) < len(described) or not places:
        return None
    try:
        library = library or importlib.import_module("libtpu.sdk.tpumonitoring")
        supported = set(library.list_supported_metrics())
    except Exception:  # the library is old or missing
        return None
    chips = list(dict.fromkeys(places))
    return TpuMetrics(library, [chips.index(place) for place in places], supported) if supported else None


class TpuMetrics(SensorBackend):
    """Readings from the metrics of libtpu, which include neither temperature nor power."""

    def __init__(self, library: Any, chips: list[int], supported: set[str]) -> None:
        self._library, self._chips, self._supported = library, chips, supported

    def read(self, index: int, *, between: bool) -> Sensors | None:
        scores = [score for _, score in self._values("tpu_throttle_score")]
        if not scores:
            return None
        # If the library reports a different number of chips, the highest score applies to all chips, so that none
        # counts as healthy by default.
        alike = len(scores) == max(self._chips) + 1
        score = scores[self._chips[index]] if alike else max(scores)
        return Sensors(slowed=[f"throttle score {score:g}"] if score > 0 else [])

    def events(self) -> list[SensorEvent]:
        return [
            SensorEvent(None, f"link {place}: health {score:g} of 10 (0 is healthy)")
            for place, score in self._values("ici_link_health")
            if score >= PERSISTENT
        ]

    def _values(self, metric: str) -> list[tuple[str, float]]:
        """Returns a metric's places and values, parsed from texts such as `10` or `tray1.chip3.ici0.int: 10`."""
        found = []
        texts = attempt(lambda: list(self._library.get_metric(metric).data())) if metric in self._supported else ()
        for text in texts or ():
            place, _, number = str(text).rpartition(":")
            if (value := attempt(float, number)) is not None:
                found.append((place.strip(), value))
        return found
