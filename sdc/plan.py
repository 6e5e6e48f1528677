"""Which equations of a program are sites, and which of them are selected: the first half of `rewrite`.

This file and `rewrite.py` are the only ones that know the internals of JAX.
"""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax._src import core, source_info_util
from jax._src.interpreters import partial_eval
from jax._src.shard_map import shard_map_p
from jax.extend.core import primitives

from .sites import Direction, Site, Where, probe_p, probes

# The primitives whose bodies are walked.
ENTERED = (
    primitives.jit_p,
    primitives.remat_p,
    primitives.scan_p,
    primitives.while_p,
    primitives.cond_p,
    shard_map_p,
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
    primitives.closed_call_p,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is selected in one jaxpr: sites by equation, plans of the jaxprs inside equations, all sites in order."""

    selected: dict[int, Site]
    inner: dict[int, tuple["Plan", ...]]
    sites: tuple[Site, ...]


class Scope(NamedTuple):
    """The enclosing equations: their name stack and the report axes that they add."""

    names: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()


def live_program(closed: Any) -> Any:
    """The program without dead equations: XLA drops those, and a report would keep them alive."""
    jaxpr, consts = open_jaxpr(closed)
    jaxpr, _ = partial_eval.dce_jaxpr(
        partial_eval.convert_constvars_jaxpr(jaxpr), [True] * len(jaxpr.outvars), instantiate=True
    )
    return Bound(jaxpr, consts)


class Bound(NamedTuple):
    """A jaxpr whose first inputs are bound to constants."""

    jaxpr: Any
    consts: Sequence[Any]


def plan_sites(live: Bound, where: Where) -> Plan:
    """Finds the sites of a program that `where` selects."""
    return _plan(live.jaxpr, where, Scope(), Counter())


def _plan(jaxpr: Any, where: Where, scope: Scope, seen: Counter[str]) -> Plan:
    selected: dict[int, Site] = {}
    inner: dict[int, tuple[Plan, ...]] = {}
    found: list[Site] = []
    for index, eqn in enumerate(jaxpr.eqns):
        names = scope.names + tuple(name for name in [str(eqn.source_info.name_stack)] if name)
        site = _site(eqn, names, scope.dims)
        if site is not None and where(site):
            seen[site.name] += 1
            if seen[site.name] > 1:
                site = dataclasses.replace(site, name=f"{site.name}#{seen[site.name]}")
            selected[index] = site
            found.append(site)
        inside = Scope(names, scope.dims + _dims(eqn))
        if eqn.primitive in ENTERED:
            plans = tuple(_plan(open_jaxpr(body)[0], where, inside, seen) for body in bodies(eqn))
            if any(plan.sites for plan in plans):
                inner[index] = plans
                found.extend(site for plan in plans for site in plan.sites)
        else:
            _refuse_hidden_probes(eqn, where, inside)
    return Plan(selected, inner, tuple(found))


def _refuse_hidden_probes(eqn: Any, where: Where, scope: Scope) -> None:
    """A probe that cannot be reached must not pass for a probe that was checked."""
    for body in core.jaxprs_in_params(eqn.params):
        hidden = _plan(open_jaxpr(body)[0], lambda site: probes(site) and where(site), scope, Counter())
        if hidden.sites:
            raise ValueError(
                f"probe {hidden.sites[0].name!r} lies inside the primitive {eqn.primitive.name!r} "
                f"({_source(eqn)}), which cannot be entered; move the probe outside it"
            )


def _site(eqn: Any, names: tuple[str, ...], dims: tuple[str, ...]) -> Site | None:
    scope = "/".join(names)
    direction: Direction = "remat" if "rematted_computation" in scope else "bwd" if "transpose(" in scope else "fwd"
    if eqn.primitive is not probe_p:
        name = "/".join((direction, *names, eqn.primitive.name))
        return Site(name, eqn.primitive.name, direction, None, scope, _source(eqn), dims)
    stated = eqn.params["direction"]
    if ("bwd" if stated == "bwd" else "fwd") not in eqn.params["directions"]:
        return None
    direction = direction if stated == "fwd" else stated
    probe = eqn.params["name"]
    return Site(f"{direction}/{probe}", probe_p.name, direction, probe, scope, _source(eqn), dims)


def _source(eqn: Any) -> str:
    """The line of the user's code that an equation comes from; for a probe, the line that calls `probe`."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if frame.file_name != inspect.getfile(Site):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return ""


def _dims(eqn: Any) -> tuple[str, ...]:
    if eqn.primitive is primitives.scan_p:
        return ("scan",)
    if eqn.primitive is shard_map_p:
        return manual_axes(eqn)
    return ()


def manual_axes(eqn: Any) -> tuple[str, ...]:
    """The mesh axes that a `shard_map` makes manual, in the order of the mesh."""
    return tuple(str(axis) for axis in eqn.params["mesh"].axis_names if axis in eqn.params["newly_manual_axes"])


def bodies(eqn: Any) -> tuple[Any, ...]:
    if eqn.primitive is primitives.while_p:
        return eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    if eqn.primitive is primitives.cond_p:
        return tuple(eqn.params["branches"])
    return (eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"],)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Jaxpr and constants: jax 0.10 has open and closed jaxprs, jax 0.12 has one class for both."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())
