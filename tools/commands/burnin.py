"""`sdc burnin`: loads the devices of this host, and says what came of it."""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sdc.burnin import (
    A_FOLDER,
    BURN_IN,
    BurninResult,
    BurninSettings,
    DeviceRequest,
    check_metrics_file,
    junit,
    matching,
    metrics,
    parse_devices,
    rehearsed,
)
from sdc.burnin.workloads import LEVELS, Family
from sdc.records import RecordError, write_text
from sdc.settings import SettingError, Within

from .. import gently, give_up, new_folder, onward, require, run_errors, usage_errors

if TYPE_CHECKING:
    import jax

    from sdc.burnin import NotOnRecord, Session

PATIENCE = 1.5
"""Seconds after a signal until a burn-in whose devices do not come to the end of a run is ended at once."""
STARTING = 300.0
"""Seconds that devices have to start."""
LONGEST = 60 * 24 * 366
ROUNDS = 10**9
SEEDS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What to load which devices with."""

    level: Literal["quick", "prejob", "acceptance", "soak"] = "quick"
    """Sizes and length: quick (2 rounds), prejob (5 minutes), acceptance (an hour) or soak (a day)."""
    minutes: Annotated[float | None, Within(0, LONGEST, above=True)] = None
    """How long; by default as the level says."""
    rounds: Annotated[int | None, Within(1, ROUNDS)] = None
    """How often instead: so many times through all workloads."""
    devices: str | None = None
    """Devices that there must be: gpu, tpu, cpu, gpu:8 for so many of them, or 4 to simulate as many on the CPU; by
    default the best there are, and a host that has a CPU alone is inconclusive."""
    only: Annotated[tuple[Family, ...], tyro.conf.UseAppendAction] = ()
    """Only this family of workloads; may be repeated. By default all."""
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16")
    """Types of floating-point numbers."""
    seed: Annotated[int, Within(0, SEEDS - 1)] = 0
    """From which data are made: golden digests are of one seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurninCommand(Load):
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


def run(options: BurninCommand) -> int:
    """Runs the burn-in and returns the exit code."""
    with usage_errors():
        asked, settings = settings_of(options)
        _check_outputs(options)
        settings.accept = list(dict.fromkeys(options.accept))
        rehearsed(options.suspect, options.fault, 0)
        folder = _folder(options)
    from sdc.analysis import burst_outlooks
    from sdc.burnin import NotOnRecord, Session
    from sdc.train import BURNIN_STEPS, register_training

    from .. import BurninProgress

    register_training()
    onward.folder = folder
    with BurninProgress(settings.minutes, settings.rounds) as progress:
        session = Session(
            settings, folder, resume=options.resume, command=["sdc", *sys.argv[1:]], outlooks=burst_outlooks,
            steps=BURNIN_STEPS, on_event=progress.update, on_result=functools.partial(_publish, options),
        )  # fmt: skip
        gently(functools.partial(_end, session, options))
        unwritten = None
        with run_errors(folder):
            try:
                result = _burn(options, asked, session)
            except NotOnRecord as error:
                result, unwritten = error.result, error
    if unwritten is None:
        _say(options, result, folder)
    else:
        _say_unwritten(options, unwritten, folder)
    if session.hung:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(result.verdict.code)  # a thread waits for its device for ever
    return result.verdict.code


def _burn(options: BurninCommand, asked: DeviceRequest, session: "Session") -> BurninResult:
    """Starts the devices and tests them, or says why there are none to test."""
    from sdc.burnin.workloads import workloads

    starting = threading.Timer(STARTING, _leave, [session, options, f"devices that do not start in {STARTING:g} s"])
    starting.daemon = True
    starting.start()
    try:
        devices, problem = start_devices(asked)
    finally:
        starting.cancel()
    platform = devices[0].platform if devices else None
    doubts = asked.doubts(platform, len(devices))
    if problem is not None or platform is None or (asked.platform is not None and platform != asked.platform):
        return session.without("; ".join([*doubts, *filter(None, [problem])]))
    session.doubts = doubts
    settings = session.settings
    names = [each.name for each in workloads(settings.level, devices, settings.dtypes, only=settings.only)]
    session.inject = matching(rehearsed(options.suspect, options.fault, len(devices) - 1), names)
    session.settings.faults = list(map(str, session.inject))
    session.golden = options.golden
    return session.run(devices)


def start_devices(asked: DeviceRequest) -> "tuple[Sequence[jax.Device], str | None]":
    """The devices of this process, or what went wrong with them."""
    import jax

    from sdc.records import prepare

    count = asked.simulated
    with usage_errors():
        prepare(cpu_devices=count, cpu_threads=max(os.cpu_count() or 1, count), only_cpu=asked.platform == "cpu")
    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # a driver that is not there, or answers with an error
        return [], f"JAX cannot start its devices: {' '.join(str(error).split())[:300]}"
    return devices[: asked.simulated if devices[0].platform == "cpu" else asked.number], None


def _end(session: "Session", options: BurninCommand, why: str) -> None:
    """A signal: the run that is at work is finished, if that does not take long."""
    session.stop(why)
    timer = threading.Timer(PATIENCE, _leave, [session, options, why])
    timer.daemon = True
    timer.start()


def _leave(session: "Session", options: BurninCommand, why: str) -> None:
    """The main thread waits for a device or for the compiler, perhaps for ever."""
    result = session.known(why)
    _say(options, result, session.folder)
    sys.stdout.flush()
    give_up(f"ended by {why}, and no run came to its end within {PATIENCE:g} s")


def _publish(options: BurninCommand, result: BurninResult) -> None:
    """Writes what others read, each time that there is something new to say."""
    if options.junit is not None:
        write_text(options.junit, junit(result))
    if options.prometheus is not None:
        write_text(options.prometheus, metrics(result))


def _say_unwritten(options: BurninCommand, unwritten: "NotOnRecord", folder: Path) -> None:
    """What was found is told, and where it can still be written."""
    _say(options, unwritten.result, None)
    with contextlib.suppress(OSError):  # of the same disk
        _publish(options, unwritten.result)
    print(f"sdc: cannot write to {folder} ({unwritten}): what was found is not on record there", file=sys.stderr)


def _say(options: BurninCommand, result: BurninResult, folder: Path | None) -> None:
    from .. import show_result

    show_result(result, folder, as_json=options.json)


def settings_of(options: Load) -> tuple[DeviceRequest, BurninSettings]:
    """What the flags of a load ask for."""
    if options.minutes is not None and options.rounds is not None:
        raise SettingError("minutes", options.minutes, "rounds are given too; give one of them")
    if not options.dtypes:
        raise SettingError("dtypes", None, "expected one or several")
    minutes, rounds = options.minutes, options.rounds
    if minutes is None and rounds is None:
        minutes = LEVELS[options.level].minutes
        rounds = 2 if minutes is None else None
    return parse_devices(options.devices), BurninSettings(
        level=options.level, minutes=minutes, rounds=rounds, only=list(options.only) or None,
        dtypes=list(options.dtypes), seed=options.seed,
    )  # fmt: skip


def _check_outputs(options: BurninCommand) -> None:
    """Whether the outputs can be written is told now, and not after an hour of load."""
    if options.golden is not None and not options.golden.exists():
        raise SettingError("golden", options.golden, "there is no such file; sdc golden record writes one")
    if options.golden is not None and options.golden.is_dir():
        raise SettingError("golden", options.golden, A_FOLDER)
    if options.prometheus is not None:
        require("--prometheus", "metrics")
        check_metrics_file(options.prometheus)
    for name in ("junit", "prometheus"):
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        if path.is_dir():
            raise SettingError(name, path, "is a folder; give the name of a file")
        check_place(name, path)


def check_place(setting: str, file: Path) -> None:
    """Refuses a file that cannot be written, before there is anything to write."""
    there = file.absolute().parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = "is not writable" if there.is_dir() else "does not exist"
        raise SettingError(setting, file, f"cannot be written: {there} {problem}; name another place")


def _folder(options: BurninCommand) -> Path:
    if not options.resume:
        return new_folder("burnin", options.run)
    if options.run is None:
        raise SettingError("resume", None, "continues what is in the folder that --run names; give --run DIR")
    try:
        BURN_IN.read(options.run)
    except RecordError as error:
        raise SettingError("resume", options.run, str(error)) from error
    return options.run.absolute()
