"""Chunks and batches: nothing lost, one order for a seed, and a position that can be saved anywhere."""

import itertools
import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc.settings import SettingError
from sdc.train.data import ByteTokenizer, Corpus, CorpusError, Dataset, batches, make_dataset

texts = st.lists(st.text("ab\n é", min_size=1, max_size=40), min_size=1, max_size=6)
lengths = st.integers(1, 12)
seeds = st.integers(0, 2**63)


def dataset_of(documents: list[str], length: int, seed: int = 0) -> Dataset:
    return make_dataset(Corpus(tuple(documents), "example"), ByteTokenizer(), length, seed=seed)


def numbered(chunks: int, seed: int = 0) -> Dataset:
    """A data set of that many chunks of length 4 that all differ, so that an order can be read off it."""
    return dataset_of(["".join(f"{number:04d}" for number in range(chunks))], 4, seed)


@settings(deadline=None, max_examples=50)
@given(texts, lengths, seeds)
def test_every_token_of_the_used_range_is_predicted_once(documents: list[str], length: int, seed: int) -> None:
    dataset = dataset_of(documents, length, seed)
    tokens = [token for document in documents for token in (*document.encode(), 256)]
    count = (len(tokens) - 1) // length
    naive = [tokens[index * length : (index + 1) * length + 1] for index in range(count)]
    assert sorted(dataset.chunks.tolist()) == sorted(naive)
    used = tokens[: count * length + 1]
    pairs = np.stack([dataset.chunks[:, :-1].ravel(), dataset.chunks[:, 1:].ravel()], axis=1)
    assert sorted(map(tuple, pairs.tolist())) == sorted(itertools.pairwise(used))
    assert len(tokens) - len(used) < length
    assert dataset.chunks.dtype == np.int32
    assert dataset.chunks.shape == (count, length + 1)
    assert (dataset.tokens, dataset.documents, dataset.chunks.shape[1]) == (len(tokens), len(documents), length + 1)


@settings(deadline=None, max_examples=50)
@given(texts, lengths, seeds)
def test_same_seed_same_order_and_digest(documents: list[str], length: int, seed: int) -> None:
    first, second = (dataset_of(documents, length, seed) for _ in range(2))
    np.testing.assert_array_equal(first.chunks, second.chunks)
    assert first.digest == second.digest


def test_other_seed_other_order_of_the_same_chunks() -> None:
    datasets = [numbered(100, seed=seed) for seed in range(5)]
    assert len({dataset.digest for dataset in datasets}) == 5
    assert len({dataset.chunks.tobytes() for dataset in datasets}) == 5
    assert all(sorted(d.chunks.tolist()) == sorted(datasets[0].chunks.tolist()) for d in datasets)


def test_digest_sees_text_document_boundaries_and_length() -> None:
    digests = {
        dataset_of(documents, length).digest
        for documents, length in ((["abcdef"], 2), (["abcdeg"], 2), (["abc", "de"], 2), (["abcdef"], 3), (["a"], 2))
    }
    assert len(digests) == 5


def test_digest_is_that_of_every_host() -> None:
    # Fixed: a digest that changed between versions of this package or of NumPy would make twins incomparable.
    assert (
        dataset_of(["abcdefgh", "ij"], 2, seed=7).digest
        == "c6f08c72740fe522eeadb54dfa1d40c6bd13e878c90f8da7da5f9f46e5d34ce4"
    )


def test_chunks_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        numbered(2).chunks[0, 0] = 1


def test_negative_seed_is_refused() -> None:
    with pytest.raises(SettingError, match="seed=-1: expected"):
        dataset_of(["abc"], 2, seed=-1)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 11), st.integers(1, 3), st.integers(0, 10))
def test_batches_follow_the_order_and_repeat_it(
    batch_size: int, microsteps: int, extra: int, epochs: int, ahead: int
) -> None:
    per_batch = batch_size * microsteps
    dataset = numbered(2 * per_batch + extra % per_batch)
    iterator = batches(dataset, batch_size=batch_size, microsteps=microsteps)
    for step in range(2 * epochs + ahead):
        batch = next(iterator)
        start = step % 2 * per_batch  # two batches an epoch, the remainder dropped
        assert batch.dtype == np.int32
        np.testing.assert_array_equal(
            batch, dataset.chunks[start : start + per_batch].reshape(microsteps, batch_size, -1)
        )


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_resumed_batches_are_the_uninterrupted_ones(saved: int, moved: int, further: int) -> None:
    dataset = numbered(17)
    uninterrupted = batches(dataset, batch_size=3, microsteps=2)
    for _ in range(saved):
        next(uninterrupted)
    state = json.loads(json.dumps(uninterrupted.get_state()))
    resumed = batches(numbered(17), batch_size=3, microsteps=2)
    for _ in range(moved):  # wherever the other iterator stands
        next(resumed)
    resumed.set_state(state)
    assert resumed.get_state() == state
    for _ in range(further):
        np.testing.assert_array_equal(next(resumed), next(uninterrupted))


def test_a_batch_belongs_to_its_caller() -> None:
    dataset = numbered(2)
    iterator = batches(dataset, batch_size=2, microsteps=1)
    before = dataset.chunks.copy()
    next(iterator)[...] = -1
    np.testing.assert_array_equal(dataset.chunks, before)
    np.testing.assert_array_equal(next(iterator)[0], before)


@pytest.mark.parametrize("documents", [["a"], ["a" * 46]])
def test_corpus_shorter_than_one_batch(documents: list[str]) -> None:
    dataset = dataset_of(documents, 8)
    with pytest.raises(CorpusError) as caught:
        batches(dataset, batch_size=3, microsteps=2)
    text = str(caught.value)
    assert text.startswith(f"corpus=example: has {len(documents[0]) + 1} tokens")
    assert "one batch needs 49 " in text
    assert "give more text, or a configuration with a smaller batch" in text
    assert "\n" not in text


def test_corpus_of_exactly_one_batch() -> None:
    iterator = batches(dataset_of(["a" * 48], 8), batch_size=3, microsteps=2)
    np.testing.assert_array_equal(next(iterator), next(iterator))


def test_batches_start_no_thread() -> None:
    before = threading.active_count()
    iterator = batches(numbered(8), batch_size=1, microsteps=1)
    for _ in range(20):
        next(iterator)
    assert threading.active_count() == before
