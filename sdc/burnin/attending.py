"""Attention: two matrix products with a softmax between them, as models have it; the products are checked too."""

import functools
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from .data import make_floats
from .registry import Request
from .workload import Workload

HEADS, DEPTH = 2, 32


def attend(
    q: Float[Array, "heads length depth"], k: Float[Array, "heads length depth"], v: Float[Array, "heads length depth"]
) -> Float32[Array, "heads length depth"]:
    """Causal attention; scores and weights are in float32, the factors of the products in the type of the data."""
    scores = jnp.einsum("htd,hsd->hts", q, k, preferred_element_type=jnp.float32) * (1 / math.sqrt(q.shape[-1]))
    length = q.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), jnp.bool_)), scores, -1e30)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.einsum("hts,hsd->htd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)


def build(request: Request) -> Iterator[Workload]:
    """Causal attention in each type."""
    length = request.level.positions
    sizes = (HEADS, length, DEPTH)
    for dtype in request.dtypes:
        program = f"attention/{dtype}/{HEADS}x{length}x{DEPTH}"
        yield Workload(
            name=f"{program}/normal",
            family="attention",
            dtype=dtype,
            data="normal",
            sizes=sizes,
            program=program,
            inputs=functools.partial(operands, sizes, dtype, request.seed),
            run=attend,
            elements=math.prod(sizes),
            work=4.0 * HEADS * length * length * DEPTH,
            seed=request.seed,
            checked=True,
        )


def operands(sizes: tuple[int, int, int], dtype: str, seed: int) -> tuple[Float[np.ndarray, "heads length depth"], ...]:
    """Queries, keys and values."""
    q, k, v = make_floats("normal", (3, *sizes), dtype, seed)
    return q, k, v
