"""What decides bits beside a program and its device: versions, the driver, flags, options, threads of a processor."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..records import Sources, describe_devices, environment, package_version

LIBRARIES = ("cublas", "cuda-nvcc", "cuda-nvrtc", "cudnn", "nccl")
"""Libraries of NVIDIA whose kernels and compilers decide bits; each release of CUDA has packages of its own."""
VARIABLES = {"gpu": ("NVIDIA_TF32_OVERRIDE",), "tpu": ("LIBTPU_INIT_ARGS",), "cpu": ()}
"""Variables of the environment that decide bits beside XLA_FLAGS."""


def surroundings(devices: Sequence[jax.Device]) -> dict[str, str]:
    """What decides bits beside a program and its device, as one flat table of texts.

    Args:
        devices: of the burn-in, which are of one platform.

    Returns:
        Equal tables where healthy devices of one kind have equal bits. What does not decide them, such as names of
        hosts and the number of devices, is not in it.

    Example:
        >>> import jax
        >>> from sdc.burnin.surroundings import surroundings
        >>> surroundings(jax.local_devices())["platform"]
        'cpu'
    """
    return flat_surroundings(environment(), _driver(devices[0].platform), os.environ)


def flat_surroundings(
    environment: Mapping[str, Any], driver: str | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """The table, from what `sdc.records.environment` returned.

    Args:
        environment: of the process.
        driver: version of the driver, where there is one.
        variables: of the environment.
    """
    platform = environment["platform"]
    packages = environment["packages"]
    found: dict[str, str | None] = {
        "platform": platform,
        # A whole paragraph on TPUs, with line ends.
        "platform_version": " ".join(str(environment["platform_version"]).split()),
        "driver": driver,
        "jax": packages["jax"],
        "jaxlib": packages["jaxlib"],
        "machine": environment["machine"],
        "xla_flags": " ".join(_flags(environment["xla_flags"].split(), platform)),
        **environment["options"],
        **{name: variables.get(name) for name in VARIABLES.get(platform, ())},
    }
    if platform == "cpu":
        found["processor"] = environment["processor"]
        found["cpu_threads"] = environment["cpu_threads"] or str(environment["processors"])
    if platform == "gpu":
        found |= _libraries()
    return {name: value for name, value in found.items() if value is not None}


def _flags(flags: Sequence[str], platform: str) -> list[str]:
    """Without those that are for other platforms. Their order means nothing, but that the last of a name counts."""
    others = tuple(f"--xla_{other}_" for other in VARIABLES if other != platform)
    last = {flag.partition("=")[0]: flag for flag in flags if not flag.startswith(others)}
    return sorted(last.values())


@functools.cache
def _libraries() -> dict[str, str]:
    names = [f"nvidia-{library}{release}" for library in LIBRARIES for release in ("", "-cu12", "-cu13")]
    found = {name: package_version(name) for name in names}
    return {name: version for name, version in found.items() if version != "not installed"}


@functools.cache
def _driver(platform: str) -> str | None:
    """Asked once in a process; a driver does not change under it. Commands that take seconds are not run."""
    if platform == "cpu":
        return None
    told = describe_devices(jax.local_devices(backend=platform)[:1], sources=Sources(run=lambda _: None))
    return told[0].get("driver") if told else None
