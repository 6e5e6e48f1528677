"""Calls with a derivative of their own are not differentiated as if they were their bodies."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.custom_derivatives import linear_call

import sdc
from sdc.program import everything, primitive

X = jnp.linspace(-1.0, 1.0, 3)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_jvp
def straight(x: Any) -> Any:
    return jnp.sin(x)


straight.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0]))


def called(x: Any) -> Any:
    return linear_call(lambda _, x: 2.0 * x, lambda _, x: 3.0 * x, (), x)


def solved(x: Any) -> Any:
    return jax.lax.custom_linear_solve(lambda v: 2.0 * v, x, lambda _, b: 0.5 * b, lambda _, b: 0.5 * b)


CALLS: dict[str, Callable[[Any], Any]] = {
    "custom_vjp": clipped, "custom_jvp": straight, "linear_call": called, "custom_linear_solve": solved,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mapped", [False, True], ids=["as it is", "in jit and vmap"])
def test_a_derivative_around_a_transformation_is_refused(name: str, mapped: bool) -> None:
    def loss(x: Any) -> Any:
        return jnp.sum(CALLS[name](x))

    transformed = sdc.fingerprint(loss, everything)
    outside: Any = jax.vmap(jax.jit(transformed)) if mapped else transformed
    x = X[None] if mapped else X
    assert jnp.allclose(jnp.squeeze(outside(x)[0]), loss(X))
    with pytest.raises(ValueError, match=r"has a custom derivative \(.*test_identities.py.*transform the result"):
        jax.grad(lambda x: jnp.sum(outside(x)[0]))(x)
    # Transformed where it belongs, and where nothing inside is selected, the rule is used.
    expected = jax.grad(loss)(X)
    assert jnp.array_equal(sdc.fingerprint(jax.grad(loss), everything)(X)[0], expected)
    whole = sdc.fingerprint(loss, primitive("reduce_sum"))
    assert jnp.array_equal(jax.grad(lambda x: whole(x)[0])(X), expected)
