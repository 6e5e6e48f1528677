"""`sdc bench transform`: what fingerprints, injection and rewriting cost, against the plain step."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sdc
from sdc.faults.kinds import BitFlip
from sdc.program.selectors import direction, named, primitive, probes
from sdc.train.config import TrainConfig, get_config
from sdc.train.placement import place
from sdc.train.programs.device import described_batch, initial_state, plain, sharded
from sdc.twins.digests import digest

from .options import BenchOptions
from .timing import ratio, take_turns

BARS = {
    "fingerprint_products": 1.10,
    "fingerprint_probes": 1.03,
    "inject_one_fault": 1.02,
    "rewriting_share_fingerprint_products": 0.20,
    "rewriting_share_fingerprint_probes": 0.20,
    "rewriting_share_inject_one_fault": 0.20,
    "digest_float32": 1.5,
    "digest_bfloat16": 2.0,
}
ELEMENTS = 16 * 2**20
"""Elements of the array whose digest is measured."""


def measure(options: BenchOptions) -> dict[str, Any]:
    """Measures each type."""
    config = get_config(options.config or "bench")
    result: dict[str, Any] = {}
    for dtype in options.dtypes:
        typed = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
        result[dtype] = {**_steps(typed, options.steps), f"digest_{dtype}": _digest(dtype, options.steps)}
    return result


def _steps(config: TrainConfig, steps: int) -> dict[str, Any]:
    """Ratios of step times, and the time that rewriting adds to lowering and compiling."""
    work, placement = sharded(config), place(twins=None, data=1, model=1, devices=jax.devices()[:1])
    step, batch = plain(work, placement), described_batch(config, placement)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, batch.shape).astype(np.int32)
    arguments = initial_state(work, placement, 0), jax.device_put(tokens, batch.sharding)
    moment = sdc.Moment(jax.random.key(0), jnp.int32(0))
    # One backward matrix product; the rate is such that a few of its elements are hit.
    site = sdc.sites(step, *arguments, where=primitive("dot_general") & direction("bwd"))[0]
    one = named(site.name)
    fault = sdc.Fault(BitFlip(), 1e-6, one)
    variants: dict[str, Callable[..., Any]] = {
        "plain": step,
        "fingerprint_products": sdc.fingerprint(step, primitive("dot_general")),
        "fingerprint_probes": sdc.fingerprint(step, probes),
        "inject_one_fault": lambda *args: sdc.inject(step, [fault])(moment, *args),
        "strike_one_site": lambda *args: sdc.strike(step, one)(sdc.no_strike(), *args),
    }
    traced = {name: _tracing(fn, arguments) for name, fn in variants.items()}
    started = time.perf_counter()
    compiled = {"plain": jax.jit(step).lower(*arguments).compile()}
    whole = time.perf_counter() - started
    compiled |= {name: jax.jit(fn).lower(*arguments).compile() for name, fn in variants.items() if name != "plain"}
    seconds = take_turns({name: functools.partial(run, *arguments) for name, run in compiled.items()}, steps)
    return {
        "plain_seconds": statistics.median(seconds["plain"]),
        **{name: ratio(seconds["plain"], seconds[name]) for name in variants if name != "plain"},
        **{
            f"rewriting_share_{name}": (traced[name] - traced["plain"]) / whole
            for name in ("fingerprint_products", "fingerprint_probes", "inject_one_fault")
        },
        "lower_and_compile_seconds": whole,
    }


def _digest(dtype: str, steps: int) -> float:
    """Time of a digest as a multiple of that of a float sum of the same array."""
    x = jax.random.normal(jax.random.key(0), (ELEMENTS // 1024, 1024)).astype(dtype)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32)).lower(x).compile()
    digested = jax.jit(digest).lower(x).compile()
    seconds = take_turns({"plain": lambda: total(x), "digest": lambda: digested(x)}, 3 * steps)
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
