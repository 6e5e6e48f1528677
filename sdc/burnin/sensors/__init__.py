"""Sensor readings and errors of devices, as drivers and the kernel report them during a burn-in.

base       `SensorBackend`, the base class of all sources of readings, and the types of readings
libraries  NVIDIA GPUs through NVML, AMD GPUs through AMD SMI, and TPUs through the metrics of libtpu
kernel     AMD GPUs and processors through kernel files, and errors in the kernel's log
monitor    the readings of all sources, each of which runs in its own thread
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .base import Course as Course, Reading as Reading, Sensors as Sensors, driver_errors as driver_errors
    from .monitor import Monitor as Monitor

__getattr__, __dir__, __all__ = facade(__name__, public=False)
