"""Fault models: what happens to an element, where, and when.

A fault is data about a simulation: `what` a hit does to an element, `rate` how often an element is hit, `site` and `at`
where, `when` how the rate changes in time. `sdc.inject` brings faults into a step. Nothing here is random: draws come
from the key that is given to the injected step.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdc.program.selectors import parse_selector

from .changes import FIELDS
from .fault import Fault, When, check_moves
from .kinds import Add, BitFlip, Gaussian, Relative, Rotate, Scale, Sign, Stuck, StuckBit, What
from .patterns import One, Pattern, Row, Run, Stride, Tile, Whole

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
    `where`, a selector in the language of `parse_selector`; `layer`; the device: `twin`, `data`, `model`; the
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
        check_moves(what, pattern)
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
