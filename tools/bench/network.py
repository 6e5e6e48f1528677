"""Two hosts on one machine: network namespaces, and a cable between them that can delay. Needs Linux, root and `ip`."""

import contextlib
import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from sdc.verdict import Exit

from .. import CommandError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of the hosts."""
LINKS = ("sdca", "sdcb")
"""Names of their network devices."""
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""Of Linux: makes a network device whose packets a process reads and writes."""
LARGEST = 65535
"""Bytes of a packet."""


class Cable:
    """Carries packets between two network devices.

    Attributes:
        delay: seconds from one end to the other, beside what carrying takes.
    """

    def __init__(self) -> None:
        self.delay = 0.0
        self._ends = [_device(name) for name in LINKS]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> "Cable":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()
        while not self._stopped.is_set():
            due = waiting[0][0] - time.monotonic() if waiting else 0.1
            ready, _, _ = select.select(self._ends, [], [], max(due, 0.0))
            for end in ready:
                packet = os.read(end, LARGEST)
                waiting.append((time.monotonic() + self.delay, self._ends[1 - self._ends.index(end)], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, end, packet = waiting.popleft()
                with contextlib.suppress(OSError):  # of a link that is down, a network loses them too
                    os.write(end, packet)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, str], Cable]]:
    """Names of two namespaces, and the cable between them. In each its own host name leads to its address."""
    if not (hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") and Path("/dev/net/tun").exists()):
        raise CommandError("network namespaces need Linux, root, the command ip and /dev/net/tun", Exit.USAGE)
    names = (f"sdc{os.getpid()}a", f"sdc{os.getpid()}b")
    try:
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("netns", "add", name)
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        with Cable() as cable:
            for name, address, link in zip(names, ADDRESSES, LINKS, strict=True):
                ip("link", "set", link, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", link, "mtu", LARGEST, "up")
                ip("-n", name, "link", "set", "lo", "up")
            yield names, cable
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            with contextlib.suppress(OSError):
                (Path("/etc/netns") / name / "hosts").unlink()
                (Path("/etc/netns") / name).rmdir()


def ip(*words: object) -> None:
    """Runs the command `ip`."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def _device(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return end
