"""The shadow replica: a spare data-parallel rank recomputes the gradients of other ranks, and their digests are
compared.

N of N + 1 ranks work, each on its own rows; at every step, the spare rank recomputes the gradients of another rank from
that rank's rows (proposed in Ma et al. 2025, arXiv:2502.12340, section 7.2). Since parameters are equal on all ranks,
any difference is corruption. The method uses 1 / (N + 1) of the machines. At every step, ranks exchange 64-bit digests
and rows of the batch; they exchange gradients only if digests differ.

The role of the spare also rotates: over ranks * (ranks - 1) steps, every rank is checked by every other, and every step
checks two ranks. While a working rank has the role of the spare, a *home spare* (one of the last ranks of the axis, for
which the data loader has no rows) works on the rows of that rank. After a difference between ranks r and s, three
follow-up steps compare r with s again, r with a third rank q, and q with s. A rank that stays wrong differs in two of
the three pairs, which identifies it. With at least two spares, a majority vote identifies wrong ranks in the same step
and provides the mean.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from sdc.bits import select
from sdc.verdict import Verdict

from ..program import Values, bound_axes, collectives, rarely, substitute
from ..twins import LARGEST, Difference, difference, from_reference, gather_twins, merge, no_difference, tree_digest
from .workers import at_least_float32, check_axis, count_workers, sums_by_itself

Tree = TypeVar("Tree")
RECHECK, WITH_THIRD, LAST = 1, 2, 3  # phases of the follow-up to a difference; 0 is the regular round


class ShadowState(NamedTuple):
    """Roles and counts, the same on every device."""

    turn: Int32[Array, ""]  # position in the round, which determines the compared ranks
    phase: Int32[Array, ""]  # phase of the follow-up to a difference; 0 without a difference
    third_differed: Bool[Array, ""]  # whether the watched rank of a follow-up differed from the third rank
    checked: UInt32[Array, "ranks ranks"]  # number of comparisons by (watched rank, spare), or by pair of spares
    differed: UInt32[Array, "ranks ranks"]  # number of these comparisons that found a difference
    # number of undecided differences by pair; a difference and its follow-up count once
    undecided: UInt32[Array, "ranks ranks"]
    blamed: UInt32[Array, "ranks"]  # number of times that a follow-up or a majority found each rank wrong
    repeated: UInt32[Array, ""]  # number of re-checks that differed again


class ShadowReport(NamedTuple):
    """The comparison of one step, the same on every device."""

    watched: Int32[Array, ""]  # the rank that was checked
    spares: Int32[Array, "spares"]  # the ranks that computed on the same rows
    differed: Bool[Array, ""]  # whether any two of these ranks differed in any bit
    repeats: Bool[Array, ""]  # whether this step re-checked a difference and found it again
    blamed: Bool[Array, "ranks"]  # the ranks that this step found wrong
    difference: Difference  # difference of each spare from the watched rank, summed over all devices of a rank


def init_shadow(ranks: int) -> ShadowState:
    """Returns the state before the first step.

    Args:
        ranks: size of the axis, spares included.

    Raises:
        ValueError: there are fewer than three ranks.
    """
    if ranks < 3:
        raise ValueError(f"ranks={ranks}: expected at least three: two working ranks and one spare")
    zero, none = jnp.int32(0), jnp.zeros((), jnp.uint32)
    pairs, each = jnp.zeros((ranks, ranks), jnp.uint32), jnp.zeros(ranks, jnp.uint32)
    return ShadowState(zero, zero, jnp.bool_(False), pairs, pairs, pairs, each, none)


def shadow(
    gradient_fn: Callable[[Any, Any], Tree],
    axis_name: str,
    *,
    spares: int = 1,
    has_aux: bool = False,
    reduce: Callable[[Tree], Tree] | None = None,
) -> Callable[[ShadowState, Any, Any], tuple[Tree, ShadowState, ShadowReport]]:
    """Transforms a rank's gradient computation into that of a data-parallel group with spare ranks.

    Call the result where `axis_name` is bound: under `shard_map` with `check_vma=False`, `pmap` or `vmap`. If
    parameters are sharded over further axes, bind these axes too.

    Args:
        gradient_fn: `(params, batch) -> pytree of floats`, for instance `jax.value_and_grad(loss)`. It must use no
            collectives over `axis_name`, and must be a deterministic function of its arguments (a dropout key belongs
            in the batch).
        axis_name: the data-parallel axis.
        spares: number of spare ranks, which are the last ranks of the axis; their batches are ignored.
        has_aux: whether `gradient_fn` returns `(result, aux)`. What a rank computes beside its result is neither
            compared nor averaged; `(mean, aux)` is returned in place of the mean, for the rows that the rank worked on.
        reduce: function that sums results over the ranks, such as a reduce-scatter (default: an all-reduce).

    Returns:
        A function of `(state, params, batch)` that returns the mean of `gradient_fn` over the working ranks, the state
        and a `ShadowReport`, all of which are the same on every rank; `params` must also be the same on every rank.

    Raises:
        ValueError: the axis is not bound or too small, the state is for another number of ranks, `gradient_fn` uses
            collectives over the axis or returns anything but floats, or `shard_map` checks types.
    """
    check_axis("axis_name", axis_name)
    if spares < 1:
        raise ValueError(f"spares={spares}: expected at least one spare rank")

    def shadowed(state: ShadowState, params: Any, batch: Any) -> tuple[Tree, ShadowState, ShadowReport]:
        ranks = _count_ranks(axis_name, spares, state)
        regular, group = _groups(state, ranks, spares)
        batch = _rows(batch, group, ranks, spares, axis_name)
        # XLA may compute a value twice, once for each fusion that uses it; the barrier ensures that the compared value
        # is the one consumed.
        result: Any = lax.optimization_barrier(alone(gradient_fn, axis_name)(params, batch))
        result, aux = result if has_aux else (result, None)
        leaves = jax.tree.leaves(result)
        if not sum(leaf.size for leaf in leaves):
            raise ValueError("gradient_fn returns no elements; expected gradients, as from jax.value_and_grad(loss)")
        for leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise ValueError(
                    f"gradient_fn returns {leaf.dtype}{list(leaf.shape)}, which has no mean; expected only floats: "
                    "omit this output, or cast it to float32"
                )

        # Pairs of ranks of the group that differ anywhere on the mesh.
        digests = jnp.stack(gather_twins(tree_digest(leaves), axis_name))[group]
        differs = jnp.any(digests[:, None] != digests[None, :], axis=2)
        if others := _other_axes(axis_name):  # a conditional around a collective needs the same branch on every device
            differs = lax.pmax(differs.astype(jnp.int32), others) > 0
        votes = jnp.sum(~differs, axis=1, dtype=jnp.int32)
        best = jnp.argmax(votes)
        me = lax.axis_index(axis_name)
        counted = jnp.all(group != me) | (group[best] == me)

        def summand(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
            # Values are selected, not multiplied by zero, so that NaN of a spare is excluded too.
            return jnp.where(counted, x, jnp.zeros_like(x)).astype(at_least_float32(x.dtype))

        def mean_of(total: Shaped[Array, "*part"], x: Shaped[Array, "*shape"]) -> Shaped[Array, "*part"]:
            return (total / jnp.asarray(ranks - spares, total.dtype)).astype(x.dtype)

        summands = jax.tree.map(summand, result)
        totals = lax.psum(summands, axis_name) if reduce is None else reduce(summands)
        mean = jax.tree.map(mean_of, totals, result)
        majority = 2 * votes[best] > spares + 1
        new, blamed = _book(state, regular, group, differs, differs[best] & majority, majority)
        differed = jnp.any(differs)
        found = _measured(leaves, group, differed, axis_name)
        report = ShadowReport(group[0], group[1:], differed, differed & (state.phase == RECHECK), blamed, found)
        returned: Any = (mean, aux) if has_aux else mean
        return returned, new, report

    return shadowed


def _groups(state: ShadowState, ranks: int, spares: int) -> tuple[Int32[Array, "group"], Int32[Array, "group"]]:
    """Returns two groups, each a checked rank with its spares: the group of the regular round and the group of the
    current phase."""
    watched, offset = state.turn % ranks, 1 + state.turn // ranks
    regular = jnp.stack([watched, *((watched + offset + i) % ranks for i in range(spares))])
    if spares > 1:
        return regular, regular
    third = (watched + jnp.where(offset == 1, jnp.int32(2), jnp.int32(1))) % ranks
    with_third = jnp.stack([watched, third]), jnp.stack([third, regular[1]])
    return regular, jnp.stack([regular, regular, *with_third])[state.phase]


def _rows(batch: Tree, group: Int32[Array, "group"], ranks: int, spares: int, axis_name: str) -> Tree:
    """Returns the rows that this rank works on: all ranks of the group work on the rows of one of them (the owner), all
    other ranks on their own.

    For each working rank in the group other than the owner, a home spare outside the group takes over that rank's rows.
    """
    rank = jnp.arange(ranks, dtype=jnp.int32)
    home = rank >= ranks - spares
    inside = jnp.any(rank[:, None] == group, axis=1)
    owner = group[jnp.argmax(group < ranks - spares)]
    displaced = jnp.nonzero(inside & ~home & (rank != owner), size=spares, fill_value=0)[0].astype(jnp.int32)
    free = home & ~inside
    # 0 means the rank's own rows. The owner computes on its original rows, so a copy that is corrupted in transfer
    # causes a difference too.
    origin = jnp.where(inside & (rank != owner), 1, jnp.where(free, 1 + jnp.cumsum(free), 0))[lax.axis_index(axis_name)]
    own = taken = jax.tree.map(jnp.asarray, batch)
    for number, sender in enumerate([owner, *displaced], 1):
        taken = jax.tree.map(functools.partial(select, origin == number), from_reference(own, axis_name, sender), taken)
    return taken


def alone(gradient_fn: Callable[[Any, Any], Tree], axis_name: str) -> Callable[[Any, Any], Tree]:
    """Returns `gradient_fn`; raises ValueError if it uses collectives over the axis, which would make all ranks equal
    even if one is wrong."""

    def look(primitive: Any, params: Mapping[str, Any], operands: Values) -> None:
        names = params.get("axes", params.get("axis_name"))
        if axis_name in (names if isinstance(names, tuple) else (names,)):
            raise ValueError(
                f"gradient_fn uses {primitive} over {axis_name!r}, which makes the ranks of this axis equal, so no "
                "comparison would find a difference; return this rank's own values, which are averaged afterwards"
            )

    return substitute(gradient_fn, collectives, look)


def _measured(leaves: Values, group: Int32[Array, "group"], differed: Bool[Array, ""], axis_name: str) -> Difference:
    """Measures how far the spares differ from the checked rank; exchanges tensors only if digests differ."""
    others, spares = _other_axes(axis_name), len(group) - 1
    devices = math.prod(bound_axes()[axis] for axis in others)

    def measure(_: Difference, leaves: Values, group: Int32[Array, "group"]) -> Difference:
        watched, *copies = (from_reference(leaves, axis_name, rank) for rank in group)
        rows = [functools.reduce(merge, map(difference, watched, copy)) for copy in copies]
        found = Difference(*(jnp.stack(column) for column in zip(*rows, strict=True)))
        if others:
            total = Difference(*lax.psum(tuple(found), others))
            largest = lax.pmax(found.relative_max, others)
            found = total._replace(relative_sum=jnp.minimum(total.relative_sum, LARGEST), relative_max=largest)
        return found

    none = no_difference(jnp.full(spares, devices * sum(leaf.size for leaf in leaves), jnp.uint32))
    return rarely(differed, measure, none, leaves, group)


def _book(
    state: ShadowState,
    regular: Int32[Array, "group"],
    group: Int32[Array, "group"],
    differs: Bool[Array, "group group"],
    odd: Bool[Array, "group"],
    majority: Bool[Array, ""],
) -> tuple[ShadowState, Bool[Array, "ranks"]]:
    """Counts comparisons, and identifies the wrong rank if possible.

    Returns the state for the next step and the ranks found wrong; a difference is followed up before the round
    continues.
    """
    ranks, spares, differed = len(state.blamed), len(group) - 1, jnp.any(differs)
    first, second = np.triu_indices(len(group), 1)
    found = differs[first, second]
    open_ = (found & ~majority).astype(jnp.uint32)
    if spares == 1:
        # If exactly one of the second and third pairs of a follow-up differed, the rank common to that pair and the
        # first pair was wrong.
        third, now = state.third_differed, found[0]
        decided = (state.phase == LAST) & (third != now)
        odd = decided & jnp.stack([third, now])
        open_ = (found & (state.phase == 0)).astype(jnp.uint32) - decided.astype(jnp.uint32)
    blamed = jnp.zeros(ranks, jnp.bool_).at[regular].set(odd)
    at, phases = (group[first], group[second]), 1 + (LAST if spares == 1 else RECHECK)
    phase = jnp.where(state.phase == 0, differed.astype(jnp.int32), (state.phase + 1) % phases)
    new = ShadowState(
        turn=jnp.where(phase == 0, (state.turn + 1) % (ranks * (ranks - spares)), state.turn),
        phase=phase,
        third_differed=jnp.where(state.phase == WITH_THIRD, differed, state.third_differed),
        checked=state.checked.at[at].add(jnp.uint32(1)),
        differed=state.differed.at[at].add(found.astype(jnp.uint32)),
        undecided=state.undecided.at[regular[first], regular[second]].add(open_),
        blamed=state.blamed + blamed.astype(jnp.uint32),
        repeated=state.repeated + (differed & (state.phase == RECHECK)).astype(jnp.uint32),
    )
    return new, blamed


def _other_axes(axis_name: str) -> tuple[str, ...]:
    return tuple(axis for axis in bound_axes() if axis != axis_name)


def _count_ranks(axis_name: str, spares: int, state: ShadowState) -> int:
    ranks = count_workers(axis_name)
    if ranks < spares + 2:
        raise ValueError(
            f"worker axis {axis_name!r} has size {ranks}; with spares={spares}, it must be at least {spares + 2}, to "
            "leave two working ranks"
        )
    if state.checked.shape != (ranks, ranks):
        raise ValueError(
            f"the state has shape {state.checked.shape}, but axis {axis_name!r} has size {ranks}; "
            f"start with init_shadow({ranks}), and give every rank the whole state"
        )
    if sums_by_itself(axis_name):
        raise ValueError(
            f"shard_map checks types, and therefore sums gradients over {axis_name!r} automatically, which makes all "
            "ranks equal; pass check_vma=False to shard_map"
        )
    return ranks


# Significance level at which a rank is suspected because of its share of undecided differences.
CHANCE = 0.01


class ShadowVerdict(NamedTuple):
    """The verdict on the ranks, from a state.

    Attributes:
        verdict: `corrupt` if anything differed, otherwise `clean` if every rank was compared, otherwise `inconclusive`.
        suspects: ranks that were wrong.
        undecided: pairs of ranks that differed, neither of which is a suspect; one rank of each pair was wrong.
        comparisons: number of compared pairs of ranks.
        differences: number of comparisons that found a difference.
        repeated: number of re-checks that found a difference again.
        shares: for each rank, the share of its comparisons that found a difference; NaN for a rank without comparisons.
        reason: the reason for the verdict, in one sentence.
    """

    verdict: Verdict
    suspects: tuple[int, ...]
    undecided: tuple[tuple[int, int], ...]
    comparisons: int
    differences: int
    repeated: int
    shares: tuple[float, ...]
    reason: str


def judge(state: ShadowState) -> ShadowVerdict:
    """Determines on the host, from a state, which ranks were wrong.

    Suspects are the ranks that a follow-up or a majority found wrong, and ranks with significantly many undecided
    differences, because a rank that is wrong only occasionally is usually correct again in the follow-up.

    Raises:
        ValueError: the arrays have leading axes of devices or steps.
    """
    if state.checked.ndim != 2:
        raise ValueError(
            f"checked has shape {state.checked.shape}; expected (ranks, ranks): give the state of one device, "
            "as in jax.tree.map(lambda x: x[0], state)"
        )
    checked, differed, open_ = (np.asarray(x, np.int64) for x in (state.checked, state.differed, state.undecided))
    per_rank = checked.sum(0) + checked.sum(1)
    comparisons, differences, repeated = int(checked.sum()), int(differed.sum()), int(state.repeated)
    with np.errstate(invalid="ignore"):
        shares = (differed.sum(0) + differed.sum(1)) / per_rank

    def unexplained(wrong: np.ndarray) -> np.ndarray:
        """Returns the differences that the ranks known to be wrong do not explain."""
        return np.where(wrong[:, None] | wrong[None, :], 0, open_)

    blamed = np.asarray(state.blamed) > 0
    # Ranks with more of the differences than their shares of the comparisons explain (Chernoff bound, Bonferroni
    # correction).
    left, share = unexplained(blamed), per_rank / max(comparisons, 1)
    part = (left.sum(0) + left.sum(1)) / max(total := int(left.sum()), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(a > 0, a * np.log(a / b), 0) for a, b in ((part, share), (1 - part, 1 - share))]
    too_often = (part > share) & (len(left) * np.exp(-total * (terms[0] + terms[1])) < CHANCE)
    suspects = blamed | too_often
    rest = unexplained(suspects)
    pairs = sorted({(int(min(pair)), int(max(pair))) for pair in np.argwhere(rest)})
    named = [int(rank) for rank in np.flatnonzero(suspects)]
    unseen = [int(rank) for rank in np.flatnonzero(per_rank == 0)]

    if differences:
        verdict = Verdict.CORRUPT
        wrong = [f"rank {rank} was wrong" for rank in named] + [f"rank {a} or rank {b} was wrong" for a, b in pairs]
        found_again = f"{repeated} of them in a re-check"
        reason = f"{differences} of {comparisons} comparisons found a difference, {found_again}; {', '.join(wrong)}"
    elif unseen:
        verdict = Verdict.INCONCLUSIVE
        never = ", ".join(f"rank {rank}" for rank in unseen)
        reason = f"no difference in {comparisons} comparisons, which did not include {never}"
    else:
        verdict, reason = Verdict.CLEAN, f"no difference in {comparisons} comparisons, which included every rank"
    found = tuple(shares.tolist())
    return ShadowVerdict(verdict, tuple(named), tuple(pairs), comparisons, differences, repeated, found, reason)
