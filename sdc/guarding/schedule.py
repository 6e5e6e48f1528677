"""The controller: which checks run at which steps, so that all of them together cost a given share of the time.

Each check has its share of the budget. A check of cost c runs once in a window of c / (share * budget * s) steps, at a
random step, where s is the time of a step. A window begins when the check has earned its cost. At the start and after a
suspicion, `CREDIT` steps are paid in advance, and windows are shorter for a period. All processes of a run must choose
the same steps, so times are agreed on every `PERIOD` steps, and everything else follows from the seed.
"""

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..multihost import everyone

PERIOD = 100  # steps between two decisions about frequencies
CREDIT = 200
SELDOM = 1_000  # least number of steps between two suspicions that are paid in advance
DENSE = 4.0


@dataclass
class ScheduledCheck:
    """One check in the schedule.

    Attributes:
        share: share of the budget.
        cost: seconds for one run.
        window: number of steps in the present window; 0 if the check does not run.
        done: number of steps in the window so far.
        chosen: step of the window at which the check runs.
        steps: number of steps by the length of their window.
        runs: number of runs.
        balance: seconds that the check has earned and not spent.
    """

    share: float
    cost: float
    window: int = 0
    done: int = 0
    chosen: int = 0
    steps: Counter[int] = field(default_factory=Counter)
    runs: int = 0
    balance: float = 0.0


class CheckSchedule:
    """Chooses the checks of each step.

    Attributes:
        checks: the checks by name.
        step_seconds: time of a step without checks.
        spent: seconds that checks took.
        plain: seconds that the steps took without checks.
    """

    def __init__(
        self, budget: float, costs: Mapping[str, tuple[float, float]], step_seconds: float, *, seed: int = 0
    ) -> None:
        """Creates a schedule.

        Args:
            budget: share of the time that checks may take.
            costs: for each check, its share of the budget and its cost in seconds.
            step_seconds: time of a step.
            seed: seed of the random steps.
        """
        self.budget, self.step_seconds = budget, step_seconds
        self.checks = {name: ScheduledCheck(share, cost) for name, (share, cost) in costs.items()}
        self.random = random.Random(seed)
        self.spent, self.plain, self.step = 0.0, 0.0, 0
        self._dense = True
        self._times: list[float] = []  # of steps without checks, since the last decision
        self._factor, self._paid = DENSE, 0
        self._pay_in_advance()

    def suspect(self) -> None:
        """Makes checks more frequent from the next decision on."""
        self._dense = True

    def revise(self, costs: Mapping[str, tuple[float, float]]) -> None:
        """Replaces shares and costs, where they have changed; a check that is not listed runs no more."""
        for name in {**self.checks, **costs}:
            share, cost = costs.get(name, (0.0, 0.0))
            check = self.checks.setdefault(name, ScheduledCheck(share, cost))
            check.share, check.cost, check.window = share, cost, 0

    def due(self, *, can: Callable[[str], bool] = lambda name: True) -> list[str]:
        """Returns the checks of the next step; must be called once for each step.

        `can` says whether a check can begin. A step at which it cannot counts as unchecked.
        """
        if self.step and self.step % PERIOD == 0:
            self._decide()
        self.step += 1
        self.plain += self.step_seconds
        chosen: list[str] = []
        for name, check in self.checks.items():
            if not can(name):
                check.steps[0] += 1
                continue
            check.balance += self._earned(check)
            if check.done >= check.window:
                self._begin(check)
            check.steps[check.window] += 1
            if check.window and check.done == check.chosen:
                chosen.append(name)
                check.runs += 1
                check.balance -= check.cost
                self.spent += check.cost
            check.done += 1
        return chosen

    def took(self, seconds: float) -> None:
        """Records the time of a step without checks."""
        self._times.append(seconds)

    def _pay_in_advance(self) -> None:
        """Pays checks what they will earn in `CREDIT` steps."""
        for check in self.checks.values():
            check.balance += CREDIT * self._earned(check)

    def _earned(self, check: ScheduledCheck) -> float:
        """Returns the seconds that a check earns in a step."""
        return check.share * self.budget * self.step_seconds

    def _length(self, check: ScheduledCheck) -> int:
        """Returns the length of a new window."""
        each = self._earned(check)
        return max(1, math.ceil(check.cost / (each * self._factor))) if each > 0 else 1

    def _begin(self, check: ScheduledCheck) -> None:
        """Begins a window, or, if the check has not earned its cost yet, waits for a step."""
        can = self._earned(check) > 0 and check.balance >= check.cost
        check.window = self._length(check) if can else 0
        check.done, check.chosen = 0, self.random.randrange(check.window) if check.window else 0

    def _decide(self) -> None:
        """Agrees on the time of a step with the other processes, and on whether there was a suspicion."""
        first = agreed({"seconds": median(self._times or [self.step_seconds]), "dense": self._dense})
        self.step_seconds, dense = first["seconds"], first["dense"]
        self._dense, self._times = False, []
        self._factor = DENSE if dense else 1.0
        if dense and self.step - self._paid >= SELDOM:
            self._paid = self.step
            self._pay_in_advance()
        for check in self.checks.values():
            # Each step of a window was checked with the same probability, also if the window ends early.
            if check.window > 2 * self._length(check):
                check.window = 0

    def overhead(self) -> float:
        """Returns the time of the checks as a share of the time of the steps."""
        return self.spent / self.plain if self.plain else 0.0


def agreed(value: Any) -> Any:
    """Returns the value of process 0, in all processes."""
    return json.loads(everyone(json.dumps(value), at="while choosing the steps that are checked")[0])


def common(names: Iterable[str]) -> set[str]:
    """Returns the names that all processes give."""
    return set.intersection(*(set(json.loads(text)) for text in everyone(json.dumps(list(names)))))


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the shorter of two runs in seconds."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
