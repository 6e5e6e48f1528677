"""Functions: exponentials, trigonometric and hyperbolic ones, roots and powers, and special ones, one output for each.

They use units of a device and libraries of a compiler that products do not touch.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .data import make_floats
from .registry import Request
from .workload import Workload

Function = Callable[[Any], Any]


def _size(x: Any) -> Any:
    """A positive number, nowhere near zero."""
    return jnp.abs(x) + jnp.asarray(0.25, x.dtype)


def _inside(x: Any) -> Any:
    """A number between -1 and 1."""
    return x / (jnp.abs(x) + jnp.asarray(1, x.dtype))


GROUPS: Mapping[str, Mapping[str, Function]] = {
    "exponentials": {
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "log": lambda x: jnp.log(_size(x)),
        "log1p": lambda x: jnp.log1p(_size(x)),
        "logistic": lax.logistic,
    },
    "trigonometric": {
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "tanh": jnp.tanh,
        "atan2": lambda x: jnp.arctan2(x, _size(x)),
    },
    "roots": {
        "sqrt": lambda x: jnp.sqrt(_size(x)),
        "rsqrt": lambda x: lax.rsqrt(_size(x)),
        "cbrt": jnp.cbrt,
        "pow": lambda x: lax.pow(_size(x), x),
        "divide": lambda x: x / _size(x),
    },
    "special": {
        "erf": lax.erf,
        "erf_inv": lambda x: lax.erf_inv(_inside(x)),
        "lgamma": lambda x: lax.lgamma(_size(x)),
        "digamma": lambda x: lax.digamma(_size(x)),
    },
}


def evaluate(x: Float[Array, "n"], *, group: str) -> dict[str, Float[Array, "n"]]:
    """Each function of a group, of the same numbers."""
    return {name: function(x) for name, function in GROUPS[group].items()}


def build(request: Request) -> Iterator[Workload]:
    """Each group of functions; exponentials take every kind of data."""
    count = request.level.numbers
    for dtype in request.dtypes:
        for group, functions in GROUPS.items():
            for kind in request.level.data if group == "exponentials" else ("normal",):
                program = f"functions/{dtype}/{group}/{count}"
                yield Workload(
                    name=f"{program}/{kind}",
                    family="functions",
                    dtype=dtype,
                    data=kind,
                    sizes=(count,),
                    program=program,
                    inputs=functools.partial(operand, kind, count, dtype, request.seed),
                    run=functools.partial(evaluate, group=group),
                    elements=count * len(functions),
                    work=float(count * len(functions)),
                    seed=request.seed,
                )


def operand(kind: str, count: int, dtype: str, seed: int) -> tuple[jax.typing.ArrayLike]:
    """The numbers."""
    return (make_floats(kind, (count,), dtype, seed),)
