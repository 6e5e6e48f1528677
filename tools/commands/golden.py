"""`sdc golden`: records the digests that healthy devices compute, and verifies, merges and lists golden registers."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import tyro

from sdc import burnin
from sdc.burnin import GOLDEN, MOST_ROUNDS, BurninSettings, DeviceRequest, Register
from sdc.records import Record, RecordError
from sdc.settings import SettingError, Within
from sdc.verdict import Exit, Verdict

from .. import CommandError, Only, ResultCommand, run_errors, usage_errors
from .burnin import check_place, start_devices

if TYPE_CHECKING:
    import jax

    from sdc.burnin import Confirmed

# Fields shown on the first line of an environment; flags and options follow on the next line.
SHORT = ("platform_version", "driver", "jax", "jaxlib", "machine", "processor", "cpu_threads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordCommand(ResultCommand):
    """Records the digests on which the runs or devices of this host agree.

    Example: sdc golden record h100.golden --level prejob --devices gpu:8
    Example: sdc golden record matrix.golden --only matrix

    Nothing is recorded if any digest differs, a workload does not finish, or a driver reports an error. Exit codes: 0
    recorded, 1 a difference was found, 2 bad usage, 3 inconclusive.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The register to write; a file that exists is not overwritten."""
    settings: Annotated[BurninSettings, Only("level", "minutes", "rounds", "only", "dtypes")]
    devices: str | None = None
    """Required devices, as for sdc burnin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCommand(ResultCommand):
    """Checks a register, and whether the devices of this host reproduce it.

    Example: sdc golden verify fleet.golden
    Example: sdc golden verify fleet.golden --no-run

    Runs each workload of the register at the level at which it was recorded. Exit codes: 0 confirmed, 1 a digest
    differs, 2 bad usage, 3 inconclusive (the register is damaged, or was recorded on other devices or versions).
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The register."""
    rounds: Annotated[int, Within(1, MOST_ROUNDS)] = 2
    """Number of rounds of all workloads."""
    devices: str | None = None
    """Required devices, as for sdc burnin; by default, a register of CPUs requires as many devices as it was recorded
    on."""
    no_run: bool = False
    """Only check that the file is undamaged, without starting a device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeCommand(ResultCommand):
    """Merges registers; entries that disagree are reported and left out.

    Example: sdc golden merge fleet.golden rack1.golden rack2.golden
    Example: sdc golden merge fleet.golden racks/*.golden

    Starts no device. Exit codes: 0 all entries agree, 1 some disagree (the others are written), 2 bad usage, 3
    inconclusive (at least one register is damaged).
    """

    out: Annotated[Path, tyro.conf.Positional]
    """The register to write; a file that exists is not overwritten."""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Registers to merge."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListCommand(ResultCommand):
    """Lists the devices, versions, workloads and digests of registers.

    Example: sdc golden list fleet.golden
    Example: sdc golden list rack1.golden rack2.golden --json

    Starts no device. Exit codes: 0 done, 2 bad usage, 3 inconclusive (at least one register is damaged).
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Registers."""


Subcommand: TypeAlias = (
    Annotated[RecordCommand, tyro.conf.subcommand("record")]
    | Annotated[VerifyCommand, tyro.conf.subcommand("verify")]
    | Annotated[MergeCommand, tyro.conf.subcommand("merge")]
    | Annotated[ListCommand, tyro.conf.subcommand("list")]
)


@dataclasses.dataclass(frozen=True)
class GoldenCommand:
    """Records and verifies golden digests of healthy devices.

    Example: sdc golden record h100.golden --level prejob
    Example: sdc burnin --golden h100.golden
    """

    command: Annotated[Subcommand, tyro.conf.arg(name="")]


def run(options: GoldenCommand) -> int:
    runs: dict[type, Callable[[Any], int]]
    runs = {RecordCommand: _record, VerifyCommand: _verify, MergeCommand: _merge, ListCommand: _list}
    return runs[type(options.command)](options.command)


def _record(options: RecordCommand) -> int:
    with usage_errors():
        settings, asked = options.settings.resolved(), burnin.parse_devices(options.devices)
        _check_new("FILE", options.file)
    with _at_load(options.file, asked, settings.minutes, settings.rounds) as (devices, on_event):
        from sdc.burnin import record

        register, found = record(settings, devices, on_event=on_event)
        if register is not None:
            GOLDEN.write(options.file, register)
    if register is None:
        problem = "a difference was found" if found.verdict is Verdict.CORRUPT else "no devices agree on any digest"
        return _end(found, {"file": str(options.file), "recorded": 0}, f"nothing is recorded: {problem}", options.json)
    count = len(register.entries)
    about = {"file": str(options.file), "recorded": count, "repeated_only": found.repeated_only}
    return _end(found, about, f"{count} digests recorded", options.json)


def _verify(options: VerifyCommand) -> int:
    with usage_errors():
        asked = burnin.parse_devices(options.devices)
    (register,) = _read([options.file])
    if options.no_run:
        counts = f"{len(register.entries)} digests, {len(register.disputed)} disputed"
        sentence = f"{options.file} is undamaged: {counts}; no workload was run"
        return _show({"file": str(options.file), "sentence": sentence}, options.json)
    if options.devices is None and all(each.subject.kind.startswith("cpu ") for each in register.entries):
        most = max((len(recording.devices) for recording in register.recordings.values()), default=1)
        asked = burnin.parse_devices(str(max(1, most)))
    with _at_load(options.file, asked, None, options.rounds) as (devices, on_event):
        from sdc.burnin import verify

        found = verify(register, devices, rounds=options.rounds, on_event=on_event)
    about = {"file": str(options.file), "confirmed": found.confirmed, "elsewhere": found.elsewhere}
    sentence = f"{found.confirmed} digests confirmed by this host"
    if found.elsewhere:
        sentence += f"; {found.elsewhere} belong to other devices or versions"
    return _end(found, about, sentence, options.json)


def _merge(options: MergeCommand) -> int:
    with usage_errors():
        _check_new("OUT", options.out)
    merged = _merged(options.files, "expected registers to merge")
    with usage_errors():
        GOLDEN.write(options.out, merged)
    disputes = [burnin.describe_dispute(merged, each) for each in merged.disputed]
    sentence = f"{len(merged.entries)} digests in {options.out}"
    if disputes:
        sentence += f"; {len(disputes)} are left out because hosts disagree on them"
    verdict = {"verdict": Verdict.CORRUPT} if disputes else {}  # without disputes, perhaps nothing was compared
    summary = {"file": str(options.out), "digests": len(merged.entries), "sentence": sentence, "sentences": disputes}
    return _show({**verdict, **summary}, options.json, Exit.CORRUPT if disputes else Exit.CLEAN)


def _list(options: ListCommand) -> int:
    merged = _merged(options.files, "expected registers to list")
    shown = ("environments", "recordings", "entries", "disputed")
    summary = {name: msgspec.to_builtins(getattr(merged, name)) for name in shown}
    summary["sentences"] = [f"disputed: {burnin.describe_dispute(merged, each)}" for each in merged.disputed]
    return _show(summary, options.json)


def _merged(files: Sequence[Path], expected: str) -> Register:
    if not files:
        raise CommandError(f"FILES: {expected}")
    registers = _read(files)
    try:
        return burnin.merge(registers)
    except RecordError as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error


def _read(files: Sequence[Path]) -> list[Register]:
    """Reads registers: a missing file is a usage error; a damaged one is inconclusive."""
    with usage_errors():
        for file in files:
            if not file.exists():
                raise CommandError(f"{file}: there is no such file; sdc golden record {file} writes one")
            if file.is_dir():
                raise CommandError(f"{file} {burnin.A_FOLDER}")
    try:
        for file in files:
            Record.check_owner(file)
        return [GOLDEN.read(file) for file in files]
    except RecordError as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error


def _check_new(setting: str, file: Path) -> None:
    """Raises SettingError before the devices are loaded, rather than afterwards, if a file cannot be written."""
    if file.exists():
        raise SettingError(setting, file, "exists already; choose another file, or remove it")
    check_place(setting, file)


@contextlib.contextmanager
def _at_load(
    file: Path, asked: DeviceRequest, minutes: float | None, rounds: int | None
) -> Iterator[tuple[Sequence["jax.Device"], Callable[[Mapping[str, Any]], None]]]:
    """Starts and claims the requested devices, never others in their place, and shows progress while they are under
    load."""
    devices, problem = start_devices(asked)
    if problem is not None:
        raise CommandError(problem, Exit.INCONCLUSIVE)
    if doubts := asked.doubts(devices[0].platform, len(devices)):
        raise CommandError("; ".join(doubts), Exit.INCONCLUSIVE)
    from sdc.records import describe_devices
    from sdc.train import register_training

    from .. import BurninProgress

    register_training()
    claim = burnin.claimed(describe_devices(devices))  # a burn-in may be testing them
    with BurninProgress(minutes, rounds) as progress, run_errors(file, resumable=False), claim:
        yield devices, progress.update


def _end(found: "Confirmed", about: dict[str, Any], sentence: str, as_json: bool) -> int:
    summary = {"verdict": found.verdict, **about, "sentence": sentence, "sentences": found.sentences}
    return _show(summary, as_json, found.verdict.code)


def _show(summary: Mapping[str, Any], as_json: bool, code: Exit = Exit.CLEAN) -> int:
    """Prints the result of a command or the contents of registers, and returns the exit code."""
    from .. import show

    show(summary, _parts(summary), as_json=as_json)
    return code


def _parts(summary: Mapping[str, Any]) -> Iterator[Any]:
    from sdc.analysis.report import Text

    if "entries" in summary:
        yield from _listed(summary)
    yield from summary.get("sentences", [])
    if "sentence" in summary:
        verdict = summary.get("verdict", "")
        yield Text(summary["sentence"], lead=verdict.upper(), tone=verdict)


def _listed(summary: Mapping[str, Any]) -> Iterator[Any]:
    from .. import table

    for mark, environment in summary["environments"].items():
        yield f"environment {mark}: " + ", ".join(
            f"{name} {environment[name]}" for name in SHORT if name in environment
        )
        rest = {name: value for name, value in environment.items() if name not in (*SHORT, "platform")}
        yield "  " + ", ".join(f"{name}={value}" for name, value in rest.items() if value != "")
    for name, recording in summary["recordings"].items():
        yield (
            f"burn-in {name[:8]}: host {recording['host']['name']}, {len(recording['devices'])} devices, "
            f"{recording['created']}, level {recording['level']}, {recording['rounds']} rounds"
        )
    rows = []
    for row in summary["entries"]:
        subject, seen = row["subject"], row["seen"]
        shard = "" if subject["shard"] is None else f" device {subject['shard']}"
        agreed = dict.fromkeys(kind for each in seen for kind in each["agreed"])
        counts = (sum(len(each["devices"]) for each in seen), sum(each["runs"] for each in seen))
        of = (f"{subject['workload']}{shard}", subject["kind"], subject["environment"], row["digest"])
        rows.append((*of, *map(str, counts), ", ".join(agreed)))
    yield table("Golden digests", ("workload", "device", "environment", "digest", "devices", "runs", "agreed"), rows)
