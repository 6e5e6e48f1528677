"""Simulated faults of the reference model: one fault of a trace as text, and where the study's submodules are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sdc
from sdc.faults import Fault, read_hit
from sdc.program import Direction, Selector, direction, matching, products, scope

EXAMPLE = "bitflip,bits=30,step=3,site=fwd/attn,iteration=0+2,element=7,model=1"
_OWN: Mapping[str, Any] = {"step": int, "site": str, "iteration": tuple[int, ...], "element": int}


@dataclasses.dataclass(frozen=True)
class Simulation:
    """One fault of a traced run, or none: a run of the same program without it."""

    text: str  # the line it was read from
    fault: Fault | None = None  # what becomes of which elements, on which device; None for no fault
    step: int = -1  # the struck step of the run
    site: str = ""  # pattern of site names
    iteration: tuple[int, ...] = ()  # index in the enclosing loops
    element: int = 0  # flat index of the first element

    def strike(self, sites: Sequence[sdc.Site], step: int) -> sdc.Strike:
        """What happens at a step of a program with these sites."""
        axes = sorted({axis for site in sites for axis, _ in site.mesh})
        if self.fault is None:
            return sdc.no_strike(axes=axes)
        exact = [site for site in sites if site.name == self.site]
        found = exact or [site for site in sites if matching(self.site)(site)]
        if len(found) != 1:
            names = ", ".join(site.name for site in found[:5])
            raise ValueError(
                f"simulation {self.text!r}: {len(found)} of the traced sites match site={self.site}"
                f"{': ' + names if found else ''}; name one that is traced"
            )
        room = self.fault.pattern.size(found[0].outputs[0].shape)
        struck = sdc.strike_on(found[0], self.fault, self.element, iteration=self.iteration, room=room, axes=axes)
        nothing = sdc.no_strike(room=room, axes=[*axes, *self.fault.at])
        return struck if step == self.step else nothing


def parse_simulation(text: str) -> Simulation:
    """Reads one simulated fault of a trace: `KIND,...,step=N,site=PATTERN`, or `none`.

    Kinds and patterns are those of `as_fault`. Further keys: `step`; `site`; `iteration`, one number for each
    enclosing loop; `element`, the first that is hit; any other key with a whole number names the device along an axis.
    """
    if text == "none":
        return Simulation(text)
    fault, term = read_hit("simulation", text, EXAMPLE, _OWN)
    if missing := [key for key in ("step", "site") if key not in term.common]:
        raise ValueError(f"simulation {text!r}: {missing[0]!r} is missing, as in {EXAMPLE!r}; or give none")
    return Simulation(text, fault, **{key: term.common[key] for key in _OWN if key in term.common})


def submodule_products(name: str) -> Selector:
    """The matrix products of a submodule, in the layers: what is recomputed belongs to the backward pass."""
    way, _, submodule = name.partition("/")
    passes: tuple[Direction, ...] = ("fwd",) if way == "fwd" else ("bwd", "remat")
    return products & direction(*passes) & scope(f"*/{submodule}/*", f"*/{submodule}")
