"""`sdc twin`: lock-step twins, compared bit for bit."""

from collections.abc import Mapping, Sequence
from typing import Any

import sdc
from sdc.faults import describe, parse_fault
from sdc.profiles import HEALTHY, expected_frequency, profile, published

from .errors import CommandError, usage_errors
from .options import TwinOptions
from .output import finish
from .programs import Programs
from .session import Plan, execute


def twin(options: TwinOptions) -> int:
    """Runs twins and returns the exit code."""
    if options.twins < 2:
        raise CommandError(f"--twins {options.twins}: expected two or more")
    if options.suspect is not None and options.fault:
        raise CommandError("--suspect and --fault both describe the simulated suspect; give one of them")
    with usage_errors():
        _faults(options, layers=1)

    plan = Plan(
        kind="twin",
        twins=options.twins,
        placement=options.placement,
        programs=lambda config, placement: Programs(
            config, placement, options.sync, options.compare, tuple(_faults(options, config.model.layers))
        ),
        manifest=lambda layers: _suspect(options, layers),
        sync=options.sync,
        compare=options.compare,
    )
    return finish(options, execute(options, plan))


def _faults(options: TwinOptions, layers: int) -> Sequence[sdc.Fault]:
    last = options.twins - 1
    if options.suspect is not None:
        return profile(options.suspect, layers=layers, twin=last)
    return [parse_fault(spec, at={"twin": last}) for spec in options.fault]


def _suspect(options: TwinOptions, layers: int) -> Mapping[str, Any]:
    faults = describe(_faults(options, layers))
    name = options.suspect or ("custom" if faults else None)
    figures = published(options.suspect) if options.suspect not in (None, HEALTHY) else None
    return {
        "suspect": {"name": name, "simulated": bool(faults), "faults": faults},
        "published": figures
        and {site: {"frequency": f.frequency, "severity": f.severity} for site, f in figures.items()},
        "expected": expected_frequency(options.suspect, options.steps) if figures and options.suspect else None,
    }
