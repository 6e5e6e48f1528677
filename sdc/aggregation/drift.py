"""Theory of lossy collectives: how far stale copies of parameters are off, and what a lossy mean weighs.

Weintraub, Banner, Orda, *Distributed Training under Packet Loss* (2025). A copy of a shard is renewed with probability
1 - p at each step and kept otherwise; its age a (steps since it was renewed, 0 at best) has P(a) = (1 - p) p^a.

**Erratum.** The paper prints the limit of the drift between two copies as 2p/(1 + p) s^2: it forgets that a stale copy
may already have been stale. Simulation at p = 0.1, 0.2, 0.4 finds 0.203, 0.418, 0.960; the exact form 0.202, 0.417,
0.952; the printed one 0.182, 0.333, 0.571. Only the exact form is here; `sdc study lossy` compares both with what it
measures.
"""

from .workers import check_probability


def pair_drift(p: float, square: float = 1.0) -> float:
    """lim E[D^2] of D, the difference between two replicas' copies of a shard whose owner moves at random.

        2 p / (1 - p^2) s^2

    which is s^2 E|a - b| for the ages a, b of the two copies.

    Args:
        p: probability that a copy is not renewed at a step.
        square: s^2, mean square of the owner's independent zero-mean moves.

    Raises:
        ValueError: p is no probability below 1.
    """
    _check(p)
    return 2 * p / (1 - p**2) * square


def owner_drift(p: float, square: float = 1.0) -> float:
    """lim E[D^2] of D, the difference between a copy and its owner who moves at random: s^2 E[a] = p/(1 - p) s^2."""
    _check(p)
    return p / (1 - p) * square


def steady_drift(p: float, move: float) -> float:
    """lim E[D^2] between two copies of a shard whose owner moves by the same v at every step.

        2 p / (1 - p)^2 v^2

    which is v^2 E[(a - b)^2], twice the variance of an age.
    """
    _check(p)
    return 2 * p / (1 - p) ** 2 * move**2


def own_weight(p: float, workers: int) -> float:
    """The weight that an owner's own gradient has, on average, in a lossy mean in which it always arrives.

        E[1 / (1 + Bin(N - 1, 1 - p))] = (1 - p^N) / (N (1 - p))

    All weights add up to 1, so that the mean is unbiased for gradients of one expectation. For given, different
    gradients it leans towards the owner's: this weight, where 1/N would be even.
    """
    _check(p)
    return (1 - p**workers) / (workers * (1 - p))


def _check(p: float) -> None:
    check_probability("p", p)
    if p == 1:
        raise ValueError("p=1: nothing ever arrives, and drift has no limit; give a probability below 1")
