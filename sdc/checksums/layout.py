"""Which products the backend can sum up in float32 as they are, and which only after their axes were put in order.

XLA's CPU backend multiplies bfloat16 natively where it has a kernel, and has no other way to a float32 result: a
product whose axes lie otherwise fails when it runs ("Unsupported element type for DotThunk::Execute: BF16 x BF16 =
F32"). Of 967 products of random dimensions that are multiplied as they are here, and 300 others, none failed (jax
0.10.2, a CPU with avx512_bf16). Those others are transposed first; most of them would not need it, but it takes less
time than to widen the factors.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..program import compiled_for
from .products import Dimensions


def multiplies(dimensions: Dimensions, a: Any, b: Any) -> bool:
    """Whether the backend can return the product of these factors in float32.

    Args:
        dimensions: as `lax.dot_general` has them.
        a, b: the factors.
    """
    if compiled_for().platform != "cpu" or not a.dtype == b.dtype == jnp.bfloat16:
        return True
    contracted, batch = dimensions
    depths = [len(axes) for axes in contracted]
    leading = all(tuple(axes) == tuple(range(len(axes))) for axes in batch)
    at_an_end = [
        tuple(axes) in (tuple(range(len(outer), len(outer) + len(axes))), tuple(range(x.ndim - len(axes), x.ndim)))
        for axes, outer, x in zip(contracted, batch, (a, b), strict=True)
    ]
    rows_last = tuple(contracted[0]) != tuple(range(a.ndim - depths[0], a.ndim))
    columns = b.ndim - depths[1] - len(batch[1])
    return leading and all(at_an_end) and not (rows_last and columns > 1)


def arranged(dimensions: Dimensions, a: Any, b: Any) -> tuple[Dimensions, Any, Any]:
    """The same product, of factors whose axes lie as the backend can multiply them into sums in float32.

    Args:
        dimensions: as `lax.dot_general` has them.
        a, b: the factors.

    Returns:
        `(dimensions, a, b)`: those given where they will do. Otherwise batch axes come first, and contracted axes lie
        between the rows of `a` and the columns of `b`; the axes of the product are the same.
    """
    if multiplies(dimensions, a, b):
        return dimensions, a, b
    (left, right), (of_a, of_b) = dimensions
    rows, columns = (
        [axis for axis in range(x.ndim) if axis not in (*contracted, *batch)]
        for x, contracted, batch in ((a, left, of_a), (b, right, of_b))
    )
    # Behind a barrier, or XLA takes the transposition back.
    a, b = lax.optimization_barrier((a.transpose(*of_a, *rows, *left), b.transpose(*of_b, *right, *columns)))
    outer, depth = len(of_a), len(left)
    batch, last = tuple(range(outer)), tuple(range(a.ndim - depth, a.ndim))
    return ((last, tuple(range(outer, outer + depth))), (batch, batch)), a, b
