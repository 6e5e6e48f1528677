"""The settings of the study of fine-tuning, which are checked before JAX is imported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from sdc.nodes import NODES, published_layers
from sdc.settings import LARGEST_SEED, SettingError, Within, check_fields

from ..programs import DType

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..studies import RecordedParts
    from .outcomes import FinetuneMeasured
    from .tuner import Inputs

TaskName: TypeAlias = Literal["continuations", "openbookqa", "boolq", "arc_easy", "arc_challenge"]
LARGEST = 1 << 16  # maximum number of steps, of questions, of tokens in a question, and of questions in a step
MOST_SEEDS = 1000
HEALTHY = "healthy"
OTHER = "healthy, another order"  # of the questions: the baseline of the disagreement


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneStudy:
    """Fine-tuning of a decoder on simulated nodes: accuracy, and disagreement with a healthy node.

    Optimizer and prompts are those of the study's appendix E.4. `continuations` needs no download: a decoder of bytes
    with 0.2 M parameters is first trained on one half of the questions, and fine-tuned on the other. The other tasks
    are fine-tuned with pretrained weights, SmolLM2-135M-Instruct or those of a GGUF file.

    Example:
        >>> from sdc.train.finetuning import FinetuneStudy
        >>> FinetuneStudy(nodes=("node1", "node2"), seeds=5).count()
        16
    """

    kind: ClassVar[str] = "finetune study"
    name: ClassVar[str] = "finetune"
    nodes: tuple[str, ...] = NODES
    """Nodes on which to fine-tune, node1 to node15 (default: all)."""
    task: TaskName = "continuations"
    """Questions: which of four texts continues a text of the standard library, or a public set of questions."""
    dtype: DType = "bfloat16"
    """Type of the activations."""
    steps: int = 100
    """Number of optimizer steps."""
    batch: int = 16
    """Number of questions in a step."""
    length: int = 128
    """Maximum length of a question with its answer, in tokens; longer questions are left out."""
    questions: int = 300
    """Maximum number of questions of the test, the first ones."""
    rate: float | None = None
    """Learning rate after the warm-up (default: 3e-3 for continuations, otherwise 3e-5)."""
    seeds: int = 5
    """Number of seeds of the order of the questions, at least 3; intervals are computed over these runs."""
    seed: Annotated[int, Within(0, LARGEST_SEED)] = 0
    """The first seed."""
    pretraining: int = 60
    decoder: str = "tiny"
    warmup: float = 0.05
    clip: float = 0.3
    decay: float = 0.001

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that identifies the first invalid one."""
        check_fields(self)
        if unknown := [node for node in self.nodes or (None,) if node not in NODES]:
            raise SettingError("nodes", unknown[0], f"expected one or more of {NODES[0]} ... {NODES[-1]}")
        if len(set(self.nodes)) < len(self.nodes):
            raise SettingError("nodes", " ".join(self.nodes), "expected each node once")
        if not 3 <= self.seeds <= MOST_SEEDS:
            problem = f"expected 3 to {MOST_SEEDS:,}; fewer do not suffice for an interval"
            raise SettingError("seeds", self.seeds, problem)
        for name in ("steps", "batch", "length", "questions"):
            if not 1 <= (value := getattr(self, name)) <= LARGEST:
                raise SettingError(name, value, f"expected 1 to {LARGEST:,}")
        if not 0 < self.learning_rate < 1:
            raise SettingError("rate", self.rate, "expected a number between 0 and 1")

    @property
    def learning_rate(self) -> float:
        """The learning rate after the warm-up."""
        return self.rate if self.rate is not None else 3e-3 if self.small else 3e-5

    @property
    def small(self) -> bool:
        """Whether the decoder is the small one, without pretrained weights."""
        return self.task == "continuations"

    @property
    def struck(self) -> tuple[str, ...]:
        """The nodes for which the study gives rates of errors; the other nodes look like healthy ones."""
        return tuple(node for node in self.nodes if published_layers(node))

    def manifest(self) -> dict[str, Any]:
        """Returns the fields of the record's manifest that describe the study."""
        return {"kind": self.kind, "study": self.name, "seed": self.seed, "settings": dataclasses.asdict(self)}

    def count(self) -> int:
        """Returns the number of parts that `run` yields."""
        return 1 + (2 + len(self.struck)) * self.seeds

    def read(self, *, weights: Path | None = None, archives: Path | None = None) -> Inputs:
        """Reads the questions and the pretrained decoder.

        Args:
            weights: a GGUF file (default: SmolLM2-135M-Instruct from its archive).
            archives: folder with the archives of the weights and the questions (default: a folder in the cache).

        Raises:
            SettingError: weights are given for the small decoder, or all questions are longer than `length`.
            DataError: the weights or the questions are missing or damaged.
        """
        from .tuner import read

        if self.small and weights is not None:
            raise SettingError("weights", weights, "continuations are answered by a small decoder; choose another task")
        return read(self, weights, archives)

    def run(
        self, kept: RecordedParts | None = None, given: Inputs | None = None
    ) -> Generator[str, None, FinetuneMeasured]:
        """Runs the study, except the parts on record: yields the title of each completed part, and returns the
        measurements.

        Args:
            kept: the parts on record.
            given: what `read` returns (default: with the default weights).

        Raises:
            SettingError: a setting is invalid.
            DataError: the weights or the questions are missing or damaged.
        """
        from ..studies import RecordedParts
        from .tuner import experiment

        self.check()
        return experiment(self, kept or RecordedParts(), given or self.read())
