"""Iterative-convergent trainings: each compiled step and loss against plain NumPy, and what holds for all of them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc.train.data import ByteTokenizer, make_dataset, read_corpus
from sdc.train.iterative.models import DECODER, solve
from tests.matrix.train.programs.test_model import plain_loss
from tests.train.test_iterative_steps import BATCH, BATCHES, TEXT, example, float64, images, order, softmax, start


@pytest.mark.parametrize("size", [1, 2, 5, 20])
@settings(max_examples=15)
@given(st.floats(0, 4), st.integers(0, 2**32 - 1))
def test_solve(size: int, digits: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    turned = np.linalg.qr(rng.normal(size=(2, 3, size, size)))[0]
    curvatures = 10 ** np.linspace(-digits / 2, digits / 2, size)
    a = np.einsum("...ij,j,...kj->...ik", turned, curvatures, turned).astype(np.float32)
    b = rng.normal(size=(2, 3, size)).astype(np.float32)
    expected = np.linalg.solve(a.astype(np.float64), b[..., None].astype(np.float64))[..., 0]
    error = np.linalg.norm(np.asarray(jax.jit(solve)(a, b)) - expected, axis=-1)
    # Higham, Accuracy and Stability, theorem 10.4: at most about 4 n (3 n + 1) u times the condition; in practice n u.
    bound = 2 * size * 2.0**-24 * np.linalg.cond(a.astype(np.float64))
    assert (error <= (bound + 2.0**-22) * np.linalg.norm(expected, axis=-1)).all()


def shifted(x: np.ndarray) -> np.ndarray:
    """By row and column of a kernel: the pixels that it takes; zeros beyond the border."""
    batch, height, width, channels = x.shape
    found = np.zeros((3, 3, batch, height, width, channels))
    for h in range(height):
        for w in range(width):
            for row in range(3):
                for column in range(3):
                    if 0 <= h + row - 1 < height and 0 <= w + column - 1 < width:
                        found[row, column, :, h, w] = x[:, h + row - 1, w + column - 1]
    return found


def convolved(params: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """The network's loss, and its gradient by the chain rule, last layer first."""
    inputs, slopes, winners = [], [], []
    for n in range(5):
        w, b = params[f"weight{n}"], params[f"bias{n}"]
        if n == 2:
            x = x.reshape(len(x), -1)
        if n < 2:
            inputs.append(shifted(x))
            z = np.einsum("rcbhwi,rcio->bhwo", inputs[n], w.reshape(3, 3, x.shape[-1], -1)) + b
            squares = z.reshape(len(z), z.shape[1] // 2, 2, z.shape[2] // 2, 2, -1)
            best = squares.max((2, 4), keepdims=True)
            winners.append(squares == best)
            z = best[:, :, 0, :, 0]
        else:
            inputs.append(x)
            z = x @ w + b
        slopes.append(z > 0)
        x = z.clip(0) if n < 4 else z
    loss = -np.log(softmax(x)[np.arange(len(y)), y]).mean()
    back, found = (softmax(x) - np.eye(x.shape[1])[y]) / len(y), {}
    for n in reversed(range(5)):
        w = params[f"weight{n}"]
        if n < 4:
            back = back * slopes[n].reshape(back.shape)
        if n >= 2:
            found[f"weight{n}"], found[f"bias{n}"] = inputs[n].T @ back, back.sum(0)
            back = back @ w.T
            continue
        of_squares = back.reshape(slopes[n].shape)[:, :, None, :, None] * winners[n]
        here = of_squares.reshape((*inputs[n].shape[2:5], -1))
        found[f"weight{n}"] = np.einsum("rcbhwi,bhwo->rcio", inputs[n], here).reshape(w.shape)
        found[f"bias{n}"] = here.sum((0, 1, 2))
        kernel = w.reshape(3, 3, -1, w.shape[1])
        # What a pixel gives to its neighbours, they give back: the kernel is turned by half.
        back = np.einsum("rcbhwo,rcio->bhwi", shifted(here), kernel[::-1, ::-1])
    return float(loss), found


def decoded(params: dict[str, np.ndarray], chunks: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    tree: dict[str, Any] = {}
    for name, leaf in params.items():
        *above, last = name.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), above, tree)[last] = leaf.astype(np.float32)
    loss, gradient = plain_decoder()(tree, chunks)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    return float(loss), {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float64) for path, leaf in leaves
    }


@functools.cache
def plain_decoder() -> Any:
    """The plain decoder that the model is tested with."""
    return jax.jit(jax.value_and_grad(functools.partial(plain_loss, config=DECODER)))


@pytest.mark.parametrize("name", ["cnn-layers", "transformer"])
def test_adam(name: str) -> None:
    _, step, loss = example(name)
    data: tuple[np.ndarray, ...]
    gradient_of: Callable[..., tuple[float, dict[str, np.ndarray]]]
    if name == "transformer":
        chunks = make_dataset(read_corpus((str(TEXT),)), ByteTokenizer(), 64, seed=5).chunks
        data, rate, samples, gradient_of = (chunks[order(len(chunks))],), 3e-3, 5, decoded
    else:
        data, rate, samples, gradient_of = (images().train_images, images().train_labels), 1e-3, 9, convolved
    data = tuple(array[order(len(array))] for array in data)
    epoch = len(data[0]) // BATCH
    state = start(name)
    mine = float64(state)
    leaves = [leaf.removeprefix("params/") for leaf in mine if leaf.startswith("params/")]
    assert set(mine) == {f"{kind}/{leaf}" for kind in ("params", "mu", "nu") for leaf in leaves}
    assert abs(float(loss(state)) - np.log(5 if name != "transformer" else 320)) < 0.3
    for k in (0, 1, epoch // BATCHES):  # of the last of them, a batch is the first again
        for number in range(BATCHES):
            count = k * BATCHES + number
            rows = np.arange(count % epoch * BATCH, count % epoch * BATCH + BATCH)
            params = {leaf: mine[f"params/{leaf}"] for leaf in leaves}
            gradient = gradient_of(params, *(array[rows] for array in data))[1]
            for leaf in leaves:
                g = gradient[leaf]
                mu = mine[f"mu/{leaf}"] = 0.9 * mine[f"mu/{leaf}"] + 0.1 * g
                nu = mine[f"nu/{leaf}"] = 0.999 * mine[f"nu/{leaf}"] + 0.001 * g**2
                mu, nu = mu / (1 - 0.9 ** (count + 1)), nu / (1 - 0.999 ** (count + 1))
                mine[f"params/{leaf}"] = params[leaf] - rate * mu / (np.sqrt(nu) + 1e-8)
        state = step(state, k)
        assert np.abs(mine[f"mu/{leaves[0]}"]).max() > 1e-3
        for leaf, expected in mine.items():
            # Gradients of about 1 at most, of sums of hundreds in float32; a step of the parameters is a thousandth.
            atol = 5e-8 if leaf.startswith("nu/") else 2e-6
            np.testing.assert_allclose(state[leaf], expected, rtol=1e-4, atol=atol, err_msg=f"{leaf} {k}")
        params = {leaf: mine[f"params/{leaf}"] for leaf in leaves}
        plain = gradient_of(params, *(array[:samples] for array in data))[0]
        np.testing.assert_allclose(loss(state), plain, rtol=1e-5)
