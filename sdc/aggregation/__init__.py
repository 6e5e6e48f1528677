"""Robust aggregation for data-parallel training, in optax's form.

Pure functions with explicit state that run under a bound worker axis (`shard_map`, `pmap`, `vmap`), inside one `jit`.

- `noise`: inconsistent gradients, simulated. `synchronization`: replicas that are brought together again (PAFT).
- `dropcompute`: workers that stop at a compute threshold. `speedup`: what that gains. `delays`: random latencies.
- `lossy`: links that lose packets, and ZeRO-2 over them. `channels`: which packets arrive.
- `spares`: ranks to spare that recompute what others did.
- `trainer`: any of them for a model that XLA shards. `methods`: all of them, with their settings, as text.
- `assignment`: updates that set. `workers`: the mapped axis.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Inconsistent gradients, and replicas that are brought together again.
    from .noise import gradient_noise as gradient_noise
    from .synchronization import (
        overlap_options as overlap_options,
        overlapped as overlapped,
        paft as paft,
        paft_sync as paft_sync,
        replica_mean as replica_mean,
        synchronizes as synchronizes,
    )
    from .assignment import Assignment as Assignment

    # Workers that stop at a compute threshold.
    from .dropcompute import (
        Resampling as Resampling,
        Stopwatch as Stopwatch,
        Sum as Sum,
        accumulate as accumulate,
        combine as combine,
        completed_before as completed_before,
        from_workers as from_workers,
        gradient_sum as gradient_sum,
        masked as masked,
        skip_empty as skip_empty,
        to_workers as to_workers,
    )

    # Links that lose packets.
    from .lossy import (
        LossyLog as LossyLog,
        lossy_all_gather as lossy_all_gather,
        lossy_psum_scatter as lossy_psum_scatter,
        lossy_zero2 as lossy_zero2,
        recorded as recorded,
    )
    from .channels import (
        BadLink as BadLink,
        Channel as Channel,
        GilbertElliott as GilbertElliott,
        Independent as Independent,
        Recorded as Recorded,
        Sent as Sent,
    )

    # Any of them for a model that XLA shards.
    from .trainer import (
        Dropped as Dropped,
        Mean as Mean,
        Own as Own,
        Shadowed as Shadowed,
        data_parallel as data_parallel,
    )

    # A rank to spare that recomputes what others did.
    from .spares import ShadowVerdict as ShadowVerdict, init_shadow as init_shadow, judge as judge, shadow as shadow

if TYPE_CHECKING:  # for the other packages of this project
    from .trainer import around as around
    from .delays import BoundedLogNormal as BoundedLogNormal
    from .dropcompute import Correction as Correction
    from .methods import Aggregation as Aggregation, parse_aggregation as parse_aggregation
    from .speedup import (
        drop_rate as drop_rate,
        effective_speedup as effective_speedup,
        extra_steps as extra_steps,
        mean_completed as mean_completed,
        select_threshold as select_threshold,
    )

__getattr__, __dir__, __all__ = facade(__name__)
