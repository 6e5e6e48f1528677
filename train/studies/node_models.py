"""Small models trained on simulated nodes: noise in the gradients, drift of the parameters, and losses."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import sdc
from sdc.faults import Fault, Relative, When
from sdc.nodes import ELEMENTS, LAST_BIT, SUBMODULES, Drifting, Response, behaviour, node_faults, published_layers

from .. import TrainConfig, Workload, get_config
from ..programs import DATA, MODEL, TrainState, device_step, init_state
from .settings import WINDOW

SEVERE = 10.0
"""Mean relative change of the elements hit, where the response to severity is measured."""
SHARE = 1e-3
"""Share of the elements that are hit then."""
LAST_BITS = 64
"""Last bits that are wrong in a microstep, where the answer to them is measured; it hardly depends on how many."""
ENOUGH = 3.0
"""Hits of a microstep beyond which more would hit no more microsteps: 95 % of them are hit."""


def sized(layers: int, width: int, length: int, *, steps: int) -> TrainConfig:
    """A small configuration in bfloat16, with four microsteps of one sequence.

    The learning rate rises for as large a part of the steps as in the study: 2,000 of 2,500 steps (appendix B.3).
    """
    config = get_config("tiny").of_type("bfloat16")
    model = dataclasses.replace(
        config.model, layers=layers, width=width, ffn_width=4 * width, heads=4, kv_heads=2, head_dim=width // 4
    )
    optimizer = dataclasses.replace(
        config.optimizer, learning_rate=3e-4, warmup_steps=steps * 4 // 5, total_steps=steps * 40
    )
    return dataclasses.replace(
        config, model=model, optimizer=optimizer, sequence_length=length, batch_size=1, microsteps=4
    )


class SmallModel:
    """A small model, its data, and its healthy training.

    Attributes:
        config: the configuration.
        steps: steps of a training.
        states: the healthy states before each step, and after the last.
        gradients: the healthy gradients.
        losses: the healthy losses.
    """

    def __init__(self, config: TrainConfig, steps: int, seed: int) -> None:
        self.config, dataset = Workload(config=config, seed=seed).load()
        rows = dataset.chunks[: steps * self.config.microsteps]
        self.tokens = jnp.asarray(rows.reshape(steps, self.config.microsteps, 1, -1), jnp.int32)
        self.steps, self.key = steps, jax.random.key(seed + 1)
        healthy = self._compile([])
        self.states = [init_state(self.config, jax.random.key(seed))]
        self.gradients, self.losses = [], []
        for number in range(steps):
            state, loss, gradient = healthy(self.states[-1], self.tokens[number])
            self.states.append(state)
            self.gradients.append(gradient)
            self.losses.append(float(loss))

    def _compile(self, faults: Sequence[Fault]) -> Callable[[TrainState, Array], tuple[TrainState, Array, Any]]:
        step = functools.partial(device_step, config=self.config)

        def run(state: TrainState, tokens: Int[Array, "microsteps batch length"]) -> tuple[TrainState, Array, Any]:
            def device(state: TrainState, tokens: Any) -> Any:
                if not faults:
                    return step(state, tokens)
                return sdc.inject(step, faults)(sdc.Moment(self.key, state.step), state, tokens)[0]

            over_model = jax.vmap(device, (None, None), axis_name=MODEL, axis_size=1)
            over_data = jax.vmap(over_model, (None, None), axis_name=DATA, axis_size=1)
            new, metrics = jax.tree.map(lambda leaf: leaf[0, 0], over_data(state, tokens))
            return new, metrics.loss, metrics.gradient

        return jax.jit(run)

    def responses(self) -> Response:
        """How gradients answer to errors: to last bits in a few elements, and to severe errors at each submodule."""
        if self.steps < WINDOW * (len(SUBMODULES) + 1):
            raise ValueError(f"steps={self.steps}: expected at least {WINDOW * (len(SUBMODULES) + 1)}")
        windows = [When(onset=k * WINDOW, end=(k + 1) * WINDOW) for k in range(len(SUBMODULES) + 1)]
        few = LAST_BITS / (self._elements * len(SUBMODULES))
        faults = [Fault(Relative(2 * LAST_BIT), few, site, when=windows[0]) for site in SUBMODULES]
        faults += [
            Fault(Relative(2 * SEVERE), SHARE, site, when=when)
            for site, when in zip(SUBMODULES, windows[1:], strict=True)
        ]
        noise = self._noise(self._compile(faults)).reshape(-1)[: WINDOW * len(windows)].reshape(-1, WINDOW)
        middle = np.median(noise, axis=1)
        linear = {
            site: float(ratio**2 / (SHARE * 4 / 3 * SEVERE**2))
            for site, ratio in zip(SUBMODULES, middle[1:], strict=True)
        }
        return Response(self._name, float(middle[0]), linear)

    def train(self, node: str) -> Drifting | None:
        """Trains on a node, with synchronized parameters and without; None where the study left no rate to speak of."""
        if not published_layers(node):
            return None
        step = self._compile(self._scaled(node))
        noise = self._noise(step)
        state, distances, losses = self.states[0], [], []
        if behaviour(node, "none").onset >= self.steps:  # clean as long as this, where nothing is synchronized
            nothing = np.zeros(self.steps)
            return Drifting(node, self._name, noise, nothing, nothing)
        for number in range(self.steps):
            state, loss, _ = step(state, self.tokens[number])
            distances.append(_norm(_minus(state.params, self.states[number + 1].params)))
            losses.append(abs(float(loss) - self.losses[number]) / self.losses[number])
        return Drifting(node, self._name, noise, np.asarray(distances), np.asarray(losses))

    @property
    def _name(self) -> str:
        model = self.config.model
        return f"{model.layers} layers of width {model.width}, {self.config.sequence_length} tokens"

    @property
    def _elements(self) -> int:
        """Elements of a submodule's outputs in a microstep."""
        return self.config.model.layers * self.config.model.width * self.config.sequence_length

    def _scaled(self, node: str) -> list[Fault]:
        """The node's faults with as many of the microsteps hit as in the study's model of 32 layers."""
        faults = node_faults(node, layers=self.config.model.layers, sync="params")
        theirs = sum(2 * figures.frequency.sum() for figures in published_layers(node).values()) * ELEMENTS
        ours = sum(float(np.mean(fault.rate)) for fault in faults if fault.rate is not None) * self._elements
        times = max(1.0, min(theirs, ENOUGH) / ours)
        return [dataclasses.replace(f, rate=tuple(np.minimum(np.asarray(f.rate) * times, 1).tolist())) for f in faults]

    def _noise(self, step: Callable[..., Any]) -> Float[np.ndarray, "steps"]:
        """Noise-to-signal ratios of the gradients from the healthy states (equation 5 before the maximum)."""
        found = []
        for number in range(self.steps):
            gradient = step(self.states[number], self.tokens[number])[2]
            found.append(_norm(_minus(gradient, self.gradients[number])) / _norm(self.gradients[number]))
        return np.asarray(found)


def _minus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.subtract, a, b)


def _norm(tree: Any) -> float:
    return math.sqrt(sum(float(jnp.sum(jnp.square(leaf.astype(jnp.float32)))) for leaf in jax.tree.leaves(tree)))
