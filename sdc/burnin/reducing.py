"""Reductions: exact ones, of whole numbers whose sums floating-point numbers hold, and ones that round."""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Float32

from .data import make_floats, random_words
from .registry import Request
from .workload import Workload

ROWS = 8


def exact(x: Float32[Array, "rows columns"]) -> dict[str, Any]:
    """Reductions of whole numbers: in whatever order they are added, the host gets the same bits."""
    return {
        "sum": jnp.sum(x, axis=1),
        "max": jnp.max(x, axis=1),
        "min": jnp.min(x, axis=1),
        "argmax": lax.argmax(x, 1, jnp.int32),
        "cumsum": jnp.cumsum(x, axis=1),
        "all": jnp.sum(x),
    }


def exact_on_host(x: Float32[np.ndarray, "rows columns"]) -> dict[str, Any]:
    """The same by NumPy."""
    return {
        "sum": x.sum(axis=1),
        "max": x.max(axis=1),
        "min": x.min(axis=1),
        "argmax": x.argmax(axis=1).astype(np.int32),
        "cumsum": np.cumsum(x, axis=1),
        "all": x.sum(),
    }


def rounded(x: Float[Array, "rows columns"]) -> dict[str, Float32[Array, "..."]]:
    """Reductions in float32 that depend on their order, which a compiled program keeps."""
    wide = x.astype(jnp.float32)
    return {
        "sum": jnp.sum(wide, axis=1),
        "columns": jnp.sum(wide, axis=0),
        "squares": jnp.sum(wide * wide, axis=1),
        "cumsum": jnp.cumsum(wide, axis=1),
        "logsumexp": logsumexp(wide, axis=1),
    }


def build(request: Request) -> Iterator[Workload]:
    """Exact reductions once, rounded ones for each type and each kind of data."""
    columns = max(request.level.numbers // ROWS, 8)
    count = ROWS * columns
    program = f"reductions/exact/{ROWS}x{columns}"
    yield Workload(
        name=f"{program}/whole",
        family="reductions",
        dtype="float32",
        data="whole",
        sizes=(ROWS, columns),
        program=program,
        inputs=functools.partial(whole, (ROWS, columns), request.seed),
        run=exact,
        elements=count + 4 * ROWS + 1,
        work=6.0 * count,
        seed=request.seed,
        reference=exact_on_host,
    )
    for dtype in request.dtypes:
        for kind in request.level.data:
            program = f"reductions/{dtype}/{ROWS}x{columns}"
            yield Workload(
                name=f"{program}/{kind}",
                family="reductions",
                dtype=dtype,
                data=kind,
                sizes=(ROWS, columns),
                program=program,
                inputs=functools.partial(operand, kind, (ROWS, columns), dtype, request.seed),
                run=rounded,
                elements=count + 3 * ROWS + columns,
                work=7.0 * count,
                seed=request.seed,
            )


def whole(shape: tuple[int, int], seed: int) -> tuple[Float32[np.ndarray, "rows columns"]]:
    """-1, 0 and 1, so that sums of 2**24 of them are exact in float32, in any order."""
    return (((random_words(shape, seed) >> np.uint32(8)) % np.uint32(3)).astype(np.float32) - np.float32(1),)


def operand(kind: str, shape: tuple[int, int], dtype: str, seed: int) -> tuple[Float[np.ndarray, "rows columns"]]:
    """The numbers."""
    return (make_floats(kind, shape, dtype, seed),)
