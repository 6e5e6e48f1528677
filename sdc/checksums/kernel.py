"""A fused product: one Pallas kernel computes a matrix product and the sums of its rows while they are in registers.

The product itself is read once more from memory when XLA sums up its rows. Here every tile of it is summed before it is
written, so that a check costs two numbers per row and tile of columns. For GPUs, by way of Triton (for TPUs see
`tpu_kernel`); on a CPU Pallas interprets it, which is for tests.
"""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Shaped

from ..program import compiled_for
from . import tpu_kernel
from ._check import Operands
from .products import Dot, Product
from .schemes import signed_weights
from .settings import Settings

ROWS, COLUMNS, TERMS = 128, 128, 64
"""Tile of the product, and terms that are summed at a time."""


def fits(product: Dot, a: Any, b: Any) -> bool:
    """Whether the kernel computes this product: rows times a matrix, in whole tiles, of bfloat16 or float16 factors."""
    (a_contracted, b_contracted), batch = product.dimensions
    if tuple(map(tuple, batch)) != ((), ()) or tuple(a_contracted) != (a.ndim - 1,) or tuple(b_contracted) != (0,):
        return False
    rows, columns = a.size // max(a.shape[-1], 1), b.size // max(b.shape[0], 1)
    tiles = rows % ROWS == 0 and columns % COLUMNS == 0 and a.shape[-1] % TERMS == 0
    narrow = a.dtype == b.dtype and a.dtype in (jnp.bfloat16, jnp.float16)
    return tiles and narrow and a.size > 0 and b.size > 0 and product.dtype == jnp.float32 and product.sharding is None


def multiply(product: Product, settings: Settings, a: Any, b: Any) -> Operands:
    """A product with its factors as they were multiplied, by the fused kernel where that is wanted and fits.

    XLA may compute an input twice, once for each fusion that uses it, and leave out a rounding to bfloat16 in one of
    them: behind the barriers, what is checked is what was multiplied, and what is consumed.
    """
    a, b = lax.optimization_barrier((a, b))
    wanted = settings.fused and settings.scheme == "two-tier" and isinstance(product, Dot)
    found = _fused(product, a, b) if wanted else None
    c, totals = (product(a, b), None) if found is None else found
    a, b, c = lax.optimization_barrier((a, b, c))
    return Operands(a, b, c, totals=totals)


def _fused(product: Any, a: Any, b: Any) -> Any:
    """A product and the sums of its rows by the kernel for the devices; None where that does not fit."""
    platform = compiled_for().platform
    if platform == "tpu":
        return tpu_kernel.product_with_totals(product, a, b) if tpu_kernel.fits(product, a, b) else None
    return product_with_totals(a, b, interpret=platform == "cpu") if fits(product, a, b) else None


def product_with_totals(
    a: Shaped[Array, "*rows k"], b: Shaped[Array, "k *columns"], *, interpret: bool = False
) -> tuple[Float[Array, "*c"], tuple[Float[Array, "*rows"], Float[Array, "*rows"]]]:
    """The product in float32, and the weighted sum and the sum of squares of each of its rows.

    Args:
        a: first factor, bfloat16 or float16; see `fits` for the shapes.
        b: second factor, of the same type.
        interpret: whether to interpret the kernel, on any device.
    """
    rows, columns = a.shape[:-1], b.shape[1:]
    depth = a.shape[-1]
    flat_a, flat_b = a.reshape(-1, depth), b.reshape(depth, -1)
    m, n = flat_a.shape[0], flat_b.shape[1]
    weights = signed_weights(n)
    partial = jax.ShapeDtypeStruct((n // COLUMNS, m), jnp.float32)
    c, weighted, squares = pl.pallas_call(
        functools.partial(_kernel, depth=depth),
        grid=(m // ROWS, n // COLUMNS),
        in_specs=[
            pl.BlockSpec((ROWS, depth), lambda i, j: (i, 0)),
            pl.BlockSpec((depth, COLUMNS), lambda i, j: (0, j)),
            pl.BlockSpec((COLUMNS,), lambda i, j: (j,)),
        ],
        out_specs=[
            pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j)),
            pl.BlockSpec((1, ROWS), lambda i, j: (j, i)),
            pl.BlockSpec((1, ROWS), lambda i, j: (j, i)),
        ],
        out_shape=[jax.ShapeDtypeStruct((m, n), jnp.float32), partial, partial],
        interpret=interpret,
        name="product_with_totals",
    )(flat_a, flat_b, weights)
    totals = (jnp.sum(weighted, axis=0).reshape(rows), jnp.sum(squares, axis=0).reshape(rows))
    return c.reshape(*rows, *columns), totals


def _kernel(a: Any, b: Any, weights: Any, c: Any, weighted: Any, squares: Any, *, depth: int) -> None:
    def add(number: Any, total: Any) -> Any:
        terms = pl.ds(number * TERMS, TERMS)
        return total + jnp.dot(a[:, terms], b[terms, :], preferred_element_type=jnp.float32)

    tile = lax.fori_loop(0, depth // TERMS, add, jnp.zeros((ROWS, COLUMNS), jnp.float32))
    c[...] = tile
    weighted[0, :] = jnp.sum(tile * weights[...][None, :], axis=1)
    squares[0, :] = jnp.sum(tile * tile, axis=1)


def time_both(size: int = 4096, times: int = 20) -> dict[str, float] | None:
    """Seconds of a bfloat16 product of this size with its sums: fused, by XLA, and the product alone by XLA.

    None where there is no kernel for the default device.
    """
    key = jax.random.key(0)
    a, b = (jax.random.normal(jax.random.fold_in(key, i), (size, size), jnp.bfloat16) for i in range(2))
    weights = signed_weights(size)
    plain = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))
    fused = functools.partial(_fused, plain)
    if jax.default_backend() == "cpu" or jax.eval_shape(fused, a, b) is None:
        return None

    def separate(a: Any, b: Any) -> Any:
        c = lax.optimization_barrier(plain(a, b))
        return c, (jnp.sum(c * weights, axis=1), jnp.sum(c * c, axis=1))

    def seconds(step: Any) -> float:
        run = jax.jit(step).lower(a, b).compile()
        jax.block_until_ready(run(a, b))
        found = []
        for _ in range(times):
            started = time.perf_counter()
            jax.block_until_ready(run(a, b))
            found.append(time.perf_counter() - started)
        return statistics.median(found)

    return {"plain": seconds(plain), "separate": seconds(separate), "fused": seconds(fused)}
