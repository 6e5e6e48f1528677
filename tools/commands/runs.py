"""`sdc twin`, `sdc train` and `sdc trace` execute a training run; `sdc campaign` injects faults one at a time."""

import dataclasses
import sys

from sdc import analysis, tools, train
from sdc.train import CampaignJob, Tracing, Training, Twins
from sdc.verdict import Exit

from .. import JobCommand, ResultCommand, execute as execute, onward, run_errors, usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwinCommand(JobCommand):
    """Trains twins side by side and compares them bit for bit.

    Example: sdc twin --model 2 --suspect node11 --steps 20
    Example: sdc twin --steps 1350 --coordinator 10.0.0.1:4321 --processes 2 --process 0

    A simulated fault strikes the last twin, unless the fault specifies another. Without --suspect and --fault, nothing
    is simulated, and the run tests real hosts, with one twin on each. Exit codes: 0 clean, 1 corruption found, 2 bad
    usage, 3 inconclusive.
    """

    job: Twins


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand(JobCommand):
    """Trains without twins; supports checks and aggregation methods.

    Example: sdc train --steps 20 --abft --run runs/checked
    Example: sdc train --data 4 --steps 50 --aggregate noise,sigma=0.01+paft,max_period=20

    Exit codes: 0 done, and clean if anything was checked (--abft, --guard, --aggregate shadow), 1 corruption found, 2
    bad usage, 3 inconclusive (too few checks, a suspicion of the guard, or a flagged row that was reproduced, so that
    only another device can show whether it is wrong).
    """

    job: Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceCommand(JobCommand):
    """Records a digest of every selected value at every step.

    Example: sdc trace runs/golden --steps 20 --where 'primitive("dot_general")'
    Example: sdc trace runs/suspect --steps 20 --where 'primitive("dot_general")' --against runs/golden

    Trace the same run on two machines or on two days, then compare the traces with `sdc diff`; with --against, the
    comparison takes place during the run. Exit codes: 0 done (with --against, the traces agree), 1 the traces differ, 2
    bad usage, 3 inconclusive.
    """

    job: Tracing


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignCommand(ResultCommand):
    """Injects thousands of single faults and classifies the outcomes.

    Example: sdc campaign --injections 1000 --fault bitflip nan --run runs/campaign
    Example: sdc campaign --where 'argument("0/params/*")' --fault stuck1,row

    Every injection starts from the clean state that precedes its step, and all injections share one compiled program.
    Exit codes: 0 done, 2 bad usage, 3 inconclusive (the clean run is not reproducible).
    """

    job: CampaignJob
    devices: int | None = None
    """Simulate this many CPU devices; by default as many as needed if there is no accelerator."""


def campaign(command: CampaignCommand) -> int:
    with usage_errors():
        command.job.check()
        devices = tools.check_devices(command.devices, command.job, 1)
        folder = tools.new_folder("campaign", command.job.folder, resume=command.job.resume, resumable=True)
        job = dataclasses.replace(command.job, folder=folder)
        loaded = job.load()
    with usage_errors():
        done = train.rows_done(job, folder)
        tools.prepare_devices(job, command.devices, devices)
    onward.folder = folder
    with run_errors(folder), tools.InjectionProgress(job.injections, first=done) as progress:
        train.run_campaign(job, loaded=loaded, on_row=progress.update, command=["sdc", *sys.argv[1:]])
        found = analysis.draw_conclusion(folder)
    tools.show(found.contents, found.report, as_json=command.json)
    return Exit.CLEAN
