"""Fault models: what happens to an element, where, and when.

A fault is data about a simulation: `what` a hit does to an element, `rate` how often an element is hit, `site` and `at`
where, `when` how the rate changes in time. `sdc.inject` brings faults into a step. Nothing here is random: draws come
from the key that is given to the injected step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, PRNGKeyArray

from .changes import (
    FIELDS,
    Add,
    BitFlip,
    Gaussian,
    Relative,
    Rotate,
    Scale,
    Sign,
    Stuck,
    StuckBit,
    What,
    by_layer,
)
from .patterns import One, Pattern, Row, Run, Stride, Tile, Whole
from .sites import Selector, parse_selector

__all__ = [
    "Add", "BitFlip", "Fault", "Gaussian", "One", "Pattern", "Relative", "Rotate", "Row", "Run", "Scale", "Sign",
    "Stride", "Stuck", "StuckBit", "Tile", "What", "When", "Whole", "by_layer", "describe", "parse_fault", "parse_kind",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class When:
    """How a fault's rate changes with the step.

    Attributes:
        onset: the first step with the fault.
        spike: probability that a step is hit at all; a step that is hit has the rate divided by `spike`, so that the
            mean over time stays. 1 for a steady rate.
        burst: at the onset the rate is higher by this multiple; the excess decays as exp(-(step - onset) / decay).
        decay: in steps.
        end: the first step without the fault; None if it stays.
        gamma: shape of a gamma distribution of mean 1 from which a factor on the rate is drawn at each step, the same
            for all sites: the smaller, the more the hits come in bursts. Draws are cut off where a larger one has a
            probability below 1e-12. None for a steady rate.
    """

    onset: int = 0
    spike: float = 1.0
    burst: float = 0.0
    decay: float = 1.0
    end: int | None = None
    gamma: float | None = None

    def __post_init__(self) -> None:
        if self.onset < 0 or not 0 < self.spike <= 1 or self.burst < 0 or not self.decay > 0:
            raise ValueError(
                f"onset={self.onset}, spike={self.spike}, burst={self.burst}, decay={self.decay}: "
                "expected onset >= 0, 0 < spike <= 1, burst >= 0, decay > 0"
            )
        if self.end is not None and self.end <= self.onset:
            raise ValueError(f"end={self.end}: the first step without the fault comes after its onset={self.onset}")
        if self.gamma is not None and not 0.1 <= self.gamma < math.inf:
            raise ValueError(f"gamma={self.gamma}: expected a shape of at least 0.1")

    def mean(self, step: int) -> float:
        """Expected factor on the rate at a step."""
        if step < self.onset or (self.end is not None and step >= self.end):
            return 0.0
        return 1.0 + self.burst * math.exp(-(step - self.onset) / self.decay)

    def largest(self) -> float:
        """The largest factor that can occur: a true bound, since draws of a gamma distribution are cut off there."""
        return (1.0 + self.burst) / self.spike * (self._largest_gamma if self.gamma is not None else 1.0)

    @functools.cached_property
    def _largest_gamma(self) -> float:
        """A factor that the gamma distribution exceeds with a probability below 1e-12; larger draws are cut off there.

        Chernoff's bound: P(X > c) <= (c e^(1 - c))^shape for a gamma variable of mean 1.
        """
        shape = self.gamma or 1.0
        factor = 2.0
        while shape * (math.log(factor) + 1 - factor) > math.log(1e-12):
            factor *= 1.1
        return factor

    def factor(self, key: PRNGKeyArray, step: Int[Array, ""]) -> Float32[Array, ""]:
        """The factor on the rate at a step, spikes drawn from `key`."""
        age = (step - self.onset).astype(jnp.float32)
        on = jnp.where(age >= 0, 1.0 + self.burst * jnp.exp(-jnp.maximum(age, 0) / self.decay), 0.0)
        if self.end is not None:
            on = jnp.where(step < self.end, on, 0.0)
        if self.gamma is not None:
            draw = jax.random.gamma(jax.random.fold_in(key, 1), self.gamma) / self.gamma
            on *= jnp.minimum(draw, self._largest_gamma)
        hit = jax.random.uniform(key) < self.spike
        return jnp.where(hit, on / self.spike, 0.0).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of simulated hardware.

    Attributes:
        what: what happens to an element that is hit.
        rate: probability that a hit starts at an element in one evaluation of the site; one number, or one per layer.
        site: a selector of sites, or a shell-style pattern of the names of probes, such as `fwd/attn` or `bwd/*`.
        layer: only this iteration of the innermost loop; None for all.
        at: only the device with these indices along mesh axes, such as `{"twin": 1, "model": 0}`.
        when: how the rate changes in time.
        pattern: which elements a hit takes with it.

    Raises:
        ValueError: a rate lies outside [0, 1], or a rotation leaves all elements of its pattern where they are.
    """

    what: What
    rate: float | tuple[float, ...]
    site: str | Selector = "*"
    layer: int | None = None
    at: Mapping[str, int] = dataclasses.field(default_factory=dict)
    when: When = When()
    pattern: Pattern = dataclasses.field(default_factory=One)

    def __post_init__(self) -> None:
        rates = np.atleast_1d(np.asarray(self.rate, np.float64))
        if not rates.size or not ((rates >= 0) & (rates <= 1)).all():
            raise ValueError(f"rate={self.rate}: expected a probability per element, between 0 and 1")
        if self.layer is not None and self.layer < 0:
            raise ValueError(f"layer={self.layer}: expected a number from 0")
        _check_moves(self.what, self.pattern)

    def largest_rate(self) -> float:
        """The largest probability of a hit that can occur."""
        return float(min(1.0, np.max(self.rate) * self.when.largest()))


def _check_moves(what: What, pattern: Pattern) -> None:
    """Refuses a rotation that would do nothing."""
    if not isinstance(what, Rotate) or isinstance(pattern, Row | Whole):
        return
    size = pattern.size(())
    if what.by % size == 0:
        raise ValueError(
            f"a rotation by {what.by} leaves {size} element{'s' * (size > 1)} in place; hit others together, "
            f"as in Run({abs(what.by) + 1}) or run={abs(what.by) + 1}"
        )


_WHEN: dict[str, Callable[[str], Any]] = {
    "onset": int, "end": int, "spike": float, "burst": float, "decay": float, "gamma": float,
}  # fmt: skip
_AXES = ("twin", "data", "model")
_BITS = ("bits", "field")
_KINDS: dict[str, tuple[Callable[..., What], tuple[str, ...], tuple[str, ...]]] = {
    # name: constructor, keys that it needs, keys that it can have
    "bitflip": (BitFlip, (), (*_BITS, "count")),
    "stuck0": (functools.partial(StuckBit, 0), (), _BITS),
    "stuck1": (functools.partial(StuckBit, 1), (), _BITS),
    "sign": (Sign, (), ()),
    "scale": (Scale, ("factor",), ()),
    "add": (Add, ("value",), ()),
    "relative": (Relative, ("severity",), ()),
    "gaussian": (Gaussian, ("sigma",), ()),
    "stuck": (Stuck, ("value",), ()),
    "zero": (functools.partial(Stuck, 0.0), (), ()),
    "nan": (functools.partial(Stuck, math.nan), (), ()),
    "inf": (functools.partial(Stuck, math.inf), (), ()),
    "swap": (functools.partial(Rotate, 1), (), ()),
    "rotate": (Rotate, (), ("by",)),
}
_PATTERNS = ("run", "stride", "tile", "row", "whole")
_CONVERT: dict[str, Callable[[str], Any]] = {
    "bits": lambda text: tuple(int(bit) for bit in text.split("+")), "field": str, "count": int, "by": int,
}  # fmt: skip


def parse_fault(spec: str, *, at: Mapping[str, int] | None = None) -> Fault:
    """A fault from a line of text: `KIND,rate=R[,key=value]...`.

    Kinds and patterns are those of `parse_kind`. Further keys: `rate`; `site`, a pattern of names of probes, or
    `where`, a selector in the language of `sites.parse_selector`; `layer`; the device: `twin`, `data`, `model`; the
    time: `onset`, `end`, `spike`, `burst`, `decay`, `gamma`, or `step` for one step only.

    Args:
        spec: the line.
        at: the device where the line does not name one.

    Raises:
        ValueError: the line cannot be understood.

    Example:
        >>> from sdc.faults import parse_fault
        >>> parse_fault("bitflip,bits=30,rate=1e-4,site=fwd/attn,onset=3").when.onset
        3
    """
    kind, values = _split(spec)
    own = {"rate", "site", "where", "layer", "step", *_AXES, *_WHEN}
    rest = {key: value for key, value in values.items() if key not in own}
    what, pattern = _kind(spec, kind, rest, sorted(own))
    if "rate" not in values:
        raise ValueError(f"fault {spec!r}: 'rate' is missing, as in '{kind},rate=1e-4'")
    for one, other in (("site", "where"), ("step", "onset"), ("step", "end")):
        if one in values and other in values:
            raise ValueError(f"fault {spec!r}: {one!r} and {other!r} exclude each other; give one of them")
    try:
        device = {axis: int(values[axis]) for axis in _AXES if axis in values}
        when = {key: convert(values[key]) for key, convert in _WHEN.items() if key in values}
        if "step" in values:
            when |= {"onset": int(values["step"]), "end": int(values["step"]) + 1}
        return Fault(
            what=what,
            rate=float(values["rate"]),
            site=parse_selector(values["where"]) if "where" in values else values.get("site", "*"),
            layer=int(values["layer"]) if "layer" in values else None,
            at={**(at or {}), **device},
            when=When(**when),
            pattern=pattern,
        )
    except ValueError as error:
        raise ValueError(f"fault {spec!r}: {error}") from error


def parse_kind(spec: str) -> tuple[What, Pattern]:
    """What happens to which elements, from a line of text: `KIND[,key=value]...[,PATTERN]`.

    Kinds: `bitflip[,bits=30+31][,field=exponent][,count=2]`, `stuck0` and `stuck1` (with `bits` or `field`), `sign`,
    `scale,factor=F`, `add,value=V`, `relative,severity=S`, `gaussian,sigma=S`, `stuck,value=V`, `zero`, `nan`, `inf`,
    `swap`, `rotate[,by=N]`. Patterns: `run=N`, `stride=COUNTxSTEP` (aligned to the step), `tile=ROWSxCOLUMNS`, `row`,
    `whole`; one element without.

    Raises:
        ValueError: the line cannot be understood.

    Example:
        >>> from sdc.faults import parse_kind
        >>> parse_kind("bitflip,field=exponent,run=8")
        (BitFlip(bits=(), field='exponent', count=1), Run(length=8))
    """
    kind, values = _split(spec)
    return _kind(spec, kind, values, [])


def _split(spec: str) -> tuple[str, dict[str, str]]:
    """Kind, and keys with their values."""
    kind, *pairs = (part.strip() for part in _parts(spec))
    if kind not in _KINDS:
        raise ValueError(
            f"fault {spec!r}: unknown kind {kind!r}; expected one of {', '.join(_KINDS)}, as in 'bitflip,rate=1e-4'"
        )
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if pair in ("row", "whole"):
            value = pair
        elif key in ("row", "whole"):
            raise ValueError(f"fault {spec!r}: {key!r} takes no value; write it alone, as in 'zero,{key}'")
        elif not equals or not value:
            raise ValueError(f"fault {spec!r}: {pair!r} is not of the form key=value, as in 'bitflip,rate=1e-4'")
        if key in values:
            raise ValueError(f"fault {spec!r}: {key!r} is given twice; give it once")
        values[key] = value
    return kind, values


def _parts(spec: str) -> list[str]:
    """Splits at commas, but not at those in brackets, nor at brackets in quotes there."""
    parts, depth, quote = [""], 0, ""
    for position, character in enumerate(spec):
        if quote:
            if character == quote and spec[position - 1] != "\\":
                quote = ""
        elif depth and character in "\"'":
            quote = character
        else:
            depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _kind(spec: str, kind: str, values: Mapping[str, str], own: Sequence[str]) -> tuple[What, Pattern]:
    make, needed, possible = _KINDS[kind]
    known = [*needed, *possible, *own, *_PATTERNS]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"fault {spec!r}: unknown key {unknown[0]!r}; a {kind} fault takes {', '.join(known)}")
    if missing := [key for key in needed if key not in values]:
        raise ValueError(f"fault {spec!r}: {missing[0]!r} is missing, as in '{kind},{missing[0]}=...'")
    if values.get("field", "sign") not in FIELDS:
        raise ValueError(f"fault {spec!r}: field={values['field']!r}; expected {', '.join(FIELDS)}")
    try:
        arguments = {key: _CONVERT.get(key, float)(values[key]) for key in (*needed, *possible) if key in values}
        given = [_pattern(key, values[key]) for key in _PATTERNS if key in values]
        if len(given) > 1:
            raise ValueError("several patterns; give one")
        what, pattern = make(**arguments), given[0] if given else Run(2) if kind in ("swap", "rotate") else One()
        _check_moves(what, pattern)
        return what, pattern
    except ValueError as error:
        raise ValueError(f"fault {spec!r}: {error}") from error


def _pattern(key: str, value: str) -> Pattern:
    if key == "row":
        return Row()
    if key == "whole":
        return Whole()
    if key == "run":
        return Run(int(value))
    first, by, second = value.partition("x")
    if not by:
        raise ValueError(f"{key}={value}: expected two numbers, as in {key}=4x32")
    return Stride(int(first), int(second), int(second)) if key == "stride" else Tile(int(first), int(second))


def describe(faults: Sequence[Fault]) -> list[str]:
    """One readable line per fault, for the run record."""
    return [_describe(fault) for fault in faults]


def _describe(fault: Fault) -> str:
    parts = [_words(fault.what)]
    if fault.pattern != One():
        parts.append(_words(fault.pattern))
    parts += [f"rate {_range(fault.rate)}", f"site {fault.site}"]
    if fault.layer is not None:
        parts.append(f"layer {fault.layer}")
    parts += [f"{axis} {index}" for axis, index in fault.at.items()]
    for field in dataclasses.fields(When):
        if (value := getattr(fault.when, field.name)) != field.default:
            parts.append(f"{field.name} {value:g}")
    return ", ".join(parts)


def _words(part: What | Pattern) -> str:
    """Name and attributes; of those with a default only what differs from it, but for the bits."""
    words = [type(part).__name__.lower()]
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "bits" and getattr(part, "field", None) is None:
            words.append(f"bits {_range(value)}")
        elif value != field.default:
            words.append(f"{field.name} {value if isinstance(value, str) else _range(value)}")
    return " ".join(words)


def _range(value: float | tuple[float, ...]) -> str:
    values = np.atleast_1d(value)
    if not values.size:
        return "any"
    low, high = values.min(), values.max()
    return f"{high:.3g}" if low == high or np.isnan(high) else f"{low:.3g} to {high:.3g}"
