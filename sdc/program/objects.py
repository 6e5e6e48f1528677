"""Objects of Flax NNX that a step is given, changes and returns; states that hold them, or what is no array."""

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from .reports import apart, together
from .site import Direction

Path: TypeAlias = tuple[Any, ...]
"""Keys of JAX on the way to a leaf of a tree."""
CONTEXT = "sdc"
"""Under this name NNX keeps track of the objects of a call."""
NUMBERS = (bool, int, float, complex)


def path_text(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


@jax.tree_util.register_pytree_with_keys_class
class _Value:
    """An `nnx.State`: a value, not an object, although it holds variables, which are objects where they stand alone."""

    def __init__(self, names: Sequence[str], structure: Any, leaves: Sequence[Any]) -> None:
        self.names, self.structure, self.leaves = tuple(names), structure, leaves

    @classmethod
    def of(cls, state: Any) -> "_Value":
        paths, structure = jax.tree_util.tree_flatten_with_path(state)
        return cls([path_text(path) for path, _ in paths], structure, [leaf for _, leaf in paths])

    @classmethod
    def of_objects(cls, state: Any) -> "_Value":
        """Arrays by the names that they have as those of objects, without the variable's own `value`."""
        found = cls.of(state)
        return cls([name.removesuffix("/value") for name in found.names], found.structure, found.leaves)

    def state(self) -> Any:
        return jax.tree.unflatten(self.structure, self.leaves)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        keys = map(jax.tree_util.DictKey, self.names)
        return list(zip(keys, self.leaves, strict=True)), (self.names, self.structure)

    @classmethod
    def tree_unflatten(cls, made_up: Any, leaves: Sequence[Any]) -> "_Value":
        names, structure = made_up
        return cls(names, structure, leaves)


class Parts:
    """A tree, taken apart into objects of NNX and other leaves."""

    def __init__(self, nnx: Any, tree: Any) -> None:
        def is_object(leaf: Any) -> bool:
            graph_node = nnx.graphlib.is_graph_node(leaf) and not nnx.variablelib.is_array_ref(leaf)
            return isinstance(leaf, nnx.Variable) or graph_node

        def is_whole(leaf: Any) -> bool:
            return is_object(leaf) or isinstance(leaf, nnx.State)

        tree = jax.tree.map(lambda x: _Value.of(x) if isinstance(x, nnx.State) else x, tree, is_leaf=is_whole)
        paths, self.structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_object)
        self.chosen = [is_object(leaf) for _, leaf in paths]
        self.object_paths = [path for path, leaf in paths if is_object(leaf)]
        self.objects = [leaf for _, leaf in paths if is_object(leaf)]
        self.paths = [path for path, leaf in paths if not is_object(leaf)]
        self.leaves = [leaf for _, leaf in paths if not is_object(leaf)]

    def put_together(self, objects: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """The tree with other objects and leaves in the place of its own."""
        sources = {True: iter(objects), False: iter(leaves)}
        tree = jax.tree.unflatten(self.structure, [next(sources[chosen]) for chosen in self.chosen])

        def whole(x: Any) -> Any:
            return x.state() if isinstance(x, _Value) else x

        return jax.tree.map(whole, tree, is_leaf=lambda x: isinstance(x, _Value) or any(x is one for one in objects))


class Changing:
    """Arguments with objects of NNX, which are split and merged four times in all; see `nnx.update_context`.

    Trees of arrays are pairs: the state of the objects by their number, and the other leaves. The returned one has the
    reports besides, and in it come first the objects among the arguments that the step changed, then those of its
    output. Others are not touched, so that a module of an outer trace can be read.
    """

    def __init__(self, nnx: Any, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.nnx, self.step = nnx, step
        self.arguments = self.output = Parts(nnx, (args, kwargs))
        self.changed: list[int] = []
        self.written: set[Path] = set()
        with nnx.split_context(CONTEXT) as context:
            self.outer, state = context.split(self.arguments.objects)
        self.given = state, self.arguments.leaves
        for path, leaf in _by_path(state).items():
            if not isinstance(leaf, jax.ShapeDtypeStruct) and not isinstance(jax.typeof(leaf), jax.core.ShapedArray):
                name = _in_object(self.arguments.object_paths, path)
                raise ValueError(
                    f"argument {name} is a variable that holds a reference, and would lose what the step changes; make "
                    "the module without nnx.var_defaults(ref=True)"
                )

    def __call__(self, given: Any) -> Any:
        state, leaves = given
        with self.nnx.merge_context(CONTEXT, inner=True) as context:
            objects = context.merge(self.outer, state)
        made_up = [self.nnx.split(each)[0] for each in objects]
        args, kwargs = self.arguments.put_together(objects, leaves)
        out, reports = apart(self.step(*args, **kwargs))
        before, now = (_by_path(tree) for tree in (state, self.nnx.split(objects)[1]))
        self.written = {path for path, leaf in before.items() if now.get(path) is not leaf}
        numbers = {path[0].key for path in self.written}
        self.changed = [
            number
            for number, (each, known) in enumerate(zip(objects, made_up, strict=True))
            if number in numbers or self.nnx.split(each)[0] != known
        ]
        self.output = Parts(self.nnx, (out,))
        with self.nnx.split_context(CONTEXT) as context:
            self.inner, after = context.split([*(objects[number] for number in self.changed), *self.output.objects])
        return after, self.output.leaves, reports

    def check(self, constants: Sequence[Any]) -> None:
        read = {id(constant) for constant in constants}
        for path, leaf in _by_path(self.given[0]).items():
            if path in self.written and id(leaf) in read:
                raise ValueError(
                    f"argument {_in_object(self.arguments.object_paths, path)} is changed by the step, which also "
                    "reads it as part of something that it is not given, such as a module in a closure; use the "
                    "argument in both places, or a copy (jnp.copy) where the array as it was is meant"
                )

    def finish(self, returned: Any) -> Any:
        state, leaves, reports = returned
        with self.nnx.merge_context(CONTEXT, inner=False) as context:
            objects = context.merge(self.inner, state)
        (out,) = self.output.put_together(objects[len(self.changed) :], leaves)
        return together(out, reports)

    def name(self, direction: Direction, path: Path) -> str | None:
        part, inside = path[0].idx, path[1:]
        if direction == "arg":
            paths = self.arguments.object_paths
            return path_text(self.arguments.paths[inside[0].idx][1:]) if part else _in_object(paths, inside)
        if part == 2:
            return None
        if part == 1:
            return path_text(self.output.paths[inside[0].idx][1:])
        changed = [self.arguments.object_paths[number] for number in self.changed]
        name = _in_object([*changed, *self.output.object_paths], inside)
        return f"arg/{name}" if inside[0].key < len(changed) else name


def _by_path(tree: Any) -> dict[Path, Any]:
    return dict(jax.tree_util.tree_flatten_with_path(tree)[0])


def _in_object(paths: Sequence[Path], path: Path) -> str:
    """The name of an array; variables hold theirs under `value`, which says nothing."""
    inside = path[1:-1] if path[-1] == jax.tree_util.GetAttrKey("value") else path[1:]
    return path_text((*paths[path[0].key][1:], *inside))


def functional(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any
) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any, Callable[[Any], Any]]:
    """A step `(state, batch) -> (state, metrics)` over any state, as one over arrays alone."""
    take_apart: Callable[[Any], tuple[Any, Any]]
    put_together: Callable[[Any, Any], Any]
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and Parts(nnx, state).objects:
        take_apart, put_together = functools.partial(_split_objects, nnx), functools.partial(_merge_objects, nnx)
    else:
        if any(_is_reference(leaf) for leaf in jax.tree.leaves(state)):
            raise ValueError(
                "the state holds a reference (jax.new_ref), which cannot be kept beside its changes; give its array, "
                "and make the reference inside of the step"
            )
        changed = _changed_numbers(step, state, batch)
        take_apart, put_together = functools.partial(_split, changed=changed), _merge
    made_up, arrays = take_apart(state)

    def whole(arrays: Any) -> Any:
        return put_together(made_up, arrays)

    def over_arrays(arrays: Any, batch: Any) -> tuple[Any, Any]:
        after, metrics = _pair(step(whole(arrays), batch))
        found, arrays = take_apart(after)
        if found != made_up:
            raise ValueError(
                "the state that the step returns is not made up as the one that it is given; return the same objects "
                "and what is no array unchanged"
            )
        return arrays, metrics

    return over_arrays, arrays, whole


def _split_objects(nnx: Any, tree: Any) -> tuple[Any, _Value]:
    graph, state = nnx.split(tree)
    return graph, _Value.of_objects(state)


def _merge_objects(nnx: Any, graph: Any, arrays: _Value) -> Any:
    return nnx.merge(graph, arrays.state())


def _is_reference(leaf: Any) -> bool:
    return is_array(leaf, numbers=True) and not isinstance(jax.typeof(leaf), jax.core.ShapedArray)


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(f"the step returns {type(out).__name__}; expected a tuple (state, metrics)")
    return out


def _changed_numbers(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> frozenset[int]:
    """Which leaves are numbers of Python that the step returns as others, or as arrays: such as a count of steps."""
    leaves = jax.tree.leaves(state)
    numbers = {
        number: leaf for number, leaf in enumerate(leaves) if is_array(leaf, numbers=True) and not is_array(leaf)
    }
    if not numbers:
        return frozenset()
    made_up, arrays = _split(state)
    found: list[Any] = []

    def look(arrays: Any, batch: Any) -> None:
        found.extend(jax.tree.leaves(_pair(step(_merge(made_up, arrays), batch))[0]))

    jax.eval_shape(look, arrays, batch)
    if len(found) != len(leaves):  # another structure, which is refused later
        return frozenset()
    return frozenset(
        number for number, leaf in numbers.items() if type(found[number]) is not type(leaf) or found[number] != leaf
    )


def _split(tree: Any, changed: Collection[int] = ()) -> tuple[Any, Any]:
    """What makes up a tree beside its arrays, and its arrays, each in its place."""
    leaves, structure = jax.tree.flatten(tree)
    chosen = [is_array(leaf) or number in changed for number, leaf in enumerate(leaves)]
    static = [None if array else leaf for leaf, array in zip(leaves, chosen, strict=True)]
    arrays = [leaf if array else None for leaf, array in zip(leaves, chosen, strict=True)]
    return (structure, static), jax.tree.unflatten(structure, arrays)


def _merge(made_up: Any, arrays: Any) -> Any:
    structure, static = made_up
    given = iter(jax.tree.leaves(arrays))
    # None is no leaf, so that there is no other None among the leaves.
    return jax.tree.unflatten(structure, [next(given) if leaf is None else leaf for leaf in static])


def is_array(leaf: Any, *, numbers: bool = False) -> bool:
    """Whether a leaf of arguments becomes an input of the program; numbers of Python stay what they are, or not."""
    if not numbers and type(leaf) in NUMBERS:
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return isinstance(leaf, jax.ShapeDtypeStruct)
    return True
