"""The convolutional network against NumPy, mapped over workers, and trained."""

import math
from typing import Any

import jax
import numpy as np
import optax

from sdc.train.iterative.images import Images, image_batches, read_images
from sdc.train.studies.workloads import accuracy, image_loss, init_convnet


def train(images: Images, steps: int) -> tuple[Any, list[float]]:
    optimizer = optax.sgd(0.05, momentum=0.9)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, gradient = jax.value_and_grad(image_loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init_convnet(images.shape, images.classes, jax.random.key(0))
    state = optimizer.init(params)
    batches = image_batches(images, batch_size=64, seed=0)
    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state, next(batches))
        losses.append(float(loss))
    return params, losses


def test_learns_where_a_bright_row_is() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(256, dtype=np.int32) % 8
    pixels = rng.random((256, 8, 8, 1), dtype=np.float32) / 2
    pixels[np.arange(256), labels] += 0.5
    images = Images(pixels[:192], labels[:192], pixels[192:], labels[192:], 8, "rows", "")
    params, losses = train(images, 60)
    assert abs(losses[0] - math.log(8)) < 0.2
    assert losses[-1] < 0.1
    assert accuracy(params, images.test_images, images.test_labels) > 0.95


def test_learns_digits() -> None:
    images = read_images("digits")
    params, losses = train(images, 200)
    assert np.mean(losses[-10:]) < 0.15
    assert accuracy(params, images.test_images, images.test_labels) > 0.95
