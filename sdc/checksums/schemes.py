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
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from .products import Folded, Powers, Product, Sums
from .roundoff import SIGMAS, SchemeName, Settings, Units, work_type

LOSSY = 16.0  # kappa that rows which repeat themselves are judged by, where the device's is larger
# Terms that are taken to be added one after the other, each of which may be too small to count. Assumed, not
# measured: 320 of them raised false alarms in training under kappa 16 alone.
RUN = 512
BLOCK = 128  # columns of a block
SEED = 20_250_218


class Operands(NamedTuple):
    """What a check is given: both factors and the product as it was computed, and what is known of them."""

    a: Shaped[Array, "*a"]
    b: Shaped[Array, "*b"]
    c: Shaped[Array, "*c"]
    # Weighted sum of what rounding took from each row; None where nothing was rounded, or nothing carried.
    carried: Float[Array, "*rows"] | None = None
    # The folded second factor where the caller has it; None to compute it.
    checksum: Float[Array, "*folded"] | None = None
    # Weighted sum and sum of squares of each row where they were computed with the product, else None.
    totals: tuple[Float[Array, "*rows"], Float[Array, "*rows"]] | None = None
    indices: tuple[Any, ...] = ()  # see `Indexed`

    def wide(self) -> "Operands":
        """Factors and product in the type of the sums, in which schemes take them."""
        work = work_type(self.a.dtype, self.b.dtype, self.c.dtype)
        return self._replace(a=self.a.astype(work), b=self.b.astype(work), c=self.c.astype(work))


class Expected(NamedTuple):
    """What the rows of a product must be, from its factors alone."""

    sums: Float[Array, "*rows blocks"]  # cs, of each block of each row
    bound: Float[Array, "*#rows #blocks"]  # the part of the bound that the product has no say in
    # In a second tier, q^2, the least sum of squares that a row is taken to have, and the powers of two by which both
    # factors were multiplied before everything here was computed from them.
    second: tuple[Float[Array, "*rows blocks"], Powers] | None = None


@functools.cache
def _weights(width: int) -> Float[np.ndarray, "n"]:
    random = np.random.default_rng(SEED)
    return (random.choice([-1.0, 1.0], width) * random.integers(64, 128, width) / 128).astype(np.float32)


def signed_weights(width: int, dtype: Any = jnp.float32) -> Float[Array, "n"]:
    """Weights `±(64 .. 127)/128` of fixed seed."""
    return jnp.asarray(_weights(width), dtype)


def weights_of(scheme: SchemeName, width: int, dtype: Any) -> Float[Array, "n"]:
    """A scheme's weights of the columns, in a type."""
    return jnp.ones(width, dtype) if scheme == "paper" else signed_weights(width, dtype)


def blocks_of(scheme: SchemeName, width: int) -> int:
    """Number of blocks into which a scheme cuts columns."""
    return max(1, -(-width // BLOCK)) if scheme == "blocks" else 1


def fold(scheme: SchemeName, product: Product, b: Float[Array, "*b"], *, careful: bool = False) -> Folded:
    """The folded second factor."""
    width = product.width(None, b)
    return product.fold(b, weights_of(scheme, width, b.dtype), blocks_of(scheme, width), careful=careful)


class Scheme(abc.ABC):
    """How the rows of a product are judged: from operands in the type of the sums."""

    tiers = 1  # 2 where `margin` has a second tier

    def __init__(self, product: Product, name: SchemeName, given: Operands, units: Units) -> None:
        self.product, self.name, self.units = product, name, units
        self.depth, self.width = product.depth(given.a, given.b), product.width(given.a, given.b)
        self.blocks = blocks_of(name, self.width)
        self.epsilon = max(float(jnp.finfo(x.dtype).eps) for x in (given.a, given.b))

    @abc.abstractmethod
    def expect(self, given: Operands, tier: int) -> Expected:
        """What follows from the factors; their product is not looked at."""

    @abc.abstractmethod
    def margin(self, given: Operands, expected: Expected) -> Float[Array, "*rows"]:
        """`|r| / bound` of each row of the product."""

    def lenience(self, given: Operands) -> float:
        """By how much smaller margins are if long sums lose terms as `LOSSY` says; 1 where bounds allow for it."""
        return 1.0

    def should_be(self, given: Operands, *, careful: bool = False) -> Sums:
        """The sums cs that the rows should have; `careful`: summed in parts."""
        folded = given.checksum
        if folded is None:
            folded = fold(self.name, self.product, given.b, careful=careful)
        # Of a sum of sums XLA's CPU backend makes one kernel, whatever barrier is between, which takes seventy times as
        # long in bfloat16 (64 ms, not 0.9, at 2,048 squared). A choice is no part of such kernels, and changes no bit.
        folded = jnp.where(jnp.isnan(folded), jnp.nan, folded)
        return self.product.apply(given.a, folded, careful=careful)

    def residual(self, given: Operands, expected: Expected) -> Sums:
        """r: how far the rows are from what was expected; in a second tier, summed in parts."""
        if given.totals is None:
            weights = weights_of(self.name, self.width, given.c.dtype)
            found = self.product.total(given.c, weights, self.blocks, careful=expected.second is not None)
        else:
            found = given.totals[0][..., None]
        if given.carried is not None:
            found += given.carried[..., None]
        return found - expected.sums

    def ratio(
        self, given: Operands, expected: Expected, bound: Float[Array, "*#rows #blocks"]
    ) -> Float[Array, "*rows"]:
        """`|r| / bound`, infinite where either says nothing."""
        ratio = jnp.abs(self.residual(given, expected)) / bound
        return jnp.max(jnp.where(jnp.isfinite(bound) & ~jnp.isnan(ratio), ratio, jnp.inf), axis=-1, initial=0.0)


class Probabilistic(Scheme):
    """`two-tier`, `blocks` and `residual`."""

    tiers = 2

    @property
    def _relative(self) -> float:
        return self.units.relative(self.depth, -(-self.width // self.blocks))

    def expect(self, given: Operands, tier: int) -> Expected:
        if tier == 1:
            sums = self.should_be(given)
            return Expected(sums, self._relative * jnp.abs(sums))
        # Scaled by powers of two, exactly, so that all rows are 1 at most: their squares neither overflow nor vanish as
        # a whole.
        powers = self.product.powers(given.a, given.b)
        a, b = given.a * powers.a, given.b * powers.b
        sums = self.should_be(given._replace(a=a, b=b, checksum=None), careful=True)
        squares = self.product.apply(a * a, self.product.fold(b * b, jnp.ones(self.width, b.dtype), self.blocks))
        # Squares of what is smaller than the root of the smallest normal number vanish.
        lost = math.sqrt(float(jnp.finfo(b.dtype).tiny)) * 3 * math.sqrt(self.depth * self.width)
        return Expected(sums, self._relative * (jnp.abs(sums) + lost), (squares, powers))

    def margin(self, given: Operands, expected: Expected) -> Float[Array, "*rows"]:
        c, size = given.c, self.depth * self.width
        # Errors of sums that are too small to be normal numbers, and of rounding them to the output's type.
        least: Any = size * float(jnp.finfo(c.dtype).tiny) + SIGMAS * math.sqrt(self.width) * self.units.least
        if expected.second is not None:
            by_a, by_b = expected.second[1].rows
            tiny, most = (jnp.asarray(x, c.dtype) for x in (jnp.finfo(c.dtype).tiny, 1e30))
            for power in (by_a, by_b):
                c = c * (self.product.spread(power, c) if power.ndim else power)
            carried = None if given.carried is None else given.carried * by_a * by_b
            given = given._replace(c=c, carried=carried, totals=None)
            # What is below the normal numbers may be flushed before it is multiplied by the other factor. A product
            # that vanishes altogether is as large as its rounding: any bound that large will do.
            flushed = size * tiny * (by_a + by_b)
            least = jnp.minimum(least * by_a * by_b + flushed, most)[..., None]
        if given.totals is None:
            squares = self.product.total(c * c, jnp.ones(self.width, c.dtype), self.blocks)
        else:
            squares = given.totals[1][..., None]
        largest = squares if expected.second is None else jnp.maximum(squares, expected.second[0])
        bound = self._relative * jnp.sqrt(largest) + expected.bound + least
        if given.carried is None:
            bound += SIGMAS * self.units.output * jnp.sqrt(squares)
        return self.ratio(given, expected, bound)

    def lenience(self, given: Operands) -> float:
        depth, width = self.depth, -(-self.width // self.blocks)
        # Products with vectors are summed one term after the other throughout.
        vector = self.width == 1 or self.product.rows(given.a, given.b) == 1
        lost = depth if vector else max(depth / LOSSY, min(depth, RUN))
        kappas = self.units.kappa, min(self.units.kappa, depth / max(lost, 1))
        usual, lossy = (Units(1.0, 0.0, 0.0, 0.0, kappa).relative(depth, width) for kappa in kappas)
        return usual / lossy


class Deterministic(Scheme):
    """Componentwise bounds that no rounding can exceed."""

    @property
    def _gamma(self) -> float:
        terms = self.depth + self.width
        # Sums that truncate err by up to twice as much; the terms are themselves rounded.
        unit = self.units.sum if math.isinf(self.units.kappa) else 2 * self.units.sum
        return terms * unit / (1 - min(terms * unit, 0.5))

    def expect(self, given: Operands, tier: int) -> Expected:
        a, b, units, product = given.a, given.b, self.units, self.product
        sums = self.should_be(given)
        weights = jnp.abs(signed_weights(self.width, b.dtype))
        terms = product.apply(jnp.abs(a), product.fold(jnp.abs(b), weights, 1))
        bound = (2 * self._gamma * (1 + self._gamma) + 2 * units.inputs * (1 + units.inputs)) * terms
        # What is below the normal numbers is flushed, in a factor or in a term.
        flushed = self.depth * self.width + product.apply(jnp.abs(a), product.fold(jnp.ones_like(b), weights, 1))
        flushed += product.apply(jnp.ones_like(a), product.fold(jnp.abs(b), weights, 1))
        return Expected(sums, bound + flushed * float(jnp.finfo(b.dtype).tiny))

    def margin(self, given: Operands, expected: Expected) -> Float[Array, "*rows"]:
        bound = expected.bound + self.width * self.units.least
        if self.units.output:
            weights = jnp.abs(signed_weights(self.width, given.c.dtype))
            bound += self.units.output * (1 + self._gamma) * self.product.total(jnp.abs(given.c), weights, 1)
        return self.ratio(given, expected, bound)


class Paper(Scheme):
    """The study's scheme."""

    def expect(self, given: Operands, tier: int) -> Expected:
        sums = self.should_be(given)
        bound = self.depth * self.epsilon * self.product.norms(given.a, given.b)
        # A product of zeros has the bound zero, which it keeps.
        bound = jnp.where(bound == 0, float(jnp.finfo(bound.dtype).tiny), bound)
        return Expected(sums, bound[..., None])

    def margin(self, given: Operands, expected: Expected) -> Float[Array, "*rows"]:
        return self.ratio(given, expected, expected.bound)


def make_scheme(product: Product, settings: Settings, given: Operands) -> Scheme:
    """The scheme of the settings for a product of these operands."""
    units = Units.of(given.a.dtype, given.b.dtype, given.c.dtype, settings.rounding, exact=product.exact)
    kinds: dict[str, type[Scheme]] = {"deterministic": Deterministic, "paper": Paper}
    return kinds.get(settings.scheme, Probabilistic)(product, settings.scheme, given, units)
