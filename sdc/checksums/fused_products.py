"""Fused products: a kernel computes a matrix product and sums the rows of the product while they are in registers.

When XLA sums the rows of a product, it reads the product from memory again. Here, every tile is summed before it is
written, so the memory traffic of a check is only two numbers per row and tile of columns. On GPUs, the kernel uses
Triton. On CPUs, which only tests use, Pallas interprets the kernel.

On a TPU, a tile is summed while the matrix unit computes the next tile. The code of a tile (one product over all of its
terms, and the sums of its rows) contains no loop, so the sums fill otherwise empty instruction slots (BENCHMARKS.md).
With a loop over the terms, the kernel takes 1.2 times as long.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jaxtyping import Array, BFloat16, Float, Float32, Shaped

from ..program import Tags, compiled_for, varying
from .products import Dot, Product
from .roundoff import Settings
from .schemes import Operands, signed_weights, turned

LARGE, TALLEST = 1024, 2**14  # least number of rows and columns, and largest of rows, of products tested by columns
ROWS, COLUMNS, TERMS = 128, 128, 64  # tile of the product, and terms per iteration


def triton_fits(product: Dot, a: Any, b: Any) -> bool:
    """Returns whether the kernel can compute this product in whole tiles; it must be a product of rows and a matrix in
    bfloat16 or float16."""
    (a_contracted, b_contracted), batch = product.dimensions
    if tuple(map(tuple, batch)) != ((), ()) or tuple(a_contracted) != (a.ndim - 1,) or tuple(b_contracted) != (0,):
        return False
    rows, columns = a.size // max(a.shape[-1], 1), b.size // max(b.shape[0], 1)
    tiles = rows % ROWS == 0 and columns % COLUMNS == 0 and a.shape[-1] % TERMS == 0
    narrow = a.dtype == b.dtype and a.dtype in (jnp.bfloat16, jnp.float16)
    return tiles and narrow and a.size > 0 and b.size > 0 and product.dtype == jnp.float32 and product.sharding is None


def multiply(product: Product, settings: Settings, a: Any, b: Any, stored: Sequence[bool] = ()) -> Operands:
    """Computes a product, using the fused kernel if the kernel is enabled and fits; returns the product together with
    the factors that were multiplied.

    XLA may compute an input twice, once for each fusion that uses it, and omit a rounding to bfloat16 in one of them.
    The barriers ensure that the values that are checked, multiplied and used by the step are the same. On a TPU,
    factors that are `stored` (`Place.stored`) have none, because a barrier would copy a part of a stack of layers.
    """
    free = compiled_for().platform == "tpu" and len(stored) == 2
    left, right = stored if free else (False, False)

    def pinned(a: Any, b: Any, *others: Any) -> Any:
        kept_a, kept_b, *others = lax.optimization_barrier((None if left else a, None if right else b, *others))
        return a if left else kept_a, b if right else kept_b, *others

    a, b = pinned(a, b)
    if settings.columns and isinstance(product, Dot):
        c = product(a, b)
        a, b, c, sums = pinned(a, b, c, _totals(product, a, b, c))
        return Operands(a, b, c, totals=sums)
    wanted = settings.fused and settings.scheme == "two-tier" and isinstance(product, Dot)
    found = _fused(product, a, b) if wanted else None
    c, totals = (product(a, b), None) if found is None else found
    a, b, c = pinned(a, b, c)
    return Operands(a, b, c, totals=totals)


def sums_columns(product: Product, settings: Settings, a: Any, b: Any) -> bool:
    """Returns whether a product begins with a test of its columns (see `Settings.columns`).

    That costs two products with 128 columns instead of reading both factors, which does not pay if the product itself
    has few rows or columns.
    """
    if compiled_for().platform != "tpu" or not isinstance(product, Dot) or settings.fused or over_explicit_axes(a, b):
        return False
    narrow = a.dtype == b.dtype == jnp.bfloat16 and product.dtype == jnp.float32
    sides = product.rows(a, b), product.width(a, b)
    # Lambda grows with the number of rows, over which the matrix units sum.
    large = min(sides) >= LARGE and sides[0] <= TALLEST
    return narrow and large and settings.scheme == "two-tier" and settings.tier == 1


def over_explicit_axes(*arrays: Any) -> bool:
    """Returns whether an array is sharded over explicit axes, so that products of it may need a sharding."""
    return any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in arrays)


def _totals(product: Dot, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """Returns the weighted sums and the sums of squares of a product's columns. On a TPU, XLA's kernel for the product
    computes them, because they are sums over leading axes and no barrier lies between."""
    columns, given = turned(product, Operands(a, b, c))
    width = columns.width(given.a, given.b)
    weighted = columns.total(given.c, signed_weights(width), 1)[..., 0]
    squares = columns.total(given.c * given.c, jnp.ones(width), 1)[..., 0]
    return weighted, squares


def _fused(product: Any, a: Any, b: Any) -> Any:
    """Computes a product and the sums of its rows with the kernel for the devices; returns None if the kernel does not
    fit."""
    if (platform := compiled_for().platform) == "tpu":
        return tpu_product(product, a, b) if tpu_fits(product, a, b) else None
    return triton_product(a, b, interpret=platform == "cpu") if triton_fits(product, a, b) else None


def triton_product(
    a: Shaped[Array, "*rows k"], b: Shaped[Array, "k *columns"], *, interpret: bool = False
) -> tuple[Float[Array, "*c"], tuple[Float[Array, "*rows"], Float[Array, "*rows"]]]:
    """Returns the product in float32, and the weighted sum and the sum of squares of each of its rows."""
    rows, columns = a.shape[:-1], b.shape[1:]
    depth = a.shape[-1]
    flat_a, flat_b = a.reshape(-1, depth), b.reshape(depth, -1)
    m, n = flat_a.shape[0], flat_b.shape[1]
    partial = jax.ShapeDtypeStruct((n // COLUMNS, m), jnp.float32)
    c, weighted, squares = pl.pallas_call(
        functools.partial(_triton_kernel, depth=depth),
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
    )(flat_a, flat_b, signed_weights(n))
    totals = (jnp.sum(weighted, axis=0).reshape(rows), jnp.sum(squares, axis=0).reshape(rows))
    return c.reshape(*rows, *columns), totals


def _triton_kernel(a: Any, b: Any, weights: Any, c: Any, weighted: Any, squares: Any, *, depth: int) -> None:
    def add(number: Any, total: Any) -> Any:
        terms = pl.ds(number * TERMS, TERMS)
        return total + jnp.dot(a[:, terms], b[terms, :], preferred_element_type=jnp.float32)

    tile = lax.fori_loop(0, depth // TERMS, add, jnp.zeros((ROWS, COLUMNS), jnp.float32))
    c[...] = tile
    weighted[0, :] = jnp.sum(tile * weights[...][None, :], axis=1)
    squares[0, :] = jnp.sum(tile * tile, axis=1)


# Possible tile sizes; smaller ones take up to four times as long. The second factor is read once for each tile of rows,
# and each core of a chip needs at least one such tile.
TPU_ROWS, TPU_COLUMNS = (1024, 512), (512, 256)
# Bytes of VMEM, of at least 64 MiB, that a tile and its factors may occupy, and that the compiler may allocate.
TPU_MEMORY, TPU_LIMIT = 40 << 20, 60 << 20
# Devices with that much VMEM, on which the kernel takes at most 1.2 times as many instructions as a product.
TPU_KINDS = ("TPU v5", "TPU v5 lite", "TPU v6 lite")
TPU_LEAST = 2048  # number of terms below which a product has too few free instruction slots for the sums
LANES, PACKED = 128, 16  # number of columns of a register, and of rows of a bfloat16 register


class _Tiles(NamedTuple):
    """The tiling of a product."""

    shape: tuple[int, int]  # shape of the product
    terms: int
    sides: tuple[int, int]

    @property
    def memory(self) -> int:
        """Bytes of VMEM for double buffers of inputs and outputs, the tile, and a transposed factor."""
        rows, columns = self.sides
        factors, product, sums = 2 * self.terms * (rows + columns), 4 * rows * columns, 2 * 4 * rows * LANES
        return 2 * (factors + product + sums) + product + 2 * self.terms * rows


def tpu_fits(product: Dot, a: Any, b: Any) -> bool:
    """Returns whether the kernel can compute this product in whole tiles; its factors must be unsharded bfloat16
    matrices, with axes in any order."""
    return (device := compiled_for()).kind in TPU_KINDS and device.whole and _tiles(product, a, b) is not None


def _tiles(product: Dot, a: Any, b: Any) -> _Tiles | None:
    (over_a, over_b), (batch, _) = product.dimensions
    narrow = a.dtype == b.dtype == jnp.bfloat16 and product.dtype == jnp.float32 and product.sharding is None
    if not narrow or batch or len(over_a) != 1 or not (_joins(a, over_a[0]) and _joins(b, over_b[0])):
        return None
    terms = a.shape[over_a[0]]
    if terms < TPU_LEAST or terms % LANES:
        return None
    shape = a.size // terms, b.size // terms
    choices = (_Tiles(shape, terms, (rows, columns)) for rows in TPU_ROWS for columns in TPU_COLUMNS)
    whole = (
        one
        for one in choices
        if shape[0] % one.sides[0] == shape[1] % one.sides[1] == 0 and shape[0] > one.sides[0] and shape[1]
    )
    return next((one for one in whole if one.memory <= TPU_MEMORY), None)


def _joins(x: Any, axis: int) -> bool:
    """Returns whether a factor is a matrix, or becomes one without moving data when its leading axes are flattened."""
    return x.ndim == 2 or (x.ndim > 2 and axis == x.ndim - 1 and x.shape[-2] % PACKED == 0)


def tpu_product(
    product: Dot, a: BFloat16[Array, "*a"], b: BFloat16[Array, "*b"], *, interpret: bool = False
) -> tuple[Float32[Array, "*c"], tuple[Float32[Array, "*rows"], Float32[Array, "*rows"]]]:
    """Returns the product in float32, and the weighted sum and the sum of squares of each of its rows."""
    tiles = _tiles(product, a, b)
    assert tiles is not None, "tpu_fits() must be true"
    ((over_a,), (over_b,)), _ = product.dimensions
    rows = a.shape[:over_a] + a.shape[over_a + 1 :]
    columns = b.shape[:over_b] + b.shape[over_b + 1 :]
    a, b = varying(a, like=b), varying(b, like=a)
    (m, n), k, (side, other) = tiles
    flat_a = a.reshape(-1, a.shape[-1])
    flat_b = b.reshape(-1, b.shape[-1])
    over = int(over_a > 0), int(over_b > 0)
    block_a, block_b = _block(over[0], side, k, lambda i, j: i), _block(over[1], other, k, lambda i, j: j)
    blocks_of_sums = [pl.BlockSpec((side, LANES), lambda i, j: (i, 0))] * 2
    kind = jax.typeof(flat_a).manual_axis_type
    sums = jax.ShapeDtypeStruct((m, LANES), jnp.float32, manual_axis_type=kind)
    read = a.nbytes + m // side * b.nbytes
    call = pl.pallas_call(
        functools.partial(_tpu_kernel, over=over),
        grid=(m // side, n // other),
        in_specs=[block_a, block_b, pl.BlockSpec((1, other), lambda i, j: (0, j))],
        out_specs=[pl.BlockSpec((side, other), lambda i, j: (i, j)), *blocks_of_sums],
        out_shape=[jax.ShapeDtypeStruct((m, n), jnp.float32, manual_axis_type=kind), sums, sums],
        # Rows are distributed over the cores of a chip; the sums of a row accumulate from tile to tile.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=TPU_LIMIT),
        cost_estimate=pl.CostEstimate(flops=2 * m * n * k, bytes_accessed=read + 4 * m * n, transcendentals=0),
        interpret=interpret,
        name=Tags.KERNEL,
        metadata={Tags.PRODUCT: f"{over[0]}{over[1]}"},
    )
    with jax.enable_x64(False):  # tile indices have 32 bits on a TPU
        c, weighted, squares = call(flat_a, flat_b, varying(signed_weights(n)[None], like=flat_a))
    totals = (jnp.sum(weighted, axis=1).reshape(rows), jnp.sum(squares, axis=1).reshape(rows))
    return c.reshape(*rows, *columns), totals


def _block(over: int, side: int, terms: int, place: Callable[[Any, Any], Any]) -> Any:
    """Returns the block of a factor for a tile: all terms of some rows or columns of the factor."""
    if over:
        return pl.BlockSpec((side, terms), lambda i, j: (place(i, j), 0))
    return pl.BlockSpec((terms, side), lambda i, j: (0, place(i, j)))


def _tpu_kernel(a: Any, b: Any, weights: Any, c: Any, weighted: Any, squares: Any, *, over: tuple[int, int]) -> None:
    tile = lax.dot_general(a[...], b[...], (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)
    c[...] = tile
    first = pl.program_id(1) == 0
    sums = [jnp.where(first, 0.0, so_far[...]) for so_far in (weighted, squares)]
    for column in range(0, tile.shape[1], LANES):
        part = tile[:, column : column + LANES]
        sums = [sums[0] + part * weights[:, column : column + LANES], sums[1] + part * part]
    weighted[...], squares[...] = sums


def time_both(size: int = 4096, times: int = 20) -> dict[str, float] | None:
    """Measures the time of a bfloat16 product of this size: with sums by the fused kernel, with sums by XLA, and
    without sums.

    Returns times in seconds, or None if there is no kernel for the default device.
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
