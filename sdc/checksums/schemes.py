"""Schemes: when the two sums of a row are too far apart to be rounding.

`C = A B` with A m×k, B k×n, rows C_i, weights w_j; in the type of the sums (float32, u = 2^-24):

    s = sum_j B_ij w_j;   cs_i = sum_j A_ij s_j;   cw_i = sum_j C_ij w_j;   r = cw - cs

A scheme gives each row its *margin* |r| / bound; a row is suspicious unless its margin is at most 1, so that bounds
which are not finite and sums that are not numbers are. A scheme of two tiers judges suspicious rows again, more dearly.

=============  =====================================================================================================
`two-tier`     the default. Rounding errors of random signs: lambda = u (2.25 sqrt(k + n) + k / kappa). First tier:
               bound = lambda (|C_i|_2 + |cs|). Where terms cancel, C_i is far smaller than what was rounded: the second
               tier takes q_i = sqrt(sum_k A_ik^2 sum_j B_kj^2) for |C_i|_2 where it is larger
`blocks`       the same for blocks of 128 columns each: smaller errors are found, at more cost
`residual`     the same on an output rounded to its type, with the sum of what rounding took away carried along, one
               number a row: whoever holds the rounded C can check it later as closely as the sums themselves
`deterministic`  no false alarm whatever the signs: bound = 2 gamma_(k+n) |A| (|B| |w|) (componentwise analysis; Higham,
               Accuracy and Stability of Numerical Algorithms, 2002, section 3.5)
`paper`        Ma et al. 2025 (arXiv:2502.12340), equation (6): w = 1, |r|_inf > k u |A|_inf |B|_inf, u the eps of the
               inputs' type as in their code; one verdict for the whole product (docs/abft.md says what it misses)
=============  =====================================================================================================

Where C was rounded to a narrower type, of unit u', bounds grow by 3.4 u' |C_i|_2 (u' sum_j |C_ij w_j| in
`deterministic`). Weights are ±(64 .. 127)/128 with a fixed seed: exact in bfloat16, and unlike ones they see errors
that cancel, and all but one in 128 swaps of two elements.
"""

import abc
import functools
import math
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .products import Folded, Powers, Product, Sums
from .roundoff import SIGMAS, SchemeName, Units, check_choice

LOSSY = 16.0
"""Kappa that rows which repeat themselves are judged by, where the device's is larger."""
RUN = 512
"""Terms that are taken to be added one after the other, each of which may be too small to count. Assumed, not measured:
320 of them raised false alarms in training under kappa 16 alone."""
BLOCK = 128
"""Columns of a block."""
SEED = 20_250_218


class Factors(NamedTuple):
    """A product and what is known of it."""

    a: Float[Array, "*a"]  # first factor, in the type of the sums
    b: Float[Array, "*b"]  # second factor, likewise
    c: Float[Array, "*c"]  # the product, likewise
    units: Units  # units of its errors
    # Weighted sum of what rounding took from each row; None where nothing was rounded, or nothing carried.
    carried: Float[Array, "*rows"] | None = None
    # The folded second factor where the caller has it; None to compute it.
    checksum: Float[Array, "*folded"] | None = None
    # Weighted sum and sum of squares of each row where they were computed with the product, else None.
    totals: tuple[Float[Array, "*rows"], Float[Array, "*rows"]] | None = None


class Expected(NamedTuple):
    """What the rows of a product must be, from its factors alone."""

    sums: Float[Array, "*rows blocks"]  # cs, of each block of each row
    bound: Float[Array, "*#rows #blocks"]  # the part of the bound that the product has no say in
    # In a second tier, q^2, the least sum of squares that a row is taken to have, and the powers of two by which both
    # factors were multiplied before everything here was computed from them.
    second: tuple[Float[Array, "*rows blocks"], Powers] | None = None


class Scheme(abc.ABC):
    """How rows are judged."""

    tiers = 1  # 2 where `margin` has a second tier

    def blocks(self, width: int) -> int:
        """Number of blocks into which `width` columns are cut."""
        return 1

    def weights(self, width: int, dtype: Any) -> Float[Array, "n"]:
        """Weights of the columns, in a type."""
        return signed_weights(width, dtype)

    @abc.abstractmethod
    def expect(self, product: Product, factors: Factors, tier: int) -> Expected:
        """What follows from the factors; their product is not looked at."""

    @abc.abstractmethod
    def margin(self, product: Product, factors: Factors, expected: Expected) -> Float[Array, "*rows"]:
        """`|r| / bound` of each row of the product."""

    def lenience(self, product: Product, a: Any, b: Any, kappa: float) -> float:
        """By how much smaller margins are if long sums lose terms as `LOSSY` says; 1 where bounds allow for it."""
        return 1.0


@functools.cache
def _weights(width: int) -> Float[np.ndarray, "n"]:
    random = np.random.default_rng(SEED)
    return (random.choice([-1.0, 1.0], width) * random.integers(64, 128, width) / 128).astype(np.float32)


def signed_weights(width: int, dtype: Any = jnp.float32) -> Float[Array, "n"]:
    """Weights `±(64 .. 127)/128` of fixed seed."""
    return jnp.asarray(_weights(width), dtype)


def checksum(scheme: Scheme, product: Product, b: Float[Array, "*b"], width: int, *, careful: bool = False) -> Folded:
    """The folded second factor."""
    return product.fold(b, scheme.weights(width, b.dtype), scheme.blocks(width), careful=careful)


def should_be(scheme: Scheme, product: Product, factors: Factors, *, careful: bool = False) -> Sums:
    """The sums cs that the rows should have; `careful`: summed in parts."""
    folded = factors.checksum
    if folded is None:
        width = product.width(factors.a, factors.b)
        folded = checksum(scheme, product, factors.b, width, careful=careful)
    # Of a sum of sums XLA's CPU backend makes one kernel, whatever barrier is between, which takes seventy times as
    # long in bfloat16 (64 ms against 0.9 at 2,048 squared). A choice is no part of such kernels, and changes no bit.
    folded = jnp.where(jnp.isnan(folded), jnp.nan, folded)
    return product.apply(factors.a, folded, careful=careful)


def residual(scheme: Scheme, product: Product, factors: Factors, expected: Expected) -> Sums:
    """r: how far the rows are from what was expected; in a second tier, summed in parts."""
    if factors.totals is None:
        width = product.width(factors.a, factors.b)
        weights = scheme.weights(width, factors.c.dtype)
        found = product.total(factors.c, weights, scheme.blocks(width), careful=expected.second is not None)
    else:
        found = factors.totals[0][..., None]
    if factors.carried is not None:
        found += factors.carried[..., None]
    return found - expected.sums


def _ratio(residual: Sums, bound: Float[Array, "*#rows #blocks"]) -> Float[Array, "*rows"]:
    """`|r| / bound`, infinite where either says nothing."""
    ratio = jnp.abs(residual) / bound
    return jnp.max(jnp.where(jnp.isfinite(bound) & ~jnp.isnan(ratio), ratio, jnp.inf), axis=-1, initial=0.0)


class Probabilistic(Scheme):
    """`two-tier`, `blocks` and `residual`."""

    tiers = 2

    def __init__(self, block: int | None = None) -> None:
        self._block = block

    def blocks(self, width: int) -> int:
        return 1 if self._block is None else max(1, -(-width // self._block))

    def expect(self, product: Product, factors: Factors, tier: int) -> Expected:
        if tier == 1:
            sums = should_be(self, product, factors)
            return Expected(sums, self._relative(product, factors) * jnp.abs(sums))
        # Scaled by powers of two, exactly, so that all rows are 1 at most: their squares neither overflow nor vanish as
        # a whole.
        powers = product.powers(factors.a, factors.b)
        a, b = factors.a * powers.a, factors.b * powers.b
        sums = should_be(self, product, factors._replace(a=a, b=b, checksum=None), careful=True)
        depth, width = product.depth(a, b), product.width(a, b)
        squares = product.apply(a * a, product.fold(b * b, jnp.ones(width, b.dtype), self.blocks(width)))
        # Squares of what is smaller than the root of the smallest normal number vanish.
        lost = math.sqrt(float(jnp.finfo(b.dtype).tiny)) * 3 * math.sqrt(depth * width)
        bound = self._relative(product, factors) * (jnp.abs(sums) + lost)
        return Expected(sums, bound, (squares, powers))

    def margin(self, product: Product, factors: Factors, expected: Expected) -> Float[Array, "*rows"]:
        c, units, depth, width = factors.c, factors.units, product.depth(*factors[:2]), product.width(*factors[:2])
        # Errors of sums that are too small to be normal numbers, and of rounding them to the output's type.
        least: Any = depth * width * float(jnp.finfo(c.dtype).tiny) + SIGMAS * math.sqrt(width) * units.least
        if expected.second is not None:
            by_a, by_b = expected.second[1].rows
            tiny, most = (jnp.asarray(x, c.dtype) for x in (jnp.finfo(c.dtype).tiny, 1e30))
            for power in (by_a, by_b):
                c = c * (product.spread(power, c) if power.ndim else power)
            carried = None if factors.carried is None else factors.carried * by_a * by_b
            factors = factors._replace(c=c, carried=carried, totals=None)
            # What is below the normal numbers may be flushed before it is multiplied by the other factor. A product
            # that vanishes altogether is as large as its rounding: any bound that large will do.
            flushed = depth * width * tiny * (by_a + by_b)
            least = jnp.minimum(least * by_a * by_b + flushed, most)[..., None]
        if factors.totals is None:
            squares = product.total(c * c, jnp.ones(width, c.dtype), self.blocks(width))
        else:
            squares = factors.totals[1][..., None]
        largest = squares if expected.second is None else jnp.maximum(squares, expected.second[0])
        bound = self._relative(product, factors) * jnp.sqrt(largest) + expected.bound + least
        if factors.carried is None:
            bound += SIGMAS * units.output * jnp.sqrt(squares)
        return _ratio(residual(self, product, factors, expected), bound)

    def _relative(self, product: Product, factors: Factors) -> float:
        depth, width = product.depth(*factors[:2]), product.width(*factors[:2])
        return factors.units.relative(depth, -(-width // self.blocks(width)))

    def lenience(self, product: Product, a: Any, b: Any, kappa: float) -> float:
        depth, width = product.depth(a, b), product.width(a, b)
        width = -(-width // self.blocks(width))
        # Products with vectors are summed one term after the other throughout.
        vector = product.width(a, b) == 1 or product.rows(a, b) == 1
        lost = depth if vector else max(depth / LOSSY, min(depth, RUN))
        lossy = min(kappa, depth / max(lost, 1))
        usual, lossy = (Units(1.0, 0.0, 0.0, 0.0, k).relative(depth, width) for k in (kappa, lossy))
        return usual / lossy


class Deterministic(Scheme):
    """Componentwise bounds that no rounding can exceed."""

    def expect(self, product: Product, factors: Factors, tier: int) -> Expected:
        a, b, units = factors.a, factors.b, factors.units
        depth, width = product.depth(a, b), product.width(a, b)
        sums = should_be(self, product, factors)
        weights = jnp.abs(self.weights(width, b.dtype))
        terms = product.apply(jnp.abs(a), product.fold(jnp.abs(b), weights, 1))
        gamma = self._gamma(product, factors)
        bound = (2 * gamma * (1 + gamma) + 2 * units.inputs * (1 + units.inputs)) * terms
        # What is below the normal numbers is flushed, in a factor or in a term.
        flushed = depth * width + product.apply(jnp.abs(a), product.fold(jnp.ones_like(b), weights, 1))
        flushed += product.apply(jnp.ones_like(a), product.fold(jnp.abs(b), weights, 1))
        return Expected(sums, bound + flushed * float(jnp.finfo(b.dtype).tiny))

    def margin(self, product: Product, factors: Factors, expected: Expected) -> Float[Array, "*rows"]:
        c, units, width = factors.c, factors.units, product.width(*factors[:2])
        bound = expected.bound + width * units.least
        if units.output:
            weights = jnp.abs(self.weights(width, c.dtype))
            bound += units.output * (1 + self._gamma(product, factors)) * product.total(jnp.abs(c), weights, 1)
        return _ratio(residual(self, product, factors, expected), bound)

    def _gamma(self, product: Product, factors: Factors) -> float:
        terms = product.depth(*factors[:2]) + product.width(*factors[:2])
        # Sums that truncate err by up to twice as much; the terms are themselves rounded.
        unit = factors.units.sum if math.isinf(factors.units.kappa) else 2 * factors.units.sum
        return terms * unit / (1 - min(terms * unit, 0.5))


class Paper(Scheme):
    """The study's scheme."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def weights(self, width: int, dtype: Any) -> Float[Array, "n"]:
        return jnp.ones(width, dtype)

    def expect(self, product: Product, factors: Factors, tier: int) -> Expected:
        sums = should_be(self, product, factors)
        bound = product.depth(*factors[:2]) * self._epsilon * product.norms(*factors[:2])
        # A product of zeros has the bound zero, which it keeps.
        bound = jnp.where(bound == 0, float(jnp.finfo(bound.dtype).tiny), bound)
        return Expected(sums, bound[..., None])

    def margin(self, product: Product, factors: Factors, expected: Expected) -> Float[Array, "*rows"]:
        return _ratio(residual(self, product, factors, expected), expected.bound)


def make_scheme(name: str, a: Any, b: Any) -> Scheme:
    """The scheme of that name for factors of these types."""
    check_choice("scheme", name, get_args(SchemeName))
    if name == "paper":
        return Paper(max(float(jnp.finfo(dtype).eps) for dtype in (a, b)))
    return Deterministic() if name == "deterministic" else Probabilistic(BLOCK if name == "blocks" else None)
