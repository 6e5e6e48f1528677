"""The host of a burn-in: requested devices, their locks, and the properties, besides the program, that determine bits.

Only one burn-in runs on a device at a time: two would slow each other down, and each would void the other's time under
load. The kernel releases the lock of a device when the process that holds the lock ends, for whatever reason.
"""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdc.settings import SettingError

from ..records import (
    Lock,
    RecordBusy,
    RecordError,
    Sources,
    describe_devices,
    environment,
    identify,
    own_folder,
    package_version,
)
from .results import DeviceRequest

if TYPE_CHECKING:
    import jax

MOST_DEVICES = 1024
# NVIDIA libraries whose kernels and compilers determine bits; each release of CUDA has its own packages.
LIBRARIES = ("cublas", "cuda-nvcc", "cuda-nvrtc", "cudnn", "nccl")
# Environment variables that determine bits, besides XLA_FLAGS.
VARIABLES = {"gpu": ("NVIDIA_TF32_OVERRIDE",), "tpu": ("LIBTPU_INIT_ARGS",), "cpu": ()}


def parse_devices(text: str | None) -> DeviceRequest:
    """Parses `gpu`, `tpu`, `cpu`, one of these with a number, as in `gpu:8`, or a number of simulated devices."""
    if text is None:
        return DeviceRequest(None, None)
    found = re.fullmatch(r"(?:(cpu|gpu|tpu)(?::(\d{1,6}))?|(\d{1,6}))", text, re.ASCII)
    if found is None:
        raise SettingError("devices", text, "expected gpu, tpu or cpu, optionally with a number (gpu:8), or a number")
    platform, count = found[1] or "cpu", found[2] or found[3]
    if count is not None and not 1 <= int(count) <= MOST_DEVICES:
        raise SettingError("devices", text, f"expected a number from 1 to {MOST_DEVICES:,}")
    return DeviceRequest(platform, None if count is None else int(count))


def claim_names(described: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a name for each device that is unique on its host, from its bus address, UUID, serial number or
    coordinates, or from its index if these are unknown."""
    names = []
    for known in described:
        part = next((str(known[name]) for name in ("bus", "uuid", "serial", "coordinates") if name in known), "")
        # Processes on one host, each with some of the chips, may use the same device numbers.
        names.append("".join(c if c.isalnum() else "-" for c in f"{known.get('kind', '')}-{part or known['id']}"))
    return names


def lock_folder() -> Path:
    """Returns the folder of this user's locks on this host, which only the user can access: in the user's state folder,
    or for root in `/run`.

    Raises OSError if the folder belongs to another user, or cannot be created.
    """
    if os.geteuid() == 0:
        return own_folder("/run/sdc")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    me = identify()  # hosts may share the state folder
    return own_folder(state / "sdc" / f"locks-{me.machine or me.name}")


@contextmanager
def claimed(described: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Iterator[list[str]]:
    """Locks devices, given as `describe_devices` returns them, for the duration of the block; yields messages about
    devices that could not be locked.

    By default, the locks are in `lock_folder`, so they exclude other burn-ins by the same user on this host, except
    those in containers. Raises a `SettingError` that names the device if another burn-in has locked the device.
    """
    held: list[Lock] = []
    problems: list[str] = []
    try:
        for name in sorted(set(claim_names(described))):
            file = f"{name}.lock"
            try:
                place = folder or lock_folder()
                held.append(Lock(place, file, lasting=True))
            except RecordBusy as error:
                raise SettingError(
                    "devices", None,
                    f"{name} is being tested by {error.holder or 'another process'} ({place / file}); "
                    "wait until that burn-in has ended",
                ) from error  # fmt: skip
            except (OSError, RecordError) as error:
                why = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
                problems.append(f"{name} could not be locked, so a second burn-in can use it ({why})")
        yield problems
    finally:
        for lock in held:
            lock.release()


def surroundings(devices: "Sequence[jax.Device]") -> dict[str, str]:
    """Returns, as a flat table of strings, all properties that determine bits besides a program and its device.

    Healthy devices of one kind produce equal bits on hosts with equal tables. The table omits properties that do not
    affect bits, such as host names and the number of devices.
    """
    return flat_surroundings(environment(), _driver(devices[0].platform), os.environ)


def flat_surroundings(
    environment: Mapping[str, Any], driver: str | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """Builds the table from `sdc.records.environment`, the driver's version, and environment variables."""
    platform = environment["platform"]
    packages = environment["packages"]
    others = tuple(f"--xla_{other}_" for other in VARIABLES if other != platform)
    # Flags of other platforms are omitted. The order of flags is irrelevant, except that the last flag of a name wins.
    flags = {flag.partition("=")[0]: flag for flag in environment["xla_flags"].split() if not flag.startswith(others)}
    found: dict[str, str | None] = {
        "platform": platform,
        # On TPUs this is a paragraph with line breaks.
        "platform_version": " ".join(str(environment["platform_version"]).split()),
        "driver": driver,
        "jax": packages["jax"],
        "jaxlib": packages["jaxlib"],
        "machine": environment["machine"],
        "xla_flags": " ".join(sorted(flags.values())),
        **environment["options"],
        **{name: variables.get(name) for name in VARIABLES.get(platform, ())},
    }
    if platform == "cpu":
        found["processor"] = environment["processor"]
        found["cpu_threads"] = environment["cpu_threads"] or str(environment["processors"])
    if platform == "gpu":
        names = [f"nvidia-{library}{release}" for library in LIBRARIES for release in ("", "-cu12", "-cu13")]
        versions = {name: package_version(name) for name in names}
        found |= {name: version for name, version in versions.items() if version != "not installed"}
    return {name: value for name, value in found.items() if value is not None}


@functools.cache
def _driver(platform: str) -> str | None:
    """Returns the driver's version, read once per process without running commands that take seconds."""
    if platform == "cpu":
        return None
    import jax

    described = describe_devices(jax.local_devices(backend=platform)[:1], sources=Sources(run=lambda _: None))
    return described[0].get("driver") if described else None
