"""The workers of data-parallel training: a mapped axis, and the checks that all methods need."""

from __future__ import annotations

from typing import Any

from sdc._lazy import jax, jnp, lax

from ..program import axis_size


def count_workers(axis_name: str) -> int:
    """Returns the number of workers along a mapped axis."""
    check_axis("axis_name", axis_name)
    return axis_size(axis_name, "worker")


def sums_by_itself(axis_name: str) -> bool:
    """Returns whether `shard_map` checks types, and therefore sums derivatives over this axis."""
    return axis_name in jax.typeof(lax.axis_index(axis_name)).manual_axis_type.varying


def at_least_float32(dtype: Any) -> Any:
    """Returns the type in which to sum over workers, float32 or wider, even if JAX's implicit promotion is off."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def check_axis(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is the name of one axis."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r}: expected the name of one mapped axis, as a str")


def check_probability(name: str, value: float, alternative: str = "") -> None:
    """Raises ValueError unless `value` is a probability; `alternative` describes other valid values in the message."""
    try:
        fine = 0 <= value <= 1
    except TypeError:
        fine = False
    if not fine:
        raise ValueError(
            f"{name}={value!r}: expected a probability, between 0 and 1{alternative and ', ' + alternative}"
        )


def check_some(name: str, value: int | None, of: str) -> None:
    """Raises ValueError unless a count is None or at least 1."""
    if value is not None and value < 1:
        raise ValueError(f"{name}={value}: expected a number of {of}, at least 1")


def check_count(name: str, value: Any, most: int) -> None:
    """Raises ValueError unless `value` is from 0 to `most`, or traced."""
    if not isinstance(value, jax.core.Tracer) and not 0 <= int(value) <= most:
        raise ValueError(f"{name}={int(value)}: expected a number of micro-batches from 0 to {most}")
