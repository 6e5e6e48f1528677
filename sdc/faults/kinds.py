"""Kinds of faults: how struck elements change, as data.

Every kind produces a `Change`: arithmetic, bit masks and a rotation, given as arrays; `apply` applies a change to
elements. Because a change is data, one compiled program can serve every fault of a campaign (`strike`). Each kind is
defined by its changes; `inject`, which simulates faults at a given rate, and campaigns both use this definition.

The table at the beginning of docs/faults.md lists measurements on real hardware, each with its source and the kind that
models it.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from sdc._lazy import jax, jnp, lax, np
from sdc.bits import as_bits, from_bits, select
from sdc.text import Form, form, write_term

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Array, Float32, Int, Int32, PRNGKeyArray, Shaped, UInt32

Field: TypeAlias = Literal["sign", "exponent", "mantissa"]
FIELDS: tuple[Field, ...] = get_args(Field)


class Change(NamedTuple):
    """A change to elements; its fields are broadcast to the shape of the elements.

    First, elements are rotated: in a group of n elements struck together, element k takes the value of element
    (k + turn) mod n. Then y = x * factor + addend is computed in float32 and rounded to the type of x. Finally, the
    bits of y become ((bits & keep) | set) ^ flip. Bits are given as two 32-bit words, the lower one first.
    """

    factor: Float32[ArrayLike, "*n"]
    addend: Float32[ArrayLike, "*n"]
    keep: UInt32[ArrayLike, "*n 2"]
    set: UInt32[ArrayLike, "*n 2"]
    flip: UInt32[ArrayLike, "*n 2"]
    turn: Int32[ArrayLike, ""]


def neutral() -> Change:
    """Returns the change that leaves every bit unchanged."""
    none, full = np.zeros(2, np.uint32), np.full(2, 2**32 - 1, np.uint32)
    return Change(np.float32(1), np.float32(0), full, none, none, np.int32(0))


def apply(
    x: Shaped[Array, "*groups n"], change: Change, *, count: Int[Array, "*#groups"] | int | None = None
) -> Shaped[Array, "*groups n"]:
    """Applies a change to groups of elements along the last axis; only the first `count` of each group are valid."""
    room = x.shape[-1]
    if room > 1:
        count = jnp.maximum(jnp.asarray(room if count is None else count, jnp.int32), 1)
        order = (jnp.arange(room, dtype=jnp.int32) + jnp.asarray(change.turn)) % count[..., None]
        x = from_bits(jnp.take_along_axis(as_bits(x), jnp.broadcast_to(order, x.shape), axis=-1), x)
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    factor, addend = (jnp.asarray(part, wide.dtype) for part in (change.factor, change.addend))
    computed = rounded(wide * factor + addend, x)
    bits = as_bits(select((factor != 1) | (addend != 0), computed, x))
    keep, fixed, flip = (_mask(words, bits.dtype) for words in (change.keep, change.set, change.flip))
    return from_bits(((bits & keep) | fixed) ^ flip, x)


def rounded(wide: Shaped[Array, "*n"], like: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
    """Converts numbers to the dtype of `like`, rounding to the nearest integer for integer types."""
    return (jnp.round(wide) if jnp.issubdtype(like.dtype, jnp.integer) else wide).astype(like.dtype)


def _mask(given: UInt32[ArrayLike, "*n 2"], dtype: Any) -> Shaped[Array, "*n"]:
    words = jnp.asarray(given)
    low = words[..., 0].astype(dtype)
    if np.dtype(dtype).itemsize <= 4:
        return low
    return low | (words[..., 1].astype(dtype) << np.dtype(dtype).type(32))


def field_bits(dtype: Any, field: Field | None = None) -> tuple[int, ...]:
    """Returns the bit positions in a field, or in the whole number for None, where 0 is the least significant bit."""
    width = jax.dtypes.itemsize_bits(jnp.dtype(dtype))
    if field is None:
        return tuple(range(width))
    if jnp.issubdtype(dtype, jnp.floating):
        mantissa = jnp.finfo(dtype).nmant
        exponent = jnp.finfo(dtype).nexp
        sign = (mantissa + exponent,) if mantissa + exponent < width else ()
        fields = {"sign": sign, "exponent": range(mantissa, mantissa + exponent), "mantissa": range(mantissa)}
    elif jnp.issubdtype(dtype, jnp.signedinteger):
        fields = {"sign": (width - 1,), "mantissa": range(width - 1)}
    else:
        fields = {"mantissa": range(width)}
    if not fields.get(field):
        others = " or ".join(name for name, positions in fields.items() if positions)
        raise ValueError(f"{jnp.dtype(dtype).name} has no {field}; choose {others}, or give bit positions")
    return tuple(fields[field])


def field_of(dtype: Any, bit: int) -> Field | None:
    for field in FIELDS:
        with contextlib.suppress(ValueError):  # not every type has every field
            if bit in field_bits(dtype, field):
                return field
    return None


def two_words(bits: int) -> tuple[int, int]:
    """Splits 64 bits into two 32-bit words, the lower one first."""
    return bits & 0xFFFFFFFF, bits >> 32


def held_bits(value: float, dtype: Any) -> int:
    """Returns the bits of a value rounded to a dtype; raises ValueError if the dtype cannot represent the value."""
    name = jnp.dtype(dtype).name
    with np.errstate(all="ignore"):
        if jnp.issubdtype(dtype, jnp.floating):
            held = np.float64(value).astype(dtype)
            known, wanted = float(held), float(value)
            fits = math.isnan(known) == math.isnan(wanted) and math.isinf(known) == math.isinf(wanted)
        else:
            info = jnp.iinfo(dtype)
            fits = math.isfinite(value) and value == int(value) and info.min <= value <= info.max
            held = np.asarray(int(value) if fits else 0, dtype)
    if not fits:
        raise ValueError(f"{name} cannot hold {value:g}; choose another number, or stuck(value=nan) for NaN")
    return int(held.view(f"u{held.dtype.itemsize}"))


def by_layer(value: float | tuple[float, ...], layer: Int[Array, ""]) -> Float32[Array, ""]:
    """Returns the value for a layer: its entry (0 beyond the last entry), or the only entry if there is just one."""
    values = jnp.atleast_1d(jnp.asarray(value, jnp.float32))
    if values.size == 1:
        return values[0]
    return values.at[layer].get(mode="fill", fill_value=0.0)


@dataclasses.dataclass(frozen=True, repr=False)
class FaultKind(abc.ABC):
    """Base class of all kinds of faults: draws changes and applies them. Its `repr` is the kind's text (`as_fault`)."""

    draws: ClassVar[bool] = False  # whether the kind draws a number for each step and layer

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides __call__; override change or settled, from which changes are made"
            )

    def __repr__(self) -> str:
        return write_term(self, KINDS)

    @abc.abstractmethod
    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        """Draws the changes of elements with the given shape and dtype."""

    def draw(self, key: PRNGKeyArray) -> Float32[ArrayLike, ""]:
        """Draws the number u for a step and a layer, shared by all elements struck in that step and layer."""
        return np.float32(1)

    def on(self, u: Float32[ArrayLike, ""], layer: Int[Array, ""]) -> FaultKind:
        """Returns the kind that applies in a step and layer in which u was drawn."""
        return self

    def share(self, u: Float32[ArrayLike, ""]) -> Float32[ArrayLike, ""]:
        """Returns the factor on the rate for the draw u; the mean of this factor over u is 1."""
        return np.float32(1)

    def largest_share(self) -> float:
        """Returns the largest value of `share`."""
        return 1.0

    def __call__(
        self,
        key: PRNGKeyArray,
        x: Shaped[Array, "*groups n"],
        layer: Int[Array, ""],
        count: Int[Array, "*#groups"] | None = None,
    ) -> Shaped[Array, "*groups n"]:
        """Returns the elements after the fault; for `count` see `apply`."""
        return self.changed(x, self.change(key, x.shape, x.dtype, layer), count)

    def changed(
        self, x: Shaped[Array, "*groups n"], change: Change, count: Int[Array, "*#groups"] | None = None
    ) -> Shaped[Array, "*groups n"]:
        """Returns the elements after a change that `change` drew for their shape; for `count` see `apply`."""
        return self.settled(x, change, apply(x, change, count=count))

    def settled(self, x: Shaped[Array, "*n"], change: Change, changed: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
        """Returns the changed elements; kinds whose change depends on the numbers themselves override this method."""
        return changed


SMALLEST = 2.0**-24  # lower limit of draws, so that no severity is infinite


def _choices(dtype: Any, bits: tuple[int, ...], field: Field | None) -> tuple[int, ...]:
    """Returns the positions of the bits from which a fault draws."""
    of_field = field_bits(dtype, field)
    width = len(field_bits(dtype))
    if bits and max(bits) >= width:
        raise ValueError(
            f"bit {max(bits)} of a {width}-bit {jnp.dtype(dtype).name} does not exist; give positions below {width}"
        )
    return bits or of_field


def _check_bits(bits: tuple[int, ...], field: Field | None) -> None:
    if field is not None and field not in FIELDS:
        raise ValueError(f"field={field!r}: expected {', '.join(FIELDS)}")
    if bits and field is not None:
        raise ValueError(f"bits={bits} and field={field!r} both select bits; give only one of them")
    if not isinstance(bits, Sequence):
        raise ValueError(f"bits={bits}: expected a sequence of bit positions, as in (30,)")
    if any(bit < 0 for bit in bits) or len(set(bits)) < len(bits):
        raise ValueError(f"bits={bits}: expected distinct bit positions of at least 0")


def _words(bit: Int[Array, "*n"]) -> UInt32[Array, "*n 2"]:
    shift = bit.astype(jnp.uint32)
    one = jnp.uint32(1)
    low = jnp.where(shift < 32, one << (shift & 31), 0)
    high = jnp.where(shift < 32, 0, one << (shift & 31))
    return jnp.stack([low, high], axis=-1).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True, repr=False)
class BitFlip(FaultKind):
    """Inverts bits of the element.

    A single inverted bit is the classical model of a particle strike. On a data-center GPU with stuck-at faults in its
    gates, fewer than 40 % of the events with flipped bits had a single flip (arXiv:2605.04213). Therefore, also test
    with a `count` of 2 or more, or with `Mixed`.

    Attributes:
        bits: positions of the bits to draw from, where 0 is the least significant; all bits of the type if empty.
        field: the field to draw bits from, as an alternative to `bits`.
        count: number of distinct bits to invert in the element.
    """

    bits: tuple[int, ...] = ()
    field: Field | None = None
    count: int = 1

    def __post_init__(self) -> None:
        _check_bits(self.bits, self.field)
        if self.count < 1:
            raise ValueError(f"count={self.count}: expected at least one bit")

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        choices = _choices(dtype, self.bits, self.field)
        if self.count > len(choices):
            raise ValueError(
                f"count={self.count}, but there are only {len(choices)} bits to draw from; choose a smaller count"
            )
        if self.count == 1:
            return neutral()._replace(flip=_words(jax.random.choice(key, jnp.asarray(choices, jnp.int32), shape)))
        # The bits with the smallest of independent draws form a uniform choice without replacement.
        order = jnp.argsort(jax.random.uniform(key, (*shape, len(choices))), axis=-1)[..., : self.count]
        words = _words(jnp.asarray(choices, jnp.int32)[order])
        return neutral()._replace(flip=lax.reduce(words, jnp.uint32(0), lax.bitwise_or, (words.ndim - 2,)))


@dataclasses.dataclass(frozen=True, repr=False)
class StuckBit(FaultKind):
    """Sets one bit of the element to 0 or to 1, as a permanent fault in a latch or on a line does.

    Memory errors in the field are dominated by hard errors, which recur at the same place (Schroeder, Pinheiro and
    Weber, *DRAM Errors in the Wild*, SIGMETRICS 2009).

    Attributes:
        value: 0 or 1.
        bits, field: see `BitFlip`.
    """

    value: int
    bits: tuple[int, ...] = ()
    field: Field | None = None

    def __post_init__(self) -> None:
        _check_bits(self.bits, self.field)
        if self.value not in (0, 1):
            raise ValueError(f"value={self.value}: expected 0 or 1, the value at which the bit is stuck")

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        choices = jnp.asarray(_choices(dtype, self.bits, self.field), jnp.int32)
        mask = _words(jax.random.choice(key, choices, shape))
        return neutral()._replace(set=mask) if self.value else neutral()._replace(keep=~mask)


@dataclasses.dataclass(frozen=True, repr=False)
class Sign(FaultKind):
    """Inverts the sign bit of the element; this is the only `BitFlip` that no bound on magnitudes can detect."""

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return BitFlip(field="sign").change(key, (), dtype, layer)


@dataclasses.dataclass(frozen=True, repr=False)
class Scale(FaultKind):
    """Multiplies the element by a factor.

    Errors with a large factor ruin training through the optimizer's history (He et al., *Understanding and Mitigating
    Hardware Failures in Deep Learning Training Systems*, ISCA 2023). A factor that is a power of two models an error in
    the exponent.
    """

    factor: float

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return neutral()._replace(factor=jnp.float32(self.factor))


@dataclasses.dataclass(frozen=True, repr=False)
class Add(FaultKind):
    """Adds a number to the element, as one wrong term of a sum does."""

    value: float

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return neutral()._replace(addend=jnp.float32(self.value))


@dataclasses.dataclass(frozen=True, repr=False)
class Relative(FaultKind):
    """Changes the element x to x (1 + s u severity), where s is a random sign and u is uniform in (0, 1].

    If rounding would undo the change, the last bit changes instead, so a struck element always differs. Zeros, NaNs and
    infinities are unchanged. (`change` alone handles neither case.) Ma et al. (arXiv:2502.12340) measured severity, the
    mean relative size of an error, on unhealthy nodes.

    Attributes:
        severity: the largest relative change; one number, or one per layer.

    Raises:
        ValueError: a severity is negative, infinite or NaN.
    """

    severity: float | tuple[float, ...]

    def __post_init__(self) -> None:
        if isinstance(self.severity, float | int | tuple) and not all(
            0 <= x < np.inf for x in np.atleast_1d(self.severity)
        ):
            raise ValueError(
                f"severity={self.severity}: expected a relative change of at least 0, or one for each layer"
            )

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        size, sign = jax.random.split(key)
        u = 1.0 - jax.random.uniform(size, shape)
        severity = by_layer(self.severity, layer)
        change = jnp.where(jax.random.bernoulli(sign, shape=shape), 1.0, -1.0) * u * severity
        return neutral()._replace(factor=(1.0 + change).astype(jnp.float32))

    def settled(self, x: Shaped[Array, "*n"], change: Change, changed: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
        neighbour = from_bits(as_bits(x) ^ jnp.ones((), as_bits(x).dtype), x)
        changed = select(as_bits(changed) == as_bits(x), neighbour, changed)
        finite = jnp.isfinite(x) if jnp.issubdtype(x.dtype, jnp.floating) else True
        return select((x == 0) | ~jnp.asarray(finite), x, changed)


@dataclasses.dataclass(frozen=True, repr=False)
class Tailed(Relative):
    """`Relative` with a severity drawn for each step and layer from a heavy-tailed distribution.

    For each step and layer, a number u is drawn uniformly from (0, 1) and shared by all elements, microsteps and
    devices:

    - The mean relative change is V = severity u^-tail, which has a Pareto tail of index 1/tail and the minimum
      `severity`. Changes of single elements are uniform in (0, 2 V], but at least one unit in the last place.
    - The rate is multiplied by (1 + few) u^few, whose mean is 1: the more severe a step, the fewer struck elements.

    The simulated nodes use this kind (`sdc.nodes.node_faults`); docs/faults.md describes the fit of `tail` and `few`.
    For a fault that strikes once (`strike_on`), u is drawn for that strike.

    Attributes:
        severity: the minimum of a step's mean relative change; one number, or one per layer.
        tail: inverse of the tail's index; 0 for a constant severity.
        few: how strongly the rate falls in severe steps; 0 for a constant rate.

    Raises:
        ValueError: a severity, `tail` or `few` is negative, infinite or NaN.

    Example:
        >>> from sdc.faults import Tailed
        >>> kind = Tailed(severity=0.5, tail=1.0, few=2.0)
        >>> float(kind.level(0.1)), round(float(kind.share(0.1)), 3)
        (5.0, 0.03)
    """

    draws: ClassVar[bool] = True
    tail: float = 0.0
    few: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("tail", self.tail), ("few", self.few)):
            if not 0 <= value < np.inf:
                raise ValueError(f"{name}={value}: expected a finite number of at least 0")

    def level(self, u: Float32[ArrayLike, ""] | float, layer: Any = 0) -> Float32[Array, ""]:
        """Returns the mean relative change in a step and layer with the draw u."""
        return by_layer(self.severity, layer) * u**-self.tail

    def share(self, u: Float32[ArrayLike, ""] | float) -> Any:
        return (1 + self.few) * u**self.few

    def largest_share(self) -> float:
        return 1 + self.few

    def draw(self, key: PRNGKeyArray) -> Float32[Array, ""]:
        return jax.random.uniform(key, minval=SMALLEST)

    def on(self, u: Float32[ArrayLike, ""], layer: Int[Array, ""]) -> Relative:
        return Relative(2 * self.level(u, layer))  # type: ignore[arg-type] # a traced number

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        own, elements = jax.random.split(key)
        return self.on(self.draw(own), layer).change(elements, shape, dtype, layer)


@dataclasses.dataclass(frozen=True, repr=False)
class Gaussian(FaultKind):
    """Adds noise from N(0, sigma^2) to the element: a control for how much training tolerates, not a measured fault."""

    sigma: float

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return neutral()._replace(addend=self.sigma * jax.random.normal(key, shape))


@dataclasses.dataclass(frozen=True, repr=False)
class Stuck(FaultKind):
    """Replaces the element with a given value: zero, a stuck number, NaN or an infinity.

    A value that the type cannot represent is an error: integers have neither NaN nor infinities, and some 8-bit floats
    have no infinities or no zero. NaN and infinities make up 1.01 % of the corrupted outcomes on a data-center GPU
    (arXiv:2605.04213). A defective core returned 0 when it computed a power of 1.1 (Dixit et al., *Silent Data
    Corruptions at Scale*, arXiv:2102.11245).
    """

    value: float

    def __eq__(self, other: object) -> bool:  # NaN equals NaN
        return type(other) is Stuck and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        words = np.asarray(two_words(held_bits(self.value, dtype)), np.uint32)
        return neutral()._replace(keep=np.zeros(2, np.uint32), set=words)


@dataclasses.dataclass(frozen=True, repr=False)
class Mixed(FaultKind):
    """Changes the element in one of several ways: to zero, to NaN or an infinity, or by inverting some of its bits.

    Tung et al. (arXiv:2605.04213) distinguish these outcomes. Bits are drawn with probabilities that fall linearly from
    the lowest to the highest. A flip keeps a finite number finite: if inverting the drawn bits would give NaN or an
    infinity, the bits one position lower are inverted instead (the lowest position wraps around to the sign). The
    method `change`, which does not see the number, returns the flip as drawn.

    Attributes:
        zero: share of the elements that become zero.
        special: share of the elements that become NaN or an infinity; all of these values that the type has are equally
            likely.
        flips: among the other elements, the share with one inverted bit, the share with two, and so on.
    """

    zero: float = 0.0
    special: float = 0.0
    flips: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, share in (
            ("zero", self.zero),
            ("special", self.special),
            ("zero + special", self.zero + self.special),
        ):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}={share:g}: expected a share of the elements, between 0 and 1")
        if not isinstance(self.flips, Sequence) or not self.flips or not all(0 <= share <= 1 for share in self.flips):
            raise ValueError(
                f"flips={self.flips}: expected the shares of one, two, ... inverted bits, as in (0.4, 0.6)"
            )
        if abs(sum(self.flips) - 1) > 1e-6:  # tolerance for decimal fractions
            raise ValueError(f"flips={self.flips}: these shares sum to {sum(self.flips):g}; they must sum to 1")

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        width, most = len(field_bits(dtype)), len(self.flips)
        room = len(field_bits(dtype, "exponent")) - 1 if jnp.issubdtype(dtype, jnp.floating) else width
        if most > room:  # otherwise, the whole exponent could be inverted, and no lower position would stay finite
            raise ValueError(
                f"flips={self.flips}: {most} shares, but {jnp.dtype(dtype).name} allows at most {room} inverted bits; "
                "give fewer shares"
            )
        outcome, which, number, place = jax.random.split(key, 4)
        u = jax.random.uniform(outcome, shape, jnp.float32)
        zeroed, special = u < self.zero, (u >= self.zero) & (u < self.zero + self.special)
        values = np.asarray([two_words(bits) for bits in self._special(dtype)] or [(0, 0)], np.uint32)
        value = jnp.asarray(values)[jax.random.randint(which, shape, 0, len(values))]
        # With Gumbel noise added to the log weights, the largest ones are draws without replacement.
        weights = jnp.arange(width, 0, -1, dtype=jnp.float32)
        noise = jax.random.gumbel(place, (*shape, width), jnp.float32)
        order = jnp.argsort(-(noise + jnp.log(weights)), axis=-1)[..., :most]
        steps = jnp.asarray(np.cumsum(self.flips)[:-1], jnp.float32)
        several = jax.random.uniform(number, shape, jnp.float32)[..., None]
        count = 1 + jnp.sum(several >= steps, axis=-1)
        words = jnp.where((jnp.arange(most) < count[..., None])[..., None], _words(order), jnp.uint32(0))
        flip = lax.reduce(words, jnp.uint32(0), lax.bitwise_or, (words.ndim - 2,))
        zeroed, special = zeroed[..., None], special[..., None]
        held = np.asarray(two_words(held_bits(0.0, dtype) if self.zero else 0), np.uint32)
        clean, none = neutral(), np.zeros(2, np.uint32)
        return clean._replace(
            keep=jnp.where(zeroed | special, none, clean.keep),
            set=jnp.where(special, value, jnp.where(zeroed, held, none)),
            flip=jnp.where(zeroed | special, none, flip),
        )

    def settled(self, x: Shaped[Array, "*n"], change: Change, changed: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return changed
        bits = as_bits(x)
        flips, one = as_bits(changed) ^ bits, jnp.ones((), bits.dtype)
        below = (flips >> one) | (flips << (one * (8 * bits.dtype.itemsize - 1)))
        # One position lower is finite: only inverting exactly the same exponent bits makes all exponent bits one again.
        flipped = jnp.asarray(change.keep)[..., 0] != 0
        return select(flipped & jnp.isfinite(x) & ~jnp.isfinite(changed), from_bits(bits ^ below, x), changed)

    def _special(self, dtype: Any) -> list[int]:
        """Returns the bits of NaN and of both infinities, omitting those that the type does not have."""
        found = []
        for value in (math.nan, math.inf, -math.inf) if self.special else ():
            try:
                found.append(held_bits(value, dtype))
            except ValueError:
                continue
        if self.special and not found:
            raise ValueError(
                f"special={self.special:g}: {jnp.dtype(dtype).name} has neither NaN nor an infinity; omit special"
            )
        return found


@dataclasses.dataclass(frozen=True, repr=False)
class Extreme(FaultKind):
    """Changes the element in one of three ways: to nearly zero, to a large number of the opposite sign, or to infinity.

    A matrix product that ran 920,000 times on a defective production GPU was wrong three times, in these three ways
    (Lei et al., *Safeguarding LLM Training at Scale*, OSDI 2026, section 7); the sizes are not published. The three are
    therefore equally likely by default: with one of three events, a share is between 0.8 and 91 % (Clopper and Pearson,
    95 %).

    Attributes:
        zero: share of the elements that are divided by `factor`.
        flipped: share of the elements that are multiplied by -`factor`; the others become infinite.
        factor: how much smaller or larger an element becomes; at most the root of the type's largest number.
    """

    zero: float = 1 / 3
    flipped: float = 1 / 3
    factor: float = 2.0**20

    def __post_init__(self) -> None:
        if not (0 <= self.zero <= 1 and 0 <= self.flipped <= 1 and self.zero + self.flipped <= 1 + 1e-6):
            raise ValueError(f"zero={self.zero:g}, flipped={self.flipped:g}: expected shares that sum to at most 1")
        if not 1 < self.factor < math.inf:
            raise ValueError(f"factor={self.factor:g}: expected a finite number above 1")

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        u = jax.random.uniform(key, shape, jnp.float32)
        infinite = (u >= self.zero + self.flipped)[..., None]
        last = self.zero + self.flipped < 1 - 1e-6
        if last and not (jnp.issubdtype(dtype, jnp.floating) and np.isinf(np.asarray(np.inf).astype(dtype))):
            raise ValueError(
                f"{jnp.dtype(dtype).name} has no infinity; give extreme shares zero and flipped that sum to 1"
            )
        held = np.asarray(two_words(held_bits(math.inf, dtype) if last else 0), np.uint32)
        clean, none = neutral(), np.zeros(2, np.uint32)
        info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
        by = min(self.factor, math.sqrt(float(info.max)))
        return clean._replace(
            factor=jnp.where(u < self.zero, 1 / by, jnp.where(infinite[..., 0] & last, 1, -by)),
            keep=jnp.where(infinite & last, none, clean.keep),
            set=jnp.where(infinite & last, held, none),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Banded(FaultKind):
    """A kind that changes only elements whose magnitude lies in a band; a `Fault` with a `band` makes it.

    On some defective GPUs, a multiplication is wrong only for some ranges of its operands (Lei et al., OSDI 2026,
    figure 2b; Zheng et al., OSDI 2026, figure 7).

    Attributes:
        what: the kind.
        band: the smallest and the largest magnitude.
    """

    what: FaultKind
    band: tuple[float, float]

    @property
    def draws(self) -> bool:  # type: ignore[override] # a class variable of the base class
        return self.what.draws

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return self.what.change(key, shape, dtype, layer)

    def draw(self, key: PRNGKeyArray) -> Float32[ArrayLike, ""]:
        return self.what.draw(key)

    def on(self, u: Float32[ArrayLike, ""], layer: Int[Array, ""]) -> FaultKind:
        return Banded(self.what.on(u, layer), self.band)

    def share(self, u: Float32[ArrayLike, ""]) -> Float32[ArrayLike, ""]:
        return self.what.share(u)

    def largest_share(self) -> float:
        return self.what.largest_share()

    def settled(self, x: Shaped[Array, "*n"], change: Change, changed: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
        size = jnp.abs(x if x.dtype == jnp.float64 else x.astype(jnp.float32))
        inside = (size >= self.band[0]) & (size <= self.band[1])
        return select(inside, self.what.settled(x, change, changed), x)


@dataclasses.dataclass(frozen=True, repr=False)
class Rotate(FaultKind):
    """Rotates the values of elements that are struck together, which simulates wrong addresses.

    With two elements (`Run(2)`), a rotation is a swap. No published study states how frequent this fault is. Sums and
    XORs cannot detect a rotation, which is therefore a good test of other checks.

    Attributes:
        by: offset of the rotation; element k takes the value of element k + by.
    """

    by: int = 1

    def __post_init__(self) -> None:
        if not self.by:
            raise ValueError("by=0: elements would stay in place; expected a nonzero integer")

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return neutral()._replace(turn=jnp.int32(self.by))


# The forms of all kinds, keyed by their names in texts.
KINDS: Mapping[str, Form] = {
    "bitflip": form(BitFlip), "stuck0": form(StuckBit, value=0), "stuck1": form(StuckBit, value=1), "sign": form(Sign),
    "scale": form(Scale), "add": form(Add), "relative": form(Relative), "tailed": form(Tailed),
    "gaussian": form(Gaussian),
    "zero": form(Stuck, value=0.0), "nan": form(Stuck, value=math.nan), "inf": form(Stuck, value=math.inf),
    "stuck": form(Stuck), "mixed": form(Mixed), "extreme": form(Extreme), "swap": form(Rotate, by=1),
    "rotate": form(Rotate),
}  # fmt: skip
