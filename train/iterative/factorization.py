"""Matrix factorization by alternating least squares."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .protocol import Iterative, State, rows_of
from .ratings import Ratings


def matrix_factorization(ratings: Ratings, *, factors: int = 20, decay: float = 0.1) -> Iterative:
    """Factors a matrix of which some entries are known; rows of L and columns of R are the blocks.

    Qiao et al., ICML 2019, section 5.1 and appendix C; both begin with uniform numbers of [0, 1]:

        l(L, R) = sum over known (u, i) of (r_ui - L_u . R_i)^2 + decay (||L||^2 + ||R||^2)

    An iteration solves for L with R as it is, and then for R: (sum_i R_i R_i^T + decay 1) L_u = sum_i r_ui R_i. The
    loss that is told is l by the number of ratings.

    Args:
        ratings: the entries that are known.
        factors: p, columns of L.
        decay: weight of the squares.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from sdc.train.iterative import matrix_factorization
        >>> from sdc.train.iterative.ratings import Ratings
        >>> known = Ratings(np.int32([0, 0, 1]), np.int32([0, 1, 1]), np.float32([1, 2, 4]), "made up", "")
        >>> task = matrix_factorization(known, factors=1, decay=1e-6)
        >>> state = task.init(jax.random.key(0))
        >>> for k in range(40):
        ...     state = task.step(state, k)
        >>> np.asarray(state["users"] @ state["items"].T).round(2)
        array([[1., 2.],
               [2., 4.]], dtype=float32)
    """
    users, items = ratings.shape
    r, mask = np.zeros((users, items), np.float32), np.zeros((users, items), np.float32)
    r[ratings.users, ratings.items] = ratings.values
    mask[ratings.users, ratings.items] = 1
    upper = np.triu_indices(factors)

    def half(others: Float32[Array, "m p"], r: Any, mask: Any) -> Array:
        """The least-squares solution for one side: each row from the rows of the other that it is known with."""
        squares = others[:, upper[0]] * others[:, upper[1]]
        packed = mask @ squares
        normal = jnp.zeros((r.shape[0], factors, factors)).at[:, upper[0], upper[1]].set(packed)
        normal = normal.at[:, upper[1], upper[0]].set(packed) + decay * jnp.eye(factors)
        return solve(normal, r @ others)

    def step(state: State, k: Any) -> State:
        left = half(state["items"], r, mask)
        return {"users": left, "items": half(left, r.T, mask.T)}

    def loss(state: State) -> Float32[Array, ""]:
        left, right = state["users"], state["items"]
        squares = jnp.sum(mask * jnp.square(r - left @ right.T))
        return (squares + decay * (jnp.sum(jnp.square(left)) + jnp.sum(jnp.square(right)))) / len(ratings.values)

    def init(key: Array) -> State:
        one, two = jax.random.split(key)
        return {"users": jax.random.uniform(one, (users, factors)), "items": jax.random.uniform(two, (items, factors))}

    rows = rows_of(users, items)
    return Iterative(
        name="factorization",
        source=ratings.source,
        init=init,
        step=step,
        loss=loss,
        blocks={"users": rows[0], "items": rows[1]},
        moving=("users", "items"),
    )


def solve(a: Float32[Array, "*n p p"], b: Float32[Array, "*n p"]) -> Float32[Array, "*n p"]:
    """Solves many small symmetric positive definite systems at once, by Cholesky's factorization of all in step.

    `jnp.linalg.cholesky` factors one matrix after the other on CPUs, which takes several times as long for thousands.
    """
    size = a.shape[-1]
    columns: list[Array] = []
    for j in range(size):
        column = a[..., j:, j]
        for i, other in enumerate(columns):
            column = column - other[..., j - i :] * other[..., j - i, None]
        columns.append(column / jnp.sqrt(column[..., :1]))
    known: list[Array] = []
    for j, column in enumerate(columns):
        rest = b[..., j] - sum((columns[i][..., j - i] * known[i] for i in range(j)), jnp.float32(0))
        known.append(rest / column[..., 0])
    found: list[Array] = []
    for j in reversed(range(size)):
        rest = known[j] - sum((columns[j][..., i] * found[-i] for i in range(1, size - j)), jnp.float32(0))
        found.append(rest / columns[j][..., 0])
    return jnp.stack(found[::-1], axis=-1)
