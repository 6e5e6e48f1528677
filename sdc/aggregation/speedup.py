"""The gain from a compute threshold: the effective speedup of DropCompute, from measured latencies.

A worker sums the gradients of its M micro-batches until its compute time exceeds a threshold tau, then joins the
all-reduce with its partial sum (Giladi et al., DropCompute, NeurIPS 2023; equation numbers are those of the paper).
Times are in seconds, in double precision. Sums are computed in a fixed order, so workers with the same measured times
choose bitwise the same threshold.
"""

import bisect
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int64

# Speedups that differ by less than this count as equal, since rounding makes equal real numbers differ.
_TIE = 1e-12
# Approximate initial number of buckets in the search for a threshold, and the number of parts into which each remaining
# bucket is then split.
_BUCKETS, _SPLIT = 512, 8


class Choice(NamedTuple):
    """A threshold, and its effect on the measured iterations."""

    threshold: float  # compute time after which a worker stops; infinite if nothing should be dropped
    speedup: float  # effective speedup
    completed: float  # mean number of micro-batches that a worker completes
    drop_rate: float  # share of dropped micro-batches


def completed(latencies: Float[np.ndarray, "*batch micro_batches"], threshold: float) -> Int64[np.ndarray, "*batch"]:
    """Returns the number of micro-batches that a worker completes: #{m : T^(m) < tau}, T^(m) = sum_{j<=m} t^(j)."""
    _check_threshold(threshold)
    return np.count_nonzero(_cumulative(latencies) < threshold, axis=-1)


def mean_completed(latencies: Float[np.ndarray, "*batch micro_batches"], threshold: float) -> float:
    """Returns the mean of `completed` over workers and iterations."""
    counts = completed(latencies, threshold)
    return float(counts.sum() / counts.size)


def drop_rate(latencies: Float[np.ndarray, "*batch micro_batches"], threshold: float) -> float:
    """Returns the share of dropped micro-batches: 1 - Mdone/M. The arguments are those of `completed`."""
    return 1 - mean_completed(latencies, threshold) / np.shape(latencies)[-1]


def effective_speedup(
    latencies: Float[np.ndarray, "iterations workers micro_batches"],
    serial: Float[np.ndarray, " iterations"] | float,
    threshold: float,
) -> float:
    """Returns the effective speedup of measured iterations: the mean of equation (6) over i, as in algorithm 2.

        S_i(tau) = Mdone_i(tau) (T_i + Tc_i) / (M (min(tau, T_i) + Tc_i))

    T_i is the compute time of the slowest worker, Tc_i is the serial time, and Mdone_i is the mean number of
    micro-batches that a worker completes. Dropped micro-batches count as lost time, because the speedup compares times
    for equal numbers of samples, not of steps.
    """
    _check_threshold(threshold)
    cumulative, longest, serial = _measured(latencies, serial)
    done = np.count_nonzero(cumulative < threshold, axis=(1, 2))
    values = _equation_6(done, threshold, longest, serial, cumulative[0].size)
    # Summed one by one, in the same order as in `select_threshold`.
    return float(np.cumsum(values)[-1] / len(values))


def select_threshold(
    latencies: Float[np.ndarray, "iterations workers micro_batches"],
    serial: Float[np.ndarray, " iterations"] | float,
    *,
    minimum_completed: float = 0.5,
) -> Choice:
    """Returns the threshold with the largest effective speedup, by algorithm 2 applied to all thresholds instead of a
    grid.

    S(tau) jumps up just above each T_n^(m) and decreases in between, so its maximum is at the first float above some
    T_n^(m), or at infinity. The search is a branch and bound over these thresholds, in increasing order. The speedup of
    a threshold in [a, b] is at most the completed work at b, divided by the time at a:

        mean_i Mdone_i(b) (T_i + Tc_i) / (M (min(a, T_i) + Tc_i)),

    This also holds in floating point, whose operations are monotonic. Among thresholds whose speedups are equal within
    a relative 1e-12, the largest is selected, since it drops the fewest micro-batches.

    `minimum_completed` is the minimum mean share of completed micro-batches: without serial time, tiny thresholds can
    have a large speedup but drop most samples, a case that the paper's assumption C.3, tau > M mu/2, excludes.
    """
    if not 0 <= minimum_completed <= 1:
        raise ValueError(f"minimum_completed={minimum_completed}: expected a share of the micro-batches, from 0 to 1")
    cumulative, longest, serial = _measured(latencies, serial)
    iterations, workers, micro_batches = cumulative.shape
    rows = np.sort(cumulative.reshape(iterations, -1), axis=1)
    pooled = np.sort(rows, axis=None)
    least = bisect.bisect_left(range(1, pooled.size + 1), minimum_completed, key=lambda n: n / pooled.size)
    times = pooled[least:]
    thresholds = np.nextafter(times[np.diff(times, append=math.inf) > 0], math.inf)

    width = _SPLIT ** max(0, math.ceil(math.log(len(thresholds) / _BUCKETS, _SPLIT)))
    starts = np.arange(0, len(thresholds), width)
    best = 1.0  # speedup of the infinite threshold
    while True:
        last = thresholds[np.minimum(starts + width, len(thresholds)) - 1]
        # Speedup at the last threshold of each bucket, and the upper bound for the bucket.
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
    """Returns the speedup of an iteration in which all workers together completed `done` of `size` micro-batches.

    In this order of operations, the result increases with `done`, decreases with the threshold, and is 1 if nothing is
    dropped.
    """
    # The result is infinite if micro-batches took no time.
    with np.errstate(over="ignore"):
        return done * (longest + serial) / (size * (np.minimum(threshold, longest) + serial))


def extra_steps(steps: int, completed: float, micro_batches: int) -> int:
    """Returns the number of extra steps that compensate for dropped samples: `steps` * (M/Mdone - 1), rounded up
    (section 4.5).

    Here and in `larger_batch`, values that exceed an integer only by rounding are not rounded up.
    """
    _check_completed(completed, micro_batches)
    if steps < 0:
        raise ValueError(f"steps={steps}: expected a number of steps, at least 0")
    return math.ceil(round(steps * (micro_batches / completed - 1), 6))


def larger_batch(batch: int, completed: float, micro_batches: int) -> int:
    """Returns the batch size of which `batch` samples are not dropped: batch M/Mdone, rounded up (section 4.5)."""
    _check_completed(completed, micro_batches)
    if batch < 1:
        raise ValueError(f"batch={batch}: expected at least one sample")
    return math.ceil(round(batch * (micro_batches / completed), 6))


def _cumulative(latencies: Float[np.ndarray, "*batch micro_batches"]) -> Float64[np.ndarray, "*batch micro_batches"]:
    times = np.asarray(latencies, np.float64)
    if times.ndim == 0 or times.size == 0:
        raise ValueError(f"latencies have shape {times.shape}; expected [..., micro-batches], without empty axes")
    if not (times.min() >= 0 and times.max() < math.inf):
        where = tuple(int(i) for i in np.argwhere(~((times >= 0) & (times < math.inf)))[0])
        raise ValueError(
            f"latency {times[where]} at {where}: expected finite times of at least 0; leave out unmeasured times"
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
    """Returns T_{i,n}^(m), T_i and Tc_i, in seconds."""
    if np.ndim(latencies) != 3:
        raise ValueError(
            f"latencies have shape {np.shape(latencies)}; expected [iterations, workers, micro-batches]: "
            "give one iteration as latencies[None]"
        )
    cumulative = _cumulative(latencies)
    longest = cumulative[:, :, -1].max(axis=1)
    rest = np.asarray(serial, np.float64)
    if rest.shape not in ((), longest.shape):
        raise ValueError(
            f"serial has shape {rest.shape}; expected one time, or one for each of {len(longest)} iterations"
        )
    if not ((rest >= 0) & (rest < math.inf)).all():
        raise ValueError(f"serial={serial}: expected finite times of at least 0")
    rest = np.broadcast_to(rest, longest.shape)
    if not (longest + rest).all():
        empty = int(np.argmin(longest + rest))
        raise ValueError(f"iteration {empty} took no time; leave out unmeasured iterations")
    return cumulative, longest, rest


def _check_threshold(threshold: float) -> None:
    if not threshold > 0:
        raise ValueError(f"threshold={threshold}: expected a time above 0; math.inf drops nothing")


def _check_completed(completed: float, micro_batches: int) -> None:
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: expected at least one micro-batch")
    if not 0 < completed <= micro_batches:
        raise ValueError(
            f"completed={completed}: expected a number above 0 and at most micro_batches={micro_batches}; "
            "raise the threshold if nothing is completed"
        )
