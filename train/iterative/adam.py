"""Trainings by Adam, whose moments belong to the parameters' blocks."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

from .protocol import Iterative, State

By: TypeAlias = Literal["layers", "shards"]
KINDS = ("params", "mu", "nu")


def by_adam(
    *,
    name: str,
    source: str,
    params_of: Callable[[Array], State],
    loss: Callable[..., Float32[Array, ""]],
    data: tuple[np.ndarray, ...],
    samples: int,
    rate: float,
    batch: int,
    batches: int,
    by: By,
    seed: int,
) -> Iterative:
    """A training by Adam of parameters that are a dictionary of arrays."""
    if not 1 <= batch <= len(data[0]):
        raise ValueError(f"batch={batch}: expected 1 to {len(data[0])}, the examples that there are")
    shapes = jax.eval_shape(lambda: params_of(jax.random.key(0)))
    order = np.random.default_rng(seed).permutation(len(data[0]))
    shuffled = tuple(array[order] for array in data)
    steps = len(order) // batch
    optimizer = optax.adam(rate)

    def step(state: State, k: Any) -> State:
        """Adam's count follows from the number of the iteration, and cannot be lost."""
        params, mu, nu = ({name: state[f"{kind}/{name}"] for name in shapes} for kind in KINDS)

        def one(number: Any, carry: Any) -> Any:
            params, mu, nu = carry
            count = jnp.asarray(k, jnp.int32) * batches + number
            start = count % steps * batch
            grads = jax.grad(loss)(params, *(jax.lax.dynamic_slice_in_dim(array, start, batch) for array in shuffled))
            state = (optax.ScaleByAdamState(count, mu, nu), optax.EmptyState())
            with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
                updates, ((_, mu, nu), _) = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), mu, nu

        found = jax.lax.fori_loop(0, batches, one, (params, mu, nu))
        return {f"{kind}/{name}": part[name] for kind, part in zip(KINDS, found, strict=True) for name in shapes}

    def init(key: Array) -> State:
        params = params_of(key)
        zeros = {name: jnp.zeros_like(leaf) for name, leaf in params.items()}
        parts = zip(KINDS, (params, zeros, zeros), strict=True)
        return {f"{kind}/{name}": part[name] for kind, part in parts for name in shapes}

    ids: dict[str, np.ndarray] = {}
    first = 0
    for leaf, shape in shapes.items():
        rows = shape.shape[0]
        own = first + (np.arange(rows) if by == "shards" else np.zeros(rows, int))
        first = int(own[-1]) + 1
        ids |= {f"{kind}/{leaf}": own.astype(np.int32) for kind in KINDS}
    return Iterative(
        name=name,
        source=source,
        init=init,
        step=step,
        loss=lambda state: loss(
            {leaf: state[f"params/{leaf}"] for leaf in shapes}, *(array[:samples] for array in shuffled)
        ),
        blocks=ids,
        moving=tuple(f"params/{leaf}" for leaf in shapes),
    )
