"""Bisection: the first operation that differs, without a digest for every operation.

A round looks at the values that leave their scope at some depth, which are few. Whatever goes wrong inside a scope is
seen from outside only through them, so the first that differs names the guilty scope; the next round looks inside it.
Each round is another program, which both sides must run: a fault that does not come back cannot be narrowed down.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..program import Reports, Selector, Site, boundary, inside
from ._first_difference import FirstDifference, first_difference

FEW = 24
"""So few operations are looked at one by one."""


class Round(NamedTuple):
    """One round.

    Attributes:
        where: what was looked at.
        sites: how many sites that were.
        first: where the two sides parted, or None.
    """

    where: Selector
    sites: int
    first: FirstDifference | None


class Bisection(NamedTuple):
    """What bisecting found.

    Attributes:
        first: the first difference of the last round that showed one; None if no round did.
        exact: whether every operation that could be the first was looked at.
        rounds: all rounds, in order.
    """

    first: FirstDifference | None
    exact: bool
    rounds: tuple[Round, ...]


def next_round(sites: Sequence[Site], where: Selector | None, first: FirstDifference | None) -> Selector | None:
    """What to look at next.

    Args:
        sites: all sites of the step.
        where: what the last round looked at; None before the first.
        first: where that showed a difference.

    Returns:
        A selector, or None if there is nothing to narrow down.
    """
    scope, depth = "", 0
    if where is not None:
        if first is None or (guilty := guilty_scope(where, first)) is None:
            return None
        scope, depth = guilty
    within = [site for site in sites if inside(scope)(site)]
    deepest = max((site.leaves for site in within), default=1)
    for finer in range(depth + 1, deepest + 1):
        chosen = inside(scope) & boundary(finer)
        count = sum(map(chosen, within))
        before = sum(map(where, within)) if where is not None else 0
        if len(within) <= FEW or count == len(within):
            return inside(scope)
        if count > before:
            return chosen
    return inside(scope)


def bisect(sites: Sequence[Site], run: Callable[[Selector], tuple[Reports, Reports]]) -> Bisection:
    """Narrows a difference between two sides down to one operation.

    Args:
        sites: all sites of the step, see `sdc.sites`.
        run: runs `fingerprint(step, where)` on both sides, from the same state, and returns both digests.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> def step(x, broken):
        ...     with jax.named_scope("first"):
        ...         x = jnp.sin(jnp.cos(x))
        ...     with jax.named_scope("second"):
        ...         return jnp.tanh(jnp.exp(x) + broken)
        >>> x = jnp.ones(3)
        >>> def run(where):
        ...     digests = jax.jit(lambda broken: sdc.fingerprint(lambda x: step(x, broken), where)(x)[1])
        ...     return digests(jnp.float32(0.0)), digests(jnp.float32(1e-3))
        >>> found = sdc.bisect(sdc.sites(lambda x: step(x, jnp.float32(0.0)), x), run)
        >>> found.first.site.name, found.exact
        ('fwd/second/add', True)
    """
    rounds: list[Round] = []
    where = next_round(sites, None, None)
    last: FirstDifference | None = None
    while where is not None:
        first = first_difference(*run(where))
        rounds.append(Round(where, sum(map(where, sites)), first))
        last = first or last
        where = next_round(sites, where, first)
    exact = bool(rounds) and rounds[-1].first is not None and "boundary" not in rounds[-1].where.text
    return Bisection(last, exact, tuple(rounds))


def guilty_scope(where: Selector, first: FirstDifference) -> tuple[str, int] | None:
    """The scope in which something went wrong, and its depth; None if every operation there was looked at.

    Args:
        where: what was looked at, a `boundary` of some depth or not.
        first: where that showed a difference.
    """
    depths = [int(leaf.text[len("boundary(") : -1]) for leaf in where.leaves() if leaf.text.startswith("boundary(")]
    if not depths:
        return None
    return "/".join(first.site.scope.split("/")[: depths[0]]), depths[0]
