"""Objects of Flax NNX that a step is given, changes and returns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from .reports import apart, together
from .site import Direction

Path: TypeAlias = tuple[Any, ...]
"""Keys of JAX on the way to a leaf of a tree."""
CONTEXT = "sdc"
"""Under this name NNX keeps track of the objects of a call."""


def path_text(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


class Parts:
    """A tree, taken apart into objects of NNX and other leaves."""

    def __init__(self, nnx: Any, tree: Any) -> None:
        def is_object(leaf: Any) -> bool:
            return isinstance(leaf, nnx.Variable) or nnx.graphlib.is_graph_node(leaf)

        paths, self.structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_object)
        self.chosen = [is_object(leaf) for _, leaf in paths]
        self.object_paths = [path for path, leaf in paths if is_object(leaf)]
        self.objects = [leaf for _, leaf in paths if is_object(leaf)]
        self.paths = [path for path, leaf in paths if not is_object(leaf)]
        self.leaves = [leaf for _, leaf in paths if not is_object(leaf)]

    def put_together(self, objects: Sequence[Any], leaves: Sequence[Any]) -> Any:
        sources = {True: iter(objects), False: iter(leaves)}
        return jax.tree.unflatten(self.structure, [next(sources[chosen]) for chosen in self.chosen])


class Changing:
    """Arguments with objects of NNX, which are split and merged four times in all; see `nnx.update_context`.

    Trees of arrays are pairs: the state of the objects by their number, and the other leaves. The returned one has the
    reports besides. Objects among the arguments come before those of the output.
    """

    def __init__(self, nnx: Any, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.nnx, self.step = nnx, step
        self.arguments = self.output = Parts(nnx, (args, kwargs))
        self.changed: set[Path] = set()
        with nnx.split_context(CONTEXT) as context:
            self.outer, state = context.split(self.arguments.objects)
        self.given = state, self.arguments.leaves

    def __call__(self, given: Any) -> Any:
        state, leaves = given
        with self.nnx.merge_context(CONTEXT, inner=True) as context:
            objects = context.merge(self.outer, state)
        args, kwargs = self.arguments.put_together(objects, leaves)
        out, reports = apart(self.step(*args, **kwargs))
        self.output = Parts(self.nnx, (out,))
        with self.nnx.split_context(CONTEXT) as context:
            self.inner, after = context.split([*objects, *self.output.objects])
        before, now = (dict(jax.tree_util.tree_flatten_with_path(tree)[0]) for tree in (state, after))
        self.changed = {path for path, leaf in before.items() if now.get(path) is not leaf}
        return after, self.output.leaves, reports

    def check(self, constants: Sequence[Any]) -> None:
        read = {id(constant) for constant in constants}
        for path, leaf in jax.tree_util.tree_flatten_with_path(self.given[0])[0]:
            if path in self.changed and id(leaf) in read:
                raise ValueError(
                    f"argument {self._in_object(path)} is changed by the step, which also reads it as part of "
                    "something that it is not given, such as a module in a closure; use the argument in both places"
                )

    def finish(self, returned: Any) -> Any:
        state, leaves, reports = returned
        with self.nnx.merge_context(CONTEXT, inner=False) as context:
            objects = context.merge(self.inner, state)
        (out,) = self.output.put_together(objects[len(self.arguments.objects) :], leaves)
        return together(out, reports)

    def name(self, direction: Direction, path: Path) -> str | None:
        part, number = path[0].idx, path[1]
        if part == 0:
            of_argument = direction == "out" and number.key < len(self.arguments.objects)
            return f"arg/{self._in_object(path[1:])}" if of_argument else self._in_object(path[1:])
        found = self.arguments if direction == "arg" else self.output
        return None if part == 2 else path_text(found.paths[number.idx][1:])

    def _in_object(self, path: Path) -> str:
        """Variables hold their array under `value`, which says nothing."""
        paths = [*self.arguments.object_paths, *self.output.object_paths]
        inside = path[1:-1] if path[-1] == jax.tree_util.GetAttrKey("value") else path[1:]
        return path_text((*paths[path[0].key][1:], *inside))
