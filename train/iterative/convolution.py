"""A convolutional network with Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

from .. import Images, patches, pool
from .adam import By, by_adam
from .protocol import Iterative, State

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
