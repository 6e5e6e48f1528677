"""Training steps as burn-in workloads: forward pass, backward pass and optimizer of the reference decoder at full
load."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from sdc.burnin.workloads import BurninWorkload, FamilyRequest, families, make_floats, random_words, register

from .programs import DATA, MODEL, ModelConfig, OptimizerConfig, TrainConfig, TrainState, abstract_state, device_step

BURNIN_STEPS = 4  # optimizer steps per run; an error in one step spreads through the parameters in later steps
HEAD = 64  # width of an attention head
FAMILY = "training"


def configuration(side: int, dtype: str) -> TrainConfig:
    """Returns the configuration of a decoder for a level with `side` positions, from 8 (for rehearsals) to 4,096 (which
    gives 320 M parameters)."""
    width = max(16, side // 2)
    heads = max(2, width // HEAD)
    return TrainConfig(
        name=f"burn-in {side}",
        model=ModelConfig(
            vocab_size=320,
            layers=4,
            width=width,
            heads=heads,
            kv_heads=heads // 2,
            head_dim=width // heads,
            ffn_width=3 * width,
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2, total_steps=1_000),
        sequence_length=max(16, min(side, 1024)),
        batch_size=max(1, side // 512),
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TrainingSteps(BurninWorkload):
    """Runs a few training steps on one device and returns the final state and the loss of each step."""

    config: TrainConfig

    def inputs(self) -> tuple[TrainState, Int[np.ndarray, "steps microsteps batch length"]]:
        """Returns the initial state and the tokens, which are bit-identical on every host because no math library
        computes them."""
        config = self.config
        state = abstract_state(config)
        # Scaling by a power of two causes no rounding. This power is the one nearest to the standard deviation of the
        # decoder's initial weights.
        scale = np.float32(2.0 ** round(math.log2(config.model.width**-0.5)))
        params = [
            make_floats("normal", leaf.shape, "float32", self.seed + number) * scale
            if len(leaf.shape) > 1
            else np.ones(leaf.shape, np.float32)
            for number, leaf in enumerate(jax.tree.leaves(state.params))
        ]
        zeros: Any = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
        shape = (BURNIN_STEPS, config.microsteps, config.batch_size, config.sequence_length + 1)
        tokens = (random_words(shape, self.seed) % np.uint32(config.model.vocab_size)).astype(np.int32)
        return zeros._replace(params=jax.tree.unflatten(jax.tree.structure(state.params), params)), tokens

    def run(
        self, state: TrainState, tokens: Int[Array, "steps microsteps batch length"]
    ) -> tuple[TrainState, Float[Array, "steps"]]:
        def one(state: TrainState, batch: Int[Array, "microsteps batch length"]) -> tuple[TrainState, Float[Array, ""]]:
            after, metrics = device_step(state, batch, config=self.config)
            return after, metrics.loss

        for axis in (MODEL, DATA):
            one = jax.vmap(one, axis_name=axis)
        lead = functools.partial(jax.tree.map, lambda x: x[None, None])
        after, losses = lax.scan(lambda carry, batch: one(carry, lead(batch)), lead(state), tokens)
        return jax.tree.map(lambda x: x[0, 0], after), losses[:, 0, 0]


def build(request: FamilyRequest) -> Iterator[BurninWorkload]:
    for dtype in request.dtypes:
        if dtype not in ("float32", "bfloat16"):
            continue
        config = configuration(request.level.positions, dtype)
        sizes = (config.model.layers, config.model.width, config.sequence_length, config.batch_size)
        program = f"training/{dtype}/{'x'.join(map(str, sizes))}"
        numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_state(config))) + BURNIN_STEPS
        yield TrainingSteps(
            name=f"{program}/random",
            family="training",
            dtype=dtype,
            data="random",
            sizes=sizes,
            program=program,
            elements=numbers,
            work=6.0 * config.model.parameters * BURNIN_STEPS * config.batch_size * config.sequence_length,
            seed=request.seed,
            config=config,
        )


def register_training() -> None:
    """Registers the family of training workloads with `sdc.burnin` unless it is already registered."""
    if FAMILY not in families():
        register(FAMILY, build)
