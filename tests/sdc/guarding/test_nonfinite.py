"""The operation that makes a NaN or an infinity is named: forward and backward, in loops and on devices."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.program import products


def scanned(w: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        with jax.named_scope("layer"):
            masked = jnp.where(x > 1e9, -jnp.inf, jnp.tanh(x @ w))  # an infinity that makes nothing
            return jnp.exp(jnp.maximum(masked, -1)), None

    return jnp.sum(lax.scan(layer, x, w)[0])


W, X = jnp.ones((3, 2, 2)), jnp.ones((4, 2))


def test_finite_steps_have_none() -> None:
    out, first = sdc.first_nonfinite(jax.value_and_grad(scanned))(W, X)
    assert first is None
    assert jnp.isfinite(out[0])


def test_a_layer_of_a_loop_is_named() -> None:
    _, first = sdc.first_nonfinite(scanned)(W.at[1, 0, 0].set(jnp.float32(3e38)), X * 1e3)
    assert first is not None
    assert (first.site.primitive, first.iteration) == ("dot_general", (1,))
    assert "test_nonfinite.py" in first.site.source


def test_the_backward_pass_is_searched() -> None:
    def loss(w: Any) -> Any:
        return 1e30 * jnp.sum(1e30 * w)

    _, first = sdc.first_nonfinite(jax.value_and_grad(loss))(jnp.array([1e-30, 0.0]))
    assert first is not None
    assert first.site.direction == "bwd"


@pytest.mark.parametrize("device", range(2))
def test_a_device_is_named(device: int) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x: lax.psum(jnp.log(x), "data"), mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    _, first = sdc.first_nonfinite(mapped)(jnp.ones(2).at[device].set(0.0))
    assert first is not None
    assert (first.site.primitive, first.devices) == ("log", ({"data": device},))


def test_a_while_loop_and_a_conversion_are_searched() -> None:
    def grow(x: Any) -> Any:
        return lax.while_loop(lambda x: x < 1e30, lambda x: x * 1e10, x).astype(jnp.float16)

    _, first = sdc.first_nonfinite(grow)(jnp.float32(1))
    assert first is not None
    assert first.site.primitive == "convert_element_type"
    _, first = sdc.first_nonfinite(lambda x: lax.fori_loop(0, 9, lambda i, x: x * x, x))(jnp.float32(1e30))
    assert first is not None
    assert first.site.primitive == "mul"


def test_only_selected_operations_are_searched() -> None:
    assert sdc.first_nonfinite(lambda x: jnp.log(x @ x), products)(jnp.zeros((2, 2)))[1] is None
    with pytest.raises(ValueError, match="matches none"):
        sdc.first_nonfinite(lambda x: x + 1, products)(jnp.zeros(2))


def test_a_row_that_is_masked_entirely_makes_a_nan() -> None:
    _, first = sdc.first_nonfinite(lambda x: jax.nn.softmax(jnp.where(x > 9, x, -jnp.inf)))(jnp.ones((2, 4)))
    assert first is not None
    assert first.site.primitive == "sub"
    with pytest.raises(ValueError, match="inside jit"):
        jax.jit(lambda x: sdc.first_nonfinite(jnp.log)(x)[0])(jnp.ones(2))
