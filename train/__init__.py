"""The reference workload: a Llama-style decoder on real text, and runs of it. Knows no flags and prints nothing."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What to run.
    from .specs import (
        CampaignJob as CampaignJob,
        Checks as Checks,
        Job as Job,
        Loaded as Loaded,
        Simulated as Simulated,
        Tracing as Tracing,
        Training as Training,
        Twins as Twins,
        Workload as Workload,
    )
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

if TYPE_CHECKING:  # for the other packages of this project
    from .campaigning import make_campaign as make_campaign, rows_done as rows_done
    from .checkpoints import NotWritten as NotWritten
    from .cluster import joined as joined
    from .config import DType as DType, ModelConfig as ModelConfig, OptimizerConfig as OptimizerConfig, check as check
    from .corpus import read_corpus as read_corpus
    from .data import Dataset as Dataset, batches as batches, make_dataset as make_dataset
    from .datasets import cache_folder as cache_folder, fixed_order as fixed_order, freeze as freeze
    from .flags import tally_flags as tally_flags
    from .images import (
        Images as Images,
        ImagesError as ImagesError,
        image_batches as image_batches,
        read_images as read_images,
    )
    from .loop import place_batch as place_batch
    from .methods import (
        AUTO as AUTO,
        Aggregation as Aggregation,
        DropCompute as DropCompute,
        Lossy as Lossy,
        Shadow as Shadow,
    )
    from .model import init_params as init_params, logits as logits
    from .network import (
        convnet_logits as convnet_logits,
        image_loss as image_loss,
        init_convnet as init_convnet,
        patches as patches,
        pool as pool,
    )
    from .parallel import DATA as DATA, MODEL as MODEL, cross_entropy as cross_entropy
    from .peers import Peers as Peers, route as route
    from .placement import Placement as Placement, RANKS as RANKS, TWIN as TWIN, place as place
    from .processes import changes as changes, fetch as fetch
    from .replays import aggregation_row as aggregation_row, completed_log as completed_log, losses_log as losses_log
    from .replicas import (
        Given as Given,
        ReplicaMetrics as ReplicaMetrics,
        ReplicaState as ReplicaState,
        Replicas as Replicas,
    )
    from .running import Running as Running
    from .simulation import Simulation as Simulation
    from .specs import FullLoad as FullLoad, LARGEST_SEED as LARGEST_SEED, Planned as Planned
    from .stages import escalate as escalate
    from .step import (
        BATCH_SPEC as BATCH_SPEC,
        TrainState as TrainState,
        device_step as device_step,
        init_state as init_state,
        metrics_specs as metrics_specs,
        state_specs as state_specs,
    )
    from .stopping import PATIENCE as PATIENCE, Stop as Stop
    from .tally import total as total
    from .tokenizer import ByteTokenizer as ByteTokenizer

__getattr__, __dir__, __all__ = facade(__name__)
