"""Evidence from the state between two steps: replicas that must be equal, and memory that must not change."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from sdc.bits import has_bits

from ..twins import digest
from .evidence import Call, Detection, Layer, device_names, names_in, results_of, settled


class Stored(NamedTuple):
    """An array of the state, with its digests on each device."""

    place: int
    name: str
    array: Any
    digests: UInt32[Array, "*mesh 2"]


class Digested(NamedTuple):
    """Digests of an array after a step and before the next one."""

    name: str
    first: UInt32[Array, "*mesh 2"]
    again: UInt32[Array, "*mesh 2"]
    place: Any  # the array's sharding, and the axes of its replicas


def device_digests(arrays: Sequence[Array]) -> list[UInt32[Array, "*mesh 2"]]:
    """Returns the digest of each device's part of each array, on all processes, computed by one program.

    The axes of a digest are those of the array's mesh; arrays without a mesh have one digest.
    """
    found: list[Any] = _digesting(tuple(x.sharding for x in arrays))(list(arrays))
    return settled(found)


@functools.lru_cache(4096)
def _digesting(shardings: tuple[Any, ...]) -> Any:
    def all_digests(arrays: Sequence[Array]) -> list[UInt32[Array, "*mesh 2"]]:
        return [_of_shards(sharding)(x) for sharding, x in zip(shardings, arrays, strict=True)]

    def everywhere(sharding: Any) -> Any:
        return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None

    return jax.jit(all_digests, out_shardings=[everywhere(sharding) for sharding in shardings])


def _of_shards(sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        return lambda x: digest(x)[None]
    mesh, axes = sharding.mesh, tuple(sharding.mesh.axis_names)

    def of_shard(shard: Array) -> UInt32[Array, "*mesh 2"]:
        return digest(shard).reshape((1,) * len(axes) + (2,))

    return jax.shard_map(of_shard, mesh=mesh, in_specs=sharding.spec, out_specs=PartitionSpec(*axes), check_vma=False)


def replicated_axes(x: Array) -> tuple[int, ...]:
    """Returns the axes of an array's mesh along which the devices hold equal parts."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding):
        return ()
    used = {axis for part in sharding.spec for axis in ((part,) if isinstance(part, str) else part or ())}
    sizes = sharding.mesh.shape
    return tuple(number for number, axis in enumerate(sharding.mesh.axis_names) if axis not in used and sizes[axis] > 1)


class State(Layer):
    """Digests a part of the state after a step, and again before the next one.

    Each check reads one array, which is drawn with a probability that is proportional to its size.
    """

    name = "state"
    sees = "replicas that are not equal, and memory that changed between two steps"
    blind = "what all replicas have alike, and what is wrong in a part of the state that exists once"
    share = 0.1
    bounds = runs_step = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.stored: Stored | None = None
        self.structure: Any = ()
        self.passing: set[int] = set()  # results that are not passed to the next step

    @property
    def waiting(self) -> bool:
        return self.stored is not None

    def prepare(self, call: Call) -> None:
        arrays = [array for array in call.arrays if _size(array)]
        whole = sum(array.nbytes for array in arrays)
        several = sum(array.nbytes for array in arrays if replicated_axes(array))
        if not whole:
            self.why_not = "the step has no arrays among its arguments"
            return
        self.about = f"{several / whole:.0%} of the bytes have replicas"
        for array in arrays:  # compiles
            device_digests([array])

    def cost(self, call: Call) -> Any:
        largest = max(call.arrays, key=_size)
        return [jax.block_until_ready(device_digests([largest])) for _ in range(2)]

    def after(self, out: Any, given: Any) -> Any:
        """Digests one of the arrays that the step returned."""
        leaves, structure = jax.tree.flatten(results_of(out, given))
        if structure != self.structure:
            self.structure, self.passing = structure, set()
        sizes = np.array([0 if n in self.passing else _size(leaf) for n, leaf in enumerate(leaves)], float)
        if not sizes.sum():
            self.why_not = "no array that the step returns is passed to the next step as it is"
            return None
        place = int(self.random.choice(len(leaves), p=sizes / sizes.sum()))
        self.stored = Stored(place, names_in(structure)[place], leaves[place], device_digests([leaves[place]])[0])
        return None

    def before(self, call: Call) -> Any:
        """Digests the array again, if the step is given it; otherwise, it does not belong to the state."""
        stored, self.stored = self.stored, None
        if stored is None:
            return None
        if all(array is not stored.array for array in call.arrays):
            self.passing.add(stored.place)
            return None
        again = device_digests([stored.array])[0]
        return Digested(stored.name, stored.digests, again, (stored.array.sharding, replicated_axes(stored.array)))

    def judge(self, found: Digested, step: int) -> list[Detection]:
        sharding, axes = found.place
        first, second = np.asarray(found.first), np.asarray(found.again)
        findings = []
        if (changed := (first != second).any(-1)).any():
            on = devices_of(sharding, np.argwhere(changed))
            findings.append(Detection("at rest", step, f"{found.name} changed in memory between two steps", on))
        if axes and (odd := odd_ones(first, axes)).any():
            on = devices_of(sharding, np.argwhere(odd))
            what = f"replicas of {found.name} differ"
            findings.append(Detection("replicas", step, what, on))
        return findings


def odd_ones(digests: UInt32[np.ndarray, "*mesh 2"], axes: Sequence[int]) -> np.ndarray:
    """Returns which devices differ from the majority of their replicas; all of them, if there is no majority."""
    moved = np.moveaxis(digests, tuple(axes), tuple(range(len(axes))))
    sizes = moved.shape[: len(axes)]
    rows = moved.reshape(int(np.prod(sizes)), -1, 2)
    odd = np.zeros(rows.shape[:2], bool)
    for place in range(rows.shape[1]):
        values, kind, counts = np.unique(rows[:, place], axis=0, return_inverse=True, return_counts=True)
        if len(values) > 1:
            common = np.flatnonzero(counts == counts.max())
            odd[:, place] = True if len(common) > 1 else kind.reshape(-1) != common[0]
    return np.moveaxis(odd.reshape(moved.shape[:-1]), tuple(range(len(axes))), tuple(axes))


def _size(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, jax.Array) and has_bits(leaf.dtype) and not leaf.is_deleted() else 0


def devices_of(sharding: Any, places: np.ndarray) -> tuple[str, ...]:
    """Returns the names of the devices whose digests, at the given places, differ."""
    if isinstance(sharding, NamedSharding):
        return device_names(sharding.mesh, places)
    return tuple(f"{device.platform}:{device.id}" for device in sharding.device_set)
