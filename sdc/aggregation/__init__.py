"""Robust aggregation for data-parallel training, in optax's form.

Pure functions with explicit state that run under a bound worker axis (`shard_map`, `pmap`, `vmap`), inside one `jit`.
One method a file.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Inconsistent gradients, and replicas that are brought together again.
    from .noise import NoiseState as NoiseState, gradient_noise as gradient_noise
    from .synchronization import (
        PaftState as PaftState,
        PaftSyncState as PaftSyncState,
        overlapped as overlapped,
        paft as paft,
        paft_sync as paft_sync,
        synchronizes as synchronizes,
    )
    from .synchronization import overlap_options as overlap_options, replica_mean as replica_mean
    from .assignment import Assignment as Assignment

    # Workers that stop at a compute threshold.
    from .dropcompute import (
        Combined as Combined,
        Sum as Sum,
        accumulate as accumulate,
        combine as combine,
        completed_before as completed_before,
        gradient_sum as gradient_sum,
        masked as masked,
        skip_empty as skip_empty,
    )
    from .dropcompute import (
        Stopped as Stopped,
        Stopwatch as Stopwatch,
        from_workers as from_workers,
        to_workers as to_workers,
    )
    from .dropcompute import Resampling as Resampling

    # Links that lose packets.
    from .lossy import lossy_all_gather as lossy_all_gather, lossy_psum_scatter as lossy_psum_scatter
    from .lossy import LossyState as LossyState, lossy_zero2 as lossy_zero2
    from .lossy import LossyLog as LossyLog, LossyReport as LossyReport, recorded as recorded
    from .channels import (
        BadLink as BadLink,
        Channel as Channel,
        GilbertElliott as GilbertElliott,
        Independent as Independent,
        Recorded as Recorded,
        Sent as Sent,
    )

    # Any of them for a model that XLA shards.
    from .trainer import Trainer as Trainer, Workers as Workers, data_parallel as data_parallel
    from .trainer import Dropped as Dropped, Mean as Mean, Own as Own, Shadowed as Shadowed

    # A rank to spare that recomputes what others did.
    from .spares import (
        ShadowReport as ShadowReport,
        ShadowState as ShadowState,
        init_shadow as init_shadow,
        shadow as shadow,
    )
    from .spares import ShadowVerdict as ShadowVerdict, judge as judge

if TYPE_CHECKING:  # for the other packages of this project
    from .trainer import Combining as Combining, Gathered as Gathered, around as around, combining_of as combining_of
    from .delays import BoundedLogNormal as BoundedLogNormal
    from .divergence import divergence_over_time as divergence_over_time
    from .drift import pair_drift as pair_drift
    from .dropcompute import Correction as Correction, Work as Work
    from .expected import expected_speedup as expected_speedup
    from .measured import (
        Burst as Burst,
        ClockedSpeedup as ClockedSpeedup,
        Drifted as Drifted,
        DropComputeMeasured as DropComputeMeasured,
        DroppedRun as DroppedRun,
        DroppedTraining as DroppedTraining,
        LossyMeasured as LossyMeasured,
        LossyTraining as LossyTraining,
        Measured as Measured,
        NoisyTraining as NoisyTraining,
        PaftMeasured as PaftMeasured,
        PredictedSpeedup as PredictedSpeedup,
        ShadowMeasured as ShadowMeasured,
        Watched as Watched,
        WatchedTraining as WatchedTraining,
    )
    from .methods import Aggregation as Aggregation, parse_aggregation as parse_aggregation
    from .speedup import (
        drop_rate as drop_rate,
        effective_speedup as effective_speedup,
        extra_steps as extra_steps,
        mean_completed as mean_completed,
        select_threshold as select_threshold,
    )

__getattr__, __dir__, __all__ = facade(__name__)
