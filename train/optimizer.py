"""AdamW with a linear warm-up and a cosine, from optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from .config import OptimizerConfig
from .parallel import MODEL


def adamw(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    """The update's direction, before the learning rate: Adam's, plus the decay of matrices.

    It is elementwise, so that each rank updates its own shard (ZeRO-1).

    Args:
        config: the optimizer.
        specs: partition of each parameter. Matrices are those sharded over `model`; the scales of norms are not, and
            do not decay.
    """
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=jax.tree.map(lambda spec: MODEL in spec, specs)),
    )


def learning_rate(config: OptimizerConfig, step: Int[Array, ""]) -> Float[Array, ""]:
    """Learning rate of a step (counted from 0), float32.

    Linear in `step + 1` up to `learning_rate` over the warm-up, then half a cosine down to zero at `total_steps`.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.warmup_steps, config.total_steps)
    return jnp.asarray(schedule((step + 1).astype(jnp.float32)), jnp.float32)


def history_ratio(config: OptimizerConfig, state: optax.OptState) -> Float[Array, ""]:
    """The largest element of Adam's history as a share of the bound that no sound step can exceed.

    The clipped gradient has a norm of at most c, so each of its elements is at most c in magnitude, and after t steps

        |m| <= c (1 - beta1^t),    v <= c^2 (1 - beta2^t)

    for the mean m and the mean square v, which are sums of gradients with these weights. A share above 1 proves that a
    gradient or the history itself was corrupted. Rounding is allowed for with a share of 1e-3. The idea of bounding the
    optimizer's history is that of He et al., *Understanding and Mitigating Hardware Failures in Deep Learning Training
    Systems* (ISCA 2023).

    Args:
        config: the optimizer.
        state: state of `adamw`, after the step.
    """
    adam = optax.tree_utils.tree_get(state, "mu"), optax.tree_utils.tree_get(state, "nu")
    count = optax.tree_utils.tree_get(state, "count").astype(jnp.float32)
    mean, square = (jax.tree.reduce(jnp.maximum, jax.tree.map(lambda x: jnp.max(jnp.abs(x)), part)) for part in adam)
    weight1, weight2 = 1 - config.beta1**count, 1 - config.beta2**count
    bounds = config.clip * weight1, config.clip**2 * weight2
    return jnp.maximum(mean / bounds[0], square / bounds[1]) / jnp.float32(1 + 1e-3)
