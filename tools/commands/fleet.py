"""`sdc fleet`: results of many hosts, and schedules of pairs. Nothing here needs JAX."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import tyro

from sdc.records import RecordError, endless, reason
from sdc.settings import SettingError, Within
from sdc.standing import Ledger, LedgerEntry, ledger_path, standing_here
from sdc.verdict import Exit

from .. import CommandError, ResultCommand, usage_errors, write
from .verdict import printable

LARGEST = 10_000_000  # bytes of a file of host names


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummarizeCommand(ResultCommand):
    """Identifies suspects and outliers among the results of many hosts.

    Example: sdc fleet summarize /shared/burnin --output fleet --ledger /shared/ledger.json
    Example: sdc fleet summarize rack1 rack2 --json

    Hosts that ran the same programs on the same kind of devices vote on their digests, and the ledger accumulates
    evidence over time. A result that occurs more than once is counted once. Exit codes: 0 no suspect among the
    compared hosts; 1 suspects, or hosts that differ; 2 bad usage; 3 nothing could be compared, a file or folder could
    not be read, or a burn-in is under way.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Results of sdc burnin, pair and pool, or folders that contain results at any depth."""
    output: Path | None = None
    """Folder for a page (index.html), suspects.csv and devices.csv; these files overwrite those of an earlier
    summary."""
    ledger: Path | None = None
    """File that accumulates what was checked on each device over time; created if it does not exist."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleCommand:
    """Schedules pairs of hosts, as commands for Slurm or JobSets for Kubernetes.

    Example: sdc fleet schedule gpu-1 gpu-2 gpu-3 gpu-4 --rounds 2
    Example: sdc fleet schedule gpu-1 gpu-2 gpu-3 gpu-4 --rounds 2 --format jobset

    As far as possible, every host has a new partner in each round, and suspects are paired with healthy hosts; the
    command lists exceptions. Exit codes: 0 done, 2 bad usage.
    """

    hosts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of hosts; @FILE reads names separated by spaces or line breaks from a file."""
    rounds: int
    """Number of other hosts with which each host is paired."""
    suspects: str = ""
    """Hosts that must not be paired with each other, separated by commas."""
    format: Literal["srun", "jobset", "json"] = "srun"
    """Form of the schedule: a script of srun lines (srun), JobSet documents (jobset), or JSON (json)."""
    folder: str = "pairs"
    """Folder for the run folders of the pairs."""
    image: str = "IMAGE"
    """Container image of the JobSets."""
    seed: Annotated[int, Within(0, 2**31 - 1)] = 0
    """Seed of the order of the pairs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateCommand(ResultCommand):
    """Simulates fleets to find how many rounds of pairs identify the bad hosts.

    Example: sdc fleet simulate --hosts 64 --bad 3 --probability 0.7 --rounds 8
    Example: sdc fleet simulate --hosts 1000 --bad 1 --rounds 4

    The bad hosts count as identified if no other set of the same or a smaller size has a member in every pair that
    differed. Exit codes: 0 done, 2 bad usage.
    """

    hosts: int
    """Number of hosts."""
    bad: int = 1
    """Number of bad hosts."""
    probability: float = 1.0
    """Probability that one comparison of a pair with a bad host finds a difference."""
    rounds: int = 8
    """Maximum number of rounds."""
    trials: int = 1000
    """Number of simulated fleets."""
    seed: Annotated[int, Within(0, 2**31 - 1)] = 0
    """Seed of the draws."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcknowledgeCommand:
    """Records that a person has dealt with failures of devices of this host, or with tests that left no result.

    Example: sdc fleet acknowledge "serial 1653923000123" --reason "reseated, 8 h soak" --by "N. Weber"
    Example: sdc fleet acknowledge "uuid GPU-5b1c..." --gone --reason "returned to the vendor" --by "N. Weber"

    The host passes if the devices have passed a test of all families since their failures; the command prints its
    standing. A GPU that JAX cannot use needs no result once it is acknowledged. Exit codes: 0 recorded, 2 bad usage, or
    a device is unknown, in which case nothing is recorded.
    """

    devices: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Names of the devices or tests, as sdc verdict prints them, also separated by commas."""
    reason: str
    """What was done."""
    by: str
    """Who did it."""
    gone: bool = False
    """The devices have left this host for good; if one returns, its failure counts again."""
    ledger: Path | None = None
    """Ledger of this host (default: as in sdc burnin)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerCommand(ResultCommand):
    """Prints the ledger of this host: the burn-ins, the verdicts on each device, and acknowledgements.

    Example: sdc fleet ledger
    Example: sdc fleet ledger --json > gpu-17.json

    Starts no device. Exit codes: 0 done, 2 bad usage, 3 the ledger is missing or damaged.
    """

    ledger: Path | None = None
    """Ledger of this host (default: as in sdc burnin)."""


Subcommand: TypeAlias = (
    Annotated[SummarizeCommand, tyro.conf.subcommand("summarize")]
    | Annotated[ScheduleCommand, tyro.conf.subcommand("schedule")]
    | Annotated[SimulateCommand, tyro.conf.subcommand("simulate")]
    | Annotated[AcknowledgeCommand, tyro.conf.subcommand("acknowledge")]
    | Annotated[LedgerCommand, tyro.conf.subcommand("ledger")]
)


@dataclasses.dataclass(frozen=True)
class FleetCommand:
    """Summarizes results of hosts, schedules pairs, keeps a ledger.

    Example: sdc fleet summarize /shared/burnin
    Example: sdc fleet schedule gpu-1 gpu-2 gpu-3 gpu-4 --rounds 2
    """

    command: Annotated[Subcommand, tyro.conf.arg(name="")]


def run(options: FleetCommand) -> int:
    runs: dict[type, Callable[[Any], int]]
    runs = {
        SummarizeCommand: _summarize, ScheduleCommand: _schedule, SimulateCommand: _simulate,
        AcknowledgeCommand: _acknowledge, LedgerCommand: _ledger,
    }  # fmt: skip
    return runs[type(options.command)](options.command)


def _summarize(options: SummarizeCommand) -> int:
    from sdc.analysis import fleet

    from .. import CountProgress, show

    # Objects here form no cycles, and the garbage collector would traverse all rows of a fleet many times.
    enabled = gc.isenabled()
    gc.disable()
    try:
        with usage_errors():
            if not options.files:
                raise SettingError("FILES", None, "expected results of sdc burnin, or folders that contain them")
            files = fleet.find_results(options.files)
            ledger, added, report = None, None, {}
            if options.ledger is not None:
                if not options.ledger.absolute().parent.is_dir():
                    raise SettingError(
                        "ledger", options.ledger, "its folder does not exist; create it, or choose another"
                    )
                fleet.read_ledger(options.ledger)  # reports a damaged ledger before the work
            if options.output is not None:
                fleet.prepare_folder(options.output)
            with CountProgress("result", len(files.files)) as progress:
                found = fleet.collect(files, lambda file: progress.advance(""))
            votes = fleet.vote(found.results)
            if options.ledger is not None and found.results:
                ledger, added = fleet.update_ledger(options.ledger, found.results, votes)
            summary = fleet.summarize_results(found, votes=votes, ledger=ledger, added=added)
            if options.output is not None:
                devices = fleet.device_rows(found.results, votes, summary.suspects, ledger)
                report = {"report": str(fleet.write_pages(options.output, summary, devices))}
        show({**msgspec.to_builtins(summary), **report}, fleet.fleet_page(summary), as_json=options.json)
        return summary.verdict.code
    finally:
        if enabled:
            gc.enable()


def _schedule(options: ScheduleCommand) -> int:
    from sdc.analysis.fleet import jobset_lines, make_schedule, srun_lines

    from .. import show

    with usage_errors():
        hosts = [*_named(options.hosts)]
        suspects = [*_named([name.strip() for name in options.suspects.split(",") if name.strip()])]
        made = make_schedule(hosts, options.rounds, suspects=suspects, seed=options.seed)
        if options.format == "srun":
            text = "\n".join(srun_lines(made, options.folder))
        elif options.format == "jobset":
            text = "\n".join(jobset_lines(made, options.folder, options.image))
    if options.format == "json":
        rounds = [
            {"pairs": pairs, "resting": resting} for pairs, resting in zip(made.rounds, made.resting, strict=True)
        ]
        show({"rounds": rounds, "suspects": suspects, "notes": list(made.notes)}, as_json=True)
    else:
        write(text)
    return Exit.CLEAN


def _simulate(options: SimulateCommand) -> int:
    from sdc.analysis.fleet import simulate_naming, simulation_table

    from .. import show

    with usage_errors():
        asked = {name: getattr(options, name) for name in ("hosts", "bad", "probability", "trials", "seed")}
        rows = simulate_naming(**asked, rounds=options.rounds)
    result = {"simulated": True, **asked, "rounds": [row._asdict() for row in rows]}
    table = simulation_table(rows, options.hosts, options.bad, options.probability)
    show(result, table, as_json=options.json)
    return Exit.CLEAN


def _acknowledge(options: AcknowledgeCommand) -> int:
    for name in ("reason", "by"):
        if not getattr(options, name).strip():
            raise CommandError(f"--{name}: expected a text, which the ledger keeps")
    if not options.devices:
        raise CommandError("DEVICES: expected the name of a device, as sdc verdict prints it")
    try:
        with Ledger(options.ledger or ledger_path(), write=True, create=False) as ledger:
            known = ledger.devices()
            devices = [name for text in options.devices for name in _parted(text, known)]
            ledger.acknowledge(devices, options.reason, options.by, gone=options.gone)
    except RecordError as error:
        raise CommandError(str(error)) from error
    standing = standing_here(ledger.path)
    write(printable(f"recorded; this host is now {standing.verdict.acceptance}: {standing.reason}"))
    return Exit.CLEAN


def _parted(text: str, known: Container[str]) -> Iterator[str]:
    """Yields the names in a text, which may contain what separates them."""
    words = text.split(", ")
    while words:
        several = range(len(words), 1, -1)
        count = next((count for count in several if ", ".join(words[:count]) in known), 1)
        yield ", ".join(words[:count])
        words = words[count:]


def _ledger(options: LedgerCommand) -> int:
    from rich.text import Text

    from .. import show

    try:
        with Ledger(options.ledger or ledger_path()) as ledger:
            entries = list(ledger.entries())
            with contextlib.suppress(RecordError):  # a damaged ledger lists what it can
                entries += [entry for _, entry in ledger.unlisted()]
    except RecordError as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error

    def line(entry: LedgerEntry) -> Text:
        what = entry.kind if entry.verdict is None else entry.verdict.acceptance
        words = [
            "SIMULATION" if entry.simulated else "",
            what,
            entry.device or next(iter(entry.names), ""),
            entry.sentence,
            entry.by or "",
        ]
        return Text(printable(f"{entry.at.written}  {'  '.join(filter(None, words))}"))

    show({"entries": msgspec.to_builtins(entries)}, map(line, entries), as_json=options.json)
    return Exit.CLEAN


def _named(words: Sequence[str]) -> Iterator[str]:
    """Yields host names, including those in @FILEs."""
    for word in words:
        if word.startswith("@"):
            lines = _text(word, Path(word[1:])).splitlines()
            yield from (name for line in lines for name in line.partition("#")[0].replace(",", " ").split())
        else:
            yield word


def _text(word: str, path: Path) -> str:
    """Reads a file of host names; refuses endless files, such as pipes, and files of more than `LARGEST` bytes."""
    try:
        what = "a folder" if path.is_dir() else endless(path)
        if what is not None:
            raise SettingError("HOSTS", word, f"is {what}, expected a text file of host names; give such a file")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)  # files in /proc have size 0 but contents
    except FileNotFoundError as error:
        raise SettingError("HOSTS", word, "there is no such file; give a text file of host names") from error
    except OSError as error:
        raise SettingError("HOSTS", word, f"cannot be read ({reason(error)}); choose another file") from error
    if len(content) > LARGEST:
        raise SettingError("HOSTS", word, f"expected a file of at most {LARGEST:,} bytes; choose another file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingError("HOSTS", word, "is not UTF-8 text; give a text file of host names") from error
