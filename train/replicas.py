"""Data parallelism in which every data rank holds all parameters: the step for everything in `sdc.aggregation`.

Where gradients are aggregated wrongly, lost or left out, ranks no longer agree, and each needs parameters of its own;
`step` (ZeRO-1) has but one copy of them. Like `step.device_step` this runs per device with the axes `data` and `model`
bound, and knows nothing of meshes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int, Int32

from sdc.aggregation import (
    PaftState,
    PaftSyncState,
    Recorded,
    Sum,
    Work,
    accumulate,
    combine,
    completed_before,
    drop_rate,
    gradient_noise,
    gradient_sum,
    init_shadow,
    lossy_zero2,
    masked,
    paft,
    paft_sync,
    shadow,
    skip_empty,
)
from sdc.program import probe

from .config import TrainConfig
from .methods import Aggregation, Lossy, Paft, PaftSync, Shadow
from .model import Params, logits, param_specs
from .optimizer import adamw, learning_rate
from .parallel import DATA, MODEL, cross_entropy, global_norm

GRADIENT = "gradient"
"""Probe of the aggregated gradients, for faults: `fwd/gradient/...`."""


class ReplicaState(NamedTuple):
    """What a data rank carries on.

    Attributes:
        step: steps done.
        params: master parameters of this rank, in full width, float32.
        optimizer: state of the optimizer and of what is around it.
        noise: state of the simulated noise.
        roles: roles and counts of a shadow replica.
    """

    step: Int[Array, ""]
    params: Params
    optimizer: Any
    noise: Any
    roles: Any


class ReplicaMetrics(NamedTuple):
    """What a step tells about itself.

    Attributes:
        loss: mean over the sequences that were computed, in nats a token, float32.
        gradient_norm: Euclidean norm of the aggregated gradient before clipping, mean over the data ranks.
        learning_rate: learning rate of this step.
        gradient: None: ranks may hold different ones.
        reports: reports of the methods, on this device; see `report`.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    gradient: None
    reports: Any


class Given(NamedTuple):
    """What a worker accumulated outside of the step, on a real clock."""

    total: Sum
    completed: Int32[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
    """The step of a configuration with a way of aggregation.

    Attributes:
        config: the configuration.
        aggregation: the methods.
        seed: seed of simulated noise, latencies and losses.
        threshold: threshold of DropCompute, where it is simulated.
        completed: micro-batches by step and data rank, where a run of DropCompute is replayed.
        losses: channels of gradients and parameters, where a run with lost packets is replayed.
    """

    config: TrainConfig
    aggregation: Aggregation
    seed: int = 0
    threshold: float = float("inf")
    completed: np.ndarray | None = None
    losses: tuple[Recorded, Recorded] | None = None

    @functools.cached_property
    def specs(self) -> Params:
        """Partition of each parameter within a replica: over `model` only."""
        return jax.tree.map(lambda spec: P(*(None if axis == DATA else axis for axis in spec)), self._spread)

    @functools.cached_property
    def _spread(self) -> Params:
        return param_specs(self.config.model)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """AdamW with clipping and schedule, in what the aggregation puts around it."""
        config, method = self.config.optimizer, self.aggregation.method
        # The optimizer of ZeRO-2 sees flat shards, of which each data rank has one.
        norm = functools.partial(global_norm, specs=self._spread, axes=(DATA,) if isinstance(method, Lossy) else ())

        def clip(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            del params
            scale = config.clip / jnp.maximum(norm(gradient), config.clip)
            return jax.tree.map(lambda leaf: leaf * scale, gradient), state

        plain = optax.chain(
            optax.GradientTransformation(lambda params: optax.EmptyState(), clip),
            adamw(config, self._spread),
            optax.scale_by_schedule(lambda step: -learning_rate(config, step)),
        )
        inner = optax.with_extra_args_support(plain)
        if self.aggregation.dropcompute is not None:
            inner = skip_empty(plain)
        if isinstance(method, PaftSync):
            return paft_sync(inner, DATA, method.period, method.sync_state, replica_axes=(MODEL,))
        if isinstance(method, Paft):
            periods = method.initial_period, method.min_period, method.max_period
            return paft(inner, DATA, *periods, method.sync_state, replica_axes=(MODEL,))
        if isinstance(method, Lossy):
            gradient, parameter = self.losses or method.channels()
            return lossy_zero2(
                inner, DATA, gradient, parameter, packet=method.packet, seed=self.seed, reliable=method.reliable,
                parity=method.parity, tighten=0.0 if self.losses else method.tighten,
            )  # fmt: skip
        return inner

    @functools.cached_property
    def noise(self) -> optax.GradientTransformation | None:
        settings = self.aggregation.noise
        if settings is None:
            return None
        noise = functools.partial(
            gradient_noise, DATA, settings.sigma, workers=settings.workers, burst_period=settings.burst_period,
            burst_sigma=settings.burst_sigma,
        )  # fmt: skip
        # What the model ranks of a worker hold in common stays in common.
        sharded = jax.tree.map(lambda spec: MODEL in spec, self._spread)
        common = jax.tree.map(lambda spec: MODEL not in spec, self._spread)
        return optax.chain(
            optax.masked(noise(seed=self.seed, shard_axes=(MODEL,)), sharded),
            optax.masked(noise(seed=self.seed), common),
        )

    @property
    def micro_batches(self) -> int:
        """Into which a worker cuts its share of a batch."""
        return self.aggregation.micro_batches(self.config)

    def check(self, data: int, model: int) -> None:
        """Checks that the methods fit a number of data ranks and of model ranks.

        Raises:
            SettingError: they do not.
        """
        self.aggregation.check(self.config, data, model)

    @functools.cached_property
    def work(self) -> Work:
        """Gradient accumulation over one micro-batch of sequences; its collectives are over `model` only."""
        dtype = self.config.model.dtype

        def share(params: Params, tokens_BS: Int[Array, "batch length"]) -> Float[Array, ""]:
            """This rank's summand of the mean loss: every model rank sees the loss of the same tokens."""
            narrow = jax.tree.map(lambda param: param.astype(dtype), params)
            nll_BS = cross_entropy(logits(self.config.model, narrow, tokens_BS[:, :-1]), tokens_BS[:, 1:])
            return jnp.mean(nll_BS) / lax.axis_size(MODEL)

        return accumulate(share)

    def cut(self, tokens: Int[Array, "microsteps batch length"]) -> Int[Array, "micro_batches batch length"]:
        """A worker's share of a batch as micro-batches."""
        return tokens.reshape(self.micro_batches, -1, tokens.shape[-1])

    def init(self, params: Params) -> ReplicaState:
        """The state of a device, from its part of the initial parameters."""
        with jax.numpy_dtype_promotion("standard"):
            optimizer = self.optimizer.init(params)
        shadowed = isinstance(self.aggregation.method, Shadow)
        return ReplicaState(
            jnp.zeros((), jnp.int32),
            params,
            optimizer,
            () if self.noise is None else self.noise.init(params),
            init_shadow(lax.axis_size(DATA)) if shadowed else (),
        )

    def step(
        self, state: ReplicaState, tokens: Int[Array, "microsteps batch length"], given: Given | None = None
    ) -> tuple[ReplicaState, ReplicaMetrics]:
        """One optimizer step on one device.

        Args:
            state: state of this device.
            tokens: this data rank's share of the batch.
            given: what the worker has accumulated already, on a real clock.
        """
        method = self.aggregation.method
        report: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        roles = state.roles
        if isinstance(method, Shadow):
            alone = shadow(
                lambda params, batch: self._mean(self._accumulate(params, batch)), DATA, spares=method.spares
            )
            (loss, gradient), roles, report["shadow"] = alone(roles, state.params, tokens)
        elif self.aggregation.dropcompute is not None:
            total, completed = given or self._until_threshold(state, tokens)
            total = self._over_model(total)
            found = combine(
                total, DATA, completed, self.micro_batches,
                correction=self.aggregation.dropcompute.correction, drop_rate=self._drop_rate,
            )  # fmt: skip
            loss, gradient, extra["empty"] = found.loss, found.gradient, found.empty
            if isinstance(method, Lossy):
                extra["weight"] = completed.astype(jnp.float32)
                some = jnp.maximum(completed, 1).astype(jnp.float32)
                gradient = jax.tree.map(lambda leaf: leaf / some, total.gradient)
            report["completed"] = completed
        else:
            loss, gradient = self._mean(self._accumulate(state.params, tokens))
            loss = lax.pmean(loss, DATA)
            if not isinstance(method, Lossy):
                gradient = lax.pmean(gradient, DATA)
        noise = state.noise
        if self.noise is not None:
            gradient, noise = self.noise.update(gradient, noise)
        gradient = probe(gradient, GRADIENT, directions=("fwd",))

        rate = learning_rate(self.config.optimizer, state.step)
        with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
            updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.params, **extra)
            params = optax.apply_updates(state.params, updates)
        if isinstance(method, Lossy):
            norm = global_norm(optimizer.previous, self._spread)
        else:
            norm = lax.pmean(global_norm(gradient, self._spread, axes=()), DATA)
        report |= _report(optimizer)
        return (
            ReplicaState(state.step + 1, params, optimizer, noise, roles),
            ReplicaMetrics(loss, norm, rate, None, report),
        )

    @property
    def _drop_rate(self) -> float:
        """Mean share of dropped micro-batches, as far as it is known beforehand."""
        settings = self.aggregation.dropcompute
        if settings is None or settings.latency is None:
            return 0.0
        with jax.ensure_compile_time_eval():
            latencies = settings.latency.sample(jax.random.key(self.seed), (4096, self.micro_batches))
            return drop_rate(np.asarray(latencies), self.threshold)

    def _accumulate(self, params: Params, tokens: Int[Array, "microsteps batch length"]) -> Sum:
        """The sum over all micro-batches."""

        def one(total: Sum, batch: Array) -> tuple[Sum, None]:
            return self.work(total, batch, params), None

        return self._over_model(lax.scan(one, gradient_sum(params), self.cut(tokens))[0])

    def _until_threshold(self, state: ReplicaState, tokens: Int[Array, "microsteps batch length"]) -> Given:
        """The sum over the micro-batches that a simulated or recorded worker completes."""
        settings = self.aggregation.dropcompute
        assert settings is not None
        if self.completed is not None:
            completed = jnp.asarray(self.completed, jnp.int32)[state.step, lax.axis_index(DATA)]
        else:
            assert settings.latency is not None
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), state.step), lax.axis_index(DATA))
            latencies = settings.latency.sample(key, (self.micro_batches,))
            completed = completed_before(latencies, jnp.float32(self.threshold))
        return Given(
            masked(self.work, gradient_sum(state.params), self.cut(tokens), completed, state.params), completed
        )

    def _over_model(self, total: Sum) -> Sum:
        """Adds up what the model ranks found of the loss, and of the parameters that they hold in common."""
        gradient = jax.tree.map(
            lambda leaf, spec: leaf if MODEL in spec else lax.psum(leaf, MODEL), total.gradient, self._spread
        )
        return Sum(lax.psum(total.loss, MODEL), gradient)

    def _mean(self, total: Sum) -> tuple[Float32[Array, ""], Params]:
        count = jnp.float32(self.micro_batches)
        return total.loss / count, jax.tree.map(lambda leaf: leaf / count, total.gradient)


def _report(optimizer: Any) -> dict[str, Any]:
    """What the state of the optimizer tells of the method around it."""
    if isinstance(optimizer, PaftSyncState | PaftState):
        last = optimizer.divergence
        found = {"divergence": last.measured, "expected_divergence": last.expected, "synchronized": last.gap > 0}
        if isinstance(optimizer, PaftState):
            found |= {
                "period": optimizer.period, "next": optimizer.next, "synchronizations": optimizer.synchronizations,
            }  # fmt: skip
        return found
    if hasattr(optimizer, "report"):
        return {"lossy": optimizer.report._asdict(), "log": optimizer.log._asdict()}
    return {}
