"""Single perturbations of an iterate, beside the bound of theorem 3.2: figures 3, 5 and 6 of Qiao et al., ICML 2019.

Here the error is ||x_k - x*||, and epsilon that of the training without perturbations after so many iterations.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdc.checkpoints import iteration_cost_bound, iterations_bound, squared_distance

from ..iterative import Iterative, State, Trajectory, finite, rows_of, trials
from .scar_workloads import Subject

AFTER, ITERATIONS = 50, 100
"""Iterations after which trainings are perturbed, and after which they count as converged."""
DIMENSIONS = 4
SPECTRUM = (0.1, 1.0)
"""Smallest and largest curvature of the quadratic program."""


def quadratic_program(count: int, seed: int) -> dict[str, Any]:
    """Figure 3: gradient descent on x^T A x / 2, perturbed once at any iteration, in any direction."""
    curvature = np.linspace(*SPECTRUM, DIMENSIONS).astype(np.float32)
    rate = 2 / sum(SPECTRUM)  # the best: the error shrinks by c in the slowest directions
    c = (SPECTRUM[1] - SPECTRUM[0]) / sum(SPECTRUM)
    task = Iterative(
        name="quadratic program",
        source="made up",
        init=lambda key: {"x": jax.random.normal(key, (DIMENSIONS,))},
        step=lambda state, k: {"x": state["x"] * (1 - rate * curvature)},
        loss=lambda state: jnp.linalg.norm(state["x"]),
        blocks={"x": rows_of(DIMENSIONS)[0]},
        moving=("x",),
    )
    trajectory = trials.train(task, 2 * AFTER, seed=seed)
    trajectory = trials.until(trajectory, float(trajectory.losses[AFTER]))
    rng = np.random.default_rng([seed, 3])
    after = rng.integers(1, AFTER, count)
    directions = rng.normal(size=(count, DIMENSIONS))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    # Of the order of the error at that iteration, or less.
    sizes = trajectory.losses[after] * 10 ** rng.uniform(-1, 0.5, count)
    at = np.asarray(trajectory.states["x"])[after]
    starts = {"x": jnp.asarray(at + sizes[:, None] * directions, jnp.float32)}
    return _beside(trajectory, c, after, starts)


def classes_of_perturbations(subject: Subject, count: int, seed: int) -> dict[str, Any]:
    """Figure 5: perturbations in random directions, and away from the optimum, of the same sizes."""
    trajectory, optimum, c = _measured(subject, seed)
    rng = np.random.default_rng([seed, 5])
    here = {name: trajectory.states[name][AFTER] for name in subject.task.moving}
    away = {name: here[name] - optimum[name] for name in here}
    sizes = trajectory.losses[AFTER] * 10 ** rng.uniform(-2, -0.5, count)
    after = np.full(count, AFTER)
    found = {}
    for kind in ("random", "adversarial"):
        starts: State = {}
        deltas = {
            name: rng.normal(size=(count, *leaf.shape)) if kind == "random" else np.asarray(leaf)[None].repeat(count, 0)
            for name, leaf in away.items()
        }
        norms = np.sqrt(sum(np.square(delta).reshape(count, -1).sum(axis=1) for delta in deltas.values()))
        for name, delta in deltas.items():
            scale = (sizes / norms).reshape(-1, *[1] * (delta.ndim - 1))
            starts[name] = here[name] + jnp.asarray(scale * delta, jnp.float32)
        found[kind] = _beside(trajectory, c, after, starts)
    return found


def resets(subject: Subject, count: int, seed: int) -> dict[str, Any]:
    """Figure 6: a random fraction of the blocks is as it was at the start."""
    trajectory, _, c = _measured(subject, seed)
    rng = np.random.default_rng([seed, 6])
    blocks, at = subject.task.count, min(AFTER, len(trajectory.losses) // 4)
    gone = [rng.random(blocks) < fraction for fraction in rng.uniform(0.02, 1, count)]
    starts = trials.recovered(trajectory, [np.where(lost, 0, at) for lost in gone])
    return _beside(trajectory, c, np.full(count, at), starts)


def _measured(subject: Subject, seed: int) -> tuple[Trajectory, State, float]:
    """A training whose loss is its distance from the optimum, the optimum, and the factor by which it shrinks.

    The optimum is where a training ends that takes twenty times as long; of a sampler, the mean of where it is in the
    last half of one that takes four times as long. The factor is the largest of those seen in an iteration, or where
    distances do not shrink in each, that of all iterations together.
    """
    task = subject.task
    sampled = "assigned" in task.blocks
    iterations = 4 * subject.iterations if sampled else ITERATIONS
    long = trials.train(task, (4 if sampled else 20) * iterations, seed=seed)
    half = len(long.losses) // 2
    optimum = {
        name: jnp.mean(leaf[half:], axis=0) if sampled else leaf[-1]
        for name, leaf in long.states.items()
        if name in task.moving
    }

    def distance(state: State) -> Array:
        rows = [jnp.sum(task.distance(state[name], optimum[name])) for name in task.moving]
        total = sum(rows, jnp.float32(0))
        return jnp.sqrt(total) if task.distance is squared_distance else total

    apart = dataclasses.replace(task, loss=distance)
    trajectory = trials.train(apart, 2 * iterations, seed=seed)
    errors = trajectory.losses[: iterations + 1]
    trajectory = trials.until(trajectory, float(errors[-1]))
    factors = errors[1:] / errors[:-1]
    c = float(factors.max()) if (factors < 1).all() else float((errors[-1] / errors[0]) ** (1 / iterations))
    return trajectory, optimum, c


def _beside(trajectory: Trajectory, c: float, after: Float[np.ndarray, "trials"], starts: State) -> dict[str, Any]:
    """What perturbations cost, beside their bounds.

    The theorem compares upper bounds: `beyond` is by how many iterations a perturbed training took longer than kappa(x)
    = log(||x_0 - x*|| / epsilon) / log(1/c), `costs` by how many it took longer than the one that was not perturbed.
    """
    outcome = trials.go_on(trajectory, after.tolist(), starts)
    distance = float(trajectory.losses[0])
    before = {name: trajectory.states[name][jnp.asarray(after)] for name in trajectory.task.moving}
    sizes = _sizes(trajectory.task, starts, before)
    kappa = iterations_bound(distance, c, float(trajectory.criteria[0]))
    return {
        "c": c, "distance": distance, "iterations": float(trajectory.iterations[0]), "kappa": kappa,
        "after": after.tolist(), "sizes": sizes.tolist(),
        "bounds": [iteration_cost_bound(distance, c, {int(k): float(s)}) for k, s in zip(after, sizes, strict=True)],
        "costs": finite(outcome.costs),
        "beyond": finite(outcome.costs + trajectory.iterations[0] - kappa),
    }  # fmt: skip


def _sizes(task: Iterative, starts: State, before: State) -> Float[np.ndarray, "trials"]:
    """Sizes of perturbations, in the norm in which the training's distances are."""

    def one(new: State, old: State) -> Array:
        rows = [jnp.sum(task.distance(new[name], old[name])) for name in task.moving]
        return sum(rows, jnp.float32(0))

    total = np.asarray(jax.vmap(one)({name: starts[name] for name in task.moving}, before), float)
    return np.sqrt(total) if task.distance is squared_distance else total
