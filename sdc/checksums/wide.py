"""Which products the backend can sum up in float32 as they are, and which only after their factors were widened.

XLA's CPU backend multiplies bfloat16 natively where it has a kernel, and has no other way to a float32 result: a
product whose axes lie otherwise fails when it runs ("Unsupported element type for DotThunk::Execute: BF16 x BF16 =
F32"). Of 967 products of random dimensions that are multiplied as they are here, none failed (jax 0.10.2, a CPU with
avx512_bf16). All others are widened first, which changes no factor; most of them would not fail.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .products import Dimensions


def multiplies(dimensions: Dimensions, a: Any, b: Any) -> bool:
    """Whether the backend can return the product of these factors in float32.

    Args:
        dimensions: as `lax.dot_general` has them.
        a, b: the factors.
    """
    if jax.default_backend() != "cpu" or jnp.bfloat16 not in (a.dtype, b.dtype):
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


def widened(dimensions: Dimensions, a: Any, b: Any, work: Any) -> tuple[Any, Any]:
    """Factors as the backend can multiply them into sums of the type `work`."""
    if multiplies(dimensions, a, b):
        return a, b
    # Behind a barrier, or XLA takes the widening back.
    left, right = lax.optimization_barrier((a.astype(work), b.astype(work)))
    return left, right
