"""The reference workload, a Llama-style decoder that is trained on real text, and its runs. The package neither parses
flags nor prints."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What to run.
    from .specs import (
        CampaignJob as CampaignJob,
        Checks as Checks,
        Job as Job,
        Loaded as Loaded,
        Tracing as Tracing,
        Training as Training,
        Twins as Twins,
        Workload as Workload,
    )
    from .programs import TrainConfig as TrainConfig, get_config as get_config

    # Running a job.
    from .loop import run as run, run_campaign as run_campaign
    from .policy import Decision as Decision, StepPolicy as StepPolicy, Attempt as Attempt, PolicyError as PolicyError
    from .cluster import Incomparable as Incomparable
    from .checkpoints import CheckpointError as CheckpointError, Checkpoints as Checkpoints

    # Estimating the cost of a step on other chips.
    from .estimates import Subject as Subject, estimate_subject as estimate_subject

if TYPE_CHECKING:  # for the other packages of this project
    from .burnin_steps import register_training as register_training
    from .loop import make_campaign as make_campaign, rows_done as rows_done
    from .checkpoints import NotWritten as NotWritten
    from .cluster import check_resumed as check_resumed, joined as joined, rows_in_order as rows_in_order
    from .data import ByteTokenizer as ByteTokenizer, CorpusError as CorpusError, DataError as DataError
    from .data import Dataset as Dataset, batches as batches, files_below as files_below
    from .data import HuggingFaceTokenizer as HuggingFaceTokenizer, Tokenizer as Tokenizer
    from .data import TokenizerError as TokenizerError
    from .data import make_dataset as make_dataset, read_corpus as read_corpus
    from .estimates import Compiled as Compiled
    from .peers import Peers as Peers
    from .specs import FullLoad as FullLoad
    from .stages import escalate as escalate
    from .stopping import Stop as Stop

__getattr__, __dir__, __all__ = facade(__name__)
