"""The study of DropCompute: what a compute threshold gains, and what it costs."""

import dataclasses
import math
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sdc.aggregation import (
    BoundedLogNormal,
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
from .protocol import Study
from .workloads import Method, Task, Trained, Trainer

LATENCY = BoundedLogNormal(0.45)
SAMPLED = 100
"""Iterations of which latencies are sampled."""
RATES = np.linspace(0.0, 0.3, 25)
"""Drop rates for which a speedup is predicted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropComputeStudy(Study[DropComputeMeasured]):
    """Speedup against drop rate and workers, predicted and on a real clock; loss against steps and time.

    Attributes:
        micro_batches: micro-batches of a step of a worker, as in the paper's environment of simulated delays.
        latency: latency of a micro-batch, in seconds.
        serial: seconds of the rest of a step.
        fleets: workers for which the speedup is predicted.
        threads: workers whose speedup is measured, threads with a clock each.
        unit: base of their delays, in seconds.
        iterations: iterations of a measurement.
        drops: drop rates of the trainings.
        mended: the drop rate that is made up for by extra steps, and by corrections.

    Example:
        >>> from sdc.train.studies import DropComputeStudy, finish
        >>> study = DropComputeStudy(workers=2, fleets=(4, 64), threads=())
        >>> found = finish(study.run([]))
        >>> [1 < one.speedup < 1.4 for one in found.predicted]
        [True, True]
    """

    name: ClassVar[str] = "dropcompute"
    workers: int = 8
    steps: int = 200
    micro_batches: int = 12
    latency: BoundedLogNormal = LATENCY
    serial: float = 0.5
    fleets: tuple[int, ...] = (8, 32, 112, 512, 2048)
    threads: tuple[int, ...] = (2, 4, 8)
    unit: float = 0.004
    iterations: int = 25
    drops: tuple[float, ...] = (0.03, 0.06, 0.1, 0.2)
    mended: float = 0.1

    def count(self, workloads: Sequence[Task]) -> int:
        return len(self.fleets) + len(self.threads) + len(workloads) * (1 + len(self.drops) + 3)

    def run(self, workloads: Sequence[Task]) -> Generator[str, None, DropComputeMeasured]:
        predicted, clocked, trainings = [], [], []
        for workers in self.fleets:
            predicted.append(self._predict(workers))
            yield f"prediction for {workers:,} workers"
        for workers in self.threads:
            clocked.append(self._clock(workers))
            yield f"{workers} workers on a real clock"
        for workload in workloads:
            trainings.append((yield from self._train(workload)))
        return DropComputeMeasured(
            **self.about(workloads),
            micro_batches=self.micro_batches,
            base=self.latency.base,
            mean=self.latency.mean,
            deviation=math.sqrt(self.latency.variance),
            serial=self.serial,
            predicted=tuple(predicted),
            clocked=tuple(clocked),
            trainings=tuple(trainings),
        )

    def _sampled(self, workers: int, seed: int, iterations: int = SAMPLED) -> np.ndarray:
        return np.asarray(self.latency.sample(jax.random.key(seed), (iterations, workers, self.micro_batches)))

    def _predict(self, workers: int) -> PredictedSpeedup:
        latencies = self._sampled(workers, self.seed)
        choice = select_threshold(latencies, self.serial)
        longest = float(np.cumsum(latencies, axis=-1)[..., -1].max(axis=1).mean()) + self.serial
        gains = [effective_speedup(latencies, self.serial, threshold_at(latencies, rate)) for rate in RATES]
        return PredictedSpeedup(
            workers, longest, choice.threshold, choice.drop_rate, choice.speedup, tuple(RATES.tolist()), tuple(gains)
        )

    def _clock(self, workers: int) -> ClockedSpeedup:
        """Threads that wait as sampled latencies say, and stop at the threshold."""
        scale = self.unit / self.latency.base
        latencies = self._sampled(workers, self.seed, self.iterations).astype(np.float64) * scale
        serial = self.serial * scale
        choice = select_threshold(latencies, serial)
        watch = Stopwatch(lambda total, one, _: total + one, math.inf)
        with ThreadPoolExecutor(workers) as pool:
            free = _iterations(pool, watch, latencies, serial)
            stopped = _iterations(pool, watch.at(choice.threshold), latencies, serial)
        gain = (stopped[0] / stopped[1]) / (free[0] / free[1])
        return ClockedSpeedup(workers, self.iterations, free[1], stopped[1], gain, choice.speedup)

    def _train(self, workload: Task) -> Generator[str, None, DroppedTraining]:
        sampled = self._sampled(self.workers, self.seed + 1)
        trainer = self._trainer(workload, self.steps, "none", 0.0)
        runs = [self._run(trainer, math.inf, 0.0)]
        yield f"{workload.name}, no threshold"
        for rate in self.drops:
            runs.append(self._run(trainer, threshold_at(sampled, rate), rate))
            yield f"{workload.name}, {rate:.0%} dropped"
        threshold = threshold_at(sampled, self.mended)
        extra = extra_steps(self.steps, mean_completed(sampled, threshold), self.micro_batches)
        longer = self._trainer(workload, self.steps + extra, "none", 0.0)
        runs.append(self._run(longer, threshold, self.mended, extra))
        yield f"{workload.name}, extra steps"
        corrections: tuple[Correction, ...] = ("rate", "count")
        for correction in corrections:
            other = self._trainer(workload, self.steps, correction, self.mended)
            runs.append(self._run(other, threshold, self.mended, correction=correction))
            yield f"{workload.name}, correction by {correction}"
        return DroppedTraining(workload.name, workload.metric, tuple(runs))

    def _trainer(self, workload: Task, steps: int, correction: Correction, rate: float) -> Trainer:
        """Training with simulated latencies; the setting is the threshold."""
        optimizer = skip_empty(workload.optimizer(steps))
        micro = self.micro_batches

        def step(params: Any, state: Any, batch: Any, number: Any, setting: Any) -> Any:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), number), jax.lax.axis_index(DATA))
            latencies = self.latency.sample(key, (micro,))
            completed = completed_before(latencies, setting)
            total = masked(accumulate(workload.loss), gradient_sum(params), batch, completed, params)
            found = combine(total, DATA, completed, micro, correction=correction, drop_rate=rate)
            updates, state = optimizer.update(found.gradient, state, params, empty=found.empty)
            return optax.apply_updates(params, updates), state, {"latencies": latencies, "loss": found.loss}

        return Trainer(
            workload,
            Method(lambda params, setting: optimizer.init(params), step),
            workers=self.workers,
            rows=self.workers * micro,
            cut=lambda batch: jax.tree.map(lambda leaf: leaf.reshape(micro, -1, *leaf.shape[1:]), batch),
        )

    def _run(
        self, trainer: Trainer, threshold: float, rate: float, extra: int = 0, correction: Correction = "none"
    ) -> DroppedRun:
        found = trainer(jnp.float32(threshold), steps=self.steps + extra, seed=self.seed)
        dropped = 0.0 if rate == 0 else drop_rate(found.reports["latencies"], threshold)
        unstopped = float(self._ends(found, math.inf)[-1])
        ends, losses = self._ends(found, threshold), found.reports["loss"][:, 0]
        return DroppedRun(rate, extra, correction, dropped, found.score, losses, ends, unstopped)

    def _ends(self, found: Trained, threshold: float) -> np.ndarray:
        """Simulated time at the end of each step."""
        longest = found.reports["latencies"].sum(axis=-1).max(axis=1)
        return np.cumsum(np.minimum(longest, threshold) + self.serial)


def threshold_at(latencies: np.ndarray, rate: float) -> float:
    """The threshold that drops this share of the micro-batches: a quantile of the times at which they end."""
    ends = np.sort(np.cumsum(latencies.astype(np.float64), axis=-1), axis=None)
    return float(np.nextafter(ends[min(len(ends) - 1, math.ceil(len(ends) * (1 - rate)) - 1)], math.inf))


def _iterations(pool: ThreadPoolExecutor, watch: Stopwatch, latencies: np.ndarray, serial: float) -> tuple[int, float]:
    """Completed micro-batches and seconds of all iterations; each ends when its slowest worker does."""
    ones = [jnp.float32(1)] * latencies.shape[-1]

    def one(delays: np.ndarray) -> int:
        return watch.run(jnp.float32(0), ones, delays=delays.tolist()).completed

    list(pool.map(one, latencies[0]))  # compiled, and threads started
    done, started = 0, time.perf_counter()
    for iteration in latencies:
        done += sum(pool.map(one, iteration))
        time.sleep(serial)
    return done, time.perf_counter() - started
