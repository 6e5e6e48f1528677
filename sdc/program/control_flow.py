"""Control flow: a conditional that costs nothing if its branch is not taken, and parts of rewritten loops and branches.

The computation of a rule is traced once for all sites with equal shapes, however their arrays are sharded.
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
    """Returns `change(carried, *operands)` if the predicate is true, else `carried` without a copy.

    The conditional is a loop of at most one iteration. Values carried through a loop stay in place, whereas a
    `lax.cond` has a separate buffer for its result and copies unchanged values into it. If `change` uses arrays other
    than its arguments, XLA may hoist computations on these arrays out of the loop; these computations then always run.
    If `change` contains collectives, the predicate must be the same on all devices. The results of `change` may vary
    only over mesh axes over which `carried` or an operand varies.
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
    """Applies one of the branches, as `lax.switch` does, but without clamping the index (clamping adds sites)."""
    return _switch_internal(index, branches, operands, branches_platforms=platforms)


@jax.named_scope(Tags.HIDDEN)
def zeros(shapes: Any) -> Any:
    """Returns zeros of the given shapes: the reports of operations that did not run."""
    return varying(jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes))


def traced_here(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """Traces a function once; returns a function that evaluates the trace, and the shapes of its results.

    JAX traces bodies of control flow several times, and nesting multiplies the number of traces at each level.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(structure, jaxpr_as_fun(closed)(*jax.tree.leaves(args)))

    return call, shapes


def while_any(check: Callable[..., Any], work: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the condition and body of a loop under `vmap`, which runs until all rows end and keeps ended rows."""

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
    """Decorates the computation of a rule so that sites with equal shapes and dtypes share one XLA function.

    As a result, rewriting a program with a thousand sites takes a small multiple of the time that JAX takes to trace
    it.
    """

    @functools.partial(jax.jit, static_argnums=static_argnums)
    @functools.wraps(function)
    def traced(outs: Values, *others: Any) -> tuple[Values, Report]:
        spaces = [jax.typeof(x).memory_space for x in outs]
        new, report = placed([_in(jax.memory.Space.Device, x) for x in outs], *others)
        return [_in(space, x) for space, x in zip(spaces, new, strict=True)], report

    def placed(outs: Values, *others: Any) -> tuple[Values, Report]:
        meshes = map(_mesh, jax.tree.leaves((outs, others)))
        here = jax.sharding.get_abstract_mesh()
        mesh = next((each for each in meshes if each is not None and each.explicit_axes), here)
        if not mesh.explicit_axes:  # XLA chooses the shardings
            return function(outs, *others)
        automatic = _automatic(mesh)
        shardings = [jax.typeof(x).sharding for x in outs]
        with jax.sharding.use_abstract_mesh(automatic):
            changed, report = function(*moved((outs, *others), automatic))
        new = list(changed)
        for number, (x, sharding) in enumerate(zip(new, shardings, strict=True)):
            if jax.typeof(x).sharding != sharding:  # arrays that were not on a mesh become replicated
                new[number] = moved(x, mesh) if sharding.mesh.empty else jax.reshard(x, sharding)
        return new, moved(report, mesh)

    return traced


def _in(space: Any, x: Any) -> Any:
    """Returns an array in a memory space (of the device or of its host): outside of the device, nothing is computed."""
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def closable(tree: Tree) -> Tree:
    """Returns arrays over which a rule can close wherever its sites are.

    JAX does not close a fully manual `shard_map` over arrays on explicit axes, so these arrays move to automatic axes.
    """

    def free(x: Any) -> Any:
        mesh = _mesh(x)
        if mesh is None or not mesh.explicit_axes:
            return x
        automatic = _automatic(mesh)
        with jax.sharding.use_abstract_mesh(automatic), jax.named_scope(Tags.HIDDEN):
            return moved(x, automatic)

    return jax.tree.map(free, tree)


def _automatic(mesh: Any) -> Any:
    return mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))


def _mesh(x: Any) -> Any:
    return jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None


def moved(tree: Any, mesh: Any) -> Any:
    """Moves arrays to a mesh of the same devices with other axis types, leaving them unsharded over explicit axes.

    Arrays without a mesh are unchanged.
    """

    def move(x: Any) -> Any:
        before = _mesh(x)
        if before is None or before.empty or before == mesh:
            return x
        return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)))

    return jax.tree.map(move, tree)
