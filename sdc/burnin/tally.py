"""What is counted of each workload on each device: runs, elements, time at load and throughput."""

import dataclasses
import math
from collections import Counter

from .programs import Checks, Outcome

STEPS = 16
"""Classes of times in a doubling: a median is known to 4 %."""


def step_of(seconds: float) -> int:
    """Class of a time."""
    return round(math.log2(max(seconds, 1e-9)) * STEPS)


@dataclasses.dataclass
class Tally:
    """Counts of one workload on one device.

    Attributes:
        runs: runs that were checked, those after a difference not among them.
        elements: numbers that these checked.
        seconds: time at load.
        best: shortest run, in seconds; infinite before the first.
        differences: runs with a difference.
        repeated: runs that could be compared with one before.
        voted: runs in which other devices of its kind agreed, or outvoted it.
        referred: runs that were compared with what the host computed.
        golden: runs that were compared with what was recorded.
        checks: rows of products that checksums judged.
        simulated: elements that simulated faults changed.
        baseline: digest that a run is compared with to see whether the device repeats itself.
    """

    runs: int = 0
    elements: int = 0
    seconds: float = 0.0
    best: float = math.inf
    differences: int = 0
    repeated: int = 0
    voted: int = 0
    referred: int = 0
    golden: int = 0
    checks: Checks = dataclasses.field(default_factory=Checks)
    simulated: int = 0
    baseline: str | None = None
    times: Counter[int] = dataclasses.field(default_factory=Counter, repr=False)

    def add(self, outcome: Outcome) -> None:
        """Counts a run."""
        self.runs += 1
        self.elements += outcome.elements
        self.seconds += outcome.seconds
        self.best = min(self.best, outcome.seconds)
        self.simulated += outcome.simulated
        self.checks = Checks(*(a + b for a, b in zip(self.checks, outcome.checks, strict=True)))
        self.times[step_of(outcome.seconds)] += 1

    def median(self) -> float:
        """Median time of a run in seconds; NaN where there was none.

        Example:
            >>> from sdc.burnin.tally import Tally
            >>> from collections import Counter
            >>> Tally(runs=3, times=Counter({0: 2, 16: 1})).median()
            1.0
        """
        rank = 0
        for step, count in sorted(self.times.items()):
            rank += count
            if 2 * rank >= self.runs:
                return float(2.0 ** (step / STEPS))
        return math.nan
