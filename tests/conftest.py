"""Sets up eight simulated CPU devices, strict dtype promotion and a shared cache of compiled programs."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import settings

from sdc.records.determinism import prepare
from tests.flags import compile_quickly

WORKER = 5 << 30  # maximum bytes of a worker with the processes that its tests start
FULL = 3 << 30  # bytes of a worker beyond which it forgets compiled programs after a file

# Every run tries the same examples. There is no deadline, because the first example compiles.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

compile_quickly()
prepare(cpu_devices=8, only_cpu=True)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(pytestconfig: pytest.Config) -> Path:
    """Keeps compiled programs between runs, and shares them with the processes that tests start."""
    cache = Path(pytestconfig.rootpath) / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    return cache


@pytest.fixture(scope="session", autouse=True)
def devices_of_ones_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives each process of the suite its own folder of locks, so that burn-ins do not exclude each other, and a ledger
    other than that of this host."""
    folder = tmp_path_factory.mktemp("locks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDC_LEDGER", str(tmp_path_factory.mktemp("ledger") / "ledger.sqlite"))
        patch.setattr("sdc.burnin.host.lock_folder", lambda: folder)
        yield


@pytest.fixture(scope="module", autouse=True)
def as_before() -> Iterator[None]:
    """Removes state that a command leaves in its process: a family of workloads, how to resume, many programs."""
    yield
    runtime = sys.modules.get("sdc.tools.runtime")
    if runtime is not None:
        vars(runtime.onward).update(vars(runtime.Onward()))
    registry = sys.modules.get("sdc.burnin.workloads.workload")
    if registry is not None and "training" in registry.families():
        registry.unregister("training")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > FULL:
        jax.clear_caches()


def pytest_xdist_auto_num_workers() -> int:
    """Returns the number of workers, if memory allows: two more than cores, because many tests wait for processes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)) + 2, memory // WORKER))


def pytest_collection_finish() -> None:
    """Excludes imported objects from garbage collection, which tracing triggers often: saves a tenth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files that start processes first: they take longest, and the last tests should be short."""
    items.sort(key=lambda item: Path("tests/tools") not in item.path.relative_to(item.config.rootpath).parents)


@pytest.fixture
def free_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the checks of a guard cost nothing, so that they run at every step however fast this machine is."""

    def free(work: Callable[[], object]) -> float:
        work()
        return 0.0

    monkeypatch.setattr("sdc.guarding.watch.seconds_of", free)
