"""The compilers of accelerators on a machine that has none: how they start, and what devices they describe."""

import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from sdc.settings import SettingError

from ..program import Tags
from .chips import Target, find_target
from .schedules import dump_schedules

INSTALL = "pip install 'jax-sdc[targets]'"
TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # without it a second process fails on a lock file
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
GPU = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""A description in the form that XLA's compiler takes (`GpuTargetConfigProto`), with what NVIDIA publishes."""


def prepare_compilers(schedules: Path | None = None, kernel: str | None = Tags.KERNEL) -> None:
    """Sets what the compilers read when they are loaded. Call it before anything makes JAX start a device.

    Args:
        schedules: a folder into which the TPU's compiler writes the instructions of Pallas kernels, by which they are
            charged. By default one that goes away with the process.
        kernel: name of the kernel; by default this library's. Writing those of all, with None, makes compiling up to
            twice as long.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    # What was compiled for chips that are not here can be stored, but not be loaded again.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_enable_compilation_cache", False)
    os.environ.update(TPU | GPU)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "autotune_level" not in flag]
    flags += ["--xla_gpu_autotune_level=0"]  # there is nothing to try kernels on
    if (
        tools := importlib.util.find_spec("nvidia.cuda_nvcc") if importlib.util.find_spec("nvidia") else None
    ) is not None:
        flags += [f"--xla_gpu_cuda_data_dir={next(iter(tools.submodule_search_locations or ()))}"]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    given = [flag for flag in os.environ.get("LIBTPU_INIT_ARGS", "").split() if not flag.startswith("--xla_jf_dump")]
    os.environ["LIBTPU_INIT_ARGS"] = " ".join([*given, *dump_schedules(schedules, kernel)])


def check_compiler(target: Target) -> None:
    """Looks whether the compiler of a target is installed, and goes with this jax.

    Raises:
        SettingError: it is not, or does not.
    """
    gpu = target.chip.platform == "gpu"
    package = "jax-cuda12-plugin" if gpu else "libtpu"
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise SettingError(
            "target", target.name, f"needs the compiler in {package}, which is not installed; {INSTALL}"
        ) from None
    expected = importlib.metadata.version("jaxlib") if gpu else _libtpu_of_jax()
    if expected is not None and not (installed == expected or installed.startswith(expected.removesuffix("*"))):
        ours = f"jax {importlib.metadata.version('jax')}, which expects {expected}"
        raise SettingError("target", target.name, f"{package} {installed} does not go with {ours}; {INSTALL}")


def _libtpu_of_jax() -> str | None:
    """The version of libtpu that this jax asks for."""
    for line in importlib.metadata.requires("jax") or ():
        if found := re.match(r"libtpu==([\d.*]+);.*extra == .tpu.", line.replace(" ;", ";")):
            return found[1]
    return None


@functools.cache
def devices_of(name: str) -> tuple[Any, ...]:
    """The devices of a target, as the compiler describes them; nothing can run on them.

    Args:
        name: see `find_target`.

    Raises:
        SettingError: there is no such target, the compiler is not installed, or knows no such topology.

    Example:
        >>> import importlib.util
        >>> from sdc.costs import devices_of, prepare_compilers
        >>> if importlib.util.find_spec("libtpu"):  # the extra `targets`
        ...     prepare_compilers()
        ...     assert len(devices_of("v5e:2x2")) == 4
    """
    from jax.experimental import topologies

    target = find_target(name)
    check_compiler(target)
    try:
        return tuple(topologies.get_topology_desc(**_description(target)).devices)
    except Exception as error:  # of several types, by platform and version
        reason = str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ")
        raise SettingError(
            "target", name, f"the installed compiler does not know it ({reason}); give another chip or shape"
        ) from error


def _description(target: Target) -> dict[str, Any]:
    chip = target.chip
    if chip.platform == "gpu":
        return {"platform": "cuda", "target_config": H100, "topology": f"{target.slices}x1x{target.shape[0]}"}
    bounds = tuple(min(own, side) for own, side in zip(chip.host, (*target.shape, 1), strict=False))
    # v5 with both cores is what the v5p is called there
    return {
        "platform": "tpu",
        "topology_name": f"{chip.compiler}:{'x'.join(map(str, target.shape))}",
        "chip_config_name": chip.cores,
        "chips_per_host_bounds": bounds,
        "num_slices": target.slices,
    }
