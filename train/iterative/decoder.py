"""The reference transformer, small, with Adam."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .. import ByteTokenizer, make_dataset, read_corpus
from ..programs import MODEL, ModelConfig, cross_entropy, init_params, logits
from .adam import by_adam
from .protocol import Iterative, State

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
