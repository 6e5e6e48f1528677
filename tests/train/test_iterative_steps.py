"""Iterative-convergent trainings: each compiled step and loss against plain NumPy, and what holds for all of them."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sdc.train.iterative import (
    Iterative,
    convolutional_network,
    logistic_regression,
    matrix_factorization,
    topic_model,
    transformer_decoder,
)
from sdc.train.iterative.corpora import Documents, Ratings
from sdc.train.iterative.images import Images

TEXT = Path(__file__).parents[2] / "LICENSE"
POINTS, CLASSES = 26, 3
TOPICS, ALPHA, BETA = 4, 0.7, 0.3
IMAGES, SHAPE = 20, (8, 12, 2)
BATCH, BATCHES = 8, 3


@functools.cache
def points() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(POINTS, 5)).astype(np.float32), rng.permutation(POINTS).astype(np.int32) % CLASSES


@functools.cache
def ratings() -> Ratings:
    rng = np.random.default_rng(1)
    known = rng.random((7, 9)) < 0.6
    known[range(7), range(7)] = known[0] = True
    users, items = np.nonzero(known)
    values = rng.integers(1, 6, len(users)).astype(np.float32)
    return Ratings(users.astype(np.int32), items.astype(np.int32), values, "made up", "")


@functools.cache
def documents() -> Documents:
    """Of 1 to 45 tokens: the longest fills the 8 parts of 6 places but for three."""
    rng = np.random.default_rng(2)
    lengths = [45, 1, 30, 6, 7, 12, 41, 3]
    words = np.concatenate([np.arange(12), rng.integers(0, 12, sum(lengths) - 12)]).astype(np.int32)
    where = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    return Documents(words, where, tuple("abcdefghijkl"), "made up", "")


@functools.cache
def images() -> Images:
    """Noise: no two pixels of a pooled square are the same, where a slope would be a matter of definition."""
    rng = np.random.default_rng(3)
    pixels = rng.random((IMAGES, *SHAPE), dtype=np.float32)
    labels = rng.integers(0, 5, IMAGES, dtype=np.int32)
    return Images(pixels, labels, pixels, labels, 5, "made up", "")


def make(name: str, batch: int = BATCH) -> Iterative:
    if name == "regression":
        return logistic_regression(*points(), source="made up", batch=batch, rate=0.5, decay=0.1, seed=5)
    if name == "factorization":
        return matrix_factorization(ratings(), factors=3, decay=0.2)
    if name == "topics":
        return topic_model(documents(), topics=TOPICS, alpha=ALPHA, beta=BETA, seed=5)
    if name == "transformer":
        return transformer_decoder((str(TEXT),), batch=batch, batches=BATCHES, samples=5, seed=5)
    by: Any = name.removeprefix("cnn-")
    return convolutional_network(images(), by=by, batch=batch, batches=BATCHES, samples=9, seed=5)


NAMES = ["regression", "factorization", "topics", "cnn-layers", "cnn-shards", "transformer"]


@functools.cache
def example(name: str) -> tuple[Iterative, Any, Any]:
    """The training, its step and its loss, compiled."""
    task = make(name)
    return task, jax.jit(task.step), jax.jit(task.loss)


def start(name: str, seed: int = 0) -> dict[str, Any]:
    """A first state; Adam's moments are arbitrary: from zeros a step is a sign, and of a slope near 0 any sign."""
    task, rng = example(name)[0], np.random.default_rng(seed)
    state = dict(jax.jit(task.init)(jax.random.key(seed)))
    for leaf, value in state.items():
        if leaf.startswith("mu/"):
            state[leaf] = rng.normal(0, 0.02, value.shape).astype(np.float32)
        elif leaf.startswith("nu/"):
            state[leaf] = rng.uniform(0.001, 0.01, value.shape).astype(np.float32)
    if name == "transformer":  # of a byte that is in no text: here epsilon tells
        for leaf, small in (("mu/embedding", 1e-8), ("nu/embedding", 1e-16)):
            state[leaf][-1] = small
    return state


def float64(state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf, np.float64) for name, leaf in state.items()}


def order(count: int, seed: int = 5) -> np.ndarray:
    """The order of the examples, which the plain versions take as data."""
    return np.random.default_rng(seed).permutation(count)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers: np.ndarray = np.exp(logits)
    shares: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return shares


def test_regression() -> None:
    _, step, loss = example("regression")
    x, y = (array[order(POINTS)] for array in points())
    state = start("regression")
    weights = float64(state)["weights"]
    for k in range(8):  # 3 batches of 8; the last two points are of none
        gradient = 0.1 * weights
        for n in range(k % 3 * 8, k % 3 * 8 + 8):
            wrong = softmax(x[n] @ weights) - np.eye(CLASSES)[y[n]]
            gradient += np.outer(x[n], wrong) / 8
        weights = weights - 0.5 * gradient
        state = step(state, k)
        # In float32: sums of 8 and of 5 products, each of about 1 at most; it is some 3e-8.
        np.testing.assert_allclose(state["weights"], weights, rtol=1e-6, atol=2e-7, err_msg=str(k))
        likelihood = softmax(x[:24] @ weights)[np.arange(24), y[:24]]
        expected = -np.log(likelihood).mean() + 0.1 / 2 * (weights**2).sum()
        np.testing.assert_allclose(loss(state), expected, rtol=1e-6)


def least_squares(others: np.ndarray, rows: np.ndarray, columns: np.ndarray, decay: float) -> np.ndarray:
    """Each row's least squares by itself, of the ratings that are known of it."""
    found = []
    for row in range(rows.max() + 1):
        mine = rows == row
        there = others[columns[mine]]
        normal = there.T @ there + decay * np.eye(others.shape[1])
        found.append(np.linalg.solve(normal, there.T @ ratings().values[mine].astype(np.float64)))
    return np.array(found)


def test_factorization() -> None:
    _, step, loss = example("factorization")
    state = start("factorization")
    assert all(0 <= leaf.min() < leaf.max() <= 1 for leaf in state.values())
    right = float64(state)["items"]
    known = ratings()
    for k in range(6):
        left = least_squares(right, known.users, known.items, 0.2)
        right = least_squares(left, known.items, known.users, 0.2)
        state = step(state, k)
        # Condition numbers are some hundreds, and rounding of 6e-8 is multiplied by them.
        np.testing.assert_allclose(state["users"], left, rtol=1e-4, atol=2e-5, err_msg=str(k))
        np.testing.assert_allclose(state["items"], right, rtol=1e-4, atol=2e-5, err_msg=str(k))
        error = known.values - (left[known.users] * right[known.items]).sum(-1)
        expected = ((error**2).sum() + 0.2 * ((left**2).sum() + (right**2).sum())) / len(known.values)
        np.testing.assert_allclose(loss(state), expected, rtol=1e-5)


def tokens() -> Iterator[tuple[int, int, int]]:
    """Document, place within it and word."""
    for document, length in enumerate(documents().lengths):
        for place, word in enumerate(documents().words[documents().documents == document]):
            assert place < length
            yield document, place, int(word)


def counted(assigned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Topics of documents and of words."""
    of_documents, of_words = np.zeros((8, TOPICS)), np.zeros((12, TOPICS))
    for document, place, word in tokens():
        of_documents[document, assigned[document, place]] += 1
        of_words[word, assigned[document, place]] += 1
    return of_documents, of_words


def test_topics() -> None:
    """Token by token, with the same uniform numbers."""
    _, step, loss = example("topics")
    state = start("topics")
    np.testing.assert_array_equal(state["counts"], counted(np.asarray(state["assigned"]))[0])
    changed = close = 0
    for k in range(8):
        old, new = np.asarray(state["assigned"]), np.asarray(step(state, k)["assigned"])
        uniform = np.asarray(jax.random.uniform(jax.random.fold_in(jax.random.key(5), k), (8, 48)), np.float64)
        seen, of_words = counted(old)
        renewed = seen.copy()
        for document, place, word in tokens():
            if place % 6 == 0:
                seen[document] = renewed[document]
            own = np.arange(TOPICS) == old[document, place]
            odds = (seen[document] - own + ALPHA) * (of_words[word] - own + BETA)
            odds /= of_words.sum(0) - own + 12 * BETA
            bounds = np.cumsum(odds / odds.sum())
            drawn = uniform[document, place]
            topic = int((bounds < drawn).sum())
            # Three products and sums of four, each within 2^-24: nearer to a bound, either side is right.
            if np.abs(bounds[:-1] - drawn).min() < 2.0**-21:
                close, topic = close + 1, int(new[document, place])
            assert new[document, place] == topic, (k, document, place)
            changed += topic != own.argmax()
            renewed[document] += (np.arange(TOPICS) == topic) - own.astype(int)
        state = step(state, k)
        np.testing.assert_array_equal(state["counts"], renewed)
        of_documents, of_words = counted(new)
        np.testing.assert_array_equal(state["counts"], of_documents)
        np.testing.assert_array_equal(of_documents.sum(1), documents().lengths)
        theta = (of_documents + ALPHA) / (of_documents + ALPHA).sum(1, keepdims=True)
        phi = (of_words + BETA) / (of_words + BETA).sum(0)
        expected = -np.mean([np.log(theta[document] @ phi[word]) for document, _, word in tokens()])
        np.testing.assert_allclose(loss(state), expected, rtol=1e-6)
    assert close <= 1
    assert changed > 300


def test_padding_is_of_no_topic() -> None:
    _, step, loss = example("topics")
    state, there = start("topics"), np.zeros((8, 48), bool)
    for document, place, _ in tokens():
        there[document, place] = True
    assert there.sum() == len(documents().words)
    other = state | {"assigned": np.where(there, state["assigned"], 1).astype(np.int8)}
    for k in range(3):
        assert loss(state) == loss(other)
        state, other = step(state, k), step(other, k)
        np.testing.assert_array_equal(state["counts"], other["counts"])
        np.testing.assert_array_equal(np.asarray(state["assigned"])[there], np.asarray(other["assigned"])[there])


def test_a_token_does_not_see_its_own_topic() -> None:
    task = topic_model(Documents(np.zeros(1, np.int32), np.zeros(1, np.int32), ("a",), "made up", ""), topics=5, seed=1)
    state, step = task.init(jax.random.key(0)), jax.jit(task.step)
    for k in range(20):  # nothing else is there: all topics are as likely
        state = step(state, k)
        drawn = np.asarray(jax.random.uniform(jax.random.fold_in(jax.random.key(1), k), (1, 8)))[0, 0]
        assert state["assigned"][0, 0] == int(5 * drawn)


def test_only_so_many_topics_have_a_number() -> None:
    task = topic_model(documents(), topics=128)
    assert int(task.init(jax.random.key(0))["assigned"].max()) == 127
    with pytest.raises(ValueError, match="topics=129: expected 1 to 128"):
        topic_model(documents(), topics=129)


@pytest.mark.parametrize("name", ["regression", "cnn-layers", "transformer"])
def test_a_batch_of_more_than_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=r"^batch=999: expected 1 to \d+, the number of examples$"):
        make(name, batch=999)
