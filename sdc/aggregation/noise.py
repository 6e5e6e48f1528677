"""Simulated gradients that differ between workers: the error model of PAFT."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from ..faults import Fault, Moment, inject
from ..program import probe
from .methods import Noise
from .workers import count_workers

SITE = "gradient"  # site name of the gradients: the leaf `a/b` is at `fwd/gradient/a/b`


class NoiseState(NamedTuple):
    """State of `gradient_noise`, the same on every worker except for `changed`."""

    step: Int32[Array, ""]  # number of steps done
    # number of elements of this worker's gradients that injected faults changed in the last step (the ground truth)
    changed: UInt32[Array, ""]


def gradient_noise(
    axis_name: str,
    sigma: float | Float32[Array, ""] = 0.0,
    *,
    seed: int = 0,
    workers: Sequence[int] | None = None,
    burst_period: int | None = None,
    burst_sigma: float | Float32[Array, ""] = 0.0,
    faults: Sequence[Fault] = (),
    shard_axes: Sequence[str] = (),
) -> optax.GradientTransformation:
    """Simulates all-reduces that give every worker a different wrong mean. Apply the transform after the all-reduce.

    After the all-reduce, each worker m has

        g~_m = mean_m(g_m) + e_m,    e_m ~ N(0, sigma^2) for every element.

    The paper gives the degree of noise as sigma in some places and as sigma^2 in others; here it is always sigma.
    Draws depend only on the seed, the step, the worker and the position of the leaf: they are the same under
    `shard_map`, `pmap` and `vmap`, and after a restart.

    Args:
        axis_name: the axis of the workers, bound.
        sigma: standard deviation of the noise on each element. Both `sigma` and `burst_sigma` may be traced, so one
            program serves every degree of noise; traced values are not checked.
        seed: seed of all random draws.
        workers: indices of the workers with errors (default: all).
        burst_period: number of steps from one burst to the next; None for no bursts. In a burst, the noise has the
            standard deviation `burst_sigma`. The first burst is in step `burst_period - 1`, counted from 0.
        burst_sigma: standard deviation of a burst.
        faults: corrupted bits and faulty links, in the language of `sdc.faults`. Gradients are probes named
            `gradient/...`. A fault whose `at` names no worker strikes all of `workers`. A link that corrupts one lane
            is simulated by a fault with a `Stride` pattern.
        shard_axes: mesh axes over which the gradients of one worker are sharded; their ranks draw independently.

    Returns:
        A transform with `NoiseState`. Steps without noise leave the gradients bitwise unchanged; leaves that are not
        real floats receive no noise.

    Raises:
        ValueError: a sigma is negative or not finite, a period is below 1, a worker does not exist, or the axis is not
            bound or has fewer than two workers.

    References:
        Capturing and Mitigating Gradient Aggregation Errors for Fault-Tolerant Distributed Training, sections 3 and 5
        (bursts: "accidental large noise", every 500th iteration).
    """
    chosen = None if workers is None else tuple(dict.fromkeys(workers))
    settings: Any = Noise(sigma, chosen, burst_period, burst_sigma)  # type: ignore[arg-type] # traced, perhaps

    def init(params: Any) -> NoiseState:
        return NoiseState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.uint32))

    def update(gradient: Any, state: NoiseState, params: Any = None) -> tuple[Any, NoiseState]:
        total = count_workers(axis_name)
        if chosen is not None and not set(chosen) <= set(range(total)):
            raise ValueError(f"workers={chosen}: expected numbers from 0 to {total - 1}")
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        key = jax.random.fold_in(step_key, lax.axis_index(axis_name))
        for axis in shard_axes:
            key = jax.random.fold_in(key, lax.axis_index(axis))
        scale = jnp.asarray(sigma, jnp.float32)
        if burst_period is not None:
            burst = (state.step + 1) % burst_period == 0
            scale = jnp.where(burst, jnp.asarray(burst_sigma, jnp.float32), scale)
        if chosen is not None:
            scale = jnp.where(jnp.isin(lax.axis_index(axis_name), jnp.asarray(chosen)), scale, 0)

        if not settings.silent:
            structure: Any = jax.tree.structure(gradient)
            keys = jax.tree.unflatten(structure, list(jax.random.split(key, structure.num_leaves)))
            gradient = jax.tree.map(functools.partial(_noisy, scale), gradient, keys)
        changed = jnp.zeros((), jnp.uint32)
        if faults:
            struck = range(total) if chosen is None else chosen
            placed = [  # each fault with the worker that it strikes
                dataclasses.replace(fault, at={**fault.at, axis_name: worker})
                for fault in faults
                for worker in ([fault.at[axis_name]] if axis_name in fault.at else struck)
            ]
            faulty = inject(lambda tree: probe(tree, SITE, directions=("fwd",)), placed)
            gradient, events = faulty(Moment(step_key, state.step), gradient)
            changed = jnp.sum(jnp.stack([jnp.sum(event.changed) for event in events.values()])).astype(jnp.uint32)
        return gradient, NoiseState(state.step + 1, changed)

    return optax.GradientTransformation(init, update)


def _noisy(scale: Array, leaf: Array, key: Array) -> Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    error = scale * jax.random.normal(key, leaf.shape, jnp.float32)
    # Adding zero would turn -0.0 into 0.0.
    return jnp.where(scale > 0, leaf + error.astype(leaf.dtype), leaf)
