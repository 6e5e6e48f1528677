"""Runs a job from its spec to its exit code: checks, processes, devices, folder.

Errors in flags and files are reported before JAX is imported, before the command waits for a peer, and before a device
starts.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import sys
import warnings
from collections.abc import Generator, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sdc import analysis, integrations, records, tools, train
from sdc._lazy import jax
from sdc.settings import SettingError
from sdc.train import CampaignJob, Job, Loaded, Peers, Training, studies
from sdc.verdict import Exit, exit_code

from .parse import ResultCommand, require
from .runtime import (
    CommandError,
    end_aborts_well,
    gently,
    give_up,
    keep_standard_output,
    onward,
    run_errors,
    usage_errors,
)

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobCommand(ResultCommand):
    """A job, and the processes and devices that run it."""

    job: Job
    peers: Peers = dataclasses.field(default_factory=Peers)
    devices: int | None = None
    """Number of simulated CPU devices in all processes together; by default, as many as needed if there is no
    accelerator."""
    tensorboard: str | None = None
    """Also write loss, checks and findings of each step into this folder, for TensorBoard."""


def execute(command: JobCommand) -> int:
    loaded = check_job(command.job, command.peers, command.devices)
    if command.tensorboard is not None:
        require("--tensorboard", "tensorboard")
        with usage_errors():
            check_writable(Path(command.tensorboard))
    # From here on peers and devices are needed.
    from sdc.multihost import everyone

    job = command.job
    with together(job, command.peers, command.devices) as joint:
        folder = joint.folder
        with tools.Progress(job.steps, show=joint.first) as progress, contextlib.ExitStack() as stack:
            writer: integrations.TensorBoardWriter | None = None

            def show(row: Mapping[str, Any]) -> None:
                nonlocal writer
                progress.update(row)
                if command.tensorboard is None or not joint.first:
                    return
                if writer is None:  # the folder may lie in that of the run, which must be new
                    writer = stack.enter_context(integrations.TensorBoardWriter(command.tensorboard))
                integrations.write_scalars(writer, row["step"], row)

            record = train.run(
                dataclasses.replace(job, folder=folder), loaded=loaded, devices=jax.devices(),
                on_step=show, command=["sdc", *sys.argv[1:]], stop=joint.stop.reached,
            )  # fmt: skip
        joint.stop.over()
        found = analysis.draw_conclusion(folder) if record is not None else None
        ended = record is None or record.ended
        verdict, ended = json.loads(everyone(json.dumps([found and found.verdict, ended]))[0])
    if found is not None:
        tools.show(found.contents, found.report, as_json=command.json)
    if not ended:
        raise CommandError(f"interrupted by {joint.stop.asked}. {onward.how()}", Exit.INCONCLUSIVE)
    return exit_code(verdict)


def check_writable(folder: Path) -> None:
    """Raises SettingError unless a folder can be made and written."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "cannot be written" if there.is_dir() else "is not a folder"
        raise SettingError("tensorboard", folder, f"{there} {what}; give another folder")


def check_job(job: Job, peers: Peers, devices: int | None, *, kind: str | None = None) -> Loaded:
    """Checks a job's flags and files, and reads its data. `kind` is given for commands without a flag `--resume`."""
    with usage_errors():
        peers.check()
        job.check()
        check_devices(devices, job, peers.processes or 1)
        aggregation = job.aggregation if isinstance(job, Training) else None
        # The number of processes that a cluster reports is checked later.
        if aggregation is not None and aggregation.clocked and peers.processes not in (None, job.data):
            raise aggregation.no_clock(job.data)
        # All processes must learn that a folder is taken, so several processes join before they look.
        if job.folder is not None and peers.coordinator is None:
            check_folder(job.folder, job.resume, kind or job.kind, resumable=kind is None)
        return job.load()


class Joint(NamedTuple):
    folder: Path  # folder of the run, the same in all processes
    first: bool  # whether this process writes the record
    stop: "train.Stop"  # requests an early end


@contextlib.contextmanager
def together(job: Job, peers: Peers, devices: int | None, *, kind: str | None = None) -> Iterator[Joint]:
    """Joins the processes and starts the devices for a `with` block; errors in the block end the command with an exit
    code.

    `kind` is given for commands without a flag `--resume`, as in `check_job`.
    """
    from sdc.multihost import everyone

    def start(processes: int) -> None:
        there.set()
        if processes > 1:
            keep_standard_output()
        with usage_errors():
            prepare_devices(job, devices, check_devices(devices, job, processes))

    def too_late() -> None:
        give_up(stop.late())

    warnings.showwarning = lambda message, *_, **__: print(f"sdc: warning: {message}", file=sys.stderr)
    end_aborts_well()
    onward.resumable = kind is None
    onward.folder = Path(job.folder or "runs")  # until the processes agree on one
    stop = train.Stop(too_late)
    with (
        run_errors(job.folder, resumable=kind is None),
        tools.waiting(peers) as there,
        train.joined(peers, start, give_up, stop),
    ):
        # The first process makes the run folder; a peer that was given another folder is an error.
        named = everyone(str(Path(job.folder).absolute()) if job.folder else "")
        onward.folder = folder = Path(everyone(named[0] or str(new_folder(kind or job.kind)))[0])
        for process, other in enumerate(named):
            if other and Path(other) != folder:
                raise train.Incomparable(
                    f"process {process} was given --run {other}, but process 0 writes to {folder}; give all "
                    "processes the same folder"
                )
        gently(stop.ask)
        yield Joint(folder, jax.process_index() == 0, stop)


def prepare_devices(job: Job | CampaignJob, given: int | None, count: int) -> None:
    """Prepares `count` devices in this process; `given` is the number that the flags request for all processes
    together."""
    records.prepare(
        cpu_devices=count,
        # Equal in one and several processes, and for twins (up to four) and `sdc train`, as their bits are compared.
        cpu_threads=max(os.cpu_count() or 1, 4 * job.data * job.model, given or 0),
        only_cpu=given is not None,
    )


def experiment(name: str, count: int, parts: Generator[str, None, Found]) -> Found:
    """Runs an experiment of `count` parts on one device, and shows its progress."""
    with usage_errors():
        records.prepare(cpu_devices=1, cpu_threads=os.cpu_count())
    with tools.CountProgress(name, count) as progress:
        return studies.finish(parts, progress.advance)


def new_folder(
    kind: str, named: str | PathLike[str] | None = None, *, resume: bool = False, resumable: bool = False
) -> Path:
    """Returns the folder given by the flags, or a new one below `runs/`; it is empty or contains the run to resume."""
    if resume and named is None:
        raise SettingError("resume", None, "needs the folder of the run to resume; give --run DIR")
    folder = Path(named or f"runs/{kind.split()[0]}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
    check_folder(folder, resume, kind, resumable=resumable)
    return folder.absolute()


def check_folder(folder: str | PathLike[str], resume: bool, kind: str, *, resumable: bool = True) -> None:
    """Raises an error if the run folder cannot be created or, with `resume`, if the run in it cannot be resumed."""
    if resume:
        records.read_manifest(folder, kind)
        return
    folder = Path(folder)
    limits = dict.fromkeys(folder.absolute().parts, os.pathconf("/", "PC_NAME_MAX"))
    limits[str(folder.absolute())] = os.pathconf("/", "PC_PATH_MAX") - 1  # less the byte that ends it
    for text, limit in limits.items():
        if len(os.fsencode(text)) > limit:
            problem = f"has more than {limit} bytes, the limit of the system; choose another folder"
            raise SettingError("folder", f"{text[:40]}…", problem)
    records.Record.check_owner(folder)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        problem = "is not a folder" if there == folder.absolute() else f"{there} is not a folder"
        raise SettingError("folder", folder, f"{problem}; choose a new one")
    if there == folder.absolute() and not records.Record.is_free(folder):
        mend = ", or continue its run with --resume" if resumable else ""
        raise SettingError("folder", folder, f"exists already; choose another folder{mend}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SettingError("folder", folder, f"cannot be created: {there} is not writable; choose another folder")


def check_devices(given: int | None, job: Job | CampaignJob, processes: int) -> int:
    """Returns the number of simulated devices of one process; `given` is the number for all processes together."""
    count = math.prod(job.axes.values())
    if given not in (None, count):
        product = " × ".join(f"{number} {axis}" for axis, number in job.axes.items())
        raise SettingError("devices", given, f"{product} needs {count} devices; change one of them")
    if count % processes:
        raise SettingError(
            "processes",
            processes,
            f"the number of devices, {count}, is not divisible by this number; change one of them",
        )
    return count // processes
