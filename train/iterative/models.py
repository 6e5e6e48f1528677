"""Trainings that recover by themselves: logistic regression, matrix factorization, and a topic model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from sdc.checkpoints import total_variation

from .corpora import Documents, Ratings
from .protocol import Iterative, State, rows_of


def logistic_regression(
    features: Float32[np.ndarray, "n M"],
    labels: Int32[np.ndarray, "n"],
    *,
    source: str,
    batch: int,
    rate: float,
    decay: float = 1e-3,
    seed: int = 0,
) -> Iterative:
    """Minimizes the multi-logit loss over an M x N matrix, whose rows are the blocks.

    Qiao et al., ICML 2019, section 5.1 and appendix C:

        l(W) = 1/n sum_i -log softmax(x_i W)_{y_i} + decay/2 ||W||^2,   W_{k+1} = W_k - rate * grad l_batch(W_k)

    The weight decay, which the paper does not name, makes the loss strongly convex: then there is one optimum, to which
    theorem 3.2 measures its distances.

    Args:
        features: one row for each example.
        labels: classes, from 0.
        source: where they come from.
        batch: examples of an iteration; batches are cut one after the other from one order, and examples at its end
            that make no batch are left out, of the loss too.
        rate: learning rate.
        decay: weight decay.
        seed: of that order.

    Raises:
        ValueError: a batch has more examples than there are.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from sdc.train.iterative import logistic_regression
        >>> x = np.eye(4, dtype=np.float32)
        >>> task = logistic_regression(x, np.arange(4, dtype=np.int32), source="corners", batch=4, rate=1.0)
        >>> state = task.init(jax.random.key(0))
        >>> state["weights"].shape, bool(task.loss(task.step(state, 0)) < task.loss(state))
        ((4, 4), True)
    """
    if not 1 <= batch <= len(labels):
        raise ValueError(f"batch={batch}: expected 1 to {len(labels)}, the examples that there are")
    order = np.random.default_rng(seed).permutation(len(labels))[: len(labels) // batch * batch]
    x, y = features[order], labels[order]
    classes = int(labels.max()) + 1
    batches = len(order) // batch

    def loss(weights: Array, x: Any, y: Any) -> Float32[Array, ""]:
        logits = x @ weights
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=-1)
        return -jnp.mean(chosen) + decay / 2 * jnp.sum(jnp.square(weights))

    def step(state: State, k: Any) -> State:
        start = jnp.asarray(k, jnp.int32) % batches * batch
        examples = jax.lax.dynamic_slice_in_dim(x, start, batch), jax.lax.dynamic_slice_in_dim(y, start, batch)
        return {"weights": state["weights"] - rate * jax.grad(loss)(state["weights"], *examples)}

    (rows,) = rows_of(features.shape[1])
    return Iterative(
        name="regression",
        source=source,
        init=lambda key: {"weights": 0.01 * jax.random.normal(key, (features.shape[1], classes))},
        step=step,
        loss=lambda state: loss(state["weights"], x, y),
        blocks={"weights": rows},
        moving=("weights",),
    )


def matrix_factorization(ratings: Ratings, *, factors: int = 20, decay: float = 0.1) -> Iterative:
    """Factors a matrix of which some entries are known; rows of L and columns of R are the blocks.

    Qiao et al., ICML 2019, section 5.1 and appendix C; both begin with uniform numbers of [0, 1]:

        l(L, R) = sum over known (u, i) of (r_ui - L_u . R_i)^2 + decay (||L||^2 + ||R||^2)

    An iteration solves for L with R as it is, and then for R: (sum_i R_i R_i^T + decay 1) L_u = sum_i r_ui R_i. The
    loss that is told is l by the number of ratings.

    Args:
        ratings: the entries that are known.
        factors: p, columns of L.
        decay: weight of the squares.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from sdc.train.iterative import matrix_factorization
        >>> from sdc.train.iterative.corpora import Ratings
        >>> known = Ratings(np.int32([0, 0, 1]), np.int32([0, 1, 1]), np.float32([1, 2, 4]), "made up", "")
        >>> task = matrix_factorization(known, factors=1, decay=1e-6)
        >>> state = task.init(jax.random.key(0))
        >>> for k in range(40):
        ...     state = task.step(state, k)
        >>> np.asarray(state["users"] @ state["items"].T).round(2)
        array([[1., 2.],
               [2., 4.]], dtype=float32)
    """
    users, items = ratings.shape
    r, mask = np.zeros((users, items), np.float32), np.zeros((users, items), np.float32)
    r[ratings.users, ratings.items] = ratings.values
    mask[ratings.users, ratings.items] = 1
    upper = np.triu_indices(factors)

    def half(others: Float32[Array, "m p"], r: Any, mask: Any) -> Array:
        """The least-squares solution for one side: each row from the rows of the other that it is known with."""
        squares = others[:, upper[0]] * others[:, upper[1]]
        packed = mask @ squares
        normal = jnp.zeros((r.shape[0], factors, factors)).at[:, upper[0], upper[1]].set(packed)
        normal = normal.at[:, upper[1], upper[0]].set(packed) + decay * jnp.eye(factors)
        return solve(normal, r @ others)

    def step(state: State, k: Any) -> State:
        left = half(state["items"], r, mask)
        return {"users": left, "items": half(left, r.T, mask.T)}

    def loss(state: State) -> Float32[Array, ""]:
        left, right = state["users"], state["items"]
        squares = jnp.sum(mask * jnp.square(r - left @ right.T))
        return (squares + decay * (jnp.sum(jnp.square(left)) + jnp.sum(jnp.square(right)))) / len(ratings.values)

    def init(key: Array) -> State:
        one, two = jax.random.split(key)
        return {"users": jax.random.uniform(one, (users, factors)), "items": jax.random.uniform(two, (items, factors))}

    rows = rows_of(users, items)
    return Iterative(
        name="factorization",
        source=ratings.source,
        init=init,
        step=step,
        loss=loss,
        blocks={"users": rows[0], "items": rows[1]},
        moving=("users", "items"),
    )


def solve(a: Float32[Array, "*n p p"], b: Float32[Array, "*n p"]) -> Float32[Array, "*n p"]:
    """Solves many small symmetric positive definite systems at once, by Cholesky's factorization of all in step.

    `jnp.linalg.cholesky` factors one matrix after the other on CPUs, which takes several times as long for thousands.
    """
    size = a.shape[-1]
    columns: list[Array] = []
    for j in range(size):
        column = a[..., j:, j]
        for i, other in enumerate(columns):
            column = column - other[..., j - i :] * other[..., j - i, None]
        columns.append(column / jnp.sqrt(column[..., :1]))
    known: list[Array] = []
    for j, column in enumerate(columns):
        rest = b[..., j] - sum((columns[i][..., j - i] * known[i] for i in range(j)), jnp.float32(0))
        known.append(rest / column[..., 0])
    found: list[Array] = []
    for j in reversed(range(size)):
        rest = known[j] - sum((columns[j][..., i] * found[-i] for i in range(1, size - j)), jnp.float32(0))
        found.append(rest / columns[j][..., 0])
    return jnp.stack(found[::-1], axis=-1)


PARTS = 8
"""Parts of the longest document, that are sampled one after the other; a shorter one has fewer."""
MOST = 128
"""Topics."""


def topic_model(
    documents: Documents, *, topics: int = 20, alpha: float = 1.0, beta: float = 1.0, seed: int = 0
) -> Iterative:
    """Samples the topic of each token given those of all others; documents are the blocks.

    Griffiths and Steyvers, PNAS 2004, equation 5, with symmetric priors as Qiao et al., ICML 2019, appendix C:

        p(z = t | others) ~ (n_dt + alpha) (n_wt + beta) / (n_t + V beta)

    A token's own topic is left out of all counts. The counts of words are those of the iteration's start, as in
    distributed samplers (Newman et al., JMLR 2009); the counts of a document are renewed after each of `PARTS` parts
    of it. The uniform numbers of an iteration depend on its number alone. A document's block is its topics' counts
    and its tokens' topics; counts of words follow from those, and cannot be lost. Documents are as far apart as the
    total variation of their topics' distributions times their lengths.

    Args:
        documents: words of each document.
        topics: number of topics.
        alpha: prior of documents' topics.
        beta: prior of topics' words.
        seed: of the sampling.

    Raises:
        ValueError: there are more topics than the 8 bits of a token's topic tell apart, or none.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from sdc.train.iterative import topic_model
        >>> from sdc.train.iterative.corpora import Documents
        >>> words, where = np.int32([0, 0, 1, 2, 2, 3]), np.int32([0, 0, 0, 1, 1, 1])
        >>> task = topic_model(Documents(words, where, tuple("abcd"), "made up", ""), topics=2)
        >>> task.step(task.init(jax.random.key(0)), 0)["counts"].sum(axis=1)
        Array([3., 3.], dtype=float32)
    """
    if not 1 <= topics <= MOST:
        raise ValueError(f"topics={topics}: expected 1 to {MOST}")
    count, vocabulary = documents.shape
    words, mask = _padded(documents)
    lengths = np.sum(mask, axis=1)

    def of_documents(assigned: Array) -> Float32[Array, "documents topics"]:
        return jnp.sum(one_hot(assigned) * mask[..., None], axis=1)

    def one_hot(assigned: Array) -> Array:
        return (assigned[..., None] == jnp.arange(topics)).astype(jnp.float32)

    def of_words(assigned: Array) -> Float32[Array, "words topics"]:
        flat = words * topics + assigned
        total = jnp.zeros(vocabulary * topics, jnp.float32).at[flat.reshape(-1)].add(mask.reshape(-1))
        return total.reshape(vocabulary, topics)

    def step(state: State, k: Any) -> State:
        by_word = of_words(state["assigned"].astype(jnp.int32))
        key = jax.random.fold_in(jax.random.key(seed), k)
        uniform = jax.random.uniform(key, words.shape)

        def part(counts: Array, inputs: Any) -> tuple[Array, Array]:
            """Tokens of all documents at the same places."""
            word, weight, old, drawn = inputs
            own = one_hot(old) * weight[..., None]
            document = counts[:, None, :] - own + alpha
            odds = document * (by_word[word] - own + beta) / (jnp.sum(by_word, axis=0) - own + vocabulary * beta)
            cumulative = jnp.cumsum(odds, axis=-1)
            new = jnp.sum(cumulative < drawn[..., None] * cumulative[..., -1:], axis=-1).astype(jnp.int32)
            return counts + jnp.sum((one_hot(new) - one_hot(old)) * weight[..., None], axis=1), new

        inputs = tuple(_cut(array) for array in (words, mask, state["assigned"].astype(jnp.int32), uniform))
        counts, found = jax.lax.scan(part, state["counts"], inputs)
        return {"counts": counts, "assigned": jnp.moveaxis(found, 0, 1).reshape(words.shape).astype(jnp.int8)}

    def loss(state: State) -> Float32[Array, ""]:
        """Mean negative log-likelihood of a token under the estimates of both distributions, in nats."""
        theta = (state["counts"] + alpha) / (lengths + topics * alpha)[:, None]
        by_word = of_words(state["assigned"].astype(jnp.int32)) + beta
        phi = by_word / jnp.sum(by_word, axis=0)
        likelihood = jnp.einsum("dt,dlt->dl", theta, phi[words])
        return -jnp.sum(jnp.log(likelihood) * mask) / jnp.sum(mask)

    def init(key: Array) -> State:
        assigned = jax.random.randint(key, words.shape, 0, topics, jnp.int32)
        return {"counts": of_documents(assigned), "assigned": assigned.astype(jnp.int8)}

    (rows,) = rows_of(count)
    return Iterative(
        name="topics",
        source=documents.source,
        init=init,
        step=step,
        loss=loss,
        blocks={"counts": rows, "assigned": rows},
        moving=("counts",),
        distance=total_variation(lengths),
    )


def _cut(array: Any) -> Any:
    """Columns in `PARTS` parts, the parts first."""
    return jnp.moveaxis(array.reshape(array.shape[0], PARTS, -1), 1, 0)


def _padded(
    documents: Documents,
) -> tuple[Int32[np.ndarray, "documents longest"], Float32[np.ndarray, "documents longest"]]:
    """Words in rows of one length, a multiple of `PARTS`, and 1 where there is a token."""
    lengths = documents.lengths
    longest = -(-int(lengths.max()) // PARTS) * PARTS
    words, there = (np.zeros((len(lengths), longest), kind) for kind in (np.int32, np.float32))
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    place = np.arange(len(documents.words)) - starts[documents.documents]
    words[documents.documents, place], there[documents.documents, place] = documents.words, 1
    return words, there
