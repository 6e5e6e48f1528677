"""The study of lost packets: perplexity and accuracy at several loss rates, and the drift between copies."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sdc.aggregation import Channel, GilbertElliott, Independent, lossy_zero2

from ..programs import DATA
from .measurements import LossyMeasured, LossyTraining
from .settings import LossyStudy
from .workloads import Method, Task, Trained, Trainer


def experiment(study: LossyStudy, workloads: Sequence[Task]) -> Generator[str, None, LossyMeasured]:
    """Trains over links that lose packets, and measures the drift of a random walk."""
    trainings, walks = [], {}
    for workload in workloads:
        trainings.append((yield from _by_rate(study, workload)))
    for rate in study.walk_rates:
        walks[rate] = _walk(study, rate)
        yield f"drift at {rate:.0%}"
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
        "per packet": (study.packet_rates, packets),
        "in bursts": (study.burst_rates, lambda rate: packets(GilbertElliott(rate, study.burst))),
        "per packet, parity 1 in 4": (study.mended_rates, lambda rate: packets(Independent(rate), parity=4)),
        "per packet, largest 25 % reliable": (
            study.mended_rates,
            lambda rate: packets(Independent(rate), reliable=0.25),
        ),
    }


def _by_rate(study: LossyStudy, workload: Task) -> Generator[str, None, LossyTraining]:
    # Images need fewer steps than text.
    steps = study.steps if workload.metric == "perplexity" else study.steps // 2
    scores: dict[str, dict[float, float]] = {"per shard": {}}
    drifts: dict[float, float] = {}
    for rate in study.rates:
        found = _runs(study, workload, steps, p_grad=rate, p_param=rate)
        scores["per shard"][rate] = float(np.mean([one.score for one in found]))
        reports, middle = found[0].reports, slice(steps // 4, steps // 2)
        drifts[rate] = float(np.mean(reports["pair_drift"][middle, 0]) / np.mean(reports["move"][middle, 0]))
        for _ in found:
            yield f"{workload.name}, {rate:.0%} of the shards lost"
    for name, (rates, settings) in _losses(study).items():
        for rate in rates:
            found = _runs(study, workload, steps, **settings(rate))
            by_rate = scores.setdefault(name, {0.0: scores["per shard"][study.rates[0]]})
            by_rate[rate] = float(np.mean([one.score for one in found]))
            for _ in found:
                yield f"{workload.name}, {rate:.0%} lost {name}"
    return LossyTraining(workload.name, workload.metric, steps, study.seeds(workload), scores, drifts)


def _runs(study: LossyStudy, workload: Task, steps: int, **settings: Any) -> list[Trained]:
    """Trains several times with the same program and different seeds."""
    optimizer = lossy_zero2(workload.optimizer(steps), DATA, seed=study.seed, **settings)

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any) -> Any:
        gradient = jax.grad(workload.loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        report = {name: getattr(state.report, name) for name in ("move", "pair_drift")}
        return optax.apply_updates(params, updates), state, report

    trainer = Trainer(workload, Method(lambda params, setting: optimizer.init(params), step), workers=study.workers)
    return [trainer(steps=steps, seed=study.seed + number) for number in range(study.seeds(workload))]


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
