"""What a rule computes at a site: traced once for all sites of a shape, and on arrays of any sharding."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .reports import Report, Values


def traced_once(
    function: Callable[..., tuple[Values, Report]], static_argnums: int | Sequence[int] = ()
) -> Callable[..., tuple[Values, Report]]:
    """Decorates what a rule computes: sites of the same shapes and types share one trace and one function of XLA.

    A program of a thousand sites is rewritten in a small multiple of the time that JAX takes to trace it.
    """

    @functools.partial(jax.jit, static_argnums=static_argnums)
    @functools.wraps(function)
    def traced(outs: Values, *others: Any) -> tuple[Values, Report]:
        mesh = _explicit_mesh((outs, others))
        if mesh is None:
            return function(outs, *others)
        automatic = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
        shardings = [jax.typeof(x).sharding for x in outs]
        with jax.sharding.use_abstract_mesh(automatic):
            new, report = function(*moved((outs, *others), automatic))
        back = [_as_before(x, sharding, mesh) for x, sharding in zip(new, shardings, strict=True)]
        return back, moved(report, mesh)

    return traced


def _explicit_mesh(tree: Any) -> Any:
    """The mesh of arrays whose types say how they are sharded; None where XLA chooses."""
    meshes = (_mesh(x) for x in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if mesh is not None and mesh.explicit_axes), None)


def _mesh(x: Any) -> Any:
    return jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None


def _as_before(x: Any, sharding: Any, mesh: Any) -> Any:
    """An array as it was sharded; what was on no mesh is the same on all of its devices."""
    if jax.typeof(x).sharding == sharding:
        return x
    return moved(x, mesh) if sharding.mesh.empty else jax.reshard(x, sharding)


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
