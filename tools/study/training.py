"""Runs a method of a study on a workload: all workers on one device, many steps in one program."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .workloads import Workload

DATA = "data"
"""The axis of the workers."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: for the record.
        init: `params -> state` of a worker, under the axis.
        step: `(params, state, batch, number) -> (params, state, report)` of a worker; reports are dictionaries.
    """

    name: str
    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What became of a run.

    Attributes:
        steps: at which it was scored.
        scores: mean over the replicas at these steps; NaN counts as it comes.
        reports: arrays [steps, workers, ...] of what each step reported.
        state: of the method at the end, all workers.
    """

    steps: np.ndarray
    scores: np.ndarray
    reports: Mapping[str, np.ndarray]
    state: Any

    @property
    def score(self) -> float:
        """The mean over the last scores: single ones are noisy."""
        return float(np.mean(self.scores[-3:]))


def behind_mean(workload: Workload, optimizer: optax.GradientTransformation, **gradients: Any) -> Callable[..., Any]:
    """The step of an optimizer behind the mean of all workers' gradients, or behind a transform of that mean.

    Args:
        workload: what is trained.
        optimizer: what is done with it.
        gradients: `noise`, a transform of the mean, each worker's own.
    """
    noise = gradients.get("noise", optax.identity())

    def step(params: Any, state: Any, batch: Any, number: Any) -> tuple[Any, Any, Mapping[str, Any]]:
        del number
        inner, noisy = state
        value, gradient = jax.value_and_grad(workload.loss)(params, batch)
        gradient, noisy = noise.update(lax.pmean(gradient, DATA), noisy)
        updates, inner = optimizer.update(gradient, inner, params)
        return optax.apply_updates(params, updates), (inner, noisy), {"loss": lax.pmean(value, DATA)}

    return step


def train(
    workload: Workload,
    method: Method,
    *,
    workers: int,
    steps: int,
    seed: int,
    rows: int | None = None,
    looks: int = 10,
    cut: Callable[[Any], Any] = lambda batch: batch,
) -> Trained:
    """Trains, and looks at the score now and then.

    Args:
        workload: what is trained.
        method: how.
        workers: under `vmap`.
        steps: optimizer steps.
        seed: of the parameters and the order of the data.
        rows: of a global batch; by default the workload's.
        looks: times that the score is taken.
        cut: what a worker's share of a batch becomes, for instance micro-batches.
    """
    rows = workload.rows if rows is None else rows
    source = workload.data(rows, seed)
    params = workload.init(jax.random.key(seed))

    def share(batch: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(workers, rows // workers, *leaf.shape[1:]), batch)

    def several(params: Any, state: Any, shares: Any, numbers: Any) -> Any:
        def one(carry: Any, given: Any) -> Any:
            batch, number = given
            *carry, report = method.step(*carry, cut(batch), number)
            return tuple(carry), report

        (params, state), reports = lax.scan(one, (params, state), (shares, numbers))
        return params, state, reports, workload.score(params)

    run = jax.jit(
        jax.vmap(several, in_axes=(0, 0, 1, None), out_axes=(0, 0, 1, 0), axis_name=DATA), donate_argnums=(0, 1)
    )
    with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
        start = jax.vmap(lambda _: (params, method.init(params)), axis_name=DATA)
        params, state = jax.jit(start)(jnp.arange(workers))
        ends = np.unique(np.linspace(0, steps, looks + 1).astype(int)[1:])
        scores, reports = [], []
        length = -(-steps // looks)
        done = 0
        for end in ends:
            # One length for all but the last: a program for each of at most two.
            while done < end:
                count = min(length, int(end) - done)
                taken = [share(next(source)) for _ in range(count)]
                shares = jax.tree.map(lambda *leaves: np.stack(leaves), *taken)
                params, state, report, score = run(params, state, shares, jnp.arange(done, done + count))
                reports.append(jax.device_get(report))
                done += count
            scores.append(float(np.mean(jax.device_get(score))))
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *reports)
    return Trained(ends, np.asarray(scores), joined, jax.device_get(state))
