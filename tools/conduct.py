"""One run from its flags to its exit code: everything that `sdc twin`, `sdc train` and `sdc trace` do alike.

Whatever can be wrong with flags and files is told before JAX is imported, a peer is awaited or a device started.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import sys
import warnings
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from sdc.settings import SettingError
from sdc.train import Checks, Job, Peers, Planned, Training, Workload
from sdc.train.programs import DType

from .errors import VERDICTS, CommandError, Exit, run_errors, usage_errors
from .options import CheckedOptions, RunOptions, TextOptions, WorkloadOptions
from .runtime import end_aborts_well, give_up, keep_standard_output, onward

if TYPE_CHECKING:
    from sdc.train import Stop

Found = TypeVar("Found")


class Placed(Protocol):
    """Flags that say on what devices to run, and where to write."""

    @property
    def data(self) -> int: ...
    @property
    def model(self) -> int: ...
    @property
    def devices(self) -> int | None: ...
    @property
    def run(self) -> Path | None: ...


def settings_of(options: WorkloadOptions) -> dict[str, Any]:
    """What all jobs take from the flags."""
    with usage_errors():
        if options.devices is not None and options.devices < 1:
            raise SettingError("devices", options.devices, "expected a number of at least 1")
        if options.resume and options.run is None:
            raise SettingError("resume", None, "continues what is in the folder that --run names; give --run DIR")
    found: dict[str, Any] = {
        "workload": workload_of(options, options.dtype), "data": options.data, "model": options.model,
        "folder": options.run, "resume": options.resume,
    }  # fmt: skip
    if isinstance(options, RunOptions):
        found |= {"steps": options.steps, "checkpoint_every": options.checkpoint_every}
        found["compiler_options"] = options.compiler_option
    if isinstance(options, CheckedOptions):
        found |= {"suspect": options.suspect, "faults": options.fault, "checks": _checks(options)}
    return found


def workload_of(options: TextOptions, dtype: DType | None = None) -> Workload:
    """What is trained."""
    return Workload(
        config=options.config, dtype=dtype, seed=options.seed, corpus=options.corpus, tokenizer=options.tokenizer
    )


def _checks(options: CheckedOptions) -> Checks | None:
    """How products are checked, where they are; a flag that would be without effect is refused."""
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name.startswith("abft_") or field.name == "least_coverage"
    }
    if options.abft:
        return Checks(**{name.removeprefix("abft_"): value for name, value in given.items()})
    with usage_errors():
        for field in dataclasses.fields(options):
            if field.name in given and given[field.name] != field.default:
                raise SettingError(
                    field.name,
                    given[field.name],
                    "says how to check products, which are not checked; add --abft",
                )
    return None


def conduct(options: RunOptions, job: Job) -> int:
    """Runs a job and returns the exit code."""
    peers = Peers(
        coordinator=options.coordinator, processes=options.processes, process=options.process, timeout=options.timeout
    )
    with usage_errors():
        peers.check()
        job.check()
        check_devices(options.devices, job, options.processes or 1)
        check_clock(job, options.processes)
        # Of several processes all must hear of a folder that is taken: they join before they look.
        if options.run is not None and options.coordinator is None:
            check_folder(options.run, options.resume, job.kind)
        loaded = job.load()
    # Devices and peers from here on.
    from sdc.analysis import conclude
    from sdc.multihost import everyone
    from sdc.train import run

    from .output import show
    from .progress import Progress

    with together(options, job, peers, kind=job.kind) as joint:
        import jax

        folder = joint.folder
        with Progress(job.steps, show=joint.first) as progress:
            record = run(
                dataclasses.replace(job, folder=folder), loaded=loaded, devices=jax.devices(),
                on_step=progress.update, command=["sdc", *sys.argv[1:]], stop=joint.stop.reached,
            )  # fmt: skip
        joint.stop.over()
        summary = conclude(folder) if record is not None else {}
        ended = record is None or record.ended
        verdict, ended = json.loads(everyone(json.dumps([summary.get("verdict"), ended]))[0])
    if summary:
        show(job.kind, summary, as_json=options.json)
    if not ended:
        raise CommandError(f"interrupted by {joint.stop.asked}. {onward.how()}", Exit.INCONCLUSIVE)
    return int(VERDICTS[verdict])


class Joint(NamedTuple):
    """Processes that have joined.

    Attributes:
        folder: the run folder, of which all have heard.
        first: whether this is the process that writes.
        stop: whether to end early.
    """

    folder: Path
    first: bool
    stop: "Stop"


@contextlib.contextmanager
def together(options: Placed, job: Job, peers: Peers, *, kind: str, resumable: bool = True) -> Iterator[Joint]:
    """Joins the processes and starts the devices for the time of the block. What ends it early ends the command well.

    Args:
        options: the flags.
        job: what is run, as to its devices.
        peers: where the processes are.
        kind: what a new folder is named after.
        resumable: whether the command has the flag `--resume`.

    Raises:
        CommandError: see `run_errors`.
    """
    from sdc.multihost import everyone
    from sdc.train import PATIENCE, Stop, joined

    from . import signals
    from .progress import Waiting

    waiting = Waiting(peers)

    def start(processes: int) -> None:
        waiting.over()
        if processes > 1:
            keep_standard_output()
        with usage_errors():
            prepare_devices(options, check_devices(options.devices, job, processes))

    def too_late() -> None:
        give_up(f"interrupted by {stop.asked}, and no step came to its end within {PATIENCE:g} s")

    warnings.showwarning = _warn
    end_aborts_well()
    onward.resumable = resumable
    onward.folder = options.run or Path("runs")  # until the processes have agreed on one
    stop = Stop(too_late)
    with run_errors(options.run, resumable=resumable), waiting, joined(peers, start, give_up, stop):
        import jax

        named = everyone(str(options.run.absolute()) if options.run else "")
        onward.folder = folder = _shared_folder(named, kind)
        signals.gently(stop.ask)
        yield Joint(folder, jax.process_index() == 0, stop)


def _shared_folder(named: Sequence[str], kind: str) -> Path:
    """The run folder, which the first process makes; another one that a peer was given is a mistake."""
    from sdc.multihost import everyone
    from sdc.train import Incomparable

    folder = Path(everyone(named[0] or str(new_folder(kind)))[0])
    for process, other in enumerate(named):
        if other and Path(other) != folder:
            raise Incomparable(
                f"process {process} was given --run {other}, but process 0 writes to {folder}; give all the same folder"
            )
    return folder


def prepare_devices(options: Placed, count: int) -> None:
    """Prepares so many devices for this process.

    Raises:
        ValueError: see `prepare`.
    """
    from sdc.records import prepare

    prepare(
        cpu_devices=count,
        # The same for one process and several, for twins (up to four) and `sdc train`: their bits are compared.
        cpu_threads=max(os.cpu_count() or 1, 4 * options.data * options.model, options.devices or 0),
        only_cpu=options.devices is not None,
    )


def experiment(name: str, count: int, parts: Generator[str, None, Found]) -> Found:
    """Runs an experiment of so many parts on one device, and shows how far it is."""
    from sdc.records import prepare
    from sdc.train.studies import finish

    from .progress import CountProgress

    with usage_errors():
        prepare(cpu_devices=1, cpu_threads=os.cpu_count())
    with CountProgress(name, count) as progress:
        return finish(parts, progress.advance)


def new_folder(kind: str, named: Path | None = None) -> Path:
    """The folder that the flags name, or one below `runs/` of which there is none yet.

    Raises:
        SettingError: there is something in it already.
    """
    folder = named or Path("runs") / f"{kind}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    check_folder(folder, False, kind, resumable=False)
    return folder.absolute()


def check_folder(folder: Path, resume: bool, kind: str, *, resumable: bool = True) -> None:
    """Looks at the run folder that the flags name.

    Args:
        folder: the folder.
        resume: whether to continue what is in it.
        kind: kind of the record.
        resumable: whether the command has the flag `--resume`.

    Raises:
        ValueError: it is no folder, or holds a run that is not to be resumed, or none that could be.
    """
    if resume:
        from sdc.records import read_manifest

        read_manifest(folder, kind)
        return
    name = "RUN" if kind == "trace" else "run"
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        problem = "is no folder" if there == folder.absolute() else f"{there} is no folder"
        raise SettingError(name, folder, f"{problem}; name a new one")
    if there == folder.absolute() and any(folder.iterdir()):
        mend = ", or continue what is in it with --resume" if resumable else ""
        raise SettingError(name, folder, f"exists already; name another folder{mend}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SettingError(name, folder, f"cannot be made: {there} is not writable; name another folder")


def check_devices(given: int | None, job: Planned, processes: int) -> int:
    """Simulated devices of one process, which are known beforehand.

    Args:
        given: how many devices the flags ask for, over all processes; None for as many as are needed.
        job: what is to be run.
        processes: number of processes.

    Raises:
        SettingError: they are not as many as needed, or not as many for each process.
    """
    count = math.prod(job.axes.values())
    if given not in (None, count):
        product = " × ".join(f"{number} {axis}" for axis, number in job.axes.items())
        raise SettingError("devices", given, f"{product} needs {count} devices; change one of them")
    if count % processes:
        raise SettingError("processes", processes, f"{count} devices are not divisible by that; change one of them")
    return count // processes


def check_clock(job: Job, processes: int | None) -> None:
    """Looks whether the processes that flags name fit a real clock; what a cluster tells of them is looked at later.

    Raises:
        SettingError: they do not.
    """
    aggregation = job.aggregation if isinstance(job, Training) else None
    if aggregation is not None and aggregation.clocked and processes not in (None, job.data):
        raise aggregation.no_clock(job.data)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"sdc: warning: {message}", file=sys.stderr)
