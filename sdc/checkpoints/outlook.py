"""What losing parts of a state would cost now, and how often to save how much of it: from how far blocks moved.

A running checkpoint knows of each block how far it has moved since it was saved (squared distance D_b), and how many
steps ago that was (a_b). Losing the block takes it back by a_b steps; its part in the progress of a step is its part in
the squared movement, w_b = D_b / a_b^2. Steps are then lost in proportion: for a set S of blocks

    sum_{b in S} w_b a_b / sum_b w_b,

which is the perturbation's projection on the way that the state came, in steps of that way. It is exact where blocks
move evenly and all loss is set back along the way. Theorem 3.2 bounds the cost by the perturbation's norm sqrt(sum_{b
in S} D_b), whatever its direction, where the iteration converges linearly.

Qiao, Aragam, Zhang, Xing: Fault Tolerance in Iterative-Convergent Machine Learning, ICML 2019, sections 3 and B.1:

    x_{k+1} = f(x_k),   ||f(x) - x*|| <= c ||x - x*||,   0 < c < 1                                   (3), (5)
    y_{k+1} = f(y_k + delta_k),   y_0 = x_0

A recovery after a fault is such a perturbation, and so is a wrong number that nobody noticed. All statements are about
upper bounds of iterations: kappa(x, eps) = log(||x_0 - x*|| / eps) / log(1/c) iterations suffice for an error below eps
without perturbations, and kappa(y, eps) with them. The *iteration cost* is the difference of the two, and not that of
the iterations that were needed: a run whose start happens to lie in a direction in which f converges faster than by c
needs fewer than kappa, and a perturbation in a slow direction then costs more than the bound of the cost.
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

KEPT = 32  # saves that a fit looks back on, at most
POINTS = 1024  # intervals that it looks at, about, at most
SHARE = 0.95  # of the squared movement: only the blocks that move most, and make it up, are looked at
FRACTIONS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # fractions of the state that advice chooses among
# Times in which everything could have been saved, that a simulation of saves takes; the first half is not counted.
CYCLES = 6
TIMED = 31  # saves that a median of times is taken of, at most
WARM = 3  # saves that it needs: programs are compiled during the first
# Parts that what a record has of speeds is made of: twice as many as saves of the smallest of the fractions take.
PARTS = 32
LEAST = 8  # movements that a fit needs
ROUNDS = 50  # in which a fit must settle; five are usual
SETTLED = 1e-9  # change of the rate, relative to it, that is none


class Convergence(NamedTuple):
    """How an iteration converges, by how far its iterates moved.

    Attributes:
        c: factor by which the error shrinks in an iteration.
        interval: 95 % of c, if what the movements depart from a geometric series by is independent noise.
        distance: from the last iterate to the optimum.
    """

    c: float
    interval: tuple[float, float]
    distance: float

    def cost(self, size: float) -> float:
        """Iterations that a perturbation of this size costs now: equation (6), seen from the last iterate.

        log(1 + ||delta|| / ||x_T - x*||) / log(1/c), which is (6) with ||x_T - x*|| = c^T ||x_0 - x*||.

        Args:
            size: ||delta||, 0 or more.

        Raises:
            ValueError: it is out of its range.
        """
        return iteration_cost_bound(self.distance, self.c, {0: size})


class Intervals(NamedTuple):
    """How far blocks moved, each in intervals that follow one another."""

    blocks: Int[np.ndarray, "intervals"]  # which block it was; each has a distance to its optimum of its own
    begins: Int[np.ndarray, "intervals"]  # steps at which intervals begin
    spans: Int[np.ndarray, "intervals"]  # their steps, above 0
    lengths: Float[np.ndarray, "intervals"]  # L2 norms of the movements, finite and above 0


def fit_convergence(movements: Sequence[float]) -> Convergence | None:
    """Estimates c and the distance to the optimum while an iteration runs, from ||x_{k+1} - x_k||.

    What the paper's section 7 names as future work. If the error is c^k v for one direction v, as it is in the end, the
    iterates move by (1 - c) c^k ||v||: the logarithms lie on a line of slope log c, and the optimum is another 1 / (1 -
    c) movements of the last length away, less that movement.

    Args:
        movements: lengths of successive movements, the newest last: at least `LEAST`, all finite and at least 0.

    Returns:
        None if nothing says that the iteration converges linearly: the interval of c reaches 1, or nothing moves.

    Raises:
        ValueError: there are too few movements, or one is no length.

    Example:
        >>> from sdc.analysis import fit_convergence
        >>> found = fit_convergence([0.9**k for k in range(20)])
        >>> round(found.c, 6), round(found.distance, 6)
        (0.9, 1.215767)
        >>> round(found.cost(found.distance), 1)  # as far off as it is now: until the error has halved
        6.6
    """
    lengths = np.asarray(movements, float)
    if lengths.ndim != 1 or lengths.size < LEAST or not (np.isfinite(lengths) & (lengths >= 0)).all():
        raise ValueError(f"movements={movements}: expected {LEAST} or more lengths, finite and at least 0")
    if not lengths.all():
        return None
    # By hand: scipy.stats takes a second to import, and a millisecond for this, while a training waits.
    x, y = np.arange(lengths.size) - (lengths.size - 1) / 2, np.log(lengths)
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    error = math.sqrt(float(rest @ rest) / (lengths.size - 2) / float(x @ x))
    if (found := _factor(slope, error, lengths.size - 2)) is None:
        return None
    c, interval = found
    last = math.exp(float(y.mean()) + slope * float(x[-1]))
    return Convergence(c, interval, last * c / (1 - c))


def fit_intervals(moved: Intervals) -> tuple[float, tuple[float, float]] | None:
    """Estimates c from movements of blocks in intervals of any lengths, by least squares of their logarithms.

    A block whose error is c^k v moves from step s to step s + a by (c^s - c^(s + a)) ||v||. c is that of a step and the
    same for all blocks, ||v|| of each its own. What movements depart from that by is noise of each interval, or common
    to all intervals that end at the same step: the larger of both errors counts. Returns c and 95 % of it; None if
    nothing says that it is below 1, or there are too few ends or degrees of freedom.
    """
    _, block, counts = np.unique(moved.blocks, return_inverse=True, return_counts=True)
    ends, end = np.unique(moved.begins + moved.spans, return_inverse=True)
    freedom = len(block) - len(counts) - 1
    if freedom < LEAST - 2 or len(ends) < LEAST:
        return None

    def own(values: Float[np.ndarray, "intervals"]) -> Float[np.ndarray, "intervals"]:
        return values - (np.bincount(block, values) / counts)[block]

    # By Gauss and Newton, from the mean speeds at the middles. A mean speed is above that at the middle by sinh(x) / x.
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


def _factor(slope: float, error: float, freedom: int) -> tuple[float, tuple[float, float]] | None:
    """c and 95 % of it, by its logarithm; None if they reach 1."""
    reach = float(stdtrit(freedom, 0.975)) * error
    c, low, high = (math.exp(one) for one in (slope, slope - reach, slope + reach))
    return (c, (low, high)) if c > 0 and high < 1 else None


def iterations_bound(
    distance: float, c: float, epsilon: float, perturbations: Mapping[int, float] | None = None
) -> float:
    """Iterations after which the expected error is below a number: kappa, proof of theorem 3.2, equations (11), (12).

    It holds from the last perturbation on; it is negative where the start is closer than that. `distance` is ||x_0 -
    x*||, c the factor by which the error shrinks at least in an iteration, and `perturbations` has E||delta_k|| by the
    iteration k, from 0, before which it happens.
    """
    _check(distance, c)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon}: expected a finite number above 0")
    return _log_error(distance, c, perturbations) / -math.log(c) - math.log(epsilon) / -math.log(c)


def iteration_cost_bound(distance: float, c: float, perturbations: Mapping[int, float]) -> float:
    """The most iterations that perturbations cost: theorem 3.2, equation (6).

        iota <= log(1 + Delta_T / ||x_0 - x*||) / log(1/c),   Delta_T = sum_k c^-k E||delta_k||

    Whatever epsilon is; with equality if f shrinks every error by c and each perturbation points away from x*.

    Args:
        distance: ||x_0 - x*||, above 0.
        c: factor by which the error shrinks at least, in an iteration; between 0 and 1.
        perturbations: E||delta_k|| by iteration k, from 0, before which it happens.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> from sdc.analysis import iteration_cost_bound
        >>> round(iteration_cost_bound(1.0, 0.5, {0: 1.0}), 9)  # twice as far away: one iteration more
        1.0
    """
    _check(distance, c)
    return (_log_error(distance, c, perturbations) - math.log(distance)) / -math.log(c)


def error_floor(c: float, size: float) -> float:
    """The error below which nobody can come if every iteration is perturbed: example 3.3, equation (13).

        lim sup E||y_k - x*|| <= c / (1 - c) * Delta

    Args:
        c: see `iteration_cost_bound`.
        size: Delta, the largest E||delta_k||, 0 or more.

    Raises:
        ValueError: a number is out of its range.

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
    """log(||x_0 - x*|| + Delta_T), where c^-k alone may be too large for a number."""
    terms = [math.log(distance)]
    for at, size in (perturbations or {}).items():
        if at < 0 or at != int(at) or not 0 <= size < math.inf:
            given = f"a perturbation of {size} at iteration {at}"
            raise ValueError(f"{given}: expected finite sizes, and whole iterations from 0")
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
    """Chooses blocks of at most so many bytes; one block at least, unless there are none to spend.

    Args:
        policy: `priority`: largest `moved` for each byte first; `round-robin`: on from the cursor; `random`: any.
        budget: bytes that may be written.
        sizes: bytes of the blocks.
        moved: how far each moved; of those that never were saved or could not be, infinity, and they come first.
        cursor: block at which `round-robin` goes on.
        seed: of `random`.

    Returns:
        Numbers of the blocks, and the next cursor.

    Example:
        >>> import numpy as np
        >>> from sdc.checkpoints import choose
        >>> choose("priority", 16, [8, 8, 8, 8], np.asarray([1.0, 9.0, 0.0, 4.0]))
        ([1, 3], 0)
    """
    count, wide = len(sizes), np.asarray(sizes, float)
    # What is not a number moved, and by no known amount.
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
    """What a loss would cost now.

    Attributes:
        fraction: of the blocks, any of them.
        steps: expected cost of giving back what was lost alone, in steps.
        bound: the most that theorem 3.2 allows, in steps; None where nothing says that the training converges linearly.
        perturbation: expected L2 norm of the change, sqrt(fraction * sum_b D_b), theorem 4.2.
    """

    fraction: float
    steps: float
    bound: float | None
    perturbation: float


@dataclasses.dataclass(frozen=True, eq=False)
class Outlook:
    """How a state moves, by its running checkpoint: at a save, before that.

    Attributes:
        step: steps done.
        ages: steps since each block was as it is saved.
        squares: of each block the squared distance from what is saved; where that is not known, by its speed.
        speeds: of each block the squared movement in a step, by its last interval.
        sizes: bytes of each block.
        convergence: factor of a step and distance to the optimum; None if nothing says that the training converges
            linearly, or too few saves were made.
        every: steps from one save to the next.
    """

    step: int
    ages: Int[np.ndarray, "blocks"]
    squares: Float[np.ndarray, "blocks"]
    speeds: Float[np.ndarray, "blocks"]
    sizes: Sequence[int]
    convergence: Convergence | None
    every: int

    def loss(self, fraction: float) -> Loss:
        """What losing a fraction of the blocks, drawn at random, would cost now.

        Raises:
            ValueError: the fraction is not above 0 and at most 1.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction}: expected more than 0 and at most 1")
        norm = math.sqrt(fraction * float(self.squares.sum()))
        return Loss(fraction, fraction * self.behind(np.arange(len(self.ages))), self.bound(norm), norm)

    def bound(self, perturbation: float) -> float | None:
        """The most steps that a perturbation of this L2 norm costs now, by theorem 3.2; None if that is not known."""
        if self.convergence is None or not math.isfinite(perturbation):
            return None
        return self.convergence.cost(perturbation)

    def behind(self, blocks: Sequence[int] | Int[np.ndarray, "lost"]) -> float:
        """Steps that losing just these blocks would cost now.

        Raises:
            ValueError: there is no such block, or one is named twice.
        """
        moving, count = float(self.speeds.sum()), len(self.ages)
        chosen = np.asarray(blocks, int)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= count or len(np.unique(chosen)) < len(chosen)):
            raise ValueError(f"blocks={chosen.tolist()}: expected different numbers from 0 to {count - 1}")
        return float((self.speeds[chosen] * self.ages[chosen]).sum()) / moving if moving else 0.0

    def later(self, step: int, steps: Int[np.ndarray, "blocks"]) -> "Outlook":
        """The same at another step, for blocks that were saved at these steps and move as they did."""
        ages = _ages(step, steps)
        return dataclasses.replace(self, step=step, ages=ages, squares=self.speeds * ages**2)

    def profile(self, parts: int = PARTS) -> list[float]:
        """Speeds of parts that have as many bytes each: the fastest first, whatever the number of blocks."""
        sizes = np.maximum(np.asarray(self.sizes, float), 1)
        order = np.argsort(-self.speeds / sizes, kind="stable")
        size, speed = (np.concatenate([[0.0], np.cumsum(one[order])]) for one in (sizes, self.speeds))
        return np.maximum(np.diff(np.interp(np.linspace(0, size[-1], parts + 1), size, speed)), 0).tolist()

    @staticmethod
    def of_profile(profile: Sequence[float], size: int, step: int) -> "Outlook":
        """What advice needs to know, out of a record: speeds of equal parts, bytes of all of them, and steps done."""
        count = len(profile)
        nothing = np.zeros(count, int)
        return Outlook(step, nothing, np.zeros(count), np.asarray(profile, float), [size // count] * count, None, 1)


class Watch:
    """Makes an outlook of each save; keeps a few numbers of each block and no copy of anything.

    Example:
        >>> import numpy as np
        >>> from sdc.checkpoints.outlook import Watch
        >>> watch = Watch([4, 4])
        >>> found = watch.saved(10, np.asarray([9, 6]), np.asarray([1.0, 16.0]))  # one and four steps ago
        >>> found.loss(1.0).steps, found.behind([0])  # each moves by 1 in a step
        (2.5, 0.5)
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Begins, with the bytes of each block."""
        self._sizes = list(sizes)
        count = len(self._sizes)
        self._speeds = np.full(count, np.nan)
        # The last interval of each block of which its movement is known, and since when it is in the present one.
        self._begins, self._spans, self._since = np.zeros(count, int), np.ones(count, int), np.zeros(count, int)
        self._begun = np.zeros(count, bool)
        self._done: list[Intervals] = []
        self._before: int | None = None
        self._every = 1

    def saved(
        self, step: int, steps: Int[np.ndarray, "blocks"], squares: Float[np.ndarray, "blocks"]
    ) -> Outlook | None:
        """What is known at a save.

        Args:
            step: steps done.
            steps: at which each block was saved last before, or was given back as it had been saved.
            squares: squared distances from what was saved then; infinite where they are not known.

        Returns:
            None as long as there is a block of which it was never known how it moves, if a square is no number, and if
            a block was saved later than at this step.
        """
        ages = _ages(step, steps)
        if self._before is not None and step < self._before:  # another way from here
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
        """Says that these blocks go on as they were saved, since this step: what they did before tells no more."""
        self._since[list(blocks)] = step
        self._forget(blocks)

    def _forget(self, blocks: Sequence[int] | Int[np.ndarray, "some"]) -> None:
        others = np.ones(len(self._since), bool)
        others[list(blocks)] = False
        self._done = [Intervals(*(part[others[one.blocks]] for part in one)) for one in self._done]

    def _end_intervals(self, since: Int[np.ndarray, "blocks"]) -> None:
        """Keeps how far those moved that were saved since: what was saved is what had been measured at that step."""
        anew, known = since != self._since, since == self._begins + self._spans
        if len(back := np.flatnonzero(anew & ~known)):
            self._forget(back)
        done = anew & known & (self._speeds > 0)
        # Those that are saved first of all that are as old are the ones that moved most by chance.
        kept = np.flatnonzero(done & self._begun)
        self._begun |= done
        self._since = since
        if len(kept):
            spans = self._spans[kept]
            lengths = np.sqrt(self._speeds[kept]) * spans
            self._done = [*self._done, Intervals(kept, self._begins[kept], spans, lengths)][-KEPT:]

    def _convergence(self, step: int) -> Convergence | None:
        """By the blocks that move most, each from save to save since it went back, if it did."""
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
        rate = -math.log(fit[0])
        # Of a block that came from c^begin ||v|| to c^(begin + span) ||v||, what is left now.
        left = np.exp(-rate * (step - self._begins)) / -np.expm1(-rate * self._spans)
        distance = float(np.linalg.norm(np.sqrt(self._speeds) * self._spans * left))
        return Convergence(*fit, distance) if 0 < distance < math.inf else None


def _ages(step: int, steps: Int[np.ndarray, "blocks"]) -> Int[np.ndarray, "blocks"]:
    """Steps since each was saved; what never was is as at the start."""
    return np.maximum(step - np.maximum(steps, 0), 0)


class Advice(NamedTuple):
    """How to save.

    Attributes:
        fraction: of the bytes, in each save.
        every: steps from one save to the next.
        waste: of the time, for saves that hold up the training and for steps that are lost; 1 says that no time is left
            for training, since failures come, or saves are due, faster than what they cost is made up for.
        steps: expected cost of a failure, in steps.
        capped: whether it would be more steps from one save to the next, but the run has seen no more than these.
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
    """The fraction and the interval that waste least time.

        waste = (held + whole * fraction) / (every * step_seconds)
                + steps(fraction, every) * step_seconds / failure_every
        steps = lost * (behind(fraction) * every + fraction * bytes / bandwidth / step_seconds)

    How many saves blocks are behind is simulated: blocks that move as they do now, saved by priority. A save counts
    when it is written, and is given as long for that as there is until the next: until then the blocks that it takes
    are as old as they were, which are `every` steps in a cycle (what saves bring nearer is what steps bring farther),
    and the second part of the cost is the same for every interval. No interval is chosen that is longer than the run:
    nothing was seen of those. One that is given may be.

    Args:
        outlook: how blocks move; its step is that of the run.
        step_seconds: of a step.
        save_seconds: for which a save holds up the training: of any save, and in addition of one of everything.
        bandwidth: bytes that storage takes in a second.
        failure_every: mean seconds between failures.
        lost: fraction of the state that a failure takes.
        fraction, every: what is not to be chosen; a save that is due before the last one is written waits for it.

    Raises:
        ValueError: a number is out of its range, or nothing moves.
    """
    for name, value in {
        "step_seconds": step_seconds, "bandwidth": bandwidth, "failure_every": failure_every, "lost": lost,
        "fraction": 1 if fraction is None else fraction, "every": 1 if every is None else every,
    }.items():  # fmt: skip
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: expected a finite number above 0")
    if max(lost, 0 if fraction is None else fraction) > 1 or not all(0 <= one < math.inf for one in save_seconds):
        given = f"lost={lost}, fraction={fraction}, save_seconds={save_seconds}"
        raise ValueError(f"{given}: expected at most 1, and times of at least 0")
    if not 0 < float(outlook.speeds.sum()) < math.inf:
        raise ValueError("nothing moves: expected an outlook of a state that does")
    if every is None and outlook.step < 1:
        raise ValueError(f"outlook.step={outlook.step}: expected a run of at least one step, or every")
    held, whole = save_seconds
    candidates = []
    for part in FRACTIONS if fraction is None else (fraction,):
        # Behind by so many saves on average, whatever the steps between two of them.
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
    """Mean number of saves' intervals by which blocks are behind at a failure, weighted by their movement."""
    speeds, sizes = outlook.speeds, list(outlook.sizes)
    weights = speeds / speeds.sum()
    ages, total, budget = np.zeros(len(sizes)), [], 0.0
    for _ in range(math.ceil(CYCLES / fraction)):
        total.append(float((weights * (ages + 0.5)).sum()))  # in the middle of an interval
        ages += 1
        budget += fraction * sum(sizes)
        chosen, _ = choose("priority", budget, sizes, weights * ages**2)
        budget -= sum(sizes[block] for block in chosen)
        ages[chosen] = 0
    return float(np.mean(total[len(total) // 2 :]))


def daly_interval(save_seconds: float, failure_every: float) -> float:
    """Seconds between full checkpoints that waste least time.

    Daly, Future Generation Computer Systems 22 (2006), equation 37: for d < 2 M

        sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) + 1/9 (d / 2M)) - d,   and M otherwise.

    Args:
        save_seconds: d, for which a checkpoint holds up the training.
        failure_every: M, mean seconds between failures.

    Raises:
        ValueError: a number is not above 0.

    Example:
        >>> from sdc.checkpoints import daly_interval
        >>> round(daly_interval(60, 86400) / 60)  # minutes
        53
    """
    if not (0 < save_seconds < math.inf and 0 < failure_every < math.inf):
        raise ValueError(f"save_seconds={save_seconds}, failure_every={failure_every}: expected numbers above 0")
    if save_seconds >= 2 * failure_every:
        return failure_every
    ratio = save_seconds / (2 * failure_every)
    return math.sqrt(2 * save_seconds * failure_every) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


class Timings(NamedTuple):
    """Medians of the last saves, of this process."""

    held: float  # seconds for which a save holds up the training, however much it takes
    whole: float  # seconds in addition, for a save of everything
    bandwidth: float  # bytes of the state that all processes together write in a second


class SaveClock:
    def __init__(self) -> None:
        self._held, self._whole, self._bandwidth = (deque[float](maxlen=TIMED) for _ in range(3))

    def held(self, fixed: float, copying: float, *, share: float) -> None:
        """A save of a share of the bytes held up its caller: for so long whatever it saves, and for copying that."""
        if share > 0:
            self._held.append(fixed)
            self._whole.append(copying / share)

    def written(self, seconds: float, size: int) -> None:
        """A save of so many bytes was written by all processes, in the background."""
        if seconds > 0 and size > 0:
            self._bandwidth.append(size / seconds)

    @property
    def timings(self) -> Timings | None:
        """The medians; None before enough was saved."""
        kept = (self._held, self._whole, self._bandwidth)
        return Timings(*map(statistics.median, kept)) if min(map(len, kept)) >= WARM else None
