"""The power of a check: which errors it finds in a product, and how often it is wrong about a healthy one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from sdc.bits import as_bits, from_bits, select

from ._check import Operands, expect, row_margins
from .products import Dot
from .roundoff import Rounding, Settings
from .schemes import Expected

MAGNITUDES = tuple(float(10.0 ** (x / 2)) for x in range(-10, 7))
"""Errors, in units of the root mean square of the row, that a study tries: 1e-5 to 1e3."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsMeasured:
    """What the study of all schemes counts; `sdc.train` runs it, `sdc.analysis` makes tables of it."""

    config: Mapping[str, Any]  # what was trained
    steps: int  # optimizer steps
    seed: int  # decides parameters and errors
    where: str  # which products, a selector
    marked: tuple[int, ...]  # steps whose products got errors
    rounding: Rounding  # how the device rounds, from which thresholds follow
    departs: tuple[str, ...]  # in what this device departs from the one that the rounding is of
    # By variant (type, sums or rounded) and scheme: rows `checked` and `flagged` in healthy training; errors `made`
    # and `found` by magnitude; flips `bits_made` and `bits_found` by bit.
    counts: Mapping[str, Mapping[str, Mapping[str, Any]]]
    magnitudes: tuple[float, ...]  # sizes of the errors, in root mean squares of the row


def flagged(
    product: Dot, settings: Settings, operands: Operands, expected: Expected | None = None
) -> Bool[Array, "*rows"]:
    """The rows that a scheme finds wrong, in its last tier; `expected` of that tier, where it is known."""
    if expected is None:
        expected = expect(product, settings, operands, 2)
    return ~(row_margins(product, settings, operands, expected) <= 1)


def one_per_row(
    key: PRNGKeyArray, product: Dot, c: Shaped[Array, "*c"], change: Callable[[Any, Any], Any]
) -> tuple[Shaped[Array, "*c"], Bool[Array, "rows"]]:
    """Changes one random element of each row: rows are judged one by one, so each is an experiment of its own.

    Args:
        key: decides the columns.
        product: how `c` was computed.
        c: its result.
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


class Found(NamedTuple):
    """Errors that were made, and how many of them each of several judges found."""

    found: Int[Array, "judges n"]  # by judge and magnitude
    made: Int[Array, "n"]  # by magnitude
    bits_found: Int[Array, "judges bits"]  # by judge and number of the flipped bit in the product's type
    bits_made: Int[Array, "bits"]  # by bit


def errors_found(
    key: PRNGKeyArray,
    product: Dot,
    c: Shaped[Array, "*c"],
    judges: Sequence[Callable[[Any], Bool[Array, "*rows"]]],
    magnitudes: Float[Array, "n"],
) -> Found:
    """Puts errors into a product, one in each row, and asks judges which rows are wrong.

    Args:
        key: decides columns and signs.
        product, c: see `one_per_row`.
        judges: told the changed product, they return the rows that they find wrong.
        magnitudes: errors to add or subtract, in root mean squares of their row. Besides, every bit is flipped.
    """
    bits = jax.dtypes.itemsize_bits(c.dtype)
    rows = product.matrix(c)
    # A row of zeros has no scale, and an error that is no change is none.
    alive = jnp.any(rows != 0, axis=1)

    def trial(numbered: tuple[Any, Any]) -> tuple[Any, Any]:
        number, magnitude = numbered
        own = jax.random.fold_in(key, number)
        signs = jax.random.rademacher(own, rows.shape[:1], jnp.float32)

        def change(old: Any, rms: Any) -> Any:
            shifted = (old.astype(jnp.float32) + signs * magnitude * rms).astype(old.dtype)
            one = jnp.ones((), as_bits(old).dtype)
            flipped = as_bits(old) ^ (one << jnp.maximum(number - magnitudes.size, 0).astype(one.dtype))
            return select(jnp.broadcast_to(number < magnitudes.size, old.shape), shifted, from_bits(flipped, old))

        changed, made = one_per_row(own, product, c, change)
        made &= alive
        seen = jnp.stack([judge(changed).reshape(-1) & made for judge in judges])
        return jnp.sum(seen, axis=1, dtype=jnp.int32), jnp.sum(made, dtype=jnp.int32)

    trials = jnp.arange(magnitudes.size + bits), jnp.concatenate([magnitudes, jnp.zeros(bits, magnitudes.dtype)])
    found, made = jax.lax.map(trial, trials)
    last = magnitudes.size
    return Found(found[:last].T, made[:last], found[last:].T, made[last:])


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
