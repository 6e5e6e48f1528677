"""`sdc study dropcompute`: what a compute threshold gains, and what it costs."""

import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sdc.aggregation import Stopwatch, accumulate, combine, completed_before, gradient_sum, masked, skip_empty
from sdc.aggregation.delays import BoundedLogNormal
from sdc.aggregation.expected import expected_speedup
from sdc.aggregation.speedup import (
    drop_rate,
    effective_speedup,
    extra_steps,
    mean_completed,
    select_threshold,
)
from sdc.analysis.aggregation import Chart, Check, Findings, Grid, Line

from .training import DATA, Method, Trained, Trainer
from .workloads import Workload

WORKERS = 8
STEPS = 200
MICRO_BATCHES = 12
"""Of a step of a worker, as in the paper's environment of simulated delays."""
LATENCY = BoundedLogNormal(0.45)
SERIAL = 0.5
"""Seconds of the rest of a step."""
FLEETS = (8, 32, 112, 512, 2048)
"""Workers for which the speedup is predicted."""
THREADS = (2, 4, 8)
"""Workers whose speedup is measured: threads with a clock each."""
MILLISECONDS = 0.004
"""Base of their delays, in seconds."""
ITERATIONS = 25
DROPS = (0.03, 0.06, 0.1, 0.2)
PUBLISHED = {0.0: 91.32, 0.03: 91.34, 0.06: 91.44, 0.1: 91.19}
"""F1 on SQuAD of BERT-Large pretrained with dropped micro-batches, by drop rate (table 1a of the paper)."""


def count(workloads: list[Workload]) -> int:
    """Runs of the study, for the progress display."""
    return len(FLEETS) + len(THREADS) + len(workloads) * (1 + len(DROPS) + 3)


def study(workloads: list[Workload], *, steps: int, seed: int) -> Iterator[tuple[str, Findings]]:
    """Runs the study.

    Yields:
        What was done, and what has been found by it.
    """
    yield from _predicted(seed)
    yield from _measured(seed)
    for workload in workloads:
        yield from _training(workload, steps, seed)


def _sampled(workers: int, seed: int, iterations: int = 100) -> np.ndarray:
    return np.asarray(LATENCY.sample(jax.random.key(seed), (iterations, workers, MICRO_BATCHES)))


def _threshold(latencies: np.ndarray, rate: float) -> float:
    """The threshold that drops this share of the micro-batches: a quantile of the times at which they end."""
    ends = np.sort(np.cumsum(latencies.astype(np.float64), axis=-1), axis=None)
    return float(np.nextafter(ends[min(len(ends) - 1, math.ceil(len(ends) * (1 - rate)) - 1)], math.inf))


def _predicted(seed: int) -> Iterator[tuple[str, Findings]]:
    rows, lines = [], []
    best, analytic = [], []
    for workers in FLEETS:
        latencies = _sampled(workers, seed)
        choice = select_threshold(latencies, SERIAL)
        longest = float(np.cumsum(latencies, axis=-1)[..., -1].max(axis=1).mean()) + SERIAL
        mean, deviation = LATENCY.mean, math.sqrt(LATENCY.variance)
        theory = [
            expected_speedup(mean, deviation, MICRO_BATCHES, workers, SERIAL, choice.threshold, known)
            for known in (None, longest)
        ]
        best.append(choice.speedup)
        analytic.append(theory[0])
        rows.append((f"{workers:,}", longest, choice.threshold, choice.drop_rate, choice.speedup, *theory))
        rates = np.linspace(0.0, 0.3, 25)
        gains = [effective_speedup(latencies, SERIAL, _threshold(latencies, rate)) for rate in rates]
        lines.append(Line(f"{workers:,} workers", rates.tolist(), gains))
        yield f"prediction for {workers:,} workers", Findings()
    grid = Grid(
        f"Predicted effective speedup by number of workers: {MICRO_BATCHES} micro-batches of {LATENCY.base} s with "
        f"bounded log-normal delays, {SERIAL} s for the rest",
        (
            "workers", "step without threshold, s", "best threshold, s", "drop rate", "speedup (algorithm 2)",
            "equations (5), (7)", "the same, measured E[T]",
        ),
        tuple(rows),
        "Algorithm 2 on 100 sampled iterations. Equation (7) takes the slowest of normal times; tails are longer here.",
    )  # fmt: skip
    charts = (
        Chart(
            "Effective speedup against drop rate", "Post analysis of sampled latencies, as in figure 4 of the paper.",
            "drop rate", "effective speedup", tuple(lines),
        ),
        Chart(
            "Effective speedup against workers", "At the best threshold for each number of workers.",
            "workers", "effective speedup",
            (Line("algorithm 2", FLEETS, best), Line("equations (5), (7)", FLEETS, analytic, dashed=True)), log="x",
        ),
    )  # fmt: skip
    growing = all(a < b for a, b in itertools.pairwise(best))
    yield (
        "",
        Findings(
            (grid,),
            charts,
            (Check("speedup grows with the number of workers", growing, ", ".join(f"{gain:.3f}" for gain in best)),),
        ),
    )


def _measured(seed: int) -> Iterator[tuple[str, Findings]]:
    """Threads that wait as sampled latencies say, and stop at the threshold: speedup on a real clock."""
    rows, ratios = [], []
    watch = Stopwatch(lambda total, one, _: total + one, math.inf)
    for workers in THREADS:
        scale = MILLISECONDS / LATENCY.base
        latencies = _sampled(workers, seed, ITERATIONS).astype(np.float64) * scale
        serial = SERIAL * scale
        choice = select_threshold(latencies, serial)
        with ThreadPoolExecutor(workers) as pool:
            free = _iterations(pool, watch, latencies, serial)
            stopped = _iterations(pool, watch.at(choice.threshold), latencies, serial)
        gain = (stopped[0] / stopped[1]) / (free[0] / free[1])
        ratios.append(gain / choice.speedup)
        rows.append(
            (str(workers), free[1] / ITERATIONS, stopped[1] / ITERATIONS, gain, choice.speedup, gain / choice.speedup)
        )
        yield f"{workers} workers on a real clock", Findings()
    grid = Grid(
        "Measured effective speedup: threads with injected delays, on a real clock",
        ("workers", "step, s", "step with threshold, s", "measured", "predicted (algorithm 2)", "measured / predicted"),
        tuple(rows),
        f"{ITERATIONS} iterations of {MICRO_BATCHES} micro-batches; completed micro-batches a second.",
    )
    off = max(abs(ratio - 1) for ratio in ratios)
    yield (
        "",
        Findings((grid,), (), (Check("the measured speedup is the predicted one", off < 0.05, f"within {off:.1%}"),)),
    )


def _iterations(pool: ThreadPoolExecutor, watch: Stopwatch, latencies: np.ndarray, serial: float) -> tuple[int, float]:
    """Completed micro-batches and seconds of all iterations; each ends when its slowest worker does."""
    ones = [jnp.float32(1)] * MICRO_BATCHES

    def one(delays: np.ndarray) -> int:
        return watch.run(jnp.float32(0), ones, delays=delays.tolist()).completed

    list(pool.map(one, latencies[0]))  # compiled, and threads started
    done, started = 0, time.perf_counter()
    for iteration in latencies:
        done += sum(pool.map(one, iteration))
        time.sleep(serial)
    return done, time.perf_counter() - started


def _trainer(workload: Workload, steps: int, seed: int, correction: Any, rate: float, rows: int) -> Trainer:
    """Training with simulated latencies; the setting is the threshold."""
    optimizer = skip_empty(workload.optimizer(steps))

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), jax.lax.axis_index(DATA))
        latencies = LATENCY.sample(key, (MICRO_BATCHES,))
        completed = completed_before(latencies, setting)
        total = masked(accumulate(workload.loss), gradient_sum(params), batch, completed, params)
        found = combine(total, DATA, completed, MICRO_BATCHES, correction=correction, drop_rate=rate)
        updates, state = optimizer.update(found.gradient, state, params, empty=found.empty)
        return optax.apply_updates(params, updates), state, {"latencies": latencies, "loss": found.loss}

    return Trainer(
        workload,
        Method(lambda params, setting: optimizer.init(params), step),
        workers=WORKERS,
        rows=rows,
        cut=lambda batch: jax.tree.map(lambda leaf: leaf.reshape(MICRO_BATCHES, -1, *leaf.shape[1:]), batch),
    )


def _seconds(found: Trained, threshold: float) -> np.ndarray:
    """Simulated time at the end of each step."""
    longest = found.reports["latencies"].sum(axis=-1).max(axis=1)
    return np.cumsum(np.minimum(longest, threshold) + SERIAL)


def _training(workload: Workload, steps: int, seed: int) -> Iterator[tuple[str, Findings]]:
    rows_of = WORKERS * MICRO_BATCHES
    sampled = _sampled(WORKERS, seed + 1)
    trainer = _trainer(workload, steps, seed, "none", 0.0, rows_of)
    base = trainer(jnp.float32(math.inf), steps=steps, seed=seed)
    runs = {"no threshold": (base, math.inf, 0.0)}
    yield f"{workload.name}, no threshold", Findings()
    for rate in DROPS:
        threshold = _threshold(sampled, rate)
        found = trainer(jnp.float32(threshold), steps=steps, seed=seed)
        runs[f"{rate:.0%} dropped"] = found, threshold, rate
        yield f"{workload.name}, {rate:.0%} dropped", Findings()
    threshold, rate = _threshold(sampled, DROPS[2]), DROPS[2]
    more = steps + extra_steps(steps, mean_completed(sampled, threshold), MICRO_BATCHES)
    longer = _trainer(workload, more, seed, "none", 0.0, rows_of)
    runs[f"{rate:.0%} dropped, {more - steps} extra steps"] = (
        longer(jnp.float32(threshold), steps=more, seed=seed), threshold, rate,
    )  # fmt: skip
    yield f"{workload.name}, extra steps", Findings()
    for correction in ("rate", "count"):
        other = _trainer(workload, steps, seed, correction, rate, rows_of)
        runs[f"{rate:.0%} dropped, correction by {correction}"] = (
            other(jnp.float32(threshold), steps=steps, seed=seed), threshold, rate,
        )  # fmt: skip
        yield f"{workload.name}, correction by {correction}", Findings()

    rows, by_step, by_time = [], [], []
    for name, (found, threshold, rate) in runs.items():
        seconds = _seconds(found, threshold)
        loss = _smooth(found.reports["loss"][:, 0])
        dropped = 0.0 if rate == 0 else drop_rate(found.reports["latencies"], threshold)
        plain = _seconds(found, math.inf)[-1]
        rows.append(
            (name, dropped, found.score, float(loss[-1]), float(seconds[-1]), float(plain / seconds[-1]),
             PUBLISHED.get(rate) if "," not in name else None)
        )  # fmt: skip
        if "correction" not in name:
            by_step.append(Line(name, list(range(1, len(loss) + 1)), loss.tolist()))
            by_time.append(Line(name, seconds.tolist(), loss.tolist()))
    grid = Grid(
        f"{workload.name}: training with dropped micro-batches, {WORKERS} workers, {steps} steps",
        ("run", "drop rate", workload.metric, "last loss", "simulated time, s", "time saved, ×", "published F1"),
        tuple(rows),
        "Published: F1 of BERT-Large on SQuAD (table 1a), pretrained with that drop rate. Loss: mean of ten steps.",
    )
    charts = tuple(
        Chart(
            f"{workload.name}: loss against {what}", "Loss of training, mean of ten steps.", what, "loss", tuple(lines)
        )
        for what, lines in (("step", by_step), ("simulated time, s", by_time))
    )
    losses = {row[0]: row[3] for row in rows}
    times = {row[0]: row[4] for row in rows}
    extra = next(name for name in losses if "extra" in name)
    yield (
        "",
        Findings(
            (grid,),
            charts,
            (
                Check(
                    f"{workload.name}: with extra steps the same loss in less time",
                    losses[extra] <= 1.02 * losses["no threshold"] + 0.005 and times[extra] < times["no threshold"],
                    f"loss {losses['no threshold']:.4g} in {times['no threshold']:.0f} s, "
                    f"{losses[extra]:.4g} in {times[extra]:.0f} s",
                ),
            ),
        ),
    )


def _smooth(values: np.ndarray, window: int = 10) -> np.ndarray:
    """Mean over the last steps, fewer at the start; steps in which nothing was completed have no loss."""
    ends = range(1, len(values) + 1)
    return np.asarray([np.nanmean(values[max(0, end - window) : end]) for end in ends])
