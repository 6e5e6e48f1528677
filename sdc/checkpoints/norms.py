"""How far a block of a state moved since it was last saved.

A distance is a function `(new, old) -> distances` of two arrays of parameters that gives one number for each row, not
negative. Those of a block's rows are added up. Blocks are ranked by that sum against their size.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

Distance: TypeAlias = Callable[[Array, Array], Array]


def squared_distance(new: Float[Array, "rows *rest"], old: Float[Array, "rows *rest"]) -> Float32[Array, " rows"]:
    """Of each row ||new - old||_2^2: what a failure would add to the perturbation ||delta||^2 of theorem 3.2.

    Qiao, Aragam, Zhang, Xing: Fault Tolerance in Iterative-Convergent Machine Learning, ICML 2019, section 4.2.
    """
    same = (new == old) | ((new != new) & (old != old))  # of infinities and of no numbers, too
    moved = jnp.where(same, 0, jnp.abs(new - old)).astype(jnp.float32)
    return jnp.sum(jnp.square(moved), axis=tuple(range(1, moved.ndim)))


def total_variation(lengths: Float[Array, " rows"] | None = None) -> Distance:
    """Total variation of each row's distribution, times its length: the paper's distance for topics of documents.

        length_d * 1/2 * sum_k |new_dk / sum_k new_dk - old_dk / sum_k old_dk|

    Args:
        lengths: of the documents; 1 by default.
    """

    def distance(new: Float[Array, "rows topics"], old: Float[Array, "rows topics"]) -> Float32[Array, " rows"]:
        p, q = (_distribution(x.astype(jnp.float32)) for x in (new, old))
        apart = 0.5 * jnp.sum(jnp.abs(p - q), axis=tuple(range(1, p.ndim)))
        return apart if lengths is None else apart * lengths.astype(jnp.float32)

    return distance


def _distribution(x: Float32[Array, "rows *topics"]) -> Float32[Array, "rows *topics"]:
    total = jnp.sum(x, axis=tuple(range(1, x.ndim)), keepdims=True)
    return x / jnp.where(total == 0, jnp.float32(1), total)
