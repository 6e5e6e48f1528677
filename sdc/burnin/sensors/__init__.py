"""What drivers and the kernel report of devices while a burn-in runs.

base       `SensorBackend`, the class that each source of readings implements, and the readings
libraries  NVIDIA's GPUs by NVML, AMD's by AMD SMI, TPUs by the metrics of their library
kernel     AMD's GPUs and processors by files of the kernel, and errors that it logs
monitor    reads all of them in threads of their own
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .base import Course as Course, Sensors as Sensors, driver_errors as driver_errors
    from .monitor import Monitor as Monitor

__getattr__, __dir__, __all__ = facade(__name__, public=False)
