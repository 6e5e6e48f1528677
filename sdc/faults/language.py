"""The text form of faults and of their kinds; see `sdc.text` for the grammar."""

from collections.abc import Mapping

from sdc.text import Term, form, read_term

from ..program import as_selector
from .fault import Fault, When, check_moves
from .kinds import KINDS, What
from .patterns import PATTERNS, WORDS, One, Pattern, Run

_OWN = {
    "rate": float | tuple[float, ...], "site": str, "where": lambda text: as_selector(text).text, "layer": int,
    "step": int, **form(When).types,
}  # fmt: skip
EXAMPLE = "bitflip,bits=30,rate=1e-4,site=fwd/attn"


def parse_fault(text: str, *, at: Mapping[str, int] | None = None) -> Fault:
    """A fault from a line of text: `KIND,rate=R[,key=value]...`.

    Kinds and patterns are those of `parse_kind`. Further keys: `rate`; `site`, a pattern of names of probes, or
    `where`, a selector; `layer`; the time: `onset`, `end`, `spike`, `burst`, `decay`, `gamma`, or `step` for one step
    only. Any other key with a whole number names the device along a mesh axis, as in `model=1` or `fsdp=3`.

    Args:
        text: the line.
        at: the device where the line does not name one.

    Raises:
        ValueError: the line cannot be understood.

    Example:
        >>> from sdc.faults import parse_fault
        >>> parse_fault("bitflip,bits=30,rate=1e-4,site=fwd/attn,onset=3").when.onset
        3
        >>> parse_fault("nan,rate=1e-4,fsdp=1,expert=3").at
        {'fsdp': 1, 'expert': 3}
    """
    term = read_term("fault", text, KINDS, example=EXAMPLE, common={**PATTERNS, **_OWN}, open_ended=True)
    given = term.common
    if "rate" not in given:
        raise ValueError(f"fault {text!r}: 'rate' is missing, as in '{term.head},rate=1e-4'")
    for one, other in (("site", "where"), ("step", "onset"), ("step", "end")):
        if one in given and other in given:
            raise ValueError(f"fault {text!r}: {one!r} and {other!r} exclude each other; give one of them")
    when = {key: given[key] for key in form(When).types if key in given}
    if "step" in given:
        when |= {"onset": given["step"], "end": given["step"] + 1}
    try:
        return Fault(
            what=term.value,
            rate=given["rate"],
            site=given.get("where", given.get("site", "*")),
            layer=given.get("layer"),
            at={**(at or {}), **{axis: int(index) for axis, index in term.other.items()}},
            when=When(**when),
            pattern=pattern_of(text, term),
        )
    except ValueError as error:
        raise _wrong(text, error) from error


def parse_kind(text: str) -> Fault:
    """What happens to which elements, from a line of text: `KIND[,key=value]...[,PATTERN]`.

    Kinds: `bitflip[,bits=30+31][,field=exponent][,count=2]`, `stuck0` and `stuck1` (with `bits` or `field`), `sign`,
    `scale,factor=F`, `add,value=V`, `relative,severity=S`, `tailed,severity=S[,tail=T][,few=F]`, `gaussian,sigma=S`,
    `stuck,value=V`, `zero`, `nan`, `inf`, `mixed[,zero=S][,special=S][,flips=S+S]`, `swap`, `rotate[,by=N]`. Patterns:
    `run=N`, `stride=COUNTxSTEP` (aligned to the step, or to a third number), `tile=ROWSxCOLUMNS`, `row`, `whole`; one
    element without.

    Returns:
        A fault without a rate: one that hits once, where it is told to.

    Raises:
        ValueError: the line cannot be understood.

    Example:
        >>> from sdc.faults import parse_kind
        >>> fault = parse_kind("bitflip,field=exponent,run=8")
        >>> fault.what, fault.pattern
        (BitFlip(bits=(), field='exponent', count=1), Run(length=8))
    """
    term = read_term("fault", text, KINDS, example="bitflip,field=exponent,run=8", common=PATTERNS)
    return Fault(term.value, pattern=pattern_of(text, term))


def as_fault(fault: Fault | What | str) -> Fault:
    """A fault from whatever says what happens to which elements: itself, its kind, or its text.

    Raises:
        ValueError: it is none of these, or the text cannot be understood.
    """
    if isinstance(fault, str):
        return parse_kind(fault)
    return fault if isinstance(fault, Fault) else Fault(fault)


def pattern_of(text: str, term: Term) -> Pattern:
    """The pattern that a term names; of two elements where values move and none is named.

    Raises:
        ValueError: there are several, or values would stay where they are.
    """
    given = [WORDS.get(key, term.common[key]) for key in PATTERNS if key in term.common]
    try:
        if len(given) > 1:
            raise ValueError("several patterns; give one")
        pattern: Pattern = given[0] if given else Run(2) if term.head in ("swap", "rotate") else One()
        check_moves(term.value, pattern)
    except ValueError as error:
        raise _wrong(text, error) from error
    return pattern


def _wrong(text: str, error: ValueError) -> ValueError:
    said = str(error)
    return ValueError(said if said.startswith("fault ") else f"fault {text!r}: {said}")
