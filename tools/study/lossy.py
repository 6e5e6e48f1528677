"""`sdc study lossy`: perplexity and accuracy against loss rates, and drift against theory."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sdc.aggregation import Channel, GilbertElliott, Independent, lossy_zero2
from sdc.aggregation.drift import pair_drift
from sdc.analysis.aggregation import Chart, Check, Findings, Grid, Line

from .training import DATA, Method, Trained, Trainer
from .workloads import Workload

WORKERS = 8
STEPS = 600
SEEDS = {"perplexity": 2, "accuracy": 1}
"""Runs of which a figure is the mean: perplexities of single ones differ by one or two percent."""
RATES = (0.0, 0.1, 0.2, 0.3, 0.4)
PUBLISHED = {0.0: 10.653, 0.1: 10.778, 0.2: 10.934, 0.3: 11.055, 0.4: 11.362}
"""Validation perplexity of Llama-2-7B, 64 workers, 5,000 steps (table 1 of the paper), by loss rate."""
PACKET = 64
"""Elements of a packet, where losses are per packet."""
BURST = 8.0
DRIFTING = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Loss rates of the random walk whose drift is compared with theory."""
WALK = 200
SETTLED = 40
"""Steps of the walk, and how many of them are not counted."""


def variants() -> dict[str, tuple[tuple[float, ...], Any]]:
    """What is run besides losses per shard: rates, and how the optimizer is made for a rate."""
    return {
        "per packet": (RATES[1:], lambda rate: {"p_grad": rate, "p_param": rate, "packet": PACKET}),
        "in bursts": (RATES[1:3], lambda rate: _both(GilbertElliott(rate, BURST)) | {"packet": PACKET}),
        "per packet, parity 1 in 4": (
            RATES[2:3],
            lambda rate: _both(Independent(rate)) | {"packet": PACKET, "parity": 4},
        ),
        "per packet, largest 25 % reliable": (
            RATES[2:3],
            lambda rate: _both(Independent(rate)) | {"packet": PACKET, "reliable": 0.25},
        ),
    }


def _both(channel: Channel) -> dict[str, Any]:
    return {"p_grad": channel, "p_param": channel}


def count(workloads: list[Workload]) -> int:
    """Runs of the study, for the progress display."""
    runs = len(RATES) + sum(len(rates) for rates, _ in variants().values())
    return sum(SEEDS[workload.metric] for workload in workloads) * runs + len(DRIFTING)


def study(workloads: list[Workload], *, steps: int, seed: int) -> Iterator[tuple[str, Findings]]:
    """Runs the study.

    Yields:
        What was done, and what has been found by it.
    """
    for workload in workloads:
        yield from _by_rate(workload, steps, seed)
    yield from _drift(seed)


def _runs(workload: Workload, steps: int, seed: int, **settings: Any) -> list[Trained]:
    """Runs that differ by their seeds, through one program."""
    optimizer = lossy_zero2(workload.optimizer(steps), DATA, seed=seed, **settings)

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any) -> Any:
        gradient = jax.grad(workload.loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        report = {name: getattr(state.report, name) for name in ("move", "pair_drift")}
        return optax.apply_updates(params, updates), state, report

    trainer = Trainer(workload, Method(lambda params, setting: optimizer.init(params), step), workers=WORKERS)
    return [trainer(steps=steps, seed=seed + number) for number in range(SEEDS[workload.metric])]


def _by_rate(workload: Workload, steps: int, seed: int) -> Iterator[tuple[str, Findings]]:
    text = workload.metric == "perplexity"
    steps = steps if text else steps // 2  # images are learned sooner
    scores: dict[str, dict[float, float]] = {"per shard": {}}
    drifts: dict[float, float] = {}
    for rate in RATES:
        found = _runs(workload, steps, seed, p_grad=rate, p_param=rate)
        scores["per shard"][rate] = float(np.mean([one.score for one in found]))
        reports = found[0].reports
        middle = slice(steps // 4, steps // 2)
        drifts[rate] = float(np.mean(reports["pair_drift"][middle, 0]) / np.mean(reports["move"][middle, 0]))
        for _ in found:
            yield f"{workload.name}, {rate:.0%} of the shards lost", Findings()
    lossless = scores["per shard"][0.0]
    for name, (rates, settings) in variants().items():
        scores[name] = {0.0: lossless}
        for rate in rates:
            found = _runs(workload, steps, seed, **settings(rate))
            scores[name][rate] = float(np.mean([one.score for one in found]))
            for _ in found:
                yield f"{workload.name}, {rate:.0%} lost {name}", Findings()
    header = ("losses", *(f"{rate:.0%}" for rate in RATES), *(f"{rate:.0%}, against 0 %" for rate in RATES[1:]))
    rows: list[tuple[Any, ...]] = [
        (
            name,
            *(found.get(rate) for rate in RATES),
            *(_percent(found.get(rate), lossless) for rate in RATES[1:]),
        )
        for name, found in scores.items()
    ]
    if text:
        published = (*PUBLISHED.values(), *(_percent(PUBLISHED[rate], PUBLISHED[0.0]) for rate in RATES[1:]))
        rows.append(("published", *published))
    rows.append(("drift / move², measured, per shard", *(drifts[rate] for rate in RATES), *[None] * (len(RATES) - 1)))
    rows.append(("drift / move², random walk", *(pair_drift(rate) for rate in RATES), *[None] * (len(RATES) - 1)))
    grid = Grid(
        f"{workload.name}: {workload.metric} by loss rate of gradients and of parameters, {WORKERS} workers, {steps} "
        "steps",
        header,
        tuple(rows),
        f"Mean over {SEEDS[workload.metric]} seeds, the replicas and the last three looks. Published: Llama-2-7B, 64 "
        "workers, 5,000 steps. Drift between copies exceeds that of a random walk where parameters keep their "
        "direction for a while.",
    )
    chart = Chart(
        f"{workload.name}: {workload.metric} against loss rate",
        f"{WORKERS} workers, {steps} steps; a packet has {PACKET} elements, a burst {BURST:g} packets.",
        "loss rate",
        workload.metric,
        tuple(Line(name, list(found), list(found.values())) for name, found in scores.items()),
    )
    checks: tuple[Check, ...] = ()
    if text:
        change = _percent(scores["per shard"][0.2], lossless)
        rising = [scores["per shard"][rate] for rate in RATES]
        checks = (
            Check("perplexity at 20 % loss is less than 3 % higher", bool(change < 3), f"{change:+.2f} %"),
            Check(
                "perplexity rises with the loss rate",
                bool(rising[-1] > rising[0] and np.polyfit(RATES, rising, 1)[0] > 0),
                ", ".join(f"{value:.4g}" for value in rising),
            ),
        )
    yield "", Findings((grid,), (chart,), checks)


def _percent(value: float | None, base: float) -> Any:
    """Change in percent."""
    return None if value is None else 100 * (value / base - 1)


def _drift(seed: int) -> Iterator[tuple[str, Findings]]:
    """Owners that move by independent steps of variance 1: the gradient is noise, without losses, and the rate is 1."""
    measured = []
    for rate in DRIFTING:
        optimizer = lossy_zero2(optax.sgd(1.0), DATA, 0.0, rate, packet=4, seed=seed)

        def run(theta: Any, optimizer: Any = optimizer) -> Any:
            def step(carry: Any, number: Any) -> Any:
                theta, state = carry
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), lax.axis_index(DATA))
                gradient = jax.random.normal(key, theta.shape) * WORKERS**0.5
                updates, state = optimizer.update(gradient, state, theta)
                return (optax.apply_updates(theta, updates), state), state.report.pair_drift / state.report.move

            return lax.scan(step, (theta, optimizer.init(theta)), jnp.arange(WALK))[1]

        found = jax.jit(jax.vmap(run, axis_name=DATA))(jnp.zeros((WORKERS, 4096)))
        measured.append(float(np.mean(np.asarray(found)[0, SETTLED:])))
        yield f"drift at {rate:.0%}", Findings()
    exact, printed = ([pair_drift(rate, printed=form) for rate in DRIFTING] for form in (False, True))
    rows = tuple(
        (f"{rate:.0%}", found, right, wrong, found / right)
        for rate, found, right, wrong in zip(DRIFTING, measured, exact, printed, strict=True)
    )
    off = max(abs(found / right - 1) for found, right in zip(measured, exact, strict=True))
    yield (
        "",
        Findings(
            (
                Grid(
                    f"Drift between two copies of a random walk, in squares of its step ({WORKERS} workers)",
                    ("loss rate", "measured", "exact: 2p/(1-p²)", "as printed: 2p/(1+p)", "measured / exact"),
                    rows,
                ),
            ),
            (
                Chart(
                    "Drift between two copies against theory",
                    "Owners move by independent steps; parameters are lost per packet, gradients are not.",
                    "loss rate",
                    "E[D²] / s²",
                    (
                        Line("measured", DRIFTING, measured),
                        Line("exact", DRIFTING, exact, dashed=True),
                        Line("as printed", DRIFTING, printed, dashed=True),
                    ),
                ),
            ),
            (
                Check(
                    "drift follows the exact form, not the printed one",
                    off
                    < 0.05
                    < min(abs(found / wrong - 1) for found, wrong in zip(measured, printed, strict=True)) + 0.05,
                    f"largest deviation from the exact form {off:.1%}",
                ),
            ),
        ),
    )
