"""What the methods of `sdc.aggregation` cost where parameters are sharded over the workers, as compilers estimate it.

The step is that of a decoder with scanned layers, parameters in float32, products in bfloat16, and constraints on
activations, on a mesh of fully sharded data parallelism, tensors and sequences, without a data axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from sdc.aggregation import (
    Dropped,
    Mean,
    Own,
    Shadowed,
    data_parallel,
    gradient_noise,
    gradient_sum,
    lossy_zero2,
    skip_empty,
)
from sdc.costs import Estimate, devices_of, estimate

AXIS, MICRO_BATCHES = "fsdp", 4
LAYERS, WIDTH, HIDDEN, VOCABULARY = 8, 1024, 4096, 32768
SEQUENCES, LENGTH = 8, 2048
SHAPES = {"down": (LAYERS, HIDDEN, WIDTH), "embedding": (VOCABULARY, WIDTH), "up": (LAYERS, WIDTH, HIDDEN)}
SPECS = {"down": P(None, "tensor", AXIS), "embedding": P("tensor", AXIS), "up": P(None, AXIS, "tensor")}
SGD = optax.sgd(0.1, momentum=0.9)
# Optimizer, combining and number of workers of each method.
METHODS: dict[str, tuple[optax.GradientTransformation, Any, int]] = {
    "mean": (SGD, Mean(), 2),
    "noise": (SGD, Mean(gradient_noise(AXIS, 0.01)), 2),
    "dropcompute": (skip_empty(SGD), Dropped(MICRO_BATCHES, "count"), 2),
    "lossy": (lossy_zero2(SGD, AXIS, 0.1, 0.1, packet=1024), Own(), 2),
    "shadow": (SGD, Shadowed(1), 4),
}


def fsdp_costs(target: str) -> dict[str, float]:
    """Returns the cost of each method, and the time of its collectives, relative to the step that XLA shards alone; for
    DropCompute, that step accumulates as many micro-batches."""
    found = {}
    for name, (optimizer, combining, workers) in METHODS.items():
        mesh = _mesh(target, workers)
        micro_batches = MICRO_BATCHES if name == "dropcompute" else 1
        plain, own = _plain(target, mesh, micro_batches), _method(target, mesh, optimizer, combining)
        found[f"fsdp_{name}"] = own.cost / plain.cost
        found[f"fsdp_{name}_collectives"] = _collectives(own) / _collectives(plain)
        found[f"fsdp_{name}_memory"] = own.memory / plain.memory
    return found


def _collectives(found: Estimate) -> float:
    return sum(each.seconds for each in found.collectives)


def _mesh(target: str, workers: int) -> Mesh:
    devices = np.asarray(devices_of(target), dtype=object)
    shape = (workers, 2, len(devices) // workers // 2)
    return Mesh(devices.reshape(shape), (AXIS, "tensor", "sequence"), axis_types=(AxisType.Auto,) * 3)


def _loss(rows: str | None) -> Callable[[Any, Any], Any]:
    """Returns the loss, where the rows of activations are sharded over this axis."""

    def loss(params: Any, tokens: Any) -> Any:
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

        def kept(x: Any) -> Any:
            return lax.with_sharding_constraint(x, P(rows, "sequence", None))

        def layer(x: Any, weights: Any) -> Any:
            hidden = jax.nn.gelu(x @ weights["up"])
            hidden = lax.with_sharding_constraint(hidden, P(rows, "sequence", "tensor"))
            return kept(x + hidden @ weights["down"]), None

        def one_hot(tokens: Any, dtype: Any) -> Any:
            return jax.nn.one_hot(tokens, VOCABULARY, dtype=dtype)

        x = kept(one_hot(tokens[:, :-1], jnp.bfloat16) @ narrow["embedding"])
        x, _ = lax.scan(jax.checkpoint(layer), x, {name: narrow[name] for name in ("down", "up")})
        logits = (x @ narrow["embedding"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy(logits, one_hot(tokens[:, 1:], jnp.float32)).mean()

    return loss


def _given(mesh: Mesh) -> tuple[Any, Any]:
    def shape(of: tuple[int, ...], spec: P, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(of, dtype, sharding=NamedSharding(mesh, spec))

    params = {name: shape(SHAPES[name], SPECS[name], jnp.float32) for name in SHAPES}
    return params, shape((SEQUENCES * MICRO_BATCHES, LENGTH + 1), P(AXIS), jnp.int32)


def _plain(target: str, mesh: Mesh, micro_batches: int) -> Estimate:
    gradient, (params, tokens) = jax.value_and_grad(_loss(AXIS)), _given(mesh)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        if micro_batches == 1:
            loss, found = gradient(params, tokens)
        else:
            cut = jnp.swapaxes(tokens.reshape(mesh.shape[AXIS], micro_batches, -1, tokens.shape[1]), 0, 1)
            cut = lax.with_sharding_constraint(cut, P(None, AXIS)).reshape(micro_batches, -1, tokens.shape[1])
            total, _ = lax.scan(
                lambda sums, rows: (sums.plus(*gradient(params, rows)), None), gradient_sum(params), cut
            )
            loss, found = jax.tree.map(lambda leaf: leaf / micro_batches, total)
        updates, state = SGD.update(found, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = (optax.TraceState(trace=params), optax.EmptyState())
    with jax.set_mesh(mesh):
        return estimate(step, params, state, tokens, target=target, donate=[0, 1])


def _method(target: str, mesh: Mesh, optimizer: optax.GradientTransformation, combining: Any) -> Estimate:
    trainer = data_parallel(jax.value_and_grad(_loss(None)), optimizer, mesh, AXIS, combining=combining)
    params, tokens = _given(mesh)
    completed = jax.ShapeDtypeStruct((mesh.shape[AXIS],), jnp.int32, sharding=NamedSharding(mesh, P(AXIS)))
    batch = (tokens, completed) if isinstance(combining, Dropped) else tokens
    return estimate(trainer.step, trainer.init(params), batch, target=target, donate=[0])
