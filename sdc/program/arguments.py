"""Arguments and results of a step: arrays, static values, and objects that the step changes in place.

Arrays become inputs of the step's program. Other leaves of the arguments are passed to the step unchanged: Python
numbers, strings, functions, and static arguments of an outer `jax.jit`. A step can change modules, optimizers, metrics
and random streams of Flax NNX in place: the arrays of these objects are inputs and outputs of the program, and the
caller's objects are updated afterwards, as with `nnx.jit`.

Arguments that another transformation takes before the step's own (`aside`), and reports that it returns after the
step's output, are not part of the step.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax._src import core

from .identities import port_p
from .plan import on_mesh, open_jaxpr
from .reports import Values, apart, together
from .selectors import Direction, Selector

Path: TypeAlias = tuple[Any, ...]  # a key path of JAX to a leaf of a tree
CONTEXT = "sdc"  # name under which NNX tracks the objects of a call
NUMBERS = (bool, int, float, complex)


def path_text(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


@jax.tree_util.register_pytree_with_keys_class
class _Value:
    """An `nnx.State`, which counts as a value rather than an object, although each of its variables is an object."""

    def __init__(self, names: Sequence[str], structure: Any, leaves: Sequence[Any]) -> None:
        self.names, self.structure, self.leaves = tuple(names), structure, leaves

    @classmethod
    def of(cls, state: Any, without: str = "") -> "_Value":
        """Converts a state; the names of arrays omit the suffix `without`, for example `/value` for a variable."""
        paths, structure = jax.tree_util.tree_flatten_with_path(state)
        names = [path_text(path).removesuffix(without) for path, _ in paths]
        return cls(names, structure, [leaf for _, leaf in paths])

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
    """A tree, split into NNX objects and other leaves."""

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
        """Returns the tree with the given objects and leaves in place of its own."""
        sources = {True: iter(objects), False: iter(leaves)}
        tree = jax.tree.unflatten(self.structure, [next(sources[chosen]) for chosen in self.chosen])

        def whole(x: Any) -> Any:
            return x.state() if isinstance(x, _Value) else x

        return jax.tree.map(whole, tree, is_leaf=lambda x: isinstance(x, _Value) or any(x is one for one in objects))


class _Call:
    """A call of a step with a tree of arrays, none of which the step changes in place."""

    def __init__(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.step = step
        self.given: Any = (args, kwargs)  # the tree

    def __call__(self, given: Any) -> Any:
        """Calls the step inside the trace, and returns its results as a tree of arrays."""
        args, kwargs = given
        return apart(self.step(*args, **kwargs))

    def check(self, constants: Sequence[Any]) -> None:
        """Checks the arrays that the step reads from outside its arguments."""

    def finish(self, returned: Any) -> Any:
        """Returns the step's result after the trace has ended."""
        return together(*returned)

    def name(self, direction: Direction, path: Path) -> str | None:
        """Returns the name of the site for an array in one of the trees; None if the array is not a site."""
        return None if direction == "out" and path[0].idx else path_text(path[1:])


class _Changing(_Call):
    """A call with NNX objects among its arguments; `nnx.update_context` splits and merges these objects four times.

    Each tree of arrays is a pair: the states of the objects, keyed by number, and the other leaves. The returned tree
    also holds the reports; the objects in this tree are the arguments that the step changed, followed by the objects in
    the step's output. Unchanged objects are not modified, so the step can read a module of an outer trace.
    """

    def __init__(self, nnx: Any, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__(step, args, kwargs)
        self.nnx = nnx
        self.arguments = self.output = Parts(nnx, (args, kwargs))
        self.changed: list[int] = []
        self.written: set[Path] = set()
        with nnx.split_context(CONTEXT) as context:
            self.outer, state = context.split(self.arguments.objects)
        self.given = state, self.arguments.leaves
        for path, leaf in _by_path(state).items():
            if not isinstance(leaf, jax.ShapeDtypeStruct) and not isinstance(jax.typeof(leaf), core.ShapedArray):
                name = _in_object(self.arguments.object_paths, path)
                raise ValueError(
                    f"argument {name} is a variable that holds a reference, so the step's changes would be lost; "
                    "create the module without nnx.var_defaults(ref=True)"
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
                    f"the step changes argument {_in_object(self.arguments.object_paths, path)} and also reads it "
                    "in another way, for example from a module in a closure; use the argument in both "
                    "places, or a copy (jnp.copy) for the unchanged array"
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
    """Returns the name of an array, omitting the `value` under which a variable stores its array."""
    inside = path[1:-1] if path[-1] == jax.tree_util.GetAttrKey("value") else path[1:]
    return path_text((*paths[path[0].key][1:], *inside))


def functional(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any
) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any, Callable[[Any], Any]]:
    """Converts a step `(state, batch) -> (state, metrics)` with any state to one whose state is a tree of arrays."""
    nnx = sys.modules["flax.nnx"] if holds_objects(state) else None
    changed = _changed_numbers(step, state, batch) if nnx is None else frozenset()

    def take_apart(tree: Any) -> tuple[Any, Any]:
        if nnx is None:
            return _split(tree, changed)
        graph, arrays = nnx.split(tree)
        return graph, _Value.of(arrays, without="/value")

    made_up, arrays = take_apart(state)

    def whole(arrays: Any) -> Any:
        return _merge(made_up, arrays) if nnx is None else nnx.merge(made_up, arrays.state())

    def over_arrays(arrays: Any, batch: Any) -> tuple[Any, Any]:
        after, metrics = _pair(step(whole(arrays), batch))
        found, arrays = take_apart(after)
        if found != made_up:
            raise ValueError(
                "the step returns a state whose structure differs from that of its input; return the same objects, and "
                "leave every leaf that is not an array unchanged"
            )
        return arrays, metrics

    return over_arrays, arrays, whole


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(f"the step returns {type(out).__name__}; expected a tuple (state, metrics)")
    return out


def _changed_numbers(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> frozenset[int]:
    """Returns the indices of the leaves that are Python numbers (such as step counts) and that the step changes."""
    leaves = jax.tree.leaves(state)
    values = {number: leaf for number, leaf in enumerate(leaves) if is_array(leaf, numbers=True)}
    if not all(isinstance(jax.typeof(leaf), core.ShapedArray) for leaf in values.values()):
        raise ValueError(
            "the state holds a reference (jax.new_ref), whose earlier value cannot be kept; pass its array, and create "
            "the reference inside the step"
        )
    numbers = {number: leaf for number, leaf in values.items() if not is_array(leaf)}
    if not numbers:
        return frozenset()
    made_up, arrays = _split(state)
    found: list[Any] = []

    def look(arrays: Any, batch: Any) -> None:
        found.extend(jax.tree.leaves(_pair(step(_merge(made_up, arrays), batch))[0]))

    jax.eval_shape(look, arrays, batch)
    if len(found) != len(leaves):  # the structures differ, for which an error is raised later
        return frozenset()
    return frozenset(
        number for number, leaf in numbers.items() if type(found[number]) is not type(leaf) or found[number] != leaf
    )


def _split(tree: Any, changed: Collection[int] = ()) -> tuple[Any, Any]:
    """Splits a tree into its structure, which includes the static leaves, and a tree that holds only the arrays."""
    leaves, structure = jax.tree.flatten(tree)
    chosen = [is_array(leaf) or number in changed for number, leaf in enumerate(leaves)]
    static = [None if array else leaf for leaf, array in zip(leaves, chosen, strict=True)]
    arrays = [leaf if array else None for leaf, array in zip(leaves, chosen, strict=True)]
    return (structure, static), jax.tree.unflatten(structure, arrays)


def _merge(made_up: Any, arrays: Any) -> Any:
    structure, static = made_up
    given = iter(jax.tree.leaves(arrays))
    # JAX does not treat None as a leaf, so every None here stands for an array.
    return jax.tree.unflatten(structure, [next(given) if leaf is None else leaf for leaf in static])


def is_array(leaf: Any, *, numbers: bool = False) -> bool:
    """Returns whether a leaf of the arguments becomes a program input; with `numbers`, Python numbers do too."""
    if not numbers and type(leaf) in NUMBERS:
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return isinstance(leaf, jax.ShapeDtypeStruct)
    return True


Kind = TypeVar("Kind", bound=type[Any])
_ASIDE: set[type[Any]] = set()


def aside(kind: Kind) -> Kind:
    """Declares a type whose instances precede the step's own arguments and are neither part of the step nor sites."""
    _ASIDE.add(kind)
    return kind


class Traced(NamedTuple):
    """The program of a step for given arguments."""

    closed: Any  # its jaxpr, with a site at every input and output array
    inputs: Values  # its input arrays
    # A function that converts the output arrays to the step's result, and updates the objects that the step changed
    finish: Callable[[Values], Any]


@contextmanager
def traced(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, moved: tuple[Any, Any] | None = None
) -> Iterator[Traced]:
    """Traces a step; the objects among its arguments can be updated until the context ends.

    `moved` is a pair of meshes of the same shape: the program then runs on the devices of the second instead of on
    those of the first.
    """
    own = next((number for number, one in enumerate(args) if type(one) not in _ASIDE), len(args))
    step, args = functools.partial(step, *args[:own]), args[own:]
    if holds_objects((args, kwargs)):
        nnx = sys.modules["flax.nnx"]
        with nnx.update_context(CONTEXT):
            yield _moved(_trace(_Changing(nnx, step, args, kwargs)), moved)
    else:
        yield _moved(_trace(_Call(step, args, kwargs)), moved)


def _moved(program: Traced, meshes: tuple[Any, Any] | None) -> Traced:
    return program if meshes is None else program._replace(closed=on_mesh(program.closed, *meshes))


def taking(step: Callable[..., Any], *before: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that gives a function the name and signature of a step, so that `static_argnames` works.

    The new signature begins with the parameters `before`.
    """
    if not callable(step) or isinstance(step, Selector):
        raise TypeError(
            f"expected a step, not {type(step).__name__}; pass the function itself first, without calling it"
        )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(function, step, updated=())
        try:
            signature = inspect.signature(step)
        except (TypeError, ValueError):  # raised for builtins
            del function.__wrapped__  # type: ignore[attr-defined] # set by `update_wrapper`
            return function
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in before]
        own = [one for one in signature.parameters.values() if one.name not in before]
        if len(own) == len(signature.parameters):
            shown = signature.replace(parameters=[*first, *own])
            function.__signature__ = shown  # type: ignore[attr-defined] # read by `inspect.signature`
        return function

    return decorate


def _trace(call: _Call) -> Traced:
    paths, structure = jax.tree_util.tree_flatten_with_path(call.given)
    whole = [leaf for _, leaf in paths]
    chosen = [number for number, leaf in enumerate(whole) if is_array(leaf)]
    returned: list[Any] = []
    out_structure: Any = None

    def program(*arrays: Any) -> Values:
        nonlocal returned, out_structure
        leaves = [*whole]
        for number, array in zip(chosen, arrays, strict=True):
            leaves[number] = _port(call, "arg", paths[number][0], array)
        out_paths, out_structure = jax.tree_util.tree_flatten_with_path(call(jax.tree.unflatten(structure, leaves)))
        returned = [leaf for _, leaf in out_paths]
        return [_port(call, "out", path, leaf) for path, leaf in out_paths if is_array(leaf)]

    inputs = [whole[number] for number in chosen]
    try:
        closed = jax.make_jaxpr(program)(*inputs)
    except jax.errors.UnexpectedTracerError:
        raise
    except jax.errors.JAXTypeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the step cannot be traced, so it cannot be transformed ({reason}); make it run under jax.jit: bind "
            "static arguments with functools.partial, and branch with jax.lax.cond"
        ) from error
    except Exception as error:
        if "trace level" not in str(error):  # part of NNX's messages, in errors of several types
            raise
        reason = str(error).partition("\n")[0].partition(" (http")[0]
        raise ValueError(
            f"the step changes an object that is not one of its arguments ({reason}); pass it as an argument, as "
            "nnx.jit also requires, and use only this argument"
        ) from error
    call.check(open_jaxpr(closed)[1])
    out_chosen = [number for number, leaf in enumerate(returned) if is_array(leaf)]

    def finish(outs: Values) -> Any:
        for number, out in zip(out_chosen, outs, strict=True):
            returned[number] = out
        return call.finish(jax.tree.unflatten(out_structure, returned))

    return Traced(closed, inputs, finish)


def _port(call: _Call, direction: Direction, path: Path, leaf: Any) -> Any:
    name = call.name(direction, path)
    if name is None or not isinstance(jax.typeof(leaf), core.ShapedArray):
        return leaf
    return port_p.bind(leaf, direction=direction, path=name)


def holds_objects(tree: Any) -> bool:
    """Returns whether a tree holds Flax NNX objects, which a step can change in place."""
    nnx = sys.modules.get("flax.nnx")  # unless the module has been imported, no such objects exist
    return nnx is not None and bool(Parts(nnx, tree).objects)
