"""What the comparison of two traces says: verdict, place, and how to narrow it down."""

import math
from typing import Any

from sdc.program import as_selector
from sdc.twins import FirstDifference, Trace, TraceDifference, describe_place, guilty_scope

from .series import mapping


def describe_difference(a: Trace, b: Trace, found: TraceDifference) -> dict[str, Any]:
    """The comparison of two traces as JSON."""
    step, first = found.step, found.first
    steps = f"{len(found.steps):,} steps" if len(found.steps) > 1 else f"step {found.steps[0]}"
    shorter = "" if len(a.lines) == len(b.lines) else f"; one has {len(a.lines):,} steps, the other {len(b.lines):,}"
    digests = sum(math.prod(shape[:-1]) for shape in a.shapes)
    result: dict[str, Any] = {
        "verdict": "clean" if first is None else "corrupt",
        "reason": f"all {digests * len(found.steps):,} digests of {steps} agree{shorter}",
        "runs": [str(a.path), str(b.path)],
        "hosts": [mapping(trace.manifest.get("host")).get("name") for trace in (a, b)],
        "simulated": any(bool(mapping(trace.manifest.get("suspect")).get("simulated")) for trace in (a, b)),
        "where": a.manifest.get("where"),
        "steps": len(found.steps),
        "sites": len(a.sites),
        "first": None,
    }
    if first is None:
        return result
    return result | {
        "reason": f"the traces part at step {step}: {first}",
        "first": {
            "step": step,
            **first.describe(),
        },
        "agreeing": digests * (len(found.steps) - 1) + first.agreeing,
        "before": [describe_place(site, iteration) for site, iteration in first.before],
        "narrow": narrow(first, str(a.manifest.get("where"))),
    }


def narrow(first: FirstDifference, where: str) -> str | None:
    """The selector with which to trace again, to find the operation inside a guilty scope; None if it is found."""
    try:
        guilty = guilty_scope(as_selector(where), first)
    except ValueError:  # a selector made in Python, of a trace of somebody's own step
        return None
    return None if guilty is None else f'inside("{guilty[0]}")' if guilty[0] else "everything"
