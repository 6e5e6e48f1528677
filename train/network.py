"""A small convolutional network, for replicas and workers that train on images.

A convolution is the matrix product of 3x3 patches and a kernel. Mapped over workers that have parameters of their own
it stays one batched product; `lax.conv_general_dilated` becomes a grouped convolution, several times slower on a CPU.
There is no batch norm: nothing but gradients connects the images of a batch, so the mean over workers of their
gradients is the gradient of the whole batch, and a replica's state is its parameters.

Letters of shapes:

    B  images        C  channels        F  features
    H, W  height and width              K  classes
"""

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

Params: TypeAlias = dict[str, Any]
Batch: TypeAlias = tuple[Float[Array, "B H W C"], Int[Array, "B"]]

CHUNK = 100
"""Images whose logits `accuracy` computes at once; patches of more no longer fit into the caches of a CPU."""


class ConvNet(nnx.Module):
    """Two convolutions, each with ReLU and a pooling that halves height and width, then two dense layers; float32."""

    def __init__(self, shape: tuple[int, int, int], classes: int, rngs: nnx.Rngs) -> None:
        height, width, channels = shape
        relu = functools.partial(nnx.Linear, kernel_init=nnx.initializers.he_normal(), rngs=rngs)
        self.conv1 = relu(9 * channels, 16)
        self.conv2 = relu(9 * 16, 32)
        self.hidden = relu(height // 4 * (width // 4) * 32, 64)
        # Small, so that the first loss is near ln K and large learning rates start well.
        self.head = nnx.Linear(64, classes, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)

    def __call__(self, x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        for conv in (self.conv1, self.conv2):
            x_BHWC = pool(jax.nn.relu(conv(patches(x_BHWC))))
        x_BF = x_BHWC.reshape(x_BHWC.shape[0], -1)
        return self.head(jax.nn.relu(self.hidden(x_BF)))


def patches(x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B H W 9*C"]:
    """The 3x3 neighbours of every pixel, row by row; zeros beyond the border."""
    _, height, width, _ = x_BHWC.shape
    padded = jnp.pad(x_BHWC, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, row : row + height, column : column + width] for row in range(3) for column in range(3)]
    return jnp.concatenate(shifted, axis=-1)


def pool(x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B H/2 W/2 C"]:
    """The largest of every 2x2 pixels."""
    batch, height, width, channels = x_BHWC.shape
    return x_BHWC.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def init_convnet(shape: tuple[int, int, int], classes: int, key: Array) -> Params:
    """Initial parameters: float32, kernels normal with variance 2 / inputs, biases zero."""
    height, width, _ = shape
    if min(height, width) < 4 or height % 4 or width % 4:
        raise ValueError(
            f"images of {height}x{width} cannot be halved twice; expected multiples of 4: pad or crop them"
        )
    return nnx.to_pure_dict(nnx.state(ConvNet(shape, classes, nnx.Rngs(key))))


def convnet_logits(params: Params, images_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
    """Logits of the classes."""
    _, height, width, channels = images_BHWC.shape
    definition = _definition((height, width, channels), params["head"]["bias"].shape[0])
    network: ConvNet = nnx.merge(definition, nnx.State(params))
    return network(images_BHWC)


def image_loss(params: Params, batch: Batch) -> Float[Array, ""]:
    """Mean cross entropy of a batch, (images, labels), in nats."""
    images_BHWC, labels_B = batch
    log_probabilities_BK = jax.nn.log_softmax(convnet_logits(params, images_BHWC))
    return -jnp.mean(jnp.take_along_axis(log_probabilities_BK, labels_B[:, None], axis=-1))


def accuracy(params: Params, images_BHWC: Float[np.ndarray, "B H W C"], labels_B: Int[np.ndarray, "B"]) -> float:
    """Share of images whose largest logit is that of their label, in chunks of `CHUNK` images.

    Logits that are no numbers name no class, so that a diverged network has accuracy 0.
    """
    correct = 0
    for start in range(0, len(labels_B), CHUNK):
        chunk = slice(start, start + CHUNK)
        correct += int(_count_correct(params, images_BHWC[chunk], labels_B[chunk]))
    return correct / len(labels_B)


@jax.jit
def _count_correct(params: Params, images_BHWC: Float[Array, "B H W C"], labels_B: Int[Array, "B"]) -> Int[Array, ""]:
    logits_BK = convnet_logits(params, images_BHWC)
    # argmax would take the first number that is none for the largest.
    right_B = (jnp.argmax(logits_BK, axis=-1) == labels_B) & ~jnp.isnan(logits_BK).any(axis=-1)
    return jnp.sum(right_B)


@functools.cache
def _definition(shape: tuple[int, int, int], classes: int) -> nnx.GraphDef[ConvNet]:
    definition, _ = nnx.split(nnx.eval_shape(lambda: ConvNet(shape, classes, nnx.Rngs(0))))
    return definition
