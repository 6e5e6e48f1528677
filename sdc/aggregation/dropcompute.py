"""DropCompute: gradient accumulation that stops at a compute threshold, so that no worker waits for stragglers.

Giladi et al., *DropCompute* (NeurIPS 2023, arXiv:2306.10598). A worker that has computed for longer than the threshold
joins the all-reduce with its partial sum. The number of micro-batches that each worker completes is determined in one
of two ways, with the same arithmetic:

- *real* (`Stopwatch`): every process computes on its own devices, and checks its clock between micro-batches
  (algorithm 1);
- *replayed* (`masked`): the numbers come from simulated latencies (`delays`, `completed_before`) or from the log of a
  real run, and the program skips the remaining micro-batches. A replay is deterministic, and can simulate any number of
  workers.

Both variants run each micro-batch inside the same conditional and accumulate in the same order, so a real run can be
replayed bit for bit. Dropped samples are repeated before the next epoch starts (`Resampling`, section 4.5).
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from ..program import varying
from .assignment import Tree, assigns, checked_optimizer
from .workers import at_least_float32, check_count, check_probability, count_workers

# `(carry, micro_batch, context) -> carry`: adds one micro-batch to the worker's carry, given a context such as the
# parameters.
Work: TypeAlias = Callable[[Tree, Tree, Tree], Tree]
Correction: TypeAlias = Literal["none", "rate", "count"]


class Sum(NamedTuple):
    """The accumulated sums of a worker."""

    loss: Float32[Array, ""]  # sum of the losses of completed micro-batches
    gradient: Tree  # sum of the gradients of completed micro-batches, in float32 or wider

    def plus(self, loss: Float[Array, ""], gradient: Tree) -> "Sum":
        """Returns the sums with one more micro-batch."""
        added = jax.tree.map(lambda a, b: a + b.astype(a.dtype), self.gradient, gradient)
        return Sum(self.loss + loss.astype(jnp.float32), added)


class Combined(NamedTuple):
    """The all-reduced sums; the same on every worker."""

    loss: Float32[Array, ""]  # mean loss of the completed micro-batches; NaN if none was completed
    gradient: Tree  # see `combine`
    completed: Int32[Array, ""]  # number of micro-batches completed by all workers together
    empty: Bool[Array, ""]  # whether no micro-batch was completed, so that `skip_empty` skips the step


def gradient_sum(params: Tree) -> Sum:
    """Returns the sums before the first micro-batch, which are zero."""
    none = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), at_least_float32(jnp.result_type(x))), params)
    return Sum(jnp.zeros((), jnp.float32), none)


def accumulate(loss: Callable[[Tree, Tree], Float32[Array, ""]]) -> Work:
    """Returns the work function of gradient accumulation, `(sum, micro_batch, params) -> sum`.

    Args:
        loss: mean loss over a micro-batch, `(params, micro_batch) -> scalar`.
    """
    gradient = jax.value_and_grad(loss)
    return lambda total, batch, params: total.plus(*gradient(params, batch))


def completed_before(latencies: Float32[Array, "*rows micro_batches"], threshold: Any) -> Int32[Array, "*rows"]:
    """Counts micro-batches that end before the threshold: the m with T^(m) = sum_{j<=m} t^(j) < threshold (section
    4.3).

    Args:
        latencies: duration of each micro-batch in seconds, in order, such as samples from `delays`.
        threshold: time in seconds at which a worker stops; infinity to complete all micro-batches."""
    return jnp.sum(jnp.cumsum(latencies, axis=-1) < threshold, axis=-1, dtype=jnp.int32)


def masked(work: Work, carry: Tree, batches: Tree, completed: Int32[Array, ""], context: Tree = None) -> Tree:
    """Runs the work on the first `completed` micro-batches and skips the others.

    If `work` accumulates gradients (`accumulate`), this is DropCompute. If `work` is a whole optimizer step,
    `lambda state, batch, _: step(state, batch)`, this is DropCompute on local SGD (appendix B.3 of the paper), after
    which the parameters must be averaged (`replica_mean`).

    Args:
        work: computation on one micro-batch, without collectives, since workers complete different numbers of
            micro-batches.
        carry: the initial carry.
        batches: micro-batches, stacked on the leading axis of every leaf.
        completed: number of micro-batches that this worker completes. A traced number is not checked; if it is too
            large, all are completed.
        context: further input common to all micro-batches, such as parameters.

    Returns:
        The last carry.

    Raises:
        ValueError: there are no micro-batches, the leaves disagree on the number of micro-batches, or `completed` is
            out of range.
    """
    counts = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0 for leaf in jax.tree.leaves(batches)}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"leaves have leading axes of sizes {sorted(counts)}; expected the same size, at least 1, in every leaf"
        )

    micro_batches = counts.pop()
    check_count("completed", completed, micro_batches)

    def one(carry: Tree, numbered: tuple[Int32[Array, ""], Tree]) -> tuple[Tree, None]:
        number, batch = numbered
        return work_if(work, number < completed, carry, batch, context), None

    # The carry of a loop must keep its type, which includes the axes over which `shard_map` considers it to vary.
    first = jax.tree.map(lambda leaf: leaf[0], batches)
    kept = jax.eval_shape(lambda *args: work_if(work, jnp.asarray(completed > 0), *args), carry, first, context)
    carry = jax.tree.map(lambda x, y: varying(x, like=y), carry, kept)
    return lax.scan(one, carry, (jnp.arange(micro_batches, dtype=jnp.int32), batches))[0]


def work_if(work: Work, go: Bool[Array, ""], carry: Tree, batch: Tree, context: Tree) -> Tree:
    """Runs the work if `go` is true; the branch keeps the compiler from fusing the work with surrounding code."""
    # A derivative with respect to values that `shard_map` considers equal on all workers is a sum over the workers.
    # The collective that computes this sum would hang in a branch that not all workers take, and `combine` would sum a
    # second time.
    given = (carry, batch, context)
    widest = varying(go, like=given)
    carry, batch, context = varying(given, like=widest)
    carry = jax.tree.map(lambda x, y: varying(x, like=y), carry, jax.eval_shape(work, carry, batch, context))
    return lax.cond(go, work, lambda carry, batch, context: carry, carry, batch, context)


def combine(
    total: Sum,
    axis_name: str,
    completed: Int32[Array, ""],
    micro_batches: int,
    *,
    correction: Correction = "none",
    drop_rate: float = 0.0,
    reduce: Callable[[Tree], Tree] | None = None,
) -> Combined:
    """Sums the workers' accumulated sums.

        none:   g = 1/(N M) sum_n sum_{m completed} g_n^(m)                          (algorithm 1)
        rate:   (1 - drop_rate) g, as if the learning rate were lower by the mean drop rate   (appendix B.2.2)
        count:  sum_n sum_{m completed} g_n^(m) / (micro-batches completed by all)    (appendix B.2.2)

    Args:
        total: the sum of this worker.
        axis_name: the axis of the workers, bound.
        completed: number of micro-batches in the sum. A traced number is not compared with `micro_batches`.
        micro_batches: M, number of micro-batches in a full step of one worker.
        correction: see above. `rate` scales the gradient; for optimizers that are invariant to the scale of gradients,
            such as Adam, scale the learning rate instead.
        drop_rate: mean share of dropped micro-batches, for correction `rate`.
        reduce: function that sums gradients over the workers, such as a reduce-scatter (default: an all-reduce).

    Returns:
        See `Combined`. The gradient is float32 or wider; if parameters are narrower, cast it to their type before
        passing it to an optimizer whose state takes the gradient's type, such as Adam. It is zero if no micro-batch was
        completed.

    Raises:
        ValueError: the correction is unknown, the drop rate is not a probability, there are no micro-batches,
            `completed` is out of range, or the axis is not bound or has fewer than two workers.
    """
    workers = count_workers(axis_name)
    if correction not in ("none", "rate", "count"):
        raise ValueError(f"correction={correction!r}: expected 'none', 'rate' or 'count'")
    check_probability("drop_rate", drop_rate)
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: expected at least 1")
    check_count("completed", completed, micro_batches)
    counted = jnp.asarray(completed, jnp.int32)
    if reduce is None:
        loss, gradient, count = lax.psum((total.loss, total.gradient, counted), axis_name)
    else:
        loss, count = lax.psum((total.loss, counted), axis_name)
        gradient = reduce(total.gradient)
    some = jnp.maximum(count, 1).astype(jnp.float32)
    divisor = some if correction == "count" else jnp.float32(workers * micro_batches)
    factor = 1 - drop_rate if correction == "rate" else 1.0

    def mean(leaf: Array) -> Array:
        found = leaf / divisor.astype(leaf.dtype)
        return found if factor == 1 else found * jnp.asarray(factor, leaf.dtype)

    empty = count == 0
    return Combined(jnp.where(empty, jnp.nan, loss / some), jax.tree.map(mean, gradient), count, empty)


class SkipEmptyState(NamedTuple):
    """State of `skip_empty`."""

    inner: optax.OptState  # state of the optimizer
    skipped: UInt32[Array, ""]  # number of skipped steps


def skip_empty(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skips the steps in which no worker completed a micro-batch, and counts them.

    Args:
        optimizer: any optax optimizer whose updates are arrays. An optimizer whose updates are assignments must be the
            outermost wrapper: `paft(skip_empty(...), ...)`.

    Returns:
        An optimizer whose `update` takes `empty`, which must be the same on every worker: if it is true, updates are
        zero and the optimizer's state is unchanged. `update` raises ValueError if the updates of the optimizer are
        assignments.
    """
    inner = checked_optimizer(optimizer)

    def init(params: Tree) -> SkipEmptyState:
        return SkipEmptyState(inner.init(params), jnp.zeros((), jnp.uint32))

    def update(
        gradient: Tree, state: SkipEmptyState, params: Tree = None, *, empty: Bool[Array, ""] | bool, **extra: Any
    ) -> tuple[Tree, SkipEmptyState]:
        empty = jnp.asarray(empty)
        updates, new = inner.update(gradient, state.inner, params, **extra)
        if assigns(updates):
            raise ValueError(
                "the optimizer sets parameters (Assignment), so zero updates cannot skip a step; put skip_empty "
                "inside: paft(skip_empty(...), ...)"
            )
        kept = jax.tree.map(lambda a, b: jnp.where(empty, b, a), new, state.inner)
        updates = jax.tree.map(lambda leaf: jnp.where(empty, jnp.zeros_like(leaf), leaf), updates)
        return updates, SkipEmptyState(kept, state.skipped + empty.astype(jnp.uint32))

    return optax.GradientTransformationExtraArgs(init, update)


class Stopped(NamedTuple):
    """The completed work of a worker."""

    carry: Tree  # the carry after the last completed micro-batch
    completed: int  # number of micro-batches in it
    latencies: tuple[float, ...]  # seconds of each completed micro-batch, from the end of the previous one
    seconds: float  # time from the start of the step to the end of the last micro-batch


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """Runs micro-batches until a time threshold.

    If the micro-batch in flight is expected to end before the threshold (judging by the mean time of the completed
    ones), the next micro-batch is queued behind it, so the device never waits for the host. Close to the threshold, the
    host first waits for the micro-batch to end. At most one micro-batch is therefore in flight at the threshold. A
    device cannot be interrupted within a program, so the micro-batch in flight counts as completed: its sum is
    available by the time the all-reduce can start.

    Attributes:
        work: computation on one micro-batch, without collectives; it is compiled once for each shape.
        threshold: seconds from the start of a step; infinity for no threshold.

    Raises:
        ValueError: the threshold is not above 0.
    """

    work: Work
    threshold: float

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ValueError(f"threshold={self.threshold}: expected a number of seconds above 0, or infinity")

    @functools.cached_property
    def _run(self) -> Callable[..., Tree]:
        return jax.jit(functools.partial(work_if, self.work))

    def at(self, threshold: float) -> "Stopwatch":
        """Returns a copy with another threshold, which shares the compiled programs."""
        other = dataclasses.replace(self, threshold=threshold)
        other.__dict__["_run"] = self._run
        return other

    def run(
        self,
        carry: Tree,
        batches: Iterable[Tree],
        context: Tree = None,
        *,
        delays: Sequence[float] | None = None,
        completed: int | None = None,
    ) -> Stopped:
        """Runs one step of this worker.

        Args:
            carry, context: see `masked`.
            batches: micro-batches, in order.
            delays: simulated idle time in seconds before each micro-batch, cut off at the threshold; None for real
                hardware.
            completed: number of micro-batches to complete regardless of the clock, as recorded in a log; None to use
                the clock.

        Raises:
            ValueError: a number is negative or not finite, or there are too few delays or micro-batches.
        """
        if completed is not None and completed < 0:
            raise ValueError(f"completed={completed}: expected at least 0 micro-batches")
        if delays is not None and not all(0 <= delay < math.inf for delay in delays):
            raise ValueError(f"delays={list(delays)}: expected finite numbers of seconds, at least 0")
        started = time.perf_counter()
        deadline = started + (self.threshold if completed is None else math.inf)
        ends, flying = [started], list[Any]()

        def land() -> None:
            """Waits for the oldest micro-batch in flight."""
            jax.block_until_ready(flying.pop(0))
            ends.append(time.perf_counter())

        done = 0
        for number, batch in enumerate(batches):
            if done == completed:
                break
            if delays is not None and completed is None:
                if number >= len(delays):
                    raise ValueError(
                        f"only {len(delays)} of at least {number + 1} delays were given; give one for each micro-batch"
                    )
                while flying:  # an idle worker has nothing in flight
                    land()
                time.sleep(max(0.0, min(delays[number], deadline - time.perf_counter())))
            while flying and deadline < math.inf:
                # The end of work in flight cannot be predicted before any micro-batch has ended.
                mean = (ends[-1] - started) / (len(ends) - 1) if len(ends) > 1 else math.inf
                if ends[-1] + len(flying) * mean < deadline:
                    break
                land()
            if time.perf_counter() >= deadline:
                break
            carry = self._run(True, carry, batch, context)
            flying.append(carry)
            done += 1
            if len(flying) > 1:
                land()
        if completed is not None and done < completed:
            raise ValueError(
                f"{done} micro-batches were given, but the log has {completed} completed ones; give at least as many"
            )
        while flying:
            land()
        latencies = tuple(end - start for start, end in itertools.pairwise(ends))
        return Stopped(carry, done, latencies, time.perf_counter() - started)


def to_workers(tree: Tree, axis_name: str, mesh: Mesh) -> Tree:
    """Assembles the arrays of all processes into global arrays with a leading axis of workers, one worker per process.

    Args:
        tree: arrays of this process, whose shapes are the same in all processes.
        axis_name: the axis of the workers.
        mesh: a mesh whose `axis_name` runs over the processes, with one device per process.
    """
    sharding = NamedSharding(mesh, P(axis_name))
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf[None]), tree)


def from_workers(tree: Tree) -> Tree:
    """Returns this process's part of global arrays with a leading axis of workers."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0)[0], tree)


class Resampling:
    """An endless iterator over sample indices, whose position can be saved.

    Each epoch visits every sample once in a new order, then repeats the samples that were dropped in this epoch until
    none remain. Samples that do not fill a step at the end of an epoch start the next epoch, so no sample is lost.

    Args:
        size: number of samples in the data set.
        workers: N, number of workers.
        micro_batches: M, number of micro-batches in a full step of one worker.
        batch: number of samples per micro-batch.
        seed: determines the order of each epoch.

    Raises:
        ValueError: a number is below 1, or a step needs more samples than the data set has.
    """

    def __init__(self, size: int, *, workers: int, micro_batches: int, batch: int, seed: int) -> None:
        self.size, self.shape, self.seed = size, (workers, micro_batches, batch), seed
        self._step = int(np.prod(self.shape))
        if min(size, *self.shape) < 1 or seed < 0:
            raise ValueError(
                f"size={size}, workers={workers}, micro_batches={micro_batches}, batch={batch}, seed={seed}: "
                "expected numbers of at least 1, and a seed of at least 0"
            )
        if self._step > size:
            raise ValueError(
                f"a step of {workers} workers × {micro_batches} micro-batches × {batch} samples needs more than the "
                f"{size} samples of the data set; give more data or a smaller batch"
            )
        self._epoch = 0
        self._queue: list[int] = self._order()
        self._dropped: list[int] = []
        self._last: np.ndarray | None = None

    def __iter__(self) -> "Resampling":
        return self

    def __next__(self) -> Int[np.ndarray, "workers micro_batches batch"]:
        while len(self._queue) < self._step:
            if self._dropped:
                self._queue, self._dropped = self._queue + self._dropped, []
            else:
                self._epoch += 1
                self._queue = self._queue + self._order()
        step, self._queue = self._queue[: self._step], self._queue[self._step :]
        self._last = np.asarray(step, np.int64).reshape(self.shape)
        return self._last.copy()

    def drop(self, completed: Sequence[int]) -> None:
        """Records how many micro-batches each worker completed in the last step.

        Args:
            completed: number of micro-batches that each worker completed; the samples of dropped micro-batches are
                repeated.

        Raises:
            ValueError: no step has been drawn since the last call, or `completed` does not fit the step.
        """
        workers, micro_batches, _ = self.shape
        if self._last is None:
            raise ValueError("no step has been drawn since the last call of drop; call next first")
        if len(completed) != workers or not all(0 <= count <= micro_batches for count in completed):
            raise ValueError(f"completed={list(completed)}: expected {workers} numbers from 0 to {micro_batches}")
        for rows, count in zip(self._last, completed, strict=True):
            self._dropped.extend(rows[count:].ravel().tolist())
        self._last = None

    def get_state(self) -> dict[str, Any]:
        """Returns the position as JSON-serializable data; a step that has been drawn counts as completed."""
        return {"epoch": self._epoch, "queue": list(self._queue), "dropped": list(self._dropped)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Sets the position.

        Raises:
            ValueError: the position does not fit a data set of this size.
        """
        numbers = [*state["queue"], *state["dropped"]]
        if not all(0 <= number < self.size for number in numbers):
            raise ValueError(f"a position with sample {max(numbers)} does not fit a data set of {self.size} samples")
        self._epoch, self._last = int(state["epoch"]), None
        self._queue, self._dropped = list(state["queue"]), list(state["dropped"])

    def _order(self) -> list[int]:
        return np.random.default_rng((self.seed, self._epoch)).permutation(self.size).tolist()
