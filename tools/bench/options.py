"""Flags of `sdc bench`."""

import dataclasses
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Measures what the tools cost, as ratios within one run.

    Example: sdc bench transform --json

    Programs are compiled first and then take turns, so that other load of the machine affects all alike. The figures
    are medians. lockstep: twins in lock-step against twins without. transform: fingerprint, inject, digest and
    rewriting against the plain step. campaign: injections through one program against a run of its own for each. abft:
    checked products and steps against plain ones, false alarms and what is detected. aggregation: PAFT, lossy ZeRO-2, a
    shadow replica and DropCompute against plain data parallelism, on simulated CPU devices. report: time and memory of
    the report of 100,000 steps. record: checksums and syncs of a record, as a share of the run's time. targets:
    digests, lock-step, fingerprint, inject and abft on TPUs and GPUs that are not here, by their compilers' estimate.
    delay: twins in two processes, with a slow network between them against a fast one; needs root. checkpoint:
    certificates and running checkpoints against Orbax alone, and against a step. burnin: digests and comparison as a
    share of a level's time, checked matrix products, a quick level, a pool's digests, the summary of 1,000 hosts, false
    alarms in 1,000 healthy rounds. nodes: which of the study's nodes a burn-in, a pair and a pool catch, simulated,
    against what is predicted (minutes).
    """

    benchmark: Annotated[
        Literal[
            "lockstep",
            "transform",
            "campaign",
            "abft",
            "aggregation",
            "report",
            "record",
            "targets",
            "delay",
            "checkpoint",
            "burnin",
            "nodes",
        ],
        tyro.conf.Positional,
    ]
    """What to measure."""
    config: str | None = None
    """Configuration; by default bench, and tiny for campaign and record."""
    steps: int = 15
    """Measured steps of each program, after two that are not measured; a campaign makes ten injections for each."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Types to measure; campaign, aggregation and record measure float32."""
    json: bool = False
    """Print the figures as JSON."""
