"""What hardly ever happens, against a plain conditional."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sdc.program import rarely


def change(carried: Any, scale: Any) -> Any:
    x, count = carried
    return x * scale + 1.0, count + 1


def changed(predicate: Any, x: Any) -> Any:
    return rarely(predicate, change, (x, jnp.int32(0)), jnp.float32(3.0))


def expected(predicate: Any, x: Any) -> Any:
    return lax.cond(predicate, lambda c: change(c, jnp.float32(3.0)), lambda c: c, (x, jnp.int32(0)))


@pytest.mark.parametrize("predicate", [False, True])
def test_as_a_conditional(predicate: bool) -> None:
    x = jnp.arange(5.0)
    for found, wanted in zip(jax.jit(changed)(predicate, x), expected(predicate, x), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_each_of_several_by_itself() -> None:
    x, which = jnp.arange(12.0).reshape(4, 3), jnp.asarray([False, True, True, False])
    found = jax.jit(jax.vmap(changed))(which, x)
    for number in range(4):
        for part, wanted in zip(found, expected(which[number], x[number]), strict=True):
            np.testing.assert_array_equal(part[number], wanted)
