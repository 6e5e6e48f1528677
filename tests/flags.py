"""Options of XLA for tests, which compile far more than they compute: with little optimization, they take half the
time."""

import os

import jax

QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):  # XLA aborts if an option is unknown
    QUICK.append("--xla_cpu_use_fusion_emitters=false")


def compile_quickly() -> None:
    """Sets these options for this process, before JAX starts, and for the processes that it starts, so that they find
    compiled programs in its cache; `make test-optimized` compiles with full optimization."""
    if "SDC_OPTIMIZED" not in os.environ:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK]).strip()
