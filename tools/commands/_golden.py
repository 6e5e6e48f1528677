"""`sdc golden`: records what healthy devices compute, and verifies, merges and lists such registers."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sdc.burnin import (
    A_FOLDER,
    Asked,
    Register,
    claim_names,
    claimed,
    describe_dispute,
    merge,
    parse_devices,
    read_golden,
    write_golden,
)
from sdc.records import RecordError
from sdc.settings import SettingError

from .. import (
    CommandError,
    Exit,
    GoldenListOptions,
    GoldenMergeOptions,
    GoldenOptions,
    GoldenRecordOptions,
    GoldenVerifyOptions,
    run_errors,
    usage_errors,
)

if TYPE_CHECKING:
    import jax

    from sdc.burnin import Confirmed

ROUNDS = 10**9


def run(options: GoldenOptions) -> int:
    """Runs the subcommand and returns the exit code."""
    match options.command:
        case GoldenRecordOptions():
            return _record(options.command)
        case GoldenVerifyOptions():
            return _verify(options.command)
        case GoldenMergeOptions():
            return _merge(options.command)
        case GoldenListOptions():
            return _list(options.command)


def _record(options: GoldenRecordOptions) -> int:
    from ._burnin import settings_of

    with usage_errors():
        asked, settings = settings_of(options)
        _check_new("FILE", options.file)
    devices = _devices(asked)
    from sdc.burnin import record

    from .. import BurninProgress

    _register_training()
    with (
        BurninProgress(settings.minutes, settings.rounds) as progress,
        run_errors(options.file, resumable=False),
        _alone(devices),
    ):
        register, found = record(settings, devices, on_event=progress.update)
        if register is not None:
            write_golden(options.file, register)
    if register is None:
        said = "a difference was found" if found.differs else "there is nothing that healthy devices agree on"
        return _end(found, {"file": str(options.file), "recorded": 0}, f"nothing is recorded: {said}", options.json)
    count = len(register.entries)
    about = {"file": str(options.file), "recorded": count, "repeated_only": found.repeated_only}
    return _end(found, about, f"{count} digests recorded", options.json)


def _verify(options: GoldenVerifyOptions) -> int:
    with usage_errors():
        if not 1 <= options.rounds <= ROUNDS:
            raise SettingError("rounds", options.rounds, f"expected a number from 1 to {ROUNDS:,}")
        asked = parse_devices(options.devices)
    register = _read([options.file])[0]
    if options.no_run:
        return _whole(options, register)
    if options.devices is None and all(each.subject.kind.startswith("cpu ") for each in register.entries):
        most = max((len(recording.devices) for recording in register.recordings.values()), default=1)
        asked = parse_devices(str(max(1, most)))
    devices = _devices(asked)
    from sdc.burnin import verify

    from .. import BurninProgress

    _register_training()
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


def _whole(options: GoldenVerifyOptions, register: Register) -> int:
    from .. import show_golden

    said = f"{options.file} is whole: {len(register.entries)} digests, {len(register.disputed)} disputed, none run here"
    show_golden({"file": str(options.file), "sentence": said}, as_json=options.json)
    return int(Exit.CLEAN)


def _end(found: "Confirmed", about: dict[str, Any], sentence: str, as_json: bool) -> int:
    from .. import show_golden

    verdict = "corrupt" if found.differs else "inconclusive" if found.problem else "clean"
    summary = {"verdict": verdict, **about, "sentence": sentence, "sentences": found.sentences}
    show_golden(summary, as_json=as_json)
    return int({"corrupt": Exit.CORRUPT, "inconclusive": Exit.INCONCLUSIVE, "clean": Exit.CLEAN}[verdict])


def _merge(options: GoldenMergeOptions) -> int:
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
        write_golden(options.out, merged)
    disputes = [describe_dispute(merged, each) for each in merged.disputed]
    said = f"{len(merged.entries)} digests in {options.out}"
    if disputes:
        said += f"; {len(disputes)} that hosts disagree on are used of none of them"
    verdict = {"verdict": "corrupt"} if disputes else {}  # without a dispute, perhaps nothing could be compared
    summary = {"file": str(options.out), "digests": len(merged.entries), "sentence": said, "sentences": disputes}
    show_golden({**verdict, **summary}, as_json=options.json)
    return int(Exit.CORRUPT if disputes else Exit.CLEAN)


def _list(options: GoldenListOptions) -> int:
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
    return int(Exit.CLEAN)


def _read(files: Sequence[Path]) -> list[Register]:
    """A file that is not there is a wrong word; one that is damaged says nothing about anything."""
    for file in files:
        if not file.exists():
            raise CommandError(f"{file}: there is no such file; sdc golden record {file} writes one")
        if file.is_dir():
            raise CommandError(f"{file} {A_FOLDER}")
    try:
        return [read_golden(file) for file in files]
    except RecordError as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error


def _check_new(setting: str, file: Path) -> None:
    """Whether a file can be written is told now, and not after the devices were loaded."""
    if file.exists():
        raise SettingError(setting, file, "exists already; name another file, or remove it")
    there = file.absolute().parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = "is not writable" if there.is_dir() else "does not exist"
        raise SettingError(setting, file, f"cannot be written: {there} {problem}; name another place")


def _devices(asked: Asked) -> "Sequence[jax.Device]":
    """Starts the devices. Others than were asked for are not tested in their place."""
    from sdc.records import determinism

    count = asked.simulated
    with usage_errors():
        determinism.prepare(
            cpu_devices=count, cpu_threads=max(os.cpu_count() or 1, count), only_cpu=asked.platform == "cpu"
        )
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # a driver that is not there, or answers with an error
        said = " ".join(str(error).split())[:300]
        raise CommandError(f"JAX cannot start its devices: {said}", Exit.INCONCLUSIVE) from error
    if doubts := asked.doubts(devices[0].platform, len(devices)):
        raise CommandError("; ".join(doubts), Exit.INCONCLUSIVE)
    return devices[: asked.simulated if devices[0].platform == "cpu" else asked.number]


def _register_training() -> None:
    from sdc.burnin import families, register
    from sdc.train import burning

    if burning.FAMILY not in families():
        register(burning.FAMILY, burning.build)
