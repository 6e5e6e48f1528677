"""Flags of `sdc fleet`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import tyro


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummarizeOptions:
    """What the results of many hosts say of each other: suspects, outliers, and what adds up over time.

    Example: sdc fleet summarize /shared/burnin --output fleet --ledger /shared/ledger.json

    Hosts that ran the same programs on the same kind of devices vote on their digests. Damaged and contradicting
    results are refused and told; the same result twice counts once. Exit codes: 0 no suspect, and hosts were compared;
    1 suspects, or hosts that differ without a majority; 2 bad usage; 3 nothing could be compared.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Results of sdc burnin (result.json), or folders that hold them at any depth."""
    output: Path | None = None
    """Folder for a page (index.html), suspects.csv and devices.csv; one of an earlier summary is written anew."""
    ledger: Path | None = None
    """File that adds up what was checked on each device, over time and hosts; made if there is none."""
    json: bool = False
    """Print the summary as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Whom to pair with whom: lines for Slurm, or documents for Kubernetes.

    Example: sdc fleet schedule gpu-1 gpu-2 gpu-3 gpu-4 --rounds 2 --suspects gpu-1

    In each round every host meets another one that it has not met before, and suspects meet healthy hosts, as far as
    numbers allow; what they do not allow is told. Exit codes: 0 done, 2 bad usage.
    """

    hosts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of hosts; @FILE stands for those in a file, divided by spaces or lines."""
    rounds: int
    """How many others each host is to meet."""
    suspects: str = ""
    """Hosts that are not to meet each other, divided by commas."""
    format: Literal["srun", "jobset", "json"] = "srun"
    """A script of srun lines, JobSet documents, or JSON."""
    folder: str = "pairs"
    """Folder below which the runs of the pairs are to be written."""
    image: str = "IMAGE"
    """Container image of the JobSets."""
    seed: int = 0
    """Who meets whom first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """How many rounds of pairs it takes to name the bad hosts of a fleet.

    Example: sdc fleet simulate --hosts 64 --bad 3 --probability 0.7 --rounds 8

    Bad hosts are named if they are the only smallest set of hosts with a member in every pair that differed. Exit
    codes: 0 done, 2 bad usage.
    """

    hosts: int
    """Number of hosts."""
    bad: int = 1
    """How many of them are bad."""
    probability: float = 1.0
    """With which a pair with a bad host differs in one meeting."""
    rounds: int = 8
    """Most rounds."""
    trials: int = 1000
    """Fleets to draw."""
    seed: int = 0
    """Seed of the draws."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


FleetCommand: TypeAlias = (
    Annotated[SummarizeOptions, tyro.conf.subcommand("summarize")]
    | Annotated[ScheduleOptions, tyro.conf.subcommand("schedule")]
    | Annotated[SimulateOptions, tyro.conf.subcommand("simulate")]
)


@dataclasses.dataclass(frozen=True)
class FleetOptions:
    """Many hosts: what their burn-ins say of each other, and whom to pair with whom.

    Example: sdc fleet summarize /shared/burnin
    """

    command: Annotated[FleetCommand, tyro.conf.arg(name="")]
