"""How far the two predicted costs of a loss are from measured ones, where directions converge at different rates."""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from sdc.checkpoints import Watch, choose

State = tuple[Float[np.ndarray, "elements"], ...]  # the distance from the optimum, and what else an optimizer keeps
BLOCKS, ROWS = 32, 4
ELEMENTS = BLOCKS * ROWS
TRIALS = 40
ERRORS = (1.0, 0.1)  # the error that is to be reached again, relative to the error before the loss
LONGEST = 20_000
# The shares that docs/checkpoints.md states: of costs above the prediction at one rate, at most, and of predicted steps
# within a factor of two of the cost, at least.
ABOVE, NEAR = (0.05, 0.25), {1.0: 0.9, 0.1: 0.6}


def same_rate(random: np.random.Generator) -> tuple[Callable[[State], State], State]:
    c = 1 - 10 ** random.uniform(-3, -0.5)
    return lambda state: (c * state[0],), (start(random),)


def quadratic(random: np.random.Generator) -> tuple[Callable[[State], State], State]:
    c = rates(random)
    return lambda state: (c * state[0],), (start(random),)


def rotated(random: np.random.Generator) -> tuple[Callable[[State], State], State]:
    """Each block takes part in each direction."""
    axes, _ = np.linalg.qr(random.normal(size=(ELEMENTS, ELEMENTS)))
    matrix = (axes * rates(random)) @ axes.T
    return lambda state: (matrix @ state[0],), (start(random),)


def momentum(random: np.random.Generator) -> tuple[Callable[[State], State], State]:
    curvature = 1 - rates(random)

    def step(state: State) -> State:
        velocity = 0.9 * state[1] - 0.1 * curvature * state[0]
        return state[0] + velocity, velocity

    return step, (start(random), np.zeros(ELEMENTS))


def logistic(random: np.random.Generator) -> tuple[Callable[[State], State], State]:
    """Regression with weight decay, by gradient descent from zero."""
    rows, decay = 2 * ELEMENTS, 10 ** random.uniform(-3, -1)
    inputs = random.normal(size=(rows, ELEMENTS)) * np.exp(0.7 * random.normal(size=ELEMENTS))
    labels = random.uniform(size=rows) < 1 / (1 + np.exp(-inputs @ random.normal(size=ELEMENTS) / 4))
    largest = np.linalg.norm(inputs, 2) ** 2 / (4 * rows) + decay

    def slope(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        guesses = 1 / (1 + np.exp(-inputs @ weights))
        return inputs.T @ (guesses - labels) / rows + decay * weights, guesses * (1 - guesses)

    best = np.zeros(ELEMENTS)
    for _ in range(60):  # Newton's method
        gradient, weight = slope(best)
        best = best - np.linalg.solve((inputs.T * weight) @ inputs / rows + decay * np.eye(ELEMENTS), gradient)
    return lambda state: (state[0] - slope(state[0] + best)[0] / largest,), (-best,)


def rates(random: np.random.Generator) -> Float[np.ndarray, "elements"]:
    """From 0.7 to 0.999, evenly in the logarithm of what is left of 1."""
    return 1 - 10 ** random.uniform(-3, math.log10(0.3), ELEMENTS)


def start(random: np.random.Generator) -> Float[np.ndarray, "elements"]:
    return random.normal(size=ELEMENTS) * np.exp(random.normal(size=ELEMENTS))


def blocks(values: np.ndarray) -> np.ndarray:
    return values.reshape(BLOCKS, ROWS)


def needed(step: Callable[[State], State], state: State, target: float) -> float:
    """Iterations until the distance is the target, between two iterations by its logarithm."""
    count, now = 0, float(np.linalg.norm(state[0]))
    while now > target and count < LONGEST:
        before, state = now, step(state)
        now, count = float(np.linalg.norm(state[0])), count + 1
    return count - 1 + math.log(before / target) / math.log(before / now) if count else 0.0


def trial(family: Callable[..., tuple[Callable[[State], State], State]], seed: int) -> tuple[float, ...] | None:
    """Trains for 40 to 400 steps with saves by priority, and loses blocks just before the last save. Returns the
    predicted steps, the prediction at one rate, and the measured cost for each error."""
    random = np.random.default_rng(seed)
    step, state = family(random)
    fraction, every = random.choice([1, 0.25, 0.125]), int(random.choice([1, 2, 4]))
    watch, saved, at, budget, found = (
        Watch([1] * BLOCKS),
        [part.copy() for part in state],
        np.full(BLOCKS, -1),
        0.0,
        None,
    )
    for done in range(1, int(40 * 10 ** random.uniform())):
        state = step(state)
        if done % every:
            continue
        squares = ((blocks(state[0]) - blocks(saved[0])) ** 2).sum(1)
        found, here, kept = watch.saved(done, at, squares), state, [part.copy() for part in saved]
        budget += fraction * BLOCKS
        chosen, _ = choose("priority", budget, [1] * BLOCKS, squares)
        budget -= len(chosen)
        for old, new in zip(saved, state, strict=True):
            blocks(old)[chosen] = blocks(new)[chosen]
        at = at.copy()
        at[chosen] = done
    if found is None or found.convergence is None:
        return None
    lost = random.permutation(BLOCKS)[: int(random.choice([0.125, 0.5, 1.0]) * BLOCKS)]
    mixed = [part.copy() for part in here]
    for new, old in zip(mixed, kept, strict=True):
        blocks(new)[lost] = blocks(old)[lost]
    error, size = float(np.linalg.norm(here[0])), float(np.linalg.norm(mixed[0] - here[0]))
    costs = [needed(step, tuple(mixed), part * error) - needed(step, here, part * error) for part in ERRORS]
    return found.behind(lost), found.convergence.cost(size), *costs


def test_predictions_beside_measured_costs() -> None:
    """The shares that docs/checkpoints.md states hold over all families; `-s` shows them for each family."""
    found = {
        family.__name__: [one for seed in range(TRIALS) if (one := trial(family, seed))]
        for family in (same_rate, quadratic, rotated, momentum, logistic)
    }
    every = {"all": [one for some in found.values() for one in some], **found}
    for name, losses in every.items():
        assert len(losses) > 0.9 * TRIALS
        steps, one_rate, *costs = (np.asarray(column) for column in zip(*losses, strict=True))
        for error, most, cost in zip(ERRORS, ABOVE, costs, strict=True):
            above = float(np.mean(cost > one_rate * (1 + 1e-3)))
            near = float(np.mean((steps < 2 * cost) & (cost < 2 * steps)))
            print(
                f"{name}, {len(losses)} losses, to {error:g} of the error: {above:.1%} cost more than one rate "
                f"predicts, {np.max(cost / one_rate):.2f} times at most; steps within a factor of two: {near:.1%}"
            )
            if name == "all":
                assert above <= most
                assert near >= NEAR[error]
