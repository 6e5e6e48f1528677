"""Mapped axes: which are bound here, and over which of them a value varies in the eyes of `shard_map`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from sdc._lazy import Lazy, jax, lax

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped

core: Any = Lazy("jax._src.core")


def bound_axes() -> dict[str, int]:
    """Names and sizes of the axes that collectives can use here: `shard_map`, `pmap` and named `vmap` axes."""
    return {str(name): size for name, size in core.get_axis_env().axis_sizes.items()}


def axis_size(axis_name: str, role: str) -> int:
    """Size of an axis over which two or more parties work; `role` is what one of them is called, such as `twin`.

    Raises:
        ValueError: the axis is not bound, or has size 1.
    """
    axes = bound_axes()
    if axis_name not in axes:
        other = f"name {' or '.join(map(repr, sorted(axes)))}, or " if axes else ""
        raise ValueError(
            f"{role} axis {axis_name!r} is not bound (bound: {sorted(axes) or 'none'}); "
            f"{other}call the step under shard_map, pmap or vmap with that axis name"
        )
    if axes[axis_name] < 2:
        raise ValueError(f"{role} axis {axis_name!r} has size {axes[axis_name]}; expected two {role}s or more")
    return axes[axis_name]


def varying(tree: Any, axes: Collection[str] | None = None) -> Any:
    """Casts arrays to vary over every manual mesh axis, which `shard_map` with `check_vma=True` wants of reports.

    Args:
        tree: arrays.
        axes: of these axes only.
    """
    manual = [axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axes is None or axis in axes]

    def cast(x: Any) -> Any:
        missing = tuple(axis for axis in manual if axis not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def manual_in_part() -> tuple[str, ...]:
    """The manual axes of a mesh of which XLA shards over others; none where all axes are of one kind.

    There XLA moves what it shards by collectives of the whole mesh: inside of a branch they hang, unless all devices
    take it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(mesh.manual_axes)
    others = [axis for axis in mesh.axis_names if axis not in manual and mesh.shape[axis] > 1]
    return manual if others else ()


def axis_place(axis_name: str) -> Any:
    """This device's index along a bound axis: `lax.axis_index`, also where a mesh is manual in part.

    There XLA's compiler for TPUs moves what tells the number of a device to where it means nothing, if a program asks
    for it at several places, and refuses the program. So it is told by a sum of which each device gets its part.
    """
    if not manual_in_part():
        return lax.axis_index(axis_name)
    size = lax.axis_size(axis_name)
    places = varying(jax.numpy.arange(size, dtype="int32"), [axis_name])
    return lax.psum_scatter(places, axis_name, tiled=True)[0] // size


def agreed(predicate: Any) -> Any:
    """A predicate that falls alike on a mesh that is manual in part: true everywhere where it is for any device."""
    axes = manual_in_part()
    return lax.pmax(varying(predicate).astype("int32"), axes) > 0 if axes else predicate


def typed_as(x: Shaped[Array, "*shape"], like: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Casts an array to vary over the axes over which `shard_map`'s type checker takes another one to vary."""
    missing = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(missing), to="varying") if missing else x
