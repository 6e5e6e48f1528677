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
