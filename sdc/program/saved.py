"""Values that the forward pass saves for the backward pass, as sites of their own.

A port is put between a saved value and its readers in the backward pass. A fault at the port corrupts what is in memory
between the passes, and leaves the forward pass as it is.
"""

from typing import Any, Literal

from jax._src import core
from jax.extend.core import primitives

from .identities import port_p


def pass_of(scope: str) -> Literal["fwd", "bwd", "remat"]:
    """Returns the pass to which a name stack belongs."""
    return "remat" if "rematted_computation" in scope else "bwd" if "transpose(" in scope else "fwd"


def with_saved(jaxpr: Any, names: tuple[str, ...] = ()) -> Any:
    """Returns a program with a port at each saved value; `names` is the name stack of the equation around it."""
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    stacks = {id(eqn): (*names, *_names(eqn)) for eqn in jaxpr.eqns}
    new = core.gensym()
    ports: dict[Any, Any] = {}

    def read(eqn: Any, var: Any) -> Any:
        if not isinstance(var, core.Var) or var not in made_by or not _is_later(stacks[id(eqn)]):
            return var
        maker = made_by[var]
        if maker.primitive is port_p or _is_later(stacks[id(maker)]) or not isinstance(var.aval, core.ShapedArray):
            return var
        if var not in ports:
            ports[var] = new(var.aval)
        return ports[var]

    readers = [
        eqn.replace(
            invars=[read(eqn, var) for var in eqn.invars],
            params={name: _inside(value, stacks[id(eqn)]) for name, value in eqn.params.items()},
        )
        for eqn in jaxpr.eqns
    ]
    eqns: list[Any] = []
    for old, eqn in zip(jaxpr.eqns, readers, strict=True):
        eqns.append(eqn)
        for var in old.outvars:
            if var in ports:
                params = {"direction": "saved", "path": _path(old, var)}
                info = old.source_info
                eqns.append(core.new_jaxpr_eqn([var], [ports[var]], port_p, params, core.no_effects, info, old.ctx))
    return jaxpr.replace(eqns=eqns)


def _inside(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_inside(part, names) for part in value)
    if isinstance(value, core.Jaxpr):  # on jax 0.12 with constants, or without
        return with_saved(value, names)
    inner = getattr(value, "jaxpr", None)
    return value.replace(jaxpr=with_saved(inner, names)) if isinstance(inner, core.Jaxpr) else value


def _path(eqn: Any, var: Any) -> str:
    """Returns the operation that computes a saved value, within the scope of an equation."""
    body = eqn.params.get("jaxpr")
    body = getattr(body, "jaxpr", body)
    if isinstance(body, core.Jaxpr) and len(body.outvars) == len(eqn.outvars):
        made_by = {out: one for one in body.eqns for out in one.outvars}
        inner = body.outvars[eqn.outvars.index(var)]
        while inner in made_by and made_by[inner].primitive is primitives.reduce_precision_p:  # of a saved value
            inner = made_by[inner].invars[0]
        if inner in made_by:
            return "/".join((*_names(made_by[inner]), _path(made_by[inner], inner)))
    return str(eqn.primitive.name)


def _names(eqn: Any) -> tuple[str, ...]:
    return tuple(name for name in str(eqn.source_info.name_stack).split("/") if name)


def _is_later(names: tuple[str, ...]) -> bool:
    return pass_of("/".join(names)) != "fwd"
