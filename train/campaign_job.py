"""The description of a campaign on the reference workload; what can be told wrong without a device is told here."""

import dataclasses
from collections.abc import Sequence
from os import PathLike

from sdc.faults.language import parse_kind
from sdc.program.selectors import parse_selector
from sdc.settings import SettingError

from .config import check
from .workload import Loaded, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignJob:
    """A campaign of single simulated faults in the reference training.

    Attributes:
        workload: what is trained.
        injections: how many faults.
        steps: of the clean run; faults strike all but the last `follow` of them.
        follow: steps that are followed after the struck one.
        where: selector of what is struck.
        faults: kinds of faults, see `sdc.faults.parse_kind`.
        abft: check the products of the struck step by checksums, as one more detector.
        batch: injections at the same time; None for 1 on a CPU and 8 on accelerators.
        data: data-parallel ranks.
        model: tensor-parallel ranks.
        folder: of the record, a new one unless the campaign is resumed.
        resume: continue what is in the folder, after its last injection.

    Example:
        >>> from sdc.train.campaign_job import CampaignJob
        >>> CampaignJob(injections=40, faults=["bitflip", "nan"]).check()
    """

    workload: Workload = dataclasses.field(default_factory=Workload)
    injections: int = 1000
    steps: int = 16
    follow: int = 5
    where: str = "arithmetic"
    faults: Sequence[str] = ("bitflip",)
    abft: bool = False
    batch: int | None = None
    data: int = 1
    model: int = 1
    folder: str | PathLike[str] | None = None
    resume: bool = False

    def check(self) -> None:
        """Checks everything that needs no device and no data.

        Raises:
            ValueError: a setting makes no sense.
        """
        for name in ("injections", "steps", "data", "model", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(name, value, "expected a number of at least 1")
        if not 0 <= self.follow < self.steps:
            raise SettingError(
                "follow", self.follow, f"expected a number from 0 to {self.steps - 1}, below that of the steps"
            )
        if not self.faults:
            raise SettingError("faults", None, "expected at least one kind, such as bitflip and nan")
        if self.resume and self.folder is None:
            raise SettingError("resume", None, "continues the campaign in a folder, but none is named; name it")
        for text in self.faults:
            parse_kind(text)
        parse_selector(self.where)
        check(self.workload.resolve(), self.data, self.model)

    def load(self) -> Loaded:
        """Checks the job and reads its data.

        Raises:
            ValueError: see `check`; or the data cannot be read.
        """
        self.check()
        config, dataset = self.workload.load()
        check(config, self.data, self.model)
        return Loaded(config, dataset)
