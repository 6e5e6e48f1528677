"""Eight simulated CPU devices, strict dtype promotion and one cache of compiled programs for the whole suite."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import settings

from sdc.records.determinism import prepare

WORKER = 6 << 30  # bytes that a worker takes at most; measured: 5 to 5.7 GB

# The same examples in every run; compilation makes the first of them slow.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

# The suite compiles far more than it computes: with little optimization that takes half the time. Processes that tests
# start inherit these options, so that they find what was compiled already.
QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):  # XLA ends a process that gives it an option which it does not know
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
if "SDC_OPTIMIZED" not in os.environ:  # `make test-optimized` compiles as users do
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK]).strip()
prepare(cpu_devices=8, only_cpu=True)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(pytestconfig: pytest.Config) -> Path:
    """Compiled steps are kept between runs, and shared with the processes that tests start."""
    cache = Path(pytestconfig.rootpath) / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    return cache


@pytest.fixture(scope="session", autouse=True)
def devices_of_ones_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Burn-ins in the processes of the suite do not lock each other out."""
    folder = tmp_path_factory.mktemp("locks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdc.burnin.host.lock_folder", lambda: folder)
        yield


@pytest.fixture(scope="module", autouse=True)
def as_before() -> Iterator[None]:
    """What a command leaves in its process, which usually ends with it: a family of workloads, and how to go on."""
    yield
    runtime = sys.modules.get("sdc.tools.runtime")
    if runtime is not None:
        vars(runtime.onward).update(vars(runtime.Onward()))
    registry = sys.modules.get("sdc.burnin.workloads.workload")
    if registry is not None and "training" in registry.families():
        registry.unregister("training")


def pytest_xdist_auto_num_workers() -> int:
    """One worker for each core, if memory allows."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // WORKER))


def pytest_collection_finish() -> None:
    """Tracing makes many small objects: looking through all that was imported, time and again, takes a tenth longer."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes first: they take longest, and the last ones to be done should be short."""
    items.sort(key=lambda item: Path("tests/tools") not in item.path.relative_to(item.config.rootpath).parents)
