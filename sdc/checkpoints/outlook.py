"""The current cost of losing parts of a state, and advice on saving intervals and fractions, both based on the movement
of blocks.

For each block, a running checkpoint tracks the squared distance D_b from its saved version, and the number of steps a_b
since that version was saved. A loss of the block sets it back by a_b steps. The block's share of the progress per step
is its share of the squared movement per step, w_b = D_b / a_b^2. The expected loss in steps for a set S of blocks is

    sum_{b in S} w_b a_b / sum_b w_b,

which is the projection of the perturbation onto the path of the state, in steps along that path. This formula is exact
if blocks move uniformly and a loss sets them back along the path. For a perturbation of the norm sqrt(sum_{b in S} D_b)
in another direction, theorem 3.2 gives a second estimate, from the c and the distance to the optimum that movements
show. It is no bound: the theorem needs the slowest rate of all directions, and movements show the rate of those that
still move. See `Convergence`.

Qiao, Aragam, Zhang, Xing: Fault Tolerance in Iterative-Convergent Machine Learning, ICML 2019, sections 3 and B.1:

    x_{k+1} = f(x_k),   ||f(x) - x*|| <= c ||x - x*||,   0 < c < 1                                   (3), (5)
    y_{k+1} = f(y_k + delta_k),   y_0 = x_0

Recovery after a fault and undetected corruption are such perturbations. All statements concern upper bounds on the
number of iterations: kappa(x, eps) = log(||x_0 - x*|| / eps) / log(1/c) iterations suffice for an error below eps
without perturbations, and kappa(y, eps) iterations suffice with them. The *iteration cost* is the difference between
these bounds, not between measured numbers of iterations: a run that starts in a direction in which f converges faster
than c needs fewer than kappa iterations, and a perturbation in a slow direction can then cost more than the bound.
"""

import dataclasses
import functools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from jaxtyping import Float, Int
from scipy.special import stdtrit

KEPT = 32  # maximum number of saves used in a fit
POINTS = 1024  # approximate maximum number of intervals in a fit
SHARE = 0.95  # a fit uses only the blocks that move most and together account for this share of the squared movement
FRACTIONS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # candidate fractions of the state for advice
# Length of a simulation of saves, in multiples of saving everything once; the first half is discarded.
CYCLES = 6
TIMED = 31  # maximum number of saves in a median of times
WARM = 3  # minimum number of saves in a median of times: programs are compiled during the first
# Number of parts in a record's speed profile: twice the number of saves at the smallest fraction.
PARTS = 32
LEAST = 8  # minimum number of movements in a fit
ROUNDS = 50  # maximum iterations of a fit; five are usual
SETTLED = 1e-9  # relative change of the rate at which a fit has converged


class Convergence(NamedTuple):
    """The convergence of an iteration, estimated from the movement of its iterates as if the whole error shrank at one
    rate.

    If it does, c and the distance are exact. If directions converge at different rates, c lies between their rates, and
    the distance is too short, since directions that hardly move hardly count.

    Attributes:
        c: factor by which the error shrinks in an iteration.
        distance: distance from the last iterate to the optimum.
    """

    c: float
    distance: float

    def cost(self, size: float) -> float:
        """Estimates the number of iterations that a perturbation of this size costs now, by equation (6), starting from
        the last iterate.

        The number is log(1 + ||delta|| / ||x_T - x*||) / log(1/c), which is (6) with ||x_T - x*|| = c^T ||x_0 - x*||.
        docs/checkpoints.md states how far measured costs are from it.

        Args:
            size: ||delta||, 0 or more.

        Raises:
            ValueError: the size is out of range.
        """
        return iteration_cost_bound(self.distance, self.c, {0: size})


class Intervals(NamedTuple):
    """Movements of blocks in consecutive intervals."""

    blocks: Int[np.ndarray, "intervals"]  # the block; each block has its own distance to the optimum
    begins: Int[np.ndarray, "intervals"]  # steps at which intervals begin
    spans: Int[np.ndarray, "intervals"]  # lengths of the intervals in steps, above 0
    lengths: Float[np.ndarray, "intervals"]  # L2 norms of the movements, finite and above 0


def fit_convergence(movements: Sequence[float]) -> Convergence | None:
    """Estimates c and the distance to the optimum while an iteration runs, from ||x_{k+1} - x_k||.

    Section 7 of the paper leaves such an estimate to future work. If the error is c^k v for one direction v, which
    holds asymptotically, the iterates move by (1 - c) c^k ||v||: the logarithms of the movements lie on a line with
    slope log c, and the distance to the optimum is 1 / (1 - c) times the last movement, minus that movement.

    Args:
        movements: lengths of at least `LEAST` successive movements, newest last, all finite and at least 0.

    Returns:
        The estimate, or None if movements do not clearly shrink, that is, if the slope of the line is not below zero by
        its standard error times the 97.5 % quantile of Student's t, or if nothing moves. This is a criterion, and no
        statement of confidence in c: the noise of successive movements is not independent.

    Raises:
        ValueError: there are too few movements, or one of them is not a valid length.

    Example:
        >>> from sdc.analysis import fit_convergence
        >>> found = fit_convergence([0.9**k for k in range(20)])
        >>> round(found.c, 6), round(found.distance, 6)
        (0.9, 1.215767)
        >>> round(found.cost(found.distance), 1)  # a perturbation as large as the current distance
        6.6
    """
    lengths = np.asarray(movements, float)
    if lengths.ndim != 1 or lengths.size < LEAST or not (np.isfinite(lengths) & (lengths >= 0)).all():
        raise ValueError(f"movements={movements}: expected at least {LEAST} finite lengths of at least 0")
    if not lengths.all():
        return None
    # Implemented here since scipy.stats takes a second to import and a millisecond for this, while training waits.
    x, y = np.arange(lengths.size) - (lengths.size - 1) / 2, np.log(lengths)
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    error = math.sqrt(float(rest @ rest) / (lengths.size - 2) / float(x @ x))
    if (c := _factor(slope, error, lengths.size - 2)) is None:
        return None
    last = math.exp(float(y.mean()) + slope * float(x[-1]))
    return Convergence(c, last * c / (1 - c))


def fit_intervals(moved: Intervals) -> float | None:
    """Estimates c from movements of blocks in intervals of any length, by least squares on their logarithms.

    From step s to step s + a, a block whose error is c^k v moves by (c^s - c^(s + a)) ||v||. The factor c applies to
    one step and to all blocks; each block has its own ||v||. Deviations are regarded as noise that is either
    independent in each interval or common to all intervals that end at the same step, and the larger of the two
    standard errors is used. Returns c, or None if movements do not clearly shrink (see `fit_convergence`), or if there
    are too few ends or degrees of freedom.
    """
    _, block, counts = np.unique(moved.blocks, return_inverse=True, return_counts=True)
    ends, end = np.unique(moved.begins + moved.spans, return_inverse=True)
    freedom = len(block) - len(counts) - 1
    if freedom < LEAST - 2 or len(ends) < LEAST:
        return None

    def own(values: Float[np.ndarray, "intervals"]) -> Float[np.ndarray, "intervals"]:
        return values - (np.bincount(block, values) / counts)[block]

    # Gauss-Newton, starting from mean speeds at the midpoints. A mean speed exceeds the speed at the midpoint by the
    # factor sinh(x) / x.
    middles, speeds = own(moved.begins + moved.spans / 2), own(np.log(moved.lengths / moved.spans))
    rate, times, above = 0.0, middles, np.zeros(len(block))
    for _ in range(ROUNDS):
        rest, moment = speeds + rate * middles - above, float(times @ times)
        if not moment:
            return None
        change = -float(times @ rest) / moment
        rate += change
        if not 0 < rate < math.inf:
            return None
        if abs(change) <= SETTLED * rate:
            break
        x = rate * moved.spans / 2
        above = own(x + np.log(-np.expm1(-2 * x) / (2 * x)))
        times = middles - own(moved.spans / 2 * (1 / np.tanh(x) - 1 / x))
    else:
        return None
    alone = float(rest @ rest) / freedom / moment
    together = np.bincount(end, times * rest) / moment
    common = float(together @ together) * len(block) / freedom * len(ends) / (len(ends) - 1)
    return _factor(-rate, math.sqrt(max(alone, common)), min(freedom, len(ends) - 2))


def _factor(slope: float, error: float, freedom: int) -> float | None:
    """Returns c from its logarithm, or None if that is not below zero by more than its error explains."""
    reach = float(stdtrit(freedom, 0.975)) * error
    return c if (c := math.exp(slope)) > 0 and slope + reach < 0 else None


def iterations_bound(
    distance: float, c: float, epsilon: float, perturbations: Mapping[int, float] | None = None
) -> float:
    """Returns the number of iterations after which the expected error is below `epsilon`: kappa in the proof of theorem
    3.2, equations (11) and (12).

    The number is valid only after the last perturbation, and is negative if the start is closer to x* than `epsilon`.
    `distance` is ||x_0 - x*||, c is an upper bound on the factor by which the error shrinks per iteration, and
    `perturbations` maps each iteration k (from 0) before which a perturbation happens to E||delta_k||.
    """
    _check(distance, c)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon}: expected a finite number above 0")
    return _log_error(distance, c, perturbations) / -math.log(c) - math.log(epsilon) / -math.log(c)


def iteration_cost_bound(distance: float, c: float, perturbations: Mapping[int, float]) -> float:
    """Returns an upper bound on the number of iterations that perturbations cost (theorem 3.2, equation (6)).

        iota <= log(1 + Delta_T / ||x_0 - x*||) / log(1/c),   Delta_T = sum_k c^-k E||delta_k||

    The bound is valid for any epsilon, and is reached if f shrinks every error by the factor c and each perturbation
    points away from x*.

    Args:
        distance: ||x_0 - x*||, above 0.
        c: upper bound on the factor by which the error shrinks per iteration; between 0 and 1.
        perturbations: E||delta_k|| for each iteration k (from 0) before which a perturbation happens.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> from sdc.analysis import iteration_cost_bound
        >>> round(iteration_cost_bound(1.0, 0.5, {0: 1.0}), 9)  # twice the distance costs one iteration
        1.0
    """
    _check(distance, c)
    return (_log_error(distance, c, perturbations) - math.log(distance)) / -math.log(c)


def error_floor(c: float, size: float) -> float:
    """Returns an upper bound on the error that remains if every iteration is perturbed (example 3.3, equation (13)).

        lim sup E||y_k - x*|| <= c / (1 - c) * Delta

    Args:
        c: see `iteration_cost_bound`.
        size: Delta, the largest E||delta_k||, 0 or more.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> from sdc.analysis import error_floor
        >>> round(error_floor(0.9, 0.01), 9)
        0.09
    """
    _check(1.0, c)
    if not 0 <= size < math.inf:
        raise ValueError(f"size={size}: expected a finite number of at least 0")
    return c / (1 - c) * size


def _log_error(distance: float, c: float, perturbations: Mapping[int, float] | None) -> float:
    """Returns log(||x_0 - x*|| + Delta_T), avoiding overflow of c^-k."""
    terms = [math.log(distance)]
    for at, size in (perturbations or {}).items():
        if at < 0 or at != int(at) or not 0 <= size < math.inf:
            given = f"a perturbation of {size} at iteration {at}"
            raise ValueError(f"{given}: expected a finite size and an integer iteration, both at least 0")
        if size:
            terms.append(math.log(size) - at * math.log(c))
    largest = max(terms)
    return largest + math.log(sum(math.exp(term - largest) for term in terms))


def _check(distance: float, c: float) -> None:
    if not 0 < distance < math.inf:
        raise ValueError(f"distance={distance}: expected a finite number above 0")
    if not 0 < c < 1:
        raise ValueError(f"c={c}: expected a number between 0 and 1")


Policy: TypeAlias = Literal["priority", "round-robin", "random"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def choose(
    policy: Policy, budget: float, sizes: Sequence[int], moved: np.ndarray, *, cursor: int = 0, seed: int = 0
) -> tuple[list[int], int]:
    """Chooses blocks within a budget of bytes, but at least one block unless the budget is zero.

    Args:
        policy: order of selection: `priority` (largest `moved` per byte first), `round-robin` (from the cursor) or
            `random`.
        budget: maximum bytes to write.
        sizes: bytes of the blocks.
        moved: movement of each block; infinity for blocks that were never saved, which are chosen first.
        cursor: block at which `round-robin` continues.
        seed: seed of `random`.

    Returns:
        Numbers of the blocks, and the next cursor.

    Example:
        >>> import numpy as np
        >>> from sdc.checkpoints import choose
        >>> choose("priority", 16, [8, 8, 8, 8], np.asarray([1.0, 9.0, 0.0, 4.0]))
        ([1, 3], 0)
    """
    count, wide = len(sizes), np.asarray(sizes, float)
    # NaN means a movement of unknown size.
    urgency = np.where(np.isnan(moved), np.inf, moved) / np.maximum(wide, 1)
    if policy == "round-robin":
        order = [(cursor + number) % count for number in range(count)]
    elif policy == "random":
        order = np.random.default_rng(seed).permutation(count).tolist()
    else:
        order = np.argsort(-urgency, kind="stable").tolist()
    if policy != "priority":
        order.sort(key=lambda number: not np.isinf(urgency[number]))
    held, chosen = 0.0, list[int]()
    for number in order:
        held += wide[number]
        if budget <= 0 or (chosen and held > budget):
            break
        chosen.append(number)
    return chosen, (chosen[-1] + 1) % count if chosen and policy == "round-robin" else cursor


class Loss(NamedTuple):
    """The current cost of a loss.

    Attributes:
        fraction: fraction of the blocks, chosen at random, that are lost.
        steps: expected cost of partial recovery, in steps.
        one_rate: estimate by `Convergence.cost`, for a change in any direction; None without evidence of linear
            convergence.
        perturbation: expected L2 norm of the change, sqrt(fraction * sum_b D_b), by theorem 4.2.
    """

    fraction: float
    steps: float
    one_rate: float | None
    perturbation: float


@dataclasses.dataclass(frozen=True, eq=False)
class Outlook:
    """The movement of a state according to its running checkpoint, just before a save.

    Attributes:
        step: number of steps done.
        ages: number of steps since the saved version of each block.
        squares: squared distance of each block from its saved version, estimated from the block's speed if unknown.
        speeds: squared movement of each block per step, in its last interval.
        sizes: bytes of each block.
        convergence: factor by which the error shrinks per step, and distance to the optimum; None if there is no
            evidence of linear convergence, or after too few saves.
        every: number of steps between saves.
    """

    step: int
    ages: Int[np.ndarray, "blocks"]
    squares: Float[np.ndarray, "blocks"]
    speeds: Float[np.ndarray, "blocks"]
    sizes: Sequence[int]
    convergence: Convergence | None
    every: int

    def loss(self, fraction: float) -> Loss:
        """Returns the current cost of losing a random fraction of the blocks.

        Raises:
            ValueError: the fraction is 0 or less, or above 1.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction}: expected more than 0 and at most 1")
        norm = math.sqrt(fraction * float(self.squares.sum()))
        return Loss(fraction, fraction * self.behind(np.arange(len(self.ages))), self.one_rate(norm), norm)

    def one_rate(self, perturbation: float) -> float | None:
        """Returns `Convergence.cost` of a perturbation of this L2 norm, or None if the convergence or the norm is
        unknown."""
        if self.convergence is None or not math.isfinite(perturbation):
            return None
        return self.convergence.cost(perturbation)

    def behind(self, blocks: Sequence[int] | Int[np.ndarray, "lost"]) -> float:
        """Returns the number of steps that losing exactly these blocks would cost now.

        Raises:
            ValueError: a block does not exist or is given twice.
        """
        moving, count = float(self.speeds.sum()), len(self.ages)
        chosen = np.asarray(blocks, int)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= count or len(np.unique(chosen)) < len(chosen)):
            raise ValueError(f"blocks={chosen.tolist()}: expected distinct numbers from 0 to {count - 1}")
        return float((self.speeds[chosen] * self.ages[chosen]).sum()) / moving if moving else 0.0

    def later(self, step: int, steps: Int[np.ndarray, "blocks"]) -> "Outlook":
        """Returns the outlook at `step` if each block is last saved at its step in `steps` and keeps its speed."""
        ages = _ages(step, steps)
        return dataclasses.replace(self, step=step, ages=ages, squares=self.speeds * ages**2)

    def profile(self, parts: int = PARTS) -> list[float]:
        """Returns the speeds of parts of equal size, fastest first; the number of parts is independent of the number of
        blocks."""
        sizes = np.maximum(np.asarray(self.sizes, float), 1)
        order = np.argsort(-self.speeds / sizes, kind="stable")
        size, speed = (np.concatenate([[0.0], np.cumsum(one[order])]) for one in (sizes, self.speeds))
        return np.maximum(np.diff(np.interp(np.linspace(0, size[-1], parts + 1), size, speed)), 0).tolist()

    @staticmethod
    def of_profile(profile: Sequence[float], size: int, step: int) -> "Outlook":
        """Creates an outlook for `advise` from a record's speeds of parts of equal size, the total bytes of these
        parts, and the number of steps done."""
        count = len(profile)
        nothing = np.zeros(count, int)
        return Outlook(step, nothing, np.zeros(count), np.asarray(profile, float), [size // count] * count, None, 1)


class Watch:
    """Computes an outlook at each save; stores a few numbers per block, but no copies of blocks.

    Example:
        >>> import numpy as np
        >>> from sdc.checkpoints.outlook import Watch
        >>> watch = Watch([4, 4])
        >>> found = watch.saved(10, np.asarray([9, 6]), np.asarray([1.0, 16.0]))  # saved one and four steps ago
        >>> found.loss(1.0).steps, found.behind([0])  # each moves by 1 per step
        (2.5, 0.5)
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Starts watching blocks of the given sizes in bytes."""
        self._sizes = list(sizes)
        count = len(self._sizes)
        self._speeds = np.full(count, np.nan)
        # The last interval of each block with known movement, and the start of its current interval.
        self._begins, self._spans, self._since = np.zeros(count, int), np.ones(count, int), np.zeros(count, int)
        self._begun = np.zeros(count, bool)
        self._done: list[Intervals] = []
        self._before: int | None = None
        self._every = 1

    def saved(
        self, step: int, steps: Int[np.ndarray, "blocks"], squares: Float[np.ndarray, "blocks"]
    ) -> Outlook | None:
        """Returns the outlook at a save.

        Args:
            step: number of steps done.
            steps: step at which each block was last saved, or step of the version to which the block was restored.
            squares: squared distances from these versions; infinite if unknown.

        Returns:
            The outlook, or None if the movement of some block was never measured, if a squared distance is NaN, or if a
            block was saved after this step.
        """
        ages = _ages(step, steps)
        if self._before is not None and step < self._before:  # from here on, the state follows a different path
            self._before, self._done = None, []
        self._end_intervals(np.maximum(steps, 0))
        if self._before != step:
            self._every = max(1, int(ages.min(initial=step)) if self._before is None else step - self._before)
        self._before = step
        known = np.isfinite(squares) & (ages > 0)
        self._speeds = np.where(known, np.where(known, squares, 0.0) / np.maximum(ages, 1) ** 2, self._speeds)
        self._begins, self._spans = np.where(known, self._since, self._begins), np.where(known, ages, self._spans)
        later = len(ages) > 0 and int(np.max(steps)) > step
        if not len(ages) or later or np.isnan(squares).any() or np.isnan(self._speeds).any():
            return None
        found = np.where(known, squares, self._speeds * ages**2)
        return Outlook(step, ages, found, self._speeds.copy(), self._sizes, self._convergence(step), self._every)

    def went_back(self, blocks: Sequence[int], step: int) -> None:
        """Records that these blocks were restored at this step, which invalidates their earlier movement."""
        self._since[list(blocks)] = step
        self._forget(blocks)

    def _forget(self, blocks: Sequence[int] | Int[np.ndarray, "some"]) -> None:
        others = np.ones(len(self._since), bool)
        others[list(blocks)] = False
        self._done = [Intervals(*(part[others[one.blocks]] for part in one)) for one in self._done]

    def _end_intervals(self, since: Int[np.ndarray, "blocks"]) -> None:
        """Stores the movement, as of the last measurement, of each block that was saved since that measurement."""
        anew, known = since != self._since, since == self._begins + self._spans
        if len(back := np.flatnonzero(anew & ~known)):
            self._forget(back)
        done = anew & known & (self._speeds > 0)
        # Among blocks of equal age, those saved first moved most by chance.
        kept = np.flatnonzero(done & self._begun)
        self._begun |= done
        self._since = since
        if len(kept):
            spans = self._spans[kept]
            lengths = np.sqrt(self._speeds[kept]) * spans
            self._done = [*self._done, Intervals(kept, self._begins[kept], spans, lengths)][-KEPT:]

    def _convergence(self, step: int) -> Convergence | None:
        """Fits the convergence to the movements that the fastest blocks made between saves after they were last
        restored."""
        if not self._done:
            return None
        blocks = np.concatenate([one.blocks for one in self._done])
        count = math.ceil(len(self._speeds) * POINTS / max(len(blocks), 1))
        order = np.argsort(-self._speeds, kind="stable")[:count]
        faster = np.cumsum(self._speeds[order]) - self._speeds[order]
        busy = np.zeros(len(self._speeds), bool)
        busy[order[faster < SHARE * self._speeds.sum()]] = True
        kept = busy[blocks]
        fit = fit_intervals(Intervals(*(np.concatenate(part)[kept] for part in zip(*self._done, strict=True))))
        if fit is None:
            return None
        rate = -math.log(fit)
        # The remaining distance of a block that moved from c^begin ||v|| to c^(begin + span) ||v||.
        left = np.exp(-rate * (step - self._begins)) / -np.expm1(-rate * self._spans)
        distance = float(np.linalg.norm(np.sqrt(self._speeds) * self._spans * left))
        return Convergence(fit, distance) if 0 < distance < math.inf else None


def _ages(step: int, steps: Int[np.ndarray, "blocks"]) -> Int[np.ndarray, "blocks"]:
    """Returns the number of steps since each block was saved; a block that was never saved counts as saved at the
    start."""
    return np.maximum(step - np.maximum(steps, 0), 0)


class Advice(NamedTuple):
    """Recommended settings for saving.

    Attributes:
        fraction: fraction of the bytes that each save writes.
        every: number of steps between saves.
        waste: fraction of the time that is blocked by saves or spent on lost steps; 1 means that no time is left for
            training, because failures occur, or saves are due, faster than their cost can be recovered.
        steps: expected cost of a failure, in steps.
        capped: whether a longer interval would be better, but is ruled out by the length of the run.
    """

    fraction: float
    every: int
    waste: float
    steps: float
    capped: bool


def advise(
    outlook: Outlook,
    *,
    step_seconds: float,
    save_seconds: tuple[float, float],
    bandwidth: float,
    failure_every: float,
    lost: float,
    fraction: float | None = None,
    every: int | None = None,
) -> Advice:
    """Returns the fraction and the interval with the least waste::

        waste = (held + whole * fraction) / (every * step_seconds)
                + steps(fraction, every) * step_seconds / failure_every
        steps = lost * (behind(fraction) * every + fraction * bytes / bandwidth / step_seconds)

    A simulation, in which blocks keep their current speeds and are saved by priority, determines by how many saves the
    blocks are behind. A save counts once it is written, which may take until the next save. Until then, its blocks keep
    their ages, which adds `every` steps per cycle (in equilibrium, saves reduce ages by as much as steps increase
    them); the second term of `steps` is therefore the same for every interval. The chosen interval is never longer than
    the run, which provides no data about longer intervals; a given interval may be longer.

    Args:
        outlook: movement of blocks at the last step of the run.
        step_seconds: duration of a step.
        save_seconds: seconds for which any save blocks training, and the additional seconds of a full save.
        bandwidth: bytes per second written to storage.
        failure_every: mean seconds between failures.
        lost: fraction of the state that a failure loses.
        fraction, every: fixed values (default: chosen by this function); a save that is due before the previous save is
            written waits for that save.

    Raises:
        ValueError: a number is out of range, or no block moves.
    """
    for name, value in {
        "step_seconds": step_seconds, "bandwidth": bandwidth, "failure_every": failure_every, "lost": lost,
        "fraction": 1 if fraction is None else fraction, "every": 1 if every is None else every,
    }.items():  # fmt: skip
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: expected a finite number above 0")
    if max(lost, 0 if fraction is None else fraction) > 1 or not all(0 <= one < math.inf for one in save_seconds):
        given = f"lost={lost}, fraction={fraction}, save_seconds={save_seconds}"
        raise ValueError(f"{given}: expected fractions of at most 1, and times of at least 0")
    if not 0 < float(outlook.speeds.sum()) < math.inf:
        raise ValueError("no block moves; expected an outlook of a state that changes")
    if every is None and outlook.step < 1:
        raise ValueError(f"outlook.step={outlook.step}: expected a run of at least one step, unless `every` is given")
    held, whole = save_seconds
    candidates = []
    for part in FRACTIONS if fraction is None else (fraction,):
        # Mean number of saves that blocks are behind, independent of the interval.
        behind = _behind(outlook, part)
        written = part * sum(outlook.sizes) / bandwidth / step_seconds
        dump = held + whole * part
        best = math.sqrt(dump * failure_every / (lost * behind)) / step_seconds
        capped = every is None and best > max(outlook.step, written)
        near = {max(1, math.ceil(written), min(one, outlook.step)) for one in (math.floor(best), math.ceil(best))}
        for interval in near if every is None else (every,):
            waiting = max(0.0, written - interval) * step_seconds
            steps = lost * (behind * interval + written)
            waste = (dump + waiting) / (interval * step_seconds) + steps * step_seconds / failure_every
            candidates.append(Advice(part, interval, waste, steps, capped))
    least = min(candidates, key=lambda one: (one.waste, one.every))
    return least._replace(waste=min(1.0, least.waste))


@functools.lru_cache(maxsize=8)
def _behind(outlook: Outlook, fraction: float) -> float:
    """Returns the mean number of save intervals by which blocks are behind at a failure, weighted by movement."""
    speeds, sizes = outlook.speeds, list(outlook.sizes)
    weights = speeds / speeds.sum()
    ages, total, budget = np.zeros(len(sizes)), [], 0.0
    for _ in range(math.ceil(CYCLES / fraction)):
        total.append(float((weights * (ages + 0.5)).sum()))  # failures are in the middle of an interval on average
        ages += 1
        budget += fraction * sum(sizes)
        chosen, _ = choose("priority", budget, sizes, weights * ages**2)
        budget -= sum(sizes[block] for block in chosen)
        ages[chosen] = 0
    return float(np.mean(total[len(total) // 2 :]))


def daly_interval(save_seconds: float, failure_every: float) -> float:
    """Returns the interval between full checkpoints that minimizes waste, in seconds.

    Daly, Future Generation Computer Systems 22 (2006), equation 37: for d < 2 M

        sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) + 1/9 (d / 2M)) - d,   and M otherwise.

    Args:
        save_seconds: d, time for which a checkpoint blocks training.
        failure_every: M, mean seconds between failures.

    Raises:
        ValueError: a number is not above 0.

    Example:
        >>> from sdc.checkpoints import daly_interval
        >>> round(daly_interval(60, 86400) / 60)  # minutes
        53
    """
    if not (0 < save_seconds < math.inf and 0 < failure_every < math.inf):
        raise ValueError(f"save_seconds={save_seconds}, failure_every={failure_every}: expected finite numbers above 0")
    if save_seconds >= 2 * failure_every:
        return failure_every
    ratio = save_seconds / (2 * failure_every)
    return math.sqrt(2 * save_seconds * failure_every) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


class Timings(NamedTuple):
    """Medians over the last saves of this process."""

    held: float  # seconds for which a save of any size blocks training
    whole: float  # additional seconds for a full save
    bandwidth: float  # bytes of the state that all processes together write per second


class SaveClock:
    def __init__(self) -> None:
        self._held, self._whole, self._bandwidth = (deque[float](maxlen=TIMED) for _ in range(3))

    def held(self, fixed: float, copying: float, *, share: float) -> None:
        """Records for how many seconds a save, which wrote this share of the bytes, blocked its caller: a fixed time,
        and the time for copying."""
        if share > 0:
            self._held.append(fixed)
            self._whole.append(copying / share)

    def written(self, seconds: float, size: int) -> None:
        """Records how many seconds all processes together took to write a save of `size` bytes in the background."""
        if seconds > 0 and size > 0:
            self._bandwidth.append(size / seconds)

    @property
    def timings(self) -> Timings | None:
        """Medians of the recorded times; None after too few saves."""
        kept = (self._held, self._whole, self._bandwidth)
        return Timings(*map(statistics.median, kept)) if min(map(len, kept)) >= WARM else None
