"""The environment of a program: the mapped axes that are bound, and the devices for which it is compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from sdc._lazy import Lazy, jax, lax

core: Any = Lazy("jax._src.core")


def bound_axes() -> dict[str, int]:
    """Returns the names and sizes of the mapped axes (`shard_map`, `pmap`, `vmap`) over which collectives can run."""
    return {str(name): size for name, size in core.get_axis_env().axis_sizes.items()}


def axis_size(axis_name: str, role: str) -> int:
    """Returns the size of an axis, which must be at least two; `role` is the noun for a member, such as `twin`."""
    axes = bound_axes()
    if axis_name not in axes:
        other = f"name {' or '.join(map(repr, sorted(axes)))}, or " if axes else ""
        raise ValueError(
            f"{role} axis {axis_name!r} is not bound (bound: {sorted(axes) or 'none'}); "
            f"{other}call the step under shard_map, pmap or vmap with that axis name"
        )
    if axes[axis_name] < 2:
        raise ValueError(f"{role} axis {axis_name!r} has size {axes[axis_name]}; expected at least two {role}s")
    return axes[axis_name]


def varying(tree: Any, axes: Collection[str] | None = None, *, like: Any = None) -> Any:
    """Casts arrays so that they vary over manual mesh axes, as `shard_map` with `check_vma=True` requires for reports.

    Args:
        tree: arrays.
        axes: axes over which the arrays are to vary; by default, all manual axes.
        like: arrays; if given, the result varies only over axes over which at least one of these arrays varies.
    """
    if like is not None:
        axes = {axis for x in jax.tree.leaves(like) for axis in jax.typeof(x).manual_axis_type.varying}
    manual = [axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axes is None or axis in axes]

    def cast(x: Any) -> Any:
        missing = tuple(axis for axis in manual if axis not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def manual_in_part() -> tuple[str, ...]:
    """Returns the manual axes of a partly manual mesh; an empty tuple if all axes are of one kind.

    On a partly manual mesh, XLA reshards by collectives over all devices; inside a branch, these collectives hang
    unless all devices take the branch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(mesh.manual_axes)
    others = [axis for axis in mesh.axis_names if axis not in manual and mesh.shape[axis] > 1]
    return manual if others else ()


def agreed(predicate: Any) -> Any:
    """Makes a predicate equal on all devices of a partly manual mesh: true if it is true on at least one device."""
    axes = manual_in_part()
    return lax.pmax(varying(predicate).astype("int32"), axes) > 0 if axes else predicate


class Platform(NamedTuple):
    """The devices for which a program is traced, which need not be devices of this process."""

    platform: str  # `cpu`, `gpu` or `tpu`
    kind: str  # JAX's `device_kind`, such as `TPU v5 lite`
    whole: bool  # whether each array is on one device, as required by kernels that the compiler cannot partition


_target: ContextVar[Platform | None] = ContextVar("target", default=None)


def compiled_for() -> Platform:
    """Returns the devices of the mesh if there is one, else those of `compiling_for`, else those of this process.

    Arrays are whole inside a `shard_map` over all axes of the mesh, or if there is no mesh and only one device.
    Otherwise, arrays do not count as whole, since the compiler may partition them, even over axes of size one.
    """
    mesh, found = jax.sharding.get_abstract_mesh(), _target.get()
    if found is None:
        found = Platform(str(jax.default_backend()), str(jax.devices()[0].device_kind), jax.device_count() == 1)
    if (device := mesh.abstract_device) is not None:
        found = found._replace(platform=str(device.platform), kind=str(device.device_kind))
    return found if mesh.empty else found._replace(whole=set(mesh.axis_names) == set(mesh.manual_axes))


@contextmanager
def compiling_for(platform: str, *, whole: bool, kind: str = "") -> Iterator[None]:
    """Makes traces within the block apply to the given devices, which `compiled_for` then returns.

    Clears JAX's caches, because earlier traces may have been for other devices, which JAX does not track.
    """
    jax.clear_caches()
    token = _target.set(Platform(platform, kind, whole))
    try:
        yield
    finally:
        _target.reset(token)
        jax.clear_caches()
