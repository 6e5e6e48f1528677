"""`sdc bench targets`: the cost of the tools on TPUs and GPUs, as their compilers estimate it; nothing is measured.

The step is a worst case: two matrix products of 4096 by 4096 in the forward pass and three in the backward pass, with a
probe at each tensor between them. Every probe is as large as the result of a product, and no other work hides its cost.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sdc
from sdc.aggregation import overlap_options, overlapped, paft
from sdc.checksums import PLATFORMS, Profile
from sdc.costs import Estimate, Tool, devices_of, estimate, find_target, with_tool
from sdc.program import Where, primitive
from sdc.train import Subject, estimate_subject
from sdc.twins import Exchange, digest

from ._fsdp import fsdp_costs
from .command import BenchOptions
from .harness import Benchmark

BARS = {
    "digest": 1.15,
    "digest_temporary_mib": 1.0,
    "lockstep": 1.15,
    "lockstep_step": 1.12,
    "lockstep_llama3_8b_16l": 1.05,
    "lockstep_llama3_8b_16l_memory": 1.02,
    "lockstep_step_llama3_8b_16l": 1.03,
    "lockstep_step_llama3_8b_16l_memory": 1.02,
    "fingerprint_llama3_8b_16l": 1.03,
    "fingerprint_products": 1.10,
    "inject": 1.05,
    "abft": 1.15,
    "abft_compiling": 2.0,
    "abft_again": 1.20,
    "abft_again_compiling": 2.0,
    "abft_again_llama3_8b_16l": 1.08,
    "paft": 1.03,
}
TARGETS = ("v5p:2x2x1", "v6e:2x2", "h100x2")
ELEMENTS = (8192, 8192)  # shape of the array whose digest is taken: 64 Mi elements
WIDTH = 4096
ROWS = 16384  # rows of each device's batch, where parameters are averaged
PRODUCTS = primitive("dot_general")
# `abft` with the fused kernel, which sums rows while it multiplies (bfloat16 on TPUs), if a profile selects it.
FUSED = "abft_fused"
# Tool, selector, and `exchange` of the twins, by name of the figure.
TOOLS: dict[str, tuple[Tool, Where | None, Exchange]] = {
    "plain": ("plain", None, "probe"),
    "lockstep": ("lockstep", None, "probe"),
    "lockstep_step": ("lockstep", None, "step"),
    "fingerprint_probes": ("fingerprint", None, "probe"),
    "fingerprint_products": ("fingerprint", PRODUCTS, "probe"),
    "inject": ("inject", None, "probe"),
    "abft": ("abft", None, "probe"),
    "abft_again": ("abft_again", None, "probe"),
}


def measure(options: BenchOptions) -> dict[str, Any]:
    """Estimates the step for each target and dtype, and, on the v5p only, the study's model with two twins of eight
    chips, and aggregation of parameters that are sharded over the workers."""
    found = {}
    for target, dtype in itertools.product(TARGETS, options.dtypes):
        fused = [FUSED] if dtype == "bfloat16" and find_target(target).chip.platform == "tpu" else []
        steps = step_costs(target, dtype, [*list(TOOLS)[1:], *fused])
        found[f"{target} {dtype}"] = digest_costs(target, dtype) | steps | paft_costs(target, dtype)
    if "bfloat16" in options.dtypes:
        found["v5p:2x2x1 bfloat16"] |= _study()
        found["v5p:2x2x2 bfloat16"] = fsdp_costs("v5p:2x2x2")
    return found


def digest_costs(target: str, dtype: str) -> dict[str, float]:
    """Returns the cost of a digest relative to a float sum of the same array, and the digest's temporary memory."""
    x = jax.ShapeDtypeStruct(ELEMENTS, dtype)
    plain = estimate(lambda x: jnp.sum(x, dtype=jnp.float32), x, target=target)
    own = estimate(digest, x, target=target)
    return {"digest": own.cost / plain.cost, "digest_temporary_mib": own.temporaries / 2**20}


def step_costs(target: str, dtype: str, names: Sequence[str]) -> dict[str, float]:
    """Returns the cost of the step with each of these `TOOLS`, relative to the plain step; for `abft`, also the compile
    time."""
    plain = _estimated(target, dtype, "plain")
    found = {"plain_million_cycles": plain.cost / 1e6} if plain.cycles else {"plain_ms_moving": 1e3 * plain.cost}
    for name in names:
        own = _estimated(target, dtype, name)
        found[name] = own.cost / plain.cost
        found[f"{name}_memory"] = own.memory / plain.memory
        if name.startswith("abft"):
            found[f"{name}_compiling"] = own.compile_seconds / plain.compile_seconds
        if name == FUSED and own.kernel_instructions:
            found["fused_instructions_of_charged"] = own.kernel_instructions / own.kernel_cycles
        if own.kernels and plain.kernels:
            found[f"{name}_more_kernels"] = own.kernels - plain.kernels
    return found


def paft_costs(target: str, dtype: str) -> dict[str, float]:
    """Returns the cost of a step with a concurrent average relative to data parallelism; neither cost includes hidden
    time.

    `paft_hidden` is the share of the exchanges' time that the compiler overlaps with other work; `paft_of_ten` is the
    cost if every tenth step has an average, as with the initial period of `paft`.
    """
    plain, own = _parallel(target, dtype, optax.sgd(0.1), around=False), averaging(target, dtype)
    more = _remaining(own) / _remaining(plain)
    return {"paft": more, "paft_of_ten": 1 + (more - 1) / 10, "paft_hidden": hidden_share(own)}


def averaging(target: str, dtype: str) -> Estimate:
    """Estimates a data-parallel step with a concurrent average."""
    return _parallel(target, dtype, paft(optax.sgd(0.1), "data"), around=True)


def hidden_share(found: Estimate) -> float:
    """Returns the share of the time of an average's exchanges that overlaps with other work."""
    exchanges = [each for each in found.collectives if each.kind == "all-to-all"]
    return sum(each.hidden for each in exchanges) / sum(each.seconds for each in exchanges)


def _remaining(found: Estimate) -> float:
    return found.seconds - sum(each.hidden for each in found.collectives)


def _parallel(target: str, dtype: str, optimizer: optax.GradientTransformation, *, around: bool) -> Estimate:
    """Estimates a data-parallel step over all devices; with `around`, wraps it in `overlapped`."""
    devices = devices_of(target)
    mesh = Mesh(np.asarray(devices, dtype=object), ("data",))
    extended = optax.with_extra_args_support(optimizer)

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jnp.square((jax.nn.silu(x @ weights[0]) @ weights[1]).astype(jnp.float32)))

    def step(weights: Any, state: Any, x: Any, **how: bool) -> Any:
        gradient = jax.grad(loss)(weights, x)
        updates, state = extended.update(lax.pmean(gradient, "data"), state, weights, **how)
        return optax.apply_updates(weights, updates), state

    def on_mesh(spec: P, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)] * 2
    x = jax.ShapeDtypeStruct((len(devices) * ROWS, WIDTH), dtype)
    same = jax.tree.map(functools.partial(on_mesh, P()), (weights, jax.eval_shape(optimizer.init, weights)))
    specs = P(), P(), P("data")
    run = overlapped(step) if around else step
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    options = overlap_options(find_target(target).chip.platform)
    return estimate(mapped, *same, on_mesh(P("data"), x), target=target, options=options)


def mlp(dtype: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    def loss(weights: Any, x: Any) -> Any:
        hidden = sdc.probe(x @ weights[0], "up")
        active = sdc.probe(jax.nn.silu(hidden), "act")
        out = sdc.probe(active @ weights[1], "down")
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    def step(weights: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return [weight - weight.dtype.type(0.1) * part for weight, part in zip(weights, gradient, strict=True)], value

    array = jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)
    return step, ([array, array], array)


def _estimated(target: str, dtype: str, name: str) -> Estimate:
    step, args = mlp(dtype)
    if name == FUSED:
        return estimate(sdc.abft(step, profile=Profile(PLATFORMS["tpu"], fused=True)), *args, target=target)
    tool, where, exchange = TOOLS[name]
    variant = with_tool(tool, step, args, devices_of(target), where=where, exchange=exchange)
    return estimate(variant.step, *variant.args, target=target)


def _study() -> dict[str, float]:
    """Estimates the study's model: two twins of eight chips, and one copy with fingerprints of its probes, or with the
    first tier of checks of its products."""
    shared: dict[str, Any] = {"target": "v5p:2x2x4", "config": "llama3_8b_16l", "model": 8}
    plain = estimate_subject(Subject(**shared, tool="lockstep", sync="none"))
    alone = estimate_subject(Subject(**shared))
    tools: tuple[Tool, ...] = ("fingerprint", "abft_again")
    found = {
        f"{tool}_llama3_8b_16l": estimate_subject(Subject(**shared, tool=tool)).cost / alone.cost for tool in tools
    }
    exchanges: dict[str, Exchange] = {"lockstep": "probe", "lockstep_step": "step"}
    for name, exchange in exchanges.items():
        own = estimate_subject(Subject(**shared, tool="lockstep", exchange=exchange))
        found[f"{name}_llama3_8b_16l"] = own.cost / plain.cost
        found[f"{name}_llama3_8b_16l_memory"] = own.memory / plain.memory
    return found


BENCHMARKS = {"targets": Benchmark(measure, BARS)}
