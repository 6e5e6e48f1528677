"""Neural networks trained by Adam, whose moments belong to the blocks of the parameters."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

from .. import ByteTokenizer, Images, make_dataset, patches, pool, read_corpus
from ..programs import MODEL, ModelConfig, cross_entropy, init_params, logits
from .protocol import Iterative, State

By: TypeAlias = Literal["layers", "shards"]
KINDS = ("params", "mu", "nu")


def by_adam(
    *,
    name: str,
    source: str,
    params_of: Callable[[Array], State],
    loss: Callable[..., Float32[Array, ""]],
    data: tuple[np.ndarray, ...],
    samples: int,
    rate: float,
    batch: int,
    batches: int,
    by: By,
    seed: int,
) -> Iterative:
    """A training by Adam of parameters that are a dictionary of arrays."""
    if not 1 <= batch <= len(data[0]):
        raise ValueError(f"batch={batch}: expected 1 to {len(data[0])}, the examples that there are")
    shapes = jax.eval_shape(lambda: params_of(jax.random.key(0)))
    order = np.random.default_rng(seed).permutation(len(data[0]))
    shuffled = tuple(array[order] for array in data)
    steps = len(order) // batch
    optimizer = optax.adam(rate)

    def step(state: State, k: Any) -> State:
        """Adam's count follows from the number of the iteration, and cannot be lost."""
        params, mu, nu = ({name: state[f"{kind}/{name}"] for name in shapes} for kind in KINDS)

        def one(number: Any, carry: Any) -> Any:
            params, mu, nu = carry
            count = jnp.asarray(k, jnp.int32) * batches + number
            start = count % steps * batch
            grads = jax.grad(loss)(params, *(jax.lax.dynamic_slice_in_dim(array, start, batch) for array in shuffled))
            state = (optax.ScaleByAdamState(count, mu, nu), optax.EmptyState())
            with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
                updates, ((_, mu, nu), _) = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), mu, nu

        found = jax.lax.fori_loop(0, batches, one, (params, mu, nu))
        return {f"{kind}/{name}": part[name] for kind, part in zip(KINDS, found, strict=True) for name in shapes}

    def init(key: Array) -> State:
        params = params_of(key)
        zeros = {name: jnp.zeros_like(leaf) for name, leaf in params.items()}
        parts = zip(KINDS, (params, zeros, zeros), strict=True)
        return {f"{kind}/{name}": part[name] for kind, part in parts for name in shapes}

    ids: dict[str, np.ndarray] = {}
    first = 0
    for leaf, shape in shapes.items():
        rows = shape.shape[0]
        own = first + (np.arange(rows) if by == "shards" else np.zeros(rows, int))
        first = int(own[-1]) + 1
        ids |= {f"{kind}/{leaf}": own.astype(np.int32) for kind in KINDS}
    return Iterative(
        name=name,
        source=source,
        init=init,
        step=step,
        loss=lambda state: loss(
            {leaf: state[f"params/{leaf}"] for leaf in shapes}, *(array[:samples] for array in shuffled)
        ),
        blocks=ids,
        moving=tuple(f"params/{leaf}" for leaf in shapes),
    )


CHANNELS, HIDDEN = (8, 16), (64, 32)


def convolutional_network(
    images: Images, *, by: By = "layers", batch: int = 64, batches: int = 8, samples: int = 256, seed: int = 0
) -> Iterative:
    """Trains two convolutions with max pooling and three dense layers, with ReLU, by Adam.

    Qiao et al., ICML 2019, section 5.1 and appendix C: batches of 64 and Adam as recommended (0.001, 0.9, 0.999, 1e-8).
    Adam's moments are of the block of the parameters that they belong to.

    Args:
        images: to train on; height and width are multiples of 4.
        by: `layers`: each weight and each bias is a block; `shards`: each index of their first axis is.
        batch: images of a batch.
        batches: batches of an iteration, after which alone something can be saved or lost.
        samples: images over which the loss is taken by which convergence is told.
        seed: of the order of the images.

    Raises:
        ValueError: a batch has more images than there are, or height or width is no multiple of 4.

    Example:
        >>> from sdc.train.images import read_images
        >>> from sdc.train.iterative import convolutional_network
        >>> convolutional_network(read_images("digits")).count
        10
    """
    height, width, channels = images.shape
    if min(height, width) < 4 or height % 4 or width % 4:
        raise ValueError(
            f"images of {height}x{width} cannot be halved twice; expected multiples of 4: pad or crop them"
        )
    flat = height // 4 * (width // 4) * CHANNELS[1]
    sides = [(9 * channels, CHANNELS[0]), (9 * CHANNELS[0], CHANNELS[1]), (flat, HIDDEN[0]), HIDDEN]
    sides.append((HIDDEN[1], images.classes))

    def params_of(key: Array) -> State:
        keys = jax.random.split(key, len(sides))
        found: State = {}
        for number, ((rows, columns), one) in enumerate(zip(sides, keys, strict=True)):
            # The small head makes the first loss ln(classes).
            scale = 0.02 if number == len(sides) - 1 else np.sqrt(2 / rows)
            found[f"weight{number}"] = scale * jax.random.normal(one, (rows, columns))
            found[f"bias{number}"] = jnp.zeros(columns)
        return found

    def loss(params: State, x: Array, y: Array) -> Float32[Array, ""]:
        for number in range(len(sides)):
            if number < 2:
                x = patches(x)
            x = x @ params[f"weight{number}"] + params[f"bias{number}"]
            if number < len(sides) - 1:
                x = jax.nn.relu(x)
            if number < 2:
                x = pool(x)
            if number == 1:
                x = x.reshape(len(x), -1)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x, y))

    return by_adam(
        name=f"convolution by {by}",
        source=images.source,
        params_of=params_of,
        loss=loss,
        data=(images.train_images, images.train_labels),
        samples=samples,
        rate=0.001,
        batch=batch,
        batches=batches,
        by=by,
        seed=seed,
    )


CONFIG = ModelConfig(vocab_size=320, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=64)
LENGTH = 64
MOST = 4096
"""Chunks of text, of which as many batches are made."""


def transformer_decoder(
    corpus: tuple[str, ...] = ("python",), *, batch: int = 8, batches: int = 4, samples: int = 8, seed: int = 0
) -> Iterative:
    """Trains a small decoder on text, byte by byte, by Adam. A block is what has the same index on the first axis.

    Args:
        corpus: see `sdc.train.corpus.read_corpus`.
        batch: chunks of 64 bytes of a batch.
        batches: batches of an iteration, after which alone something can be saved or lost.
        samples: chunks over which the loss is taken by which convergence is told.
        seed: of the order of the text.

    Raises:
        CorpusError: a part of the corpus is missing or unreadable.
        ValueError: a batch has more chunks than there are.

    Example:
        >>> from sdc.train.iterative import transformer_decoder
        >>> transformer_decoder(("python",)).name
        'transformer'
    """
    dataset = make_dataset(read_corpus(corpus), ByteTokenizer(), LENGTH, seed=seed)
    chunks = np.asarray(dataset.chunks)[np.random.default_rng(seed).permutation(len(dataset.chunks))[:MOST]]
    shapes = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(shapes)]
    structure = jax.tree.structure(shapes)

    def params_of(key: Array) -> State:
        return dict(zip(names, jax.tree.leaves(init_params(CONFIG, key)), strict=True))

    def loss(params: State, tokens_BS: Array) -> Float32[Array, ""]:
        tree = jax.tree.unflatten(structure, [params[name] for name in names])

        def share(_: Array) -> Any:
            return jnp.mean(cross_entropy(logits(CONFIG, tree, tokens_BS[:, :-1]), tokens_BS[:, 1:]))

        # The model's collectives need their axis, of one rank here.
        return jax.vmap(share, axis_name=MODEL)(jnp.zeros(1))[0]

    return by_adam(
        name="transformer", source=dataset.source, params_of=params_of, loss=loss, data=(chunks,),
        samples=samples, rate=3e-3, batch=batch, batches=batches, by="shards", seed=seed,
    )  # fmt: skip
