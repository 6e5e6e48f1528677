"""What a step is given and returns: arrays, what is static beside them, and objects that it changes.

Arrays become inputs of its program. Whatever else stands in a tree of arguments goes to the step as it is: numbers of
Python, texts, functions, and what is static for an outer `jax.jit`. Modules, optimizers, metrics and streams of
random numbers of Flax NNX are changed in place by a step: their arrays are inputs and outputs, and the objects that the
caller holds are updated afterwards, as `nnx.jit` does.

What another transformation takes before the step's arguments (`aside`), and returns beside its output, is no part of
the step.
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
from .plan import open_jaxpr
from .reports import Values, apart, together
from .selectors import Direction, Selector

Path: TypeAlias = tuple[Any, ...]  # keys of JAX on the way to a leaf of a tree
CONTEXT = "sdc"  # under this name NNX keeps track of the objects of a call
NUMBERS = (bool, int, float, complex)


def path_text(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


@jax.tree_util.register_pytree_with_keys_class
class _Value:
    """An `nnx.State`: a value, not an object, although it holds variables, which are objects where they stand alone."""

    def __init__(self, names: Sequence[str], structure: Any, leaves: Sequence[Any]) -> None:
        self.names, self.structure, self.leaves = tuple(names), structure, leaves

    @classmethod
    def of(cls, state: Any, without: str = "") -> "_Value":
        """Of objects, arrays have the names of these `without` the variable's own `/value`."""
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


class _Call:
    """How a step is called with a tree of arrays, here where nothing is changed in place."""

    def __init__(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.step = step
        self.given: Any = (args, kwargs)  # the tree

    def __call__(self, given: Any) -> Any:
        """Calls the step inside of the trace; returns a tree of arrays, too."""
        args, kwargs = given
        return apart(self.step(*args, **kwargs))

    def check(self, constants: Sequence[Any]) -> None:
        """Looks at the arrays that the step read without being given them."""

    def finish(self, returned: Any) -> Any:
        """What the step returned, outside of the trace."""
        return together(*returned)

    def name(self, direction: Direction, path: Path) -> str | None:
        """The name of the site at an array of one of the trees; None where there is none."""
        return None if direction == "out" and path[0].idx else path_text(path[1:])


class _Changing(_Call):
    """Arguments with objects of NNX, which are split and merged four times in all; see `nnx.update_context`.

    Trees of arrays are pairs: the state of the objects by their number, and the other leaves. The returned one has the
    reports besides, and in it come first the objects among the arguments that the step changed, then those of its
    output. Others are not touched, so that a module of an outer trace can be read.
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
                "the state that the step returns is not made up as the one that it is given; return the same objects "
                "and what is no array unchanged"
            )
        return arrays, metrics

    return over_arrays, arrays, whole


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(f"the step returns {type(out).__name__}; expected a tuple (state, metrics)")
    return out


def _changed_numbers(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> frozenset[int]:
    """Which leaves are numbers of Python that the step returns as others, or as arrays: such as a count of steps."""
    leaves = jax.tree.leaves(state)
    values = {number: leaf for number, leaf in enumerate(leaves) if is_array(leaf, numbers=True)}
    if not all(isinstance(jax.typeof(leaf), core.ShapedArray) for leaf in values.values()):
        raise ValueError(
            "the state holds a reference (jax.new_ref), which cannot be kept beside its changes; give its array, and "
            "make the reference inside of the step"
        )
    numbers = {number: leaf for number, leaf in values.items() if not is_array(leaf)}
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


Kind = TypeVar("Kind", bound=type[Any])
_ASIDE: set[type[Any]] = set()


def aside(kind: Kind) -> Kind:
    """Declares a type whose values, before the step's own arguments, are no part of the step: they are no sites."""
    _ASIDE.add(kind)
    return kind


class Traced(NamedTuple):
    """The program of a step for given arguments."""

    closed: Any  # its jaxpr, with a site at every array that goes into it and comes out of it
    inputs: Values  # the arrays that go into it
    # Makes the step's output of the arrays that come out, and updates the objects that the step changed
    finish: Callable[[Values], Any]


@contextmanager
def traced(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Traced]:
    """Traces a step; the objects of its arguments can be updated until the context ends."""
    own = next((number for number, one in enumerate(args) if type(one) not in _ASIDE), len(args))
    step, args = functools.partial(step, *args[:own]), args[own:]
    if holds_objects((args, kwargs)):
        nnx = sys.modules["flax.nnx"]
        with nnx.update_context(CONTEXT):
            yield _trace(_Changing(nnx, step, args, kwargs))
    else:
        yield _trace(_Call(step, args, kwargs))


def taking(step: Callable[..., Any], *before: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function with the name and signature of a step, for those who name static arguments."""
    if not callable(step) or isinstance(step, Selector):
        raise TypeError(f"{type(step).__name__} in the place of a step; give the function first, and do not call it")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(function, step, updated=())
        try:
            signature = inspect.signature(step)
        except (TypeError, ValueError):  # of builtins
            del function.__wrapped__  # type: ignore[attr-defined] # `update_wrapper` made it
            return function
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in before]
        own = [one for one in signature.parameters.values() if one.name not in before]
        if len(own) == len(signature.parameters):
            shown = signature.replace(parameters=[*first, *own])
            function.__signature__ = shown  # type: ignore[attr-defined] # what `inspect.signature` reads
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
            f"the step cannot be traced, and so not transformed ({reason}); it must run under jax.jit: bind what is "
            "static with functools.partial, and branch with jax.lax.cond"
        ) from error
    except Exception as error:
        if "trace level" not in str(error):  # said by NNX, in errors of several types
            raise
        reason = str(error).partition("\n")[0].partition(" (http")[0]
        raise ValueError(
            f"the step changes an object that it has from elsewhere than its arguments ({reason}); give it to the step "
            "as an argument, as nnx.jit asks too, and use that alone"
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
    """Whether there are objects of Flax NNX in a tree, which a step changes in place."""
    nnx = sys.modules.get("flax.nnx")  # without it nobody has such objects
    return nnx is not None and bool(Parts(nnx, tree).objects)
