"""Tokenizers: bytes, a Hugging Face tokenizer.json, and one clear line for a file that is none."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from sdc.train.data import END_OF_TEXT, ByteTokenizer, Tokenizer, TokenizerError, load_tokenizer, padded_vocab

TEXT = "the quick brown fox jumps over the lazy dog, né?\n"
unicode = st.text(st.characters(exclude_categories=["Cs"]))


def train(path: Path, *special: str) -> Path:
    """Trains a byte-level BPE tokenizer and saves it with the truncation, padding and wrapping that models use."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if special:
        ends = [(special[0], tokenizer.token_to_id(special[0]))]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{special[0]} $A {special[0]}", special_tokens=ends
        )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train(tmp_path_factory.mktemp("bpe") / "tokenizer.json", "<pad>", "<|endoftext|>"))


def message(path: str | Path) -> str:
    """The message of the error that loading this file raises; every one names setting and file and is one line."""
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(path)
    text = str(caught.value)
    assert text.startswith(f"tokenizer={path}: ")
    assert "\n" not in text
    return text


@settings(deadline=None, max_examples=50)
@given(unicode)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert bytes(tokens.tolist()) == text.encode()
    assert tokenizer.decode(np.append(tokens, tokenizer.end_of_text)) == text


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert ByteTokenizer().decode([0xC3, 65]) == "\ufffdA"


@settings(deadline=None, max_examples=50)
@given(unicode)
def test_hugging_face_round_trip(bpe: Tokenizer, text: str) -> None:
    for name in END_OF_TEXT:
        text = text.replace(name, "")
    tokens = bpe.encode(text)
    assert tokens.dtype == np.int32
    assert bpe.decode([*tokens, bpe.end_of_text]) == text
    assert all(0 <= token < bpe.vocab_size for token in tokens)


def test_hugging_face_tokens_are_merged_whole_and_bare(bpe: Tokenizer) -> None:
    tokens = bpe.encode(TEXT * 10)
    assert 64 < len(tokens) < len(TEXT.encode() * 10)  # not truncated to 8, and not bytes
    assert len(bpe.encode("dog")) <= 3  # not padded to 64
    assert bpe.end_of_text == 1
    assert not {0, 1} & set(tokens.tolist())
    assert bpe.encode("dog<|endoftext|>fox").tolist().count(bpe.end_of_text) == 1


@pytest.mark.parametrize("name", END_OF_TEXT)
def test_every_name_of_the_end_of_text_is_found(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(train(tmp_path / "tokenizer.json", "<unk>", "<s>", name))
    assert tokenizer.end_of_text == 2


def test_vocabulary_with_gaps_counts_to_its_largest_token(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    vocabulary = {"a": 0, "</s>": 999}
    path.write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}}))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (1000, 999)
    assert padded_vocab(tokenizer) == 1024


def test_without_end_of_text_the_error_says_what_was_looked_for(tmp_path: Path) -> None:
    text = message(train(tmp_path / "tokenizer.json"))
    assert all(name in text for name in END_OF_TEXT)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON: it is nested deeper than 100 levels"),
        (b"[1]", "no field 'model'"),
        (b'{"text": "a"}', "no field 'model'"),
        (b'{"model": 3}', "is not a tokenizer.json"),
        (b'{"model": {"type": "Oracle",\n"vocab": {}}}', "is not a tokenizer.json"),
    ],
)
def test_file_that_is_no_tokenizer(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    assert expected in message(path)


def test_missing_file_folder_and_loop(tmp_path: Path) -> None:
    assert "does not exist; give 'bytes' or a tokenizer.json" in message(tmp_path / "absent.json")
    assert "is a folder" in message(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be read (Too many levels of symbolic links)" in message(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe, not a file; expected the tokenizer.json" in message(tmp_path / "pipe")
    assert "is a device, not a file" in message(Path("/dev/zero"))


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = train(tmp_path / "tokenizer.json", "<eos>")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert 'pip install "jax-sdc[text]"' in message(path)


def test_word_outside_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "<unk>"}
    path.write_text(json.dumps({"model": model}))
    with pytest.raises(TokenizerError, match="cannot encode the corpus"):
        load_tokenizer(path).encode("b")


@pytest.mark.parametrize(("size", "rows"), [(1, 64), (64, 64), (65, 128), (49_152, 49_152), (128_256, 128_256)])
def test_padded_vocab(monkeypatch: pytest.MonkeyPatch, size: int, rows: int) -> None:
    monkeypatch.setattr(ByteTokenizer, "vocab_size", size)
    assert padded_vocab(ByteTokenizer()) == rows
