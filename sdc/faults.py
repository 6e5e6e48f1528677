"""Fault models: what happens to an element, where, and when.

A fault is data about a simulation: `what` a hit does to an element, `rate` how often an element is hit, `site` and `at`
where, `when` how the rate changes in time. `sdc.inject` brings faults into a step. Nothing here is random: draws come
from the key that is given to the injected step.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, PRNGKeyArray, Shaped

from .bits import as_bits, from_bits


@dataclasses.dataclass(frozen=True)
class BitFlip:
    """One bit of the element is inverted.

    Attributes:
        bits: the bits to draw from, 0 being the least significant; all bits of the type where empty.
    """

    bits: tuple[int, ...] = ()

    def __call__(self, key: PRNGKeyArray, x: Shaped[Array, "*n"], layer: Int[Array, ""]) -> Shaped[Array, "*n"]:
        old = as_bits(x)
        width = 8 * old.dtype.itemsize
        choices = self.bits or tuple(range(width))
        if max(choices) >= width:
            raise ValueError(f"bit {max(choices)} of a {width}-bit {x.dtype} does not exist; give bits below {width}")
        bit = jax.random.choice(key, jnp.asarray(choices, old.dtype), old.shape)
        return from_bits(old ^ (jnp.ones((), old.dtype) << bit), x)


@dataclasses.dataclass(frozen=True)
class Scale:
    """The element is multiplied by a factor."""

    factor: float

    def __call__(self, key: PRNGKeyArray, x: Shaped[Array, "*n"], layer: Int[Array, ""]) -> Shaped[Array, "*n"]:
        return _rounded(_wide(x) * self.factor, x)


@dataclasses.dataclass(frozen=True)
class Relative:
    """The element x becomes x (1 + s u) with a random sign s and u uniform in (0, 1] times `severity`.

    A change that rounding would undo becomes a change of the last bit, so that a hit element is always another number.
    Zeros, NaNs and infinities stay as they are.

    Attributes:
        severity: the largest relative change; one number, or one per layer.
    """

    severity: float | tuple[float, ...]

    def __call__(self, key: PRNGKeyArray, x: Shaped[Array, "*n"], layer: Int[Array, ""]) -> Shaped[Array, "*n"]:
        size, sign = jax.random.split(key)
        u = 1.0 - jax.random.uniform(size, x.shape)
        severity = by_layer(self.severity, layer)
        change = jnp.where(jax.random.bernoulli(sign, shape=x.shape), 1.0, -1.0) * u * severity
        changed = _rounded(_wide(x) * (1.0 + change), x)
        neighbour = from_bits(as_bits(x) ^ jnp.ones((), as_bits(x).dtype), x)
        changed = jnp.where(as_bits(changed) == as_bits(x), neighbour, changed)
        return jnp.where((x == 0) | ~jnp.isfinite(x), x, changed)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """Noise from N(0, sigma^2) is added to the element."""

    sigma: float

    def __call__(self, key: PRNGKeyArray, x: Shaped[Array, "*n"], layer: Int[Array, ""]) -> Shaped[Array, "*n"]:
        return _rounded(_wide(x) + self.sigma * jax.random.normal(key, x.shape), x)


@dataclasses.dataclass(frozen=True)
class Stuck:
    """The element becomes a given value: a stuck number, NaN or an infinity."""

    value: float

    def __call__(self, key: PRNGKeyArray, x: Shaped[Array, "*n"], layer: Int[Array, ""]) -> Shaped[Array, "*n"]:
        return jnp.full_like(x, self.value)


What: TypeAlias = BitFlip | Scale | Relative | Gaussian | Stuck


@dataclasses.dataclass(frozen=True)
class When:
    """How a fault's rate changes with the step.

    Attributes:
        onset: the first step with the fault.
        spike: probability that a step is hit at all; a step that is hit has the rate divided by `spike`, so that the
            mean over time stays. 1 for a steady rate.
        burst: at the onset the rate is higher by this multiple; the excess decays as exp(-(step - onset) / decay).
        decay: in steps.
    """

    onset: int = 0
    spike: float = 1.0
    burst: float = 0.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.onset < 0 or not 0 < self.spike <= 1 or self.burst < 0 or not self.decay > 0:
            raise ValueError(
                f"onset={self.onset}, spike={self.spike}, burst={self.burst}, decay={self.decay}: "
                "expected onset >= 0, 0 < spike <= 1, burst >= 0, decay > 0"
            )

    def mean(self, step: int) -> float:
        """Expected factor on the rate at a step."""
        return 1.0 + self.burst * math.exp(-(step - self.onset) / self.decay) if step >= self.onset else 0.0

    def largest(self) -> float:
        """The largest factor that can occur."""
        return (1.0 + self.burst) / self.spike

    def factor(self, key: PRNGKeyArray, step: Int[Array, ""]) -> Float32[Array, ""]:
        """The factor on the rate at a step, spikes drawn from `key`."""
        age = (step - self.onset).astype(jnp.float32)
        on = jnp.where(age >= 0, 1.0 + self.burst * jnp.exp(-jnp.maximum(age, 0) / self.decay), 0.0)
        hit = jax.random.uniform(key) < self.spike
        return jnp.where(hit, on / self.spike, 0.0).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of simulated hardware.

    Attributes:
        what: what happens to an element that is hit.
        rate: probability that an element is hit in one evaluation of the site; one number, or one per layer.
        site: shell-style pattern of site names, such as `fwd/attn` or `bwd/*`.
        layer: only this iteration of the innermost loop; None for all.
        at: only the device with these indices along mesh axes, such as `{"twin": 1, "model": 0}`.
        when: how the rate changes in time.

    Raises:
        ValueError: a rate lies outside [0, 1].
    """

    what: What
    rate: float | tuple[float, ...]
    site: str = "*"
    layer: int | None = None
    at: Mapping[str, int] = dataclasses.field(default_factory=dict)
    when: When = When()

    def __post_init__(self) -> None:
        rates = np.atleast_1d(np.asarray(self.rate, np.float64))
        if not rates.size or not ((rates >= 0) & (rates <= 1)).all():
            raise ValueError(f"rate={self.rate}: expected a probability per element, between 0 and 1")

    def largest_rate(self) -> float:
        """The largest probability of a hit that can occur."""
        return float(min(1.0, np.max(self.rate) * self.when.largest()))


def by_layer(value: float | tuple[float, ...], layer: Int[Array, ""]) -> Float32[Array, ""]:
    """The value for a layer: the one number, or the layer's own, or zero beyond the last."""
    values = jnp.atleast_1d(jnp.asarray(value, jnp.float32))
    if values.size == 1:
        return values[0]
    return values.at[layer].get(mode="fill", fill_value=0.0)


def _wide(x: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _rounded(wide: Shaped[Array, "*n"], like: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
    return wide.astype(like.dtype)


_KINDS: dict[str, tuple[Callable[..., What], dict[str, str]]] = {
    "bitflip": (BitFlip, {"bits": "bits"}),
    "scale": (Scale, {"factor": "factor"}),
    "relative": (Relative, {"severity": "severity"}),
    "gaussian": (Gaussian, {"sigma": "sigma"}),
    "stuck": (Stuck, {"value": "value"}),
    "nan": (lambda: Stuck(math.nan), {}),
    "inf": (lambda: Stuck(math.inf), {}),
}
_WHEN: dict[str, Callable[[str], Any]] = {"onset": int, "spike": float, "burst": float, "decay": float}
_AXES = ("twin", "data", "model")


def parse_fault(spec: str, *, at: Mapping[str, int] | None = None) -> Fault:
    """A fault from a line of text: `KIND,rate=R[,key=value]...`.

    Kinds: `bitflip[,bits=30+31]`, `scale,factor=F`, `relative,severity=S`, `gaussian,sigma=S`, `stuck,value=V`, `nan`,
    `inf`. Keys of all kinds: `rate`, `site`, `layer`; the device: `twin`, `data`, `model`; the time: `onset`, `spike`,
    `burst`, `decay`.

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
    kind, *pairs = (part.strip() for part in spec.split(","))
    if kind not in _KINDS:
        raise ValueError(
            f"fault {spec!r}: unknown kind {kind!r}; expected one of {', '.join(_KINDS)}, as in 'bitflip,rate=1e-4'"
        )
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise ValueError(f"fault {spec!r}: {pair!r} is not of the form key=value, as in 'bitflip,rate=1e-4'")
        if key in values:
            raise ValueError(f"fault {spec!r}: {key!r} is given twice; give it once")
        values[key] = value
    make, fields = _KINDS[kind]
    known = [*fields, "rate", "site", "layer", *_AXES, *_WHEN]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"fault {spec!r}: unknown key {unknown[0]!r}; a {kind} fault takes {', '.join(known)}")
    if missing := sorted({"rate", *fields} - {"bits"} - set(values)):
        raise ValueError(f"fault {spec!r}: {missing[0]!r} is missing, as in '{kind},{missing[0]}=...'")
    try:
        arguments = {
            field: tuple(int(bit) for bit in values[key].split("+")) if key == "bits" else float(values[key])
            for key, field in fields.items()
            if key in values
        }
        device = {axis: int(values[axis]) for axis in _AXES if axis in values}
        return Fault(
            what=make(**arguments),
            rate=float(values["rate"]),
            site=values.get("site", "*"),
            layer=int(values["layer"]) if "layer" in values else None,
            at={**(at or {}), **device},
            when=When(**{key: convert(values[key]) for key, convert in _WHEN.items() if key in values}),
        )
    except ValueError as error:
        raise ValueError(f"fault {spec!r}: {error}") from error


def describe(faults: Sequence[Fault]) -> list[str]:
    """One readable line per fault, for the run record."""
    return [_describe(fault) for fault in faults]


def _describe(fault: Fault) -> str:
    fields = [f"{field.name} {_range(getattr(fault.what, field.name))}" for field in dataclasses.fields(fault.what)]
    parts = [" ".join([type(fault.what).__name__.lower(), *fields]), f"rate {_range(fault.rate)}", f"site {fault.site}"]
    if fault.layer is not None:
        parts.append(f"layer {fault.layer}")
    parts += [f"{axis} {index}" for axis, index in fault.at.items()]
    for field in dataclasses.fields(When):
        if (value := getattr(fault.when, field.name)) != field.default:
            parts.append(f"{field.name} {value:g}")
    return ", ".join(parts)


def _range(value: float | tuple[float, ...]) -> str:
    values = np.atleast_1d(value)
    if not values.size:
        return "any"
    low, high = values.min(), values.max()
    return f"{high:.3g}" if low == high or np.isnan(high) else f"{low:.3g} to {high:.3g}"
