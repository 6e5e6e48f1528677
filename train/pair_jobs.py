"""The runs that hosts are compared by: twins at full load, twins in lock-step, twins operation by operation."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from .checks import Simulated
from .config import TrainConfig
from .jobs import Twins
from .judging import Answer, Judge, Judged

if TYPE_CHECKING:
    from .placement import Placement
    from .programs import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared(Twins):
    """Twins that are not continued, so that nothing of them is saved but their record."""

    unsaved: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullLoad(Compared):
    """Twins that exchange digests once in a step, and between that wait for nobody.

    A simulated node is hit as often as under parameter synchronization, where the study's accelerators waited as
    little: more often than in lock-step.

    Example:
        >>> from sdc.train.pair_jobs import FullLoad
        >>> FullLoad(suspect="node14").simulated.sync
        'params'
    """

    exchange: Literal["probe", "step", "call"] = "call"

    @property
    def simulated(self) -> Simulated:
        return dataclasses.replace(super().simulated, sync="params")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operations(Compared):
    """Twins that digest every operation, until one differs.

    Example:
        >>> from sdc.train.pair_jobs import Operations
        >>> Operations(steps=3).check()
    """

    sync: Literal["compute", "params", "none"] = "params"

    def program(self, config: TrainConfig, placement: "Placement", *, donate: bool) -> "Program":
        from .programs import OperationsProgram, sharded

        faults, checks = self.tools(config)
        return OperationsProgram(
            sharded(config), placement, self.sync, faults=faults, checks=checks, seed=self.workload.seed, donate=donate
        )

    def judge(self) -> Judge | None:
        return stop_at_operation


def stop_at_operation(judged: Judged) -> Answer:
    """Ends a run with the step in which an operation differs."""
    return Answer.STOP if "site" in judged.row["operations"] else Answer.CONTINUE
