"""Errors in the kernel's log: NVIDIA's Xid, AMD's uncorrectable errors, machine checks of the processor."""

import contextlib
import errno
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from .base import Described, SensorBackend, SensorEvent, Silent

LOG = "/dev/kmsg"
LONGEST = 160
"""Characters of a line that are kept."""
RECORDS = 10_000
"""Lines that are read at a time; a driver that fails for good writes without end."""
_ADDRESS = r"(?P<bus>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?"
_XID = re.compile(rf"NVRM: Xid \(PCI:{_ADDRESS}\): (?P<number>\d+)(?:, ?(?P<rest>.*))?$", re.IGNORECASE)
# Those of old are counted aloud whenever somebody asks, and "no uncorrectable errors" is no error: only new ones count.
_AMD = re.compile(
    rf"amdgpu {_ADDRESS}: .*?\b(?P<number>[1-9]\d*) new (?P<what>uncorrectable hardware errors detected in \w+ block)",
    re.IGNORECASE,
)
_MACHINE = re.compile(r"(?:mce: )?\[Hardware Error\]: (?P<what>.*Machine Check.*|.*Uncorrected.*)$", re.IGNORECASE)
_EDAC = re.compile(r"EDAC \S+: (?P<what>[1-9]\d* UE .*)$")


class Reported(NamedTuple):
    """An error in the kernel's log."""

    bus: str | None  # PCI address of the device without its function, in small letters; None for the host
    text: str


def parse_message(text: str) -> Reported | None:
    """The error that a message of the kernel's log reports, if it reports one of hardware."""
    text = text.strip()
    if (found := _XID.search(text)) is not None:
        rest = f": {found['rest']}" if found["rest"] else ""
        return Reported(short_address(found["bus"]), f"Xid {found['number']}{rest}"[:LONGEST])
    if (found := _AMD.search(text)) is not None:
        return Reported(short_address(found["bus"]), f"{found['number']} new {found['what']}"[:LONGEST])
    if (found := _MACHINE.search(text)) is not None:
        return Reported(None, f"machine check: {found['what']}"[:LONGEST])
    if (found := _EDAC.search(text)) is not None:
        return Reported(None, f"EDAC: {found['what']}"[:LONGEST])
    return None


def message_of(record: str) -> str:
    """The message of a record of /dev/kmsg: `priority,number,microseconds,flags;message`, and lines about it."""
    return record.partition(";")[2].partition("\n")[0]


def short_address(bus: str) -> str:
    """A PCI address as the kernel's log has it: small letters, four digits of the domain, without the function."""
    domain, _, place = bus.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{place.partition('.')[0]}"


def open_kernel_log(described: Described, path: str = LOG) -> "KernelLog | None":
    """The kernel's log from now on; `Silent` where it cannot be read, None if then no device would stand in it."""
    places = {short_address(str(device["bus"])): index for index, device in enumerate(described) if device.get("bus")}
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(handle, 0, os.SEEK_END)
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if not places:
            return None
        raise Silent(f"{path} cannot be read ({error.strerror}): errors that only stand there are not known") from error
    return KernelLog(handle, places)


class KernelLog(SensorBackend):
    """What the kernel's log reports; it has no readings. Errors of devices that take no part are passed over."""

    def __init__(self, handle: int, places: Mapping[str, int]) -> None:
        self._handle, self._places = handle, places

    def events(self) -> list[SensorEvent]:
        found = []
        for _ in range(RECORDS):
            try:
                record = os.read(self._handle, 8192)
            except OSError as error:
                if error.errno == errno.EPIPE:  # lines were overwritten before they were read; go on with the next
                    continue
                break  # nothing more for now
            if not record:
                break
            for line in record.decode(errors="replace").splitlines():
                reported = parse_message(message_of(line)) if not line.startswith(" ") else None
                if reported is not None and (reported.bus is None or reported.bus in self._places):
                    found.append(
                        SensorEvent(None if reported.bus is None else self._places[reported.bus], reported.text)
                    )
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._handle)
