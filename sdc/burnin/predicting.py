"""What a burn-in is expected to see of a simulated fault: the chance of a round, and rounds for a given confidence."""

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import numpy as np

from ..faults import Fault
from .workload import Workload

POINTS = 4096
"""Points at which the draw that varies a rate is averaged over."""


def chance_of_run(fault: Fault, elements: int) -> float:
    """Probability that a fault changes an element in one run.

    A run is hit with a probability of `spike`, and then each of n elements with rate/spike, times (1 + few) u^few for a
    uniform u where the kind varies its rate (`Tailed`); so the chance is spike E_u[1 - exp(-n rate (1 + few) u^few /
    spike)]. The excess of a burst at the onset is left out: the chance is a little higher in the first runs.

    Args:
        fault: with a rate for one layer.
        elements: numbers in the outputs.

    Example:
        >>> from sdc.burnin.predicting import chance_of_run
        >>> from sdc.faults import BitFlip, Fault
        >>> round(chance_of_run(Fault(BitFlip(), rate=1e-3), 1000), 3)
        0.632
    """
    rate = float(np.mean(np.asarray(fault.rate, np.float64)))
    few = float(getattr(fault.what, "few", 0.0))
    u = (np.arange(POINTS) + 0.5) / POINTS
    most = np.minimum(rate / fault.when.spike * (1 + few) * u**few, 1.0)
    return float(fault.when.spike * np.mean(-np.expm1(elements * np.log1p(-np.minimum(most, 1 - 1e-12)))))


def chance_of_round(faults: Iterable[Fault], workloads: Sequence[Workload]) -> float:
    """Probability that a round through workloads shows a difference on the device that has the faults.

    Args:
        faults: as `rehearsal.rehearsed` gives them.
        workloads: those of a level.
    """
    quiet = 0.0
    for fault in faults:
        for workload in workloads:
            if fnmatchcase(workload.name, str(fault.site)):
                quiet += math.log1p(-min(chance_of_run(fault, workload.elements), 1 - 1e-16))
    return -math.expm1(quiet)


def rounds_for(chance: float, confidence: float = 0.95) -> float:
    """Rounds until a difference is seen with a confidence; infinite where the chance is 0.

    Example:
        >>> from sdc.burnin.predicting import rounds_for
        >>> rounds_for(0.5), rounds_for(1.0), rounds_for(0.0)
        (5, 1, inf)
    """
    if chance <= 0:
        return math.inf
    return 1 if chance >= confidence else math.ceil(math.log1p(-confidence) / math.log1p(-chance))
