"""What doctor reports of an environment without running anything, for platforms that are not here."""

import pytest

from sdc.records.determinism import GPU_FLAGS
from sdc.schema import Environment
from sdc.train.doctor.results import Check, HostPart
from sdc.train.doctor.surroundings import Scene, candidates, describe_host, look

MACHINE = HostPart(cores=8, allowed=2, quota=1.5, features=["avx2", "fma"], siblings=True)


def scene(platform: str | None, environ: dict[str, str], devices: int = 1, **options: str) -> Scene:
    given = {"jax_enable_x64": "False", **options}
    packages = {"jax": "0.10.2", "jaxlib": "0.10.2"}
    found = Environment(platform=platform, local_devices=devices, packages=packages, options=given)
    return Scene(environ, found if platform else None, MACHINE)


def looked(*arguments: object, **options: object) -> dict[str, Check]:
    return {check.name: check for check in look(scene(*arguments, **options))}  # type: ignore[arg-type]


def test_a_gpu_without_flags_is_a_risk_with_the_lines_that_mend_it() -> None:
    checks = looked("gpu", {"XLA_FLAGS": "--xla_a=1"}, 2)
    assert checks["autotuning"].outcome == checks["deterministic operations"].outcome == "risk"
    assert checks["autotuning"].lines == ['export XLA_FLAGS="--xla_a=1 --xla_gpu_autotune_level=0"']
    assert checks["autotuning"].causes == ["--xla_gpu_autotune_level"]
    assert checks["NCCL"].lines == ["export NCCL_ALGO=Ring", "export NCCL_PROTO=Simple", "export NCCL_NVLS_ENABLE=0"]
    assert checks["size of the thread pool"].outcome == "not applicable"
    opposite = looked("gpu", {"XLA_FLAGS": "--xla_gpu_autotune_level=4"})["autotuning"]
    assert (opposite.outcome, opposite.lines) == ("risk", ['export XLA_FLAGS="--xla_gpu_autotune_level=0"'])


def test_a_gpu_as_the_commands_set_it_up_is_none() -> None:
    environ = {"XLA_FLAGS": " ".join(GPU_FLAGS), "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NVIDIA_TF32_OVERRIDE": "1"}
    checks = looked("gpu", environ)
    assert {checks[name].outcome for name in ("autotuning", "deterministic operations", "cuBLAS and TF32")} == {"ok"}
    assert "CUBLAS_WORKSPACE_CONFIG=:16:8, NVIDIA_TF32_OVERRIDE=1" in checks["cuBLAS and TF32"].sentence
    assert checks["NCCL"].outcome == "not applicable"
    bare = looked("gpu", {"XLA_FLAGS": "--xla_gpu_deterministic_ops --xla_gpu_exclude_nondeterministic_ops"})
    assert bare["deterministic operations"].outcome == "ok"


def test_threads_that_follow_the_host_are_reported() -> None:
    check = looked("cpu", {})["size of the thread pool"]
    assert (check.outcome, check.lines) == ("information", ["export NPROC=2"])
    assert "of which this process may use 2 (affinity), limited to the CPU time of 1.5 processors" in check.sentence
    assert looked("cpu", {"NPROC": "4"})["size of the thread pool"].outcome == "ok"
    assert looked("cpu", {}, 4)["size of the thread pool"].lines == ["export NPROC=4"]


def test_options_and_caches_are_reported() -> None:
    environ = {"JAX_COMPILATION_CACHE_DIR": "/shared/cache", "OMP_NUM_THREADS": "3"}
    checks = looked("cpu", environ, 1, jax_enable_x64="True", jax_default_matmul_precision="bfloat16")
    assert checks["options of JAX"].causes == ["jax_enable_x64", "jax_default_matmul_precision"]
    assert checks["shared compilation cache"].lines == ['export JAX_COMPILATION_CACHE_DIR="/shared/cache/KIND-OF-HOST"']
    assert checks["other settings"].causes == ["OMP_NUM_THREADS"]
    assert "widest vectors: avx2" in checks["processor features"].sentence
    quiet = looked("cpu", {})
    assert {quiet[name].outcome for name in ("options of JAX", "shared compilation cache", "other settings")} == {"ok"}


@pytest.mark.parametrize(
    ("flags", "outcome"),
    [
        ("", "information"),
        ("--xla_allow_excess_precision", "information"),
        ("--xla_allow_excess_precision=false", "ok"),
    ],
)
def test_roundings_that_xla_may_omit(flags: str, outcome: str) -> None:
    check = looked("gpu", {"XLA_FLAGS": flags})["rounding to bfloat16"]
    assert check.outcome == outcome
    assert "--xla_allow_excess_precision=false" in check.sentence


def test_libraries_that_do_not_belong_together_are_reported() -> None:
    apart = scene("cpu", {})
    assert apart.environment is not None
    apart.environment.packages["jaxlib"] = "0.11.0"
    [check] = [each for each in look(apart) if each.name == "libraries"]
    assert (check.outcome, check.causes) == ("information", ["jax", "jaxlib"])


def test_nothing_is_said_of_an_environment_that_nobody_saw() -> None:
    checks = looked(None, {})
    assert checks["libraries"].outcome == checks["options of JAX"].outcome == "could not be run"


def test_what_is_tried_fits_the_platform() -> None:
    flags = "--xla_gpu_autotune_level=0 --xla_mine=1 --xla_force_host_platform_device_count=2"
    tried = candidates(scene("gpu", {"XLA_FLAGS": flags, "NCCL_ALGO": "Tree", "JAX_PLATFORMS": "cuda"}, 2))
    assert "--xla_gpu_autotune_level" not in tried  # it is set as it should be
    assert (tried["--xla_gpu_deterministic_ops"], tried["NCCL_ALGO"], tried["--xla_mine"]) == ("true", "Ring", None)
    assert not {"JAX_PLATFORMS", "--xla_force_host_platform_device_count"} & set(tried)  # another question
    assert "NCCL_PROTO" not in candidates(scene("gpu", {}, 1))
    assert "NCCL_PROTO" not in candidates(scene("cpu", {}, 2))


def test_a_host_is_read_from_the_files_of_either_kernel_interface() -> None:
    files = {
        "/proc/cpuinfo": "processor: 0\nflags\t\t: fpu avx avx2 fma avx512f syscall\n",
        "/sys/devices/system/cpu/smt/active": "1\n",
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
    found = describe_host(files.get)
    assert (found.features, found.siblings, found.quota) == (["avx", "avx2", "avx512f", "fma"], True, 1.5)
    older = {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert describe_host(older.get).quota == 2.0
    unlimited = describe_host({"/sys/fs/cgroup/cpu.max": "max 100000"}.get)
    assert (unlimited.quota, unlimited.siblings, unlimited.features) == (None, None, [])
