"""The study of PAFT: accuracy and perplexity under inconsistent gradients, with and without synchronization."""

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sdc.aggregation import gradient_noise, paft, paft_sync

from ..programs import DATA
from .measurements import Burst, Drifted, NoisyTraining, PaftMeasured
from .settings import PaftStudy
from .workloads import Method, Task, Trainer


def methods(
    periods: Sequence[int],
) -> Mapping[str, Callable[[optax.GradientTransformation], optax.GradientTransformation]]:
    """Returns the wrappers of the optimizer by name."""
    return {
        "noisy": lambda optimizer: optimizer,
        **{f"paft_sync, H = {h}": functools.partial(paft_sync, period=h, axis_name=DATA) for h in periods},
        "paft": functools.partial(paft, axis_name=DATA, initial_period=10, min_period=1, max_period=50),
    }


def experiment(study: PaftStudy, workloads: Sequence[Task]) -> Generator[str, None, PaftMeasured]:
    """Trains each workload with each method at each level of noise, and measures the divergence of replicas."""

    def noise(setting: tuple[Any, Any]) -> optax.GradientTransformation:
        """Returns the noise; a setting is a pair: the sigma of the noise, and the sigma of bursts."""
        sigma, burst = setting
        return gradient_noise(DATA, sigma, seed=study.seed, burst_period=study.burst_every, burst_sigma=burst)

    def setting(variance: float, burst: float | None = None) -> tuple[Any, Any]:
        return jnp.float32(math.sqrt(variance)), jnp.float32(math.sqrt(variance if burst is None else burst))

    trainings = []
    for workload in workloads:
        optimizers = {name: wrap(workload.optimizer(study.steps)) for name, wrap in study.methods.items()}
        trainers = {name: _trainer(study.workers, workload, around, noise) for name, around in optimizers.items()}
        clean = trainers["noisy"](setting(0.0), steps=study.steps, seed=study.seed)
        yield f"{workload.name}, clean"
        scores: dict[str, tuple[float, ...]] = {"clean": (clean.score,) * len(study.variances)}
        synchronizations, bursts = [], []
        for name, trainer in trainers.items():
            for variance in study.variances:
                found = trainer(setting(variance), steps=study.steps, seed=study.seed)
                scores[name] = (*scores.get(name, ()), found.score)
                if name == "paft":
                    synchronizations.append(int(found.state[0].synchronizations[0]))
                yield f"{workload.name}, {name}, σ² = {variance:g}"
        for variance in study.bursts:
            for name in ("noisy", "paft"):
                degree = setting(study.variances[0], variance)
                found = trainers[name](degree, steps=study.steps, seed=study.seed, looks=40)
                bursts.append(Burst(name, variance, found.steps, found.scores))
                yield f"{workload.name}, {name}, bursts of {variance:g}"
        trainings.append(NoisyTraining(workload.name, workload.metric, scores, tuple(synchronizations), tuple(bursts)))
    drifts = []
    for period in (None, *study.periods[:2]):
        name = "no synchronization" if period is None else f"H = {period}"
        drifts.append(Drifted(period, _drift(study, workloads[0], period)))
        yield f"divergence, {name}"
    params = jax.eval_shape(workloads[0].init, jax.random.key(0))
    return PaftMeasured(
        **study.about(workloads),
        trainings=tuple(trainings),
        drifting=workloads[0].name,
        dimension=sum(leaf.size for leaf in jax.tree.leaves(params)),
        drifts=tuple(drifts),
    )


def _trainer(
    workers: int,
    workload: Task,
    optimizer: optax.GradientTransformation,
    noise: Callable[[Any], optax.GradientTransformation],
    report: Callable[[Any, Any], Mapping[str, Any]] = lambda params, gradient: {},
) -> Trainer:
    """Returns a trainer that gives each worker the mean gradient plus noise."""

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any) -> Any:
        inner, noisy = state
        gradient = lax.pmean(jax.grad(workload.loss)(params, batch), DATA)
        gradient, noisy = noise(setting).update(gradient, noisy)
        updates, inner = optimizer.update(gradient, inner, params)
        return optax.apply_updates(params, updates), (inner, noisy), report(params, gradient)

    method = Method(lambda params, setting: (optimizer.init(params), noise(setting).init(params)), step)
    return Trainer(workload, method, workers=workers)


def _drift(study: PaftStudy, workload: Task, period: int | None) -> np.ndarray:
    """Measures the squared divergence under plain SGD, for which lemma 3.1 holds whatever the loss: all workers have
    the same mean gradient, and each has independent noise."""
    around = optax.sgd(study.rate) if period is None else paft_sync(optax.sgd(study.rate), DATA, period)

    def report(params: Any, gradient: Any) -> Mapping[str, Any]:
        free = jax.tree.map(lambda p, g: p - study.rate * g, params, gradient)
        squares = [jnp.sum(jnp.square(lax.pmean(leaf, DATA) - leaf)) for leaf in jax.tree.leaves(free)]
        return {"square": lax.pmean(sum(squares), DATA)}

    noise = gradient_noise(DATA, study.sigma, seed=study.seed)
    trainer = _trainer(study.workers, workload, around, lambda _: noise, report)
    steps = min(study.steps, study.drifting_steps)
    return trainer(steps=steps, seed=study.seed, looks=1).reports["square"][:, 0]
