"""Operations for children of the doctor's tests: some that differ by construction, and some whose bits flags decide."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdc.burnin.workloads.arrays import normal
from sdc.train.doctor.operations import Built, Operation, collective, single

COUNTER = itertools.count()
FIXING = "--xla_cpu_enable_fast_math=false"
"""A setting that the doctor tries: it makes `unless set` repeat itself."""


def seeded(_: Mapping[str, Any]) -> list[Operation]:
    """One that repeats itself, and several that do not, each for another reason."""
    fixed = FIXING in os.environ.get("XLA_FLAGS", "").split()
    return [
        single("steady", lambda x: x * 2 + 1, lambda: normal((9,), "float32", 1)),
        single("counter", _counted, lambda: np.float32(0)),
        single("process", lambda x: x + 1, lambda: np.uint32(os.getpid())),
        single("unless set", lambda x: x + 1, lambda: np.frombuffer(bytes(4) if fixed else os.urandom(4), np.uint32)),
        collective("sum", lambda row: jax.lax.psum(row, "devices"), 100),
        Operation("order", _ordered, several=True),
    ]


def flagged(_: Mapping[str, Any]) -> list[Operation]:
    """Bits that the size of the thread pool, fast mathematics, left out roundings and options decide."""

    def floats(*shape: int, seed: int) -> Callable[[], np.ndarray]:
        return lambda: normal(shape, "float32", seed)

    return [
        single("steady", lambda x: x * 2, floats(9, seed=1)),
        single("product", lambda x, y: x.T @ y, floats(4096, 64, seed=3), floats(4096, 64, seed=4)),
        single(
            "sum",
            lambda x, y: (x * np.float32(1e3) + y) - x * np.float32(1e3),
            floats(999, seed=5),
            floats(999, seed=6),
        ),
        single("roundings", _rounded, floats(999, seed=7)),
        single("types", lambda x: x * 2, lambda: normal((99,), "float64", 8)),
    ]


def broken(_: Mapping[str, Any]) -> list[Operation]:
    """One that runs, and one that does not."""

    def refuse(devices: Sequence[jax.Device]) -> Built:
        raise RuntimeError("no such unit")

    return [seeded({})[0], Operation("refused", refuse)]


def _counted(x: Any) -> Any:
    return x + jax.pure_callback(lambda: np.float32(next(COUNTER)), jax.ShapeDtypeStruct((), np.float32))


def _ordered(devices: Sequence[jax.Device]) -> Built:
    return Built(lambda x: x + 1, (np.uint32(devices[0].id),))


def _rounded(x: Any) -> Any:
    y = x.astype(jnp.bfloat16)
    return ((y * jnp.bfloat16(1.1) + jnp.bfloat16(0.3)) * jnp.bfloat16(0.7)).astype(jnp.float32)
