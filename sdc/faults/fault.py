"""A fault of simulated hardware: its kind, place and time, and its text (for the grammar, see `sdc.text`).

A *hit* is one occurrence of a fault and corrupts one group of elements; the pattern of the fault determines which
elements of a tensor form a group. In beam experiments on GPUs and other accelerators, a matrix product had a single
corrupted element or several scattered ones, or its corrupted elements formed lines or squares (Oliveira, Pilla,
Hanzich, Fratin, Fernandes, Lunardi, Cela, Navaux, Carro and Rech, *Radiation-Induced Error Criticality in Modern HPC
Parallel Accelerators*, HPCA 2017). A `Run` or a `Row` models a line; a `Tile` models a square. Corrupted addresses on a
data-center GPU are periodic, and their period is that of the warps of 32 threads to which the addresses are assigned
(*The Anatomy of Silent Data Corruption: GPU Error Pattern Study and Modeling Guidance*, arXiv:2605.04213); a `Stride`
models them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from sdc._lazy import jax, jnp, np
from sdc.settings import SettingError
from sdc.text import NOTHING, Term, form, read_term, write_term, write_value

from ..program import Selector, Where, as_selector, probes
from .kinds import KINDS, Banded, FaultKind, Rotate

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int, PRNGKeyArray


RISEN = 100.0  # largest multiple to which a rate rises
LAST_STEP = 2**31 - 1  # steps are numbered by 32-bit integers


@dataclasses.dataclass(frozen=True)
class One:
    """One element."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{'run' if name == 'length' else name}={size}: expected at least 1")

    def setting(self) -> dict[str, Any]:
        """Returns the pattern as a setting of a fault's text: its name and its sizes, or True if it has no sizes."""
        sizes = dataclasses.astuple(self)
        return {type(self).__name__.lower(): sizes[0] if len(sizes) == 1 else sizes or True}

    def size(self, shape: tuple[int, ...]) -> int:
        """Returns the largest number of elements that the pattern can cover in a tensor of this shape."""
        return 1

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        """Returns flat indices of the elements struck together, one row per start.

        Unused starts and positions outside the tensor are marked by an index equal to the tensor's size.
        """
        return start[:, None]


@dataclasses.dataclass(frozen=True)
class Run(One):
    """Adjacent elements in memory, up to the end of the tensor.

    Attributes:
        length: number of elements.
    """

    length: int

    def size(self, shape: tuple[int, ...]) -> int:
        return self.length

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        return _within(start, np.arange(self.length), shape)


@dataclasses.dataclass(frozen=True)
class Stride(One):
    """Elements at a constant distance in memory.

    Attributes:
        count: number of elements.
        step: distance from one element to the next.
        align: alignment of the first index, which is rounded down to a multiple of this number.
    """

    count: int
    step: int
    align: int = 1

    def setting(self) -> dict[str, Any]:
        return {"stride": (self.count, self.step, self.align)[: 2 if self.align == self.step else 3]}

    def size(self, shape: tuple[int, ...]) -> int:
        return self.count

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        size = math.prod(shape)
        aligned = _where(start < size, start // self.align * self.align, size)
        return _within(aligned, np.arange(self.count) * self.step, shape)


@dataclasses.dataclass(frozen=True)
class Tile(One):
    """A rectangle along the last two axes, clipped at the edges of the tensor. A vector is treated as one row.

    Attributes:
        rows: number of rows, along the second-to-last axis.
        columns: number of columns, along the last axis.
    """

    rows: int
    columns: int

    def size(self, shape: tuple[int, ...]) -> int:
        return self.rows * self.columns

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        height, width = (1, 1, *shape)[-2:]
        size = math.prod(shape)
        row, column = start // max(width, 1) % max(height, 1), start % max(width, 1)
        down = _like(start, np.minimum(np.repeat(np.arange(self.rows), self.columns), height))
        right = _like(start, np.minimum(np.tile(np.arange(self.columns), self.rows), width))
        inside = (down < height - row[:, None]) & (right < width - column[:, None]) & (start[:, None] < size)
        return _where(inside, start[:, None] + down * width + right, size)


@dataclasses.dataclass(frozen=True)
class Lattice(One):
    """Runs of neighbours that recur with a period along both of the last two axes, up to the end of the matrix.

    The wrong elements of a production GPU had this form: mostly four neighbours, recurring along both axes of an output
    of 768 rows and 2048 columns (Lei et al., OSDI 2026, section 7).

    Attributes:
        length: number of neighbours along the last axis.
        rows: period along the second-to-last axis.
        columns: period along the last axis.
    """

    length: int
    rows: int
    columns: int

    def size(self, shape: tuple[int, ...]) -> int:
        height, width = (1, 1, *shape)[-2:]
        return self.length * max(-(-height // self.rows), 1) * max(-(-width // self.columns), 1)

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        height, width = (1, 1, *shape)[-2:]
        size = math.prod(shape)
        row, column = start // max(width, 1) % max(height, 1), start % max(width, 1)
        down, across = np.arange(0, max(height, 1), self.rows), np.arange(0, max(width, 1), self.columns)
        right = (across[:, None] + np.arange(self.length)).reshape(-1)
        below = _like(start, np.repeat(down, right.size))
        beside = _like(start, np.minimum(np.tile(right, down.size), width))
        inside = (below < height - row[:, None]) & (beside < width - column[:, None]) & (start[:, None] < size)
        return _where(inside, start[:, None] + below * width + beside, size)


@dataclasses.dataclass(frozen=True)
class Row(One):
    """All elements along the last axis."""

    def size(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if shape else 1

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        width, size = self.size(shape), math.prod(shape)
        first = _where(start < size, start // max(width, 1) * width, size)
        return _within(first, np.arange(width), shape)


@dataclasses.dataclass(frozen=True)
class Whole(One):
    """The whole tensor."""

    def size(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape)

    def positions(self, start: Int[Array, "hits"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
        size = math.prod(shape)
        return _where(start[:, None] < size, _like(start, np.arange(size)), size)


Pattern: TypeAlias = One | Run | Stride | Tile | Lattice | Row | Whole


def _numbers(text: str, example: str, counts: tuple[int, ...]) -> list[int]:
    numbers = re.split("[x+]", text)
    if len(numbers) not in counts or not all(number.strip().isdecimal() for number in numbers):
        raise ValueError(f"expected {' or '.join(map(str, counts))} number{'s' * (counts != (1,))}, as in {example}")
    return [int(number) for number in numbers]


def _stride(text: str) -> Stride:
    count, step, *align = _numbers(text, "stride=(4, 32), or 4x32 in the shorthand", (2, 3))
    return Stride(count, step, *(align or [step]))


# Settings of a fault's text that specify a pattern, with their parsers; None for a word without a value.
PATTERNS: Mapping[str, Any] = {
    "run": lambda text: Run(*_numbers(text, "run=8", (1,))),
    "stride": _stride,
    "tile": lambda text: Tile(*_numbers(text, "tile=(4, 32), or 4x32 in the shorthand", (2,))),
    "lattice": lambda text: Lattice(*_numbers(text, "lattice=(4, 64, 128), or 4x64x128 in the shorthand", (3,))),
    "row": None,
    "whole": None,
}
WORDS: Mapping[str, Pattern] = {"row": Row(), "whole": Whole()}


def _within(first: Int[Array, "hits"], offsets: Int[np.ndarray, "n"], shape: tuple[int, ...]) -> Int[Array, "hits n"]:
    size = math.prod(shape)
    # Positions outside the tensor are masked before the addition, which could wrap around.
    beyond = _like(first, np.minimum(offsets, size))
    return _where(beyond < size - first[:, None], first[:, None] + beyond, size)


def _like(start: Int[Array, "hits"], numbers: Int[np.ndarray, "n"]) -> Int[Array, "n"]:
    """Converts numbers to an array of the same library (JAX or NumPy) and dtype as `start`."""
    return start.__array_namespace__().asarray(numbers.astype(start.dtype))


def _where(mask: Any, inside: Any, size: int) -> Any:
    return inside.__array_namespace__().where(mask, inside, size).astype(inside.dtype)


@dataclasses.dataclass(frozen=True)
class When:
    """How a fault's rate changes with the step.

    Attributes:
        onset: the first step with the fault.
        spike: probability that the fault is active in a step, or 1 for a steady rate; in an active step, the rate is
            divided by `spike`, so the mean over time is unchanged.
        burst: excess of the rate at the onset, as a multiple of the rate; the excess decays as
            exp(-(step - onset) / decay).
        decay: time constant of that decay, in steps.
        end: the first step without the fault; None if the fault persists.
        gamma: shape of a gamma distribution with mean 1, or None for a steady rate. At each step, a factor on the rate
            is drawn from this distribution; the factor is the same for all sites. The smaller the shape, the more the
            hits cluster in bursts. Draws are clipped at a value that they exceed with a probability below 1e-12.
        rise: growth of the rate per step after the onset, as a multiple of the rate, up to `RISEN` times the rate. In
            production, the rates of defective GPUs usually grow (Zheng et al., OSDI 2026, figure 6).
    """

    onset: int = 0
    spike: float = 1.0
    burst: float = 0.0
    decay: float = 1.0
    end: int | None = None
    gamma: float | None = None
    rise: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rise < math.inf:
            raise ValueError(f"rise={self.rise}: expected a finite growth per step of at least 0")
        if self.onset < 0 or not 0 < self.spike <= 1 or not 0 <= self.burst < math.inf or not self.decay > 0:
            raise ValueError(
                f"onset={self.onset}, spike={self.spike}, burst={self.burst}, decay={self.decay}: "
                "expected onset >= 0, 0 < spike <= 1, burst >= 0, decay > 0"
            )
        for name, step in (("onset", self.onset), ("end", self.end)):
            if step is not None and step > LAST_STEP:
                raise ValueError(f"{name}={step}: expected a step of at most {LAST_STEP:,}")
        if self.end is not None and self.end <= self.onset:
            raise ValueError(f"end={self.end}: expected a step after onset={self.onset}")
        if self.gamma is not None and not 0.1 <= self.gamma < math.inf:
            raise ValueError(f"gamma={self.gamma}: expected a shape of at least 0.1")

    def mean(self, step: int) -> float:
        """Returns the expected factor on the rate at a step."""
        if step < self.onset or (self.end is not None and step >= self.end):
            return 0.0
        age = step - self.onset
        return min(1.0 + self.rise * age, RISEN) + self.burst * math.exp(-age / self.decay)

    def average(self, steps: int) -> float:
        """Returns the expected factor on the rate, averaged over steps 0 to `steps - 1` (a geometric series)."""
        last = steps if self.end is None else min(steps, self.end)
        count = max(0, last - self.onset)
        bursts = math.expm1(-count / self.decay) / math.expm1(-1 / self.decay) if self.decay < math.inf else count
        rising = min(count, math.ceil((RISEN - 1) / self.rise)) if self.rise else 0  # steps before the rate stays
        risen = self.rise * rising * (rising - 1) / 2 + (RISEN - 1) * (count - rising) * bool(self.rise)
        return (count + risen + self.burst * bursts) / max(steps, 1)

    def largest(self) -> float:
        """Returns the largest possible factor on the rate; this bound always holds, because gamma draws are clipped."""
        steady = RISEN if self.rise else 1.0
        return (steady + self.burst) / self.spike * (self._largest_gamma if self.gamma is not None else 1.0)

    @functools.cached_property
    def _largest_gamma(self) -> float:
        """Limit at which gamma draws are clipped; a draw exceeds it with a probability below 1e-12.

        Chernoff's bound: P(X > c) <= (c e^(1 - c))^shape for a gamma variable of mean 1.
        """
        shape = self.gamma or 1.0
        factor = 2.0
        while shape * (math.log(factor) + 1 - factor) > math.log(1e-12):
            factor *= 1.1
        return factor

    def factor(self, key: PRNGKeyArray, step: Int[Array, ""]) -> Float32[Array, ""]:
        """Returns the factor on the rate at a step, with spikes and gamma factors drawn from `key`."""
        age = (step - self.onset).astype(jnp.float32)
        steady = jnp.minimum(1.0 + self.rise * age, RISEN)
        on = jnp.where(age >= 0, steady + self.burst * jnp.exp(-jnp.maximum(age, 0) / self.decay), 0.0)
        if self.end is not None:
            on = jnp.where(step < self.end, on, 0.0)
        if self.gamma is not None:
            draw = jax.random.gamma(jax.random.fold_in(key, 1), self.gamma) / self.gamma
            on *= jnp.minimum(draw, self._largest_gamma)
        hit = jax.random.uniform(key) < self.spike
        return jnp.where(hit, on / self.spike, 0.0).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class Fault:
    """A fault of simulated hardware: how elements change, where, when and how often.

    `inject` applies a fault to a step repeatedly, at its rate; `strike_on` and `campaign` apply the fault once, at a
    place that does not depend on the rate. The `repr` of a fault is its text, which `parse_fault` can read, or
    `as_fault` if the fault has no rate.

    Attributes:
        what: the kind, which defines how a struck element changes.
        rate: probability that a hit starts at an element in one evaluation of the site, as one number or one per layer;
            None for a fault that strikes once.
        site: a selector of sites, the text of a selector, or a shell-style pattern that matches names of probes, such
            as `fwd/attn` or `bwd/*`.
        layer: the only iteration of the innermost loop in which the fault strikes; None for all iterations.
        at: index, along each mesh axis, of the only device that is struck, such as `{"twin": 1, "model": 0}`.
        when: how the rate changes over time.
        pattern: which elements are struck together.
        band: the smallest and the largest magnitude of elements that change; None for all elements.
        dtype: name of the type of the arrays that are struck, such as `float32`; None for all types.

    Raises:
        ValueError: a rate lies outside [0, 1], a selector cannot be parsed, or a rotation leaves all elements of its
            pattern in place.

    Example:
        >>> from sdc.faults import BitFlip, Fault, Run
        >>> fault = Fault(BitFlip(bits=(30,)), rate=1e-4, site='primitive("dot_general")', at={"fsdp": 1})
        >>> fault
        bitflip(bits=30, rate=0.0001, where=primitive("dot_general"), fsdp=1)
    """

    what: FaultKind
    rate: float | tuple[float, ...] | None = None
    site: Where = "*"
    layer: int | None = None
    at: Mapping[str, int] = dataclasses.field(default_factory=dict)
    when: When = When()
    pattern: Pattern = dataclasses.field(default_factory=One)
    band: tuple[float, float] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.band is not None and not (len(self.band) == 2 and 0 <= self.band[0] <= self.band[1]):
            raise ValueError(f"band={self.band}: expected the smallest and the largest magnitude, as in (0.5, 2.0)")
        if self.dtype is not None and not _is_type(self.dtype):
            raise ValueError(f"dtype={self.dtype}: expected the name of a type, such as bfloat16")
        if not isinstance(self.what, FaultKind):
            raise SettingError("what", self.what, "expected a kind of fault, such as BitFlip(bits=(30,))")
        rates = np.atleast_1d(np.asarray(0.0 if self.rate is None else self.rate, np.float64))
        if not rates.size or not ((rates >= 0) & (rates <= 1)).all():
            raise ValueError(f"rate={self.rate}: expected a probability for each element, from 0 to 1")
        if not isinstance(self.at, Mapping):
            raise SettingError("at", self.at, "expected an index for each mesh axis, as in {'data': 1}")
        if self.layer is not None and self.layer < 0:
            raise ValueError(f"layer={self.layer}: expected a number of at least 0")
        if self.rate is not None:  # a fault that strikes once may be given several elements and no pattern
            self.check_moves()
        if isinstance(self.site, str):
            _ = self.selector  # raises if the selector cannot be parsed

    @property
    def by_name(self) -> bool:
        """Whether `site` is a pattern of probe names."""
        return isinstance(self.site, str) and not Selector.is_text(self.site)

    @property
    def kind(self) -> FaultKind:
        """How struck elements change, in the band if there is one."""
        return self.what if self.band is None else Banded(self.what, self.band)

    def strikes(self, x: Any) -> bool:
        """Returns whether the fault strikes arrays of this type."""
        return self.dtype is None or x.dtype == jnp.dtype(self.dtype)

    @functools.cached_property
    def selector(self) -> Selector:
        """Selector of the sites that the fault can strike."""
        if not self.by_name:
            return as_selector(self.site)
        pattern = str(self.site)
        return Selector(pattern, lambda site: probes(site) and fnmatchcase(site.name.partition("#")[0], pattern))

    def __repr__(self) -> str:
        site = {"site": self.site if self.site != "*" else None} if self.by_name else {"where": self.selector}
        when = {name: x for name in form(When).types if (x := getattr(self.when, name)) != getattr(When, name)}
        only = {"band": self.band, "dtype": self.dtype}
        own = {**only, "rate": self.rate, **site, "layer": self.layer, **self.at, **when}
        return write_hit(self, **{name: x for name, x in own.items() if x is not None})

    def describe(self) -> str:
        """Returns one readable line for a log or a report."""
        parts = [_described(self.what)]
        if self.pattern != One():
            parts.append(_described(self.pattern))
        parts += [f"rate {_range(self.rate)}"] if self.rate is not None else []
        parts.append(f"site {self.selector}")
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        parts += [f"{axis} {index}" for axis, index in self.at.items()]
        parts += [f"magnitudes from {self.band[0]:g} to {self.band[1]:g}"] if self.band else []
        parts += [self.dtype] if self.dtype else []
        for field in dataclasses.fields(When):
            if (value := getattr(self.when, field.name)) != field.default:
                parts.append(f"{field.name} {value:g}")
        return ", ".join(parts)

    def check_moves(self) -> None:
        """Raises ValueError if a rotation would change nothing."""
        if not isinstance(self.what, Rotate) or isinstance(self.pattern, Row | Whole):
            return
        size = self.pattern.size(())
        if self.what.by % size == 0:
            raise ValueError(
                f"a rotation by {self.what.by} leaves {size} element{'s' * (size > 1)} in place; choose another "
                f"pattern, such as Run({abs(self.what.by) + 1}) or run={abs(self.what.by) + 1}"
            )

    def largest_rate(self) -> float:
        """Returns the largest possible probability that a hit starts at an element."""
        factor = self.when.largest() * self.what.largest_share()
        return float(min(1.0, np.max(0.0 if self.rate is None else self.rate) * factor))


def _described(part: FaultKind | Pattern) -> str:
    """Returns the name of a kind or pattern, its bits, and its other attributes that differ from their defaults."""
    words = [type(part).__name__.lower()]
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name == "bits" and getattr(part, "field", None) is None:
            words.append(f"bits {_range(value)}")
        elif field.name == "flips":  # their order matters
            words.append(f"flips {write_value(value)}")
        elif value != field.default:
            words.append(f"{field.name} {value if isinstance(value, str) else _range(value)}")
    return " ".join(words)


def _range(value: float | tuple[float, ...]) -> str:
    values = np.atleast_1d(value)
    if not values.size:
        return "any"
    low, high = values.min(), values.max()
    return f"{high:.3g}" if low == high or np.isnan(high) else f"{low:.3g} to {high:.3g}"


def _is_type(name: str) -> bool:
    try:
        jnp.dtype(name)
    except TypeError:
        return False
    return True


_OWN = {
    "rate": float | tuple[float, ...], "site": str, "where": lambda text: as_selector(text).text, "layer": int,
    "step": int, "band": tuple[float, ...], "dtype": str, **form(When).types,
}  # fmt: skip
EXAMPLE = 'bitflip(bits=30, rate=1e-4, site="fwd/attn")'


def parse_fault(text: str, *, at: Mapping[str, int] | None = None) -> Fault:
    """Parses a fault from a line of text: `KIND(rate=R, key=value, ...)`, or the shorthand `KIND,rate=R,key=value`.

    Kinds and patterns are the same as in `as_fault`. Further keys are `rate`, `site` (a pattern of probe names) or
    `where` (a selector), `layer`, `band` and `dtype`. The keys for the time are `onset`, `end`, `spike`, `burst`,
    `decay`, `gamma` and `rise`, or `step` for a single step. Any other key is a mesh axis, and its value is the index
    of the device along this axis, as in `model=1` or `fsdp=3`.

    Args:
        text: the line.
        at: index of the device along those mesh axes that the line does not specify.

    Raises:
        ValueError: the line cannot be parsed.

    Example:
        >>> from sdc.faults import parse_fault
        >>> parse_fault('bitflip(bits=30, rate=1e-4, site="fwd/attn", onset=3)').when.onset
        3
        >>> parse_fault("nan,rate=1e-4,fsdp=1,expert=3")  # shorthand
        nan(rate=0.0001, fsdp=1, expert=3)
    """
    hit, term = read_hit("fault", text, EXAMPLE, _OWN)
    given = term.common
    if "rate" not in given:
        raise ValueError(f"fault {text!r}: 'rate' is missing; give one, as in '{term.head}(rate=1e-4)'")
    for one, other in (("site", "where"), ("step", "onset"), ("step", "end")):
        if one in given and other in given:
            raise ValueError(f"fault {text!r}: {one!r} and {other!r} are mutually exclusive; give only one of them")
    when = {key: given[key] for key in form(When).types if key in given}
    if "step" in given:
        when |= {"onset": given["step"], "end": given["step"] + 1}
    site = given.get("where", given.get("site", "*"))
    with _named("fault", text):
        return dataclasses.replace(
            hit, rate=given["rate"], site=site, layer=given.get("layer"), at={**(at or {}), **hit.at},
            when=When(**when), band=given.get("band"), dtype=given.get("dtype"),
        )  # fmt: skip


def as_fault(fault: Fault | FaultKind | str) -> Fault:
    """Converts a kind or its text, `KIND(key=value, ..., PATTERN)`, to a fault without a rate; a fault is unchanged.

    `docs/faults.md` lists all kinds and patterns.

    Raises:
        ValueError: the argument has another type, or the text cannot be parsed.

    Example:
        >>> from sdc.faults import as_fault
        >>> fault = as_fault('bitflip(field="exponent", run=8)')
        >>> fault.what, fault.pattern
        (bitflip(field="exponent"), Run(length=8))
    """
    if isinstance(fault, str):
        return read_hit("fault", fault, 'bitflip(field="exponent", run=8)')[0]
    return fault if isinstance(fault, Fault) else Fault(fault)


def read_hit(noun: str, text: str, example: str, own: Mapping[str, Any] = NOTHING) -> tuple[Fault, Term]:
    """Parses a kind and a pattern, and the device if `own` is not empty; returns the fault and the term."""
    term = read_term(noun, text, KINDS, example=example, common={**PATTERNS, **own}, open_ended=bool(own))
    given = [WORDS.get(key, term.common[key]) for key in PATTERNS if key in term.common]
    with _named(noun, text):
        if len(given) > 1:
            raise ValueError("several patterns are given; give only one")
        pattern = given[0] if given else _least(term.value)
        hit = Fault(term.value, at={axis: int(index) for axis, index in term.other.items()}, pattern=pattern)
        hit.check_moves()
    return hit, term


def _least(what: FaultKind) -> Pattern:
    """Returns the default pattern of a kind: two elements for a rotation, else one."""
    return Run(2) if isinstance(what, Rotate) else One()


def write_hit(fault: Fault, **own: Any) -> str:
    """Returns the text of a fault's kind and pattern, with the settings `own`; `read_hit` parses this text."""
    pattern = {} if fault.pattern in (One(), _least(fault.what)) else fault.pattern.setting()
    return write_term(fault.what, KINDS, {**pattern, **own})


@contextlib.contextmanager
def _named(noun: str, text: str) -> Iterator[None]:
    """Prefixes the messages of errors with the text that caused them."""
    try:
        yield
    except ValueError as error:
        said = str(error)
        raise ValueError(said if said.startswith(f"{noun} ") else f"{noun} {text!r}: {said}") from error
