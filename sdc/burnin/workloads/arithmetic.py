"""Arithmetic workloads: matrix products, attention, functions, exact and rounded reductions, and orderings.

Matrix products have square, odd-sized and thin shapes. Their float32 sums are compared between devices, and checksums
check the products as well. Attention consists of two matrix products with a softmax between them, as in models.
Functions use hardware units and compiler libraries that matrix products do not use. Exact reductions add integers whose
sums can be represented exactly by floating-point numbers. For exact reductions and orderings (sorting, selecting,
gathering, scattering), the host computes the correct bits.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from .arrays import make_floats, random_words
from .workload import BurninWorkload, FamilyRequest

HEADS, DEPTH = 2, 32


class MatrixProduct(BurninWorkload):
    """A matrix product with results in float32, because rounding to a narrow type could hide errors."""

    def inputs(self) -> tuple[Float[np.ndarray, "m k"], Float[np.ndarray, "k n"]]:
        m, k, n = self.sizes
        a = make_floats(self.data, (m, k), self.dtype, 2 * self.seed)
        return a, make_floats(self.data, (k, n), self.dtype, 2 * self.seed + 1)

    def run(self, a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float32[Array, "m n"]:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)


def build_matrix(request: FamilyRequest) -> Iterator[BurninWorkload]:
    """Yields matrix products of each shape with normal data, and square products with every other kind of data."""
    side = request.level.side
    shapes = [(side, side, side), (side + 1, side - 1, side // 2 + 1), (side // 8, 4 * side, side)]
    for dtype in request.dtypes:
        for number, (m, k, n) in enumerate(shapes):
            for kind in request.level.data if number == 0 else ("normal",):
                program = f"matrix/{dtype}/{m}x{k}x{n}"
                yield MatrixProduct(
                    name=f"{program}/{kind}",
                    family="matrix",
                    dtype=dtype,
                    data=kind,
                    sizes=(m, k, n),
                    program=program,
                    elements=m * n,
                    work=2.0 * m * k * n,
                    seed=request.seed,
                    checked=True,
                )


class CausalAttention(BurninWorkload):
    """Causal attention with scores and weights in float32; the factors of its products have the dtype of the data."""

    def inputs(self) -> tuple[Float[np.ndarray, "heads length depth"], ...]:
        q, k, v = make_floats(self.data, (3, *self.sizes), self.dtype, self.seed)
        return q, k, v

    def run(
        self,
        q: Float[Array, "heads length depth"],
        k: Float[Array, "heads length depth"],
        v: Float[Array, "heads length depth"],
    ) -> Float32[Array, "heads length depth"]:
        scores = jnp.einsum("htd,hsd->hts", q, k, preferred_element_type=jnp.float32) * (1 / math.sqrt(q.shape[-1]))
        length = q.shape[1]
        scores = jnp.where(jnp.tril(jnp.ones((length, length), jnp.bool_)), scores, -1e30)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return jnp.einsum("hts,hsd->htd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)


def build_attention(request: FamilyRequest) -> Iterator[BurninWorkload]:
    length = request.level.positions
    sizes = (HEADS, length, DEPTH)
    for dtype in request.dtypes:
        program = f"attention/{dtype}/{HEADS}x{length}x{DEPTH}"
        yield CausalAttention(
            name=f"{program}/normal",
            family="attention",
            dtype=dtype,
            data="normal",
            sizes=sizes,
            program=program,
            elements=math.prod(sizes),
            work=4.0 * HEADS * length * length * DEPTH,
            seed=request.seed,
            checked=True,
        )


Function = Callable[[Any], Any]


def _size(x: Any) -> Any:
    return jnp.abs(x) + jnp.asarray(0.25, x.dtype)


def _inside(x: Any) -> Any:
    return x / (jnp.abs(x) + jnp.asarray(1, x.dtype))


GROUPS: Mapping[str, Mapping[str, Function]] = {
    "exponentials": {
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "log": lambda x: jnp.log(_size(x)),
        "log1p": lambda x: jnp.log1p(_size(x)),
        "logistic": lax.logistic,
    },
    "trigonometric": {
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "tanh": jnp.tanh,
        "atan2": lambda x: jnp.arctan2(x, _size(x)),
    },
    "roots": {
        "sqrt": lambda x: jnp.sqrt(_size(x)),
        "rsqrt": lambda x: lax.rsqrt(_size(x)),
        "cbrt": jnp.cbrt,
        "pow": lambda x: lax.pow(_size(x), x),
        "divide": lambda x: x / _size(x),
    },
    "special": {
        "erf": lax.erf,
        "erf_inv": lambda x: lax.erf_inv(_inside(x)),
        "lgamma": lambda x: lax.lgamma(_size(x)),
        "digamma": lambda x: lax.digamma(_size(x)),
    },
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Functions(BurninWorkload):
    """All functions of a group, applied to the same numbers."""

    group: str

    def inputs(self) -> tuple[Float[np.ndarray, "n"]]:
        return (make_floats(self.data, self.sizes, self.dtype, self.seed),)

    def run(self, x: Float[Array, "n"]) -> dict[str, Float[Array, "n"]]:
        return {name: function(x) for name, function in GROUPS[self.group].items()}


def build_functions(request: FamilyRequest) -> Iterator[BurninWorkload]:
    """Yields a workload for each group of functions and, for exponentials, one for every kind of data."""
    count = request.level.numbers
    for dtype in request.dtypes:
        for group, functions in GROUPS.items():
            for kind in request.level.data if group == "exponentials" else ("normal",):
                program = f"functions/{dtype}/{group}/{count}"
                yield Functions(
                    name=f"{program}/{kind}",
                    family="functions",
                    dtype=dtype,
                    data=kind,
                    sizes=(count,),
                    program=program,
                    elements=count * len(functions),
                    work=float(count * len(functions)),
                    seed=request.seed,
                    group=group,
                )


ROWS = 8
LARGEST = 8  # elements that `top_k` returns


class ExactReductions(BurninWorkload):
    """Reductions of integers, whose bits are independent of the order of summation, so the host can compute them."""

    def inputs(self) -> tuple[Float32[np.ndarray, "rows columns"]]:
        # -1, 0 and 1, so that sums of up to 2**24 of them are exact in float32, in any order.
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


class RoundedReductions(BurninWorkload):
    """Reductions in float32 that depend on the order of summation, which is fixed in a compiled program."""

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


def build_reductions(request: FamilyRequest) -> Iterator[BurninWorkload]:
    """Yields exact reductions once, and rounded reductions for each dtype and kind of data."""
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


class Ordering(BurninWorkload):
    """All ordering operations, applied to the same keys and indices; equal keys keep their order."""

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


def build_ordering(request: FamilyRequest) -> Iterator[BurninWorkload]:
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
    )
