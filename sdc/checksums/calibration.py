"""Calibration: how a device rounds, measured on products whose rounding errors are known to be nothing else."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .fused_products import multiply
from .power import DISTRIBUTIONS
from .products import Dot
from .roundoff import EXACT, SIGMAS, SPREAD, Rounding, Settings, Units
from .schemes import Factors, Probabilistic, residual

DEPTHS = (64, 256, 1024, 4096, 16384)
"""Numbers of terms of the sums that are measured."""
ROWS, COLUMNS = 512, 128
HALF = 0.5
"""Share of its bound that the largest measured error may reach."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Largest errors of rows of products of one type."""

    dtype: str  # type of the factors
    relative: Mapping[int, float]  # by number of terms k, the largest `|r| / (q + |cs|)`, q the second tier's scale


def measure(dtype: str, *, seed: int = 0, depths: Sequence[int] = DEPTHS) -> Measured:
    """Measures the rounding errors of products of a type on the default device, over all distributions of `power`.

    Args:
        dtype: type of the factors; sums are returned in float32.
        seed: decides the factors.
        depths: numbers of terms.
    """
    product = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))

    @jax.jit
    def largest(a: Any, b: Any) -> Any:
        a, b, c = multiply(product, Settings(), a, b)[:3]
        units = Units.of(a.dtype, b.dtype, c.dtype, EXACT)
        wide = Factors(a.astype(jnp.float32), b.astype(jnp.float32), c, units)
        scheme = Probabilistic()
        expected = scheme.expect(product, wide, 1)
        ones = jnp.ones(product.width(a, b))
        scale = jnp.sqrt(product.apply(jnp.square(wide.a), product.fold(jnp.square(wide.b), ones, 1)))
        return jnp.max(jnp.abs(residual(scheme, product, wide, expected)) / (scale + jnp.abs(expected.sums)))

    relative = {}
    for depth in depths:
        found = []
        for number, make in enumerate(DISTRIBUTIONS.values()):
            key = jax.random.fold_in(jax.random.key(seed), 1000 * depth + number)
            found.append(float(largest(*(x.astype(dtype) for x in make(key, ROWS, depth, COLUMNS)))))
        relative[depth] = max(found)
    return Measured(dtype, relative)


def fit(narrow: Measured | None, wide: Measured | None) -> Rounding:
    """How a device rounds, from its errors.

    Products of bfloat16 factors are exact in float32, so that their errors are those of the sums: they give kappa. What
    errors of float32 factors exceed that is due to the rounding of the factors.

    Args:
        narrow: measured with bfloat16 factors; None where that was not measured, to take kappa from float32.
        wide: measured with float32 factors; None where that was not measured.
    """
    sums = narrow or wide
    assert sums is not None, "something was measured"
    # Where the shortest sums err so much, it must be their factors that are rounded.
    rounds = narrow is None and sums.relative[min(sums.relative)] > 2.0**-16
    kappa = math.inf if rounds else kappa_of(sums.relative)
    inputs = 0.0
    if wide is not None:
        left = max(
            relative - HALF * Units(2.0**-24, 0.0, 0.0, 0.0, kappa).relative(depth, COLUMNS)
            for depth, relative in wide.relative.items()
        )
        if left > 0:
            inputs = 2.0 ** math.ceil(math.log2(left / (HALF * SIGMAS)))
    return Rounding(kappa, inputs)


def kappa_of(relative: Mapping[int, float]) -> float:
    """The largest kappa that keeps each of the errors of `Measured` at half of its bound or less.

    It is infinite where sums need no such term.

    Example:
        >>> from sdc.checksums.calibration import kappa_of
        >>> kappa_of({64: 1e-8}), kappa_of({1024: 1e-4}) < 1.0
        (inf, True)
    """
    needed = [
        depth / excess
        for depth, largest in relative.items()
        if (excess := largest / (HALF * 2.0**-24) - SPREAD * math.sqrt(depth + COLUMNS)) > 0
    ]
    return min(needed, default=math.inf)


def begin_with_second(
    examined: Mapping[str, int], checked: Mapping[str, int], *, share: float = 0.01
) -> tuple[str, ...]:
    """The sites of which the first tier passes on so many rows that the second one is cheaper from the start.

    Args:
        examined, checked: rows that the first tier passed on, and all rows that it judged, by site.
        share: share of the rows above which it is.
    """
    return tuple(name for name, count in examined.items() if checked[name] and count / checked[name] > share)
