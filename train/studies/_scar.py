"""The study of SCAR: what perturbations and failures cost, on trainings that recover by themselves.

It is made of parts, each of which returns plain numbers: a study that was interrupted keeps those that are done.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sdc.checkpoints import POLICIES, Policy

from ..iterative import DoesNotConverge, Failure, Held, How, Trajectory, finite, trials
from .scar_bounds import classes_of_perturbations, quadratic_program, resets
from .scar_overhead import overhead
from .scar_workloads import Subject
from .settings import ScarSettings

FRACTIONS = (1.0, 0.5, 0.25, 0.125)
LOST = (0.25, 0.5, 0.75)
EIGHTH = 0.125
HALF = 0.5

Found = Mapping[str, Any]


class Case(NamedTuple):
    """A way of saving, and a loss.

    Attributes:
        policy: how blocks are chosen.
        fraction: of the bytes that a save writes.
        lost: fraction of the blocks that a failure takes.
        how: which those are.
    """

    policy: Policy
    fraction: float
    lost: float
    how: How


CASES = (
    *(Case("priority", 1.0, lost, how) for lost in LOST for how in ("random", "contiguous")),  # figure 7
    *(Case(policy, fraction, HALF, "random") for fraction in FRACTIONS[1:] for policy in POLICIES),  # figure 8
    *(Case("priority", EIGHTH, lost, "random") for lost in (EIGHTH, 1.0)),  # what advice is held against
)


class Part(NamedTuple):
    """A part of the study.

    Attributes:
        what: which experiment.
        workload: what it trains; empty if nothing of the workloads.
        start: which of the first states; None if it is of all.
        run: does it, given what the parts before found.
    """

    what: str
    workload: str
    start: int | None
    run: Callable[[Sequence[Found]], Found]

    @property
    def title(self) -> str:
        """For people."""
        return " ".join(
            filter(None, (self.what, self.workload, f"start {self.start}" if self.start is not None else ""))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScarStudy(ScarSettings):
    """Figures 3 and 5 to 9 of Qiao et al., ICML 2019, with so many trials of the quadratic program.

    Raises:
        SettingError: there are too few trials for an interval, or the seed is none.

    Example:
        >>> import numpy as np
        >>> from sdc.train.iterative import logistic_regression
        >>> from sdc.train.studies import ScarStudy, Subject
        >>> points = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
        >>> task = logistic_regression(points, np.int32(points[:, 0] > 0), source="made up", batch=64, rate=0.3)
        >>> study = ScarStudy(trials=5, starts=5, perturbations=10)
        >>> [part.what for part in study.parts([Subject("regression", task, 20)])][:3]
        ['quadratic', 'criterion', 'perturbations']
    """

    perturbations: int = 1000

    def __post_init__(self) -> None:
        self.check()

    def parts(self, subjects: Sequence[Subject]) -> list[Part]:
        """The parts, in their order.

        Raises:
            ValueError: see `Iterative.check`.
        """
        for subject in subjects:
            subject.task.check()
        found = [Part("quadratic", "", None, lambda _: quadratic_program(self.perturbations, self.seed))]
        for subject in subjects:
            found.extend(self._of(subject))
        return found

    def _of(self, subject: Subject) -> Iterator[Part]:
        yield Part("criterion", subject.name, None, lambda _: self._criterion(subject))
        if subject.name == "regression":
            run = functools.partial(classes_of_perturbations, subject, self.trials, self.seed)
            yield Part("perturbations", subject.name, None, lambda _: run())
        if subject.name in ("regression", "topics"):
            reset = functools.partial(resets, subject, self.trials, self.seed)
            yield Part("resets", subject.name, None, lambda _: reset())
        if subject.name == "topics":
            yield Part("overhead", subject.name, None, lambda _: overhead(subject, self.seed))
        for start in range(self.starts):
            yield Part("failures", subject.name, start, functools.partial(self._failures, subject, start))

    def _criterion(self, subject: Subject) -> Found:
        """Losses at which a training counts as converged: the means of all starts in the last quarter."""
        losses = np.stack([self._train(subject, start).losses for start in range(self.starts)])
        mean = losses.mean(axis=0)
        last = max(1, subject.iterations // 4)
        criteria = np.minimum.accumulate(mean[subject.iterations - last + 1 : subject.iterations + 1]).tolist()
        criterion = criteria[-1]
        best = int(np.argmin(mean[: subject.iterations + 1]))
        if criteria[0] >= mean[0] or best < subject.iterations - last:
            raise DoesNotConverge(
                f"{subject.name} does not converge: its loss was {mean[0]:.4g}, is {criterion:.4g} after "
                f"{subject.iterations} iterations, and was lowest after {best}; there is no cost to tell"
            )
        return {
            "criteria": criteria, "iterations": subject.iterations, "interval": subject.interval,
            "blocks": subject.task.count, "source": subject.task.source, "losses": mean.tolist(),
        }  # fmt: skip

    def _train(self, subject: Subject, start: int) -> Trajectory:
        return trials.train(subject.task, 2 * subject.iterations, seed=self.seed + start)

    def _failures(self, subject: Subject, start: int, before: Sequence[Found]) -> Found:
        told = next(one for one in before if one["workload"] == subject.name and one["what"] == "criterion")["found"]
        if "failed" in told:
            raise DoesNotConverge(f"{subject.name} has no criterion; see there")
        trajectory = trials.until(self._train(subject, start), *told["criteria"])
        seed, count = [self.seed, start], self.trials // self.starts
        hit = {
            (lost, how): trials.failures(count, trajectory, lost, how, seed=seed)
            for lost, how in dict.fromkeys((case.lost, case.how) for case in CASES)
        }
        held = {
            key: trials.hold(trajectory, key[1], subject.interval, key[0], seed=self.seed + 1000 * start)
            for key in dict.fromkeys((case.policy, case.fraction) for case in CASES)
        }
        # All recoveries of all cases go on in one program.
        recovered, after = list[Any](), list[int]()
        for case in CASES:
            for one in hit[case.lost, case.how]:
                recovered.append(trials.recover(one, held[case.policy, case.fraction]))
                after.append(one.after)
        outcome = trials.go_on(trajectory, after, trials.recovered(trajectory, recovered))
        costs, sizes = (np.split(array, len(CASES)) for array in (outcome.costs, outcome.sizes))
        rows = [
            {**case._asdict(), "costs": finite(costs[n]), "sizes": sizes[n].tolist()} | _told(case, hit, held)
            for n, case in enumerate(CASES)
        ]
        return {
            "iterations": trajectory.iterations.tolist(), "after": after[:count], "cases": rows,
            "full": _full(trajectory, hit[HALF, "random"], held["priority", 1.0]),
            "busiest": _busiest(held["priority", EIGHTH]),
        }  # fmt: skip


def _told(
    case: Case, hit: Mapping[Any, Sequence[Failure]], held: Mapping[tuple[Policy, float], Held]
) -> dict[str, list[float | None]]:
    """What an outlook said of each failure before it happened, if there was one."""
    if case.policy != "priority" or case.fraction == 1:
        return {}
    outlooks = [held[case.policy, case.fraction].outlooks[one.after] for one in hit[case.lost, case.how]]
    losses = [None if outlook is None else outlook.loss(case.lost) for outlook in outlooks]
    return {
        "predicted": [None if one is None else one.steps for one in losses],
        "bound": [None if one is None else one.bound for one in losses],
    }


def _full(trajectory: Trajectory, hit: Sequence[Failure], held: Held) -> dict[str, list[float]]:
    """A restore of everything, batches and random numbers too: it costs what it goes back, bit for bit."""
    before = trials.recovered(trajectory, [trials.recover(one, held, everything=True) for one in hit])
    now = {name: trajectory.states[name][np.asarray([one.after for one in hit])] for name in trajectory.task.moving}
    squares = sum(np.square(np.asarray(now[name] - before[name], float)).reshape(len(hit), -1).sum(1) for name in now)
    return {
        "costs": [float(one.after - held.steps[one.after].max()) for one in hit],
        "sizes": np.sqrt(squares).tolist(),
    }


def _busiest(held: Held) -> float:
    """Share of the squared movement that the busiest eighth of the blocks has, in the middle of the training."""
    known = [one for one in held.outlooks if one is not None]
    speeds = np.sort(known[len(known) // 2].speeds)[::-1]
    return float(speeds[: max(1, round(EIGHTH * len(speeds)))].sum() / speeds.sum())
