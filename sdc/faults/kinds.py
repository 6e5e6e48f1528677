"""Kinds of faults: what becomes of the elements that are hit, as data.

Every kind makes a `Change`: arithmetic, bit masks and a rotation, given as arrays. `apply` carries it out. Because a
change is data, one compiled program can serve every fault of a campaign (`strike`); and because every kind is defined
by the changes that it makes, simulated faults of a given rate (`inject`) and campaigns share one definition.

The table at the beginning of docs/faults.md says what was measured of real hardware, by whom, and which kind stands for
it.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sdc._lazy import jax, jnp, lax
from sdc.bits import as_bits, from_bits, select
from sdc.text import Form, form, write_term

from .changes import FIELDS, Change, Field, apply, by_layer, field_bits, neutral

if TYPE_CHECKING:
    from jaxtyping import Array, Int, PRNGKeyArray, Shaped, UInt32


def _choices(dtype: Any, bits: tuple[int, ...], field: Field | None) -> tuple[int, ...]:
    """The bits that a fault draws from."""
    of_field = field_bits(dtype, field)
    width = len(field_bits(dtype))
    if bits and max(bits) >= width:
        raise ValueError(
            f"bit {max(bits)} of a {width}-bit {jnp.dtype(dtype).name} does not exist; give bits below {width}"
        )
    return bits or of_field


def _check_bits(bits: tuple[int, ...], field: Field | None) -> None:
    if field is not None and field not in FIELDS:
        raise ValueError(f"field={field!r}: expected {', '.join(FIELDS)}")
    if bits and field is not None:
        raise ValueError(f"bits={bits} and field={field!r} both choose bits; give one of them")
    if not isinstance(bits, Sequence):
        raise ValueError(f"bits={bits}: expected numbers of bits, as in (30,)")
    if any(bit < 0 for bit in bits) or len(set(bits)) < len(bits):
        raise ValueError(f"bits={bits}: expected different bits from 0 on")


def _words(bit: Int[Array, "*n"]) -> UInt32[Array, "*n 2"]:
    """Masks with one bit each."""
    shift = bit.astype(jnp.uint32)
    one = jnp.uint32(1)
    low = jnp.where(shift < 32, one << (shift & 31), 0)
    high = jnp.where(shift < 32, 0, one << (shift & 31))
    return jnp.stack([low, high], axis=-1).astype(jnp.uint32)


class Kind(abc.ABC):
    """What every kind of fault can do: make changes, and carry them out. Its `str` is its text, see `parse_kind`."""

    def __str__(self) -> str:
        return write_term(self, KINDS)

    @abc.abstractmethod
    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        """Draws the changes of elements of a type.

        Args:
            key: decides what is drawn.
            shape: one change for each element, or `()` for one that all elements share.
            dtype: type of the elements.
            layer: index of the innermost loop.

        Raises:
            ValueError: elements of this type cannot be changed so.
        """

    def __call__(
        self,
        key: PRNGKeyArray,
        x: Shaped[Array, "*groups n"],
        layer: Int[Array, ""],
        count: Int[Array, "*#groups"] | None = None,
    ) -> Shaped[Array, "*groups n"]:
        """The elements after the fault; `count` as of `apply`."""
        return apply(x, self.change(key, x.shape, x.dtype, layer), count=count)


@dataclasses.dataclass(frozen=True)
class BitFlip(Kind):
    """Bits of the element are inverted.

    Single bits are the classical model of a particle strike. On a data-center GPU with stuck-at faults in its gates,
    fewer than 40 % of the events with flipped bits had a single one (arXiv:2605.04213): take `count=2` and more too.

    Attributes:
        bits: the bits to draw from, 0 being the least significant; all bits of the type where empty.
        field: draw from the bits of this field instead.
        count: how many different bits of the element are inverted.
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
            raise ValueError(f"count={self.count}, but there are only {len(choices)} bits to draw from")
        if self.count == 1:
            return neutral()._replace(flip=_words(jax.random.choice(key, jnp.asarray(choices, jnp.int32), shape)))
        # The bits with the largest of independent draws are a uniform choice without repetition.
        order = jnp.argsort(jax.random.uniform(key, (*shape, len(choices))), axis=-1)[..., : self.count]
        words = _words(jnp.asarray(choices, jnp.int32)[order])
        return neutral()._replace(flip=lax.reduce(words, jnp.uint32(0), lax.bitwise_or, (words.ndim - 2,)))


@dataclasses.dataclass(frozen=True)
class StuckBit(Kind):
    """One bit of the element always reads 0, or always 1: a permanent fault of a latch or a line.

    Memory errors in the field are dominated by hard errors, which come back at the same place (Schroeder, Pinheiro and
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
            raise ValueError(f"value={self.value}: a bit is stuck at 0 or at 1")

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        choices = jnp.asarray(_choices(dtype, self.bits, self.field), jnp.int32)
        mask = _words(jax.random.choice(key, choices, shape))
        return neutral()._replace(set=mask) if self.value else neutral()._replace(keep=~mask)


@dataclasses.dataclass(frozen=True)
class Sign(Kind):
    """The sign bit of the element is inverted: the part of `BitFlip` that no bound on magnitudes can see."""

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return BitFlip(field="sign").change(key, (), dtype, layer)


@dataclasses.dataclass(frozen=True)
class Scale(Kind):
    """The element is multiplied by a factor.

    With a large factor it is what ruins training by way of the optimizer's history (He et al., *Understanding and
    Mitigating Hardware Failures in Deep Learning Training Systems*, ISCA 2023); a power of two is an error of the
    exponent.
    """

    factor: float

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return neutral()._replace(factor=jnp.float32(self.factor))


@dataclasses.dataclass(frozen=True)
class Add(Kind):
    """A number is added to the element: what one wrong term does to a sum."""

    value: float

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return neutral()._replace(addend=jnp.float32(self.value))


@dataclasses.dataclass(frozen=True)
class Relative(Kind):
    """The element x becomes x (1 + s u) with a random sign s and u uniform in (0, 1] times `severity`.

    A change that rounding would undo becomes a change of the last bit, so that a hit element is always another number.
    Zeros, NaNs and infinities stay as they are. (The bare `change` does neither.) Severity, the mean relative size of
    an error, is what Ma et al. (arXiv:2502.12340) measured on unhealthy nodes.

    Attributes:
        severity: the largest relative change; one number, or one per layer.
    """

    severity: float | tuple[float, ...]

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        size, sign = jax.random.split(key)
        u = 1.0 - jax.random.uniform(size, shape)
        severity = by_layer(self.severity, layer)
        change = jnp.where(jax.random.bernoulli(sign, shape=shape), 1.0, -1.0) * u * severity
        return neutral()._replace(factor=(1.0 + change).astype(jnp.float32))

    def __call__(
        self,
        key: PRNGKeyArray,
        x: Shaped[Array, "*groups n"],
        layer: Int[Array, ""],
        count: Int[Array, "*#groups"] | None = None,
    ) -> Shaped[Array, "*groups n"]:
        changed = super().__call__(key, x, layer, count)
        neighbour = from_bits(as_bits(x) ^ jnp.ones((), as_bits(x).dtype), x)
        changed = select(as_bits(changed) == as_bits(x), neighbour, changed)
        finite = jnp.isfinite(x) if jnp.issubdtype(x.dtype, jnp.floating) else True
        return select((x == 0) | ~jnp.asarray(finite), x, changed)


@dataclasses.dataclass(frozen=True)
class Gaussian(Kind):
    """Noise from N(0, sigma^2) is added to the element: not a measured fault, but a control for what training bears."""

    sigma: float

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return neutral()._replace(addend=self.sigma * jax.random.normal(key, shape))


@dataclasses.dataclass(frozen=True)
class Stuck(Kind):
    """The element becomes a given value: zero, a stuck number, NaN or an infinity.

    A value that the type cannot hold is an error: integers know no NaN and no infinity, some 8-bit floats no infinity
    or no zero. Used as: NaN and infinity are 1.01 % of the corrupted outcomes of a data-center GPU (arXiv:2605.04213);
    a defective core returned 0 for a power of 1.1 (Dixit et al., *Silent Data Corruptions at Scale*, arXiv:2102.11245).
    """

    value: float

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        bits = _held(self.value, dtype)
        words = np.asarray([bits & 0xFFFFFFFF, bits >> 32], np.uint32)
        return neutral()._replace(keep=np.zeros(2, np.uint32), set=words)


def _held(value: float, dtype: Any) -> int:
    """The bits of a value in a type that can hold it, perhaps rounded."""
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
        raise ValueError(f"{name} holds no {value:g}; choose another number (nan is stuck,value=nan)")
    return int(held.view(f"u{held.dtype.itemsize}"))


@dataclasses.dataclass(frozen=True)
class Rotate(Kind):
    """Elements that are hit together take each other's values: wrong addresses rather than wrong numbers.

    Of two elements (`Run(2)`) it is a swap. No frequency is published; sums and XORs are blind to it, so that a check
    should be tried on it.

    Attributes:
        by: element k takes the value of element k + by.
    """

    by: int = 1

    def __post_init__(self) -> None:
        if not self.by:
            raise ValueError("by=0: elements would stay where they are; expected another number")

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        return neutral()._replace(turn=jnp.int32(self.by))


What: TypeAlias = BitFlip | StuckBit | Sign | Scale | Add | Relative | Gaussian | Stuck | Rotate

KINDS: Mapping[str, Form] = {
    "bitflip": form(BitFlip), "stuck0": form(StuckBit, value=0), "stuck1": form(StuckBit, value=1), "sign": form(Sign),
    "scale": form(Scale), "add": form(Add), "relative": form(Relative), "gaussian": form(Gaussian),
    "zero": form(Stuck, value=0.0), "nan": form(Stuck, value=math.nan), "inf": form(Stuck, value=math.inf),
    "stuck": form(Stuck), "swap": form(Rotate, by=1), "rotate": form(Rotate),
}  # fmt: skip
"""The text form of every kind."""
