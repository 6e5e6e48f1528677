"""The first operation of a step that makes a NaN or an infinity from finite inputs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from .. import program
from ..twins import FirstDifference, first_difference


def first_nonfinite(
    step: Callable[..., Any], where: program.Where = program.operations
) -> Callable[..., tuple[Any, FirstDifference | None]]:
    """Transforms a step so that it also returns the first operation that makes a NaN or an infinity.

    An operation with an input that is not finite, such as the -inf of a mask, is not at fault. The step is compiled
    with a count at each operation, so it is slower, and its last bits may differ.

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
        pairs = [np.repeat(np.asarray(count)[..., None], 2, -1) for count in counts.values()]
        none = program.Reports(counts.sites, [np.zeros_like(pair) for pair in pairs])
        return out, first_difference(none, program.Reports(counts.sites, pairs))

    return found


class _Count:
    def __call__(
        self, place: program.Place, bind: Callable[..., program.Values], *inputs: Any
    ) -> tuple[program.Values, UInt32[Array, " n"]]:
        outs = bind(*inputs)
        bad = jnp.stack([_nonfinite(out) for out in outs])
        known = jnp.stack([_nonfinite(x) for x in inputs]).sum() == 0 if inputs else jnp.bool_(True)
        return outs, jnp.where(known, bad, 0)

    def merge(self, total: UInt32[Array, " n"], new: UInt32[Array, " n"]) -> UInt32[Array, " n"]:
        return total + new


def _nonfinite(x: Any) -> UInt32[Array, ""]:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.uint32(0)
    return jnp.sum(~jnp.isfinite(x), dtype=jnp.uint32)
