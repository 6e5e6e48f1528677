"""Digests of the shards into which XLA divides an array under automatic sharding, by device."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt32

from ..program import Place, Values, traced_once
from ..twins import DigestRule, digest


class ShardDigestRule(DigestRule):
    """The rule that takes the digests of an operation's results on each device: those of result 0 in the order of the
    mesh, then those of result 1, and so on.

    Inside `shard_map`, and for the sites in `whole`, it takes the digests of whole results instead.
    """

    def __init__(self, devices: int, whole: Collection[str]) -> None:
        """Creates the rule for a mesh with a number of devices."""
        self._devices, self._whole = devices, whole

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Any]:
        if place.site.mesh or place.site.name in self._whole:
            return super().__call__(place, bind, *inputs)
        return _digested(bind(*inputs), self._devices)


@functools.partial(traced_once, static_argnums=1)
def _digested(outs: Values, devices: int) -> tuple[Values, UInt32[Array, "n 2"]]:
    outs = jax.lax.optimization_barrier(outs)  # as for whole results
    return outs, jnp.concatenate([shard_digests(out, devices) for out in outs])


@functools.partial(custom_partitioning, static_argnums=(1,))
def shard_digests(x: Shaped[Array, "*shape"], devices: int) -> UInt32[Array, "devices 2"]:
    """Computes the digest of each device's shard of an array, in the order of the mesh.

    If XLA does not divide the program, or divides it among another number of devices, all rows are the digest of the
    whole array.
    """
    return jnp.broadcast_to(digest(x), (devices, 2))


def _partition(devices: int, mesh: Any, arguments: Any, _: Any) -> tuple[Any, ...]:
    if mesh.size != devices:
        everywhere = NamedSharding(mesh, PartitionSpec())
        return mesh, lambda x: jnp.broadcast_to(digest(x), (devices, 2)), everywhere, (everywhere,)
    rows = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    return mesh, lambda shard: digest(shard)[None], rows, (arguments[0].sharding,)


shard_digests.def_partition(
    partition=_partition,
    infer_sharding_from_operands=lambda devices, mesh, arguments, result: NamedSharding(mesh, PartitionSpec()),
    sharding_rule="... -> devices words",
)
