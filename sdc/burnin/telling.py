"""What a source of sensor readings is: a driver's library, or files of the kernel, asked of each device in turn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from .report import Sensors

Described: TypeAlias = Sequence[Mapping[str, Any]]
"""What `sdc.records.describe_devices` says of the devices of a burn-in, in their order."""


class Told(NamedTuple):
    """An error that was reported.

    Attributes:
        device: index of the device; None for the host.
        text: in short words, such as `Xid 48`.
    """

    device: int | None
    text: str


class Source(Protocol):
    """Someone who tells of devices. It is asked by one thread only, and may take as long as it likes, or raise."""

    name: str

    def read(self, index: int, *, between: bool) -> Sensors | None:
        """What it tells of a device now; None for one that it does not know.

        Args:
            index: of the device, among those described.
            between: while work runs: without counters of errors, which some drivers take long to count, and without
                the clock of a device that happens to be idle, which is low for no reason that matters.
        """

    def events(self) -> list[Told]:
        """Errors that were reported since the question before, or since it was opened."""

    def close(self) -> None:
        """Gives back what it holds."""


Opener: TypeAlias = Callable[[Described], Source | None]
"""Opens a source for devices; None where it has nothing to tell of any of them."""


class Silent(Exception):
    """A source that should be there for these devices is not; the message says why, for people."""


def attempt(ask: Callable[..., Any], *arguments: Any) -> Any:
    """What a driver answers; None where it does not support the question, or a device does not."""
    try:
        return ask(*arguments)
    except Exception:  # each library has exceptions of its own, and a device rarely answers all questions
        return None
