"""The description of a campaign on the reference workload; what can be told wrong without a device is told here."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from sdc.faults import parse_kind
from sdc.program import Selector, as_selector
from sdc.settings import SettingError

from .jobs import Planned
from .workload import LARGEST_COUNT


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignJob(Planned):
    """A campaign of single simulated faults in the reference training.

    Attributes:
        injections: how many faults.
        steps: steps of the clean run; faults strike all but the last `follow` of them.
        follow: steps that are followed after the struck one.
        where: selector of what is struck, or its text.
        faults: kinds of faults, see `sdc.faults.parse_kind`.
        abft: check the products of the struck step by checksums, as one more detector.
        batch: injections at the same time; None for 1 on a CPU and 8 on accelerators.

    Example:
        >>> from sdc.train.campaign_job import CampaignJob
        >>> CampaignJob(injections=40, faults=["bitflip", "nan"]).check()
    """

    kind: ClassVar[str] = "campaign"

    injections: int = 1000
    steps: int = 16
    follow: int = 5
    where: Selector | str = "arithmetic"
    faults: Sequence[str] = ("bitflip",)
    abft: bool = False
    batch: int | None = None

    @property
    def copies(self) -> int:
        """The state before each step of the clean run, and one for each injection that runs at the same time."""
        return self.steps + (self.batch or 1)

    def check(self) -> None:
        super().check()
        for name, value in (("injections", self.injections), ("batch", self.batch)):
            if value is not None and value < 1:
                raise SettingError(name, value, "expected a number of at least 1")
            if value is not None and value > LARGEST_COUNT:
                raise SettingError(name, value, f"expected at most {LARGEST_COUNT:,}")
        if not 0 <= self.follow < self.steps:
            raise SettingError(
                "follow", self.follow, f"expected a number from 0 to {self.steps - 1}, below that of the steps"
            )
        if not self.faults:
            raise SettingError("faults", None, "expected at least one kind, such as bitflip and nan")
        for text in self.faults:
            parse_kind(text)
        as_selector(self.where)
