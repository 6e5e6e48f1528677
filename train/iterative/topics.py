"""Latent Dirichlet allocation by collapsed Gibbs sampling."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from sdc.checkpoints import total_variation

from .documents import Documents
from .protocol import Iterative, State, rows_of

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
        >>> from sdc.train.iterative.documents import Documents
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
