"""What the studies train: a transformer on text, a small convolutional network on images, or a linear model.

Workers live on one device, under `vmap`: one program for any number of them. Everything about the data is fixed by the
seed, so that the methods of a study see the same batches. To make a workload touches no device.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

from .. import (
    ByteTokenizer,
    Images,
    batches,
    convnet_logits,
    image_batches,
    image_loss,
    init_convnet,
    make_dataset,
    read_corpus,
    read_images,
)
from ..programs import MODEL, ModelConfig, cross_entropy, init_params, logits

LARGEST = 16
"""Height in pixels above which images are halved: a study trains dozens of networks."""
SAMPLES = 300
"""Test images that are looked at."""
HELD_OUT = 64
"""Chunks of text that are not trained on."""
DECODER = ModelConfig(vocab_size=320, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=64)
LENGTH = 64


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer.

    Attributes:
        name: name for the record.
        source: source of the data.
        init: initial parameters from a key.
        loss: `(params, batch) -> mean loss`.
        score: `params -> accuracy or perplexity` on data that are not trained on.
        metric: which of the two the score is.
        optimizer: makes the optimizer for a full batch from the number of steps.
        rows: rows of a global batch.
        data: `(rows, seed) -> iterator of batches` with that many rows, endless.
    """

    name: str
    source: str
    init: Callable[[Array], Any]
    loss: Callable[[Any, Any], Float32[Array, ""]]
    score: Callable[[Any], Float32[Array, ""]]
    metric: str
    optimizer: Callable[[int], optax.GradientTransformation]
    rows: int
    data: Callable[[int, int], Iterator[Any]]


def convnet(images: Images) -> Task:
    """The convolutional network, with SGD and momentum; large images at half their size.

    Example:
        >>> from sdc.train.images import read_images
        >>> from sdc.train.studies import convnet
        >>> convnet(read_images("digits")).source
        'scikit-learn digits'
    """
    if images.shape[0] > LARGEST:
        images = halved(images)
    test = images.test_images[:SAMPLES], images.test_labels[:SAMPLES]

    def score(params: Any) -> Float32[Array, ""]:
        values = convnet_logits(params, jnp.asarray(test[0]))
        right = (jnp.argmax(values, axis=-1) == test[1]) & ~jnp.isnan(values).any(axis=-1)
        return jnp.mean(right.astype(jnp.float32))

    return Task(
        name="convnet",
        source=images.source,
        init=lambda key: init_convnet(images.shape, images.classes, key),
        loss=image_loss,
        score=score,
        metric="accuracy",
        optimizer=lambda steps: optax.sgd(0.05, momentum=0.9),
        rows=64,
        data=lambda rows, seed: image_batches(images, batch_size=rows, seed=seed),
    )


def halved(images: Images) -> Images:
    """Means of two by two pixels, cut to sizes that the network can halve twice: 28 pixels become 12."""

    def half(pixels: np.ndarray) -> np.ndarray:
        count, height, width, channels = pixels.shape
        sizes = height // 8 * 4, width // 8 * 4
        top, left = (height - 2 * sizes[0]) // 2, (width - 2 * sizes[1]) // 2
        cut = pixels[:, top : top + 2 * sizes[0], left : left + 2 * sizes[1]]
        return cut.reshape(count, sizes[0], 2, sizes[1], 2, channels).mean(axis=(2, 4))

    return dataclasses.replace(
        images,
        train_images=half(images.train_images),
        test_images=half(images.test_images),
        source=f"{images.source}, at half its size",
    )


def linear(*, features: int = 8, classes: int = 2, noise: float = 0.5) -> Task:
    """A linear classifier on made-up points around one centre for each class, with SGD: a study in seconds.

    Args:
        features: features of a point.
        classes: number of classes, at most as many as features.
        noise: standard deviation of a feature about its centre, which is 1 or 0.

    Example:
        >>> from sdc.train.studies import linear
        >>> points, labels = next(linear().data(4, 0))
        >>> points.shape, labels.shape
        ((4, 8), (4,))
    """

    def draw(generator: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        labels = generator.integers(0, classes, rows).astype(np.int32)
        points = np.eye(features)[labels] + noise * generator.standard_normal((rows, features))
        return points.astype(np.float32), labels

    test = draw(np.random.default_rng([0, classes]), SAMPLES)

    def values(params: Any, points: Any) -> Any:
        return points @ params["weights"] + params["bias"]

    def loss(params: Any, batch: Any) -> Float32[Array, ""]:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(values(params, batch[0]), batch[1]))

    def data(rows: int, seed: int) -> Iterator[Any]:
        generator = np.random.default_rng([1, seed])
        while True:
            yield draw(generator, rows)

    return Task(
        name="linear",
        source=f"points around {classes} centres",
        init=lambda key: {"weights": 0.01 * jax.random.normal(key, (features, classes)), "bias": jnp.zeros(classes)},
        loss=loss,
        score=lambda params: jnp.mean((jnp.argmax(values(params, test[0]), axis=-1) == test[1]).astype(jnp.float32)),
        metric="accuracy",
        optimizer=lambda steps: optax.sgd(0.5),
        rows=64,
        data=data,
    )


def _adam(steps: int) -> optax.GradientTransformation:
    """Adam with a short linear warm-up and half a cosine down to zero, as language models are trained."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-3, max(1, steps // 20), steps)
    return optax.adam(rate, b2=0.99)


def transformer(corpus: tuple[str, ...]) -> Task:
    """A small decoder on text, with Adam.

    Args:
        corpus: see `sdc.train.corpus.read_corpus`.

    Raises:
        CorpusError: a part of the corpus is missing or unreadable.
    """
    dataset = make_dataset(read_corpus(corpus), ByteTokenizer(), LENGTH, seed=0)
    held_out = dataset.chunks[-HELD_OUT:]
    seen = dataclasses.replace(dataset, chunks=dataset.chunks[:-HELD_OUT])

    def loss(params: Any, tokens_BS: Any) -> Float32[Array, ""]:
        def share(_: Array) -> Float32[Array, ""]:
            return jnp.mean(cross_entropy(logits(DECODER, params, tokens_BS[:, :-1]), tokens_BS[:, 1:]))

        # The model's collectives need their axis, of one rank here.
        return jax.vmap(share, axis_name=MODEL)(jnp.zeros(1))[0]

    def data(rows: int, seed: int) -> Iterator[Any]:
        order = np.random.default_rng(seed).permutation(len(seen.chunks))
        shuffled = dataclasses.replace(seen, chunks=seen.chunks[order])
        return (batch[0] for batch in batches(shuffled, batch_size=rows, microsteps=1))

    return Task(
        name="transformer",
        source=dataset.source,
        init=lambda key: init_params(DECODER, key),
        loss=loss,
        score=lambda params: jnp.exp(loss(params, jnp.asarray(held_out))),
        metric="perplexity",
        optimizer=_adam,
        rows=16,
        data=data,
    )


def chosen_tasks(which: str, *, images: str, corpus: tuple[str, ...]) -> list[Task]:
    """What a study trains: `convnet` on images, `transformer` on text, or both."""
    tasks = []
    if which != "transformer":
        tasks.append(convnet(read_images(Path(images) if os.sep in images else images)))
    if which != "convnet":
        tasks.append(transformer(corpus))
    return tasks
