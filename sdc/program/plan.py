"""Determines which equations of a program are sites, and which sites are selected: the first half of `rewrite`.

A matrix product of which only the transpose is used becomes a site in its transposed form. JAX computes the gradient of
a product with respect to the second factor as a product, followed by a transposition. XLA writes this product in the
layout in which it is used, so the transposition costs nothing; but if a tool reads the product itself, the
transposition copies the tensor. For TPUs and GPUs, the factors are therefore swapped first, so that the tool reads the
transposed product. The axes of such a site have the order of the gradient's axes.
"""

import dataclasses
import functools
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import core, source_info_util
from jax._src.custom_batching import custom_vmap_p
from jax._src.custom_derivatives import linear_call_p
from jax._src.interpreters import partial_eval
from jax._src.lax.control_flow.solves import linear_solve_p
from jax._src.lax.lax import composite_p
from jax._src.shard_map import shard_map_p
from jax._src.state.discharge import run_state_p
from jax.extend.core import primitives
from jax.sharding import NamedSharding

from .flop_counts import flops, product_flops
from .identities import mark_p, port_p, probe_p
from .mesh import compiled_for
from .saved import pass_of, with_saved
from .selectors import PRODUCTS, Direction, Predicate, Site, Skipped, Tags, probes


def _in_use_order(jaxpr: Any) -> Any:
    """Returns a program that computes each matrix product in the layout in which it is used."""
    uses = [*(var for eqn in jaxpr.eqns for var in eqn.invars), *jaxpr.outvars]
    count = Counter(var for var in uses if isinstance(var, core.Var))
    transposes = {
        eqn.invars[0]: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive is primitives.transpose_p and count.get(eqn.invars[0]) == 1
    }
    gone, eqns = set(), []
    for eqn in jaxpr.eqns:
        transpose = transposes.get(eqn.outvars[0]) if eqn.primitive is primitives.dot_general_p else None
        if transpose is not None and _swaps(eqn, transpose.params["permutation"]):
            (contracted, batch), (a, b) = eqn.params["dimension_numbers"], eqn.invars
            dimensions = tuple(reversed(contracted)), tuple(reversed(batch))
            params = {**eqn.params, "dimension_numbers": dimensions}
            eqns.append(eqn.replace(invars=[b, a], outvars=list(transpose.outvars), params=params))
            gone.add(id(transpose))
        elif id(eqn) not in gone:
            inside = {name: _inside(value) for name, value in eqn.params.items()}
            changed = any(inside[name] is not value for name, value in eqn.params.items())
            eqns.append(eqn.replace(params=inside) if changed else eqn)
    same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def on_mesh(value: Any, old: Any, new: Any) -> Any:
    """Returns a program, or a parameter of an equation, with another mesh of devices in place of a given one."""
    if isinstance(value, type(old)) and value == old:
        return new
    if isinstance(value, NamedSharding):
        return value.update(mesh=new) if value.mesh == old else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(on_mesh(part, old, new) for part in value)
    if isinstance(value, core.Jaxpr):  # on jax 0.12 with constants, or without
        eqns = [
            eqn.replace(params={name: on_mesh(one, old, new) for name, one in eqn.params.items()}) for eqn in value.eqns
        ]
        return value.replace(eqns=eqns)
    inner = getattr(value, "jaxpr", None)
    return value.replace(jaxpr=on_mesh(inner, old, new)) if isinstance(inner, core.Jaxpr) else value


def _swaps(product: Any, permutation: Any) -> bool:
    """Returns whether a transposition puts the axes of the second factor before the axes of the first."""
    if product.params.get("out_sharding") is not None:
        return False
    (contracted, _), (batched, _) = product.params["dimension_numbers"]
    outer = len(batched)
    rows = product.invars[0].aval.ndim - len(contracted) - outer
    axes = range(product.outvars[0].aval.ndim)
    return tuple(permutation) == (*axes[:outer], *axes[outer + rows :], *axes[outer : outer + rows])


def _inside(value: Any) -> Any:
    """Returns a parameter of an equation with `_in_use_order` applied to the programs in it."""
    if isinstance(value, tuple):
        parts = tuple(_inside(part) for part in value)
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    if isinstance(value, core.Jaxpr):  # on jax 0.12 with constants, or without
        return _in_use_order(value)
    inner = getattr(value, "jaxpr", None)
    if not isinstance(inner, core.Jaxpr) or (new := _in_use_order(inner)) is inner:
        return value
    return value.replace(jaxpr=new)


# Primitives that call one body, each with the parameter that holds the body.
CALLS = {custom_vmap_p: "call", linear_call_p: "callee"}
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
    core.call_p,
    composite_p,
    linear_solve_p,
    *CALLS,
)
# Primitives that move the numbers of their first input and compute nothing.
MOVING = (
    primitives.slice_p,
    primitives.dynamic_slice_p,
    primitives.squeeze_p,
    primitives.reshape_p,
    primitives.transpose_p,
    primitives.broadcast_in_dim_p,
)
# Primitives whose derivative differs from that of their body.
DERIVED = (primitives.custom_jvp_call_p, primitives.custom_vjp_call_p, linear_call_p, linear_solve_p)
LIBRARY = os.path.dirname(os.path.dirname(__file__))
# Subpackages whose lines do not count as the user's. Lines of `aggregation` do count, since steps are written with it.
ROOMS = ("program", "faults", "twins", "campaigns", "checksums", "guarding")
OWN = tuple(os.path.join(LIBRARY, room) + os.sep for room in ROOMS)

# Folders of installed libraries; their lines do not count as the user's either.
INSTALLED = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")})
NOTEBOOK = re.compile(r"[/\\]ipykernel_\d+[/\\]\d+\.py$")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The selection in one jaxpr: sites by equation, plans of inner jaxprs, and all sites in program order."""

    selected: dict[int, Site]
    inner: dict[int, tuple["Plan", ...]]
    sites: tuple[Site, ...]
    stored: dict[int, tuple[bool, ...]]  # see `Place.stored`
    outside: int  # number of axes that control flow around the jaxpr adds to reports


@dataclasses.dataclass
class Survey:
    """State of a walk over the sites of a program."""

    where: Predicate  # which sites are selected
    reason: Callable[[Site], str | None] = lambda site: None  # why the tool cannot handle a site, or None
    seen: Counter[str] = dataclasses.field(default_factory=Counter)  # number of sites seen with each name
    skipped: list[Skipped] = dataclasses.field(default_factory=list)  # sites that the tool cannot handle
    work: int = 0  # floating-point operations of a step

    def number(self, name: str) -> str:
        """Returns the unique name of a new site. Every site is numbered, so names are independent of the selection."""
        self.seen[name] += 1
        return name if self.seen[name] == 1 else f"{name}#{self.seen[name]}"

    def chooses(self, site: Site) -> bool:
        """Returns whether a site is selected; must be called exactly once for each site."""
        self.work += site.work
        reason = self.reason(site)
        if reason is not None:
            self.skipped.append(Skipped(site, reason))
        return reason is None and self.where(site)

    def shares(self) -> tuple[Skipped, ...]:
        def share(site: Site) -> float | None:
            return None if site.products is None or 0 in site.trips else site.products * site.runs / max(self.work, 1)

        return tuple(one._replace(share=share(one.site)) for one in self.skipped)


class Inside(NamedTuple):
    """Properties that sites inherit from the enclosing equations."""

    names: tuple[str, ...] = ()  # name stacks of the enclosing equations
    dims: tuple[str, ...] = ()  # the axes that the enclosing equations add to reports
    trips: tuple[int, ...] = ()  # see `Site.trips`
    mesh: tuple[tuple[str, int], ...] = ()  # see `Site.mesh`
    order: tuple[int | str, ...] = ()  # see `Site.order`
    leaves: int = 1  # depth at which the outputs of the enclosing equation leave their scope
    source: str = ""  # line of code that calls the enclosing equation
    users: bool = False  # whether that line is in the user's code


def live_program(closed: Any, *, saved: bool = False) -> Any:
    """Returns a program without its dead equations, which XLA would drop but a report would keep alive, and with ports
    at saved values, if `saved` asks for them."""
    jaxpr, consts = open_jaxpr(closed)
    jaxpr, _ = partial_eval.dce_jaxpr(
        partial_eval.convert_constvars_jaxpr(jaxpr), [True] * len(jaxpr.outvars), instantiate=True
    )
    # The layout of matrix products makes no difference on CPUs.
    jaxpr = jaxpr if compiled_for().platform == "cpu" else _in_use_order(jaxpr)
    return Bound(with_saved(jaxpr) if saved else jaxpr, consts)


class Bound(NamedTuple):
    """A jaxpr, and the constants to which its first inputs are bound."""

    jaxpr: Any
    consts: Sequence[Any]


def plan_sites(live: Bound, where: Predicate | Survey) -> Plan:
    """Finds the selected sites of a program; a survey also collects the sites that a tool cannot handle."""
    return _plan(live.jaxpr, Inside(), where if isinstance(where, Survey) else Survey(where))


def out_of_reach(jaxpr: Any, where: Predicate) -> list[str]:
    """Returns primitives, with source lines, that cannot be entered although `where` selects operations inside them."""
    found: list[str] = []
    for eqn in jaxpr.eqns:
        for body in core.jaxprs_in_params(eqn.params):
            inner = open_jaxpr(body)[0]
            if is_entered(eqn):
                found += out_of_reach(inner, where)
            elif _plan(inner, Inside(), Survey(where)).sites:
                found.append(f"{eqn.primitive.name} ({source_line(eqn)})")
    return found


def _plan(jaxpr: Any, inside: Inside, survey: Survey, stored: Sequence[bool] = ()) -> Plan:
    """Plans a jaxpr; `stored` says which of its inputs are in memory as they are."""
    kept = {var for var, known in zip(jaxpr.invars, stored, strict=False) if known}
    selected: dict[int, Site] = {}
    inner: dict[int, tuple[Plan, ...]] = {}
    of_inputs: dict[int, tuple[bool, ...]] = {}
    found: list[Site] = []
    names = [inside.names + _names(eqn.source_info.name_stack) for eqn in jaxpr.eqns]
    leaves = _leaves(jaxpr, names, inside)
    doubled = _doubled_ports(jaxpr)
    every = (*(var for eqn in jaxpr.eqns for var in eqn.invars), *jaxpr.outvars)
    used = {var for var in every if isinstance(var, core.Var)}
    for index, eqn in enumerate(jaxpr.eqns):
        here = inside._replace(names=names[index], order=(*inside.order, index), leaves=leaves[index])
        inputs = tuple(isinstance(var, core.Var) and var in kept for var in eqn.invars)
        if eqn.primitive in MOVING and inputs[0]:
            kept.update(eqn.outvars)
        line, users = user_line(eqn.source_info.traceback)
        # Equations of JAX's functions, such as `jax.nn.silu`, and of library layers have no line of the user's code.
        if users or (line and not inside.users):
            here = here._replace(source=line, users=users)
        if any(Tags.HIDDEN in name for name in here.names) or index in doubled:
            continue
        if is_entered(eqn):
            plans = tuple(
                _plan(open_jaxpr(body)[0], enter(eqn, number, here), survey, _passed_on(eqn, body, inputs))
                for number, body in enumerate(bodies(eqn))
            )
            if any(plan.sites for plan in plans):
                inner[index] = plans
                found.extend(site for plan in plans for site in plan.sites)
            continue
        # A write to a reference returns the old value, which is usually unused.
        site = _site(eqn, here, survey.number) if used.intersection(eqn.outvars) else None
        if site is not None and survey.chooses(site):
            selected[index], of_inputs[index] = site, inputs
            found.append(site)
        # A probe that cannot be reached must not count as checked.
        for body in () if eqn.primitive is mark_p else core.jaxprs_in_params(eqn.params):
            hidden = _plan(open_jaxpr(body)[0], here, Survey(lambda site: probes(site) and survey.where(site)))
            if hidden.sites:
                raise ValueError(
                    f"probe {hidden.sites[0].name!r} is inside the primitive {eqn.primitive.name!r} "
                    f"({source_line(eqn)}), which cannot be entered; move the probe outside it"
                )
    return Plan(selected, inner, tuple(found), of_inputs, len(inside.dims))


def _passed_on(eqn: Any, body: Any, stored: tuple[bool, ...]) -> Sequence[bool]:
    """Returns which inputs of a body are in memory as they are, given the same of the equation's inputs."""
    count = len(open_jaxpr(body)[0].invars)
    if eqn.primitive is primitives.scan_p:
        # An iteration that is alone, or one of several that are unrolled, is no loop in the compiled program.
        return [eqn.params["length"] > 1 and eqn.params["unroll"] == 1] * count
    if eqn.primitive is primitives.while_p:
        return [True] * count
    if eqn.primitive is primitives.cond_p:
        return stored[1:]
    return stored if count == len(stored) else ()


def is_entered(eqn: Any) -> bool:
    """Returns whether the body of an equation is walked; primitives of other libraries must be declared as calls."""
    if eqn.primitive is run_state_p:  # only kernels have uninitialized values, or cores with memories of their own
        started = all(eqn.params["is_initialized"])
        return started and not any(inner.primitive.name == "core_map" for inner in eqn.params["jaxpr"].eqns)
    called = getattr(eqn.primitive, "call_primitive", False) and "call_jaxpr" in eqn.params  # not in jax 0.12
    return called or eqn.primitive in ENTERED


@functools.lru_cache(4096)  # a scope has many equations
def _names(stack: Any) -> tuple[str, ...]:
    return tuple(name for name in str(stack).split("/") if name)


def _doubled_ports(jaxpr: Any) -> set[int]:
    """Returns the ports of an outer transformation that the marks of an inner one replace."""
    ports = {
        var: index
        for index, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive is port_p
        for var in (eqn.outvars[0] if eqn.params["direction"] == "arg" else eqn.invars[0],)
        if isinstance(var, core.Var)
    }
    marked = (
        (eqn.invars[1] if dict(eqn.params["params"])["direction"] == "arg" else eqn.outvars[0], eqn)
        for eqn in jaxpr.eqns
        if eqn.primitive is mark_p and eqn.params["of"] is port_p
    )
    found = ((ports[var], eqn) for var, eqn in marked if isinstance(var, core.Var) and var in ports)
    return {index for index, eqn in found if dict(eqn.params["params"]) == dict(jaxpr.eqns[index].params)}


def _leaves(jaxpr: Any, names: Sequence[tuple[str, ...]], inside: Inside) -> list[int]:
    """Returns, for each equation, the least depth at which a reader of its outputs is in another scope (`Site`)."""
    made_by = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    depth = [len(own) + 1 for own in names]

    def read(var: Any, reader: tuple[str, ...] | None) -> None:
        if isinstance(var, core.Literal) or var not in made_by:
            return
        index = made_by[var]
        if reader is None:  # the value leaves the body
            depth[index] = min(depth[index], inside.leaves, len(inside.names) + 1)
            return
        own = names[index]
        common = next((i for i, (a, b) in enumerate(zip(own, reader, strict=False)) if a != b), None)
        if common is None and len(reader) >= len(own):
            return  # the reader is in the same scope, or deeper
        depth[index] = min(depth[index], (min(len(own), len(reader)) if common is None else common) + 1)

    for index, eqn in enumerate(jaxpr.eqns):
        if any(Tags.HIDDEN in name for name in names[index]):
            continue  # the reader is an inner transformation, not the step
        for var in eqn.invars:
            read(var, names[index])
    for var in jaxpr.outvars:
        read(var, None)
    return depth


def _site(eqn: Any, inside: Inside, number: Callable[[str], str]) -> Site | None:
    """Returns the site of an equation; None if none of the equation's outputs has a value."""
    marked = eqn.primitive is mark_p
    primitive, params = (eqn.params["of"], dict(eqn.params["params"])) if marked else (eqn.primitive, eqn.params)
    operands = eqn.invars[eqn.params["outputs"] :] if marked else eqn.invars
    inputs, outputs = [var.aval for var in operands], [var.aval for var in eqn.outvars]
    if not any(_has_values(aval) for aval in outputs):
        return None
    scope = "/".join(inside.names)
    direction: Direction = pass_of(scope)
    name, probe, kind = "", None, primitive.name
    if primitive is port_p:
        direction = params["direction"]
        kind = {"arg": "argument", "out": "result"}.get(direction, "saved")
        inner = inside.names if direction == "saved" else ()
        name = "/".join((direction, *inner, params["path"])).rstrip("/")  # a step can return a single array
    elif primitive is probe_p:
        stated = params["direction"]
        if ("bwd" if stated == "bwd" else "fwd") not in params["directions"]:
            return None
        direction = direction if stated == "fwd" else stated
        probe = params["name"]
        name = f"{direction}/{probe}"
    products = product_flops(primitive, params, inputs, outputs)
    return Site(
        name=number(name or "/".join((direction, *inside.names, kind))),
        primitive=kind,
        direction=direction,
        probe=probe,
        scope=scope,
        source=inside.source,
        dims=inside.dims,
        trips=inside.trips,
        mesh=inside.mesh,
        outputs=_shapes(outputs),
        inputs=_shapes(inputs) if products != 0 or kind in PRODUCTS else (),
        flops=flops(kind, params, inputs, outputs),
        products=products,
        order=inside.order,
        leaves=inside.leaves,
    )


def _shapes(avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(
        jax.ShapeDtypeStruct(aval.shape, aval.dtype) if _has_values(aval) else jax.ShapeDtypeStruct((0,), bool)
        for aval in avals
    )


def _has_values(aval: Any) -> bool:
    """Returns whether an output has bits; tokens, references and the zero tangents of integers have none."""
    return isinstance(aval, core.ShapedArray) and aval.dtype != jax.dtypes.float0


def source_line(eqn: Any) -> str:
    """Returns the line of the user's code that created an equation; for a probe, the line that calls `probe`."""
    return user_line(eqn.source_info.traceback)[0]


def user_line(traceback: Any) -> tuple[str, bool]:
    """Returns the line of code that best describes a traceback, and whether this line is in the user's own code."""
    first = ""
    for frame in source_info_util.user_frames(traceback):
        name = frame.file_name
        if os.path.dirname(name) == LIBRARY or name.startswith(OWN):
            continue
        line = f"{_shown(name)}:{frame.start_line} ({frame.function_name})"
        if name.startswith(LIBRARY + os.sep) or not name.startswith(INSTALLED):
            return line, True
        first = first or line
    return first, False


def _shown(name: str) -> str:
    """Returns the name of a file for people: of an installed library without its folder, and of a notebook's cell
    without the temporary file."""
    if NOTEBOOK.search(name):
        return "notebook cell"
    folder = max((folder for folder in INSTALLED if name.startswith(folder)), key=len, default="")
    return name[len(folder) :]


def enter(eqn: Any, number: int, here: Inside) -> Inside:
    """Returns the properties that the sites in body `number` of an equation inherit."""
    order: tuple[int | str, ...] = (*here.order, number)
    if eqn.primitive is primitives.scan_p:
        order = (*here.order, "reversed" if eqn.params["reverse"] else "scan")
        return here._replace(dims=(*here.dims, "scan"), trips=(*here.trips, eqn.params["length"]), order=order)
    if eqn.primitive is primitives.while_p:
        return here._replace(trips=(*here.trips, 0), order=(*order, "while"))
    if eqn.primitive is shard_map_p:
        axes = manual_axes(eqn)
        sizes = tuple((axis, int(eqn.params["mesh"].shape[axis])) for axis in axes)
        return here._replace(dims=here.dims + axes, mesh=here.mesh + sizes, order=order)
    return here._replace(order=order)


def manual_axes(eqn: Any) -> tuple[str, ...]:
    """Returns the mesh axes that a `shard_map` makes manual, in the order of the mesh."""
    return tuple(str(axis) for axis in eqn.params["mesh"].axis_names if axis in eqn.params["newly_manual_axes"])


def bodies(eqn: Any) -> tuple[Any, ...]:
    """Returns the jaxprs that run as part of an equation."""
    if eqn.primitive in CALLS:
        return (eqn.params[CALLS[eqn.primitive]],)
    if eqn.primitive is linear_solve_p:
        return (eqn.params["jaxprs"].solve,)
    if eqn.primitive is primitives.while_p:
        return eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    if eqn.primitive is primitives.cond_p:
        return tuple(eqn.params["branches"])
    return (eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"],)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the open jaxpr and its constants; jax 0.10 has open and closed jaxprs, whereas jax 0.12 has one class."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())
