"""Of this host what may decide bits and is no library: processors, what of them may be used, and their features."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from sdc.records import THREADS

from .layout import HostPart

_FEATURES = re.compile(r"sse4_[12]|ssse3|avx\w*|fma|f16c|bmi[12]|amx_\w+|asimd\w*|sve\w*|sme\w*|bf16|i8mm|fphp")
"""What compilers choose instructions by."""
CPUINFO, SIBLINGS = "/proc/cpuinfo", "/sys/devices/system/cpu/smt/active"
QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def describe_host(read: Callable[[str], str | None] = _read) -> HostPart:
    """What is known of the host's processors.

    Args:
        read: gives the text of a file, or None where there is none.
    """
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", read(CPUINFO) or "", re.MULTILINE)
    active = (read(SIBLINGS) or "").strip()
    return HostPart(
        cores=os.cpu_count() or 1,
        allowed=len(os.sched_getaffinity(0)),
        quota=_quota(read),
        features=sorted(word for word in set(found[1].split() if found else ()) if _FEATURES.fullmatch(word)),
        siblings={"1": True, "0": False}.get(active),
    )


def pool_size(environ: Mapping[str, str], allowed: int, devices: int) -> int:
    """Threads of XLA's pool on a CPU: what NPROC says, else the processors it may use, at least one for each device.

    Example:
        >>> from sdc.train.doctor.hosts import pool_size
        >>> pool_size({}, 2, 4), pool_size({"NPROC": "8"}, 2, 1)
        (4, 8)
    """
    given = environ.get(THREADS, "")
    return max(int(given) if given.isdecimal() and int(given) > 0 else allowed, devices)


def _quota(read: Callable[[str], str | None]) -> float | None:
    """Processors' worth of time of the control group, by either version of the kernel's interface."""
    words = (read(QUOTAS[0]) or "").split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
        return int(words[0]) / int(words[1])
    quota = (read(QUOTAS[1]) or "").strip()
    period = (read(QUOTAS[1].replace("quota", "period")) or "").strip()
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None
