"""Checks that run no operation: properties of an environment that may affect bits (processors, settings, libraries)."""

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sdc.records import GPU_FLAGS, THREADS
from sdc.schema import Environment

from .results import Check, HostPart, Outcome

# Processor features by which compilers choose instructions
_FEATURES = re.compile(r"sse4_[12]|ssse3|avx\w*|fma|f16c|bmi[12]|amx_\w+|asimd\w*|sve\w*|sme\w*|bf16|i8mm|fphp")
CPUINFO, SIBLINGS = "/proc/cpuinfo", "/sys/devices/system/cpu/smt/active"
QUOTAS = (
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/cpu/cpu.cfs_quota_us",
    "/sys/fs/cgroup/cpu/cpu.cfs_period_us",
)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def describe_host(read: Callable[[str], str | None] = _read) -> HostPart:
    """Describes the host's processors. The control group's limit on processor time is read from version 2 or version 1
    of the control-group interface."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", read(CPUINFO) or "", re.MULTILINE)
    times = (read(QUOTAS[0]) or "").split()
    if len(times) != 2 or not all(map(str.isdecimal, times)):
        times = [(read(path) or "").strip() for path in QUOTAS[1:]]
    quota, period = (int(text) if text.isdecimal() else 0 for text in times)
    return HostPart(
        cores=os.cpu_count() or 1,
        allowed=len(os.sched_getaffinity(0)),
        quota=quota / period if times[0].isdecimal() and period else None,
        features=sorted(word for word in set(found[1].split() if found else ()) if _FEATURES.fullmatch(word)),
        siblings={"1": True, "0": False}.get((read(SIBLINGS) or "").strip()),
    )


FLAGS = "XLA_FLAGS"
# Variables that JAX, XLA and the libraries below them read
_DECIDE = re.compile(
    r"NPROC|LIBTPU_INIT_ARGS|LD_PRELOAD|GLIBC_TUNABLES|NVIDIA_TF32_OVERRIDE|"
    r"(JAX|XLA|NCCL|RCCL|CUBLAS|CUBLASLT|CUDNN|CUDA|TF|TSL|OMP|ROCBLAS|HIPBLASLT|MIOPEN)_\w+"
)
# Variables among these that set locations or logging and do not affect bits
_ASIDE = re.compile(
    r"XLA_FLAGS|\w*_(DIR|PATH|FILE|HOME|LOG_LEVEL|MIN_VLOG_LEVEL|VISIBLE_DEVICES|IFNAME)|NCCL_DEBUG\w*|NCCL_SOCKET\w*|"
    r"JAX_(COORDINATOR|COMPILATION_CACHE|PERSISTENT_CACHE|ENABLE_COMPILATION_CACHE|LOG|DUMP|TRACEBACK)\w*|XLA_PYTHON_CLIENT_\w+|"
    r"CUDA_(VERSION|PKG)\w*|NCCL_VERSION|TF_(ENABLE_ONEDNN_OPTS)|JAX_SDC_\w+"
)
# Variables that select devices, which must stay the same in a comparison
PLACES = frozenset(
    {"--xla_force_host_platform_device_count", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "JAX_PLATFORM_NAME"}
)


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that may affect bits, sorted by name; a flag without a value has an empty string."""
    found = {name: value for name, value in environ.items() if _DECIDE.fullmatch(name) and not _ASIDE.fullmatch(name)}
    return dict(sorted({**found, **_flags(environ)}.items()))


def changed(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Returns an environment with some settings changed; None removes a setting."""
    flags, found = _flags(environ), dict(environ)
    for name, value in changes.items():
        place = flags if name.startswith("--") else found
        if value is None:
            place.pop(name, None)
        else:
            place[name] = value
    text = " ".join(f"{name}={value}" if value else name for name, value in flags.items())
    if text or FLAGS in found:
        found[FLAGS] = text
    return found


def lines(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> list[str]:
    """Returns shell lines that make the changes, with the complete value of `XLA_FLAGS`."""
    found = []
    if any(name.startswith("--") for name in changes):
        text = changed(environ, changes)[FLAGS]
        found.append(f'export {FLAGS}="{text}"' if text else f"unset {FLAGS}")
    for name, value in changes.items():
        if not name.startswith("--"):
            found.append(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    return found


def shown(name: str, value: str | None) -> str:
    return f"no {name}" if value is None else f"{name}={value}" if value else name


def _flags(environ: Mapping[str, str]) -> dict[str, str]:
    words = (word.partition("=") for word in environ.get(FLAGS, "").split())
    return {name: value for name, _, value in words}


CACHE = "JAX_COMPILATION_CACHE_DIR"
SET_FOR_GPUS: Mapping[str, str] = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0",
}  # fmt: skip
SET_FOR_SEVERAL_GPUS: Mapping[str, str] = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
# Flags that let collectives overlap with other work, and therefore run in another order
SCHEDULED = ("--xla_gpu_enable_latency_hiding_scheduler", "--xla_gpu_enable_highest_priority_async_stream")
# Defaults of JAX's options that change results
PLAIN = {
    "jax_default_matmul_precision": "None", "jax_default_prng_impl": "threefry2x32", "jax_enable_x64": "False",
    "jax_threefry_partitionable": "True",
}  # fmt: skip


class Scene(NamedTuple):
    """The environment under examination."""

    environ: Mapping[str, str]
    environment: Environment | None  # environment of the first process; None if it could not be run
    machine: HostPart

    @property
    def platform(self) -> str | None:
        return None if self.environment is None else self.environment.platform

    @property
    def devices(self) -> int:
        return (self.environment and self.environment.local_devices) or 1

    @property
    def pool(self) -> int:
        """Number of threads of XLA's pool on a CPU: NPROC if set, otherwise one per available processor; at least one
        per device."""
        given = self.environ.get(THREADS, "")
        return max(int(given) if given.isdecimal() and int(given) > 0 else self.machine.allowed, self.devices)


GPU_SETTINGS = {name: value for name, _, value in (flag.partition("=") for flag in GPU_FLAGS)}


def candidates(scene: Scene) -> dict[str, str | None]:
    """Returns changes that may make an operation deterministic: the settings known for the platform, and the removal of
    every other setting."""
    needed: dict[str, str | None] = {}
    if scene.platform == "gpu":
        needed = {**GPU_SETTINGS, **SET_FOR_GPUS, **dict.fromkeys(SCHEDULED, "false")}
        needed |= SET_FOR_SEVERAL_GPUS if scene.devices > 1 else {}
    if scene.platform == "cpu":
        needed = {"--xla_cpu_enable_fast_math": "false", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false"}
    given = settings_of(scene.environ)
    away = [name for name in given if name not in needed and name not in PLACES]
    return {name: value for name, value in needed.items() if given.get(name) != value} | dict.fromkeys(away, None)


def look(scene: Scene) -> Iterator[Check]:
    """Yields the results of all checks of an environment that run no operation."""
    environ, environment, machine, platform = scene.environ, scene.environment, scene.machine, scene.platform
    given = settings_of(environ)

    def check(
        name: str, outcome: Outcome, sentence: str, causes: Iterable[str] = (), to_set: Iterable[str] = ()
    ) -> Check:
        return Check(name, "environment", outcome, sentence, [], list(causes), list(to_set))

    kernels = {
        "deterministic operations": (
            GPU_FLAGS[:2],
            "kernels with a nondeterministic order of summation may be used (scatter, cuDNN)",
        ),
        "autotuning": (
            GPU_FLAGS[2:],
            "kernels are chosen by measured time, so two hosts or two runs may choose different ones",
        ),
    }
    for name, (flags, what) in kernels.items():
        wanted = {flag: GPU_SETTINGS[flag] for flag in (each.partition("=")[0] for each in flags)}
        lacking = {flag: value for flag, value in wanted.items() if given.get(flag, "unset") not in (value, "")}
        if platform != "gpu":
            yield check(name, "not applicable", "there is no GPU")
        elif lacking:
            sentence = (
                f"{what}; the sdc commands set the flags that prevent this, but your own program must set them itself"
            )
            yield check(name, "risk", sentence, lacking, lines(environ, lacking))
        else:
            yield check(name, "ok", f"{' and '.join(flags)} {'is' if len(flags) == 1 else 'are'} set")
    if platform != "gpu":
        yield check("cuBLAS and TF32", "not applicable", "there is no GPU")
    else:
        lacking = {key: value for key, value in SET_FOR_GPUS.items() if key not in given}
        values = ", ".join(shown(key, given.get(key)) for key in SET_FOR_GPUS)
        sentence, outcome = f"{values}: keep these equal on all hosts", _noted(lacking)
        yield check("cuBLAS and TF32", outcome, sentence, (), lines(environ, lacking))
    if platform != "gpu" or scene.devices < 2:
        yield check("NCCL", "not applicable", "there is only one GPU")
    else:
        lacking = {key: value for key, value in SET_FOR_SEVERAL_GPUS.items() if key not in given}
        sentence = (
            "NCCL chooses its algorithm, protocol and rings by topology and message size, so hosts with different "
            "wiring add numbers in different orders"
            if lacking
            else "NCCL's algorithm and protocol are set, but its rings still depend on the topology"
        )
        yield check("NCCL", _noted(lacking), sentence, lacking, lines(environ, lacking))
        set_so = [shown(name, given[name]) for name in SCHEDULED if name in given]
        said = "the defaults of XLA apply, and they depend on its version"
        said = f"{', '.join(set_so)}: keep these equal on all hosts" if set_so else said
        yield check("asynchronous collectives", _noted(set_so), said, set_so)

    pool = "size of the thread pool"
    if platform != "cpu":
        yield check(pool, "not applicable", "the devices are not CPUs")
    elif environ.get(THREADS):
        yield check(pool, "ok", f"{THREADS}={environ[THREADS]}: {scene.pool} threads on any host")
    else:
        why = f"{machine.cores} processors"
        if machine.allowed != machine.cores:
            why += f", of which this process may use {machine.allowed} (affinity)"
        if machine.quota is not None and machine.quota < machine.allowed:
            why += f", limited to the CPU time of {machine.quota:g} processors (by a control group, which XLA ignores)"
        sentence = (
            f"{THREADS} is not set, so the host determines the number of threads: {scene.pool} for {why}. The number "
            f"may differ on other hosts or with other affinity masks; the sdc commands set {THREADS} themselves"
        )
        yield check(pool, "information", sentence, [THREADS], lines({}, {THREADS: str(scene.pool)}))

    if environment is None:
        for name in ("options of JAX", "libraries"):
            yield check(name, "could not be run", "no process reported its environment")
    else:
        options = {key: value for key, value in environment.options.items() if PLAIN.get(key, value) != value}
        said = ", ".join(f"{key}={value}" for key, value in options.items())
        said = (
            f"{said} (not the default); keep these options equal on all hosts"
            if options
            else "all options that change results have their default values"
        )
        yield check("options of JAX", _noted(options), said, options)
        packages = environment.packages
        if len({packages.get(name, "").rpartition(".")[0] for name in ("jax", "jaxlib")}) > 1:
            said = (
                f"jax {packages.get('jax')} with jaxlib {packages.get('jaxlib')}: keep both versions equal on all hosts"
            )
            yield check("libraries", "information", said, ["jax", "jaxlib"])
        else:
            there = (f"{name} {version}" for name, version in packages.items() if version != "not installed")
            said = f"{', '.join(there)}; {environment.platform_version}"
            yield check("libraries", "ok", said[:300].replace("\n", " "))
    rounding, flag = "rounding to bfloat16", "--xla_allow_excess_precision"
    if given.get(flag, "").lower() in ("false", "0"):
        yield check(rounding, "ok", f"{shown(flag, given[flag])}: every operation is rounded to its type")
    else:
        said = f"{flag}=false is not set, so XLA may omit roundings: observing a bfloat16 step may move its results"
        yield check(rounding, "information", said, [flag])
    known = {THREADS, *SET_FOR_GPUS, *SET_FOR_SEVERAL_GPUS, *SCHEDULED, *GPU_SETTINGS}
    others = {name: value for name, value in given.items() if name not in known}
    said = f"{', '.join(shown(*each) for each in others.items())}: keep these equal on all hosts"
    said = said if others else "no other variable or flag that may affect bits is set"
    yield check("other settings", _noted(others), said, others)
    cache, place = "shared compilation cache", environ.get(CACHE)
    if place:
        said = f"{CACHE}={place}: programs compiled on another kind of host may be used. Give each kind of host"
        yield check(cache, "information", f"{said} its own folder", [CACHE], [f'export {CACHE}="{place}/KIND-OF-HOST"'])
    else:
        yield check(cache, "ok", f"{CACHE} is not set, so no program compiled elsewhere is used")
    if platform == "cpu":
        vectors = ("avx512f", "avx2", "avx", "sve", "asimd")
        widest = next((name for name in vectors if name in machine.features), "unknown")
        said = (
            f"programs are compiled for this processor (widest vectors: {widest}); hosts that lack any of its "
            f"{len(machine.features)} features run different programs, with different low-order bits"
        )
        yield check("processor features", "information", said)
    else:
        yield check("processor features", "not applicable", "the devices are not CPUs")
    threading = "simultaneous multithreading"
    if machine.siblings is None:
        yield check(threading, "not applicable", "the kernel does not report whether threads share cores")
    else:
        said = "on: two logical processors share a core and its faults" if machine.siblings else "off"
        yield check(threading, "ok", f"{said}; it does not affect bits")


def _noted(what: Collection[str]) -> Outcome:
    return "information" if what else "ok"
