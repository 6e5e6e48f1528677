"""The host of a burn-in: which of its devices are asked for, who has them, and what decides bits beside a program.

One burn-in runs on a device at a time: two would slow each other down, and each void the other's time at load. The
kernel gives up the lock of a device when the process that claimed it ends, however it ends.
"""

import functools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sdc.settings import SettingError

from ..records import Lock, RecordBusy, Sources, describe_devices, environment, package_version

if TYPE_CHECKING:
    import jax

MOST_DEVICES = 1024
# Libraries of NVIDIA whose kernels and compilers decide bits; each release of CUDA has packages of its own.
LIBRARIES = ("cublas", "cuda-nvcc", "cuda-nvrtc", "cudnn", "nccl")
# Variables of the environment that decide bits beside XLA_FLAGS.
VARIABLES = {"gpu": ("NVIDIA_TF32_OVERRIDE",), "tpu": ("LIBTPU_INIT_ARGS",), "cpu": ()}


class DeviceRequest(NamedTuple):
    platform: str | None  # `cpu`, `gpu` or `tpu`; None for the best there is
    number: int | None  # None for all there are

    @property
    def simulated(self) -> int:
        return (self.number or 1) if self.platform in ("cpu", None) else 1

    def doubts(self, platform: str | None, count: int) -> list[str]:
        """What stands against a PASS on so many devices of a platform, or on none."""
        if self.platform is None:
            doubt = "no accelerator was found, and the CPU was not asked for; give --devices cpu if it is meant"
            return [doubt] if platform == "cpu" else []
        if platform != self.platform:
            return [f"{self.platform} was asked for, and there is {platform or 'no device at all'}"]
        if self.number is not None and count < self.number:
            return [f"{self.number} {self.platform} were asked for, and there are {count}"]
        return []


def parse_devices(text: str | None) -> DeviceRequest:
    """Reads `gpu`, `tpu`, `cpu`, one of them with a number as in `gpu:8`, or a number of simulated devices."""
    if text is None:
        return DeviceRequest(None, None)
    found = re.fullmatch(r"(?:(cpu|gpu|tpu)(?::(\d{1,6}))?|(\d{1,6}))", text, re.ASCII)
    if found is None:
        raise SettingError("devices", text, "expected gpu, tpu or cpu, with a number as in gpu:8, or a number alone")
    platform, count = found[1] or "cpu", found[2] or found[3]
    if count is not None and not 1 <= int(count) <= MOST_DEVICES:
        raise SettingError("devices", text, f"expected a number from 1 to {MOST_DEVICES:,}")
    return DeviceRequest(platform, None if count is None else int(count))


def claim_names(described: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each device is called on its host: by its bus address, UUID or serial number, else by its number."""
    names = []
    for known in described:
        part = next((str(known[name]) for name in ("bus", "uuid", "serial", "coordinates") if name in known), "")
        # Several processes of one host may have some of its chips each, and number them alike.
        names.append("".join(c if c.isalnum() else "-" for c in f"{known.get('kind', '')}-{part or known['id']}"))
    return names


def lock_folder() -> Path:
    """Where locks are: the system's folder for temporary files."""
    return Path(tempfile.gettempdir())


@contextmanager
def claimed(names: Iterable[str], folder: Path | None = None) -> Iterator[list[str]]:
    """Claims devices for the time of the block; yields what could not be claimed because of the folder, in words.

    By default locks are in the system's folder for temporary files, which is one for all processes of a host, but not
    for those of its containers. A `SettingError` says which device another burn-in has.
    """
    held: list[Lock] = []
    problems: list[str] = []
    try:
        for name in sorted(set(names)):
            place, file = folder or lock_folder(), f"jax-sdc-{name}.lock"
            try:
                held.append(Lock(place, file, lasting=True))
            except RecordBusy as error:
                raise SettingError(
                    "devices", None,
                    f"{name} is being tested by {error.holder or 'another process'} ({place / file}); "
                    "wait until that has ended",
                ) from error  # fmt: skip
            except OSError as error:
                problems.append(f"{name} is not locked against a second burn-in ({error.strerror}: {place / file})")
        yield problems
    finally:
        for lock in held:
            lock.release()


def surroundings(devices: "Sequence[jax.Device]") -> dict[str, str]:
    """What decides bits beside a program and its device, as one flat table of texts.

    Equal tables where healthy devices of one kind have equal bits. What does not decide them, such as names of hosts
    and the number of devices, is not in it.
    """
    return flat_surroundings(environment(), _driver(devices[0].platform), os.environ)


def flat_surroundings(
    environment: Mapping[str, Any], driver: str | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """The table, from what `sdc.records.environment` returned, the driver's version, and the process's variables."""
    platform = environment["platform"]
    packages = environment["packages"]
    others = tuple(f"--xla_{other}_" for other in VARIABLES if other != platform)
    # Without those that are for other platforms. Their order means nothing, but that the last of a name counts.
    flags = {flag.partition("=")[0]: flag for flag in environment["xla_flags"].split() if not flag.startswith(others)}
    found: dict[str, str | None] = {
        "platform": platform,
        # A whole paragraph on TPUs, with line ends.
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
    """Asked once in a process; a driver does not change under it. Commands that take seconds are not run."""
    if platform == "cpu":
        return None
    import jax

    described = describe_devices(jax.local_devices(backend=platform)[:1], sources=Sources(run=lambda _: None))
    return described[0].get("driver") if described else None
