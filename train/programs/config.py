"""Training configurations: frozen dataclasses, and presets as functions that return them.

The docstring of a preset states the command, its run time and the expected result.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from sdc.settings import SettingError

DType: TypeAlias = Literal["float32", "bfloat16"]
Remat: TypeAlias = Literal["ffn", "layer"]
# Minimum number of bytes per parameter: its value, and the means of its gradient and squared gradient, in float32
STATE_BYTES = 12
MANY = 1024  # maximum number of ranks for which a message lists the divisors
# Maximum number of bytes of state on a device, more than any device can hold: a larger size must be a mistake, and is
# rejected before allocation
LARGEST_STATE = 1 << 44


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configuration of a Llama-3-style decoder."""

    # number of rows of the embedding: at least the size of the tokenizer's vocabulary, padded to divide evenly over the
    # mesh
    vocab_size: int
    layers: int  # decoder layers
    width: int  # width of the residual stream (d in the paper)
    heads: int  # query heads
    kv_heads: int  # key and value heads; each serves `heads / kv_heads` query heads
    head_dim: int  # width of one head
    ffn_width: int  # inner width of the feed-forward network
    rope_theta: float = 500_000.0  # base of the rotary embedding's wavelengths
    norm_epsilon: float = 1e-5  # added to the mean square in RMSNorm
    tied: bool = False  # whether the output head is the transposed embedding
    # type of activations and of the parameters used to compute them; master parameters are always float32
    dtype: DType = "float32"
    remat: Remat = "ffn"  # part of each layer that the backward pass computes again, instead of saving its values

    @property
    def parameters(self) -> int:
        attention = self.width * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.ffn_width + 2 * self.width
        return self.layers * layer + self.width + self.vocab_size * self.width * (1 if self.tied else 2)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with global-norm clipping, linear warm-up and cosine decay."""

    learning_rate: float  # learning rate at the end of the warm-up
    warmup_steps: int  # steps of linear rise; the first step already uses `learning_rate / warmup_steps`
    total_steps: int  # step at which the cosine reaches zero, warm-up included
    beta1: float = 0.9  # decay rate of the gradient's mean
    beta2: float = 0.99  # decay rate of the gradient's mean square
    epsilon: float = 1e-8  # added to the root of the mean square
    weight_decay: float = 0.01  # decoupled, and applied only to matrices
    clip: float = 1.0  # maximum global norm, to which larger gradients are scaled down


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All settings that determine the computation of a training step.

    Attributes:
        name: name of the preset.
        model: the decoder.
        optimizer: the optimizer.
        sequence_length: number of predicted tokens per sequence.
        batch_size: number of sequences in one microstep, summed over all data ranks.
        microsteps: number of microsteps whose gradients a step accumulates.
    """

    name: str
    model: ModelConfig
    optimizer: OptimizerConfig
    sequence_length: int
    batch_size: int
    microsteps: int = 1

    def of_type(self, dtype: DType | None, remat: Remat | None = None) -> "TrainConfig":
        """Returns the configuration with other settings of the model, where they are given."""
        model = dataclasses.replace(self.model, dtype=dtype or self.model.dtype, remat=remat or self.model.remat)
        return dataclasses.replace(self, model=model)


def tiny() -> TrainConfig:
    """Returns the default configuration (0.2 M parameters, byte vocabulary), with which every demonstration takes less
    than a minute on two CPU cores.

    Command: `sdc train --config tiny --steps 20`
    Time: about 0.1 s per step on two cores, plus 0.1 s for each additional twin.
    Expected: the loss falls from 6.0, a little above ln(320) = 5.77, to 3.5 or less in 20 steps.
    """
    return TrainConfig(
        name="tiny",
        model=ModelConfig(vocab_size=320, layers=4, width=64, heads=8, kv_heads=4, head_dim=8, ffn_width=192),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, total_steps=1_000),
        sequence_length=128,
        batch_size=4,
        microsteps=2,
    )


def bench() -> TrainConfig:
    """Returns the workload of `sdc bench` (12.9 M parameters), whose matrices are large enough for arithmetic to
    dominate and small enough for a CPU.

    Command: `sdc bench lockstep`
    Time: about 0.7 s per step on one CPU core, in float32 and in bfloat16.
    Expected: ratios of step times within the limits that BENCHMARKS.md states.
    """
    return TrainConfig(
        name="bench",
        model=ModelConfig(vocab_size=320, layers=4, width=512, heads=8, kv_heads=4, head_dim=64, ffn_width=1536),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10, total_steps=1_000),
        sequence_length=256,
        batch_size=2,
    )


def smollm2_135m() -> TrainConfig:
    """Returns a configuration with the shape of SmolLM2-135M (134,515,008 parameters, tied head), for training from
    scratch.

    Command: `sdc train --config smollm2_135m --tokenizer tokenizer.json --corpus FOLDER`
    Time: meant for an accelerator; 32,768 tokens per step.
    Expected: an initial loss near ln(49152) = 10.8, which falls in the first few steps.
    """
    return TrainConfig(
        name="smollm2_135m",
        model=ModelConfig(
            vocab_size=49_152,
            layers=30,
            width=576,
            heads=9,
            kv_heads=3,
            head_dim=64,
            ffn_width=1_536,
            rope_theta=100_000.0,
            tied=True,
            dtype="bfloat16",
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=500, total_steps=20_000),
        sequence_length=2_048,
        batch_size=4,
        microsteps=4,
    )


def llama3_8b_16l() -> TrainConfig:
    """Returns the model with which the SDC study examines submodules: the 8B decoder at half depth, with a global batch
    of 16 (appendix B).

    The model has 4,943,122,432 parameters.

    Command: `sdc twin --config llama3_8b_16l --sync compute --model 8 --tokenizer tokenizer.json --corpus FOLDER`
    Time: meant for two nodes of eight accelerators (the tests only lower the program for such nodes); 65,536 tokens per
        step.
    Expected: `clean` on healthy nodes; the frequencies of the study's table 1 on corrupting nodes.
    """
    return _llama3("llama3_8b_16l", layers=16, global_batch=16)


def llama3_8b() -> TrainConfig:
    """Returns the model with which the SDC study examines gradients and training: 32 layers, with a global batch of 256
    (appendix B).

    The model has 8,835,567,616 parameters, more than Llama 3 8B, whose feed-forward network is narrower (14,336).

    Command: `sdc twin --config llama3_8b --sync params --model 8 --tokenizer tokenizer.json --corpus FOLDER`
    Time: meant for two nodes of eight accelerators (the tests only lower the program for such nodes); 1,048,576 tokens
        per step.
    Expected: `clean` on healthy nodes; noise-to-signal ratios as in the study's figure 5 on corrupting nodes.
    """
    return _llama3("llama3_8b", layers=32, global_batch=256)


def _llama3(name: str, *, layers: int, global_batch: int) -> TrainConfig:
    return TrainConfig(
        name=name,
        model=ModelConfig(
            vocab_size=128_256,
            layers=layers,
            width=4_096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            ffn_width=16_384,
            dtype="bfloat16",
        ),
        # The study does not state its learning rate; this is that of Llama 3 8B (Llama Team, 2024, table 3).
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2_000, total_steps=100_000),
        sequence_length=4_096,
        batch_size=1,
        microsteps=global_batch,
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    preset.__name__: preset for preset in (tiny, bench, smollm2_135m, llama3_8b_16l, llama3_8b)
}


def get_config(name: str) -> TrainConfig:
    """Returns the preset with the given name.

    Raises:
        SettingError: the name is unknown.
    """
    if name not in PRESETS:
        raise SettingError("config", name, f"unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]()


def check(config: TrainConfig, data: int, model: int, *, copies: int = 1) -> None:
    """Checks that a configuration divides evenly over a mesh, and that its state could fit into memory.

    `copies` is the number of states on the same devices, such as those of twins under `vmap`. Raises SettingError for a
    size that is not positive, does not divide evenly, or is too large.
    """
    model_names = ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "ffn_width")
    sizes = {name: getattr(config.model, name) for name in model_names}
    sizes |= {name: getattr(config, name) for name in ("sequence_length", "batch_size", "microsteps")}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise SettingError("config", config.name, f"{name} is {size}; expected a whole number of at least 1")
    divided = {
        "model": (model, ("heads", "kv_heads", "ffn_width", "vocab_size", "sequence_length")),
        "data": (data, ("width", "batch_size")),
    }
    for axis, (ranks, names) in divided.items():
        if ranks < 1:
            raise SettingError(axis, ranks, "expected at least 1 rank")
        for name in names:
            if sizes[name] % ranks:
                common = math.gcd(*(sizes[each] for each in names))
                choices = [str(some) for some in range(1, min(common, MANY) + 1) if common % some == 0]
                problem = f"{name} {sizes[name]} of config {config.name} is not divisible by {ranks}; choose"
                raise SettingError(axis, ranks, f"{problem} {' or '.join(choices)}")
    if sizes["heads"] % sizes["kv_heads"]:
        problem = f"heads={sizes['heads']} is not divisible by kv_heads={sizes['kv_heads']}"
        raise SettingError("config", config.name, f"{problem}; choose a value of kv_heads that divides heads")
    needed = STATE_BYTES * config.model.parameters * copies // (data * model)
    if needed > LARGEST_STATE:
        several = f"{copies:,} copies of " if copies > 1 else ""
        raise SettingError(
            "config",
            config.name,
            f"{several}{config.model.parameters:,} parameters and their optimizer state would take "
            f"{needed / 2**40:,.0f} TiB per device; expected at most {LARGEST_STATE >> 40} TiB; "
            "choose a smaller model, fewer copies or more ranks",
        )
