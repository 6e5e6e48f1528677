"""DropCompute: gradient accumulation that stops at a compute threshold, so that nobody waits for stragglers.

Giladi et al., *DropCompute* (NeurIPS 2023, arXiv:2306.10598). A worker that has computed for longer than the threshold
joins the all-reduce with what it has. How many micro-batches each worker completes is found in one of two ways, with
one arithmetic:

- *real* (`stopwatch`): every process watches its clock between micro-batches, on its own devices;
- *replayed* (`masked`): the numbers are given, from simulated latencies (`delays`, `completed_before`) or from the log
  of a real run, and the program passes over the rest: deterministic, with any number of simulated workers.

Both run a micro-batch inside the same conditional and add in the same order, so that a real run replays bit for bit.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from ..program import typed_as
from .assignment import Tree, assigns
from .workers import at_least_float32, check_count, check_probability, count_workers

Work: TypeAlias = Callable[[Tree, Tree, Tree], Tree]
"""`(carry, micro_batch, context) -> carry`: what one micro-batch adds to what the worker has, given parameters, say."""
Correction: TypeAlias = Literal["none", "rate", "count"]


class Sum(NamedTuple):
    """What a worker has accumulated.

    Attributes:
        loss: sum of the losses of completed micro-batches, float32.
        gradient: sum of their gradients, at least float32.
    """

    loss: Float32[Array, ""]
    gradient: Tree


class Combined(NamedTuple):
    """What an all-reduce makes of the workers' sums; the same on every worker.

    Attributes:
        loss: mean loss of the completed micro-batches; NaN where none was completed.
        gradient: see `combine`.
        completed: micro-batches completed by all workers.
        empty: whether none was, so that the step is to be left out (`skip_empty`).
    """

    loss: Float32[Array, ""]
    gradient: Tree
    completed: Int32[Array, ""]
    empty: Bool[Array, ""]


def gradient_sum(params: Tree) -> Sum:
    """The sum before the first micro-batch."""

    def zeros(leaf: Array) -> Array:
        return jnp.zeros(jnp.shape(leaf), at_least_float32(jnp.result_type(leaf)))

    return Sum(jnp.zeros((), jnp.float32), jax.tree.map(zeros, params))


def accumulate(loss: Callable[[Tree, Tree], Float32[Array, ""]]) -> Work:
    """The work of gradient accumulation: `(sum, micro_batch, params) -> sum`.

    Args:
        loss: mean loss over a micro-batch, `(params, micro_batch) -> scalar`.
    """
    return summing(jax.value_and_grad(loss))


def summing(gradient: Callable[[Tree, Tree], tuple[Float32[Array, ""], Tree]]) -> Work:
    """As `accumulate`, from `(params, micro_batch) -> (loss, gradient)`."""

    def work(total: Sum, batch: Tree, params: Tree) -> Sum:
        value, found = gradient(params, batch)
        added = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total.gradient, found)
        return Sum(total.loss + value.astype(jnp.float32), added)

    return work


def completed_before(latencies: Float32[Array, "*rows micro_batches"], threshold: Any) -> Int32[Array, "*rows"]:
    """Micro-batches that end before the threshold: the m with T^(m) = sum_{j<=m} t^(j) < threshold (section 4.3).

    Args:
        latencies: seconds of each micro-batch, in order, for instance sampled (`delays`).
        threshold: seconds; infinity for all.
    """
    return jnp.sum(jnp.cumsum(latencies, axis=-1) < threshold, axis=-1, dtype=jnp.int32)


def masked(work: Work, carry: Tree, batches: Tree, completed: Int32[Array, ""], context: Tree = None) -> Tree:
    """Runs the work on the first `completed` micro-batches, and passes over the others.

    With the work of gradient accumulation (`accumulate`) this is DropCompute; with a whole optimizer step,
    `lambda state, batch, _: step(state, batch)`, it is DropCompute on local SGD (appendix B.3 of the paper), whose
    parameters are averaged afterwards (`replica_mean`).

    Args:
        work: what one micro-batch does, without collectives: workers complete different numbers.
        carry: what it starts from.
        batches: micro-batches, stacked on the leading axis of every leaf.
        completed: how many this worker completes, 0 to all. A traced number is not checked: more than all is all.
        context: what every micro-batch sees alike, such as parameters.

    Returns:
        The last carry.

    Raises:
        ValueError: there is no micro-batch, leaves disagree on their number, or fewer than none or more than all are
            said to be completed.
    """
    counts = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0 for leaf in jax.tree.leaves(batches)}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"micro-batches with leading axes of {sorted(counts)}: expected one number of at least 1 in every leaf"
        )

    micro_batches = counts.pop()
    check_count("completed", completed, micro_batches)

    def one(carry: Tree, numbered: tuple[Int32[Array, ""], Tree]) -> tuple[Tree, None]:
        number, batch = numbered
        return work_if(work, number < completed, carry, batch, context), None

    # A loop wants a carry of one type, also for `shard_map`, which tells what varies between workers.
    first = jax.tree.map(lambda leaf: leaf[0], batches)
    kept = jax.eval_shape(lambda *args: work_if(work, jnp.asarray(completed > 0), *args), carry, first, context)
    carry = jax.tree.map(typed_as, carry, kept)
    return lax.scan(one, carry, (jnp.arange(micro_batches, dtype=jnp.int32), batches))[0]


def work_if(work: Work, go: Bool[Array, ""], carry: Tree, batch: Tree, context: Tree) -> Tree:
    """The work where `go` is true; its branch keeps the compiler from fusing it with what is around it."""
    # With respect to what `shard_map` takes to be equal on all workers, a derivative is a sum over them: a collective,
    # which would hang in a branch that not all of them take, and which `combine` would add up once more.
    given = (carry, batch, context)
    widest = functools.reduce(typed_as, jax.tree.leaves(given), go)
    carry, batch, context = jax.tree.map(lambda leaf: typed_as(leaf, widest), given)
    carry = jax.tree.map(typed_as, carry, jax.eval_shape(work, carry, batch, context))
    return lax.cond(go, work, lambda carry, batch, context: carry, carry, batch, context)


def combine(
    total: Sum,
    axis_name: str,
    completed: Int32[Array, ""],
    micro_batches: int,
    *,
    correction: Correction = "none",
    drop_rate: float = 0.0,
) -> Combined:
    """The all-reduce of what the workers have accumulated.

        none:   g = 1/(N M) sum_n sum_{m completed} g_n^(m)                          (algorithm 1)
        rate:   (1 - drop_rate) g, as a learning rate lower by the mean drop rate   (appendix B.2.2)
        count:  sum_n sum_{m completed} g_n^(m) / (micro-batches completed by all)    (appendix B.2.2)

    Args:
        total: the sum of this worker.
        axis_name: the axis of the workers, bound.
        completed: micro-batches that are in it. A traced number is not checked against `micro_batches`.
        micro_batches: M, of a full step of one worker.
        correction: see above. `rate` scales the gradient; optimizers that do not care for its size, such as Adam, want
            their learning rate scaled instead.
        drop_rate: mean share of micro-batches that are dropped, for `rate`.

    Returns:
        See `Combined`; the gradient is at least float32: cast it to the type of narrower parameters before an optimizer
        whose state takes the gradient's type, such as Adam. Where nobody completed a micro-batch the gradient is zero.

    Raises:
        ValueError: the correction is unknown, the drop rate is no probability, there is no micro-batch, fewer than none
            or more than all are said to be completed, or the axis is not bound or has fewer than two workers.
    """
    workers = count_workers(axis_name)
    if correction not in ("none", "rate", "count"):
        raise ValueError(f"correction={correction!r}: expected 'none', 'rate' or 'count'")
    check_probability("drop_rate", drop_rate)
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: expected a number of at least 1")
    check_count("completed", completed, micro_batches)
    counted = jnp.asarray(completed, jnp.int32)
    loss, gradient, count = lax.psum((total.loss, total.gradient, counted), axis_name)
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
    skipped: UInt32[Array, ""]  # steps left out so far


def skip_empty(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Leaves out the steps in which no worker completed a micro-batch, and counts them.

    Args:
        optimizer: any optax optimizer whose updates are arrays. One that assigns (`paft`) goes around it:
            `paft(skip_empty(...), ...)`.

    Returns:
        An optimizer whose `update` takes `empty`, the same on every worker: where it is true, updates are zero and the
        optimizer's state stays as it is. `update` raises ValueError where the optimizer assigns.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> SkipEmptyState:
        return SkipEmptyState(inner.init(params), jnp.zeros((), jnp.uint32))

    def update(
        gradient: Tree, state: SkipEmptyState, params: Tree = None, *, empty: Bool[Array, ""] | bool, **extra: Any
    ) -> tuple[Tree, SkipEmptyState]:
        empty = jnp.asarray(empty)
        updates, new = inner.update(gradient, state.inner, params, **extra)
        if assigns(updates):
            raise ValueError(
                "the optimizer sets parameters (Assignment), which no zero update leaves as they are; put skip_empty "
                "inside: paft(skip_empty(...), ...)"
            )
        kept = jax.tree.map(lambda a, b: jnp.where(empty, b, a), new, state.inner)
        updates = jax.tree.map(lambda leaf: jnp.where(empty, jnp.zeros_like(leaf), leaf), updates)
        return updates, SkipEmptyState(kept, state.skipped + empty.astype(jnp.uint32))

    return optax.GradientTransformationExtraArgs(init, update)
