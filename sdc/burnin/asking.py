"""Which devices a burn-in is asked to test, in words: checked before any of them is started."""

import re
from typing import NamedTuple

from sdc.settings import SettingError

MOST = 1024


class Asked(NamedTuple):
    """Devices that were asked for.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`; None for the best there is.
        number: how many; None for all there are.
    """

    platform: str | None
    number: int | None

    @property
    def simulated(self) -> int:
        """Devices to simulate on a CPU."""
        return (self.number or 1) if self.platform in ("cpu", None) else 1

    def doubts(self, platform: str | None, count: int) -> list[str]:
        """What stands against a PASS on the devices that there are.

        Args:
            platform: of the devices; None if there are none.
            count: how many there are.

        Example:
            >>> from sdc.burnin.asking import parse_devices
            >>> parse_devices("gpu:8").doubts("gpu", 7)
            ['8 gpu were asked for, and there are 7']
        """
        if self.platform is None:
            told = "no accelerator was found, and the CPU was not asked for; give --devices cpu if it is meant"
            return [told] if platform == "cpu" else []
        if platform != self.platform:
            return [f"{self.platform} was asked for, and there is {platform or 'no device at all'}"]
        if self.number is not None and count < self.number:
            return [f"{self.number} {self.platform} were asked for, and there are {count}"]
        return []


def parse_devices(text: str | None) -> Asked:
    """Reads what a flag asks for.

    Args:
        text: `gpu`, `tpu`, `cpu`, one of them with a number as in `gpu:8`, or a number of simulated devices.

    Raises:
        SettingError: it is none of these.

    Example:
        >>> from sdc.burnin.asking import parse_devices
        >>> parse_devices("4")
        Asked(platform='cpu', number=4)
    """
    if text is None:
        return Asked(None, None)
    found = re.fullmatch(r"(?:(cpu|gpu|tpu)(?::(\d{1,6}))?|(\d{1,6}))", text, re.ASCII)
    if found is None:
        raise SettingError("devices", text, "expected gpu, tpu or cpu, with a number as in gpu:8, or a number alone")
    platform, count = found[1] or "cpu", found[2] or found[3]
    if count is not None and not 1 <= int(count) <= MOST:
        raise SettingError("devices", text, f"expected a number from 1 to {MOST:,}")
    return Asked(platform, None if count is None else int(count))
