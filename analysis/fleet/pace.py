"""Devices that are slower or faster than others of their kind: how far, in robust deviations."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .collecting import HostResult

LEAST = 8
"""Devices of a kind that it takes to say what is usual."""
FAR = 5.0
"""Deviations from the median that count as far."""
FLOOR = 0.02
"""The least deviation that is reckoned with, as a share of the median: devices that agree to a per mille would else all
be outliers. Five of them are a tenth of the throughput."""
NORMAL = 1.4826
"""Median absolute deviation of a normal distribution, as a share of its standard deviation, inverted."""
SHARE = 0.1
"""Share of its workloads in which an outlier is far."""


class Outlier(NamedTuple):
    """A device that is slower or faster than others of its kind.

    Attributes:
        identity: of the device.
        slow: whether it is slower.
        far: workloads in which it is far.
        judged: workloads in which it was judged.
        workload: where it is farthest.
        ratio: its throughput there, as a share of the median.
        z: that, in robust deviations.
        simulated: whether results of simulations are among those that say so.
    """

    identity: str
    slow: bool
    far: int
    judged: int
    workload: str
    ratio: float
    z: float
    simulated: bool


def robust_z(values: Sequence[float], floor: float = FLOOR) -> list[float]:
    """How many deviations each value is from the median: (x - median) / max(1.4826 MAD, floor · median).

    Args:
        values: positive numbers.
        floor: see `FLOOR`.

    Example:
        >>> from sdc.analysis.fleet.pace import robust_z
        >>> [round(z, 1) for z in robust_z([100, 101, 99, 100, 50])]
        [0.0, 0.5, -0.5, 0.0, -25.0]
    """
    middle = statistics.median(values)
    spread = NORMAL * statistics.median(abs(value - middle) for value in values)
    scale = max(spread, floor * middle)
    return [(value - middle) / scale if scale else 0.0 for value in values]


def outliers(results: Sequence[HostResult]) -> list[Outlier]:
    """Devices whose throughput is far from that of others of their kind, in a tenth of their workloads at least.

    A device that was tested several times counts with its median. Throughput that a burn-in did not judge, because runs
    are short or devices share a processor, is left out; that of throttled devices is what is looked for.

    Args:
        results: of as many hosts and burn-ins as there are.

    Returns:
        The slowest first.
    """
    rates: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    simulated: set[str] = set()
    for result in results:
        for row in result.rows:
            if row.rate is not None and row.rate > 0:
                part = result.parts[row.device]
                rates[row.workload, part.kind, row.unit][part.identity].append(row.rate)
                if result.simulated:
                    simulated.add(part.identity)
    judged: dict[str, int] = defaultdict(int)
    far: dict[tuple[str, bool], list[tuple[float, float, str]]] = defaultdict(list)
    for (workload, _, _), each in rates.items():
        if len(each) < LEAST:
            continue
        values = [statistics.median(several) if len(several) > 1 else several[0] for several in each.values()]
        middle = statistics.median(values)
        for name, value, z in zip(each, values, robust_z(values), strict=True):
            judged[name] += 1
            if abs(z) >= FAR:
                far[name, z < 0].append((abs(z), value / middle, workload))
    found = []
    for (name, slow), places in far.items():
        if len(places) >= max(1, math.ceil(SHARE * judged[name])):
            most, ratio, workload = max(places)
            z = -most if slow else most
            found.append(Outlier(name, slow, len(places), judged[name], workload, ratio, z, name in simulated))
    return sorted(found, key=lambda each: (not each.slow, each.ratio if each.slow else -each.ratio, each.identity))
