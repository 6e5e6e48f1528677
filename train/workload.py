"""What is trained: a configuration, its data, and the seed of both.

A workload can be described, checked and loaded without a device.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sdc.settings import SettingError, check_types

from .config import DType, TrainConfig, get_config

if TYPE_CHECKING:
    from .data import Dataset

LARGEST_SEED = 2**31 - 2
LARGEST_COUNT = 2**31 - 1
"""Steps and injections are numbered by integers of 32 bits in compiled programs."""


class Loaded(NamedTuple):
    """A workload whose data are in memory.

    Attributes:
        config: the configuration, with an embedding as large as the tokenizer asks for.
        dataset: chunks of tokens in training order.
    """

    config: TrainConfig
    dataset: "Dataset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A reference training job.

    Attributes:
        config: a configuration, or the name of a preset.
        dtype: type of activations and compute parameters; None for the configuration's own.
        seed: seed of the parameters, the order of the data and simulated faults.
        corpus: `python` for the standard library's source, or files and folders of text or JSON lines.
        tokenizer: `bytes`, or the path of a Hugging Face `tokenizer.json`.

    Example:
        >>> from sdc.train.workload import Workload
        >>> config, dataset = Workload(config="tiny").load()
        >>> config.model.layers, dataset.sequence_length
        (4, 128)
    """

    config: TrainConfig | str = "tiny"
    dtype: DType | None = None
    seed: int = 0
    corpus: Sequence[str] = ("python",)
    tokenizer: str = "bytes"

    def resolve(self) -> TrainConfig:
        """The configuration, before the tokenizer has a say.

        Raises:
            SettingError: there is no such preset, the seed is none, or a setting is of another type.
        """
        check_types(self)
        if not self.corpus:
            raise SettingError("corpus", None, "expected python, or a file or folder or more")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise SettingError("seed", self.seed, f"expected a number from 0 to {LARGEST_SEED}")
        config = get_config(self.config) if isinstance(self.config, str) else self.config
        if self.dtype is not None:
            config = config.of_type(self.dtype)
        return config

    def load(self) -> Loaded:
        """Reads the corpus and cuts it into chunks.

        Raises:
            ValueError: the configuration, the corpus or the tokenizer is unknown or cannot be read.
        """
        from .corpus import read_corpus
        from .data import make_dataset
        from .tokenizer import load_tokenizer, padded_vocab

        config = self.resolve()
        tokenizer = load_tokenizer(self.tokenizer)
        vocabulary = padded_vocab(tokenizer)
        if vocabulary > config.model.vocab_size:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocabulary))
        corpus = read_corpus(self.corpus if len(self.corpus) > 1 else self.corpus[0])
        return Loaded(config, make_dataset(corpus, tokenizer, config.sequence_length, seed=self.seed))
