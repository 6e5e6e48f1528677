"""The study of PAFT: accuracy and perplexity under inconsistent gradients, with and without synchronization."""

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Float

from sdc.aggregation import gradient_noise, paft, paft_sync

from ..programs import DATA
from .measurements import Burst, Drifted, NoisyTraining, PaftMeasured
from .parts import RecordedParts
from .settings import PaftStudy
from .workloads import Method, Task, Trainer

# Settings of `paft` by name of the method; figure 17 of the paper averages the optimizer's state too.
ADAPTIVE: Mapping[str, Mapping[str, Any]] = {
    "paft": {},
    "paft, algorithm 2": {"rule": "gradient"},
    "paft, state too": {"sync_state": True},
}


def methods(
    periods: Sequence[int],
) -> Mapping[str, Callable[[optax.GradientTransformation], optax.GradientTransformation]]:
    """Returns the wrappers of the optimizer by name."""
    return {
        "noisy": lambda optimizer: optimizer,
        **{f"paft_sync, H = {h}": functools.partial(paft_sync, period=h, axis_name=DATA) for h in periods},
        **{name: functools.partial(paft, axis_name=DATA, max_period=50, **more) for name, more in ADAPTIVE.items()},
    }


@dataclasses.dataclass(frozen=True)
class NoisyRuns:
    """Training runs with one method at one level of noise."""

    scores: Float[np.ndarray, "seeds"]
    synchronizations: Float[np.ndarray, "seeds"] | None = None  # their number, if the method decides it


def experiment(study: PaftStudy, workloads: Sequence[Task], kept: RecordedParts) -> Generator[str, None, PaftMeasured]:
    """Trains each workload with each method at each level of noise, and measures the divergence of replicas."""
    trainings, drifts = [], []
    for workload in workloads:
        trainings.append((yield from _train(study, workload, kept)))
    for period in (None, *study.periods[:2]):
        title = f"divergence, {'no synchronization' if period is None else f'H = {period}'}"
        drifts.append(kept(title, Drifted, functools.partial(_drift, study, workloads[0], period)))
        yield title
    return PaftMeasured(
        **study.about(workloads),
        trainings=tuple(trainings),
        drifting=workloads[0].name,
        drifts=tuple(drifts),
    )


def _train(study: PaftStudy, workload: Task, kept: RecordedParts) -> Generator[str, None, NoisyTraining]:
    def noise(setting: tuple[Any, Any], seed: Any) -> optax.GradientTransformation:
        """Returns the noise; a setting is a pair: the sigma of the noise, and the sigma of bursts."""
        sigma, burst = setting
        return gradient_noise(DATA, sigma, seed=seed, burst_period=study.burst_every, burst_sigma=burst)

    def setting(variance: float, burst: float | None = None) -> tuple[Any, Any]:
        return jnp.float32(math.sqrt(variance)), jnp.float32(math.sqrt(variance if burst is None else burst))

    def score(name: str, variance: float) -> NoisyRuns:
        found = trainers[name](setting(variance), steps=study.steps, seeds=study.runs)
        scores = np.asarray([each.score for each in found])
        if name not in ADAPTIVE:
            return NoisyRuns(scores)
        return NoisyRuns(scores, np.asarray([float(each.state[0].synchronizations[0]) for each in found]))

    def score_bursts(name: str, variance: float) -> Burst:
        degree = setting(study.variances[0], variance)
        found = trainers[name](degree, steps=study.steps, seeds=study.runs, looks=40)
        return Burst(name, variance, found[0].steps, np.stack([each.scores for each in found]))

    optimizers = {name: wrap(workload.optimizer(study.steps)) for name, wrap in study.methods.items()}
    trainers = {name: _trainer(study.workers, workload, around, noise) for name, around in optimizers.items()}
    title = f"{workload.name}, clean"
    clean = kept(title, NoisyRuns, functools.partial(score, "noisy", 0.0))
    yield title
    scores = {"clean": np.stack([clean.scores] * len(study.variances))}
    synchronizations, bursts = {}, []
    for name in trainers:
        rows = []
        for variance in study.variances:
            title = f"{workload.name}, {name}, σ² = {variance:g}"
            rows.append(kept(title, NoisyRuns, functools.partial(score, name, variance)))
            yield title
        scores[name] = np.stack([row.scores for row in rows])
        if name in ADAPTIVE:
            synchronizations[name] = np.stack(
                [row.synchronizations for row in rows if row.synchronizations is not None]
            )
    for variance in study.bursts:
        for name in ("noisy", "paft"):
            title = f"{workload.name}, {name}, bursts of {variance:g}"
            bursts.append(kept(title, Burst, functools.partial(score_bursts, name, variance)))
            yield title
    return NoisyTraining(workload.name, workload.metric, scores, synchronizations, tuple(bursts))


def _trainer(
    workers: int,
    workload: Task,
    optimizer: optax.GradientTransformation,
    noise: Callable[[Any, Any], optax.GradientTransformation],
    report: Callable[[Any, Any], Mapping[str, Any]] = lambda params, gradient: {},
) -> Trainer:
    """Returns a trainer that gives each worker the mean gradient plus noise."""

    whole = optax.with_extra_args_support(optimizer)

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any, seed: Any) -> Any:
        inner, noisy = state
        own = jax.grad(workload.loss)(params, batch)
        gradient, noisy = noise(setting, seed).update(lax.pmean(own, DATA), noisy)
        updates, inner = whole.update(gradient, inner, params, own_gradient=own)
        return optax.apply_updates(params, updates), (inner, noisy), report(params, gradient)

    method = Method(lambda params, setting: (optimizer.init(params), noise(setting, 0).init(params)), step)
    return Trainer(workload, method, workers=workers)


def _drift(study: PaftStudy, workload: Task, period: int | None) -> Drifted:
    """Measures the squared divergence under plain SGD, for which lemma 3.1 holds whatever the loss: all workers have
    the same mean gradient, and each has independent noise."""
    around = optax.sgd(study.rate) if period is None else paft_sync(optax.sgd(study.rate), DATA, period)

    def report(params: Any, gradient: Any) -> Mapping[str, Any]:
        free = jax.tree.map(lambda p, g: p - study.rate * g, params, gradient)
        squares = [jnp.sum(jnp.square(lax.pmean(leaf, DATA) - leaf)) for leaf in jax.tree.leaves(free)]
        return {"square": lax.pmean(sum(squares), DATA)}

    def noise(setting: Any, seed: Any) -> optax.GradientTransformation:
        return gradient_noise(DATA, study.sigma, seed=seed)

    trainer = _trainer(study.workers, workload, around, noise, report)
    steps = min(study.steps, study.drifting_steps)
    found = trainer(steps=steps, seeds=study.runs, looks=1)
    params = jax.eval_shape(workload.init, jax.random.key(0))
    dimension = sum(leaf.size for leaf in jax.tree.leaves(params))
    return Drifted(period, dimension, np.mean([each.reports["square"][:, 0] for each in found], axis=0))
