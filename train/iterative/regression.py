"""Multinomial logistic regression by stochastic gradient descent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from .protocol import Iterative, State, rows_of


def logistic_regression(
    features: Float32[np.ndarray, "n M"],
    labels: Int32[np.ndarray, "n"],
    *,
    source: str,
    batch: int,
    rate: float,
    decay: float = 1e-3,
    seed: int = 0,
) -> Iterative:
    """Minimizes the multi-logit loss over an M x N matrix, whose rows are the blocks.

    Qiao et al., ICML 2019, section 5.1 and appendix C:

        l(W) = 1/n sum_i -log softmax(x_i W)_{y_i} + decay/2 ||W||^2,   W_{k+1} = W_k - rate * grad l_batch(W_k)

    The weight decay, which the paper does not name, makes the loss strongly convex: then there is one optimum, to which
    theorem 3.2 measures its distances.

    Args:
        features: one row for each example.
        labels: classes, from 0.
        source: where they come from.
        batch: examples of an iteration; batches are cut one after the other from one order, and examples at its end
            that make no batch are left out, of the loss too.
        rate: learning rate.
        decay: weight decay.
        seed: of that order.

    Raises:
        ValueError: a batch has more examples than there are.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from sdc.train.iterative import logistic_regression
        >>> x = np.eye(4, dtype=np.float32)
        >>> task = logistic_regression(x, np.arange(4, dtype=np.int32), source="corners", batch=4, rate=1.0)
        >>> state = task.init(jax.random.key(0))
        >>> state["weights"].shape, bool(task.loss(task.step(state, 0)) < task.loss(state))
        ((4, 4), True)
    """
    if not 1 <= batch <= len(labels):
        raise ValueError(f"batch={batch}: expected 1 to {len(labels)}, the examples that there are")
    order = np.random.default_rng(seed).permutation(len(labels))[: len(labels) // batch * batch]
    x, y = features[order], labels[order]
    classes = int(labels.max()) + 1
    batches = len(order) // batch

    def loss(weights: Array, x: Any, y: Any) -> Float32[Array, ""]:
        logits = x @ weights
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=-1)
        return -jnp.mean(chosen) + decay / 2 * jnp.sum(jnp.square(weights))

    def step(state: State, k: Any) -> State:
        start = jnp.asarray(k, jnp.int32) % batches * batch
        examples = jax.lax.dynamic_slice_in_dim(x, start, batch), jax.lax.dynamic_slice_in_dim(y, start, batch)
        return {"weights": state["weights"] - rate * jax.grad(loss)(state["weights"], *examples)}

    (rows,) = rows_of(features.shape[1])
    return Iterative(
        name="regression",
        source=source,
        init=lambda key: {"weights": 0.01 * jax.random.normal(key, (features.shape[1], classes))},
        step=step,
        loss=lambda state: loss(state["weights"], x, y),
        blocks={"weights": rows},
        moving=("weights",),
    )
