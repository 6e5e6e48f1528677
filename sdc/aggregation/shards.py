"""Parameters that are sharded over the workers' axis (FSDP, ZeRO-3): each worker holds a part of them, all of them are
gathered for a step, and gradients are reduced and scattered.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .assignment import Tree
from .workers import at_least_float32


@dataclasses.dataclass(frozen=True)
class Shards:
    """The division of parameters among workers, and the collectives that it requires.

    Attributes:
        axis_name: the axis of the workers; the methods, except `specs`, require that it is bound.
        dims: for each parameter, the dimension along which workers hold parts; None if each has the whole parameter.
        within: the partition over the other axes of the dimensions that are not divided among workers.
    """

    axis_name: str
    dims: tuple[int | None, ...]
    within: tuple[P, ...]

    def specs(self, params: Tree) -> Tree:
        """Returns the partition of the parameters over this axis only, as `shard_map` takes it."""
        return self._map(lambda dim, within, leaf: P() if dim is None else P(*[None] * dim, self.axis_name), params)

    def gather(self, params: Tree) -> Tree:
        """Returns whole parameters."""

        def whole(dim: int | None, within: P, leaf: Array) -> Array:
            if dim is None:
                return leaf
            collective = functools.partial(lax.all_gather, axis_name=self.axis_name, axis=dim, tiled=True)
            return _locally(collective, within)(leaf)

        return self._map(whole, params)

    def sum(self, tree: Tree) -> Tree:
        """Returns this worker's parts of the sum over workers, in float32 or wider; a reduce-scatter where parameters
        are divided, an all-reduce elsewhere."""

        def one(dim: int | None, within: P, leaf: Array) -> Array:
            wide = leaf.astype(at_least_float32(leaf.dtype))
            if dim is None:
                return lax.psum(wide, self.axis_name)
            collective = functools.partial(
                lax.psum_scatter, axis_name=self.axis_name, scatter_dimension=dim, tiled=True
            )
            return _locally(collective, within)(wide)

        return self._map(one, tree)

    def agree(self, tree: Tree) -> Tree:
        """Replaces parts that all workers hold by those of the first worker, so that they are the same on all."""

        def one(dim: int | None, within: P, leaf: Array) -> Array:
            if dim is not None:
                return leaf
            wide = leaf.astype(at_least_float32(leaf.dtype))
            first = lax.axis_index(self.axis_name) == 0
            return lax.psum(jnp.where(first, wide, 0), self.axis_name).astype(leaf.dtype)

        return self._map(one, tree)

    def _map(self, one: Callable[[int | None, P, Array], Any], tree: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, [one(*each) for each in zip(self.dims, self.within, leaves, strict=True)])


def _locally(collective: Callable[[Array], Array], within: P) -> Callable[[Array], Array]:
    """Returns the collective with all axes manual: each device sends its part. XLA would first gather what is sharded
    over automatic axes."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {axis for axis in mesh.axis_names if axis not in mesh.manual_axes}
    if not automatic:
        return collective
    return jax.shard_map(collective, in_specs=within, out_specs=within, axis_names=automatic, check_vma=False)
