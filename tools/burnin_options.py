"""Flags of `sdc burnin` and `sdc verdict`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

Families = Literal[
    "matrix", "attention", "functions", "reductions", "ordering", "memory", "transfers", "collectives", "training"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What to load which devices with."""

    level: Literal["quick", "prejob", "acceptance", "soak"] = "quick"
    """Sizes and length: quick (2 rounds), prejob (5 minutes), acceptance (an hour) or soak (a day)."""
    minutes: float | None = None
    """How long; by default as the level says."""
    rounds: int | None = None
    """How often instead: so many times through all workloads."""
    devices: str | None = None
    """Devices that there must be: gpu, tpu, cpu, gpu:8 for so many of them, or 4 to simulate as many on the CPU; by
    default the best there are, and a host that has a CPU alone is inconclusive."""
    only: Annotated[tuple[Families, ...], tyro.conf.UseAppendAction] = ()
    """Only this family of workloads; may be repeated. By default all."""
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16")
    """Types of floating-point numbers."""
    seed: int = 0
    """From which data are made: golden digests are of one seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurninOptions(LoadOptions):
    """Burns a host in: loads its devices with programs whose bits are known, and says PASS, FAIL or INCONCLUSIVE.

    Example: sdc burnin --level prejob --golden fleet.golden --prometheus /var/lib/node_exporter/sdc.prom
    Example: sdc burnin --devices 4 --only matrix --suspect node11

    One command a host, without a coordinator. The verdict rests on up to three independent kinds of evidence, which it
    names: the device repeats itself, all devices of the host agree, recorded digests agree. Exit codes: 0 PASS, 1 FAIL,
    2 bad usage, 3 INCONCLUSIVE (docs/burnin.md).
    """

    golden: Path | None = None
    """File of golden digests, from sdc golden record."""
    accept: Annotated[tuple[Literal["repeat"], ...], tyro.conf.UseAppendAction] = ()
    """Accept that a device alone can only repeat itself (repeat), which is blind to faults that repeat themselves."""
    suspect: str | None = None
    """Simulated suspect, for rehearsals: node1 ... node15 of the published study, silicon:gpu and others."""
    fault: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Simulated fault, as in bitflip,rate=1e-4,site=matrix/*,device=2; may be repeated. By default on the
    last device."""
    run: Path | None = None
    """Folder for result.json, the log, and the bundle for the vendor; by default a new one below runs/."""
    resume: bool = False
    """Go on with the burn-in in the folder that --run names, until its time is over: short tests add up."""
    junit: Path | None = None
    """Also write the result as JUnit XML."""
    prometheus: Path | None = None
    """Also write the result as metrics, for the textfile collector of the Prometheus node exporter (NAME.prom)."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerdictOptions:
    """Says the verdict of the last burn-in, pair or pool again, at once: what a health check calls.

    Example: sdc verdict --max-age 24h runs/burnin
    Example: sdc verdict --format nagios --max-age 7d /var/lib/sdc

    Starts no device. Exit codes: 0 PASS, 1 FAIL, 2 bad usage, 3 INCONCLUSIVE: no result, an old one, or a damaged one.
    """

    result: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Result file, run folder, or a folder of run folders, of which the newest counts."""
    max_age: str | None = None
    """A result that is older says nothing: 90s, 30m, 24h or 7d."""
    format: Literal["text", "nagios"] = "text"
    """Print a line for people, or one for Nagios with its exit codes (0 OK, 2 critical, 3 unknown)."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""
