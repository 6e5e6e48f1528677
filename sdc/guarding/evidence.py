"""Layers of evidence: what each one sees, what it is blind to, and what it found.

A layer runs programs of its own, whose results are only compared: the state of the training advances by the step alone.
What it found is judged on the host once the device has it, a step or more later.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..program import is_array

# First checks of a layer, in which what differs on devices that are taken to be healthy belongs to its calibration.
EARLY = 20
Tree = TypeVar("Tree")


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
    draw: Callable[[], list[Any]]
    replay: Callable[[Sequence[Any]], Any]  # runs the executable of the step; returns its `results_of`
    has_references: bool = False  # among the arguments; what the step made of them is not in `results_of`

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the call; if faults are simulated, with another random key each time."""
        return self.draw()


class Layer(abc.ABC):
    """One kind of evidence.

    Attributes:
        name: its name.
        sees: what it can find.
        blind: what it cannot find.
        share: its share of the budget, before it is divided among the layers that can run.
        why_not: why it cannot run; an empty string if it can.
        about: what `prepare` found out, for the verdict.
        coverage: share of the step on which its comparisons depend.
        bounds: whether its silence bounds the share of wrong steps.
        runs_step: whether it runs the step again.
        computations: how often a step is computed for a check, each time with a chance of being wrong.
    """

    name: ClassVar[str]
    sees: ClassVar[str]
    blind: ClassVar[str]
    share: ClassVar[float]
    bounds: ClassVar[bool] = True
    runs_step: ClassVar[bool] = True
    computations: ClassVar[int] = 1

    def __init__(self) -> None:
        self.why_not = self.about = ""
        self.coverage = 0.0

    @property
    def waiting(self) -> bool:
        """Whether `before` must run at the next step, although no check is due."""
        return False

    @property
    def ready(self) -> bool:
        """Whether a check can begin; otherwise, the previous one waits for idle time."""
        return True

    def idle(self) -> Any:
        """Completes a check in idle time; returns arrays for `judge`, or None."""
        return None

    @abc.abstractmethod
    def prepare(self, call: Call) -> None:
        """Compiles and calibrates what `before` runs; sets `why_not` if the layer cannot run."""

    def before(self, call: Call) -> Any:
        """Dispatches comparisons that need the step's inputs; returns arrays for `judge`, or None."""
        return None

    def after(self, out: Any, given: Any) -> Any:
        """Dispatches comparisons that need the step's result, or its arguments if there are Flax NNX objects among them
        (else None); returns arrays for `judge`, or None."""
        return None

    @abc.abstractmethod
    def judge(self, found: Any, step: int) -> list[Detection]:
        """Returns what the arrays show."""

    def cost(self, call: Call) -> Any:
        """Runs what a check runs, and waits for it."""
        return jax.block_until_ready(self.before(call))


def settled(tree: Any) -> Any:
    """Returns arrays; on simulated devices, waits for them.

    Simulated devices share a pool of threads, which the collectives of two programs that run at once can block.
    """
    simulated = jax.default_backend() == "cpu" and jax.local_device_count() > 1
    return jax.block_until_ready(tree) if simulated else tree


def gathered(tree: Tree) -> Tree:
    """Returns arrays that this process can read: in several processes, copies of them on all devices."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(tree) if not leaf.is_fully_addressable]
    mesh = next((one.mesh for one in shardings if isinstance(one, NamedSharding)), None)
    return tree if mesh is None else settled(_gathering(mesh)(settled(tree)))


@functools.lru_cache(16)
def _gathering(mesh: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def call_of(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, objects: bool,
    rekey: Callable[..., Sequence[Any]] | None = None, compiled: Callable[..., Any] | None = None,
) -> Call:  # fmt: skip
    """Returns a call as a function of its arrays; Python numbers are constants of this function.

    References among the arguments become copies of their arrays, and Flax NNX objects, if `objects` says that there are
    any, their states: the function leaves both unchanged, and returns what the step made of them. `rekey` returns the
    positional arguments with another random key; `compiled` is the step as the loop runs it.
    """

    def split(args: Sequence[Any]) -> tuple[Any, Any]:
        given: Any = (tuple(args), dict(kwargs))
        if not objects:
            return None, given
        from flax import nnx

        return nnx.split(given)

    graph, given = split(args)
    leaves, structure = jax.tree.flatten(given)
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
    references = {place for place in places if not isinstance(jax.typeof(leaves[place]), jax.core.ShapedArray)}
    static = [None if place in {*places} else leaf for place, leaf in enumerate(leaves)]

    def apply(step: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, list[Any], Any]:
        whole: list[Any] = list(static)
        for place, array in zip(places, arrays, strict=True):
            whole[place] = jax.new_ref(array) if place in references else array
        tree = jax.tree.unflatten(structure, whole)
        if graph is not None:
            from flax import nnx

            tree = nnx.merge(graph, tree)
        own, named = tree
        out = step(*own, **named)
        return out, [jax.freeze(whole[place]) for place in sorted(references)], tree if objects else None

    def run(arrays: Sequence[Any]) -> Any:
        out, changed, given = apply(step, arrays)
        return (results_of(out, given), changed) if objects else (out, changed)

    def replay(arrays: Sequence[Any]) -> Any:
        out, _, given = apply(compiled or step, arrays)
        return results_of(out, given)

    def taken(leaves: Sequence[Any]) -> list[Any]:
        return [leaves[place][...] if place in references else leaves[place] for place in places]

    arrays = taken(leaves)

    def draw() -> list[Any]:
        if rekey is None:
            return arrays
        other = split(tuple(rekey(*args)))[1]
        form: Any = jax.tree.structure(other)
        new = taken(jax.tree.leaves(other)) if form == structure else []
        if [jax.typeof(x) for x in new] != [jax.typeof(x) for x in arrays]:
            raise ValueError(
                "rekey returned arguments of another structure, shape or type; it must return the positional arguments "
                "of the step, all of them, with another random key"
            )
        return new

    if rekey is not None and any(map(is_array, jax.tree.leaves(dict(kwargs)))):
        raise ValueError(
            f"the step was called with the arrays {', '.join(kwargs)} by name, which rekey does not get; pass them by "
            "position"
        )
    return Call(run, draw, replay, bool(references))


@functools.lru_cache(64)
def names_in(structure: Any) -> tuple[str, ...]:
    """Returns the paths of the leaves of a tree."""
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))[0]
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths)


def device_names(mesh: Any, places: np.ndarray) -> tuple[str, ...]:
    """Returns the names of the devices of a mesh at the given coordinates, one row each."""
    found = (mesh.devices[tuple(place)] for place in places)
    return tuple(f"{device.platform}:{device.id}" for device in found)


def results_of(out: Any, given: Any) -> Any:
    """Returns what a step returned, and the states of the objects that it may have changed."""
    if not given:
        return {"result": out}
    from flax import nnx

    return {"result": out, "argument": nnx.split(given)[1]}
