"""What all studies have in common: settings, an experiment that tells how far it is, and numbers at its end."""

import abc
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from .settings import check_training
from .workloads import Task

Found = TypeVar("Found", covariant=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(abc.ABC, Generic[Found]):
    """A study of a method of robust aggregation.

    Attributes:
        workers: workers of its trainings, all on one device.
        steps: optimizer steps of a training.
        seed: seed of parameters, data and everything simulated.

    Raises:
        SettingError: see `check_training`.
    """

    name: ClassVar[str]
    workers: int
    steps: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_training(self.steps, self.seed)

    @abc.abstractmethod
    def count(self, workloads: Sequence[Task]) -> int:
        """How many parts `run` yields."""

    @abc.abstractmethod
    def run(self, workloads: Sequence[Task]) -> Generator[str, None, Found]:
        """Runs the study.

        Yields:
            What has just been done.

        Returns:
            What was measured.
        """

    def about(self, workloads: Sequence[Task]) -> Mapping[str, Any]:
        """What `Measured` says of the study itself."""
        return {
            "workers": self.workers,
            "steps": self.steps,
            "seed": self.seed,
            "sources": {workload.name: workload.source for workload in workloads},
        }


def finish(parts: Generator[str, None, Found], progress: Callable[[str], object] | None = None) -> Found:
    """Runs an experiment to its end.

    Args:
        parts: yields what has just been done, and returns what was measured.
        progress: told of each part.

    Returns:
        What was measured.

    Example:
        >>> from sdc.train.studies import finish
        >>> def experiment():
        ...     yield "first half"
        ...     return 42
        >>> finish(experiment(), print)
        first half
        42
    """
    while True:
        try:
            done = next(parts)
        except StopIteration as end:
            found: Found = end.value
            return found
        if progress is not None:
            progress(done)
