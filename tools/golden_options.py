"""Flags of `sdc golden`."""

import dataclasses
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

from .burnin_options import LoadOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenRecordOptions(LoadOptions):
    """Records what the devices of this host compute, where runs or devices agree.

    Example: sdc golden record h100.golden --level prejob --devices gpu:8

    Nothing is recorded if anything differs, a workload does not run to its end, or a driver reports an error. Exit
    codes: 0 recorded, 1 a difference was found, 2 bad usage, 3 inconclusive.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The register to write; a file that exists is not overwritten."""
    json: bool = False
    """Print what was recorded as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenVerifyOptions:
    """Looks whether a register is whole, and whether the devices of this host compute what it says.

    Example: sdc golden verify fleet.golden

    Runs the workloads that are in it, of the levels that they were recorded with. Exit codes: 0 confirmed, 1 something
    differs, 2 bad usage, 3 inconclusive: it is damaged, or of other devices or versions.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The register."""
    rounds: int = 2
    """How often: so many times through all workloads."""
    devices: str | None = None
    """Devices, as for sdc burnin; for a register of CPUs by default as many as it was recorded with."""
    no_run: bool = False
    """Only look whether it is whole, and start no device."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenMergeOptions:
    """Makes one register of several. What they disagree on is told, and believed of none of them.

    Example: sdc golden merge fleet.golden rack1.golden rack2.golden

    Starts no device. Exit codes: 0 all agree, 1 some disagree (the rest is written), 2 bad usage, 3 inconclusive: one
    of them is damaged.
    """

    out: Annotated[Path, tyro.conf.Positional]
    """The register to write; a file that exists is not overwritten."""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Registers to merge."""
    json: bool = False
    """Print what became of them as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenListOptions:
    """Shows what is in registers: devices, versions, workloads, digests, and who saw them.

    Example: sdc golden list fleet.golden

    Starts no device. Exit codes: 0 shown, 2 bad usage, 3 inconclusive: one of them is damaged.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Registers."""
    json: bool = False
    """Print them as JSON, and nothing else, on standard output."""


GoldenCommand: TypeAlias = (
    Annotated[GoldenRecordOptions, tyro.conf.subcommand("record")]
    | Annotated[GoldenVerifyOptions, tyro.conf.subcommand("verify")]
    | Annotated[GoldenMergeOptions, tyro.conf.subcommand("merge")]
    | Annotated[GoldenListOptions, tyro.conf.subcommand("list")]
)


@dataclasses.dataclass(frozen=True)
class GoldenOptions:
    """Golden registers: what healthy devices compute, bit for bit, to compare others with.

    Example: sdc golden record h100.golden, then sdc burnin --golden h100.golden on other hosts
    """

    command: Annotated[GoldenCommand, tyro.conf.arg(name="")]
