"""Workers under `shard_map`, `pmap` and `vmap`: one function of stacked arrays for each."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

AXIS = "data"
PLACEMENTS = ("vmap", "pmap", "shard_map", "shard_map, checked")


def place(fn: Callable[..., Any], placement: str, workers: int) -> Callable[..., Any]:
    """A compiled function of arrays with a leading axis of workers, from the function of one worker."""
    if placement == "vmap":
        return jax.jit(jax.vmap(fn, axis_name=AXIS))
    if placement == "pmap":
        return jax.pmap(fn, axis_name=AXIS)
    mesh = Mesh(np.asarray(jax.devices()[:workers]), (AXIS,))

    def one(*args: Any) -> Any:
        outputs = fn(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], outputs)

    checked = placement == "shard_map, checked"
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=checked))


def stack(tree: Any, workers: int) -> Any:
    """Every worker's copy of a tree."""
    return jax.tree.map(lambda x: np.broadcast_to(np.asarray(x)[None], (workers, *np.shape(x))).copy(), tree)


def bits(x: Any) -> np.ndarray:
    """The bits of a float32 array."""
    return np.asarray(x).view(np.uint32)


def equal_replicas(tree: Any) -> bool:
    """Whether all workers hold the same bits."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return all(row.tobytes() == leaf[0].tobytes() for leaf in leaves for row in leaf)
