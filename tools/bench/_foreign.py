"""Steps of other libraries for measuring compile times; libraries that are not installed are left out."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, ROWS = 32, 16
Step: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments
FOREIGN = ("nnx", "equinox", "gemma_lora", "gemma_dpo")


def foreign_steps() -> dict[str, Step]:
    """Returns the steps by name."""
    found = {"nnx": nnx_step()}
    if find_spec("equinox"):
        found["equinox"] = equinox_step()
    if find_spec("tunix"):
        found |= {"gemma_lora": gemma_step("lora"), "gemma_dpo": gemma_step("dpo")}
    return found


def nnx_step() -> Step:
    """Returns the gradient of two transformer layers of Flax NNX, and its arguments."""
    rngs = nnx.Rngs(0)

    class NnxLayer(nnx.Module):
        def __init__(self) -> None:
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x += self.attention(self.norms[0](x))
            return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))

    parts: Any = nnx.split(nnx.List([NnxLayer(), NnxLayer()]), nnx.Param, ...)
    graph, params, rest = parts

    def loss(params: Any, x: Any) -> Any:
        for layer in nnx.merge(graph, params, rest):
            x = layer(x)
        return jnp.mean(x**2)

    return jax.grad(loss), (params, jnp.ones((2, ROWS, WIDTH)))


def equinox_step() -> Step:
    """Returns the gradient of two transformer layers of Equinox, and its arguments."""
    eqx: Any = import_module("equinox")  # which this package does not require

    class EquinoxLayer(eqx.Module):  # type: ignore[misc] # of a package that may be missing
        attention: Any
        mlp: Any
        norms: list[Any]

        def __init__(self, key: Any) -> None:
            ours, theirs = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=ours)
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=theirs)
            self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]

        def __call__(self, x: Any) -> Any:
            y = jax.vmap(self.norms[0])(x)
            x += self.attention(y, y, y)
            return x + jax.vmap(lambda x: self.mlp(self.norms[1](x)))(x)

    params, rest = eqx.partition([EquinoxLayer(key) for key in jax.random.split(jax.random.key(0))], eqx.is_array)

    def loss(params: Any, x: Any) -> Any:
        for layer in eqx.combine(params, rest):
            x = jax.vmap(layer)(x)
        return jnp.mean(x**2)

    return jax.grad(loss), (params, jnp.ones((2, ROWS, WIDTH)))


def gemma_step(kind: str) -> Step:
    """Returns the gradient of the loss of one of Tunix's trainers for a Gemma 3 of two layers, and its arguments: with
    respect to low-rank adapters (`lora`), or to all parameters (`dpo`)."""
    gemma: Any = import_module("tunix.models.gemma3.model")
    config = gemma.ModelConfig(
        num_layers=2, num_embed=256, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=1,
        sliding_window_size=8, param_dtype=jnp.float32,
    )  # fmt: skip
    model, trained = gemma.Gemma3(config, rngs=nnx.Rngs(0)), nnx.Param
    tokens, mask = jnp.zeros((2, ROWS), jnp.int32), jnp.ones((2, ROWS), bool)
    positions = jnp.broadcast_to(jnp.arange(ROWS), (2, ROWS))
    attention = jnp.broadcast_to(jnp.tril(jnp.ones((ROWS, ROWS), bool)), (2, ROWS, ROWS))
    if kind == "lora":
        qwix: Any = import_module("qwix")
        adapters = qwix.LoraProvider(
            module_path=".*q_einsum|.*kv_einsum|.*gate_proj|.*down_proj|.*up_proj", rank=4, alpha=2.0
        )
        trained = nnx.LoRAParam
        model = qwix.apply_lora_to_model(model, adapters, tokens, positions, None, attention, rngs=nnx.Rngs(1))
        own: Any = import_module("tunix.sft.peft_trainer")

        def loss(model: Any) -> Any:
            return own._default_loss_fn(model, tokens, mask, positions, attention)
    else:
        dpo: Any = import_module("tunix.sft.dpo.dpo_trainer")
        example = dpo.TrainExample(
            input_ids=tokens, positions=positions, attention_mask=attention, ref_chosen_logps=jnp.zeros(1),
            ref_rejected_logps=jnp.zeros(1), completion_mask=mask[:, 1:], logits_to_keep=ROWS - 1,
        )  # fmt: skip

        def loss(model: Any) -> Any:
            return dpo.dpo_loss_fn(model, example)[0]

    parts: Any = nnx.split(model, trained, ...)
    graph, params, rest = parts
    return jax.grad(lambda params, rest: loss(nnx.merge(graph, params, rest))), (params, rest)
