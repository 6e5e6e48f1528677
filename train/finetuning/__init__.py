"""Fine-tuning of a pretrained decoder on simulated nodes (Ma et al. 2025, section 6, tables 3 to 5).

finetune_study  the settings of the study
outcomes        its measurements
pretrained      decoders from GGUF files
questions       multiple-choice questions, from an archive or made from a text
tuner           the experiment

Settings and measurements need no JAX.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # The study.
    from .finetune_study import FinetuneStudy as FinetuneStudy
    from .outcomes import FineTuned as FineTuned, FinetuneMeasured as FinetuneMeasured

    # Its models and questions.
    from .pretrained import Pretrained as Pretrained, WeightsError as WeightsError, read_pretrained as read_pretrained
    from .questions import Question as Question, continuations as continuations, read_questions as read_questions
    from .tuner import Tuner as Tuner

if TYPE_CHECKING:  # for the other packages of this project
    from .finetune_study import HEALTHY as HEALTHY, OTHER as OTHER

__getattr__, __dir__, __all__ = facade(__name__)
