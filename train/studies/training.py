"""Runs a method of a study on a workload: all workers on one device, many steps in one program."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..programs import DATA
from .workloads import Task

LAST = 3
"""Looks at the score over which a result is the mean: single ones are noisy."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train; settings are traced, so that one program serves them all.

    Attributes:
        init: `(params, setting) -> state` of a worker, under the axis.
        step: `(params, state, batch, number, setting) -> (params, state, report)` of a worker; reports are dictionaries
            of arrays.
    """

    init: Callable[[Any, Any], Any]
    step: Callable[[Any, Any, Any, Any, Any], tuple[Any, Any, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What became of a run.

    Attributes:
        steps: numbers of steps after which it was scored.
        scores: mean over the replicas at these steps; NaN counts as it comes.
        reports: arrays [steps, workers, ...] of what each step reported.
        state: state of the method at the end, all workers.
    """

    steps: np.ndarray
    scores: np.ndarray
    reports: Mapping[str, np.ndarray]
    state: Any

    @property
    def score(self) -> float:
        """The result."""
        return float(np.mean(self.scores[-LAST:]))


class Trainer:
    """Trains a workload by a method, with other settings each time and one program.

    Args:
        workload: what is trained.
        method: how.
        workers: number of workers, under `vmap`, whose axis is `sdc.train.programs.DATA`.
        rows: rows of a global batch; by default the workload's.
        cut: what a worker's share of a batch becomes, for instance micro-batches.

    Example:
        >>> import jax, optax
        >>> from sdc.train.studies import Method, Trainer, linear
        >>> workload = linear()
        >>> optimizer = workload.optimizer(20)
        >>> def step(params, state, batch, number, setting):
        ...     gradient = jax.lax.pmean(jax.grad(workload.loss)(params, batch), "data")
        ...     updates, state = optimizer.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates), state, {}
        >>> method = Method(lambda params, setting: optimizer.init(params), step)
        >>> Trainer(workload, method, workers=4)(steps=20, seed=0).score > 0.8
        True
    """

    def __init__(
        self,
        workload: Task,
        method: Method,
        *,
        workers: int,
        rows: int | None = None,
        cut: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.workload, self.workers = workload, workers
        self.rows = workload.rows if rows is None else rows

        def start(params: Any, setting: Any) -> Any:
            return jax.vmap(lambda _: (params, method.init(params, setting)), axis_name=DATA)(jnp.arange(workers))

        def several(params: Any, state: Any, shares: Any, numbers: Any, setting: Any) -> Any:
            def one(carry: Any, given: Any) -> Any:
                (params, state), (batch, number) = carry, given
                params, state, report = method.step(params, state, cut(batch), number, setting)
                return (params, state), report

            (params, state), reports = lax.scan(one, (params, state), (shares, numbers))
            return params, state, reports, workload.score(params)

        self._start = jax.jit(start)
        self._run = jax.jit(
            jax.vmap(several, in_axes=(0, 0, 1, None, None), out_axes=(0, 0, 1, 0), axis_name=DATA),
            donate_argnums=(0, 1),
        )

    def __call__(self, setting: Any = (), *, steps: int, seed: int, looks: int = 10) -> Trained:
        """Trains anew, and looks at the score now and then.

        Args:
            setting: setting for the method.
            steps: optimizer steps.
            seed: seed of the parameters and the order of the data.
            looks: times that the score is taken.

        Returns:
            Scores, reports and the last state.
        """
        source = self.workload.data(self.rows, seed)
        length = -(-steps // min(looks, steps))  # one length for all looks but the last
        ends, scores, reports = [], [], []
        with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
            params, state = self._start(self.workload.init(jax.random.key(seed)), setting)
            for done in range(0, steps, length):
                count = min(length, steps - done)
                taken = [self._share(next(source)) for _ in range(count)]
                shares = jax.tree.map(lambda *leaves: np.stack(leaves), *taken)
                numbers = jnp.arange(done, done + count)
                params, state, report, score = self._run(params, state, shares, numbers, setting)
                reports.append(jax.device_get(report))
                ends.append(done + count)
                scores.append(float(np.mean(jax.device_get(score))))
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *reports)
        return Trained(np.asarray(ends), np.asarray(scores), joined, jax.device_get(state))

    def _share(self, batch: Any) -> Any:
        """A global batch, cut for the workers."""
        return jax.tree.map(lambda leaf: leaf.reshape(self.workers, self.rows // self.workers, *leaf.shape[1:]), batch)
