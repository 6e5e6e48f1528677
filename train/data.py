"""Chunks of tokens in a fixed order, and batches of them from a position that can be saved.

As in the SDC study (appendix B.1): text is tokenized, joined, cut into chunks of the sequence length, and shuffled once
with a fixed seed. Every epoch has that same order, so the batch of a step depends on nothing but the data set and the
number of the step.
"""

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32

from sdc.settings import SettingError

from .corpus import Corpus
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain


class DataError(SettingError):
    """A corpus that is too short, or a seed that is none; the message says how to mend it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A tokenized, chunked and shuffled corpus.

    Attributes:
        chunks: int32 [chunks, length + 1], read-only, in training order. Inputs are `chunk[:-1]`, targets `chunk[1:]`:
            each chunk begins with the last token of the one before it in the text, so that every token is predicted
            once. What is left over at the end of the text, less than a chunk, is dropped.
        digest: SHA-256 (hexadecimal) of the chunks in their order, and so of text, tokenizer, length and seed: twins
            with equal digests train on the same data.
        tokens: tokens of the whole corpus, with an end of text after each document.
        documents: documents of the corpus.
        source: where the text comes from.
    """

    chunks: Int32[np.ndarray, "chunks length+1"]
    digest: str
    tokens: int
    documents: int
    source: str

    def describe(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {
            "source": self.source, "documents": self.documents, "tokens": self.tokens, "digest": self.digest,
        }  # fmt: skip

    @property
    def sequence_length(self) -> int:
        """Tokens of a chunk that are predicted."""
        return int(self.chunks.shape[1]) - 1

    def require(self, *, batch_size: int, microsteps: int) -> None:
        """Checks that the data set makes at least one batch, of which `batches` tells more."""
        chunks, length = batch_size * microsteps, self.sequence_length
        if len(self.chunks) < chunks:
            raise DataError(
                "corpus",
                self.source,
                f"has {self.tokens} tokens, fewer than one batch needs: {chunks * length + 1} "
                f"({microsteps} microsteps × {batch_size} sequences × {length} tokens, and one); "
                "give more text, or a configuration with a smaller batch",
            )


def make_dataset(corpus: Corpus, tokenizer: Tokenizer, sequence_length: int, *, seed: int) -> Dataset:
    """Tokenizes a corpus, joins its documents, cuts them into chunks and shuffles these once.

    Args:
        corpus: the documents.
        tokenizer: turns them into tokens; its end of text follows each document.
        sequence_length: tokens of a chunk that are predicted; a chunk holds one more.
        seed: seed of the shuffle.

    Returns:
        The data set; without a chunk if the corpus is shorter than one (`batches` reports it).

    Raises:
        DataError: the seed is negative.

    Example:
        >>> from sdc.train.corpus import Corpus
        >>> from sdc.train.data import make_dataset
        >>> from sdc.train.tokenizer import ByteTokenizer
        >>> dataset = make_dataset(Corpus(("abc", "de"), "example"), ByteTokenizer(), 2, seed=0)
        >>> sorted(dataset.chunks.tolist())
        [[97, 98, 99], [99, 256, 100], [100, 101, 256]]
    """
    assert sequence_length >= 1, sequence_length
    if seed < 0:
        raise DataError("seed", seed, "expected a whole number of at least 0")
    end = np.array([tokenizer.end_of_text], np.int32)
    tokens = np.concatenate(
        [part for document in corpus.documents for part in (tokenizer.encode(document), end)], dtype=np.int32
    )
    if len(tokens) > sequence_length:
        windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)[::sequence_length]
    else:
        windows = np.zeros((0, sequence_length + 1), np.int32)
    # NumPy promises the same draw only for one version of itself; another order is another digest.
    chunks = windows[np.random.default_rng(seed).permutation(len(windows))]
    chunks.flags.writeable = False
    digest = hashlib.sha256(f"int32 {chunks.shape}".encode())
    digest.update(chunks.astype("<i4", copy=False).data)
    return Dataset(chunks, digest.hexdigest(), len(tokens), len(corpus.documents), corpus.source)


def batches(dataset: Dataset, *, batch_size: int, microsteps: int) -> "grain.DatasetIterator":
    """Iterates over global batches without end.

    Every process iterates over the same batches and takes its own share of each. Chunks left over at the end of an
    epoch, less than a batch, are dropped; the next epoch has the same order. Batches are cut in the caller's thread:
    the chunks are in memory, and worker processes would fork a process in which JAX runs threads.

    Args:
        dataset: the chunks.
        batch_size: sequences in one microstep, over all data ranks.
        microsteps: microsteps in one batch.

    Returns:
        A grain iterator of int32 arrays [microsteps, batch_size, length + 1]. `get_state()` is a dictionary that JSON
        can hold, of one number: the batches handed out since the start. `set_state()` on an iterator over the same
        data set and sizes goes there, also backwards, at no cost.

    Raises:
        DataError: the data set is shorter than one batch.

    Example:
        >>> from sdc.train.corpus import Corpus
        >>> from sdc.train.data import batches, make_dataset
        >>> from sdc.train.tokenizer import ByteTokenizer
        >>> dataset = make_dataset(Corpus(("to be or not to be",), "example"), ByteTokenizer(), 4, seed=0)
        >>> iterator = batches(dataset, batch_size=2, microsteps=1)
        >>> next(iterator).shape
        (1, 2, 5)
        >>> iterator.get_state()
        {'next_index': 1}
    """
    assert min(batch_size, microsteps) >= 1, (batch_size, microsteps)
    dataset.require(batch_size=batch_size, microsteps=microsteps)
    import grain  # It imports JAX, without which a data set can be made and checked.

    return iter(
        grain.MapDataset.source(dataset.chunks)
        .batch(batch_size, drop_remainder=True)
        .batch(microsteps, drop_remainder=True)
        .repeat()
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
