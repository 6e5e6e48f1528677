"""The part of a program from its first selected operation to its last, as a region that can run twice.

The region lies at the greatest depth that contains all selected operations: in the body of the loop over microsteps if
there is such a loop, else at the top level. With `whole`, the region includes the loop over microsteps. Loops over
layers are always included, since each of them holds the operations of only one pass.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jax._src import core, source_info_util
from jax._src.effects import ordered_effects
from jax._src.shard_map import shard_map_p
from jax.extend.core import Primitive, primitives

from .plan import Bound, Plan, open_jaxpr, source_line
from .reports import Report, Rule, Values
from .selectors import Site

region_p = Primitive("region")  # represents the region in the enclosing program; it is evaluated, and never bound


class Region(NamedTuple):
    """A part of a program that holds all selected sites."""

    sites: tuple[Site, ...]  # sites in the region, in program order
    outside: int  # number of leading axes in `Site.dims` from enclosing control flow; the region's reports lack them
    # A function that evaluates the region with a rule, given the indices of the enclosing loops and the input arrays
    run: Callable[[Rule, Any, Values], tuple[Values, dict[str, Report]]]


class Around(Protocol):
    """A function that runs a region, given the indices of the enclosing loops and the region's inputs."""

    whole: bool
    """Whether the region includes the loop over microsteps; otherwise, the region lies in the body of this loop."""

    def __call__(self, region: Region, iteration: Any, inputs: Values) -> tuple[Values, dict[str, Report]]: ...


class _Part(NamedTuple):
    """The attributes of a jaxpr that `evaluate` reads."""

    constvars: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Any]


class _Equation(NamedTuple):
    """The attributes of an equation that `evaluate` reads."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    primitive: Any
    params: dict[str, Any]
    source_info: Any = source_info_util.SourceInfo(None, source_info_util.new_name_stack())
    ctx: Any = types.SimpleNamespace(manager=contextlib.nullcontext())


def with_region(live: Bound, plan: Plan, *, whole: bool) -> tuple[Bound, Plan]:
    """Returns a program in which one equation represents the region with all sites, and the plan of this program."""
    part, plan = _outlined(live.jaxpr, plan, whole)
    return Bound(part, live.consts), plan


def _outlined(jaxpr: Any, plan: Plan, whole: bool) -> tuple[_Part, Plan]:
    places = sorted({*plan.selected, *plan.inner})
    first, last = places[0], places[-1]
    if first == last and not plan.selected and _holds_steps(jaxpr.eqns[first], plan.inner[first], whole):
        eqn, (inside,) = jaxpr.eqns[first], plan.inner[first]
        held, consts = open_jaxpr(eqn.params["jaxpr"])
        body, inside = _outlined(held, inside, whole)
        new = eqn.replace(params={**eqn.params, "jaxpr": Bound(body, consts)})
        part = _Part(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, _with(jaxpr.eqns, first, last, new))
        return part, dataclasses.replace(plan, inner={first: (inside,)})
    eqns = jaxpr.eqns[first : last + 1]
    made = {var: None for eqn in eqns for var in eqn.outvars}
    later = [var for eqn in jaxpr.eqns[last + 1 :] for var in eqn.invars] + list(jaxpr.outvars)
    read = {var: None for eqn in eqns for var in eqn.invars if isinstance(var, core.Var) and var not in made}
    used = {var: None for var in later if isinstance(var, core.Var) and var in made}
    if any(not isinstance(var.aval, core.ShapedArray) for var in (*read, *used)):
        raise ValueError(
            "the step changes, in place, arrays that exist before its first compared value, so it cannot be "
            "repeated from that value; pass exchange='probe'"
        )
    for eqn in eqns:
        if any(ordered_effects.contains(effect) for effect in eqn.effects):
            raise ValueError(
                f"{eqn.primitive.name} ({source_line(eqn)}) has ordered effects, which a repetition would duplicate; "
                "pass ordered=False to the callback, or exchange='probe' to lockstep"
            )
    body = _Part((), list(read), list(used), eqns)
    region = _Equation(body.invars, body.outvars, region_p, {"jaxpr": body})
    selected, inner, stored = (_moved(part, first) for part in (plan.selected, plan.inner, plan.stored))
    inside = Plan(selected, inner, plan.sites, stored, plan.outside)
    part = _Part(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, _with(jaxpr.eqns, first, last, region))
    return part, Plan({}, {first: (inside,)}, plan.sites, {}, plan.outside)


def _holds_steps(eqn: Any, plans: tuple[Plan, ...], whole: bool) -> bool:
    """Returns whether an equation is a call, or a loop with both passes in each iteration, and so holds whole steps."""
    if eqn.primitive in (primitives.jit_p, shard_map_p):
        return True
    if whole or eqn.primitive is not primitives.scan_p:
        return False
    return {"fwd", "bwd"} <= {site.direction for site in plans[0].sites}


def _with(eqns: Sequence[Any], first: int, last: int, new: Any) -> list[Any]:
    """Returns the equations, with those from `first` to `last` replaced by one new equation."""
    return [*eqns[:first], new, *eqns[last + 1 :]]


def _moved(numbered: dict[int, Any], first: int) -> dict[int, Any]:
    return {number - first: what for number, what in numbered.items()}
