"""The identity of a device, by which results of the same physical part are recognized."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from ..schema import Device, Header, Host
from .results import BurninResult, CheckedDevice

# Placeholders for missing serial numbers
PLACEHOLDERS = {
    "", "na", "n/a", "[n/a]", "none", "null", "unknown", "default string", "not specified", "not available",
    "to be filled by o.e.m.", "[unknown error]", "[not supported]",
}  # fmt: skip
Recognized: TypeAlias = Literal["same", "other", "unknown"]


def part_names(device: Device, machine: str | None) -> tuple[str, ...]:
    """Returns the names of a device that do not depend on the name of its host, the most reliable first: serial number,
    UUID, slot or position in the machine, of whose identity `machine` is a hash."""
    core = "" if device.core is None else f" core {device.core}"
    found = [
        f"{name} {value}{core}" for name, value in (("serial", device.serial), ("uuid", device.uuid)) if _is(value)
    ]
    if machine and _is(device.bus):
        found.append(f"machine {machine} bus {device.bus}")
    elif machine and device.coordinates is not None:
        part = "" if device.slice is None else f" slice {device.slice}"
        found.append(f"machine {machine}{part} chip {','.join(map(str, device.coordinates))}{core}")
    return tuple(found)


def candidates(report: Header, device: CheckedDevice) -> tuple[str, ...]:
    """Returns the possible identities of a device, the most reliable first: serial number, UUID, slot, index."""
    host, machine = device.host or report.host.name, device.machine or report.host.machine
    whose = f" ({machine[:8]})" if machine else ""
    return (*part_names(device, machine), f"host {host}{whose} device {device.index}")


def _is(value: str | None) -> bool:
    if value is None:
        return False
    plain = unicodedata.normalize("NFKC", value).strip().lower()
    return plain not in PLACEHOLDERS and not any(set(plain) <= set(each) for each in ("0-", "f-"))


def compare_names(names: Iterable[str], others: Iterable[str]) -> Recognized:
    """Returns whether two devices are the same, by serial number and UUID, as far as both have them: the dies of a
    board may share its serial number."""
    here, there = ({name.partition(" ")[0]: name for name in each} for each in (names, others))
    equal = {here[kind] == there[kind] for kind in ("serial", "uuid") if kind in here and kind in there}
    if not equal:
        return "unknown"
    return "same" if equal == {True} else "other"


def recognize(now: tuple[BurninResult, CheckedDevice], then: tuple[BurninResult, CheckedDevice]) -> Recognized:
    """Returns whether two results describe the same physical device, given the results and their descriptions of it.

    A device without a serial number and UUID is recognized by its place in a machine until the machine restarts: two
    machines may share an identity, for example if both were installed from one image, but never a boot.
    """
    machines = [device.machine or result.host.machine for result, device in (now, then)]
    here, there = (part_names(device, machine) for (_, device), machine in zip((now, then), machines, strict=True))
    if (known := compare_names(here, there)) != "unknown":
        return known
    if len({*machines} - {None}) > 1 or _place(here) != _place(there):
        return "other"
    boots = {result.host.boot for result, _ in (now, then)}
    return "same" if len(boots) == 1 and None not in boots else "unknown"


def _place(names: Sequence[str]) -> str | None:
    return next((name for name in names if name.startswith("machine ")), None)


def is_another(host: Host, device: Device, other_host: Host, other: Device) -> bool:
    """Returns whether two devices are certainly not the same: they have different serial numbers or UUIDs or, if these
    are unknown, belong to different machines, which have different identities and did not share a boot.

    A device without these numbers may have been moved to another slot of its machine.
    """
    machines = [device.machine or host.machine, other.machine or other_host.machine]
    known = compare_names(part_names(device, machines[0]), part_names(other, machines[1]))
    if known != "unknown":
        return known == "other"
    booted = host.boot is not None and host.boot == other_host.boot
    return None not in machines and machines[0] != machines[1] and not booted
