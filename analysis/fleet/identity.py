"""Which device a row of a result is about, by what stays with the part when it moves to another host."""

import unicodedata
from collections import Counter
from collections.abc import Sequence

from sdc.burnin import BurninResult, CheckedDevice

PLACEHOLDERS = {
    "", "na", "n/a", "[n/a]", "none", "null", "unknown", "default string", "not specified", "not available",
    "to be filled by o.e.m.", "[unknown error]", "[not supported]",
}  # fmt: skip
"""What stands for a serial number where there is none."""
LONGEST = 300


def printable(text: str, longest: int = LONGEST) -> str:
    """Text of others as it can be shown: what moves a cursor, turns the writing around or has no end is not.

    Example:
        >>> from sdc.analysis.fleet.identity import printable
        >>> printable("gpu-1" + chr(27) + "[2J")
        'gpu-1\\\\x1b[2J'
    """
    shown = text if len(text) <= longest else f"{text[:longest]}..."
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)


def candidates(report: BurninResult, device: CheckedDevice) -> tuple[str, ...]:
    """What a device can be recognized by, the surest first: serial number, UUID, place in its machine, number."""
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
    """Whether a text can be the identity of anything."""
    if value is None:
        return False
    plain = unicodedata.normalize("NFKC", value).strip().lower()
    return plain not in PLACEHOLDERS and not any(set(plain) <= set(each) for each in ("0-", "f-"))


def identities(named: Sequence[Sequence[str]], doubtful: frozenset[str] = frozenset()) -> list[str]:
    """For each device of one result the first candidate that none of the others has, and that is not doubtful.

    Parts of one board share its serial number, and so do all devices of a driver that tells the same of each.

    Args:
        named: candidates of each device; the last one of each is never shared.
        doubtful: candidates that cannot be right.

    Example:
        >>> from sdc.analysis.fleet.identity import identities
        >>> identities([("serial 7", "host a device 0"), ("serial 7", "host a device 1")])
        ['host a device 0', 'host a device 1']
    """
    counts = Counter(name for names in named for name in names)
    return [
        next((name for name in names[:-1] if counts[name] == 1 and name not in doubtful), names[-1]) for names in named
    ]
