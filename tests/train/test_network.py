"""The convolutional network against NumPy, mapped over workers, and trained."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from sdc.train.studies.workloads import accuracy, convnet_logits, image_loss, init_convnet

WORKERS = 4
SHAPE, CLASSES = (8, 12, 2), 5


@functools.cache
def example() -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
    """Arbitrary parameters, biases too, and a batch for them."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: init_convnet(SHAPE, CLASSES, key), jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: rng.normal(0, 0.5 / math.sqrt(leaf.shape[0]), leaf.shape).astype(np.float32), shapes
    )
    images = rng.random((4 * WORKERS, *SHAPE), dtype=np.float32)
    return params, (images, rng.integers(0, CLASSES, 4 * WORKERS, dtype=np.int32))


@functools.cache
def example_gradient() -> tuple[Any, Any]:
    params, batch = example()
    return jax.jit(jax.value_and_grad(image_loss))(params, batch)


def naive_logits(params: Any, images: np.ndarray) -> np.ndarray:
    """Pixel by pixel, in float64."""
    x = images.astype(np.float64)
    for name in ("conv1", "conv2"):
        kernel = params[name]["kernel"].astype(np.float64).reshape(3, 3, x.shape[-1], -1)
        batch, height, width, _ = x.shape
        out = np.zeros((batch, height, width, kernel.shape[-1])) + params[name]["bias"]
        for h in range(height):
            for w in range(width):
                for row in range(max(h - 1, 0), min(h + 2, height)):
                    for column in range(max(w - 1, 0), min(w + 2, width)):
                        out[:, h, w] += x[:, row, column] @ kernel[row - h + 1, column - w + 1]
        x = np.zeros((batch, height // 2, width // 2, kernel.shape[-1]))
        for h in range(height // 2):
            for w in range(width // 2):
                x[:, h, w] = out[:, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2].max((1, 2)).clip(0)
    hidden = (x.reshape(len(x), -1) @ params["hidden"]["kernel"] + params["hidden"]["bias"]).clip(0)
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


def naive_loss(params: Any, batch: tuple[np.ndarray, np.ndarray]) -> float:
    images, labels = batch
    powers = np.exp(naive_logits(params, images))
    return float(-np.log(powers[np.arange(len(labels)), labels] / powers.sum(-1)).mean())


def test_logits_and_loss_are_those_of_numpy() -> None:
    params, (images, labels) = example()
    expected = naive_logits(params, images)
    assert expected.std() > 0.1  # else a constant would pass
    np.testing.assert_allclose(jax.jit(convnet_logits)(params, images), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(example_gradient()[0], naive_loss(params, (images, labels)), rtol=1e-5)


def test_gradient_is_the_slope_of_the_numpy_loss() -> None:
    params, batch = example()
    for layer, leaves in example_gradient()[1].items():
        for name, leaf in leaves.items():
            direction = np.asarray(leaf, np.float64) / np.linalg.norm(leaf)
            losses = []
            for sign in (1, -1):
                moved = params[layer][name] + sign * 1e-5 * direction
                losses.append(naive_loss({**params, layer: {**params[layer], name: moved}}, batch))
            slope = (losses[0] - losses[1]) / 2e-5
            np.testing.assert_allclose(np.linalg.norm(leaf), slope, rtol=1e-3, err_msg=f"{layer} {name}")


@pytest.mark.parametrize(
    ("shape", "classes", "features"), [((8, 8, 1), 10, 128), ((28, 28, 1), 10, 1568), ((4, 12, 3), 7, 96)]
)
def test_shapes(shape: tuple[int, int, int], classes: int, features: int) -> None:
    params = jax.jit(lambda key: init_convnet(shape, classes, key))(jax.random.key(0))
    layers = {
        "conv1": (9 * shape[2], 16),
        "conv2": (144, 32),
        "hidden": (features, 64),
        "head": (64, classes),
    }
    assert jax.tree.map(jnp.shape, params) == {
        layer: {"bias": size[1:], "kernel": size} for layer, size in layers.items()
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = jax.eval_shape(convnet_logits, params, jnp.zeros((3, *shape)))
    assert (logits.shape, logits.dtype) == ((3, classes), jnp.dtype("float32"))


def test_initial_values() -> None:
    params = init_convnet((28, 28, 1), 10, jax.random.key(1))
    for layer in ("conv2", "hidden"):
        kernel = np.asarray(params[layer]["kernel"])
        np.testing.assert_allclose(kernel.std() * math.sqrt(len(kernel) / 2), 1, rtol=0.05)
    assert not any(np.any(layer["bias"]) for layer in params.values())
    # Predicts next to nothing at first.
    images = np.random.default_rng(0).random((64, 28, 28, 1), dtype=np.float32)
    loss = image_loss(params, (jnp.asarray(images), jnp.arange(64, dtype=jnp.int32) % 10))
    assert abs(loss - math.log(10)) < 0.2
    again, other = (init_convnet((28, 28, 1), 10, jax.random.key(seed)) for seed in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert np.any(params["conv1"]["kernel"] != other["conv1"]["kernel"])


@pytest.mark.parametrize("size", [(0, 8), (8, 2), (10, 8), (8, 7)])
def test_sizes_that_cannot_be_halved_twice(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"images of {size[0]}x{size[1]} cannot be halved twice; expected multiples"):
        init_convnet((*size, 1), 10, jax.random.key(0))


def worker_gradient(params: Any, batch: Any) -> Any:
    return jax.lax.pmean(jax.grad(image_loss)(params, batch), "worker")


def shares() -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(WORKERS, -1, *leaf.shape[1:]), example()[1])


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), actual, expected)


def test_mean_gradient_of_mapped_workers_is_that_of_the_batch() -> None:
    params = jax.tree.map(lambda leaf: np.stack([leaf] * WORKERS), example()[0])
    mapped = jax.vmap(worker_gradient, axis_name="worker")
    gradient = jax.jit(mapped)(params, shares())
    for worker in range(WORKERS):
        assert_close(jax.tree.map(lambda leaf, worker=worker: leaf[worker], gradient), example_gradient()[1])
    # What the module promises: kernels of many workers make batched products, no grouped convolution.
    text = str(jax.make_jaxpr(mapped)(params, shares()))
    assert "dot_general" in text
    assert "conv_general" not in text


def test_mapped_workers_use_their_own_parameters() -> None:
    params, batch = example()
    scales = np.linspace(0.5, 2, WORKERS, dtype=np.float32)
    scaled = [jax.tree.map(lambda leaf, scale=scale: leaf * scale, params) for scale in scales]
    losses = jax.jit(jax.vmap(image_loss))(jax.tree.map(lambda *leaves: np.stack(leaves), *scaled), shares())
    for worker in range(WORKERS):
        share = (batch[0][4 * worker : 4 * worker + 4], batch[1][4 * worker : 4 * worker + 4])
        np.testing.assert_allclose(losses[worker], naive_loss(scaled[worker], share), rtol=1e-4)


@pytest.mark.parametrize("check_vma", [False, True])
def test_mean_gradient_of_devices_is_that_of_the_batch(check_vma: bool) -> None:
    mesh = jax.make_mesh((WORKERS,), ("worker",), axis_types=(AxisType.Auto,))

    def gradient(params: Any, batch: Any) -> Any:
        if check_vma:  # else the gradient of replicated parameters already is a sum over devices
            params = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "worker", to="varying"), params)
        return worker_gradient(params, batch)

    sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("worker")), out_specs=P(), check_vma=check_vma)
    assert_close(jax.jit(sharded)(*example()), example_gradient()[1])


def test_accuracy_counts_every_image() -> None:
    params, (images, _) = example()
    best = naive_logits(params, images).argmax(-1).astype(np.int32)
    assert accuracy(params, images, best) == 1
    for wrong in (0, 7, 15):
        labels = best.copy()
        labels[wrong:] = (labels[wrong:] + 1) % CLASSES
        assert accuracy(params, images, labels) == wrong / 16


def test_accuracy_of_no_numbers_is_zero() -> None:
    params, (images, labels) = example()
    broken = {**params, "head": {**params["head"], "bias": np.full(CLASSES, np.nan, np.float32)}}
    assert accuracy(broken, images, np.zeros_like(labels)) == 0
