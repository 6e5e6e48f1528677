"""The identity of a device, by which results of the same physical part are recognized."""

import unicodedata
from typing import Literal, TypeAlias

from ..schema import Header
from .results import BurninResult, CheckedDevice

# Placeholders for missing serial numbers
PLACEHOLDERS = {
    "", "na", "n/a", "[n/a]", "none", "null", "unknown", "default string", "not specified", "not available",
    "to be filled by o.e.m.", "[unknown error]", "[not supported]",
}  # fmt: skip
Recognized: TypeAlias = Literal["same", "other", "unknown"]


def candidates(report: Header, device: CheckedDevice) -> tuple[str, ...]:
    """Returns the possible identities of a device, the most reliable first: serial number, UUID, slot, index."""
    host, machine = device.host or report.host.name, device.machine or report.host.machine
    core = "" if device.core is None else f" core {device.core}"
    found = [
        f"{name} {value}{core}" for name, value in (("serial", device.serial), ("uuid", device.uuid)) if _is(value)
    ]
    if machine and _is(device.bus):
        found.append(f"machine {machine} bus {device.bus}")
    elif machine and device.coordinates is not None:
        part = "" if device.slice is None else f" slice {device.slice}"
        found.append(f"machine {machine}{part} chip {','.join(map(str, device.coordinates))}{core}")
    whose = f" ({machine[:8]})" if machine else ""
    return (*found, f"host {host}{whose} device {device.index}")


def _is(value: str | None) -> bool:
    if value is None:
        return False
    plain = unicodedata.normalize("NFKC", value).strip().lower()
    return plain not in PLACEHOLDERS and not any(set(plain) <= set(each) for each in ("0-", "f-"))


def recognize(now: tuple[BurninResult, CheckedDevice], then: tuple[BurninResult, CheckedDevice]) -> Recognized:
    """Returns whether two results describe the same physical device, given the results and their descriptions of it.

    A device without a serial number and UUID is recognized by its place in a machine until the machine restarts: two
    machines may share an identity, for example if both were installed from one image, but never a boot.
    """
    here, there = ({name.partition(" ")[0]: name for name in candidates(*each)[:-1]} for each in (now, then))
    for kind in ("serial", "uuid"):
        if kind in here and kind in there:
            return "same" if here[kind] == there[kind] else "other"
    machines = {device.machine or result.host.machine for result, device in (now, then)} - {None}
    if len(machines) > 1 or here.get("machine") != there.get("machine"):
        return "other"
    boots = {result.host.boot for result, _ in (now, then)}
    return "same" if len(boots) == 1 and None not in boots else "unknown"
