"""Eight simulated CPU devices, strict dtype promotion and a compilation cache for the whole suite."""

import os
from pathlib import Path

import jax
import pytest
from hypothesis import settings

# The same examples in every run; compilation makes the first of them slow.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

# The suite compiles far more than it computes. The commands in tests/tools run as people run them, fully optimized.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(pytestconfig: pytest.Config) -> Path:
    """Compiled steps are kept between runs, and shared with the processes that tests start."""
    cache = Path(pytestconfig.rootpath) / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    return cache


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes first: they take longest, and the last ones to be done should be short."""
    items.sort(key=lambda item: Path("tests/tools") not in item.path.relative_to(item.config.rootpath).parents)
