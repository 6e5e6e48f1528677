"""Matrix products: square, with odd sides, and thin; their sums are compared unrounded, and checked by checksums."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from .data import make_floats
from .registry import Request
from .workload import Workload


def multiply(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float32[Array, "m n"]:
    """The product in float32: what a narrow type rounds away would hide errors."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)


def build(request: Request) -> Iterator[Workload]:
    """Normal data in each shape, and all other kinds in the square one."""
    side = request.level.side
    shapes = [(side, side, side), (side + 1, side - 1, side // 2 + 1), (side // 8, 4 * side, side)]
    for dtype in request.dtypes:
        for number, (m, k, n) in enumerate(shapes):
            for kind in request.level.data if number == 0 else ("normal",):
                program = f"matrix/{dtype}/{m}x{k}x{n}"
                yield Workload(
                    name=f"{program}/{kind}",
                    family="matrix",
                    dtype=dtype,
                    data=kind,
                    sizes=(m, k, n),
                    program=program,
                    inputs=functools.partial(factors, kind, (m, k, n), dtype, request.seed),
                    run=multiply,
                    elements=m * n,
                    work=2.0 * m * k * n,
                    seed=request.seed,
                    checked=True,
                )


def factors(kind: str, sizes: tuple[int, int, int], dtype: str, seed: int) -> tuple[jax.typing.ArrayLike, ...]:
    """Both factors, m by k and k by n."""
    m, k, n = sizes
    return make_floats(kind, (m, k), dtype, 2 * seed), make_floats(kind, (k, n), dtype, 2 * seed + 1)
