"""Reductions, exact ones and ones that round; and orderings: sorting, selecting, gathering and scattering.

Exact reductions are of whole numbers whose sums floating-point numbers hold. The host computes them, and the orderings,
bit for bit.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from .arrays import make_floats, random_words
from .registry import FamilyRequest
from .workload import Workload

ROWS = 8
LARGEST = 8
"""Elements that `top_k` returns."""


class ExactReductions(Workload):
    """Reductions of whole numbers: in whatever order they are added, the host gets the same bits."""

    def inputs(self) -> tuple[Float32[np.ndarray, "rows columns"]]:
        # -1, 0 and 1, so that sums of 2**24 of them are exact in float32, in any order.
        thirds = (random_words(self.sizes, self.seed) >> np.uint32(8)) % np.uint32(3)
        return (thirds.astype(np.float32) - np.float32(1),)

    def run(self, x: Float32[Array, "rows columns"]) -> dict[str, Any]:
        return {
            "sum": jnp.sum(x, axis=1),
            "max": jnp.max(x, axis=1),
            "min": jnp.min(x, axis=1),
            "argmax": lax.argmax(x, 1, jnp.int32),
            "cumsum": jnp.cumsum(x, axis=1),
            "all": jnp.sum(x),
        }

    def reference(self, x: Float32[np.ndarray, "rows columns"]) -> dict[str, Any]:
        return {
            "sum": x.sum(axis=1),
            "max": x.max(axis=1),
            "min": x.min(axis=1),
            "argmax": x.argmax(axis=1).astype(np.int32),
            "cumsum": np.cumsum(x, axis=1),
            "all": x.sum(),
        }


class RoundedReductions(Workload):
    """Reductions in float32 that depend on their order, which a compiled program keeps."""

    def inputs(self) -> tuple[Float[np.ndarray, "rows columns"]]:
        return (make_floats(self.data, self.sizes, self.dtype, self.seed),)

    def run(self, x: Float[Array, "rows columns"]) -> dict[str, Float32[Array, "..."]]:
        wide = x.astype(jnp.float32)
        return {
            "sum": jnp.sum(wide, axis=1),
            "columns": jnp.sum(wide, axis=0),
            "squares": jnp.sum(wide * wide, axis=1),
            "cumsum": jnp.cumsum(wide, axis=1),
            "logsumexp": logsumexp(wide, axis=1),
        }


def build_reductions(request: FamilyRequest) -> Iterator[Workload]:
    """Exact reductions once, rounded ones for each type and each kind of data."""
    columns = max(request.level.numbers // ROWS, 8)
    count = ROWS * columns
    program = f"reductions/exact/{ROWS}x{columns}"
    yield ExactReductions(
        name=f"{program}/whole",
        family="reductions",
        dtype="float32",
        data="whole",
        sizes=(ROWS, columns),
        program=program,
        elements=count + 4 * ROWS + 1,
        work=6.0 * count,
        seed=request.seed,
        exact=True,
    )
    for dtype in request.dtypes:
        for kind in request.level.data:
            program = f"reductions/{dtype}/{ROWS}x{columns}"
            yield RoundedReductions(
                name=f"{program}/{kind}",
                family="reductions",
                dtype=dtype,
                data=kind,
                sizes=(ROWS, columns),
                program=program,
                elements=count + 3 * ROWS + columns,
                work=7.0 * count,
                seed=request.seed,
            )


class Ordering(Workload):
    """Each operation that orders, of the same keys and places; of equal keys the first one comes first."""

    def inputs(self) -> tuple[Int32[np.ndarray, "n"], UInt32[np.ndarray, "n"]]:
        (count,) = self.sizes
        words = random_words((2, count), self.seed)
        keys = words[0] % np.uint32(max(count // 2, 2))  # many are equal
        return keys.astype(np.int32) - np.int32(count // 4), words[1]

    def run(self, keys: Int32[Array, "n"], at: UInt32[Array, "n"]) -> dict[str, Int32[Array, "_"]]:
        places = (at % jnp.uint32(keys.size)).astype(jnp.int32)
        top, where = lax.top_k(keys, LARGEST)
        return {
            "sort": lax.sort(keys),
            "argsort": jnp.argsort(keys, stable=True).astype(jnp.int32),
            "gather": keys[places],
            "scatter": jnp.zeros_like(keys).at[places].add(keys),
            "top": top,
            "where": where.astype(jnp.int32),
        }

    def reference(self, keys: Int32[np.ndarray, "n"], at: UInt32[np.ndarray, "n"]) -> dict[str, Int32[np.ndarray, "_"]]:
        places = (at % np.uint32(keys.size)).astype(np.int32)
        scattered = np.zeros_like(keys)
        np.add.at(scattered, places, keys)
        first = np.argsort(-keys.astype(np.int64), kind="stable")[:LARGEST]
        return {
            "sort": np.sort(keys),
            "argsort": np.argsort(keys, kind="stable").astype(np.int32),
            "gather": keys[places],
            "scatter": scattered,
            "top": keys[first],
            "where": first.astype(np.int32),
        }


def build_ordering(request: FamilyRequest) -> Iterator[Workload]:
    """One workload."""
    count = request.level.numbers
    program = f"ordering/int32/{count}"
    yield Ordering(
        name=f"{program}/random",
        family="ordering",
        dtype="int32",
        data="random",
        sizes=(count,),
        program=program,
        elements=4 * count + 2 * LARGEST,
        work=4.0 * 6 * count,
        unit="byte",
        seed=request.seed,
        exact=True,
    )
