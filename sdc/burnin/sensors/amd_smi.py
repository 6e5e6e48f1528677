"""AMD GPUs by AMD SMI: the module `amdsmi`, which ROCm brings."""

import importlib
from collections.abc import Mapping
from typing import Any

from .base import Described, SensorBackend, Sensors, attempt


def open_amd_smi(described: Described, library: Any = None) -> "AmdSmi | None":
    """AMD SMI for those devices that are AMD's; None where the module is not installed or finds no driver."""
    wanted = {index: str(device["bus"]) for index, device in enumerate(described) if is_amd(device)}
    if not wanted:
        return None
    try:
        library = library or importlib.import_module("amdsmi")
        library.amdsmi_init()
    except Exception:  # it is no package of an index, and fails in ways of its own where there is no driver
        return None
    source = AmdSmi(library, wanted)
    return source if source.handles else None


def is_amd(device: Mapping[str, Any]) -> bool:
    """Whether a described device has a PCI address and is not NVIDIA's."""
    return bool(device.get("bus")) and not str(device.get("uuid", "")).startswith("GPU-")


class AmdSmi(SensorBackend):
    """What AMD SMI reports. Errors stand in the kernel's log."""

    def __init__(self, library: Any, wanted: Mapping[int, str]) -> None:
        self._library = library
        found = {
            index: attempt(library.amdsmi_get_processor_handle_from_bdf, address) for index, address in wanted.items()
        }
        self.handles = {index: handle for index, handle in found.items() if handle is not None}

    def read(self, index: int, *, between: bool) -> Sensors | None:
        if (handle := self.handles.get(index)) is None:
            return None
        smi = self._library
        kinds, now = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
        degrees = (attempt(smi.amdsmi_get_temp_metric, handle, kind, now) for kind in (kinds.HOTSPOT, kinds.EDGE))
        power = attempt(smi.amdsmi_get_power_info, handle) or {}
        found = Sensors(
            temperature=_first(*degrees),
            power=_first(power.get("current_socket_power"), power.get("average_socket_power")),
            clock=None if between and self._idle(handle) else self._clock(handle, smi.AmdSmiClkType.GFX),
            memory_clock=self._clock(handle, smi.AmdSmiClkType.MEM),
        )
        if not between:
            counts = attempt(smi.amdsmi_get_gpu_total_ecc_count, handle) or {}
            found.corrected = _count(counts.get("correctable_count"))
            found.uncorrected = _count(counts.get("uncorrectable_count"))
            pages = attempt(smi.amdsmi_get_gpu_bad_page_info, handle)
            found.retired = len(pages) if isinstance(pages, list) else None
        return found

    def _idle(self, handle: Any) -> bool:
        return _first((attempt(self._library.amdsmi_get_gpu_activity, handle) or {}).get("gfx_activity")) == 0

    def _clock(self, handle: Any, kind: Any) -> float | None:
        clock = attempt(self._library.amdsmi_get_clock_info, handle, kind) or {}
        return _first(clock.get("clk"), clock.get("cur_clk"))

    def close(self) -> None:
        attempt(self._library.amdsmi_shut_down)


def _first(*values: Any) -> float | None:
    """The first that is a number: what a device does not report is `N/A`."""
    return next((float(value) for value in values if isinstance(value, int | float)), None)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None
