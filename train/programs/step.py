"""One training step as a per-device function with explicit collectives over `data` and `model`.

The step is independent of twins, meshes and the tools that transform it. Bind both axes, of any size, with `shard_map`
or `vmap`:

    specs = state_specs(config)
    step = jax.shard_map(
        functools.partial(device_step, config=config), mesh=mesh,
        in_specs=(specs, BATCH_SPEC), out_specs=(specs, metrics_specs(config)), check_vma=False,
    )
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .config import OptimizerConfig, TrainConfig
from .model import (
    DATA,
    MODEL,
    Params,
    cross_entropy,
    gather_width,
    global_norm,
    init_params,
    logits,
    param_specs,
    scatter_width,
)

BATCH_SPEC = P(None, DATA, None)  # partition of a batch: int32 tokens [microsteps, batch_size, sequence_length + 1]


class TrainState(NamedTuple):
    """The complete state between steps, without redundancy: ZeRO-1 shards the width of every leaf over `data`."""

    step: Int[Array, ""]  # steps done, int32 scalar
    params: Params  # master parameters, float32
    optimizer: optax.OptState  # optax state; its leaves mirror the parameters


class Metrics(NamedTuple):
    loss: Float[Array, ""]  # mean cross entropy over the global batch in nats per token, float32
    gradient_norm: Float[Array, ""]  # global Euclidean norm of the gradient before clipping, float32
    learning_rate: Float[Array, ""]  # learning rate of this step, float32
    gradient: Params  # mean gradient before clipping, float32, sharded like the master parameters


def init_state(config: TrainConfig, key: Array) -> TrainState:
    """Returns the initial state in its global shape; the state is the same on any mesh. Jit this function with
    `out_shardings` to create the state in place."""
    params = init_params(config.model, key)
    return TrainState(jnp.zeros((), jnp.int32), params, adamw(config.optimizer, param_specs(config.model)).init(params))


def abstract_state(config: TrainConfig) -> TrainState:
    """Returns the global shapes and dtypes of the state, as `jax.ShapeDtypeStruct`."""
    state: TrainState = jax.eval_shape(lambda: init_state(config, jax.random.key(0)))
    return state


def state_specs(config: TrainConfig) -> TrainState:
    specs = param_specs(config.model)
    optimizer = optax.tree_utils.tree_map_params(
        adamw(config.optimizer, specs),
        lambda _, spec: spec,
        abstract_state(config).optimizer,
        specs,
        transform_non_params=lambda _: P(),
    )
    whole: Any = P()
    return TrainState(whole, specs, optimizer)


def metrics_specs(config: TrainConfig) -> Metrics:
    whole: Any = P()
    return Metrics(whole, whole, whole, param_specs(config.model))


def device_step(
    state: TrainState, tokens: Int[Array, "microsteps batch length"], *, config: TrainConfig
) -> tuple[TrainState, Metrics]:
    """Runs one optimizer step on one device."""
    specs = param_specs(config.model)
    with jax.named_scope("gather_params"):
        params = gather_width(state.params, specs, config.model.dtype)
    ranks = lax.axis_size(DATA) * lax.axis_size(MODEL)

    def share(params: Params, tokens_BS: Int[Array, "batch length"]) -> Float[Array, ""]:
        """Returns this rank's share of the mean loss. The loss is divided by the total number of ranks, since the model
        ranks of a data rank compute the loss of the same tokens."""
        nll_BS = cross_entropy(logits(config.model, params, tokens_BS[:, :-1]), tokens_BS[:, 1:])
        return jnp.mean(nll_BS) / (ranks * tokens.shape[0])

    def microstep(
        sums: tuple[Float[Array, ""], Params], tokens_BS: Int[Array, "batch length"]
    ) -> tuple[tuple[Float[Array, ""], Params], None]:
        return jax.tree.map(lambda total, part: total + part.astype(jnp.float32), sums, run(params, tokens_BS)), None

    run = jax.value_and_grad(share)
    zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), params)
    (loss, gradient), _ = lax.scan(microstep, (jnp.zeros((), jnp.float32), zeros), tokens)
    loss = lax.psum(loss, (DATA, MODEL))
    with jax.named_scope("reduce_gradient"):
        gradient = scatter_width(gradient, specs)
        norm = global_norm(gradient, specs)
    with jax.named_scope("optimizer"):
        clip = config.optimizer.clip
        clipped = jax.tree.map(lambda leaf: leaf * (clip / jnp.maximum(norm, clip)), gradient)
        rate = learning_rate(config.optimizer, state.step)
        with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
            direction, optimizer = adamw(config.optimizer, specs).update(clipped, state.optimizer, state.params)
        master = jax.tree.map(lambda param, leaf: param - rate * leaf, state.params, direction)
    return TrainState(state.step + 1, master, optimizer), Metrics(loss, norm, rate, gradient)


def adamw(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    """Returns a transformation of the gradient into the direction of the update, without the learning rate: Adam's
    direction, plus the weight decay of matrices.

    The update is elementwise, so each rank updates its own shard (ZeRO-1). The matrices are the parameters that are
    sharded over `model`; the scales of norms are not sharded over this axis, and do not decay.
    """
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=jax.tree.map(lambda spec: MODEL in spec, specs)),
    )


def learning_rate(config: OptimizerConfig, step: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the learning rate of a step (counted from 0), as float32.

    During the warm-up, the rate rises to `learning_rate` in proportion to `step + 1`; afterwards, it follows half a
    cosine down to zero at `total_steps`.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.warmup_steps, config.total_steps)
    return jnp.asarray(schedule((step + 1).astype(jnp.float32)), jnp.float32)


def history_ratio(config: OptimizerConfig, state: optax.OptState) -> Float[Array, ""]:
    """Returns the largest element of Adam's history as a fraction of the bound that no correct step can exceed.

    The clipped gradient has a norm of at most c, so each of its elements is at most c in magnitude, and after t steps

        |m| <= c (1 - beta1^t),    v <= c^2 (1 - beta2^t)

    where m and v are weighted sums of the gradients and of their squares; the weights add up to 1 - beta1^t and to
    1 - beta2^t. A fraction above 1 proves that a gradient or the history itself was corrupted. The bound includes a
    margin of 1e-3 for rounding. The idea of bounding the optimizer's history is due to He et al., *Understanding and
    Mitigating Hardware Failures in Deep Learning Training Systems* (ISCA 2023).
    """
    adam = optax.tree_utils.tree_get(state, "mu"), optax.tree_utils.tree_get(state, "nu")
    count = optax.tree_utils.tree_get(state, "count").astype(jnp.float32)
    mean, square = (jax.tree.reduce(jnp.maximum, jax.tree.map(lambda x: jnp.max(jnp.abs(x)), part)) for part in adam)
    weight1, weight2 = 1 - config.beta1**count, 1 - config.beta2**count
    bounds = config.clip * weight1, config.clip**2 * weight2
    return jnp.maximum(mean / bounds[0], square / bounds[1]) / jnp.float32(1 + 1e-3)
