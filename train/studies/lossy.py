"""The study of lost packets: perplexity and accuracy at several loss rates, and the drift between copies."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Float

from sdc.aggregation import Channel, GilbertElliott, Independent, lossy_zero2

from ..programs import DATA
from .measurements import LossyMeasured, LossyTraining
from .parts import RecordedParts
from .settings import LossyStudy
from .workloads import Method, Task, Trainer

POINTS = 40  # maximum number of points of a curve


@dataclasses.dataclass(frozen=True)
class LossyRuns:
    """Training runs at one loss rate."""

    scores: Float[np.ndarray, "seeds"]
    losses: Float[np.ndarray, "seeds"]  # training loss, averaged over the workers and the last tenth of the steps
    curve: Float[np.ndarray, "points"]  # training loss, averaged over the workers, the seeds and equal parts of the run
    drift: float  # mean squared drift between two copies divided by that of the owners' updates


def experiment(
    study: LossyStudy, workloads: Sequence[Task], kept: RecordedParts
) -> Generator[str, None, LossyMeasured]:
    """Trains over links that lose packets, and measures the drift of a random walk."""
    trainings, walks = [], {}
    for workload in workloads:
        trainings.append((yield from _by_rate(study, workload, kept)))
    for rate in study.walk_rates:
        title = f"drift at {rate:.0%}"
        walks[rate] = kept(title, float, functools.partial(_walk, study, rate))
        yield title
    return LossyMeasured(
        **study.about(workloads),
        trainings=tuple(trainings),
        walks=walks,
    )


def _losses(study: LossyStudy) -> Mapping[str, tuple[tuple[float, ...], Callable[[float], Mapping[str, Any]]]]:
    """Returns all loss models except the loss of whole shards: the rates of each model, and the settings of
    `lossy_zero2` for a rate."""

    def packets(channel: float | Channel, **more: Any) -> Mapping[str, Any]:
        return {"p_grad": channel, "p_param": channel, "packet": study.packet, **more}

    return {
        "per shard, stale (algorithm 1)": (
            study.stale_rates,
            lambda rate: {"p_grad": rate, "p_param": rate, "stale": True},
        ),
        "per packet": (study.packet_rates, packets),
        "in bursts": (study.burst_rates, lambda rate: packets(GilbertElliott(rate, study.burst))),
        "per packet, parity 1 in 4": (study.mended_rates, lambda rate: packets(Independent(rate), parity=4)),
        "per packet, largest 25 % reliable": (
            study.mended_rates,
            lambda rate: packets(Independent(rate), reliable=0.25),
        ),
    }


def _by_rate(study: LossyStudy, workload: Task, kept: RecordedParts) -> Generator[str, None, LossyTraining]:
    # Images need fewer steps than text.
    steps = study.steps if workload.metric == "perplexity" else study.steps // 2
    scores: dict[str, dict[float, np.ndarray]] = {"per shard": {}}
    losses: dict[float, np.ndarray] = {}
    curves: dict[float, np.ndarray] = {}
    drifts: dict[float, float] = {}
    for rate in study.rates:
        title = f"{workload.name}, {rate:.0%} of the shards lost"
        found = kept(title, LossyRuns, functools.partial(_scored, study, workload, steps, p_grad=rate, p_param=rate))
        scores["per shard"][rate], losses[rate], drifts[rate] = found.scores, found.losses, found.drift
        curves[rate] = found.curve
        yield title
    for name, (rates, settings) in _losses(study).items():
        for rate in rates:
            title = f"{workload.name}, {rate:.0%} lost {name}"
            found = kept(title, LossyRuns, functools.partial(_scored, study, workload, steps, **settings(rate)))
            scores.setdefault(name, {0.0: scores["per shard"][study.rates[0]]})[rate] = found.scores
            yield title
    return LossyTraining(workload.name, workload.metric, steps, scores, losses, curves, drifts)


def _scored(study: LossyStudy, workload: Task, steps: int, **settings: Any) -> LossyRuns:
    """Trains several times with the same program and different seeds."""

    def optimizer(seed: Any) -> optax.GradientTransformation:
        return lossy_zero2(workload.optimizer(steps), DATA, seed=seed, **settings)

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any, seed: Any) -> Any:
        loss, gradient = jax.value_and_grad(workload.loss)(params, batch)
        updates, state = optimizer(seed).update(gradient, state, params)
        report = {"loss": loss, "move": state.report.move, "pair_drift": state.report.pair_drift}
        return optax.apply_updates(params, updates), state, report

    trainer = Trainer(workload, Method(lambda params, setting: optimizer(0).init(params), step), workers=study.workers)
    found, middle = trainer(steps=steps, seeds=study.runs), slice(steps // 4, steps // 2)
    drift, move = (np.mean([one.reports[name][middle, 0] for one in found]) for name in ("pair_drift", "move"))
    losses = np.asarray([one.reports["loss"].mean(axis=1) for one in found])
    curve = np.asarray([part.mean() for part in np.array_split(losses.mean(axis=0), min(POINTS, steps))])
    last = losses[:, -max(1, steps // 10) :].mean(axis=1)
    return LossyRuns(np.asarray([one.score for one in found]), last, curve, float(drift / move))


def _walk(study: LossyStudy, rate: float) -> float:
    """Returns the drift between copies of shards whose owners make independent steps of variance 1: the gradient is
    noise, and the learning rate is 1."""
    optimizer = lossy_zero2(optax.sgd(1.0), DATA, 0.0, rate, packet=4, seed=study.seed)

    def run(theta: Any) -> Any:
        def step(carry: Any, number: Any) -> Any:
            theta, state = carry
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(study.seed), number), lax.axis_index(DATA))
            gradient = jax.random.normal(key, theta.shape) * study.workers**0.5
            updates, state = optimizer.update(gradient, state, theta)
            return (optax.apply_updates(theta, updates), state), state.report.pair_drift / state.report.move

        return lax.scan(step, (theta, optimizer.init(theta)), jnp.arange(study.walk))[1]

    found = jax.jit(jax.vmap(run, axis_name=DATA))(jnp.zeros((study.workers, 4096)))
    return float(np.mean(np.asarray(found)[0, study.settled :]))
