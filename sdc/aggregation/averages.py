"""The mean over all replicas: as one all-reduce, or in two exchanges beside which a compiler can schedule products.

Compilers for TPUs make one blocking operation of an all-reduce, whatever they are asked, and of an exchange of parts
(`all_to_all`) one that begins, lets others run, and ends. So each worker there receives its part of all replicas, takes
the mean of it, and sends that to all: what a ring's all-reduce sends (Patarasu and Yuan, *Bandwidth optimal all-reduce
algorithms*, 2009, section 3), and in the type of the parameters, where sums on the way would need a wider one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from ..program import axis_size, compiled_for, is_whole, typed_as
from .assignment import Tree
from .workers import at_least_float32

WORTH = 1 << 20
"""Bytes of an array from which on two exchanges are worth it: compilers send small all-reduces together."""
_OPTIONS: dict[str, dict[str, bool]] = {"tpu": {"xla_tpu_enable_async_all_to_all": True}}


def overlap_options(platform: str | None = None) -> dict[str, bool]:
    """Options of the compiler with which the average of `overlapped` goes on beside products.

    Args:
        platform: `cpu`, `gpu` or `tpu`; by default that of the devices in use.

    Returns:
        What `jax.jit` takes as `compiler_options`; empty where none is needed.

    Example:
        >>> import jax
        >>> from sdc.aggregation import overlap_options
        >>> step = jax.jit(lambda x: x + 1, compiler_options=overlap_options())
        >>> overlap_options("tpu")
        {'xla_tpu_enable_async_all_to_all': True}
    """
    return dict(_OPTIONS.get(compiled_for() if platform is None else platform, {}))


def has_mean(leaf: Any) -> bool:
    """Whether a leaf is of floats or complex numbers; counters, keys and the like are the same everywhere already."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def replica_mean(tree: Tree, axis_name: str) -> Tree:
    """The mean over all replicas, bitwise the same on each; leaves that are no floats or complex numbers are kept.

    Sums are at least float32.
    """
    return narrowed(jax.tree.map(lambda leaf: _reduced(leaf, axis_name) if has_mean(leaf) else leaf, tree), tree)


def wide_mean(tree: Tree, axis_name: str) -> Tree:
    """The same, at least float32, in the form that the compiler can overlap; there it is rounded on the way."""
    return jax.tree.map(lambda leaf: _mean(jnp.asarray(leaf), axis_name) if has_mean(leaf) else leaf, tree)


def narrowed(wide: Tree, like: Tree) -> Tree:
    """In the types of another tree."""
    return jax.tree.map(lambda x, leaf: x.astype(jnp.result_type(leaf)) if has_mean(leaf) else leaf, wide, like)


def _mean(x: Num[Array, "*shape"], axis_name: str) -> Num[Array, "*shape"]:
    workers = axis_size(axis_name, "worker")
    axis = next((axis for axis, side in enumerate(x.shape) if side and side % workers == 0), None)
    if axis is None or x.nbytes < WORTH or not _on_links(axis_name):
        return _reduced(x, axis_name)
    return _exchanged(x, axis_name, axis, workers)


def _on_links(axis_name: str) -> bool:
    """Whether the workers are devices that have links, and no other axis is left to the compiler to share out."""
    return axis_name in jax.sharding.get_abstract_mesh().manual_axes and is_whole() and compiled_for() != "cpu"


def _reduced(leaf: Any, axis_name: str) -> Num[Array, "*shape"]:
    leaf = jnp.asarray(leaf)
    return lax.pmean(leaf.astype(at_least_float32(leaf.dtype)), axis_name)


def _exchanged(x: Num[Array, "*shape"], axis_name: str, axis: int, workers: int) -> Num[Array, "*shape"]:
    wide = at_least_float32(x.dtype)
    parts = jnp.stack(jnp.split(x, workers, axis)) if axis else x.reshape(workers, -1, *x.shape[1:])
    mine = lax.all_to_all(parts, axis_name, 0, 0)
    mean = (jnp.sum(mine.astype(wide), axis=0) / workers).astype(x.dtype)
    all_parts = lax.all_to_all(jnp.broadcast_to(mean, mine.shape), axis_name, 0, 0)
    whole = jnp.concatenate(list(all_parts), axis) if axis else all_parts.reshape(x.shape)
    return typed_as(whole.astype(wide), x)
