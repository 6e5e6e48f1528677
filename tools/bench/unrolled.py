"""What transformations cost before a step runs: programs of many layers that are traced, rewritten and compiled."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import sdc
from sdc.faults import BitFlip
from sdc.program import operations, products
from sdc.train import get_config

from .timing import reference_step

LAYERS, WIDTH, ROWS = 96, 32, 16
OPERATIONS = 4000
BARS = {
    "tracing_96_layers_fingerprint": 3.0,
    "tracing_96_layers_inject": 3.0,
    "tracing_96_layers_abft": 6.0,
    "tracing_4000_sites_seconds": 10.0,
    "compiling_96_layers_detect": 2.0,
    "compiling_96_layers_correct": 3.0,
    "compiling_tiny_detect": 2.0,
    "compiling_tiny_correct": 3.0,
}
Step = Callable[..., Any]


def measure_unrolled(times: int) -> dict[str, float]:
    """Times of tracing and compiling, as multiples of the plain step's, and seconds for a step of 4,000 sites."""
    moment = sdc.Moment(jax.random.key(0), jnp.int32(0))
    faults = [sdc.Fault(BitFlip(), 1e-6, products)]
    weights, x = [jnp.full((WIDTH, WIDTH), 0.01)] * LAYERS, jnp.ones((ROWS, WIDTH))
    variants: dict[str, Step] = {
        "plain": _layers,
        "fingerprint": sdc.fingerprint(_layers, products),
        "inject": lambda *args: sdc.inject(_layers, faults)(moment, *args),
        "abft": sdc.abft(_layers),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(times):
        for name, fn in variants.items():
            seconds[name].append(_tracing(fn, weights, x))
    found = {
        f"tracing_96_layers_{name}": statistics.median(seconds[name]) / statistics.median(seconds["plain"])
        for name in variants
        if name != "plain"
    }
    found["tracing_4000_sites_seconds"] = _tracing(sdc.fingerprint(_operations, operations), jnp.ones(WIDTH))
    step, arguments = reference_step(get_config("tiny"))
    return found | _compiling("96_layers", _layers, (weights, x)) | _compiling("tiny", step, arguments)


def _compiling(name: str, step: Step, arguments: Any) -> dict[str, float]:
    plain = _seconds(step, arguments)
    return {
        f"compiling_{name}_{mode}": _seconds(sdc.abft(step, mode=mode), arguments) / plain
        for mode in ("detect", "correct")
    }


def _seconds(step: Step, arguments: Any) -> float:
    jax.clear_caches()
    started = time.perf_counter()
    jax.jit(lambda *args: step(*args)).lower(*arguments).compile()
    return time.perf_counter() - started


def _tracing(step: Step, *arguments: Any) -> float:
    """Seconds of tracing and rewriting, of which nothing is known from before."""
    jax.clear_caches()
    started = time.perf_counter()
    jax.make_jaxpr(lambda *args: step(*args))(*arguments)
    return time.perf_counter() - started


def _layers(weights: list[Any], x: Any) -> Any:
    """One step of a network whose layers are written out: 3 products for each but the first."""

    def loss(weights: list[Any]) -> Any:
        y = x
        for w in weights:
            y = y + jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def _operations(x: Any) -> Any:
    for _ in range(OPERATIONS // 2):
        x = jnp.sin(x) + x
    return x
