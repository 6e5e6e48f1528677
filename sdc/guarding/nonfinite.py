"""The first operation of a step that makes a NaN or an infinity from finite inputs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from .. import program
from ..twins import FirstDifference, first_difference
from .evidence import gathered

P = ParamSpec("P")  # of a step
Out = TypeVar("Out")


def first_nonfinite(
    step: Callable[P, Out], where: program.Where = program.operations
) -> Callable[P, tuple[Out, FirstDifference | None]]:
    """Transforms a step so that it also returns the first operation that makes a NaN or an infinity.

    An operation makes a NaN if no input is a NaN, and an infinity if all inputs are finite; the -inf of a mask is thus
    no fault, but the softmax of a row that is masked entirely is one. The step is compiled with a count at each
    operation, so it is slower, and its last bits may differ.

    Args:
        step: any function that JAX can trace; if it computes derivatives, its backward pass is searched too.
        where: selects the operations that are searched.

    Returns:
        A function that returns `(out, first)`. `first` has the operation (`first.site`, with the line of the user's
        code), the iteration of each enclosing loop, the devices, and the outputs; it is None if everything is finite.
        The function waits for the result, and must not be called inside `jax.jit`.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> loss = lambda w: jnp.sum(jnp.sqrt(w))
        >>> gradient, first = sdc.first_nonfinite(jax.grad(loss))(jnp.array([4.0, 0.0]))
        >>> first.site.name, first.site.primitive
        ('fwd/jvp()/div', 'div')
    """
    floats = program.Selector(
        "with real results", lambda site: any(jnp.issubdtype(x.dtype, jnp.inexact) for x in site.outputs)
    )
    searched = jax.jit(program.rewrite(step, program.as_selector(where) & floats, _Count(), required=True))

    @functools.wraps(step)
    def found(*args: Any, **kwargs: Any) -> tuple[Any, FirstDifference | None]:
        out, counts = searched(*args, **kwargs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(counts)):
            raise ValueError("first_nonfinite was called inside jit or another transformation; call it outside")
        pairs = [np.repeat(np.asarray(count)[..., None], 2, -1) for count in gathered(counts).values()]
        none = program.Reports(counts.sites, [np.zeros_like(pair) for pair in pairs])
        return out, first_difference(none, program.Reports(counts.sites, pairs))

    return found


class _Count:
    def __call__(
        self, place: program.Place, bind: Callable[..., program.Values], *inputs: Any
    ) -> tuple[program.Values, UInt32[Array, " n"]]:
        outs = bind(*inputs)
        nans, infinities = (jnp.stack([_count(kind, out) for out in outs]) for kind in (jnp.isnan, jnp.isinf))
        had_nan, had_infinity = (_had(kind, inputs) for kind in (jnp.isnan, jnp.isinf))
        return outs, jnp.where(had_nan, 0, nans + jnp.where(had_infinity, 0, infinities))

    def merge(self, total: UInt32[Array, " n"], new: UInt32[Array, " n"]) -> UInt32[Array, " n"]:
        return total + new


def _count(kind: Callable[..., Any], x: Any) -> UInt32[Array, ""]:
    return jnp.sum(kind(x), dtype=jnp.uint32) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.uint32(0)


def _had(kind: Callable[..., Any], inputs: Sequence[Any]) -> Bool[Array, ""]:
    return functools.reduce(jnp.logical_or, (_count(kind, x) > 0 for x in inputs), jnp.bool_(False))
