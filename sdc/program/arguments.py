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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
from jax._src import core

from .identities import port_p
from .objects import CONTEXT, Changing, Parts, Path, is_array, path_text
from .plan import open_jaxpr
from .reports import Values, apart, together
from .selectors import Selector
from .site import Direction

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


class _Call(Protocol):
    """How a step is called with a tree of arrays."""

    given: Any  # the tree

    def __call__(self, given: Any) -> Any:
        """Calls the step inside of the trace; returns a tree of arrays, too."""

    def check(self, constants: Sequence[Any]) -> None:
        """Looks at the arrays that the step read without being given them."""

    def finish(self, returned: Any) -> Any:
        """What the step returned, outside of the trace."""

    def name(self, direction: Direction, path: Path) -> str | None:
        """The name of the site at an array of one of the trees; None where there is none."""


@contextmanager
def traced(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Traced]:
    """Traces a step; the objects of its arguments can be updated until the context ends."""
    own = next((number for number, one in enumerate(args) if type(one) not in _ASIDE), len(args))
    with _call(functools.partial(step, *args[:own]), args[own:], kwargs) as call:
        yield _trace(call)


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


@contextmanager
def _call(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Call]:
    if not holds_objects((args, kwargs)):
        yield _Plain(step, args, kwargs)
        return
    nnx = sys.modules["flax.nnx"]
    with nnx.update_context(CONTEXT):
        yield Changing(nnx, step, args, kwargs)


def holds_objects(tree: Any) -> bool:
    """Whether there are objects of Flax NNX in a tree, which a step changes in place."""
    nnx = sys.modules.get("flax.nnx")  # without it nobody has such objects
    return nnx is not None and bool(Parts(nnx, tree).objects)


class _Plain:
    def __init__(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.step, self.given = step, (args, kwargs)

    def __call__(self, given: Any) -> Any:
        args, kwargs = given
        return apart(self.step(*args, **kwargs))

    def check(self, constants: Sequence[Any]) -> None:
        """Nothing is changed in place."""

    def finish(self, returned: Any) -> Any:
        return together(*returned)

    def name(self, direction: Direction, path: Path) -> str | None:
        return None if direction == "out" and path[0].idx else path_text(path[1:])
