"""What the flags of `sdc twin` and `sdc train` say about simulated faults and about checked products."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sdc
from sdc.checksums.profile import Profile
from sdc.checksums.settings import Settings
from sdc.faults.fault import describe
from sdc.faults.language import parse_fault
from sdc.faults.nodes import HEALTHY, expected_frequency, node_faults, published
from sdc.program.selectors import parse_selector
from sdc.train.submodules import submodule_products

from .errors import CommandError, usage_errors
from .options import CheckedOptions

Transform: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def check_options(options: CheckedOptions, *, twin: int | None) -> None:
    """Refuses flags that contradict one another, before anything starts.

    Raises:
        CommandError: they do.
    """
    if options.suspect is not None and options.fault:
        raise CommandError("--suspect and --fault both describe the simulated suspect; give one of them")
    if not options.abft:
        for field in dataclasses.fields(options):
            if field.name.startswith("abft_") and getattr(options, field.name) != field.default:
                flag = "--" + field.name.replace("_", "-")
                raise CommandError(f"{flag} says how to check matrix products, but they are not checked; add --abft")
    with usage_errors():
        faults(options, layers=1, twin=twin)
        if options.abft:
            Settings(options.abft_mode, options.abft_scheme)
            parse_selector(options.abft_where)
            if options.abft_profile is not None:
                Profile.read(options.abft_profile)


def faults(options: CheckedOptions, *, layers: int, twin: int | None) -> Sequence[sdc.Fault]:
    """The simulated faults of a run; on matrix products where those are checked, at submodule outputs elsewhere."""
    at = {} if twin is None else {"twin": twin}
    if options.suspect is not None:
        where = submodule_products if options.abft else str
        return node_faults(options.suspect, layers=layers, at=at, where=where)
    return [parse_fault(spec, at=at) for spec in options.fault]


def transform(options: CheckedOptions) -> Transform | None:
    """How the products of the step are checked, where they are."""
    if not options.abft:
        return None
    return functools.partial(
        sdc.abft,
        where=parse_selector(options.abft_where),
        mode=options.abft_mode,
        scheme=options.abft_scheme,
        profile=read_profile(options),
    )


def describe_run(options: CheckedOptions, layers: int, *, twin: int | None) -> Mapping[str, Any]:
    """What the manifest says of the suspect and of the checks."""
    told = describe(faults(options, layers=layers, twin=twin))
    name = options.suspect or ("custom" if told else None)
    # Published are frequencies of wrong elements in the outputs of submodules.
    figures = published(options.suspect) if options.suspect not in (None, HEALTHY) and not options.abft else None
    return {
        "suspect": {"name": name, "simulated": bool(told), "faults": told},
        "published": figures
        and {site: {"frequency": f.frequency, "severity": f.severity} for site, f in figures.items()},
        "expected": expected_frequency(options.suspect, options.steps) if figures and options.suspect else None,
        "abft": _abft(options) if options.abft else None,
    }


def read_profile(options: CheckedOptions) -> Profile:
    """The profile that the flags name, or what is assumed of the platform; JAX's devices have started."""
    return Profile.assumed() if options.abft_profile is None else Profile.read(options.abft_profile)


def _abft(options: CheckedOptions) -> dict[str, Any]:
    read = read_profile(options)
    if departs := read.departs():
        print(
            f"sdc: warning: the profile {options.abft_profile} was measured elsewhere, and its thresholds may not fit: "
            + "; ".join(departs),
            file=sys.stderr,
        )
    return {
        "mode": options.abft_mode,
        "scheme": options.abft_scheme,
        "where": options.abft_where,
        "profile": str(options.abft_profile) if options.abft_profile else "assumed of the platform",
        "kappa": read.rounding.kappa,
        "inputs": read.rounding.inputs,
        "second_tier": list(read.second_tier),
        "departs": read.departs(),
    }
