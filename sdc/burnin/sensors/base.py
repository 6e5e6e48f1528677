"""A source of sensor readings: a driver's library, or files of the kernel, which is asked of each device in turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias

from sdc.schema import Fields, about

# What the Xid errors are called that speak of hardware; others may be of software.
XID = MappingProxyType(
    {
        48: "double-bit ECC error",
        62: "internal micro-controller halt",
        63: "a row is remapped, or a page retired",
        64: "a row could not be remapped, or a page not be retired",
        74: "NVLink error",
        79: "the GPU has fallen off the bus",
        92: "high rate of single-bit ECC errors",
        94: "contained ECC error",
        95: "uncontained ECC error",
        119: "the GPU's system processor does not answer",
        120: "error of the GPU's system processor",
        140: "unrecovered ECC error",
    }
)


class Sensors(Fields, kw_only=True):
    """What a device's driver reports at one moment. What it does not report is absent."""

    temperature: Annotated[float | None, about("degrees Celsius")] = None
    power: Annotated[float | None, about("watts")] = None
    clock: Annotated[float | None, about("clock of the processors, MHz")] = None
    memory_clock: Annotated[float | None, about("clock of the memory, MHz")] = None
    corrected: Annotated[int | None, about("memory errors that ECC corrected, since the driver was loaded")] = None
    uncorrected: Annotated[int | None, about("memory errors that ECC could not correct, since then")] = None
    retired: Annotated[int | None, about("memory pages or rows that were taken out of use")] = None
    slowed: Annotated[list[str] | None, about("why the clock is lower than it could be, in the driver's words")] = None


class Course(Fields, kw_only=True):
    """What a device's driver reported before, during and after."""

    source: Annotated[str, about("who reported: `nvml`, `amdsmi`, `hwmon` ...")]
    before: Annotated[Sensors, about("before the first run")]
    after: Annotated[Sensors, about("after the last one")]
    samples: Annotated[int, about("how often it was asked in between")]
    hottest: Annotated[float | None, about("highest temperature, degrees Celsius")] = None
    strongest: Annotated[float | None, about("highest power, watts")] = None
    slowest: Annotated[float | None, about("lowest clock of the processors under load, MHz")] = None
    events: Annotated[list[str], about("errors that the driver reported meanwhile, such as `Xid 48`")] = []


def driver_errors(course: Course) -> Iterator[str]:
    """The errors of a device that its driver reported, in words. Corrected errors are none: the course counts them."""
    before, after = course.before, course.after
    if before != Sensors() and after == Sensors():
        yield f"{course.source} reports nothing of the device any more"
    for was, now, what in (
        (before.uncorrected, after.uncorrected, "memory errors that ECC could not correct"),
        (before.retired, after.retired, "memory pages or rows that were taken out of use"),
    ):
        if was is None or now is None or was == now:
            continue
        yield f"{now - was} new {what}" if now > was else f"{what}: {was} before, {now} after: the driver started anew"
    for text in course.events:
        head = text.partition(":")[0].split()
        number = int(head[1]) if head[:1] == ["Xid"] and head[1].isdecimal() else None
        known = None if number is None or ":" in text else XID.get(number)
        yield f"{text} ({known})" if known else text


# What `sdc.records.describe_devices` says of the devices of a burn-in, in their order.
Described: TypeAlias = Sequence[Mapping[str, Any]]


def amd_addresses(described: Described) -> dict[int, str]:
    """PCI addresses of the devices that have one and are not NVIDIA's, by their place."""
    return {
        index: str(device["bus"])
        for index, device in enumerate(described)
        if device.get("bus") and not str(device.get("uuid", "")).startswith("GPU-")
    }


class SensorEvent(NamedTuple):
    device: int | None  # index; None for the host
    text: str


class SensorBackend:
    """A source of readings. One thread asks it, so that it may take as long as it likes, and may raise."""

    def read(self, index: int, *, between: bool) -> Sensors | None:
        """Readings of a device, by its place among those described; None for one that the source does not know.

        `between` is true while work runs: then without counters of errors, which some drivers take long to count, and
        without the clock of a device that happens to be idle, which is low for no reason that matters.
        """
        return None

    def events(self) -> list[SensorEvent]:
        """Errors that were reported since the call before, or since the source was opened."""
        return []

    def close(self) -> None:
        """Gives back what the source holds."""


# Opens a source for devices; None where it has nothing to report of any of them.
Opener: TypeAlias = Callable[[Described], SensorBackend | None]


class Silent(Exception):
    """A source that should be there for these devices is not; the message says why, for people."""


def attempt(ask: Any, *arguments: Any) -> Any:
    """What a driver answers; None where it does not have or support the question, or a device does not."""
    try:
        return ask(*arguments)
    except Exception:  # each library has exceptions of its own, and a device rarely answers all questions
        return None
