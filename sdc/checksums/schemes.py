"""Schemes: criteria that decide whether the two sums of a row differ by more than rounding errors.

Let `C = A B`, where A is m×k and B is k×n; C_i are the rows of C, and w_j are weights. In the type of the sums
(float32, u = 2^-24):

    s = sum_j B_ij w_j;   cs_i = sum_j A_ij s_j;   cw_i = sum_j C_ij w_j;   r = cw - cs

A scheme assigns each row its *margin* |r| / bound; a row is suspicious unless its margin is at most 1, so infinite
bounds and NaN sums make a row suspicious. A scheme of two tiers checks suspicious rows again, at a higher cost.

=============  =====================================================================================================
`two-tier`     the default. Assumes random signs of rounding errors: lambda = u (2.25 sqrt(k + n) + k / kappa). In the
               first tier, bound = lambda (|C_i|_2 + |cs|). If terms cancel, C_i is far smaller than the rounded
               terms, so the second tier uses q_i = sqrt(sum_k A_ik^2 sum_j B_kj^2) for |C_i|_2 if q_i is larger
`blocks`       `two-tier` for blocks of 128 columns each: detects smaller errors, at a higher cost
`residual`     `two-tier` on an output rounded to its type, with the sum of each row's rounding errors carried along,
               so the rounded C can be checked later as precisely as the sums themselves
`deterministic`  no false alarms, whatever the signs: bound = 2 gamma_(k+n) |A| (|B| |w|) (componentwise analysis;
               Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5)
`paper`        Ma et al. 2025 (arXiv:2502.12340), equation (6): w = 1, |r|_inf > k u |A|_inf |B|_inf, u the eps of the
               inputs' type as in their code; one verdict for the whole product (docs/abft.md lists what it misses)
=============  =====================================================================================================

If C was rounded to a narrower type, with unit roundoff u', bounds grow by 3.4 u' |C_i|_2 (u' sum_j |C_ij w_j| in
`deterministic`). Weights are ±(64 .. 127)/128 with a fixed seed: they are exact in bfloat16 and, unlike weights of 1,
detect errors that cancel, and all but one in 128 swaps of two elements.
"""

import abc
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from .products import Dimensions, Dot, Folded, Powers, Product, Sums, arranged
from .roundoff import SIGMAS, SchemeName, Settings, Units, work_type

LOSSY = 16.0  # upper limit of kappa for rows whose recomputation is identical
# Number of terms assumed to be added sequentially, each of which may be too small to change the sum. This number is not
# measured; without it, at kappa = 16, 320 such terms raised false alarms in training.
RUN = 512
BLOCK = 128  # columns of a block
SQUARED = 2.0**28  # larger numbers count as this one in the first tier's estimate of the norm of the terms
SKETCHED = 128  # columns by which a matrix unit multiplies at once
SEED = 20_250_218


class Operands(NamedTuple):
    """Inputs of a check: both factors, the computed product, and sums that are already known."""

    a: Shaped[Array, "*a"]
    b: Shaped[Array, "*b"]
    c: Shaped[Array, "*c"]
    # Weighted sum of each row's rounding errors; None if nothing was rounded or carried.
    carried: Float[Array, "*rows"] | None = None
    # The checksum of the second factor, if the caller has one; None to compute it.
    checksum: Float[Array, "*folded"] | None = None
    # Weighted sum and sum of squares of each row (or column, if `Settings.columns`) if these were computed with the
    # product; otherwise None.
    totals: tuple[Float[Array, "*rows"], Float[Array, "*rows"]] | None = None
    indices: tuple[Any, ...] = ()  # see `Indexed`
    # Lambda, and number of terms times number of columns, of each row, if the rows are of products of different shapes;
    # None if these follow from the shape.
    own: tuple[Float[Array, "*#rows #blocks"], Float[Array, "*#rows #blocks"]] | None = None

    def wide(self) -> "Operands":
        """Converts the factors and the product to the type of the sums, in which schemes compute."""
        work = work_type(self.a.dtype, self.b.dtype, self.c.dtype)
        return self._replace(a=self.a.astype(work), b=self.b.astype(work), c=self.c.astype(work))


def turned(product: Dot, given: Operands) -> tuple[Dot, Operands]:
    """Returns the product whose rows are the columns of this one; `given.totals` must be those of columns."""
    batch, rows = len(product.dimensions[1][0]), product.rank()
    c = given.c.transpose(*range(batch), *range(rows, given.c.ndim), *range(batch, rows))
    return product.columns(), given._replace(a=given.b, b=given.a, c=c)


class Expected(NamedTuple):
    """The expected row sums of a product, computed from its factors alone."""

    sums: Float[Array, "*rows blocks"]  # cs of each block of each row
    bound: Float[Array, "*#rows #blocks"]  # the part of the bound that does not depend on the product
    # q^2, the minimum assumed for the sum of squares of a row; None if terms are assumed not to cancel.
    squares: Float[Array, "*rows blocks"] | None = None
    # In a second tier, the powers of two by which both factors were scaled before these values were computed from them.
    powers: Powers | None = None


@functools.cache
def _weights(width: int) -> Float[np.ndarray, "n"]:
    # Two generators, so that the first weights do not depend on how many there are.
    signs, sizes = (np.random.default_rng([SEED, part]) for part in range(2))
    return (signs.choice([-1.0, 1.0], width) * sizes.integers(64, 128, width) / 128).astype(np.float32)


def signed_weights(width: int, dtype: Any = jnp.float32) -> Float[Array, "n"]:
    """Returns weights `±(64 .. 127)/128` with a fixed seed."""
    return jnp.asarray(_weights(width), dtype)


def weights_of(scheme: SchemeName, width: int, dtype: Any) -> Float[Array, "n"]:
    """Returns a scheme's weights for the columns, in a given type."""
    return jnp.ones(width, dtype) if scheme == "paper" else signed_weights(width, dtype)


def blocks_of(scheme: SchemeName, width: int) -> int:
    """Returns the number of blocks into which a scheme splits columns."""
    return max(1, -(-width // BLOCK)) if scheme == "blocks" else 1


def fold(scheme: SchemeName, product: Product, b: Float[Array, "*b"], *, careful: bool = False) -> Folded:
    """Computes the checksum of the second factor."""
    width = product.width(None, b)
    return product.fold(b, weights_of(scheme, width, b.dtype), blocks_of(scheme, width), careful=careful)


def sketch(product: Dot, a: Float[Array, "*a"], b: Float[Array, "*b"]) -> tuple[Sums, Sums]:
    """Computes cs, and estimates q^2, of a product of bfloat16 numbers, as two products with `SKETCHED` columns.

    A matrix unit multiplies by that many columns at once. The first product has the weights and random signs e_jc:
    s_k and F_kc = sum_j B_kj e_jc, so that the mean of F_kc^2 over c estimates sum_j B_kj^2 = t_k^2 (Alon, Matias and
    Szegedy, The Space Complexity of Approximating the Frequency Moments, 1999). The second one has three bfloat16
    numbers whose sum is s_k, and e_kc t_k. The relative standard error of q^2 is at most sqrt(2 / 125), about an
    eighth, plus that of the t_k.
    """
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # which rounds nothing: they were of this type

    def times(x: Any, y: Any, dimensions: Dimensions) -> Float[Array, "*rest columns"]:
        dimensions, x, y = arranged(dimensions, x, y.astype(jnp.bfloat16))
        return lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)

    free = [axis for axis in range(b.ndim) if axis not in (*product.dimensions[0][1], *product.dimensions[1][1])]
    width = math.prod(b.shape[axis] for axis in free)
    weights = jnp.concatenate([signed_weights(width)[:, None], random_signs(width)[:, 1:]], axis=1)
    weights = weights.reshape(*(b.shape[axis] for axis in free), SKETCHED)
    folded = times(b, weights, ((free, tuple(range(len(free)))), ((), ())))
    rest, parts = folded[..., 0], []
    for _ in range(3):
        parts.append(lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - parts[-1]
    squares = jnp.mean(jnp.square(folded[..., 1:]), axis=-1)
    signs = random_signs(math.prod(folded.shape[:-1])).reshape(folded.shape)[..., 3:]
    parts = [jnp.stack(parts, axis=-1), signs * jnp.sqrt(squares)[..., None]]
    found = times(a, jnp.concatenate(parts, axis=-1), product.with_folded)
    return jnp.sum(found[..., :3], axis=-1)[..., None], jnp.mean(jnp.square(found[..., 3:]), axis=-1)[..., None]


def random_signs(rows: int) -> Float[Array, "rows columns"]:
    """Returns random signs with a fixed seed; they are computed, since a constant would be part of every program."""
    # Without the barrier, XLA would compute the constant.
    seed = lax.optimization_barrier(jnp.uint32(SEED))
    number = lax.broadcasted_iota(jnp.uint32, (rows, SKETCHED), 0) * SKETCHED
    number = (number + lax.broadcasted_iota(jnp.uint32, (rows, SKETCHED), 1)) ^ seed
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # the finalizer of MurmurHash3 (public domain)
        number = (number ^ (number >> 15)) * jnp.uint32(factor)
    return jnp.where(number >> 31 == 1, jnp.float32(1), jnp.float32(-1))


class Scheme(abc.ABC):
    """A check of the rows of a product, based on operands in the type of the sums."""

    tiers = 1  # 2 if `margin` has a second tier

    def __init__(self, product: Product, settings: Settings, given: Operands, units: Units) -> None:
        self.product, self.settings, self.units, self.name = product, settings, units, settings.scheme
        self.depth, self.width = product.depth(given.a, given.b), product.width(given.a, given.b)
        self.blocks = blocks_of(self.name, self.width)
        self.epsilon = max(float(jnp.finfo(x.dtype).eps) for x in (given.a, given.b))

    @abc.abstractmethod
    def expect(self, given: Operands, tier: int) -> Expected:
        """Computes the expected sums from the factors, without using their product."""

    @abc.abstractmethod
    def margin(self, given: Operands, expected: Expected) -> Float[Array, "*rows"]:
        """Computes `|r| / bound` of each row of the product."""

    def lenience(self, given: Operands) -> float:
        """Returns the factor by which margins are multiplied if long sums lose terms (see `LOSSY`); the factor is 1 if
        bounds already include such losses."""
        return 1.0

    def should_be(self, given: Operands, *, careful: bool = False) -> Sums:
        """Computes the sums cs that the rows should have; if `careful`, adds the terms in parts."""
        folded = given.checksum
        if folded is None:
            folded = fold(self.name, self.product, given.b, careful=careful)
        # XLA's CPU backend fuses a sum of sums into one kernel despite barriers, which takes seventy times as long in
        # bfloat16 (64 ms instead of 0.9 ms at 2,048 squared). A select prevents this fusion, and changes no bit.
        folded = jnp.where(jnp.isnan(folded), jnp.nan, folded)
        return self.product.apply(given.a, folded, careful=careful)

    def residual(self, given: Operands, expected: Expected) -> Sums:
        """Computes r, the difference between the sums of the rows and the expected sums; in a second tier, the terms
        are added in parts."""
        if given.totals is None:
            weights = weights_of(self.name, self.width, given.c.dtype)
            found = self.product.total(given.c, weights, self.blocks, careful=expected.powers is not None)
        else:
            found = given.totals[0][..., None]
        if given.carried is not None:
            found += given.carried[..., None]
        return found - expected.sums

    def ratio(
        self, given: Operands, expected: Expected, bound: Float[Array, "*#rows #blocks"]
    ) -> Float[Array, "*rows"]:
        """Computes `|r| / bound`, which is infinite if r or the bound is undefined."""
        ratio = jnp.abs(self.residual(given, expected)) / bound
        return jnp.max(jnp.where(jnp.isfinite(bound) & ~jnp.isnan(ratio), ratio, jnp.inf), axis=-1, initial=0.0)


class Probabilistic(Scheme):
    """The schemes `two-tier`, `blocks` and `residual`."""

    tiers = 2

    @property
    def relative(self) -> float:
        """Lambda."""
        # If matrix units compute the sums too, these may be truncated as the product's.
        depth = 2 * self.depth + self.width if self.settings.columns else self.depth
        return self.units.relative(depth, -(-self.width // self.blocks))

    def _own(self, given: Operands) -> tuple[Any, Any]:
        """Returns lambda, and the number of terms times that of columns."""
        return (self.relative, self.depth * self.width) if given.own is None else given.own

    def expect(self, given: Operands, tier: int) -> Expected:
        relative, size = self._own(given)
        # Squares of numbers below the root of the smallest normal number vanish.
        lost = math.sqrt(float(jnp.finfo(given.b.dtype).tiny)) * 3 * size**0.5
        if tier == 1 and not (self.settings.columns or self.settings.cancels):
            sums = self.should_be(given)
            return Expected(sums, relative * jnp.abs(sums))
        if tier == 1:
            if self.settings.columns and isinstance(self.product, Dot):
                sums, squares = sketch(self.product, given.a, given.b)
                squares = jnp.where(jnp.isfinite(squares), squares, 0.0)
            else:
                # Squares of numbers that are not scaled could overflow. To test for that would take kernels of its own.
                small = (jnp.minimum(jnp.abs(x), SQUARED) for x in (given.a, given.b))
                sums, squares = self.should_be(given), self._squares(*small)
            return Expected(sums, relative * (jnp.abs(sums) + lost), squares)
        # Factors are scaled exactly, by powers of two, so that elements are at most 1, and the squares of a row neither
        # overflow nor all vanish.
        powers = self.product.powers(given.a, given.b)
        a, b = given.a * powers.a, given.b * powers.b
        sums = self.should_be(given._replace(a=a, b=b, checksum=None), careful=True)
        return Expected(sums, relative * (jnp.abs(sums) + lost), self._squares(a, b), powers)

    def _squares(self, a: Float[Array, "*a"], b: Float[Array, "*b"]) -> Sums:
        """Returns q^2."""
        return self.product.apply(a * a, self.product.fold(b * b, jnp.ones(self.width, b.dtype), self.blocks))

    def margin(self, given: Operands, expected: Expected) -> Float[Array, "*rows"]:
        c, (relative, size) = given.c, self._own(given)
        # Errors of sums below the normal numbers, and of rounding them to the output's type.
        least: Any = size * float(jnp.finfo(c.dtype).tiny) + SIGMAS * math.sqrt(self.width) * self.units.least
        if expected.powers is not None:
            by_a, by_b = expected.powers.rows
            tiny, most = (jnp.asarray(x, c.dtype) for x in (jnp.finfo(c.dtype).tiny, 1e30))
            for power in (by_a, by_b):
                c = c * (self.product.spread(power, c) if power.ndim else power)
            carried = None if given.carried is None else given.carried * by_a * by_b
            given = given._replace(c=c, carried=carried, totals=None)
            # Numbers below the normal ones may be flushed before they are multiplied by the other factor. If a product
            # vanishes entirely, its rounding error is as large as the product, and a bound of that size suffices.
            by_a, by_b = by_a[..., None], by_b[..., None]
            least = jnp.minimum(least * by_a * by_b + size * tiny * (by_a + by_b), most)
        if given.totals is None:
            squares = self.product.total(c * c, jnp.ones(self.width, c.dtype), self.blocks)
        else:
            squares = given.totals[1][..., None]
        largest = squares if expected.squares is None else jnp.maximum(squares, expected.squares)
        bound = relative * jnp.sqrt(largest) + expected.bound + least
        if given.carried is None:
            bound += SIGMAS * self.units.output * jnp.sqrt(squares)
        return self.ratio(given, expected, bound)

    def lenience(self, given: Operands) -> float:
        depth, width = self.depth, -(-self.width // self.blocks)
        # Products with vectors are summed sequentially throughout.
        vector = self.width == 1 or self.product.rows(given.a, given.b) == 1
        lost = depth if vector else max(depth / LOSSY, min(depth, RUN))
        kappas = self.units.kappa, min(self.units.kappa, depth / max(lost, 1))
        usual, lossy = (Units(1.0, 0.0, 0.0, 0.0, kappa).relative(depth, width) for kappa in kappas)
        return usual / lossy


class Deterministic(Scheme):
    """The scheme `deterministic`: componentwise bounds that no rounding errors can exceed."""

    @property
    def _gamma(self) -> float:
        terms = self.depth + self.width
        # Errors of truncated sums are up to twice as large; the terms themselves are rounded.
        unit = self.units.sum if math.isinf(self.units.kappa) else 2 * self.units.sum
        return terms * unit / (1 - min(terms * unit, 0.5))

    def expect(self, given: Operands, tier: int) -> Expected:
        a, b, units, product = given.a, given.b, self.units, self.product
        sums = self.should_be(given)
        weights = jnp.abs(signed_weights(self.width, b.dtype))
        terms = product.apply(jnp.abs(a), product.fold(jnp.abs(b), weights, 1))
        bound = (2 * self._gamma * (1 + self._gamma) + 2 * units.inputs * (1 + units.inputs)) * terms
        # Subnormal numbers are flushed, in factors and in terms.
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
    """The scheme of the study, `paper`."""

    def expect(self, given: Operands, tier: int) -> Expected:
        sums = self.should_be(given)
        bound = self.depth * self.epsilon * self.product.norms(given.a, given.b)
        # A product of zeros has the bound 0, by which nothing may be divided.
        bound = jnp.where(bound == 0, float(jnp.finfo(bound.dtype).tiny), bound)
        return Expected(sums, bound[..., None])

    def margin(self, given: Operands, expected: Expected) -> Float[Array, "*rows"]:
        return self.ratio(given, expected, expected.bound)


def make_scheme(product: Product, settings: Settings, given: Operands) -> Scheme:
    """Creates the scheme that the settings specify for a product of these operands."""
    units = Units.of(given.a.dtype, given.b.dtype, given.c.dtype, settings.rounding, exact=product.exact)
    return kind_of(settings.scheme)(product, settings, given, units)


def kind_of(scheme: SchemeName) -> type[Scheme]:
    """Returns the class of a scheme."""
    kinds: dict[str, type[Scheme]] = {"deterministic": Deterministic, "paper": Paper}
    return kinds.get(scheme, Probabilistic)
