"""Workloads of the studies and their training: a transformer on text, a convolutional network on images, and a linear
model.

A convolution is the matrix product of 3x3 patches and a kernel. If the convolution is mapped over workers with
different parameters, it remains one batched matrix product, whereas `lax.conv_general_dilated` becomes a grouped
convolution, which is several times slower on a CPU. There is no batch normalization: images of a batch interact only
through gradients, so the workers' mean gradient is the gradient of the whole batch, and the state of a replica consists
only of its parameters.

Letters in shapes:

    B  images        C  channels        F  features
    H, W  height and width              K  classes
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from .. import ByteTokenizer, batches, make_dataset, read_corpus
from ..iterative import (
    DECODER,
    LENGTH,
    Images,
    decoder_loss,
    image_batches,
    patches,
    pool,
    pooled_pixels,
    read_images,
)
from ..programs import DATA, init_params
from .settings import Sources

LARGEST = 16  # height in pixels above which images are halved, since a study trains dozens of networks
SAMPLES = 300  # number of test images used
HELD_OUT = 64  # number of chunks of text held out from training


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer.

    Attributes:
        name: name in the record. source: origin of the data.
        init: returns initial parameters from a key.
        loss: `(params, batch) -> mean loss`.
        score: `params -> accuracy or perplexity` on held-out data.
        metric: `accuracy` or `perplexity`.
        optimizer: returns the optimizer for a full batch, given the number of steps.
        rows: rows of a global batch.
        data: `(rows, seed) -> endless iterator over batches`, each with that number of rows.
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


class ConvNet(nnx.Module):
    """Two convolutions, each followed by ReLU and by pooling that halves height and width, and two dense layers, all in
    float32."""

    def __init__(self, shape: tuple[int, int, int], classes: int, rngs: nnx.Rngs) -> None:
        height, width, channels = shape
        relu = functools.partial(nnx.Linear, kernel_init=nnx.initializers.he_normal(), rngs=rngs)
        self.conv1 = relu(9 * channels, 16)
        self.conv2 = relu(9 * 16, 32)
        self.hidden = relu(pooled_pixels(height, width) * 32, 64)
        # Small initial weights keep the first loss near ln K, so that training starts well at large learning rates.
        self.head = nnx.Linear(64, classes, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)

    def __call__(self, x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        for conv in (self.conv1, self.conv2):
            x_BHWC = pool(jax.nn.relu(conv(patches(x_BHWC))))
        x_BF = x_BHWC.reshape(x_BHWC.shape[0], -1)
        return self.head(jax.nn.relu(self.hidden(x_BF)))


@functools.cache
def _definition(shape: tuple[int, int, int], classes: int) -> nnx.GraphDef[ConvNet]:
    return nnx.split(nnx.eval_shape(lambda: ConvNet(shape, classes, nnx.Rngs(0))))[0]


def init_convnet(shape: tuple[int, int, int], classes: int, key: Array) -> dict[str, Any]:
    """Returns initial parameters in float32: normal kernels of variance 2 / inputs, and zero biases."""
    return nnx.to_pure_dict(nnx.state(ConvNet(shape, classes, nnx.Rngs(key))))


def convnet_logits(params: dict[str, Any], images_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
    """Returns the logits of the classes."""
    _, height, width, channels = images_BHWC.shape
    definition = _definition((height, width, channels), params["head"]["bias"].shape[0])
    network: ConvNet = nnx.merge(definition, nnx.State(params))
    return network(images_BHWC)


def image_loss(params: dict[str, Any], batch: Any) -> Float[Array, ""]:
    """Returns the mean cross entropy of a batch `(images, labels)`, in nats."""
    images_BHWC, labels_B = batch
    log_probabilities_BK = jax.nn.log_softmax(convnet_logits(params, images_BHWC))
    return -jnp.mean(jnp.take_along_axis(log_probabilities_BK, labels_B[:, None], axis=-1))


def accuracy(params: dict[str, Any], images_BHWC: Any, labels_B: Any) -> Float32[Array, ""]:
    """Returns the share of images whose largest logit is that of their label; NaN logits select no class."""
    logits_BK = convnet_logits(params, jnp.asarray(images_BHWC))
    # argmax would return the first NaN.
    right_B = (jnp.argmax(logits_BK, axis=-1) == labels_B) & ~jnp.isnan(logits_BK).any(axis=-1)
    return jnp.mean(right_B.astype(jnp.float32))


def convnet(images: Images) -> Task:
    """Returns the convolutional network with SGD and momentum; large images are reduced to half their size."""
    images = halved(images)
    test = images.test_images[:SAMPLES], images.test_labels[:SAMPLES]
    return Task(
        name="convnet",
        source=images.source,
        init=lambda key: init_convnet(images.shape, images.classes, key),
        loss=image_loss,
        score=lambda params: accuracy(params, *test),
        metric="accuracy",
        optimizer=lambda steps: optax.sgd(0.05, momentum=0.9),
        rows=64,
        data=lambda rows, seed: image_batches(images, batch_size=rows, seed=seed),
    )


def halved(images: Images) -> Images:
    """Returns the images, averaged over blocks of two by two pixels if they are large, and cropped to sizes that can be
    halved twice; for example, 28 pixels become 12."""
    if images.shape[0] <= LARGEST:
        return images

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
    """Returns a linear classifier on synthetic points around one center per class, with SGD, for a study that takes
    seconds.

    Args:
        features: number of features of a point.
        classes: number of classes, at most as many as features.
        noise: standard deviation of a feature around its center, which is 1 or 0.
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
        source=f"points around {classes} centers",
        init=lambda key: {"weights": 0.01 * jax.random.normal(key, (features, classes)), "bias": jnp.zeros(classes)},
        loss=loss,
        score=lambda params: jnp.mean((jnp.argmax(values(params, test[0]), axis=-1) == test[1]).astype(jnp.float32)),
        metric="accuracy",
        optimizer=lambda steps: optax.sgd(0.5),
        rows=64,
        data=data,
    )


def transformer(corpus: tuple[str, ...]) -> Task:
    """Returns a small decoder on text, with Adam.

    Args:
        corpus: see `sdc.train.data.read_corpus`.

    Raises:
        CorpusError: a part of the corpus is missing or unreadable.
    """
    dataset = make_dataset(read_corpus(corpus), ByteTokenizer(), LENGTH, seed=0)
    held_out = dataset.chunks[-HELD_OUT:]
    seen = dataclasses.replace(dataset, chunks=dataset.chunks[:-HELD_OUT])

    def adam(steps: int) -> optax.GradientTransformation:
        """Returns Adam with a short linear warm-up and half a cosine down to zero, as is usual for language models."""
        return optax.adam(optax.warmup_cosine_decay_schedule(0.0, 6e-3, max(1, steps // 20), steps), b2=0.99)

    def data(rows: int, seed: int) -> Iterator[Any]:
        order = np.random.default_rng(seed).permutation(len(seen.chunks))
        shuffled = dataclasses.replace(seen, chunks=seen.chunks[order])
        return (batch[0] for batch in batches(shuffled, batch_size=rows, microsteps=1))

    return Task(
        name="transformer",
        source=dataset.source,
        init=lambda key: init_params(DECODER, key),
        loss=decoder_loss,
        score=lambda params: jnp.exp(decoder_loss(params, jnp.asarray(held_out))),
        metric="perplexity",
        optimizer=adam,
        rows=16,
        data=data,
    )


def images_of(source: str) -> Images:
    """Reads the images that a flag selects; a name with a path separator denotes a folder."""
    return read_images(Path(source) if os.sep in source else source)


def chosen_tasks(which: str, sources: Sources) -> list[Task]:
    """Returns the workloads of a study: `convnet` on images, `transformer` on text, or both."""
    tasks = []
    if which != "transformer":
        tasks.append(convnet(images_of(sources.images)))
    if which != "convnet":
        tasks.append(transformer(sources.corpus))
    return tasks


@dataclasses.dataclass(frozen=True)
class Method:
    """A training method. Its settings and seeds are traced, so one program serves all of them.

    Attributes:
        init: `(params, setting) -> state` of a worker, under the axis of workers.
        step: `(params, state, batch, number, setting, seed) -> (params, state, report)` of a worker; reports are
            dictionaries of arrays.
    """

    init: Callable[[Any, Any], Any]
    step: Callable[[Any, Any, Any, Any, Any, Any], tuple[Any, Any, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a training run.

    Attributes:
        steps: step numbers after which the score was evaluated.
        scores: score at each of these steps, averaged over the replicas; NaN propagates.
        reports: reports of all steps, as arrays [steps, workers, ...].
        state: final state of the method, for all workers.
    """

    steps: np.ndarray
    scores: np.ndarray
    reports: Mapping[str, np.ndarray]
    state: Any

    @property
    def score(self) -> float:
        """Final score: the mean of the last three evaluations, since single evaluations are noisy."""
        return float(np.mean(self.scores[-3:]))


class Trainer:
    """Trains a workload with a method, once for each seed; one program serves all settings and trains all seeds at the
    same time.

    Args:
        workload: the workload. method: the training method.
        workers: number of workers, under `vmap`, whose axis is `sdc.train.programs.DATA`; so are the seeds.
        rows: number of rows of a global batch (default: that of the workload).
        cut: transforms a worker's share of a batch, for example into micro-batches.
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

        def several(params: Any, state: Any, shares: Any, numbers: Any, setting: Any, seed: Any) -> Any:
            def one(carry: Any, given: Any) -> Any:
                (params, state), (batch, number) = carry, given
                params, state, report = method.step(params, state, cut(batch), number, setting, seed)
                return (params, state), report

            (params, state), reports = lax.scan(one, (params, state), (shares, numbers))
            return params, state, reports, workload.score(params)

        self._start = jax.jit(jax.vmap(start, in_axes=(0, None)))
        together = jax.vmap(several, in_axes=(0, 0, 1, None, None, None), out_axes=(0, 0, 1, 0), axis_name=DATA)
        self._run = jax.jit(jax.vmap(together, in_axes=(0, 0, 0, None, None, 0)), donate_argnums=(0, 1))

    def __call__(self, setting: Any = (), *, steps: int, seeds: Sequence[int], looks: int = 10) -> list[Trained]:
        """Trains from the start for each seed, and evaluates the score at intervals.

        Args:
            setting: setting for the method.
            steps: optimizer steps.
            seeds: seeds of the parameters, of the order of the data and of the method's draws.
            looks: number of evaluations of the score.

        Returns:
            Scores, reports and the final state for each seed.
        """
        sources = [self.workload.data(self.rows, seed) for seed in seeds]
        length = -(-steps // min(looks, steps))  # one length for all evaluations but the last
        ends, scores, reports = [], [], []
        with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
            params, state = self._start(_stacked([self.workload.init(jax.random.key(seed)) for seed in seeds]), setting)
            for done in range(0, steps, length):
                count = min(length, steps - done)
                shares = _stacked([_stacked([self._share(next(source)) for _ in range(count)]) for source in sources])
                numbers = jnp.arange(done, done + count)
                drawn = jnp.asarray(seeds, jnp.uint32)
                params, state, report, score = self._run(params, state, shares, numbers, setting, drawn)
                reports.append(jax.device_get(report))
                ends.append(done + count)
                scores.append(np.mean(jax.device_get(score), axis=1))
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *reports)
        state, found = jax.device_get(state), np.stack(scores, axis=1)
        return [
            Trained(np.asarray(ends), found[run], *jax.tree.map(lambda leaf, run=run: leaf[run], (joined, state)))
            for run in range(len(seeds))
        ]

    def _share(self, batch: Any) -> Any:
        """Divides a global batch among the workers."""
        return jax.tree.map(lambda leaf: leaf.reshape(self.workers, self.rows // self.workers, *leaf.shape[1:]), batch)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
