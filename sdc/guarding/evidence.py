"""Layers of evidence: what each one sees, what it is blind to, and what it found.

A layer runs programs of its own, whose results are only compared: the state of the training advances by the step alone.
What it found is judged on the host once the device has it, a step or more later.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from ..program import holds_objects, is_array


@dataclasses.dataclass(frozen=True)
class Detection:
    """Something that a layer found.

    Attributes:
        layer: name of the layer.
        step: number of the step, counted from 0 by the guard.
        what: one sentence.
        devices: the devices on which it was found; empty if the layer cannot say.
        proof: whether correct hardware cannot cause it; otherwise, it is a suspicion.
    """

    layer: str
    step: int
    what: str
    devices: tuple[str, ...] = ()
    proof: bool = True

    def __str__(self) -> str:
        on = f" on {', '.join(self.devices)}" if self.devices else ""
        return f"step {self.step}, {self.layer}: {self.what}{on}"


class Call(NamedTuple):
    """A call of a step, as a function of its arrays."""

    run: Callable[[Sequence[Any]], Any]  # returns the step's result; may be traced
    arrays: list[Any]
    names: list[str]  # path of each array
    key: Any  # equal for calls that differ only in their arrays


class Layer:
    """One kind of evidence.

    Attributes:
        name: its name.
        sees: what it can find.
        blind: what it cannot find.
        share: its share of the budget, before it is divided among the layers that can run.
        why_not: why it cannot run; an empty string if it can.
        about: what `prepare` found out, for the verdict.
    """

    name: ClassVar[str]
    sees: ClassVar[str]
    blind: ClassVar[str]
    share: ClassVar[float]

    def __init__(self) -> None:
        self.why_not = self.about = ""

    @property
    def waiting(self) -> bool:
        """Whether `before` must run at the next step, although no check is due."""
        return False

    def prepare(self, call: Call) -> None:
        """Compiles and calibrates what `before` runs; sets `why_not` if the layer cannot run."""

    def before(self, call: Call) -> Any:
        """Dispatches comparisons that need the step's inputs; returns arrays for `judge`, or None."""

    def after(self, out: Any, given: Any) -> Any:
        """Dispatches comparisons that need the step's result, or the objects among its arguments; returns arrays for
        `judge`, or None."""

    def judge(self, found: Any, step: int) -> list[Detection]:
        """Returns what the arrays show."""
        raise NotImplementedError

    def cost(self, call: Call) -> Any:
        """Runs what a check runs, and waits for it."""
        return jax.block_until_ready(self.before(call))


def settled(tree: Any) -> Any:
    """Returns arrays; on simulated devices, waits for them.

    Simulated devices share a pool of threads, which the collectives of two programs that run at once can block.
    """
    simulated = jax.default_backend() == "cpu" and jax.local_device_count() > 1
    return jax.block_until_ready(tree) if simulated else tree


def call_of(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Returns a call as a function of its arrays, which leaves Flax NNX objects among the arguments unchanged."""
    given: Any = (tuple(args), dict(kwargs))
    graph = None
    if holds_objects(given):
        from flax import nnx

        graph, given = nnx.split(given)
    paths, structure = jax.tree_util.tree_flatten_with_path(given)
    leaves = [leaf for _, leaf in paths]
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf, numbers=True)]
    static = [None if place in set(places) else leaf for place, leaf in enumerate(leaves)]

    def run(arrays: Sequence[Any]) -> Any:
        whole = list(static)
        for place, array in zip(places, arrays, strict=True):
            whole[place] = array
        tree = jax.tree.unflatten(structure, whole)
        if graph is not None:
            tree = nnx.merge(graph, tree)
        own, named = tree
        return step(*own, **named)

    names = [jax.tree_util.keystr(paths[place][0], simple=True, separator="/") for place in places]
    fixed = tuple(leaf if _hashes(leaf) else id(leaf) for leaf in static)
    return Call(run, [leaves[place] for place in places], names, (structure, fixed, graph))


def _hashes(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def device_names(mesh: Any, places: np.ndarray) -> tuple[str, ...]:
    """Returns the names of the devices of a mesh at the given coordinates, one row each."""
    found = (mesh.devices[tuple(place)] for place in places)
    return tuple(f"{device.platform}:{device.id}" for device in found)


def results_of(out: Any, given: Any) -> list[tuple[str, Any]]:
    """Returns the arrays that a step returned, and those of the objects that it may have changed, with their names."""
    trees = [("", out)]
    if holds_objects(given):
        from flax import nnx

        trees.append(("argument ", nnx.split(given)[1]))
    return [
        (kind + jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for kind, tree in trees
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if isinstance(leaf, jax.Array) and not leaf.is_deleted()
    ]
