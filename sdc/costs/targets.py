"""Targets of compilation: published figures of chips, compilers that run without the chips, and compiler options.

TPU kernels are charged for their own instructions, because the compiler does not estimate the cost of a Pallas kernel.
The compiler can dump the instructions of every kernel, bundle by bundle, and a bundle takes one cycle.

`v5p:2x2x4` is one TPU slice with 16 chips, and `2xv5p:2x2x4` is two such slices; `h100x8` is one host with eight GPUs,
and `2xh100x8` is two such hosts.

Sources: the Cloud TPU pages on v4, v5e, v5p, v6e and TPU7x (memory, bandwidths, peak throughput), and NVIDIA's data
sheet for the H100 SXM. Clock rates follow from the peak throughput and the number and size of the matrix units.
"""

import atexit
import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sdc._lazy import jax
from sdc.settings import SettingError

from ..program import Tags

Tool: TypeAlias = Literal["plain", "lockstep", "fingerprint", "abft", "abft_again", "witness", "inject"]


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures for a chip, per JAX device. None of them was measured.

    Attributes:
        platform: `tpu` or `gpu`.
        compiler: the compiler's name for the chip.
        memory: bytes of high-bandwidth memory.
        bandwidth: bandwidth of that memory in bytes per second.
        clock: cycles per second.
        link: bytes per second that a device sends to the next device along one axis of its slice, or to the other GPUs
            of its host.
        network: a device's share of the bandwidth of the data-center network, in bytes per second.
        latency: minimum duration of a collective in seconds: within a slice or host, and over the network.
        host: number of chips in a host along each dimension.
        cores: `megacore` if one device consists of both cores of a chip.
        devices: number of JAX devices per chip.
    """

    platform: str
    compiler: str
    memory: int
    bandwidth: float
    clock: float
    link: float
    network: float
    latency: tuple[float, float]
    host: tuple[int, ...]
    cores: str = "default"
    devices: int = 1


GIB, GB = 2**30, 1e9
NEAR = (1e-6, 3e-5)  # assumptions, as neither figure is published: 1 microsecond per hop, and 30 over the network

CHIPS = {
    "v4": Chip("tpu", "v4", 32 * GIB, 1228 * GB, 1.05e9, 100 * GB, 6.25 * GB, NEAR, (2, 2, 1), "megacore"),
    "v5e": Chip("tpu", "v5e", 16 * GIB, 819 * GB, 1.5e9, 100 * GB, 3.125 * GB, NEAR, (2, 2, 1)),
    "v5p": Chip("tpu", "v5p", 95 * GIB, 2765 * GB, 1.75e9, 200 * GB, 6.25 * GB, NEAR, (2, 2, 1), "megacore"),
    "v6e": Chip("tpu", "v6e", 32 * GIB, 1638 * GB, 1.75e9, 200 * GB, 12.5 * GB, NEAR, (2, 2, 1)),
    "7x": Chip("tpu", "tpu7x", 96 * GIB, 3690 * GB, 2.2e9, 200 * GB, 6.25 * GB, NEAR, (2, 2, 1), devices=2),
    "h100": Chip("gpu", "h100", 85_899_345_920, 3352 * GB, 1.98e9, 450 * GB, 50 * GB, (5e-6, 3e-5), (8,)),
}
"""Chips by name. A ring along one axis of a slice uses the two links of that axis: a third of all links of a 3D torus,
or half of those of a 2D torus. No figure is published for the network of v4, so the figure for v5p is used instead."""
_NAME = re.compile(
    r"(?:(?P<slices>\d{1,4})x)?(?P<chip>[a-z0-9]+?)(?::(?P<shape>\d{1,4}(?:x\d{1,4}){1,2})|x(?P<count>\d{1,4}))"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """Chips for which a program is compiled.

    Attributes:
        name: name of the target, as given.
        chip: kind of chip.
        slices: number of TPU slices or GPU hosts, connected by the data-center network.
        shape: number of chips along each dimension of a slice, or number of GPUs in a host.
    """

    name: str
    chip: Chip
    slices: int
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return self.slices * math.prod(self.shape) * self.chip.devices


def find_target(name: str) -> Target:
    """Returns the target with the given name.

    Raises:
        SettingError: there is no target with this name.

    Example:
        >>> from sdc.costs import find_target
        >>> find_target("2xv5p:2x2x4").devices
        32
    """
    found = _NAME.fullmatch(name.lower().removeprefix("tpu"))
    if found is None or found["chip"] not in CHIPS:
        known = ", ".join(f"{chip}{':...' if CHIPS[chip].platform == 'tpu' else 'x...'}" for chip in CHIPS)
        raise SettingError(
            "target", name, f"expected a target such as v5p:2x2x4, 2xv5e:4x4 or h100x8; known chips: {known}"
        )
    chip = CHIPS[found["chip"]]
    if (found["shape"] is None) is (chip.platform == "tpu"):
        example = "v5p:2x2x4" if chip.platform == "tpu" else "h100x8"
        raise SettingError("target", name, f"expected a shape, as in {example}")
    shape = tuple(int(side) for side in (found["shape"] or found["count"]).split("x"))
    slices = int(found["slices"] or 1)
    if not all(shape) or not slices:
        raise SettingError("target", name, "has no chips; give numbers of at least 1")
    return Target(name, chip, slices, shape)


INSTALL = "pip install 'jax-sdc[targets]'"
TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise, a second process fails because of a lock file
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
GPU = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
# A description of the GPU for XLA's compiler (`GpuTargetConfigProto`), with NVIDIA's published figures.
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


PASS = "final_bundles"  # the compiler's name for its last pass
_FILE = re.compile(rf"\d+-(?P<name>.+)-\d+-{PASS}\.txt")
_BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s*:", re.MULTILINE)
_GRID = re.compile(r"iteration_bounds: \(([\d, ]*)\)")
_folder: Path | None = None  # folder into which the compiler dumps the instructions of kernels


def prepare_compilers(schedules: Path | None = None, kernel: str | None = Tags.KERNEL) -> None:
    """Sets the environment variables that compilers read when they are loaded. Call this function before JAX starts a
    device.

    Args:
        schedules: a folder into which the TPU's compiler dumps the instructions of Pallas kernels, from which the cost
            of kernels is computed. The default is a temporary folder, which is removed when the process ends.
        kernel: name of the kernels to dump; by default, the name of this library's kernels. With None, all kernels are
            dumped, and compilation takes up to twice as long.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Programs for absent chips can be stored in the compilation cache, but cannot be loaded from it.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_enable_compilation_cache", False)
    os.environ.update(TPU | GPU)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "autotune_level" not in flag]
    flags += ["--xla_gpu_autotune_level=0"]  # there is no device for autotuning
    tools = importlib.util.find_spec("nvidia.cuda_nvcc") if importlib.util.find_spec("nvidia") else None
    if tools is not None:
        flags += [f"--xla_gpu_cuda_data_dir={next(iter(tools.submodule_search_locations or ()))}"]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    given = [flag for flag in os.environ.get("LIBTPU_INIT_ARGS", "").split() if not flag.startswith("--xla_jf_dump")]
    global _folder
    _folder = schedules or Path(tempfile.mkdtemp(prefix="sdc-schedules-"))
    if schedules is None:
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    given += [f"--xla_jf_dump_to={_folder}", "--xla_jf_dump_llo_text=true"]
    given += [f"--xla_jf_dump_llo_pass_label_regex={PASS}"]
    given += [] if kernel is None else [f"--xla_jf_dump_only_matching_hlo={kernel}*"]
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(given)


class Uncharged(ValueError):
    """A program contains a kernel of unknown cost, so a sum without this kernel would be too low."""


def forget_schedules() -> None:
    """Removes the compiler's dumps of other programs, whose kernels have the same names."""
    for path in [] if _folder is None else _folder.iterdir():
        path.unlink()


def schedules() -> Mapping[str, int]:
    """Returns the cycles of each kernel and fusion in the last program, or an empty mapping if `prepare_compilers` was
    not called."""
    return {} if _folder is None else read_schedules(_folder)


def read_schedules(folder: Path) -> Mapping[str, int]:
    """Returns the cycles of each kernel and fusion, by the name of the instruction.

    Every bundle counts once per iteration of the grid. The result is an upper bound, because bundles before and after
    the loop run only once.
    """
    found = {}
    for path in folder.glob(f"*-{PASS}.txt"):
        if (named := _FILE.fullmatch(path.name)) and "schedule-analysis" not in path.name:
            text = path.read_text(encoding="utf-8", errors="replace")
            grids = (math.prod(int(side) for side in re.findall(r"\d+", grid)) for grid in _GRID.findall(text))
            found[named["name"]] = len(_BUNDLE.findall(text)) * max(grids, default=1)
    return found


def check_compiler(target: Target) -> None:
    """Raises SettingError if a target's compiler is not installed, or does not match the installed version of jax."""
    gpu = target.chip.platform == "gpu"
    package = "jax-cuda12-plugin" if gpu else "libtpu"
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise SettingError(
            "target", target.name, f"needs the compiler in {package}, which is not installed; {INSTALL}"
        ) from None
    expected = importlib.metadata.version("jaxlib") if gpu else None
    for line in [] if gpu else importlib.metadata.requires("jax") or ():
        if found := re.match(r"libtpu==([\d.*]+);.*extra == .tpu.", line.replace(" ;", ";")):
            expected = found[1]
            break
    if expected is not None and not (installed == expected or installed.startswith(expected.removesuffix("*"))):
        ours = f"jax {importlib.metadata.version('jax')}, which expects {expected}"
        raise SettingError("target", target.name, f"{package} {installed} does not match {ours}; {INSTALL}")


@functools.cache
def devices_of(name: str) -> tuple[Any, ...]:
    """Returns a target's devices as the compiler describes them; programs cannot run on these devices.

    Args:
        name: name of the target (see `find_target`).

    Raises:
        SettingError: there is no such target, the compiler is not installed, or the compiler does not support the
            topology.

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
    except Exception as error:  # of a type that depends on platform and version
        reason = str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ")
        raise SettingError(
            "target",
            name,
            f"the installed compiler does not support this target ({reason}); give another chip or shape",
        ) from error


def _description(target: Target) -> dict[str, Any]:
    chip = target.chip
    if chip.platform == "gpu":
        return {"platform": "cuda", "target_config": H100, "topology": f"{target.slices}x1x{target.shape[0]}"}
    bounds = tuple(min(own, side) for own, side in zip(chip.host, (*target.shape, 1), strict=False))
    # To the compiler, a v5p is a v5 with both cores in one device.
    return {
        "platform": "tpu",
        "topology_name": f"{chip.compiler}:{'x'.join(map(str, target.shape))}",
        "chip_config_name": chip.cores,
        "chips_per_host_bounds": bounds,
        "num_slices": target.slices,
    }


Value: TypeAlias = bool | int | str
# The message of compilers about an unknown option.
UNKNOWN = re.compile(r"[Nn]o such compile option:? '?([\w.\-]+)")


def read_options(texts: Sequence[str]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SettingError("compiler_option", text, "expected NAME=VALUE")
        if name in found:
            raise SettingError("compiler_option", text, f"{name} is given twice; give it once")
        found[name] = {"true": True, "false": False}.get(value.lower(), int(value) if value.isdigit() else value)
    return found


def check_options(options: Mapping[str, Value]) -> None:
    """Compiles a small program with the options; raises SettingError if the compiler rejects an option."""
    if not options:
        return
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError as error:
        refuse_unknown(error, jax.default_backend())
        first = str(error).partition("\n")[0]
        given = " ".join(f"{name}={value}" for name, value in options.items())
        raise SettingError(
            "compiler_option", given, f"the compiler rejects this option ({first}); give another value"
        ) from error


def refuse_unknown(error: Exception, target: str) -> None:
    """Raises SettingError if a compiler's error says that an option is unknown."""
    if found := UNKNOWN.search(str(error)):
        raise SettingError(
            "compiler_option", found[1], f"the compiler of {target} has no such option; check the name"
        ) from error
