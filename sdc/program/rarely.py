"""A conditional for what hardly ever happens, which costs nothing where it does not."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jaxtyping import Array, Bool

from .axes import typed_as

RARELY = "sdc.rarely"
"""Scope of what runs only if something is wrong, by which an estimate of a step in which nothing is leaves it out."""

Tree = TypeVar("Tree")


def rarely(predicate: Bool[Array, ""], change: Callable[..., Tree], carried: Tree, *operands: Any) -> Tree:
    """`change(carried, *operands)` if the predicate holds, else `carried`, and without a copy of that.

    It is a loop of one turn or none. What goes through a loop stays where it is, while a conditional has a buffer of
    its own for its result, and copies there what it does not change.

    Args:
        predicate: whether to change anything; around collectives it must be the same on all devices.
        change: returns arrays of the shapes and types of `carried`, which vary over no more mesh axes than what they
            take the place of and the operands. What it computes of other arrays than it is given,
            XLA may move out of the loop, and so compute always.
        carried: a tree of arrays.
        *operands: what else it needs.
    """
    given = jax.tree.leaves(operands)
    carried, predicate = jax.tree.map(lambda leaf: functools.reduce(typed_as, given, leaf), (carried, predicate))

    def turn(state: tuple[Tree, Bool[Array, ""]]) -> tuple[Tree, Bool[Array, ""]]:
        before, again = state
        given, again = lax.optimization_barrier((operands, again))
        return jax.tree.map(typed_as, change(before, *given), before), again & False

    with jax.named_scope(RARELY):
        after, _ = lax.while_loop(lambda state: state[1], turn, (carried, predicate))
    return after
