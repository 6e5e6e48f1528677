"""The step in which every data rank holds its own parameters, with what it simulates or replays."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sdc.aggregation import judge, select_threshold
from sdc.settings import SettingError

from .. import (
    AUTO,
    DATA,
    MODEL,
    RANKS,
    Aggregation,
    Given,
    Lossy,
    Placement,
    ReplicaMetrics,
    Replicas,
    ReplicaState,
    Shadow,
    TrainConfig,
    aggregation_row,
    completed_log,
    fetch,
    init_params,
    losses_log,
)
from .device import DeviceStep

SAMPLED = 100
"""Iterations whose sampled latencies choose a simulated threshold."""


def make_replicas(
    config: TrainConfig, aggregation: Aggregation, placement: Placement, *, seed: int, steps: int
) -> Replicas:
    """The step of a configuration with a way of aggregation, ready for a mesh.

    Args:
        config: what is trained.
        aggregation: the methods.
        placement: where the step runs.
        seed: seed of what they simulate.
        steps: steps of the run, for which a log that is replayed must be long enough.

    Raises:
        SettingError: the methods do not fit the mesh, or a log that is to be replayed does not fit the run.
    """
    data, model = (placement.mesh.shape[axis] for axis in (DATA, MODEL))
    try:
        bare = Replicas(config, aggregation)
        bare.check(data, model)
        threshold, completed, losses = _simulated(bare, data, seed, steps)
        replicas = Replicas(config, aggregation, seed, threshold, completed, losses)
        _ = replicas.optimizer, replicas.noise
    except SettingError:
        raise
    except ValueError as error:
        raise SettingError("aggregate", aggregation.text, str(error)) from error
    if aggregation.clocked and jax.process_count() != data:
        raise aggregation.no_clock(data)
    return replicas


def _simulated(bare: Replicas, data: int, seed: int, steps: int) -> tuple[float, Any, Any]:
    """The threshold, and what is replayed: micro-batches that were completed, and channels of lost packets."""
    config, settings, method = bare.config, bare.aggregation.dropcompute, bare.aggregation.method
    threshold, completed, losses = math.inf, None, None
    if settings is not None and settings.replay is not None:
        completed = completed_log(settings.replay, data, steps, bare.micro_batches)
    elif settings is not None:
        threshold = settings.threshold
        if threshold == AUTO and settings.latency is not None:
            sampled = settings.latency.sample(jax.random.key(seed), (SAMPLED, data, bare.micro_batches))
            threshold = select_threshold(np.asarray(sampled), settings.serial).threshold
        elif not threshold > 0 and threshold != AUTO:
            raise ValueError(f"threshold={threshold}: expected seconds above 0")
    if isinstance(method, Lossy) and method.replay is not None:
        losses = losses_log(method.replay, config, method.packet, data, steps)
    return threshold, completed, losses


def replicated(replicas: Replicas, placement: Placement) -> DeviceStep:
    """The step as programs take it: parameters with an axis of data ranks in front, all else with an axis for each axis
    of the mesh.

    Args:
        replicas: see `make_replicas`.
        placement: where the step runs.
    """
    data, model = (placement.mesh.shape[axis] for axis in (DATA, MODEL))
    params = jax.eval_shape(lambda: init_params(replicas.config.model, jax.random.key(0)))

    def structure(params: Any) -> Any:
        one = jax.vmap(lambda _: replicas.init(params), axis_name=MODEL, axis_size=model)
        return jax.vmap(one, axis_name=DATA, axis_size=data)(jnp.zeros((data, model)))

    specs = jax.tree.map(lambda _: P(DATA, MODEL), jax.eval_shape(structure, params))
    specs = specs._replace(step=P(), params=jax.tree.map(lambda spec: P(DATA, *spec), replicas.specs))
    whole: Any = P()

    def init(key: Any) -> Any:
        start = jax.shard_map(
            lambda params: _stacked(replicas.init(params)),
            mesh=placement.mesh, in_specs=(replicas.specs,), out_specs=specs, check_vma=False,
        )  # fmt: skip
        return start(init_params(replicas.config.model, key))

    def describe(metrics: ReplicaMetrics) -> Mapping[str, Any]:
        return {"aggregation": aggregation_row(jax.tree.map(lambda x: x[:, 0], metrics.reports))}

    def conclude(state: ReplicaState) -> Mapping[str, Any]:
        """What a shadow replica says of the ranks."""
        if not isinstance(replicas.aggregation.method, Shadow):
            return {}
        found = judge(jax.tree.map(lambda leaf: leaf[0, 0], fetch(state.roles)))
        return {"verdict": found.verdict, "reason": found.reason, "shadow": found._asdict()}

    def fn(state: ReplicaState, tokens: Any, given: Given | None = None) -> tuple[ReplicaState, ReplicaMetrics]:
        state, metrics = replicas.step(_unstacked(state), tokens, given)
        return _stacked(state), metrics

    metrics_specs = ReplicaMetrics(whole, whole, whole, None, RANKS)
    return DeviceStep(replicas.config, fn, specs, metrics_specs, init, describe, conclude)


def _stacked(state: ReplicaState) -> ReplicaState:
    """A device's state with the leading axes of its place on the mesh."""
    params = jax.tree.map(lambda leaf: leaf[None], state.params)
    rest = jax.tree.map(lambda leaf: leaf[None, None], (state.optimizer, state.noise, state.roles))
    return ReplicaState(state.step, params, *rest)


def _unstacked(state: ReplicaState) -> ReplicaState:
    params = jax.tree.map(lambda leaf: leaf[0], state.params)
    rest = jax.tree.map(lambda leaf: leaf[0, 0], (state.optimizer, state.noise, state.roles))
    return ReplicaState(state.step, params, *rest)
