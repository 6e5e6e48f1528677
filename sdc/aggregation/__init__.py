"""Robust aggregation for data-parallel training, as optax transforms.

The transforms are pure functions with explicit state; they run under a bound worker axis (`shard_map`, `pmap`, `vmap`),
inside one `jit`.

- `noise`: simulated gradients that differ between workers. `synchronization`: resynchronization of replicas (PAFT).
- `dropcompute`: workers that stop at a compute threshold. `speedup`: the resulting speedup. `delays`: random latencies.
- `lossy`: links that lose packets, and ZeRO-2 over them. `channels`: models of packet loss.
- `spares`: spare ranks that recompute the gradients of others.
- `trainer`: any method, applied to a model that XLA shards. `methods`: settings and text form of all methods.
- `assignment`: updates that set parameters. `workers`: the mapped axis of the workers, and common checks.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Inconsistent gradients, and resynchronization of replicas.
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

    # Any method for a model that XLA shards.
    from .trainer import (
        Dropped as Dropped,
        Mean as Mean,
        Own as Own,
        Shadowed as Shadowed,
        data_parallel as data_parallel,
    )

    # A spare rank that recomputes the gradients of others.
    from .spares import ShadowVerdict as ShadowVerdict, init_shadow as init_shadow, judge as judge, shadow as shadow

if TYPE_CHECKING:  # for the other packages of this project
    from .trainer import around as around
    from .delays import BoundedLogNormal as BoundedLogNormal, parse_latency as parse_latency
    from .dropcompute import Correction as Correction
    from .methods import Aggregation as Aggregation, Rule as Rule, parse_aggregation as parse_aggregation
    from .speedup import (
        drop_rate as drop_rate,
        effective_speedup as effective_speedup,
        extra_steps as extra_steps,
        select_threshold as select_threshold,
    )

__getattr__, __dir__, __all__ = facade(__name__)
