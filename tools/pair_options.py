"""Flags of the commands that compare hosts with each other."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from .options import TextOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedOptions(TextOptions):
    """What the hosts compute, where they find one another, and what to simulate."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of activations and compute parameters; by default the configuration's."""
    data: int = 1
    """Number of data-parallel ranks of each host."""
    model: int = 1
    """Number of tensor-parallel ranks of each host."""
    devices: int | None = None
    """Simulate this many CPU devices, over all processes; by default as many as needed if there is only a CPU."""
    run: Path | None = None
    """Folder of the result, a new one that all hosts share; by default one below runs/."""
    steps: int = 20
    """Number of optimizer steps of each stage."""
    coordinator: str | None = None
    """HOST:PORT of process 0."""
    processes: int | None = None
    """Number of processes, as a rule one for each host."""
    process: int | None = None
    """Number of this process, from 0."""
    timeout: float = 300.0
    """Seconds to wait for the other processes at the start."""
    suspect: str | None = None
    """Simulated suspect, which the last host is: node1 ... node15 of the published study, or others: docs/faults.md."""
    fault: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Simulated fault of the last host, as in bitflip,rate=1e-5,site=fwd/attn; may be repeated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairOptions(ComparedOptions):
    """Compares two hosts: at full load, and if they differ ever closer, down to the operation.

    Example: sdc pair --steps 200 --run /shared/pair-17 --coordinator 10.0.0.1:4321 --processes 2 --process 0
    Example: sdc pair --resolve pair-17/pair.json pair-18/pair.json pair-19/pair.json

    Writes pair.json into the run folder. Exit codes: 0 PASS (no bit differed), 1 FAIL (the hosts differ), 2 bad usage,
    3 INCONCLUSIVE. Two hosts that differ do not say which is wrong: a third one does (sdc pool), or several pairs
    (--resolve).
    """

    resolve: tuple[Path, ...] = ()
    """Results of several pairs, files or folders: says which hosts they name. Goes with --json alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolOptions(ComparedOptions):
    """Compares three or more hosts: the majority names those that differ.

    Example: sdc pool --steps 200 --run /shared/rack-3 --coordinator 10.0.0.1:4321 --processes 8 --process 0
    Example: sdc pool --twins 4 --suspect node11

    Writes pool.json into the run folder. Exit codes: 0 PASS (no bit differed), 1 FAIL (hosts differ), 2 bad usage, 3
    INCONCLUSIVE. If a host is lost, the others end with what is known so far.
    """

    twins: int | None = None
    """Number of hosts that are compared; by default --processes."""
