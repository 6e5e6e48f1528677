"""The mesh on which a step is, by its arguments."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding


def sharding_of(one: Any) -> NamedSharding | None:
    """How an array is sharded over a mesh; None where it is on none."""
    found = getattr(one, "sharding", None)
    return found if isinstance(found, NamedSharding) else None


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh of the first array that is on one."""
    found = (sharding_of(leaf) for leaf in jax.tree.leaves(tree))
    return next((each.mesh for each in found if each is not None and isinstance(each.mesh, Mesh)), None)


@contextlib.contextmanager
def on_mesh(tree: Any) -> Iterator[None]:
    """Traces where the mesh of arguments is known if its axes are explicit, as a program does that sets it once."""
    mesh = mesh_of(tree)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
