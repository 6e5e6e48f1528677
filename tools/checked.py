"""What the flags of `sdc twin` and `sdc train` say about simulated faults and about checked products."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sdc
from sdc.abft import Profile, Settings
from sdc.faults import describe, parse_fault
from sdc.profiles import HEALTHY, expected_frequency, profile, published
from sdc.sites import parse_selector

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
    with usage_errors():
        faults(options, layers=1, twin=twin)
        if options.abft:
            Settings(options.abft_mode, options.abft_scheme)
            parse_selector(options.abft_where)


def faults(options: CheckedOptions, *, layers: int, twin: int | None) -> Sequence[sdc.Fault]:
    """The simulated faults of a run; on matrix products where those are checked, at submodule outputs elsewhere."""
    if options.suspect is not None:
        return profile(options.suspect, layers=layers, twin=twin, products=options.abft)
    at = {} if twin is None else {"twin": twin}
    return [parse_fault(spec, at=at) for spec in options.fault]


def transform(options: CheckedOptions) -> Transform | None:
    """How the products of the step are checked, where they are.

    Raises:
        CommandError: the profile cannot be read.
    """
    if not options.abft:
        return None
    with usage_errors():
        return functools.partial(
            sdc.abft,
            where=parse_selector(options.abft_where),
            mode=options.abft_mode,
            scheme=options.abft_scheme,
            profile=Profile.load(options.abft_profile) if options.abft_profile else None,
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


def _abft(options: CheckedOptions) -> dict[str, Any]:
    with warnings.catch_warnings():  # it was said when the run began
        warnings.simplefilter("ignore")
        read = Profile.load(options.abft_profile) if options.abft_profile else Profile.assumed()
    return {
        "mode": options.abft_mode,
        "scheme": options.abft_scheme,
        "where": options.abft_where,
        "profile": str(options.abft_profile) if options.abft_profile else "assumed of the platform",
        "kappa": read.arithmetic.kappa,
        "inputs": read.arithmetic.inputs,
        "second_tier": list(read.second_tier),
        "departs": read.departs(),
    }
