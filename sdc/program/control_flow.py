"""Control flow: a conditional that costs nothing where it is not taken, and what loops and branches are rebuilt of.

What a rule computes at a site is traced once for all sites of a shape, and on arrays of any sharding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lax.control_flow.conditionals import _switch_internal
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from .mesh import varying
from .reports import Report, Values
from .selectors import Tags

Tree = TypeVar("Tree")


def rarely(predicate: Bool[Array, ""], change: Callable[..., Tree], carried: Tree, *operands: Any) -> Tree:
    """`change(carried, *operands)` if the predicate holds, else `carried`, and without a copy of that.

    It is a loop of one turn or none. What goes through a loop stays where it is, while a conditional has a buffer of
    its own for its result, and copies there what it does not change. What `change` computes of other arrays than it is
    given, XLA may move out of the loop, and so compute always. Around collectives the predicate must be the same on all
    devices; what `change` returns may vary over no more mesh axes than `carried` and the operands.
    """
    carried, predicate = varying((carried, predicate), like=operands)

    def turn(state: tuple[Tree, Bool[Array, ""]]) -> tuple[Tree, Bool[Array, ""]]:
        before, again = state
        given, again = lax.optimization_barrier((operands, again))
        after = jax.tree.map(lambda new, old: varying(new, like=old), change(before, *given), before)
        return after, again & False

    with jax.named_scope(Tags.RARELY):
        after, _ = lax.while_loop(lambda state: state[1], turn, (carried, predicate))
    return after


def switch(index: Any, branches: Sequence[Callable[..., Any]], operands: Values, platforms: Any = None) -> Any:
    """As `lax.switch`, which would limit the index first: a number of a branch needs no limits, and they are sites."""
    return _switch_internal(index, branches, operands, branches_platforms=platforms)


@jax.named_scope(Tags.HIDDEN)
def zeros(shapes: Any) -> Any:
    """Reports of what did not run."""
    return varying(jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes))


def traced_here(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """A function that is traced here and not again, and the shapes of what it returns.

    JAX traces bodies of control flow several times over; where they are nested, the innermost one that often squared.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(structure, jaxpr_as_fun(closed)(*jax.tree.leaves(args)))

    return call, shapes


def while_any(check: Callable[..., Any], work: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Condition and body of a loop under `vmap`: it runs while any row goes on, and the others stay as they are."""

    def check_any(index: Any, carry: Values) -> tuple[Any, dict[str, Report]]:
        go_on, reports = check(index, carry)
        with jax.named_scope(Tags.HIDDEN):
            return jnp.any(go_on), reports

    def work_chosen(index: Any, carry: Values) -> tuple[Values, dict[str, Report]]:
        new, reports = work(index, carry)
        with jax.named_scope(Tags.HIDDEN):
            go_on, _ = check(index, carry)
            rows = [lax.expand_dims(go_on, range(go_on.ndim, x.ndim)) for x in carry]
            return [jnp.where(row, b, a) for row, a, b in zip(rows, carry, new, strict=True)], reports

    return check_any, work_chosen


def traced_once(
    function: Callable[..., tuple[Values, Report]], static_argnums: int | Sequence[int] = ()
) -> Callable[..., tuple[Values, Report]]:
    """Decorates what a rule computes: sites of the same shapes and types share one trace and one function of XLA.

    A program of a thousand sites is rewritten in a small multiple of the time that JAX takes to trace it.
    """

    @functools.partial(jax.jit, static_argnums=static_argnums)
    @functools.wraps(function)
    def traced(outs: Values, *others: Any) -> tuple[Values, Report]:
        meshes = map(_mesh, jax.tree.leaves((outs, others)))
        mesh = next((each for each in meshes if each is not None and each.explicit_axes), None)
        if mesh is None:  # XLA chooses how arrays are sharded
            return function(outs, *others)
        automatic = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
        shardings = [jax.typeof(x).sharding for x in outs]
        with jax.sharding.use_abstract_mesh(automatic):
            changed, report = function(*moved((outs, *others), automatic))
        new = list(changed)
        for number, (x, sharding) in enumerate(zip(new, shardings, strict=True)):
            if jax.typeof(x).sharding != sharding:  # what was on no mesh is the same on all of its devices
                new[number] = moved(x, mesh) if sharding.mesh.empty else jax.reshard(x, sharding)
        return new, moved(report, mesh)

    return traced


def _mesh(x: Any) -> Any:
    return jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None


def moved(tree: Any, mesh: Any) -> Any:
    """Arrays as those of a mesh of the same devices with axes of other types, not sharded over any explicit one.

    Arrays of no mesh stay what they are.
    """

    def move(x: Any) -> Any:
        before = _mesh(x)
        if before is None or before.empty or before == mesh:
            return x
        return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)))

    return jax.tree.map(move, tree)
