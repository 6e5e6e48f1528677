"""The study of DropCompute: gain and cost of a compute threshold."""

import functools
import math
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sdc.aggregation import (
    Correction,
    Stopwatch,
    accumulate,
    combine,
    completed_before,
    drop_rate,
    effective_speedup,
    extra_steps,
    gradient_sum,
    masked,
    mean_completed,
    select_threshold,
    skip_empty,
)

from ..programs import DATA
from .measurements import ClockedSpeedup, DropComputeMeasured, DroppedRun, DroppedTraining, PredictedSpeedup
from .parts import RecordedParts
from .settings import DropComputeStudy
from .workloads import Method, Task, Trainer

RATES = np.linspace(0.0, 0.3, 25)  # drop rates at which a speedup is predicted


def experiment(
    study: DropComputeStudy, workloads: Sequence[Task], kept: RecordedParts
) -> Generator[str, None, DropComputeMeasured]:
    """Predicts the speedup of a threshold, measures the speedup on real clocks, and trains with a threshold."""
    predicted, clocked, trainings = [], [], []
    for workers in study.fleets:
        title = f"prediction for {workers:,} workers"
        predicted.append(kept(title, PredictedSpeedup, functools.partial(_predict, study, workers)))
        yield title
    for workers in study.threads:
        title = f"{workers} workers on a real clock"
        clocked.append(kept(title, ClockedSpeedup, functools.partial(_clock, study, workers)))
        yield title
    for workload in workloads:
        trainings.append((yield from _train(study, workload, kept)))
    return DropComputeMeasured(
        **study.about(workloads),
        predicted=tuple(predicted),
        clocked=tuple(clocked),
        trainings=tuple(trainings),
    )


def _sampled(study: DropComputeStudy, workers: int, seed: int, iterations: int = 100) -> np.ndarray:
    return np.asarray(study.latency.sample(jax.random.key(seed), (iterations, workers, study.micro_batches)))


def threshold_at(latencies: np.ndarray, rate: float) -> float:
    """Returns the threshold, in seconds, that drops the given share of the micro-batches: a quantile of their end
    times."""
    ends = np.sort(np.cumsum(latencies.astype(np.float64), axis=-1), axis=None)
    return float(np.nextafter(ends[min(len(ends) - 1, math.ceil(len(ends) * (1 - rate)) - 1)], math.inf))


def _predict(study: DropComputeStudy, workers: int) -> PredictedSpeedup:
    latencies = _sampled(study, workers, study.seed)
    choice = select_threshold(latencies, study.serial)
    longest = float(np.cumsum(latencies, axis=-1)[..., -1].max(axis=1).mean()) + study.serial
    gains = tuple(effective_speedup(latencies, study.serial, threshold_at(latencies, rate)) for rate in RATES)
    return PredictedSpeedup(
        workers, longest, choice.threshold, choice.drop_rate, choice.speedup, tuple(RATES.tolist()), gains
    )


def _clock(study: DropComputeStudy, workers: int) -> ClockedSpeedup:
    """Measures the speedup with threads that wait for sampled latencies and stop at the threshold."""
    scale = study.unit / study.latency.base
    latencies = _sampled(study, workers, study.seed, study.iterations).astype(np.float64) * scale
    serial = study.serial * scale
    choice = select_threshold(latencies, serial)
    watch = Stopwatch(lambda total, one, _: total + one, math.inf)
    ones = [jnp.float32(1)] * latencies.shape[-1]

    def iterate(watch: Stopwatch) -> tuple[int, float]:
        """Returns the number of completed micro-batches and the duration of all iterations, in seconds; each iteration
        ends when its slowest worker does."""

        def one(delays: np.ndarray) -> int:
            return watch.run(jnp.float32(0), ones, delays=delays.tolist()).completed

        list(pool.map(one, latencies[0]))  # compile and start the threads
        done, started = 0, time.perf_counter()
        for iteration in latencies:
            done += sum(pool.map(one, iteration))
            time.sleep(serial)
        return done, time.perf_counter() - started

    with ThreadPoolExecutor(workers) as pool:
        free, stopped = iterate(watch), iterate(watch.at(choice.threshold))
    gain = (stopped[0] / stopped[1]) / (free[0] / free[1])
    return ClockedSpeedup(workers, study.iterations, free[1], stopped[1], gain, choice.speedup)


def _train(study: DropComputeStudy, workload: Task, kept: RecordedParts) -> Generator[str, None, DroppedTraining]:
    sampled = _sampled(study, study.workers, study.seed + 1)
    mended = threshold_at(sampled, study.mended)
    extra = extra_steps(study.steps, mean_completed(sampled, mended), study.micro_batches)

    def run(
        trainer: Trainer, threshold: float, rate: float, extra: int = 0, correction: Correction = "none"
    ) -> DroppedRun:
        found = trainer(jnp.float32(threshold), steps=study.steps + extra, seeds=study.runs)
        latencies = np.stack([each.reports["latencies"] for each in found])
        dropped = 0.0 if rate == 0 else float(np.mean([drop_rate(each, threshold) for each in latencies]))
        longest = latencies.sum(axis=-1).max(axis=2)
        ends, unstopped = (
            np.cumsum(np.minimum(longest, limit) + study.serial, axis=1) for limit in (threshold, math.inf)
        )
        losses = np.stack([each.reports["loss"][:, 0] for each in found])
        scores = np.asarray([each.score for each in found])
        return DroppedRun(rate, extra, correction, dropped, scores, losses, ends, unstopped[:, -1])

    trainer = _trainer(study, workload)
    parts = {"no threshold": functools.partial(run, trainer, math.inf, 0.0)}
    for rate in study.drops:
        parts[f"{rate:.0%} dropped"] = functools.partial(run, trainer, threshold_at(sampled, rate), rate)
    parts["extra steps"] = functools.partial(run, _trainer(study, workload, extra), mended, study.mended, extra)
    corrections: tuple[Correction, ...] = ("rate", "count")
    for correction in corrections:
        other = _trainer(study, workload, 0, correction)
        parts[f"correction by {correction}"] = functools.partial(
            run, other, mended, study.mended, correction=correction
        )
    runs = []
    for name, part in parts.items():
        title = f"{workload.name}, {name}"
        runs.append(kept(title, DroppedRun, part))
        yield title
    return DroppedTraining(workload.name, workload.metric, tuple(runs))


def _trainer(study: DropComputeStudy, workload: Task, extra: int = 0, correction: Correction = "none") -> Trainer:
    """Returns a trainer with simulated latencies; its setting is the threshold."""
    optimizer = skip_empty(workload.optimizer(study.steps + extra))
    micro, rate = study.micro_batches, 0.0 if correction == "none" else study.mended

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any, seed: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), jax.lax.axis_index(DATA))
        latencies = study.latency.sample(key, (micro,))
        completed = completed_before(latencies, setting)
        total = masked(accumulate(workload.loss), gradient_sum(params), batch, completed, params)
        found = combine(total, DATA, completed, micro, correction=correction, drop_rate=rate)
        updates, state = optimizer.update(found.gradient, state, params, empty=found.empty)
        return optax.apply_updates(params, updates), state, {"latencies": latencies, "loss": found.loss}

    return Trainer(
        workload,
        Method(lambda params, setting: optimizer.init(params), step),
        workers=study.workers,
        rows=study.workers * micro,
        cut=lambda batch: jax.tree.map(lambda leaf: leaf.reshape(micro, -1, *leaf.shape[1:]), batch),
    )
