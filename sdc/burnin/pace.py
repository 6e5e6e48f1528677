"""Achieved throughput, and time at load that is void because a device was slow."""

import dataclasses
import statistics
from collections.abc import Sequence

from .evidence import devices_kinds
from .observed import Result

THROTTLED = 0.5
"""Share of its own best rate, or of the usual one of the other devices, below which a device was not at load."""
MEASURABLE = 2e-3
"""Seconds below which the time of a run says more about the host than about the device."""


@dataclasses.dataclass(frozen=True)
class Throughput:
    """How fast a workload ran on a device.

    Attributes:
        workload, device: which.
        rate: operations or bytes a second, at the median.
        best: the same of the fastest run.
        unit: flop or byte.
        share: the median rate as a share of the best one, or of the median of the other devices, whichever is lower;
            None where the runs are too short or the devices share a processor.
        seconds: time at load.
    """

    workload: str
    device: int
    rate: float
    best: float
    unit: str
    share: float | None
    seconds: float

    @property
    def void(self) -> bool:
        """Whether the time at load counts for nothing."""
        return self.share is not None and self.share < THROTTLED


def shares_processor(result: Result) -> bool:
    """Whether the devices are simulated by one processor, and so slow each other down."""
    return len(result.devices) > 1 and all(device.platform == "cpu" for device in result.devices)


def throughputs(result: Result) -> list[Throughput]:
    """Throughput of each workload on each device."""
    kinds = devices_kinds(result.devices)
    known = {workload.name: workload for workload in result.workloads}
    medians = {place: tally.median() for place, tally in result.tallies.items() if tally.runs}
    found = []
    for (name, device), median in medians.items():
        tally, workload = result.tallies[name, device], known[name]
        others = [
            time
            for (other, place), time in medians.items()
            if other == name and place != device and kinds[place] == kinds[device]
        ]
        share = None
        if median >= MEASURABLE and not shares_processor(result):
            share = min(1.0, tally.best / median, *(_usual(others, median)))
        found.append(
            Throughput(
                name, device, workload.work / median, workload.work / tally.best, workload.unit, share, tally.seconds
            )
        )
    return found


def _usual(others: Sequence[float], median: float) -> list[float]:
    return [statistics.median(others) / median] if others else []
