"""What the studies train, and how: a transformer on text, a convolutional network on images, a linear model."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
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
from ..programs import DATA, MODEL, ModelConfig, cross_entropy, init_params, logits

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


LAST = 3
"""Looks at the score over which a result is the mean: single ones are noisy."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train; settings are traced, so that one program serves them all.

    Attributes:
        init: `(params, setting) -> state` of a worker, under the axis.
        step: `(params, state, batch, number, setting) -> (params, state, report)` of a worker; reports are dictionaries
            of arrays.
    """

    init: Callable[[Any, Any], Any]
    step: Callable[[Any, Any, Any, Any, Any], tuple[Any, Any, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What became of a run.

    Attributes:
        steps: numbers of steps after which it was scored.
        scores: mean over the replicas at these steps; NaN counts as it comes.
        reports: arrays [steps, workers, ...] of what each step reported.
        state: state of the method at the end, all workers.
    """

    steps: np.ndarray
    scores: np.ndarray
    reports: Mapping[str, np.ndarray]
    state: Any

    @property
    def score(self) -> float:
        """The result."""
        return float(np.mean(self.scores[-LAST:]))


class Trainer:
    """Trains a workload by a method, with other settings each time and one program.

    Args:
        workload: what is trained.
        method: how.
        workers: number of workers, under `vmap`, whose axis is `sdc.train.programs.DATA`.
        rows: rows of a global batch; by default the workload's.
        cut: what a worker's share of a batch becomes, for instance micro-batches.

    Example:
        >>> import jax, optax
        >>> from sdc.train.studies import Method, Trainer, linear
        >>> workload = linear()
        >>> optimizer = workload.optimizer(20)
        >>> def step(params, state, batch, number, setting):
        ...     gradient = jax.lax.pmean(jax.grad(workload.loss)(params, batch), "data")
        ...     updates, state = optimizer.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates), state, {}
        >>> method = Method(lambda params, setting: optimizer.init(params), step)
        >>> Trainer(workload, method, workers=4)(steps=20, seed=0).score > 0.8
        True
    """

    def __init__(
        self,
        workload: Task,
        method: Method,
        *,
        workers: int,
        rows: int | None = None,
        cut: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.workload, self.workers = workload, workers
        self.rows = workload.rows if rows is None else rows

        def start(params: Any, setting: Any) -> Any:
            return jax.vmap(lambda _: (params, method.init(params, setting)), axis_name=DATA)(jnp.arange(workers))

        def several(params: Any, state: Any, shares: Any, numbers: Any, setting: Any) -> Any:
            def one(carry: Any, given: Any) -> Any:
                (params, state), (batch, number) = carry, given
                params, state, report = method.step(params, state, cut(batch), number, setting)
                return (params, state), report

            (params, state), reports = lax.scan(one, (params, state), (shares, numbers))
            return params, state, reports, workload.score(params)

        self._start = jax.jit(start)
        self._run = jax.jit(
            jax.vmap(several, in_axes=(0, 0, 1, None, None), out_axes=(0, 0, 1, 0), axis_name=DATA),
            donate_argnums=(0, 1),
        )

    def __call__(self, setting: Any = (), *, steps: int, seed: int, looks: int = 10) -> Trained:
        """Trains anew, and looks at the score now and then.

        Args:
            setting: setting for the method.
            steps: optimizer steps.
            seed: seed of the parameters and the order of the data.
            looks: times that the score is taken.

        Returns:
            Scores, reports and the last state.
        """
        source = self.workload.data(self.rows, seed)
        length = -(-steps // min(looks, steps))  # one length for all looks but the last
        ends, scores, reports = [], [], []
        with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
            params, state = self._start(self.workload.init(jax.random.key(seed)), setting)
            for done in range(0, steps, length):
                count = min(length, steps - done)
                taken = [self._share(next(source)) for _ in range(count)]
                shares = jax.tree.map(lambda *leaves: np.stack(leaves), *taken)
                numbers = jnp.arange(done, done + count)
                params, state, report, score = self._run(params, state, shares, numbers, setting)
                reports.append(jax.device_get(report))
                ends.append(done + count)
                scores.append(float(np.mean(jax.device_get(score))))
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *reports)
        return Trained(np.asarray(ends), np.asarray(scores), joined, jax.device_get(state))

    def _share(self, batch: Any) -> Any:
        """A global batch, cut for the workers."""
        return jax.tree.map(lambda leaf: leaf.reshape(self.workers, self.rows // self.workers, *leaf.shape[1:]), batch)
