"""Measurements of the study of fine-tuning."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from .finetune_study import FinetuneStudy


@dataclasses.dataclass(frozen=True)
class FineTuned:
    """A decoder that was fine-tuned on a node."""

    node: str  # a simulated node, `HEALTHY` or `OTHER`
    seed: int  # of the order of the questions, and of the faults
    losses: Float[np.ndarray, "steps"]  # training loss
    choices: Int[np.ndarray, "questions"]  # answers to the questions of the test; -1 if no likelihood is a number


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneMeasured:
    """Measurements of the study of fine-tuning."""

    study: FinetuneStudy
    model: str  # description of the model and the questions
    answers: Int[np.ndarray, "questions"]  # correct choices
    untuned: Int[np.ndarray, "questions"]  # choices without fine-tuning
    runs: tuple[FineTuned, ...]
