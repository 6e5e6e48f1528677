"""`sdc bench transform`: what fingerprints, injection and rewriting cost, against the plain step."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import sdc
from sdc.faults import BitFlip
from sdc.nodes import node_faults
from sdc.program import direction, named, primitive, probes
from sdc.train import TrainConfig, get_config
from sdc.twins import digest

from .command import BenchOptions
from .timing import compiled, ratio, reference_step, take_turns
from .unrolled import BARS as UNROLLED_BARS, measure_unrolled

BARS = {
    "fingerprint_products": 1.10,
    "fingerprint_probes": 1.03,
    "inject_one_fault": 1.02,
    "densest_node_over_uniform": 1.02,
    "rewriting_share_fingerprint_products": 0.20,
    "rewriting_share_fingerprint_probes": 0.20,
    "rewriting_share_inject_one_fault": 0.20,
    "digest_float32": 1.5,
    "digest_bfloat16": 2.0,
    **UNROLLED_BARS,
}
ELEMENTS = 16 * 2**20
"""Elements of the array whose digest is measured."""


def measure(options: BenchOptions) -> dict[str, Any]:
    """Measures each type."""
    config = get_config(options.config or "bench")
    result: dict[str, Any] = {}
    for dtype in options.dtypes:
        steps = _steps(config.of_type(dtype), options.steps)
        result[dtype] = {**steps, f"digest_{dtype}": _digest(dtype, options.steps)}
    result.setdefault("float32", {}).update(measure_unrolled(options.steps))
    return result


def _steps(config: TrainConfig, steps: int) -> dict[str, Any]:
    """Ratios of step times, and the time that rewriting adds to lowering and compiling."""
    step, arguments = reference_step(config)
    moment = sdc.Moment(jax.random.key(0), jnp.int32(0))
    # One backward matrix product; the rate is such that a few of its elements are hit.
    site = sdc.sites(step, *arguments, where=primitive("dot_general") & direction("bwd"))[0]
    one = named(site.name)
    fault = sdc.Fault(BitFlip(), 1e-6, one)
    densest, uniform = (node_faults(name, layers=config.model.layers) for name in ("node11", "node11:uniform"))
    variants: dict[str, Callable[..., Any]] = {
        "plain": step,
        "fingerprint_products": sdc.fingerprint(step, primitive("dot_general")),
        "fingerprint_probes": sdc.fingerprint(step, probes),
        "inject_one_fault": lambda *args: sdc.inject(step, [fault])(moment, *args),
        "inject_densest_node": lambda *args: sdc.inject(step, densest)(moment, *args),
        "inject_densest_node_uniform": lambda *args: sdc.inject(step, uniform)(moment, *args),
        "strike_one_site": lambda *args: sdc.strike(step, one)(sdc.no_strike(), *args),
    }
    traced = {name: _tracing(fn, arguments) for name, fn in variants.items()}
    started = time.perf_counter()
    runs = compiled({"plain": variants.pop("plain")}, *arguments)
    whole = time.perf_counter() - started
    seconds = take_turns(runs | compiled(variants, *arguments), steps)
    return {
        "plain_seconds": statistics.median(seconds["plain"]),
        **{name: ratio(seconds["plain"], seconds[name]) for name in variants},
        "densest_node_over_uniform": ratio(seconds["inject_densest_node_uniform"], seconds["inject_densest_node"]),
        **{
            f"rewriting_share_{name}": (traced[name] - traced["plain"]) / whole
            for name in ("fingerprint_products", "fingerprint_probes", "inject_one_fault")
        },
        "lower_and_compile_seconds": whole,
    }


def _digest(dtype: str, steps: int) -> float:
    """Time of a digest as a multiple of that of a float sum of the same array."""
    x = jax.random.normal(jax.random.key(0), (ELEMENTS // 1024, 1024)).astype(dtype)
    runs = compiled({"plain": lambda x: jnp.sum(x, dtype=jnp.float32), "digest": digest}, x)
    seconds = take_turns(runs, 3 * steps)
    return ratio(seconds["plain"], seconds["digest"])


def _tracing(step: Callable[..., Any], arguments: Any, times: int = 3) -> float:
    """Seconds that tracing a step, and rewriting it, takes at the least; nothing of it is known from before."""
    found = []
    for _ in range(times):
        jax.clear_caches()
        started = time.perf_counter()
        jax.make_jaxpr(lambda *args: step(*args))(*arguments)
        found.append(time.perf_counter() - started)
    return min(found)
