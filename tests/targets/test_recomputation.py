"""On TPUs and GPUs, the products that XLA runs twice are those that value numbers predict."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding

import sdc
from sdc.costs import devices_of, estimate, find_target
from sdc.guarding.replays import checker_options
from sdc.program import compiling_for, products, recomputations

pytestmark = pytest.mark.targets
LAYERS, WIDTH, ROWS = 3, 256, 512


def block(h: Any, w: Any) -> Any:
    return h + jax.nn.silu(jnp.tanh(h @ w["a"]) @ w["b"]) @ w["c"]


def scanned(layer: Callable[..., Any], w: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda h, w: (layer(h, w), None), x, w)[0].astype(jnp.float32) ** 2)


def unrolled(layer: Callable[..., Any], w: Any, x: Any) -> Any:
    for number in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w, number=number: w[number], w))
    return jnp.sum(x.astype(jnp.float32) ** 2)


def shapes(target: str) -> Any:
    place = SingleDeviceSharding(devices_of(target)[0])
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=place)
    return {name: of((LAYERS, WIDTH, WIDTH)) for name in "abc"}, of((ROWS, WIDTH))


@pytest.mark.parametrize("prevents", [True, False])
@pytest.mark.parametrize(("loss", "layers"), [(scanned, 1), (unrolled, LAYERS)])
@pytest.mark.parametrize("target", ["v5p:2x2x1", "h100x2"])
def test_what_runs_twice_is_what_is_predicted(target: str, loss: Any, layers: int, prevents: bool) -> None:
    step = jax.grad(functools.partial(loss, jax.checkpoint(block, prevent_cse=prevents)))
    arguments, device = shapes(target), devices_of(target)[0]
    with compiling_for(find_target(target).chip.platform, whole=True, kind=str(device.device_kind)):
        found = recomputations(step, *arguments, where=products)
        text = jax.jit(step).lower(*arguments).compile().as_text() or ""
    run = [line for line in text.splitlines() if re.search(r" (dot|convolution)\(", line)]
    assert (
        len(found.groups) == sum("rematted" in line for line in run) == (2 * layers if prevents or layers == 1 else 0)
    )


def test_a_witness_of_the_last_operations_costs_little() -> None:
    """Of layers without attention; a copy of a tensor that is compared would raise this far above."""
    target = "v5p:2x2x1"
    step = jax.grad(functools.partial(scanned, jax.checkpoint(block)))
    wide = {name: jax.ShapeDtypeStruct((LAYERS, 4096, 4096), jnp.bfloat16) for name in "abc"}
    arguments = wide, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    plain = estimate(step, *arguments, target=target)
    own = estimate(sdc.witness(step, last=True), *arguments, target=target)
    assert own.cost <= 1.06 * plain.cost
    assert own.memory <= 1.02 * plain.memory


@pytest.mark.parametrize("target", ["v5p:2x2x1", "v5e:2x2"])
def test_the_compiler_takes_the_options_of_its_checker(target: str) -> None:
    step, device = jax.grad(functools.partial(scanned, block)), devices_of(target)[0]
    options = checker_options(str(device.device_kind))
    assert options["xla_tpu_sdc_replicate_llo"] == (target == "v5e:2x2")
    with compiling_for("tpu", whole=True, kind=str(device.device_kind)):
        sizes = [
            len(jax.jit(step, compiler_options=own).lower(*shapes(target)).compile().as_text() or "")
            for own in (None, options)
        ]
    assert sizes[1] > sizes[0]  # operations and their repetitions
