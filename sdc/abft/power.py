"""The power of a check: which errors it finds in a product, and how often it is wrong about a healthy one."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from sdc.bits import as_bits, from_bits

from .check import Operands, Settings, row_margins
from .products import Dot

MAGNITUDES = tuple(float(10.0 ** (x / 2)) for x in range(-10, 7))
"""Errors, in units of the root mean square of the row, that a study tries: 1e-5 to 1e3."""


def flagged(product: Dot, settings: Settings, operands: Operands) -> Bool[Array, "*rows"]:
    """The rows that a scheme finds wrong, in its last tier."""
    return ~(row_margins(product, settings, operands, 2) <= 1)


def one_per_row(
    key: PRNGKeyArray, product: Dot, c: Shaped[Array, "*c"], change: Callable[[Any, Any], Any]
) -> tuple[Shaped[Array, "*c"], Bool[Array, "rows"]]:
    """Changes one random element of each row: rows are judged one by one, so each is an experiment of its own.

    Args:
        key: for the columns.
        product: of which `c` is the result.
        c: the product.
        change: told the elements and the root mean squares of their rows; returns what becomes of them.

    Returns:
        The changed product, and which rows did change.
    """
    rows = product.matrix(c)
    columns = jax.random.randint(key, rows.shape[:1], 0, rows.shape[1])
    at = jnp.arange(rows.shape[0]), columns
    rms = jnp.sqrt(jnp.mean(jnp.square(rows.astype(jnp.float32)), axis=1))
    old = rows[at]
    new = change(old, rms)
    return rows.at[at].set(new).reshape(c.shape), as_bits(new) != as_bits(old)


def found_by_magnitude(
    key: PRNGKeyArray, product: Dot, settings: Settings, operands: Operands, magnitudes: Float[Array, "n"]
) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """Errors that are found, and errors made, for errors of so many root mean squares of their row, of either sign."""

    def shift(magnitude: Any, signs: Any) -> Callable[[Any, Any], Any]:
        return lambda old, rms: (old.astype(jnp.float32) + signs * magnitude * rms).astype(old.dtype)

    def trial(numbered: tuple[Any, Any]) -> tuple[Any, Any]:
        number, magnitude = numbered
        own = jax.random.fold_in(key, number)
        signs = jax.random.rademacher(own, product.matrix(operands.c).shape[:1], jnp.float32)
        return _count(own, product, settings, operands, shift(magnitude, signs))

    found: tuple[Any, Any] = jax.lax.map(trial, (jnp.arange(magnitudes.size), magnitudes))
    return found


def found_by_bit(
    key: PRNGKeyArray, product: Dot, settings: Settings, operands: Operands
) -> tuple[Int[Array, "bits"], Int[Array, "bits"]]:
    """Flips that are found, and flips made, by the number of the bit in the product's type."""
    width = jax.dtypes.itemsize_bits(operands.c.dtype)

    def flip(bit: Any) -> Callable[[Any, Any], Any]:
        return lambda old, _: from_bits(as_bits(old) ^ (jnp.ones((), as_bits(old).dtype) << bit), old)

    def trial(bit: Any) -> tuple[Any, Any]:
        return _count(jax.random.fold_in(key, bit), product, settings, operands, flip(bit))

    found: tuple[Any, Any] = jax.lax.map(trial, jnp.arange(width, dtype=as_bits(operands.c).dtype))
    return found


def _count(
    key: Any, product: Dot, settings: Settings, operands: Operands, change: Callable[[Any, Any], Any]
) -> tuple[Any, Any]:
    changed, made = one_per_row(key, product, operands.c, change)
    # A row of zeros has no scale, and an error that is no change is none.
    alive = made & jnp.any(product.matrix(operands.c) != 0, axis=1)
    seen = flagged(product, settings, operands._replace(c=changed)).reshape(-1) & alive
    return jnp.sum(seen, dtype=jnp.int32), jnp.sum(alive, dtype=jnp.int32)


def _gaussian(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    first, second = jax.random.split(key)
    return jax.random.normal(first, (m, k)), jax.random.normal(second, (k, n)) / jnp.sqrt(k)


def _outliers(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    a, b = _gaussian(key, m, k, n)
    return a * jnp.where(jnp.arange(k) % 97 == 5, 60.0, 1.0), b


def _mean(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    a, b = _gaussian(key, m, k, n)
    return a + 2.0, b + 0.5 / jnp.sqrt(k)


def _relu_squared(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    a, b = _gaussian(key, m, k, n)
    return jnp.square(jax.nn.relu(a)), b


def _positive(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    first, second = jax.random.split(key)
    return jax.random.uniform(first, (m, k)), jax.random.uniform(second, (k, n))


def _softmax(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    a, b = _gaussian(key, m, k, n)
    return jax.nn.softmax(3.0 * a, axis=-1), b


def _tiny_heavy_tailed(key: PRNGKeyArray, m: int, k: int, n: int) -> tuple[Any, Any]:
    first, second, third = jax.random.split(key, 3)
    a = 1e-6 * jax.random.normal(first, (m, k)) * jnp.exp(2.0 * jax.random.normal(third, (m, k)))
    return a, jax.random.normal(second, (k, n)) * jnp.exp(jax.random.normal(third, (k, 1)))


DISTRIBUTIONS: Mapping[str, Callable[[PRNGKeyArray, int, int, int], tuple[Any, Any]]] = {
    "gaussian": _gaussian,
    "outlier channels": _outliers,
    "non-zero mean": _mean,
    "relu squared": _relu_squared,
    "positive": _positive,
    "softmax times values": _softmax,
    "tiny heavy-tailed gradients": _tiny_heavy_tailed,
}
"""Factors m×k and k×n of seven kinds, as layers have them."""
