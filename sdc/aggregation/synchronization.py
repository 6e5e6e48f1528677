"""Resynchronization of replicas: their mean, and PAFT, which periodically sets all replicas to the mean.

The module implements algorithms 1 and 2 of *Capturing and Mitigating Gradient Aggregation Errors for Fault-Tolerant
Distributed Training*. Both algorithms wrap any optax optimizer, which runs after the all-reduce of the gradients. Their
updates are assignments (see `assignment`), so replicas are bitwise equal after a synchronization.

The mean is computed by one all-reduce, or by two exchanges that a compiler can overlap with matrix products. The TPU
compiler always makes an all-reduce blocking, but makes an exchange of parts (`all_to_all`) asynchronous. On TPUs,
each worker therefore receives its part of all replicas, averages these parts, and sends the mean to all workers. The
traffic is that of a ring all-reduce (Patarasu and Yuan, *Bandwidth optimal all-reduce algorithms*, 2009, section 3) of
arrays in the parameters' type; exchanging partial sums would need a wider type.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Num

from ..program import axis_size, bound_axes, compiled_for, varying
from .assignment import Tree, assign, check_update, checked_optimizer, stepped
from .methods import Paft, Rule
from .workers import at_least_float32, check_axis, check_some, count_workers


class Divergence(NamedTuple):
    """Distance of this worker's replica from the mean: ||mean(theta) - theta_m||_2, float32.

    The divergence is measured at a synchronization, where the mean is available. Between synchronizations, it grows
    with the square root of the number of steps, by lemma 4.1; `expected` computes it without communication.
    """

    measured: Float32[Array, ""]  # divergence just before the last synchronization; 0 before the first
    gap: Int32[Array, ""]  # number of steps between the last two synchronizations
    age: Int32[Array, ""]  # number of steps since the last synchronization

    def aged(self) -> "Divergence":
        """Returns the divergence one step later, without a synchronization."""
        return self._replace(age=self.age + 1)

    @property
    def expected(self) -> Float32[Array, ""]:
        """Returns the expected current divergence: measured * sqrt(age / gap)."""
        share = self.age.astype(jnp.float32) / jnp.maximum(self.gap, 1).astype(jnp.float32)
        return self.measured * jnp.sqrt(share)


class PaftSyncState(NamedTuple):
    """State of `paft_sync`."""

    inner: optax.OptState  # state of the optimizer
    step: Int32[Array, ""]  # number of steps done
    divergence: Divergence  # distance of this worker's replica from the mean


class PaftState(NamedTuple):
    """State of `paft`, including the schedule, which is the same on every worker."""

    inner: optax.OptState
    step: Int32[Array, ""]
    divergence: Divergence
    next: Int32[Array, ""]  # step (from 0) after which the parameters are averaged next
    period: Int32[Array, ""]  # H, number of steps between the last synchronization and the next
    synchronizations: Int32[Array, ""]  # number of synchronizations so far


def paft_sync(
    optimizer: optax.GradientTransformation,
    axis_name: str,
    period: int,
    sync_state: bool = False,
    *,
    replica_axes: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Averages the parameters of all replicas at a fixed period (PAFT-Sync, algorithm 1).

        theta_{t+1}^m = mean_k(theta_t^k - eta_t g~_t^k)    if (t + 1) % H = 0    (8)

    Args:
        optimizer: any optax optimizer; it receives this worker's aggregated gradient.
        axis_name: the axis of the replicas, bound.
        period: H, number of steps between synchronizations; the first is in step `period - 1`, counted from 0.
        sync_state: whether to average the floating-point leaves of the optimizer's state as well.
        replica_axes: mesh axes over which the parameters of one replica are sharded. In the divergence, leaves that are
            not sharded over these axes count once per rank of the axes.

    Returns:
        An optimizer with `PaftSyncState`. Its updates are assignments: nothing may be chained after it.

    Raises:
        ValueError: the period is below 1, or axes are not given by name; in `update`: an axis is not bound or has fewer
            than two workers, no parameters are given, or the state belongs to another optimizer.
    """
    _check_settings(axis_name, replica_axes, period=period)
    check_some("period", period, "steps")
    inner = checked_optimizer(optimizer)

    def init(params: Tree) -> PaftSyncState:
        zero = jnp.zeros((), jnp.int32)
        return PaftSyncState(inner.init(params), zero, Divergence(jnp.zeros((), jnp.float32), zero, zero))

    def update(gradient: Tree, state: PaftSyncState, params: Tree = None, **extra: Any) -> tuple[Tree, PaftSyncState]:
        _check(axis_name, replica_axes, state, PaftSyncState, params)
        new, inner_state = stepped(inner, gradient, state.inner, params, **extra)

        def average(theta: Tree, history: Tree) -> tuple[Tree, Tree, Divergence]:
            mean, history, measured = _averaged(theta, history, axis_name, replica_axes, sync_state)
            return mean, history, Divergence(measured, jnp.full_like(state.step, period), jnp.zeros_like(state.step))

        def keep(theta: Tree, history: Tree) -> tuple[Tree, Tree, Divergence]:
            return theta, history, state.divergence.aged()

        due = (state.step + 1) % period == 0
        new, inner_state, divergence = _either(due, average, keep, new, inner_state)
        return assign(new), PaftSyncState(inner_state, state.step + 1, divergence)

    return optax.GradientTransformationExtraArgs(init, update)


def paft(
    optimizer: optax.GradientTransformation,
    axis_name: str,
    initial_period: int = 10,
    min_period: int = 1,
    max_period: int = 1000,
    sync_state: bool = False,
    *,
    rule: Rule = "update",
    target: float = 1.0,
    replica_axes: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Averages parameters concurrently with the next step, at a period that depends on the noise (PAFT, algorithm 2).

    Synchronization step t starts the average of theta_{t+1}, and step t + 1 uses this average:

        sigma_est   = ||mean(theta_{t+1}) - theta_{t+1}^m||_2                  (line 10)
        H           = the new period, by one of two rules; next at t + 1 + H   (lines 11 and 12)
        theta_{t+2} = mean(theta_{t+1}) - eta g~_{t+1}^m                       (line 13)

    The paper's rule, `gradient`, is a signal-to-noise ratio, from the worker's own gradient g (not the aggregated g~):

        H = mean_m(||g_{t+1}^m||_2 / sigma_est), rounded, over the workers with sigma_est > 0

    Its units are those of plain SGD. If an optimizer scales gradients, as Adam does, sigma_est follows the optimizer
    and ||g|| does not, so H says nothing about the noise. The rule `update` measures sigma_est in updates of the
    optimizer instead, and adjusts H until sigma_est is `target` updates:

        r = target * rms_m(||theta_{t+2}^m - mean(theta_{t+1})||_2) / rms_m(sigma_est)
        H = (steps since the last average) * r^p, rounded, where p = 2 if r < 1, otherwise 2/3

    Independent errors move replicas apart as sqrt(H), and errors that momentum repeats as H^(3/2) at most: p = 2
    returns to the target at once in the first case, and p = 2/3 does not overshoot in the second case. The H + 1 steps
    from one average to the next separate replicas by at most H + 1 rms updates, so a target of 2 or more can be reached
    whatever the noise. If the update of the step is zero or not finite, it measures nothing, and H remains.

    The gradient g~_{t+1} belongs to theta_{t+1}^m: the average is independent of the forward and backward passes of
    step t + 1, so both can run at the same time. If the optimizer's update contains the branch (`lax.cond`), XLA
    computes the average before or after these passes. To overlap them, branch around the whole step::

        def step(params, state, batch, *, synchronize):
            gradient = jax.lax.pmean(jax.grad(loss)(params, batch), "data")
            updates, state = optimizer.update(gradient, state, params, synchronize=synchronize)
            return optax.apply_updates(params, updates), state

        step = overlapped(step)  # (params, state, batch) -> (params, state)

    Args:
        optimizer, axis_name, sync_state: see `paft_sync`; the optimizer receives the averaged parameters.
        initial_period: H of the first synchronization, which starts after step `initial_period - 1`.
        min_period: smallest H.
        max_period: largest H. While replicas are equal (sigma_est = 0 on all workers), H doubles up to it.
        rule: `update`, or the paper's `gradient`.
        target: for `update`: distance of replicas from their mean to be reached before an average, in updates.
        replica_axes: see `paft_sync`; norms are computed over these axes, because the shards of a replica would
            otherwise follow different schedules.

    Returns:
        An optimizer with `PaftState`, whose `update` takes `synchronize`: None (follow the schedule), or the caller's
        value of `synchronizes(state)` as a Python bool; and, for the rule `gradient`, `own_gradient`: the worker's
        gradient before the all-reduce. Its updates are assignments: nothing may be chained after it.

    Raises:
        ValueError: the periods violate 1 <= min <= initial <= max, the rule is unknown, or the target is not positive;
            in `init`: the optimizer accumulates gradients or skips steps, so that the rule `update` cannot measure its
            updates; in `update`: as in `paft_sync`, or `own_gradient` is needed and missing, or not of the gradient's
            structure.
    """
    periods = {"initial_period": initial_period, "min_period": min_period, "max_period": max_period}
    _check_settings(axis_name, replica_axes, **periods)
    Paft(initial_period, min_period, max_period, sync_state, rule, target)
    inner = checked_optimizer(optimizer)

    def init(params: Tree) -> PaftState:
        zero, first = jnp.zeros((), jnp.int32), jnp.int32(initial_period)
        divergence = Divergence(jnp.zeros((), jnp.float32), zero, zero)
        history = inner.init(params)
        if rule == "update" and _accumulates(history):
            raise ValueError(
                "rule='update' compares replicas with the optimizer's update of a single step, but this optimizer "
                "may accumulate gradients over steps or skip steps; accumulate gradients in the step, choose "
                "rule='gradient', or use paft_sync"
            )
        return PaftState(history, zero, divergence, first - 1, first, zero)

    def update(
        gradient: Tree,
        state: PaftState,
        params: Tree = None,
        *,
        synchronize: bool | None = None,
        own_gradient: Tree = None,
        **extra: Any,
    ) -> tuple[Tree, PaftState]:
        _check(axis_name, replica_axes, state, PaftState, params)
        structure: Any = jax.tree.structure(own_gradient)
        if rule == "gradient" and structure != jax.tree.structure(gradient):
            raise ValueError(
                "rule='gradient' needs the norm of the worker's own gradient; pass the gradient before the all-reduce, "
                "update(mean, state, params, own_gradient=gradient), or choose rule='update'"
            )

        def average(theta: Tree, history: Tree) -> tuple[Tree, Tree, Float32[Array, ""]]:
            return _averaged(theta, history, axis_name, replica_axes, sync_state)

        def keep(theta: Tree, history: Tree) -> tuple[Tree, Tree, Float32[Array, ""]]:
            return theta, history, state.divergence.measured

        now = synchronizes(state) if synchronize is None else synchronize
        base, history, measured = _either(now, average, keep, params, state.inner)
        new, inner_state = stepped(inner, gradient, history, base, **extra)

        def plan(measured: Float32[Array, ""], base: Tree, new: Tree) -> PaftState:
            gap = state.divergence.age
            if rule == "gradient":
                wanted = _ratio(_norm(own_gradient, replica_axes), measured, axis_name)
            else:
                moved = _norm(jax.tree.map(lambda a, b: a - b if has_mean(a) else a, new, base), replica_axes)
                square, apart = lax.pmean((jnp.square(moved), jnp.square(measured)), axis_name)
                ratio = target * jnp.sqrt(square / apart)  # infinite if replicas are equal
                ratio = jnp.where(apart > 0, ratio, jnp.inf)
                wanted = gap.astype(jnp.float32) * jnp.where(ratio < 1, jnp.square(ratio), jnp.cbrt(jnp.square(ratio)))
                wanted = jnp.where((square > 0) & jnp.isfinite(square), wanted, state.period.astype(jnp.float32))
            # Replicas are also equal if every step since the last average was skipped, which says nothing about noise.
            wanted = jnp.where(jnp.isinf(wanted), 2.0 * state.period.astype(jnp.float32), wanted)
            wanted = jnp.where(jnp.isnan(wanted), min_period, jnp.round(wanted))
            period = jnp.clip(wanted, min_period, max_period).astype(jnp.int32)
            # The condition of a branch that contains a collective must be the same on all ranks, even if a reduction
            # differs in the last bits.
            period = lax.pmin(period, (axis_name, *replica_axes))
            found = Divergence(measured, gap, jnp.ones_like(gap))
            done = state.synchronizations + 1
            return state._replace(divergence=found, next=state.step + period, period=period, synchronizations=done)

        def wait(*_: Any) -> PaftState:
            return state._replace(divergence=state.divergence.aged())

        state = _either(now, plan, wait, measured, base, new)
        return assign(new), state._replace(inner=inner_state, step=state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _accumulates(history: Tree) -> bool:
    """Returns whether an optimizer's state is that of one whose updates are not those of a step."""
    from optax.contrib import SAMState

    steps = optax.MultiStepsState, optax.ApplyEvery, optax.ConditionallyMaskState, optax.ConditionallyTransformState
    kinds = *steps, SAMState
    return any(isinstance(x, kinds) for x in jax.tree.leaves(history, is_leaf=lambda x: isinstance(x, kinds)))


def _ratio(norm: Float32[Array, ""], measured: Float32[Array, ""], axis_name: str) -> Float32[Array, ""]:
    """Returns the mean of norm / measured over the workers where it is finite; infinity if there are none."""
    ratio = jnp.where(measured > 0, norm / measured, jnp.inf)
    known = ~jnp.isinf(ratio)
    total, count = lax.psum((jnp.where(known, ratio, 0), known.astype(jnp.float32)), axis_name)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.inf)


def synchronizes(tree: Tree) -> Bool[Array, ""]:
    """Returns whether the next step of `paft` uses an average, given the state of `paft` or a tree that contains this
    state.

    Raises:
        ValueError: the tree does not contain exactly one `PaftState`.
    """
    found = [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PaftState)) if isinstance(x, PaftState)]
    if len(found) != 1:
        raise ValueError(f"the tree contains {len(found)} states of paft; expected exactly one")
    return found[0].step == found[0].next + 1


def overlapped(step: Callable[..., Any]) -> Callable[..., Any]:
    """Moves the branch of `paft` around a whole step, so that an average can overlap the forward and backward passes.

    Args:
        step: takes the keyword `synchronize`, a Python bool, and passes it to `update`; its other arguments contain the
            state of `paft`. It runs under the worker axis and returns a pytree of arrays.

    Returns:
        The step without `synchronize`. Its program contains the step twice, with and without the average.
    """

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return _either(
            synchronizes((args, kwargs)),
            functools.partial(step, *args, **kwargs, synchronize=True),
            functools.partial(step, *args, **kwargs, synchronize=False),
        )

    return chosen


def _averaged(
    theta: Tree, history: Tree, axis_name: str, axes: Sequence[str], sync_state: bool
) -> tuple[Tree, Tree, Float32[Array, ""]]:
    """Returns the means, and the distance of this worker's parameters from the means (on CPUs, from the means before
    they are rounded to the parameters' type)."""

    def wide(tree: Tree) -> Tree:
        means = jax.tree.map(lambda leaf: _mean(jnp.asarray(leaf), axis_name) if has_mean(leaf) else leaf, tree)
        if compiled_for().platform == "tpu":
            # Otherwise XLA exchanges the last array beside the updates of the others, which take less time.
            means = lax.optimization_barrier(means)
        return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)) if has_mean(x) else x, means)

    def off(mean: Array, leaf: Array) -> Array:
        return mean - jnp.asarray(leaf, mean.dtype) if has_mean(leaf) else mean

    mean = wide(theta)
    history = narrowed(wide(history), history) if sync_state else history
    return narrowed(mean, theta), history, _norm(jax.tree.map(off, mean, theta), axes)


def _either(now: bool | Bool[Array, ""], yes: Callable[..., Any], no: Callable[..., Any], *args: Any) -> Any:
    """Runs `yes` or `no`, as the caller or the schedule decides."""
    if isinstance(now, bool):
        return (yes if now else no)(*args)
    # `shard_map`'s type checker considers an average to be equal on all workers, but kept values to vary.
    types = [jax.eval_shape(branch, *args) for branch in (yes, no)]

    def typed(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jax.tree.map(lambda x, *types: varying(x, like=types), branch(*args), *types)

    return lax.cond(now, typed(yes), typed(no), *args)


def _norm(tree: Tree, axes: Sequence[str]) -> Float32[Array, ""]:
    """Returns the Euclidean norm over the leaves that have a mean, and over the ranks that share a replica."""
    leaves = [jnp.abs(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree) if has_mean(leaf)]
    square = sum((jnp.sum(jnp.square(leaf)) for leaf in leaves), jnp.float32(0))
    return jnp.sqrt(lax.psum(square, tuple(axes)) if axes else square)


def _check_settings(axis_name: str, axes: Sequence[str], **periods: Any) -> None:
    check_axis("axis_name", axis_name)
    if isinstance(axes, str):
        raise ValueError(f"replica_axes={axes!r}: expected a sequence of names; write replica_axes=({axes!r},)")
    most = np.iinfo(np.int32).max
    for name, value in periods.items():
        if not isinstance(value, int | np.integer):
            raise ValueError(f"{name}={value!r}: expected a number of steps")
        if value > most:
            raise ValueError(f"{name}={value}: expected at most {most} steps, the limit of the counter")


def _check(axis_name: str, axes: Sequence[str], state: Any, kind: type, params: Tree) -> None:
    count_workers(axis_name)
    bound = bound_axes()
    if unknown := [axis for axis in axes if axis not in bound]:
        raise ValueError(f"replica_axes={tuple(axes)}: {unknown[0]!r} is not bound (bound: {sorted(bound) or 'none'})")
    check_update(state, kind, params)


WORTH = 1 << 20  # bytes from which an array is averaged by two exchanges: compilers combine small all-reduces
_OPTIONS: dict[str, dict[str, bool]] = {"tpu": {"xla_tpu_enable_async_all_to_all": True}}


def overlap_options(platform: str | None = None) -> dict[str, bool]:
    """Returns compiler options that allow the average of `overlapped` to overlap matrix products.

    Args:
        platform: `cpu`, `gpu` or `tpu` (default: that of the devices in use).

    Returns:
        `compiler_options` for `jax.jit`; empty if none are needed.
    """
    return dict(_OPTIONS.get(compiled_for().platform if platform is None else platform, {}))


def has_mean(leaf: Any) -> bool:
    """Returns whether a leaf is float or complex; other leaves, such as counters and keys, are already equal
    everywhere."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def replica_mean(tree: Tree, axis_name: str) -> Tree:
    """Returns the mean over all replicas, bitwise the same on each; keeps leaves that are not float or complex.

    Sums are computed in float32 or wider.
    """
    return narrowed(jax.tree.map(lambda leaf: _reduced(leaf, axis_name) if has_mean(leaf) else leaf, tree), tree)


def narrowed(wide: Tree, like: Tree) -> Tree:
    """Casts leaves to the types of another tree."""
    return jax.tree.map(lambda x, leaf: x.astype(jnp.result_type(leaf)) if has_mean(leaf) else leaf, wide, like)


def _reduced(leaf: Any, axis_name: str) -> Num[Array, "*shape"]:
    leaf = jnp.asarray(leaf)
    return lax.pmean(leaf.astype(at_least_float32(leaf.dtype)), axis_name)


def _mean(x: Num[Array, "*shape"], axis_name: str) -> Num[Array, "*shape"]:
    """Averages with one all-reduce in float32 or wider, or with two exchanges that the compiler can overlap, with
    rounding between the exchanges."""
    workers, devices = axis_size(axis_name, "worker"), compiled_for()
    axis = next((axis for axis, side in enumerate(x.shape) if side and side % workers == 0), None)
    # Whether the workers are devices with links, and no other axis is automatic.
    manual = axis_name in jax.sharding.get_abstract_mesh().manual_axes
    linked = manual and devices.whole and devices.platform != "cpu"
    if axis is None or x.nbytes < WORTH or not linked:
        return _reduced(x, axis_name)
    parts = jnp.stack(jnp.split(x, workers, axis)) if axis else x.reshape(workers, -1, *x.shape[1:])
    mine = lax.all_to_all(parts, axis_name, 0, 0)
    mean = (jnp.sum(mine.astype(at_least_float32(x.dtype)), axis=0) / workers).astype(x.dtype)
    all_parts = lax.all_to_all(jnp.broadcast_to(mean, mine.shape), axis_name, 0, 0)
    whole = jnp.concatenate(list(all_parts), axis) if axis else all_parts.reshape(x.shape)
    return varying(whole, like=x)
