"""Pretrained Llama-style decoders with their tokenizers, from GGUF files.

A GGUF file stores matrices as [outputs, inputs], quantized in blocks, and the elements of queries and keys in the order
in which its rotary embedding pairs neighbors, (2i, 2i + 1). The decoder of this project pairs (i, i + C/2).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32

from sdc._lazy import remedy
from sdc.records import endless

from .. import DataError, HuggingFaceTokenizer, Tokenizer, TokenizerError
from ..programs import ModelConfig

ARCHITECTURE = "llama"
DIGITS = ("smollm",)  # names of the pre-tokenizer that splits numbers into digits, and words as GPT-2 does
CONTROL = 3  # type of tokens that represent no text


class WeightsError(DataError):
    """Pretrained weights are missing, damaged or of another architecture."""

    of: ClassVar[str] = "weights"


class Pretrained(NamedTuple):
    """A pretrained decoder: float32 parameters in the global shapes of the reference decoder."""

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: Tokenizer


def read_pretrained(path: Path) -> Pretrained:
    """Reads a decoder from a GGUF file, with its quantized weights converted to float32.

    Args:
        path: a file with the architecture `llama`.

    Raises:
        WeightsError: the file or the package `gguf` is missing; the file is damaged or has another architecture; a
            tensor is missing or has another shape than its own hyperparameters state.
        TokenizerError: the file's tokenizer is of an unknown kind, or has more tokens than the embedding has rows.
    """
    fields, tensors = _read(path)
    config = _config(path, fields, tied="output.weight" not in tensors)
    heads, layers = config.heads * config.head_dim, range(config.layers)
    width = config.width

    def matrix(name: str, outputs: int, inputs: int) -> Float32[np.ndarray, "inputs outputs"]:
        return _tensor(path, tensors, name, (outputs, inputs)).T

    def scale(name: str) -> dict[str, Float32[np.ndarray, "D"]]:
        return {"scale": _tensor(path, tensors, name, (width,))}

    def in_heads(name: str, count: int, *, rotary: bool) -> Float32[np.ndarray, "D H C"]:
        found = matrix(name, count * config.head_dim, width).reshape(width, count, config.head_dim)
        if not rotary:
            return found
        pairs = found.reshape(width, count, config.head_dim // 2, 2)
        return np.moveaxis(pairs, 3, 2).reshape(found.shape)

    def block(at: str) -> dict[str, Any]:
        return {
            "attn_norm": scale(f"{at}.attn_norm.weight"),
            "attn": {
                "query": in_heads(f"{at}.attn_q.weight", config.heads, rotary=True),
                "key": in_heads(f"{at}.attn_k.weight", config.kv_heads, rotary=True),
                "value": in_heads(f"{at}.attn_v.weight", config.kv_heads, rotary=False),
                "out": matrix(f"{at}.attn_output.weight", width, heads).reshape(-1, config.head_dim, width),
            },
            "ffn_norm": scale(f"{at}.ffn_norm.weight"),
            "ffn": {
                "gate": matrix(f"{at}.ffn_gate.weight", config.ffn_width, width),
                "up": matrix(f"{at}.ffn_up.weight", config.ffn_width, width),
                "down": matrix(f"{at}.ffn_down.weight", width, config.ffn_width),
            },
        }

    blocks = [block(f"blk.{layer}") for layer in layers]
    params = {
        "embedding": _tensor(path, tensors, "token_embd.weight", (config.vocab_size, width)),
        "blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks),
        "norm": scale("output_norm.weight"),
    }
    if not config.tied:
        params["head"] = matrix("output.weight", config.vocab_size, width)
    return Pretrained(config, params, _tokenizer(path, fields, config.vocab_size))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields and the tensors of a GGUF file, by name."""
    try:
        import gguf
    except ImportError as error:
        raise WeightsError(path, remedy("finetune")) from error
    try:
        if found := endless(path):
            raise WeightsError(path, f"is {found}, not a file; give a GGUF file")
        reader = gguf.GGUFReader(path)
        return {name: field.contents() for name, field in reader.fields.items()}, {x.name: x for x in reader.tensors}
    except OSError as error:
        raise WeightsError.unreadable(path, error) from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise WeightsError(path, f"is not a GGUF file, or is damaged ({error}); get it again") from error


def _config(path: Path, fields: Mapping[str, Any], *, tied: bool) -> ModelConfig:
    if (found := fields.get("general.architecture")) != ARCHITECTURE:
        raise WeightsError(path, f"has the architecture {found!r}, expected {ARCHITECTURE!r}; give a Llama-style model")

    def field(name: str) -> Any:
        if (value := fields.get(f"{ARCHITECTURE}.{name}")) is None:
            raise WeightsError(path, f"has no field {ARCHITECTURE}.{name}; give a complete GGUF file")
        return value

    if scaled := [name for name in fields if ".rope.scaling" in name]:
        raise WeightsError(path, f"scales its rotary embedding ({scaled[0]}), which the decoder does not do")
    width, heads = field("embedding_length"), field("attention.head_count")
    return ModelConfig(
        vocab_size=len(fields.get("tokenizer.ggml.tokens", ())),
        layers=field("block_count"),
        width=width,
        heads=heads,
        kv_heads=field("attention.head_count_kv"),
        head_dim=fields.get(f"{ARCHITECTURE}.attention.key_length", width // heads),
        ffn_width=field("feed_forward_length"),
        rope_theta=float(field("rope.freq_base")),
        norm_epsilon=float(field("attention.layer_norm_rms_epsilon")),
        tied=tied,
    )


def _tensor(path: Path, tensors: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Float32[np.ndarray, "..."]:
    """Returns a tensor in float32."""
    import gguf

    if name not in tensors:
        raise WeightsError(path, f"has no tensor {name}, expected one of shape {shape}; give another file")
    tensor = tensors[name]
    found = tuple(int(size) for size in reversed(tensor.shape))
    if found != shape:
        raise WeightsError(path, f"tensor {name} has shape {found}, expected {shape}; give another file")
    try:
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
    except (NotImplementedError, ValueError) as error:
        raise WeightsError(
            path, f"tensor {name} cannot be converted to float32 ({error}); give another file"
        ) from error
    if not np.isfinite(values).all():
        raise WeightsError(path, f"tensor {name} has elements that are not finite; get the file again")
    return values


def _tokenizer(path: Path, fields: Mapping[str, Any], rows: int) -> HuggingFaceTokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in DIGITS:
        raise TokenizerError(path, f"has the kind {kind!r} with {split!r}, expected 'gpt2' with one of {DIGITS}")
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    found = tokenizers.Tokenizer(models.BPE(dict(zip(tokens, range(rows), strict=True)), merges))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    found.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    found.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    return HuggingFaceTokenizer(found, path)
