"""Arithmetic that rounds: matrix products, attention, and functions, which the host computes with other bits.

Matrix products are square, with odd sides, and thin; their sums are compared unrounded, and checked by checksums.
Attention is two products with a softmax between them, as models have it. Functions use units of a device and libraries
of a compiler that products do not touch.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .arrays import make_floats
from .registry import FamilyRequest
from .workload import Workload

HEADS, DEPTH = 2, 32


class MatrixProduct(Workload):
    """A product of two matrices in float32: what a narrow type rounds away would hide errors."""

    def inputs(self) -> tuple[Float[np.ndarray, "m k"], Float[np.ndarray, "k n"]]:
        m, k, n = self.sizes
        a = make_floats(self.data, (m, k), self.dtype, 2 * self.seed)
        return a, make_floats(self.data, (k, n), self.dtype, 2 * self.seed + 1)

    def run(self, a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float32[Array, "m n"]:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)


def build_matrix(request: FamilyRequest) -> Iterator[Workload]:
    """Normal data in each shape, and all other kinds in the square one."""
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


class CausalAttention(Workload):
    """Causal attention; scores and weights are in float32, the factors of the products in the type of the data."""

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


def build_attention(request: FamilyRequest) -> Iterator[Workload]:
    """Causal attention in each type."""
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
    """A positive number, nowhere near zero."""
    return jnp.abs(x) + jnp.asarray(0.25, x.dtype)


def _inside(x: Any) -> Any:
    """A number between -1 and 1."""
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
class Functions(Workload):
    """Each function of a group, of the same numbers."""

    group: str

    def inputs(self) -> tuple[Float[np.ndarray, "n"]]:
        return (make_floats(self.data, self.sizes, self.dtype, self.seed),)

    def run(self, x: Float[Array, "n"]) -> dict[str, Float[Array, "n"]]:
        return {name: function(x) for name, function in GROUPS[self.group].items()}


def build_functions(request: FamilyRequest) -> Iterator[Workload]:
    """Each group of functions; exponentials take every kind of data."""
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
