"""TPUs by the metrics of their library: the module `libtpu.sdk.tpumonitoring`. They hold no temperature and power."""

import importlib
from typing import Any

from .base import Described, SensorBackend, SensorEvent, Sensors, attempt

THROTTLE, LINKS = "tpu_throttle_score", "ici_link_health"
PERSISTENT = 6
"""Health of a link from which on its problem stays; below, 0 is healthy and the others come and go."""


def open_tpu_metrics(described: Described, library: Any = None) -> "TpuMetrics | None":
    """Metrics of TPUs; None where there are no TPUs, or their library has none."""
    places = [tuple(device["coordinates"]) for device in described if device.get("coordinates")]
    if len(places) < len(described) or not places:
        return None
    try:
        library = library or importlib.import_module("libtpu.sdk.tpumonitoring")
        supported = set(library.list_supported_metrics())
    except Exception:  # an older library, or one that is not there
        return None
    chips = list(dict.fromkeys(places))
    return TpuMetrics(library, [chips.index(place) for place in places], supported) if supported else None


class TpuMetrics(SensorBackend):
    """What the metrics report."""

    def __init__(self, library: Any, chips: list[int], supported: set[str]) -> None:
        self._library, self._chips, self._supported = library, chips, supported

    def read(self, index: int, *, between: bool) -> Sensors | None:
        scores = [score for _, score in self._values(THROTTLE)]
        if not scores:
            return None
        # Where the library reports other chips than these, the highest of all is taken: nothing is healthy by default.
        alike = len(scores) == max(self._chips) + 1
        score = scores[self._chips[index]] if alike else max(scores)
        return Sensors(slowed=[f"throttle score {score:g}"] if score > 0 else [])

    def events(self) -> list[SensorEvent]:
        return [
            SensorEvent(None, f"link {place}: health {score:g} of 10 (0 is healthy)")
            for place, score in self._values(LINKS)
            if score >= PERSISTENT
        ]

    def _values(self, metric: str) -> list[tuple[str, float]]:
        if metric not in self._supported:
            return []
        texts = attempt(lambda: list(self._library.get_metric(metric).data())) or []
        return [value for text in texts if (value := parse_value(str(text))) is not None]


def parse_value(text: str) -> tuple[str, float] | None:
    """A value of a metric: a number, or a place and a number as in `tray1.chip3.ici0.int: 10`."""
    place, _, number = text.rpartition(":")
    try:
        return place.strip(), float(number)
    except ValueError:
        return None
