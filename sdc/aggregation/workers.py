"""The workers of data-parallel training: a mapped axis, and what every method here asks of it."""

from jax import lax
from jaxtyping import Array, Int32

from ..rewrite import bound_axes


def count_workers(axis_name: str) -> int:
    """Number of workers along a mapped axis.

    Raises:
        ValueError: the axis is not bound, or has fewer than two workers.
    """
    axes = bound_axes()
    if axis_name not in axes:
        raise ValueError(
            f"worker axis {axis_name!r} is not bound (bound: {sorted(axes) or 'none'}); "
            "call this under shard_map, pmap or vmap with that axis name"
        )
    if axes[axis_name] < 2:
        raise ValueError(f"worker axis {axis_name!r} has size {axes[axis_name]}; expected two workers or more")
    return axes[axis_name]


def this_worker(axis_name: str) -> Int32[Array, ""]:
    """Number of this worker along a mapped axis."""
    return lax.axis_index(axis_name)


def check_probability(name: str, value: float) -> None:
    """Raises ValueError unless `value` is a probability."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: expected a probability, between 0 and 1")
