"""`sdc golden`: records what healthy devices compute, and verifies, merges and lists such registers."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import tyro

from sdc.burnin import (
    A_FOLDER,
    GOLDEN,
    DeviceRequest,
    Register,
    claim_names,
    claimed,
    describe_dispute,
    merge,
    parse_devices,
)
from sdc.records import RecordError
from sdc.settings import SettingError, Within
from sdc.verdict import Exit, Verdict

from .. import CommandError, run_errors, usage_errors
from .burnin import ROUNDS, Load, check_place, settings_of, start_devices

if TYPE_CHECKING:
    import jax

    from sdc.burnin import Confirmed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordCommand(Load):
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
class VerifyCommand:
    """Looks whether a register is whole, and whether the devices of this host compute what it says.

    Example: sdc golden verify fleet.golden

    Runs the workloads that are in it, of the levels that they were recorded with. Exit codes: 0 confirmed, 1 something
    differs, 2 bad usage, 3 inconclusive: it is damaged, or of other devices or versions.
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The register."""
    rounds: Annotated[int, Within(1, ROUNDS)] = 2
    """How often: so many times through all workloads."""
    devices: str | None = None
    """Devices, as for sdc burnin; for a register of CPUs by default as many as it was recorded with."""
    no_run: bool = False
    """Only look whether it is whole, and start no device."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeCommand:
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
class ListCommand:
    """Shows what is in registers: devices, versions, workloads, digests, and who saw them.

    Example: sdc golden list fleet.golden

    Starts no device. Exit codes: 0 shown, 2 bad usage, 3 inconclusive: one of them is damaged.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Registers."""
    json: bool = False
    """Print them as JSON, and nothing else, on standard output."""


Subcommand: TypeAlias = (
    Annotated[RecordCommand, tyro.conf.subcommand("record")]
    | Annotated[VerifyCommand, tyro.conf.subcommand("verify")]
    | Annotated[MergeCommand, tyro.conf.subcommand("merge")]
    | Annotated[ListCommand, tyro.conf.subcommand("list")]
)


@dataclasses.dataclass(frozen=True)
class GoldenCommand:
    """Golden registers: what healthy devices compute, bit for bit, to compare others with.

    Example: sdc golden record h100.golden, then sdc burnin --golden h100.golden on other hosts
    """

    command: Annotated[Subcommand, tyro.conf.arg(name="")]


def run(options: GoldenCommand) -> int:
    """Runs the subcommand and returns the exit code."""
    match options.command:
        case RecordCommand():
            return _record(options.command)
        case VerifyCommand():
            return _verify(options.command)
        case MergeCommand():
            return _merge(options.command)
        case ListCommand():
            return _list(options.command)


def _record(options: RecordCommand) -> int:
    with usage_errors():
        asked, settings = settings_of(options)
        _check_new("FILE", options.file)
    devices = _devices(asked)
    from sdc.burnin import record
    from sdc.train import register_training

    from .. import BurninProgress

    register_training()
    with (
        BurninProgress(settings.minutes, settings.rounds) as progress,
        run_errors(options.file, resumable=False),
        _alone(devices),
    ):
        register, found = record(settings, devices, on_event=progress.update)
        if register is not None:
            GOLDEN.write(options.file, register)
    if register is None:
        said = "a difference was found" if found.differs else "there is nothing that healthy devices agree on"
        return _end(found, {"file": str(options.file), "recorded": 0}, f"nothing is recorded: {said}", options.json)
    count = len(register.entries)
    about = {"file": str(options.file), "recorded": count, "repeated_only": found.repeated_only}
    return _end(found, about, f"{count} digests recorded", options.json)


def _verify(options: VerifyCommand) -> int:
    with usage_errors():
        asked = parse_devices(options.devices)
    register = _read([options.file])[0]
    if options.no_run:
        return _whole(options, register)
    if options.devices is None and all(each.subject.kind.startswith("cpu ") for each in register.entries):
        most = max((len(recording.devices) for recording in register.recordings.values()), default=1)
        asked = parse_devices(str(max(1, most)))
    devices = _devices(asked)
    from sdc.burnin import verify
    from sdc.train import register_training

    from .. import BurninProgress

    register_training()
    progress = BurninProgress(None, options.rounds)
    with progress, run_errors(options.file, resumable=False), _alone(devices):
        found = verify(register, devices, rounds=options.rounds, on_event=progress.update)
    about = {"file": str(options.file), "confirmed": found.confirmed, "elsewhere": found.elsewhere}
    said = f"{found.confirmed} digests confirmed by this host"
    if found.elsewhere:
        said += f", {found.elsewhere} are of other devices or versions"
    return _end(found, about, said, options.json)


def _alone(devices: "Sequence[jax.Device]") -> AbstractContextManager[list[str]]:
    """Devices that a burn-in tests are not loaded a second time."""
    from sdc.records import describe_devices

    return claimed(claim_names(describe_devices(devices)))


def _whole(options: VerifyCommand, register: Register) -> int:
    from .. import show_golden

    said = f"{options.file} is whole: {len(register.entries)} digests, {len(register.disputed)} disputed, none run here"
    show_golden({"file": str(options.file), "sentence": said}, as_json=options.json)
    return Exit.CLEAN


def _end(found: "Confirmed", about: dict[str, Any], sentence: str, as_json: bool) -> int:
    from .. import show_golden

    summary = {"verdict": found.verdict, **about, "sentence": sentence, "sentences": found.sentences}
    show_golden(summary, as_json=as_json)
    return found.verdict.code


def _merge(options: MergeCommand) -> int:
    with usage_errors():
        _check_new("OUT", options.out)
        if not options.files:
            raise SettingError("FILES", None, "expected registers to merge")
    registers = _read(options.files)
    from .. import show_golden

    try:
        merged = merge(registers)
    except RecordError as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error
    with usage_errors():
        GOLDEN.write(options.out, merged)
    disputes = [describe_dispute(merged, each) for each in merged.disputed]
    said = f"{len(merged.entries)} digests in {options.out}"
    if disputes:
        said += f"; {len(disputes)} that hosts disagree on are used of none of them"
    verdict = {"verdict": Verdict.CORRUPT} if disputes else {}  # without a dispute, perhaps nothing could be compared
    summary = {"file": str(options.out), "digests": len(merged.entries), "sentence": said, "sentences": disputes}
    show_golden({**verdict, **summary}, as_json=options.json)
    return int(Exit.CORRUPT if disputes else Exit.CLEAN)


def _list(options: ListCommand) -> int:
    with usage_errors():
        if not options.files:
            raise SettingError("FILES", None, "expected registers to list")
    registers = _read(options.files)
    from .. import show_golden

    try:
        merged = merge(registers)
    except RecordError as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error
    summary = {name: msgspec.to_builtins(getattr(merged, name)) for name in ("environments", "recordings", "entries")}
    summary["disputed"] = msgspec.to_builtins(merged.disputed)
    summary["sentences"] = [f"disputed: {describe_dispute(merged, each)}" for each in merged.disputed]
    show_golden(summary, as_json=options.json)
    return Exit.CLEAN


def _read(files: Sequence[Path]) -> list[Register]:
    """A file that is not there is a wrong word; one that is damaged says nothing about anything."""
    for file in files:
        if not file.exists():
            raise CommandError(f"{file}: there is no such file; sdc golden record {file} writes one")
        if file.is_dir():
            raise CommandError(f"{file} {A_FOLDER}")
    try:
        return [GOLDEN.read(file) for file in files]
    except RecordError as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error


def _check_new(setting: str, file: Path) -> None:
    """Whether a file can be written is told now, and not after the devices were loaded."""
    if file.exists():
        raise SettingError(setting, file, "exists already; name another file, or remove it")
    check_place(setting, file)


def _devices(asked: DeviceRequest) -> "Sequence[jax.Device]":
    """Starts the devices. Others than were asked for are not tested in their place."""
    devices, problem = start_devices(asked)
    if problem is not None:
        raise CommandError(problem, Exit.INCONCLUSIVE)
    if doubts := asked.doubts(devices[0].platform, len(devices)):
        raise CommandError("; ".join(doubts), Exit.INCONCLUSIVE)
    return devices
