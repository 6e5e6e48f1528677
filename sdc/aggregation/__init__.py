"""Robust aggregation for data-parallel training, in optax's form.

Pure functions with explicit state that run under a bound worker axis (`shard_map`, `pmap`, `vmap`), inside one `jit`.
One method a file.
"""

from .assignment import Assignment
from .channels import BadLink, Channel, GilbertElliott, Independent, Recorded, Sent
from .dropcompute import Combined, Sum, accumulate, combine, completed_before, gradient_sum, masked, skip_empty
from .judge import ShadowVerdict, judge
from .lossy import lossy_all_gather, lossy_psum_scatter
from .noise import NoiseState, gradient_noise
from .paft import PaftState, PaftSyncState, overlapped, paft, paft_sync, replica_mean, synchronizes
from .resample import Resampling
from .shadow import ShadowReport, ShadowState, init_shadow, shadow
from .stopwatch import Stopped, Stopwatch, from_workers, to_workers
from .zero2 import LossyLog, LossyReport, LossyState, lossy_zero2, recorded

__all__ = [
    "Assignment",
    "BadLink",
    "Channel",
    "Combined",
    "GilbertElliott",
    "Independent",
    "LossyLog",
    "LossyReport",
    "LossyState",
    "NoiseState",
    "PaftState",
    "PaftSyncState",
    "Recorded",
    "Resampling",
    "Sent",
    "ShadowReport",
    "ShadowState",
    "ShadowVerdict",
    "Stopped",
    "Stopwatch",
    "Sum",
    "accumulate",
    "combine",
    "completed_before",
    "from_workers",
    "gradient_noise",
    "gradient_sum",
    "init_shadow",
    "judge",
    "lossy_all_gather",
    "lossy_psum_scatter",
    "lossy_zero2",
    "masked",
    "overlapped",
    "paft",
    "paft_sync",
    "recorded",
    "replica_mean",
    "shadow",
    "skip_empty",
    "synchronizes",
    "to_workers",
]
