"""Simulated perturbations and failures of iterative-convergent training, and the cost of each in iterations.

The run without failures is executed once, and all its states are kept. These states determine the contents of a running
checkpoint, so a recovered state is represented by one number for each block: the iteration from which the block comes.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32

from sdc.checkpoints import Outlook, Policy, Watch, choose

from ..iterative import Iterative, State

How: TypeAlias = Literal["random", "contiguous"]


class DoesNotConverge(ValueError):
    """A run does not reach its convergence criterion, so the costs of failures are undefined."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """A run of a training algorithm without failures."""

    task: Iterative  # the training algorithm
    states: State  # all values of each array, from the initial state on
    losses: Float[np.ndarray, "states"]  # losses of all states
    # Decreasing losses at which the run counts as converged; empty before they are known.
    criteria: Float[np.ndarray, "levels"] = dataclasses.field(default_factory=lambda: np.zeros(0))
    # Fractional number of iterations to reach each criterion.
    iterations: Float[np.ndarray, "levels"] = dataclasses.field(default_factory=lambda: np.zeros(0))


class Failure(NamedTuple):
    """The time and the lost blocks of a failure."""

    after: int  # number of completed iterations, at least 1
    lost: Bool[np.ndarray, "blocks"]  # mask of lost blocks


class Held(NamedTuple):
    """The contents of a running checkpoint."""

    # For each number of completed iterations, before the state is saved: the iteration from which each block comes.
    steps: Int[np.ndarray, "states blocks"]
    # For each number of completed iterations: the outlook at the previous save; None if there was none, or distances
    # were not needed.
    outlooks: list[Outlook | None]


class Outcome(NamedTuple):
    """The outcome of trials."""

    # Cost of each trial in iterations, averaged over the criteria, since noise in the loss affects when a single
    # criterion is met; infinity if the run did not converge again.
    costs: Float[np.ndarray, "trials"]
    sizes: Float[np.ndarray, "trials"]  # L2 norms of the perturbations


def train(task: Iterative, iterations: int, *, seed: int = 0) -> Trajectory:
    """Trains without a failure, and returns all states."""
    states, found = _training(task, iterations, jax.random.key(seed))
    losses = np.asarray(found, float)
    if not np.isfinite(losses).all():
        at = int(np.argmin(np.isfinite(losses)))
        raise DoesNotConverge(f"{task.name} does not converge: its loss is {losses[at]} after {at} iterations")
    return Trajectory(task, states, losses)


def until(trajectory: Trajectory, *criteria: float) -> Trajectory:
    """Returns the same run with the given decreasing losses as its convergence criteria."""
    losses, iterations = trajectory.losses, []
    for criterion in criteria:
        at = int(np.argmax(losses <= criterion))
        if at == 0:
            raise DoesNotConverge(
                f"{trajectory.task.name} does not converge to a loss of {criterion:.5g}: its loss was "
                f"{losses[0]:.5g} at the start and is {losses[-1]:.5g} after {len(losses) - 1} iterations, so costs "
                "are undefined"
            )
        iterations.append(float(crossing(at, losses[at - 1], losses[at], criterion)))
    return dataclasses.replace(trajectory, criteria=np.asarray(criteria), iterations=np.asarray(iterations))


def crossing(at: Any, before: Any, loss: Any, criterion: Any) -> Any:
    """Returns the fractional iteration at which a loss meets a criterion, by linear interpolation between two
    iterations."""
    return at - 1 + (before - criterion) / (before - loss)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _training(task: Iterative, iterations: int, key: Array) -> tuple[State, Array]:
    def one(state: State, k: Array) -> tuple[State, tuple[State, Array]]:
        state = task.step(state, k)
        return state, (state, task.loss(state))

    first = task.init(key)
    _, (states, losses) = jax.lax.scan(one, first, jnp.arange(iterations))
    joined = jax.tree.map(lambda start, rest: jnp.concatenate([start[None], rest]), first, states)
    return joined, jnp.concatenate([task.loss(first)[None], losses])


def failures(
    count: int, trajectory: Trajectory, fraction: float, how: How, *, seed: int | Sequence[int] = 0
) -> list[Failure]:
    """Draws failures: the times are geometrically distributed, and each failure takes a fraction of the blocks."""
    blocks, last = trajectory.task.count, max(2, math.ceil(trajectory.iterations[0]) - 1)
    seeds = [seed] if isinstance(seed, int) else list(seed)
    times = np.random.default_rng([*seeds, 0]).geometric(2 / last, 64 * count)
    rng = np.random.default_rng([*seeds, 1, round(1e6 * fraction), how == "random"])
    found = []
    for after in times[times <= last][:count]:
        lost = np.zeros(blocks, bool)
        order = rng.permutation(blocks) if how == "random" else (rng.integers(blocks) + np.arange(blocks)) % blocks
        # With randomized rounding, the expected fraction is the requested one even if there are few blocks.
        lost[order[: max(1, math.floor(fraction * blocks + rng.random()))]] = True
        found.append(Failure(int(after), lost))
    return found


def hold(trajectory: Trajectory, fraction: float, interval: int, policy: Policy, *, seed: int = 0) -> Held:
    """Returns the contents of a running checkpoint, under the policies of `sdc.checkpoints.RunningCheckpoint`."""
    task, every = trajectory.task, max(1, round(fraction * interval))
    sizes = task.sizes({name: leaf[0] for name, leaf in trajectory.states.items()})
    watch, steps = Watch(sizes.tolist()), np.zeros(task.count, np.int32)
    found, budget, cursor = [steps.copy(), steps.copy()], 0.0, 0
    outlooks: list[Outlook | None] = [None, None]
    for k in range(1, len(trajectory.losses) - 1):
        outlook = outlooks[-1]
        if k % every == 0:
            budget += fraction * float(sizes.sum())
            moved = np.zeros(task.count)
            if policy == "priority" and fraction < 1:
                now = jnp.full(task.count, k, jnp.int32)
                moved = np.asarray(_moved(task, trajectory.states, now, jnp.asarray(steps)), float)
                outlook = watch.saved(k, steps, moved)
            chosen, cursor = choose(policy, budget, sizes.tolist(), moved, cursor=cursor, seed=seed + k)
            budget -= float(sizes[chosen].sum())
            steps[chosen] = k
        found.append(steps.copy())
        outlooks.append(outlook)
    return Held(np.stack(found), outlooks)


@functools.partial(jax.jit, static_argnums=0)
def _moved(task: Iterative, states: State, new: Array, old: Array) -> Array:
    return task.moved(mixed(task, states, new), mixed(task, states, old))


def mixed(task: Iterative, states: State, at: Int32[Array, "blocks"]) -> State:
    """Returns a state in which each block comes from its own iteration."""
    blocks = {name: jnp.asarray(task.blocks[name]) for name in states}
    return {name: states[name][at[ids], jnp.arange(len(ids))] for name, ids in blocks.items()}


@functools.partial(jax.jit, static_argnums=0)
def _mixed_each(task: Iterative, states: State, at: Int32[Array, "trials blocks"]) -> State:
    return jax.vmap(functools.partial(mixed, task), in_axes=(None, 0))(states, at)


def recover(failure: Failure, held: Held, *, everything: bool = False) -> Int[np.ndarray, "blocks"]:
    """Returns the iteration from which each block comes after the lost blocks, or all blocks, are recovered from the
    checkpoint."""
    return np.where(failure.lost | everything, held.steps[failure.after], failure.after)


def recovered(trajectory: Trajectory, at: Sequence[Int[np.ndarray, "blocks"]]) -> State:
    """Returns recovered states, stacked along a new first axis."""
    return _mixed_each(trajectory.task, trajectory.states, jnp.asarray(np.stack(at), jnp.int32))


def go_on(trajectory: Trajectory, after: Sequence[int], starts: State) -> Outcome:
    """Continues perturbed runs to convergence, with the batches and random numbers that belong to each iteration."""
    # A run that takes three times as long as without a failure counts as not converging.
    limit = jnp.int32(math.ceil(3 * trajectory.iterations[-1]))
    # Each device runs the same number of trials; the last trial is repeated as padding.
    count, devices = len(after), jax.local_device_count()
    every = np.minimum(np.arange(-(-count // devices) * devices), count - 1)
    done = jnp.asarray(after, jnp.int32)[every]
    starts = jax.tree.map(lambda leaf: leaf[every], starts)
    before = {name: trajectory.states[name][done] for name in trajectory.task.moving}
    criteria = jnp.asarray(trajectory.criteria, jnp.float32)
    ends, sizes = _going_on(trajectory.task, criteria, limit, done, starts, before)
    costs = np.mean(np.asarray(ends, float)[:count] - trajectory.iterations, axis=1)
    return Outcome(costs, np.asarray(sizes, float)[:count])


@functools.partial(jax.jit, static_argnums=0)
def _going_on(task: Iterative, *arguments: Any) -> tuple[Array, Array]:
    """Returns the final iterations and the perturbation sizes of trials, which are distributed over the devices."""
    mesh = Mesh(np.asarray(jax.local_devices()), ("trials",))
    trials = PartitionSpec("trials")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), trials, trials, trials),
        out_specs=trials,
        check_vma=False,  # training algorithms may bind axes of their own
    )
    def program(criteria: Array, limit: Array, after: Array, starts: State, before: State) -> tuple[Array, Array]:
        def goes_on(carry: Any) -> Array:
            k, _, _, ends = carry
            return (k < limit) & jnp.isinf(ends).any()

        def body(carry: Any) -> Any:
            k, state, before, ends = carry
            state = task.step(state, k)
            loss = task.loss(state)
            met = crossing((k + 1).astype(jnp.float32), before, loss, criteria)
            return k + 1, state, loss, jnp.where(jnp.isinf(ends) & (loss <= criteria), met, ends)

        def one(trial: tuple[Array, State]) -> Array:
            done, start = trial
            first = task.loss(start)
            ends = jnp.where(first <= criteria, done.astype(jnp.float32), jnp.inf)
            return jax.lax.while_loop(goes_on, body, (done, start, first, ends))[-1]

        squares = sum(jax.vmap(lambda a: jnp.sum(jnp.square(a)))(starts[name] - old) for name, old in before.items())
        # On CPUs, trials run one by one, since a batch of trials takes up to twice as long; the opposite holds on
        # accelerators.
        together = None if jax.default_backend() == "cpu" else len(after)
        return jax.lax.map(one, (after, starts), batch_size=together), jnp.sqrt(squares)

    ends_and_sizes: tuple[Array, Array] = program(*arguments)
    return ends_and_sizes


def finite(costs: Float[np.ndarray, "trials"]) -> list[float | None]:
    """Returns costs as numbers for the record; the cost of a run that did not converge again is None."""
    return [float(cost) if np.isfinite(cost) else None for cost in costs]
