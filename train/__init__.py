"""The reference workload: a Llama-style decoder on real text, and runs of it. Knows no flags and prints nothing."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What to run.
    from .workload import Loaded as Loaded, Workload as Workload
    from .checks import Checks as Checks, Simulated as Simulated
    from .jobs import Job as Job, Tracing as Tracing, Training as Training, Twins as Twins
    from .campaign_job import CampaignJob as CampaignJob
    from .config import TrainConfig as TrainConfig, get_config as get_config

    # Running it.
    from ._run import run as run
    from .campaigning import run_campaign as run_campaign
    from .judging import Answer as Answer, Judge as Judge, Judged as Judged, JudgeError as JudgeError
    from .processes import Incomparable as Incomparable
    from .checkpoints import CheckpointError as CheckpointError, Checkpoints as Checkpoints

    # What it would cost elsewhere.
    from .estimating import Subject as Subject, estimate_subject as estimate_subject

    # Programs of one's own.
    from . import programs as programs

__getattr__, __dir__, __all__ = facade(__name__)
