"""The interface of sources of sensor readings: drivers' libraries and kernel files, read one device at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias

from sdc.schema import Fields, about

# Names of the Xid errors that indicate hardware faults; other Xid errors may be caused by software.
XID = MappingProxyType(
    {
        48: "double-bit ECC error",
        62: "internal micro-controller halt",
        63: "a row was remapped, or a page retired",
        64: "remapping a row, or retiring a page, failed",
        74: "NVLink error",
        79: "the GPU has fallen off the bus",
        92: "high rate of single-bit ECC errors",
        94: "contained ECC error",
        95: "uncontained ECC error",
        119: "the GPU's system processor does not respond",
        120: "error of the GPU's system processor",
        140: "unrecovered ECC error",
    }
)


class Sensors(Fields, kw_only=True):
    """Readings that a device's driver reports at one moment; unreported readings are absent."""

    temperature: Annotated[float | None, about("degrees Celsius")] = None
    power: Annotated[float | None, about("watts")] = None
    clock: Annotated[float | None, about("processor clock, MHz")] = None
    memory_clock: Annotated[float | None, about("memory clock, MHz")] = None
    corrected: Annotated[
        int | None, about("number of memory errors that ECC has corrected since the driver was loaded")
    ] = None
    uncorrected: Annotated[
        int | None, about("number of memory errors that ECC could not correct, since the driver was loaded")
    ] = None
    retired: Annotated[int | None, about("number of retired memory pages or remapped rows")] = None
    slowed: Annotated[list[str] | None, about("reasons for a reduced clock, as the driver states them")] = None


class Reading(Fields, kw_only=True):
    """Readings of a device at one moment of a burn-in."""

    seconds: Annotated[float, about("seconds since the monitor of the sensors started")]
    temperature: Annotated[float | None, about("degrees Celsius")] = None
    power: Annotated[float | None, about("watts")] = None
    clock: Annotated[float | None, about("processor clock, MHz; absent while the device is idle")] = None


class Course(Fields, kw_only=True):
    """A device's readings before, during and after a burn-in."""

    source: Annotated[str, about("source of the readings, such as `nvml`, `amdsmi` or `hwmon`")]
    before: Annotated[Sensors, about("readings before the first run")]
    after: Annotated[Sensors, about("readings after the last run")]
    samples: Annotated[int, about("number of readings during the burn-in")]
    hottest: Annotated[float | None, about("highest temperature, degrees Celsius")] = None
    strongest: Annotated[float | None, about("highest power, watts")] = None
    slowest: Annotated[float | None, about("lowest processor clock under load, MHz")] = None
    readings: Annotated[list[Reading], about("at most 240 readings, evenly spread over the burn-in")] = []
    events: Annotated[list[str], about("errors that the driver reported during the burn-in, such as `Xid 48`")] = []


def driver_errors(course: Course) -> Iterator[str]:
    """Yields descriptions of the errors that a device's driver reported, except corrected memory errors."""
    before, after = course.before, course.after
    if before != Sensors() and after == Sensors():
        yield f"{course.source} no longer reports readings of the device"
    for was, now, what in (
        (before.uncorrected, after.uncorrected, "memory errors that ECC could not correct"),
        (before.retired, after.retired, "retired memory pages or remapped rows"),
    ):
        if was is None or now is None or was == now:
            continue
        yield f"{now - was} new {what}" if now > was else f"{what}: {was} before, {now} after, so the driver restarted"
    for text in course.events:
        head = text.partition(":")[0].split()
        number = int(head[1]) if head[:1] == ["Xid"] and head[1].isdecimal() else None
        known = None if number is None or ":" in text else XID.get(number)
        yield f"{text} ({known})" if known else text


# The result of `sdc.records.describe_devices` for the devices of a burn-in, in order.
Described: TypeAlias = Sequence[Mapping[str, Any]]


def amd_addresses(described: Described) -> dict[int, str]:
    """Returns the PCI addresses, by index, of the devices that have an address and are not made by NVIDIA."""
    return {
        index: str(device["bus"])
        for index, device in enumerate(described)
        if device.get("bus") and not str(device.get("uuid", "")).startswith("GPU-")
    }


class SensorEvent(NamedTuple):
    device: int | None  # index; None for the host
    text: str


class SensorBackend:
    """A source of readings. Each source runs in its own thread, so its methods may block and may raise exceptions."""

    def read(self, index: int, *, between: bool) -> Sensors | None:
        """Returns the readings of the device with this index, or None if the source does not know the device.

        `between` is true while workloads run. The readings then omit error counters, because some drivers are slow to
        read them, and the clock of a momentarily idle device, because its low value is irrelevant.
        """
        return None

    def events(self) -> list[SensorEvent]:
        """Returns errors reported since the previous call, or since the source was opened."""
        return []

    def close(self) -> None:
        """Releases the resources of the source."""


# Opens a source for devices; returns None if the source knows none of them.
Opener: TypeAlias = Callable[[Described], SensorBackend | None]


class Silent(Exception):
    """A source that these devices should have is unavailable; the message states the reason."""


def attempt(ask: Any, *arguments: Any) -> Any:
    """Calls a driver's function; returns None if the function does not exist, fails, or is not supported by the device.

    Any exception counts as a failure.
    """
    try:
        return ask(*arguments)
    except Exception:  # each library has its own exceptions, and devices rarely support all queries
        return None
