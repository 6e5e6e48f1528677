"""Text to tokens: bytes by default, or any Hugging Face `tokenizer.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from sdc.records import endless, parse_json
from sdc.settings import SettingError

BYTES = "bytes"
"""Name of the default tokenizer."""

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Names under which tokenizers of different families know the token between documents, tried in this order."""


class TokenizerError(SettingError):
    """A tokenizer that cannot be loaded or used; the message says which and how to mend it."""

    def __init__(self, given: object, problem: str) -> None:
        super().__init__("tokenizer", given, problem)


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer.

    Attributes:
        vocab_size: tokens are 0 to `vocab_size - 1`.
        end_of_text: the token between documents.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """The tokens of a text, without any added at its ends."""

    def decode(self, tokens: Sequence[int] | Int32[np.ndarray, "tokens"]) -> str:
        """The text of tokens; `end_of_text` has none."""


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and 256 as the end of text.

    Example:
        >>> from sdc.train.tokenizer import ByteTokenizer
        >>> ByteTokenizer().encode("né").tolist()
        [110, 195, 169]
        >>> ByteTokenizer().decode([110, 195, 169, 256])
        'né'
    """

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """The bytes of a text."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | Int32[np.ndarray, "tokens"]) -> str:
        """The text of bytes; those that are no UTF-8, as a model may write them, become U+FFFD."""
        return bytes(int(token) for token in tokens if token < self.end_of_text).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` package, read by `load_tokenizer`.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; its truncation and padding are switched off.
        source: the file, for messages.

    Raises:
        TokenizerError: the tokenizer has no end-of-text token.

    An end-of-text token spelled out in a text counts as one, so that files that already hold separators keep them.
    """

    def __init__(self, tokenizer: Any, source: Path) -> None:
        # Files often keep the settings of the model they were made for; a document must come whole and bare.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        known = [vocabulary[name] for name in END_OF_TEXT if name in vocabulary]
        if not known:
            raise TokenizerError(
                source, f"has no end-of-text token; looked for {' '.join(END_OF_TEXT)}: add one of them"
            )
        self._tokenizer = tokenizer
        self._source = source
        self.end_of_text = known[0]
        self.vocab_size = max(vocabulary.values()) + 1  # not their number: identifiers may have gaps

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """The tokens of a text, without a beginning or end added."""
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except Exception as error:  # the package raises Exception itself
            raise TokenizerError(
                self._source, f"cannot encode the corpus ({_one_line(error)}); choose another tokenizer"
            ) from error

    def decode(self, tokens: Sequence[int] | Int32[np.ndarray, "tokens"]) -> str:
        """The text of tokens, special ones left out."""
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text


def load_tokenizer(spec: str | Path = BYTES) -> Tokenizer:
    """Loads a tokenizer."""
    if spec == BYTES:
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        raise TokenizerError(path, "is a folder; name the tokenizer.json in it")
    try:
        if found := endless(path):
            raise TokenizerError(path, f"is {found}, not a file; {_EXPECTED}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TokenizerError(path, "does not exist; give 'bytes' or a tokenizer.json") from error
    except OSError as error:
        raise TokenizerError(path, f"cannot be read ({error.strerror}); check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(path, f"is no tokenizer.json (not UTF-8 text); {_EXPECTED}") from error
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise TokenizerError(path, f"is no tokenizer.json (invalid JSON: {error}); {_EXPECTED}") from error
    if not isinstance(fields, dict) or "model" not in fields:
        raise TokenizerError(path, f"is no tokenizer.json (it has no field 'model'); {_EXPECTED}")
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(
            path,
            f'needs the tokenizers package, which is not installed; run pip install "jax-sdc[text]", or take {BYTES}',
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises Exception itself
        raise TokenizerError(path, f"is no tokenizer.json ({_one_line(error)}); {_EXPECTED}") from error
    return HuggingFaceTokenizer(tokenizer, path)


def padded_vocab(tokenizer: Tokenizer, multiple: int = 64) -> int:
    """Rows of an embedding for a tokenizer: the vocabulary rounded up, so that it divides over a mesh.

    Example:
        >>> from sdc.train.tokenizer import ByteTokenizer, padded_vocab
        >>> padded_vocab(ByteTokenizer())
        320
    """
    return -(-tokenizer.vocab_size // multiple) * multiple


_EXPECTED = "expected the tokenizer.json that the Hugging Face tokenizers package saves"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
