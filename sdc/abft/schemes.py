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
               inputs' type as in their code; one verdict for the whole product
=============  =====================================================================================================

Where C was rounded to a narrower type, of unit u', bounds grow by 3.4 u' |C_i|_2 (u' sum_j |C_ij w_j| in
`deterministic`). Weights are ±(64 .. 127)/128 with a fixed seed: exact in bfloat16, and unlike ones they see errors
that cancel, and all but one in 128 swaps of two elements.
"""

import functools
import math
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .products import Product
from .roundoff import SIGMAS, Units

SchemeName: TypeAlias = Literal["two-tier", "blocks", "residual", "deterministic", "paper"]
LOSSY = 16.0
"""Kappa that rows which repeat themselves are judged by, where the device's is larger."""
BLOCK = 128
"""Columns of a block."""
SEED = 20_250_218


class Factors(NamedTuple):
    """A product and what is known of it.

    Attributes:
        a: first factor, in the type of the sums.
        b: second factor, likewise.
        c: the product, likewise.
        units: of its errors.
        carried: weighted sum of what rounding took from each row; None where nothing was rounded, or nothing carried.
        checksum: the folded second factor where the caller has it; None to compute it.
        totals: weighted sum and sum of squares of each row where they were computed with the product, else None.
    """

    a: Float[Array, "*a"]
    b: Float[Array, "*b"]
    c: Float[Array, "*c"]
    units: Units
    carried: Float[Array, "*rows"] | None = None
    checksum: Float[Array, "*folded"] | None = None
    totals: tuple[Float[Array, "*rows"], Float[Array, "*rows"]] | None = None


class Scheme(Protocol):
    """How rows are judged."""

    tiers: int
    """1, or 2 where `margin` has a second tier."""
    locates: bool
    """Whether it tells one row from another."""

    def blocks(self, width: int) -> int:
        """Number of blocks into which so many columns are cut."""

    def weights(self, width: int, dtype: Any) -> Float[Array, "n"]:
        """Weights of the columns, in a type."""

    def margin(self, product: Product, factors: Factors, tier: int) -> Float[Array, "*rows"]:
        """`|r| / bound` of each row."""

    def lenience(self, product: Product, a: Any, b: Any, kappa: float) -> float:
        """By how much smaller margins are if long sums lose terms as `LOSSY` says; 1 where bounds allow for it."""


@functools.cache
def _weights(width: int) -> Float[np.ndarray, "n"]:
    random = np.random.default_rng(SEED)
    return (random.choice([-1.0, 1.0], width) * random.integers(64, 128, width) / 128).astype(np.float32)


def signed_weights(width: int, dtype: Any = jnp.float32) -> Float[Array, "n"]:
    """Weights `±(64 .. 127)/128` of fixed seed.

    Example:
        >>> from sdc.abft.schemes import signed_weights
        >>> w = signed_weights(1000)
        >>> float(abs(w).min()) >= 0.5, float(abs(w).max()) < 1.0
        (True, True)
    """
    return jnp.asarray(_weights(width), dtype)


def checksum(
    scheme: Scheme, product: Product, b: Float[Array, "*b"], width: int, *, careful: bool = False
) -> Float[Array, "*folded blocks"]:
    """The folded second factor."""
    return product.fold(b, scheme.weights(width, b.dtype), scheme.blocks(width), careful=careful)


def differences(
    scheme: Scheme, product: Product, factors: Factors, *, careful: bool = False
) -> tuple[Float[Array, "*rows blocks"], Float[Array, "*rows blocks"]]:
    """The residual r and the sums cs that the rows should have; `careful`: summed in parts."""
    width = product.width(factors.a, factors.b)
    folded = factors.checksum
    if folded is None:
        folded = checksum(scheme, product, factors.b, width, careful=careful)
    should = product.apply(factors.a, folded, careful=careful)
    if factors.totals is None:
        weights = scheme.weights(width, factors.c.dtype)
        found = product.total(factors.c, weights, scheme.blocks(width), careful=careful)
    else:
        found = factors.totals[0][..., None]
    if factors.carried is not None:
        found += factors.carried[..., None]
    return found - should, should


def _ratio(residual: Float[Array, "*rows blocks"], bound: Float[Array, "*#rows #blocks"]) -> Float[Array, "*rows"]:
    """`|r| / bound`, infinite where either says nothing."""
    ratio = jnp.abs(residual) / bound
    return jnp.max(jnp.where(jnp.isfinite(bound) & ~jnp.isnan(ratio), ratio, jnp.inf), axis=-1, initial=0.0)


def _least(units: Units, depth: int, width: int, dtype: Any) -> float:
    """Absolute error of sums that are too small to be normal numbers, and of rounding them to the output's type."""
    flushed = depth * width * float(jnp.finfo(dtype).tiny)
    return flushed + SIGMAS * math.sqrt(width) * units.least


def _normalized(factors: Factors, least: float) -> tuple[Factors, Any]:
    """A product scaled by powers of two, exactly, so that its factors are 1 at most: their squares neither overflow nor
    vanish as a whole. What was computed from the factors before is left out."""

    def shrink(x: Float[Array, "*shape"]) -> Float[Array, ""]:
        largest = jnp.max(jnp.abs(x))
        exponent = jnp.where(jnp.isfinite(largest) & (largest > 0), jnp.frexp(largest)[1], 0)
        # One less than the largest exponents of the type, so that the power and its inverse are normal numbers.
        return jnp.ldexp(jnp.ones((), x.dtype), -jnp.clip(exponent, -125, 125))

    by_a, by_b = shrink(factors.a), shrink(factors.b)
    carried = None if factors.carried is None else factors.carried * by_a * by_b
    scaled = Factors(factors.a * by_a, factors.b * by_b, factors.c * by_a * by_b, factors.units, carried)
    # A product that vanishes altogether is as large as its rounding: any bound that large will do.
    return scaled, jnp.minimum(least * by_a * by_b, jnp.asarray(1e30, factors.c.dtype))


class Probabilistic:
    """`two-tier`, `blocks` and `residual`."""

    tiers, locates = 2, True

    def __init__(self, *, block: int | None = None) -> None:
        self._block = block

    def blocks(self, width: int) -> int:
        return 1 if self._block is None else max(1, -(-width // self._block))

    def weights(self, width: int, dtype: Any) -> Float[Array, "n"]:
        return signed_weights(width, dtype)

    def margin(self, product: Product, factors: Factors, tier: int) -> Float[Array, "*rows"]:
        depth, width = product.depth(factors.a, factors.b), product.width(factors.a, factors.b)
        least = _least(factors.units, depth, width, factors.c.dtype)
        if tier == 2:
            factors, least = _normalized(factors, least)
        residual, should = differences(self, product, factors, careful=tier == 2)
        units = factors.units
        relative = units.relative(depth, -(-width // self.blocks(width)))
        bound = relative * (self.scale(product, factors, tier) + jnp.abs(should)) + least
        if factors.carried is None:
            bound += SIGMAS * units.output * self.scale(product, factors, 1)
        return _ratio(residual, bound)

    def lenience(self, product: Product, a: Any, b: Any, kappa: float) -> float:
        depth, width = product.depth(a, b), product.width(a, b)
        width = -(-width // self.blocks(width))
        usual, lossy = (Units(1.0, 0.0, 0.0, 0.0, k).relative(depth, width) for k in (kappa, min(kappa, LOSSY)))
        return usual / lossy

    def scale(self, product: Product, factors: Factors, tier: int) -> Float[Array, "*rows blocks"]:
        """`|C_i|_2`, and in the second tier `q_i` where that is larger."""
        a, b, c = factors[:3]
        width = product.width(a, b)
        blocks, ones = self.blocks(width), jnp.ones(width, c.dtype)
        squares = product.total(c * c, ones, blocks) if factors.totals is None else factors.totals[1][..., None]
        if tier == 1:
            return jnp.sqrt(squares)
        folded = product.fold(b * b, ones, blocks)
        squares = jnp.maximum(squares, product.apply(a * a, folded))
        # The factors are 1 at most, but squares of what is smaller than the root of the smallest normal number vanish,
        # and with them the scale of rows that are tiny beside others, of which sharp attention is full.
        lost = 3 * math.sqrt(product.depth(a, b) * width)
        return jnp.sqrt(squares) + math.sqrt(float(jnp.finfo(c.dtype).tiny)) * lost


class Deterministic:
    """Componentwise bounds that no rounding can exceed."""

    tiers, locates = 1, True

    def lenience(self, product: Product, a: Any, b: Any, kappa: float) -> float:
        return 1.0

    def blocks(self, width: int) -> int:
        return 1

    def weights(self, width: int, dtype: Any) -> Float[Array, "n"]:
        return signed_weights(width, dtype)

    def margin(self, product: Product, factors: Factors, tier: int) -> Float[Array, "*rows"]:
        a, b, c, units = factors[:4]
        depth, width = product.depth(a, b), product.width(a, b)
        weights = jnp.abs(self.weights(width, c.dtype))
        residual, _ = differences(self, product, factors)
        terms = product.apply(jnp.abs(a), product.fold(jnp.abs(b), weights, 1))
        # Sums that truncate err by up to twice as much; the terms are themselves rounded.
        unit = units.sum if math.isinf(units.kappa) else 2 * units.sum
        gamma = (depth + width) * unit / (1 - min((depth + width) * unit, 0.5))
        bound = (2 * gamma * (1 + gamma) + 2 * units.inputs * (1 + units.inputs)) * terms
        bound += units.output * (1 + gamma) * product.total(jnp.abs(c), weights, 1)
        # What is below the normal numbers is flushed, in a factor or in a term.
        flushed = depth * width + product.apply(jnp.abs(a), product.fold(jnp.ones_like(b), weights, 1))
        flushed += product.apply(jnp.ones_like(a), product.fold(jnp.abs(b), weights, 1))
        bound += flushed * float(jnp.finfo(c.dtype).tiny) + width * units.least
        return _ratio(residual, bound)


class Paper:
    """The study's scheme."""

    tiers, locates = 1, False

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def lenience(self, product: Product, a: Any, b: Any, kappa: float) -> float:
        return 1.0

    def blocks(self, width: int) -> int:
        return 1

    def weights(self, width: int, dtype: Any) -> Float[Array, "n"]:
        return jnp.ones(width, dtype)

    def margin(self, product: Product, factors: Factors, tier: int) -> Float[Array, "*rows"]:
        a, b = factors[:2]
        residual, _ = differences(self, product, factors)
        bound = product.depth(a, b) * self._epsilon * product.norms(a, b)
        # A product of zeros has the bound zero, which it keeps.
        bound = jnp.where(bound == 0, float(jnp.finfo(bound.dtype).tiny), bound)
        return _ratio(residual, bound[..., None])


def make_scheme(name: str, a: Any, b: Any) -> Scheme:
    """The scheme of that name for factors of these types.

    Raises:
        ValueError: there is none.
    """
    if name in ("two-tier", "residual"):
        return Probabilistic()
    if name == "blocks":
        return Probabilistic(block=BLOCK)
    if name == "deterministic":
        return Deterministic()
    if name == "paper":
        return Paper(max(float(jnp.finfo(dtype).eps) for dtype in (a, b)))
    raise ValueError(f"scheme={name!r} is unknown; expected one of {', '.join(get_args(SchemeName))}")
