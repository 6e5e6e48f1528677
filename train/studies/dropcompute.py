"""The study of DropCompute: gain and cost of a compute threshold."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int32

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
    parse_latency,
    select_threshold,
    skip_empty,
)

from ..programs import DATA
from .measurements import (
    ClockedSpeedup,
    Distributions,
    DropComputeMeasured,
    DroppedRun,
    DroppedTraining,
    LocalSpeedup,
    NoisySpeedup,
    PredictedSpeedup,
)
from .parts import RecordedParts
from .settings import NOISES, DropComputeStudy
from .workloads import Method, Task, Trainer

RATES = np.linspace(0.0, 0.3, 25)  # drop rates at which a speedup is predicted
# Local SGD in figure 12 of the paper: number of workers, share of the local steps that are delayed by a second, and
# share that is dropped. The paper states neither the duration of a local step nor the size of a server.
FLEET, STRAGGLERS, DROPPED, LOCAL_STEP, SERVER = 32, 0.04, 0.062, 0.45, 8
ROUNDS = 400  # averages of a simulated run of local SGD
SPREAD_RATES = (0.0, 0.025, 0.055, 0.115)  # of figures 2 and 8
ITERATIONS, ALONE = 1000, 5000  # numbers of sampled iterations, and of sampled times of one worker


def experiment(
    study: DropComputeStudy, workloads: Sequence[Task], kept: RecordedParts
) -> Generator[str, None, DropComputeMeasured]:
    """Predicts the speedup of a threshold, measures the speedup on real clocks, and trains with a threshold."""
    predicted, noisy, local, clocked, trainings = [], [], [], [], []
    for workers in study.fleets:
        title = f"prediction for {workers:,} workers"
        predicted.append(kept(title, PredictedSpeedup, functools.partial(_predict, study, workers)))
        yield title
    distributions = None
    if study.spread:
        title = f"distributions of {study.spread} workers"
        distributions = kept(title, Distributions, functools.partial(_distributions, study))
        yield title
    for figure in NOISES if study.noisy_fleets else ():
        title = f"delays of figure {figure}"
        noisy.append(kept(title, NoisySpeedup, functools.partial(_delayed, study, figure)))
        yield title
    for server, period in itertools.product((False, True), study.local_periods):
        title = f"local SGD, {period} steps, {'one server' if server else 'all workers'}"
        local.append(kept(title, LocalSpeedup, functools.partial(_local, study, period, server)))
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
        distributions=distributions,
        noisy=tuple(noisy),
        local=tuple(local),
        clocked=tuple(clocked),
        trainings=tuple(trainings),
    )


def _sampled(
    study: DropComputeStudy, workers: int, seed: int, iterations: int = 100, micro_batches: int | None = None
) -> np.ndarray:
    shape = (iterations, workers, micro_batches or study.micro_batches)
    return np.asarray(study.latency.sample(jax.random.key(seed), shape))


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


def _distributions(study: DropComputeStudy) -> Distributions:
    latencies = _sampled(study, study.spread, study.seed, ITERATIONS).astype(np.float64)
    ends = np.cumsum(latencies, axis=-1)
    starts = ends - latencies
    steps, batches = [], []
    for rate in SPREAD_RATES:
        # As with `Stopwatch`, the micro-batch in flight at the threshold is completed.
        done = starts <= np.quantile(starts, 1 - rate)
        steps.append(np.where(done, ends, 0.0).max(axis=(1, 2)))
        batches.append(done.mean(axis=(1, 2)))
    alone = ends[: -(-ALONE // study.spread), :, -1].ravel()[:ALONE]
    return Distributions(study.spread, SPREAD_RATES, alone, np.stack(steps), np.stack(batches))


def _delayed(study: DropComputeStudy, figure: str) -> NoisySpeedup:
    base, text = NOISES[figure]
    delay = parse_latency(text)
    found = np.zeros((3, len(study.noisy_fleets), study.seeds))
    shape = (study.iterations, max(study.noisy_fleets), study.micro_batches)
    for run, seed in enumerate(study.runs):
        largest = base + np.asarray(delay.sample(jax.random.key(seed), shape), np.float64)
        for place, workers in enumerate(study.noisy_fleets):
            latencies = largest[:, :workers]
            times = latencies.sum(axis=-1)
            choice = select_threshold(latencies, study.serial)
            found[:, place, run] = times.max(axis=1).mean() / times.mean(), choice.drop_rate, choice.speedup
    return NoisySpeedup(figure, f"{base:g} + {text}" if base else text, study.noisy_fleets, *found)


def _local(study: DropComputeStudy, period: int, server: bool) -> LocalSpeedup:
    """Simulates local steps, some of which are delayed; stragglers are anywhere, or as often in a single server."""
    found = np.zeros((3, study.seeds))
    for run, seed in enumerate(study.runs):
        rng = np.random.default_rng([seed, period, server])
        shares = np.where(np.arange(FLEET) < SERVER, STRAGGLERS * FLEET / SERVER, 0.0) if server else STRAGGLERS
        slow = rng.random((ROUNDS, FLEET, period)) < np.broadcast_to(shares, FLEET)[None, :, None]
        latencies = LOCAL_STEP + slow.astype(np.float64)
        together = latencies.max(axis=1).sum(axis=1)  # of as many steps, each of which ends when the slowest one does
        longest = latencies.sum(axis=-1).max(axis=1)
        threshold = threshold_at(latencies, DROPPED)
        dropped = drop_rate(latencies, threshold)
        stopped = np.minimum(longest, threshold).sum()
        found[:, run] = dropped, together.sum() / longest.sum(), (1 - dropped) * together.sum() / stopped
    return LocalSpeedup(period, server, *found)


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
    micro = study.micro_batches
    sampled = _sampled(study, study.workers, study.seed + 1)
    mended = threshold_at(sampled, study.mended)
    completed = micro * (1 - drop_rate(sampled, mended))
    extra = extra_steps(study.steps, completed, micro)
    larger = micro + extra_steps(micro, completed, micro)  # as many samples are completed as without a threshold
    later = threshold_at(_sampled(study, study.workers, study.seed + 1, micro_batches=larger), 1 - micro / larger)

    def run(
        trainer: Trainer,
        threshold: float,
        rate: float,
        compensation: str = "none",
        correction: Correction = "none",
        steps: int = study.steps,
    ) -> DroppedRun:
        found = trainer(jnp.float32(threshold), steps=steps, seeds=study.runs)
        latencies = np.stack([each.reports["latencies"] for each in found])
        dropped = 0.0 if rate == 0 else float(np.mean([drop_rate(each, threshold) for each in latencies]))
        longest = latencies.sum(axis=-1).max(axis=2)
        ends = np.cumsum(np.minimum(longest, threshold) + study.serial, axis=1)
        losses = np.stack([each.reports["loss"][:, 0] for each in found])
        scores = np.asarray([each.score for each in found])
        return DroppedRun(rate, compensation, correction, dropped, scores, losses, ends)

    trainer = _trainer(study, workload)
    parts = {"no threshold": functools.partial(run, trainer, math.inf, 0.0)}
    for rate in study.drops:
        parts[f"{rate:.0%} dropped"] = functools.partial(run, trainer, threshold_at(sampled, rate), rate)
    for name, other, threshold, steps in (
        ("extra steps", _trainer(study, workload, steps=study.steps + extra), mended, study.steps + extra),
        ("larger batch", _trainer(study, workload, micro=larger), later, study.steps),
        ("repetition", _trainer(study, _repeating(study, workload, mended)), mended, study.steps),
    ):
        parts[name] = functools.partial(run, other, threshold, study.mended, name, steps=steps)
    corrections: tuple[Correction, ...] = ("rate", "count")
    for correction in corrections:
        other = _trainer(study, workload, correction=correction)
        parts[f"correction by {correction}"] = functools.partial(
            run, other, mended, study.mended, correction=correction
        )
    runs = []
    for name, part in parts.items():
        title = f"{workload.name}, {name}"
        runs.append(kept(title, DroppedRun, part))
        yield title
    shares = (yield from _drop_shares(study, workload, kept)) if workload.metric == "accuracy" else {}
    return DroppedTraining(workload.name, workload.metric, tuple(runs), shares)


def _drop_shares(
    study: DropComputeStudy, workload: Task, kept: RecordedParts
) -> Generator[str, None, Mapping[str, Mapping[float, np.ndarray]]]:
    """Drops each worker's share of a batch with a given probability, as for figures 10 and 11 of the paper."""
    found: dict[str, dict[float, np.ndarray]] = {}
    corrections: tuple[Correction, ...] = ("none", "rate", "count")
    for correction in corrections:
        trainer = _trainer_of_shares(study, workload, correction)
        found[correction] = {}
        for rate in (0.0, *study.drops) if correction == "none" else study.drops:
            title = f"{workload.name}, shares dropped with probability {rate}, correction by {correction}"
            found[correction][rate] = kept(title, np.ndarray, functools.partial(_scores, study, trainer, rate))
            yield title
    return found


def _scores(study: DropComputeStudy, trainer: Trainer, rate: float) -> Float[np.ndarray, "seeds"]:
    found = trainer(jnp.float32(rate), steps=study.steps, seeds=study.runs)
    return np.asarray([each.score for each in found])


def _latencies(study: DropComputeStudy, micro: int, seed: Any, number: Any, worker: Any) -> Float32[Array, " micro"]:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), worker)
    return study.latency.sample(key, (micro,))


def _trainer(
    study: DropComputeStudy,
    workload: Task,
    *,
    steps: int | None = None,
    micro: int | None = None,
    correction: Correction = "none",
) -> Trainer:
    """Returns a trainer with simulated latencies; its setting is the threshold."""
    optimizer = skip_empty(workload.optimizer(steps or study.steps))
    count, rate = micro or study.micro_batches, 0.0 if correction == "none" else study.mended

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any, seed: Any) -> Any:
        latencies = _latencies(study, count, seed, number, jax.lax.axis_index(DATA))
        completed = completed_before(latencies, setting)
        total = masked(accumulate(workload.loss), gradient_sum(params), batch, completed, params)
        found = combine(total, DATA, completed, count, correction=correction, drop_rate=rate)
        updates, state = optimizer.update(found.gradient, state, params, empty=found.empty)
        return optax.apply_updates(params, updates), state, {"latencies": latencies, "loss": found.loss}

    return Trainer(
        workload,
        Method(lambda params, setting: optimizer.init(params), step),
        workers=study.workers,
        rows=study.workers * count,
        cut=lambda batch: jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch),
    )


def _trainer_of_shares(study: DropComputeStudy, workload: Task, correction: Correction) -> Trainer:
    """Returns a trainer without micro-batches; its setting is the probability that a worker drops its share."""
    optimizer = skip_empty(workload.optimizer(study.steps))

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any, seed: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), jax.lax.axis_index(DATA))
        completed = (jax.random.uniform(key) >= setting).astype(jnp.int32)
        total = masked(accumulate(workload.loss), gradient_sum(params), batch, completed, params)
        found = combine(total, DATA, completed, 1, correction="none" if correction == "rate" else correction)
        # `combine` takes a rate that is not traced.
        gradient = jax.tree.map(lambda leaf: (1 - setting) * leaf if correction == "rate" else leaf, found.gradient)
        updates, state = optimizer.update(gradient, state, params, empty=found.empty)
        return optax.apply_updates(params, updates), state, {}

    return Trainer(
        workload,
        Method(lambda params, setting: optimizer.init(params), step),
        workers=study.workers,
        rows=study.workers * study.micro_batches,
        cut=lambda batch: jax.tree.map(lambda leaf: leaf[None], batch),
    )


def _repeating(study: DropComputeStudy, workload: Task, threshold: float) -> Task:
    """Returns the task with other data: as soon as the dropped samples fill a batch, they are the next one."""

    def completed(seed: Any, number: Any) -> Int32[Array, " workers"]:
        one = functools.partial(_latencies, study, study.micro_batches, seed, number)
        return jax.vmap(lambda worker: completed_before(one(worker), jnp.float32(threshold)))(jnp.arange(study.workers))

    counts = jax.jit(completed)

    def data(rows: int, seed: int) -> Iterator[Any]:
        order = np.arange(rows).reshape(study.workers, study.micro_batches, -1)
        source = workload.data(rows, seed)
        waiting: list[Any] = []  # dropped rows
        for number in itertools.count():
            if len(waiting) < rows:
                batch = next(source)
            else:
                batch, waiting = jax.tree.map(lambda *leaves: np.stack(leaves), *waiting[:rows]), waiting[rows:]
            yield batch
            for samples, done in zip(order, np.asarray(counts(np.uint32(seed), number)), strict=True):
                waiting += [jax.tree.map(lambda leaf, at=at: leaf[at], batch) for at in samples[done:].ravel()]

    return dataclasses.replace(workload, data=data)
