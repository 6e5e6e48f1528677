"""What a compute threshold gains: the effective speedup of DropCompute, from measured latencies.

A worker adds up the gradients of its M micro-batches until its compute time passes a threshold tau, then joins the
all-reduce with what it has (Giladi et al., DropCompute, NeurIPS 2023; equations by their numbers there). Times are in
seconds and double precision. Sums are taken in a fixed order, so that workers that hold the same measured times find
the same threshold, to the last bit.
"""

import bisect
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int64

# Speedups that differ by less than this are a tie: what is equal in real numbers differs by rounding.
_TIE = 1e-12
# The search for a threshold starts with about so many buckets, and divides those that stay by this factor.
_BUCKETS, _SPLIT = 512, 8


class Choice(NamedTuple):
    """A threshold, with what it would have done to the measured iterations."""

    threshold: float  # the compute time after which a worker stops; infinite where nothing should be dropped
    speedup: float  # effective speedup
    completed: float  # micro-batches that a worker completes, on average
    drop_rate: float  # share of the micro-batches that are dropped


def completed(latencies: Float[np.ndarray, "*batch micro_batches"], threshold: float) -> Int64[np.ndarray, "*batch"]:
    """Micro-batches that a worker completes: #{m : T^(m) < tau}, T^(m) = sum_{j<=m} t^(j)."""
    _check_threshold(threshold)
    return np.count_nonzero(_cumulative(latencies) < threshold, axis=-1)


def mean_completed(latencies: Float[np.ndarray, "*batch micro_batches"], threshold: float) -> float:
    """Mean of `completed` over workers and iterations."""
    counts = completed(latencies, threshold)
    return float(counts.sum() / counts.size)


def drop_rate(latencies: Float[np.ndarray, "*batch micro_batches"], threshold: float) -> float:
    """Share of the micro-batches that are dropped: 1 - Mdone/M. Takes what `completed` takes."""
    return 1 - mean_completed(latencies, threshold) / np.shape(latencies)[-1]


def effective_speedup(
    latencies: Float[np.ndarray, "iterations workers micro_batches"],
    serial: Float[np.ndarray, " iterations"] | float,
    threshold: float,
) -> float:
    """Effective speedup of measured iterations: the mean over i of equation (6), as in algorithm 2.

        S_i(tau) = Mdone_i(tau) (T_i + Tc_i) / (M (min(tau, T_i) + Tc_i))

    T_i is the compute time of the slowest worker, Mdone_i what a worker completes on average. Dropped micro-batches
    count as time lost, so that the speedup is of the time to a number of samples, not to a number of steps.
    """
    _check_threshold(threshold)
    cumulative, longest, serial = _measured(latencies, serial)
    done = np.count_nonzero(cumulative < threshold, axis=(1, 2))
    values = _equation_6(done, threshold, longest, serial, cumulative[0].size)
    # One by one, as `select_threshold` adds them.
    return float(np.cumsum(values)[-1] / len(values))


def select_threshold(
    latencies: Float[np.ndarray, "iterations workers micro_batches"],
    serial: Float[np.ndarray, " iterations"] | float,
    *,
    minimum_completed: float = 0.5,
) -> Choice:
    """The threshold with the largest effective speedup: algorithm 2, over all thresholds instead of a grid.

    S(tau) jumps up just above a T_n^(m) and falls in between, so that its maximum lies at the number that follows one
    of them, or at infinity. Branch and bound over these, in increasing order: no threshold of [a, b] has a larger
    speedup than what b completes in the time of a,

        mean_i Mdone_i(b) (T_i + Tc_i) / (M (min(a, T_i) + Tc_i)),

    also in floating point, whose operations are monotonic. Ties, to a relative 1e-12, go to the larger threshold: to
    fewer drops.

    `minimum_completed` is the least share of micro-batches completed on average: without serial time, tiny thresholds
    can have a large speedup but drop most samples, which assumption C.3, tau > M mu/2, excludes in theory.
    """
    if not 0 <= minimum_completed <= 1:
        raise ValueError(f"minimum_completed={minimum_completed}: expected a share of the micro-batches, 0 to 1")
    cumulative, longest, serial = _measured(latencies, serial)
    iterations, workers, micro_batches = cumulative.shape
    rows = np.sort(cumulative.reshape(iterations, -1), axis=1)
    pooled = np.sort(rows, axis=None)
    least = bisect.bisect_left(range(1, pooled.size + 1), minimum_completed, key=lambda n: n / pooled.size)
    times = pooled[least:]
    thresholds = np.nextafter(times[np.diff(times, append=math.inf) > 0], math.inf)

    width = _SPLIT ** max(0, math.ceil(math.log(len(thresholds) / _BUCKETS, _SPLIT)))
    starts = np.arange(0, len(thresholds), width)
    best = 1.0  # of the infinite threshold
    while True:
        last = thresholds[np.minimum(starts + width, len(thresholds)) - 1]
        # Speedup at the last threshold of each bucket, and the bound of all speedups in the bucket.
        speedups, bounds = np.zeros((2, len(last)))
        for row, slowest, rest in zip(rows, longest, serial, strict=True):
            done = np.searchsorted(row, last)
            speedups += _equation_6(done, last, slowest, rest, row.size)
            bounds += _equation_6(done, thresholds[starts], slowest, rest, row.size)
        speedups, bounds = speedups / iterations, bounds / iterations
        best = max(best, float(speedups.max()))
        stay = bounds >= best * (1 - _TIE)
        if width == 1:
            break
        starts = (starts[stay, None] + np.arange(0, width, width // _SPLIT)).ravel()
        starts = starts[starts < len(thresholds)]
        width //= _SPLIT
    if best * (1 - _TIE) <= 1:
        return Choice(math.inf, 1.0, float(micro_batches), 0.0)
    chosen = np.flatnonzero(stay)[-1]
    mean = float(np.searchsorted(pooled, last[chosen]) / (iterations * workers))
    return Choice(float(last[chosen]), float(speedups[chosen]), mean, 1 - mean / micro_batches)


def _equation_6(
    done: Int64[np.ndarray, " k"],
    threshold: Float64[np.ndarray, " k"] | float,
    longest: Float64[np.ndarray, " k"] | float,
    serial: Float64[np.ndarray, " k"] | float,
    size: int,
) -> Float64[np.ndarray, " k"]:
    """Speedup of an iteration in which all workers together completed `done` of `size` micro-batches.

    In this order of operations it rises with `done`, falls with the threshold, and is 1 where nothing is dropped.
    """
    # Infinite where micro-batches took no time at all.
    with np.errstate(over="ignore"):
        return done * (longest + serial) / (size * (np.minimum(threshold, longest) + serial))


def extra_steps(steps: int, completed: float, micro_batches: int) -> int:
    """Further steps that make up for dropped samples: R steps, rounded up, with R = M/Mdone - 1 (section 4.5).

    What only rounding put above a whole number, here and in `larger_batch`, is not rounded up.
    """
    _check_completed(completed, micro_batches)
    if steps < 0:
        raise ValueError(f"steps={steps}: expected a number of steps, at least 0")
    return math.ceil(round(steps * (micro_batches / completed - 1), 6))


def larger_batch(batch: int, completed: float, micro_batches: int) -> int:
    """The batch of which as many samples remain as in `batch`: batch M/Mdone, rounded up (section 4.5)."""
    _check_completed(completed, micro_batches)
    if batch < 1:
        raise ValueError(f"batch={batch}: expected one sample or more")
    return math.ceil(round(batch * (micro_batches / completed), 6))


def _cumulative(latencies: Float[np.ndarray, "*batch micro_batches"]) -> Float64[np.ndarray, "*batch micro_batches"]:
    times = np.asarray(latencies, np.float64)
    if times.ndim == 0 or times.size == 0:
        raise ValueError(f"latencies of shape {times.shape}: expected [..., micro-batches] with at least one of each")
    if not (times.min() >= 0 and times.max() < math.inf):
        where = tuple(int(i) for i in np.argwhere(~((times >= 0) & (times < math.inf)))[0])
        raise ValueError(
            f"latency {times[where]} at {where}: expected finite times of at least 0; leave out what was not measured"
        )
    return np.cumsum(times, axis=-1)


def _measured(
    latencies: Float[np.ndarray, "iterations workers micro_batches"],
    serial: Float[np.ndarray, " iterations"] | float,
) -> tuple[
    Float64[np.ndarray, "iterations workers micro_batches"],
    Float64[np.ndarray, " iterations"],
    Float64[np.ndarray, " iterations"],
]:
    """T_{i,n}^(m), T_i and Tc_i."""
    if np.ndim(latencies) != 3:
        raise ValueError(
            f"latencies of shape {np.shape(latencies)}: expected [iterations, workers, micro-batches]; "
            "one iteration is latencies[None]"
        )
    cumulative = _cumulative(latencies)
    longest = cumulative[:, :, -1].max(axis=1)
    rest = np.asarray(serial, np.float64)
    if rest.shape not in ((), longest.shape):
        raise ValueError(
            f"serial of shape {rest.shape}: expected one time, or one for each of {len(longest)} iterations"
        )
    if not ((rest >= 0) & (rest < math.inf)).all():
        raise ValueError(f"serial={serial}: expected finite times of at least 0")
    rest = np.broadcast_to(rest, longest.shape)
    if not (longest + rest).all():
        empty = int(np.argmin(longest + rest))
        raise ValueError(f"iteration {empty} took no time; leave out iterations that were not measured")
    return cumulative, longest, rest


def _check_threshold(threshold: float) -> None:
    if not threshold > 0:
        raise ValueError(f"threshold={threshold}: expected a time above 0; math.inf drops nothing")


def _check_completed(completed: float, micro_batches: int) -> None:
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: expected one micro-batch or more")
    if not 0 < completed <= micro_batches:
        raise ValueError(
            f"completed={completed}: expected more than 0 and at most micro_batches={micro_batches}; "
            "raise the threshold where nothing is completed"
        )
