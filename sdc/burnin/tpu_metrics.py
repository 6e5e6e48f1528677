"""TPUs by the metrics of their library: the module `libtpu.sdk.tpumonitoring`. It tells no temperature and no power."""

import importlib
from typing import Any

from .report import Sensors
from .telling import Described, Told, attempt

THROTTLE, LINKS = "tpu_throttle_score", "ici_link_health"
PERSISTENT = 6
"""Health of a link from which on its problem stays; below, 0 is healthy and the others come and go."""


def open_tpu_metrics(described: Described, library: Any = None) -> "TpuMetrics | None":
    """Metrics of TPUs; None where there are no TPUs, or their library has none.

    Args:
        described: the devices.
        library: the module `libtpu.sdk.tpumonitoring`; by default it is imported.
    """
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


class TpuMetrics:
    """What the metrics tell."""

    name = "tpumonitoring"

    def __init__(self, library: Any, chips: list[int], supported: set[str]) -> None:
        self._library, self._chips, self._supported = library, chips, supported

    def read(self, index: int, *, between: bool) -> Sensors | None:
        """See `telling.Source`."""
        scores = [score for _, score in self._values(THROTTLE)]
        if not scores:
            return None
        # Where it is told of other chips than these, the highest of all is taken: nothing is healthy by default.
        alike = len(scores) == max(self._chips) + 1
        score = scores[self._chips[index]] if alike else max(scores)
        return Sensors(slowed=[f"throttle score {score:g}"] if score > 0 else [])

    def events(self) -> list[Told]:
        """See `telling.Source`."""
        return [
            Told(None, f"link {place}: health {score:g} of 10 (0 is healthy)")
            for place, score in self._values(LINKS)
            if score >= PERSISTENT
        ]

    def _values(self, metric: str) -> list[tuple[str, float]]:
        if metric not in self._supported:
            return []
        told = attempt(lambda: list(self._library.get_metric(metric).data())) or []
        return [value for text in told if (value := parse_value(str(text))) is not None]

    def close(self) -> None:
        """See `telling.Source`."""


def parse_value(text: str) -> tuple[str, float] | None:
    """A value of a metric: a number, or a place and a number.

    Example:
        >>> from sdc.burnin.tpu_metrics import parse_value
        >>> parse_value("tray1.chip3.ici0.int: 10"), parse_value("0"), parse_value("unknown")
        (('tray1.chip3.ici0.int', 10.0), ('', 0.0), None)
    """
    place, _, number = text.rpartition(":")
    try:
        return place.strip(), float(number)
    except ValueError:
        return None
