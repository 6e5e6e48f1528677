"""Iterative-convergent trainings become as good as a library's, or a plain NumPy version's, on the same data.

Figures in comments are of two cores of a CPU.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.train.iterative import Iterative, logistic_regression, matrix_factorization, topic_model
from sdc.train.iterative.corpora import Documents, Ratings, most_active, read_documents, read_ratings, shortened
from sdc.train.iterative.images import read_images
from tests.train.test_iterative_data import real

WITHIN = 1.02


def trained(task: Iterative, iterations: int, state: Any = None) -> Any:
    @jax.jit
    def program(state: Any) -> Any:
        return jax.lax.fori_loop(0, iterations, lambda k, state: task.step(state, k), state)

    found = program(task.init(jax.random.key(0)) if state is None else state)
    return {name: np.asarray(leaf) for name, leaf in found.items()}


def test_regression_is_that_of_scikit_learn() -> None:
    images, decay = read_images("digits"), 1e-3
    count = len(images.train_labels)
    x, test = (array.reshape(len(array), -1) for array in (images.train_images, images.test_images))
    kind = importlib.import_module("sklearn.linear_model").LogisticRegression
    # Its C weighs the sum of the losses against half of the squares: 1 / (n decay) here.
    theirs = kind(fit_intercept=False, C=1 / (count * decay), max_iter=1000).fit(x, images.train_labels)
    task = logistic_regression(x, images.train_labels, source="digits", batch=count, rate=1.0, decay=decay)
    mine = trained(task, 2000)["weights"]

    def figures(weights: np.ndarray) -> tuple[float, float]:
        loss = float(task.loss({"weights": jnp.asarray(weights, jnp.float32)}))
        return loss, float(np.mean((test @ weights).argmax(-1) == images.test_labels))

    (loss, accuracy), (other, of_other) = figures(mine), figures(theirs.coef_.T)
    # 0.25792 and 0.25788; 96.1 % and 96.4 %.
    assert loss < WITHIN * other
    assert other < loss + 1e-5  # the loss is convex, and theirs is at its optimum
    assert abs(accuracy - of_other) < 0.02
    assert of_other > 0.95


def alternating(ratings: Ratings, left: np.ndarray, right: np.ndarray, decay: float, iterations: int) -> float:
    """The loss of plain alternating least squares, in float64."""
    values, known = np.zeros(ratings.shape), np.zeros(ratings.shape, bool)
    values[ratings.users, ratings.items], known[ratings.users, ratings.items] = ratings.values, True
    square = decay * np.eye(right.shape[1])
    for _ in range(iterations):
        for user, there in enumerate(known):
            left[user] = np.linalg.solve(right[there].T @ right[there] + square, right[there].T @ values[user, there])
        for item, there in enumerate(known.T):
            right[item] = np.linalg.solve(left[there].T @ left[there] + square, left[there].T @ values[there, item])
    errors = ((values - left @ right.T)[known] ** 2).sum()
    return float((errors + decay * ((left**2).sum() + (right**2).sum())) / known.sum())


def low_rank() -> Ratings:
    """Products of three factors with noise, of which a third is known."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 80)) + 0.1 * rng.normal(size=(60, 80))
    users, items = np.nonzero(rng.random(table.shape) < 1 / 3)
    values = table[users, items].astype(np.float32)
    return Ratings(users.astype(np.int32), items.astype(np.int32), values, "made up", "")


@pytest.mark.parametrize(("name", "factors", "decay"), [("low rank", 3, 0.1), ("movielens", 10, 1.0)])
def test_factorization_is_that_of_plain_least_squares(name: str, factors: int, decay: float) -> None:
    ratings = low_rank()
    if name == "movielens":
        found = real(read_ratings, "neighbors==0.2.1")
        assert isinstance(found, Ratings)
        ratings = most_active(found, 100, 150)
    task = matrix_factorization(ratings, factors=factors, decay=decay)
    state = task.init(jax.random.key(0))
    left, right = (np.array(state[side], np.float64) for side in ("users", "items"))
    expected = alternating(ratings, left, right, decay, 15)
    loss = float(task.loss(trained(task, 15, state)))
    # Rounding alone: 0.04082692 and 0.04082691, 0.51811075 and 0.51811070.
    assert abs(loss / expected - 1) < WITHIN - 1
    assert loss < 0.5 * float(task.loss(state))


def drawn() -> Documents:
    """A corpus drawn from the model: 120 documents of 40 to 80 tokens, 100 words, 5 topics."""
    rng = np.random.default_rng(0)
    phi = rng.dirichlet(np.full(100, 0.1), 5)
    lengths = rng.integers(40, 81, 120)
    texts = [rng.choice(100, length, p=rng.dirichlet(np.full(5, 0.2)) @ phi) for length in lengths]
    used, words = np.unique(np.concatenate(texts), return_inverse=True)
    where = np.repeat(np.arange(120), lengths).astype(np.int32)
    return Documents(words.astype(np.int32), where, tuple(f"word {word}" for word in used), "drawn", "")


@pytest.mark.parametrize(
    ("name", "topics", "alpha", "beta", "iterations", "starts"),
    [("drawn", 5, 0.2, 0.1, 60, 3), ("reuters", 20, 0.1, 0.1, 50, 1)],
)
def test_topics_are_those_of_scikit_learn(
    name: str, topics: int, alpha: float, beta: float, iterations: int, starts: int
) -> None:
    documents = drawn()
    if name == "reuters":
        found = real(read_documents, "lda==3.0.2")
        assert isinstance(found, Documents)
        documents = shortened(found, 64)
    counts = np.zeros(documents.shape)
    np.add.at(counts, (documents.documents, documents.words), 1)
    kind = importlib.import_module("sklearn.decomposition").LatentDirichletAllocation
    task = topic_model(documents, topics=topics, alpha=alpha, beta=beta)
    theirs, mine = [], []
    for seed in range(starts):  # of several starts the best: both come to optima that are not the best
        model = kind(topics, doc_topic_prior=alpha, topic_word_prior=beta, max_iter=20, random_state=seed).fit(counts)
        theta, phi = model.transform(counts), model.components_ / model.components_.sum(1, keepdims=True)
        theirs.append(-(counts * np.log(theta @ phi)).sum() / counts.sum())
        mine.append(float(task.loss(trained(task, iterations, task.init(jax.random.key(seed))))))
    # 3.203 and 3.192; 6.764 and 6.684. Collapsed Gibbs sampling that renews all counts after each token (lda 3.0.2)
    # comes to 3.199 after 500 iterations, and on Reuters after 300 to 6.729; `topic_model` then to 6.706.
    assert min(mine) < WITHIN * min(theirs)
    assert min(mine) < 0.95 * float(task.loss(task.init(jax.random.key(0))))
