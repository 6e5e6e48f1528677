"""Who was wrong: what the counts of a shadow replica say of the ranks."""

from typing import Literal, NamedTuple

import numpy as np

from ._shadow import ShadowState

CHANCE = 0.01
"""A rank is named by its share of undecided differences where chance would give any rank that many less often."""


class ShadowVerdict(NamedTuple):
    """What a state says of the ranks.

    Attributes:
        verdict: `corrupt` where anything differed, else `clean` where every rank was compared, else `inconclusive`.
        suspects: the ranks that were wrong.
        undecided: pairs that differed, one of which was wrong, neither of them among the suspects.
        comparisons: how many pairs of ranks were compared.
        differences: comparisons that found a difference.
        repeated: re-checks of a difference that differed again.
        shares: share of each rank's comparisons that differed; NaN where it had none.
        reason: one sentence.
    """

    verdict: Literal["clean", "corrupt", "inconclusive"]
    suspects: tuple[int, ...]
    undecided: tuple[tuple[int, int], ...]
    comparisons: int
    differences: int
    repeated: int
    shares: tuple[float, ...]
    reason: str


def judge(state: ShadowState) -> ShadowVerdict:
    """Says of a state, on the host, which ranks were wrong.

    Suspects are the ranks that a follow-up or a majority found wrong, and those in so many of the undecided differences
    that chance would strike no rank as often: a rank that is seldom wrong is right again at the follow-up.

    Raises:
        ValueError: the arrays have leading axes, of devices or steps.
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

    blamed = np.asarray(state.blamed) > 0
    suspects = blamed | _too_often(_unexplained(open_, blamed), per_rank / max(comparisons, 1))
    rest = _unexplained(open_, suspects)
    pairs = sorted({(int(min(pair)), int(max(pair))) for pair in np.argwhere(rest)})
    named = [int(rank) for rank in np.flatnonzero(suspects)]
    unseen = [int(rank) for rank in np.flatnonzero(per_rank == 0)]

    verdict: Literal["clean", "corrupt", "inconclusive"] = "clean"
    if differences:
        verdict = "corrupt"
        wrong = [f"rank {rank} was wrong" for rank in named] + [f"rank {a} or rank {b} was wrong" for a, b in pairs]
        reason = f"{differences} of {comparisons} comparisons differed, {repeated} on a re-check; {', '.join(wrong)}"
    elif unseen:
        verdict = "inconclusive"
        reason = f"no difference in {comparisons} comparisons, but rank {', '.join(map(str, unseen))} was in none"
    else:
        reason = f"no difference in {comparisons} comparisons, which included every rank"
    return ShadowVerdict(
        verdict, tuple(named), tuple(pairs), comparisons, differences, repeated, tuple(shares.tolist()), reason
    )


def _unexplained(pairs: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Differences in which no rank takes part that is known to be wrong."""
    return np.where(wrong[:, None] | wrong[None, :], 0, pairs)


def _too_often(pairs: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Ranks in more of the differences than their shares of the comparisons explain (Chernoff's bound, Bonferroni)."""
    total = int(pairs.sum())
    part = (pairs.sum(0) + pairs.sum(1)) / max(total, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(a > 0, a * np.log(a / b), 0) for a, b in ((part, shares), (1 - part, 1 - shares))]
    return (part > shares) & (len(pairs) * np.exp(-total * (terms[0] + terms[1])) < CHANCE)
