"""Determinism: settings that make a backend bitwise deterministic, and the comparability of two runs.

Twins are compared bit for bit, so they must run the same program on the same kind of device with the same libraries.
`prepare` applies the settings of each backend before JAX starts the backend, `environment` records these settings, and
`differences` lists the differences between processes. Twins with such differences are not comparable: if their results
differ, this proves nothing.
"""

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ..schema import package_version
from .devices import text_of, version_in

if TYPE_CHECKING:
    import jax  # code that only reads and writes records starts faster without JAX

Platform: TypeAlias = Literal["cpu", "gpu", "tpu"]

# Excludes GPU kernels with nondeterministic summation order. Autotuning picks kernels by measured time, so two hosts
# may pick different ones; autotuning is therefore disabled. TPUs and CPUs are deterministic by default.
GPU_FLAGS = (
    "--xla_gpu_deterministic_ops=true",
    "--xla_gpu_exclude_nondeterministic_ops=true",
    "--xla_gpu_autotune_level=0",
)
THREADS = "NPROC"  # the environment variable from which XLA takes the size of its thread pool on a CPU
# Maximum number of simulated devices in a process. Each device has its own threads; a process that cannot create more
# threads aborts.
MOST_DEVICES = 1024
PACKAGES = ("jax-sdc", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def prepare(*, cpu_devices: int, cpu_threads: int | None = None, only_cpu: bool = False) -> None:
    """Makes every backend deterministic; this function must be called before anything runs on a device.

    Args:
        cpu_devices: number of CPU devices to simulate in this process, if it has only a CPU.
        cpu_threads: size of XLA's thread pool on a CPU, at least `cpu_devices` (the default). XLA splits matrix
            products according to the size of the pool and rounds each part, so another size gives different low-order
            bits. Processes whose results are compared need pools of the same size.
        only_cpu: use the CPU even if there is an accelerator.

    Raises:
        ValueError: the environment sets the opposite of a required flag, JAX has already started, or a process cannot
            have `cpu_devices` simulated devices.
    """
    if not 1 <= cpu_devices <= MOST_DEVICES:
        raise ValueError(
            f"cpu_devices={cpu_devices}: expected a number from 1 to {MOST_DEVICES:,} for one process, since each "
            "device has its own threads; use fewer devices, or more processes"
        )
    import jax

    flags = os.environ.get("XLA_FLAGS", "").split()
    flags += _missing(flags)
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ[THREADS] = str(max(cpu_threads or 0, cpu_devices))
    if only_cpu:
        jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError as error:
        raise ValueError("JAX has already started its devices; start the command in a new process") from error


def _missing(flags: Sequence[str]) -> list[str]:
    """Returns the flags that GPUs need and that `flags` does not contain."""
    missing = []
    for flag in GPU_FLAGS:
        name, _, value = flag.partition("=")
        given = [other for other in flags if other.partition("=")[0] == name]
        if any(other.partition("=")[2] not in ("", value) for other in given):
            raise ValueError(f"XLA_FLAGS contains {given[0]}, but twins need {flag}; remove the wrong flag")
        if not given:
            missing.append(flag)
    return missing


def check_deterministic(environment: Mapping[str, Any]) -> None:
    """Raises ValueError for GPUs with nondeterministic kernels, on which healthy twins would differ."""
    if environment["platform"] == "gpu" and (missing := _missing(environment["xla_flags"].split())):
        raise ValueError(
            f"XLA_FLAGS lacks {missing[0]}, without which a healthy GPU is not deterministic; "
            "call sdc.records.prepare(cpu_devices=1) before JAX starts its devices"
        )


def environment() -> dict[str, Any]:
    """Returns the environment of this process; results are comparable bit for bit if their environments are equal.

    Returns:
        Versions, devices, flags and options, as JSON. Calling this function starts the devices.
    """
    import jax
    from jax.extend import backend

    device = jax.local_devices()[0]
    # Kernels for a CPU are compiled for its instruction set, and split over the threads of a pool.
    processor = version_in(text_of("/proc/cpuinfo"), r"^(?:model name|Model).*?:[ \t]*(.*?)[ \t]*$")
    host = {
        "processor": platform.processor() if processor is None else processor,
        "processors": os.cpu_count(),
        "cpu_threads": os.environ.get(THREADS),
    }
    return {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "platform": device.platform,
        "platform_version": backend.get_backend().platform_version,
        "device_kind": device.device_kind,
        "local_devices": jax.local_device_count(),
        "machine": platform.machine(),
        **(host if device.platform == "cpu" else {}),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "options": {name: str(getattr(jax.config, name)) for name in OPTIONS},
    }


def program_fingerprint(lowered: "jax.stages.Lowered") -> str:
    """Returns the SHA-256 of a lowered program's StableHLO text, as 64 hexadecimal digits, equal for equal programs.

    Args:
        lowered: the lowered program, as `jax.jit(step).lower(...)` returns it.
    """
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


class EnvironmentDifference(NamedTuple):
    """One difference between descriptions.

    Attributes:
        key: the key whose values differ, with dots between the levels of the descriptions.
        values: the value of this key in each description, or `"nothing"` if the key is missing.
    """

    key: str
    values: tuple[Any, ...]

    def describe(self, labels: Sequence[str] | None = None) -> str:
        """Returns a sentence with the key, the first value and all values that differ from it, with their labels."""
        names = labels or [f"process {number} has" for number in range(len(self.values))]
        pairs = list(zip(names, self.values, strict=True))
        shown = [pairs[0], *(pair for pair in pairs[1:] if pair[1] != pairs[0][1])]
        return f"{self.key}: " + ", ".join(f"{name} {value}" for name, value in shown)


def differences(descriptions: Sequence[Mapping[str, Any]]) -> tuple[EnvironmentDifference, ...]:
    """Returns the differences between nested mappings, such as the environments of processes, sorted by key."""
    flat = [_flatten("", description) for description in descriptions]
    # A missing mapping is reported through the entries of the others.
    above = {key[:dot] for each in flat for key in each for dot, sign in enumerate(key) if sign == "."}
    flat = [{key: value for key, value in each.items() if value is not None or key not in above} for each in flat]
    rows = {key: [description.get(key, "nothing") for description in flat] for key in sorted(set().union(*flat))}
    return tuple(
        EnvironmentDifference(key, tuple(values)) for key, values in rows.items() if any(v != values[0] for v in values)
    )


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        name: leaf
        for key, inner in value.items()
        for name, leaf in _flatten(f"{prefix}.{key}" if prefix else str(key), inner).items()
    }
