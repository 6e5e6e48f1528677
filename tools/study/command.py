"""`sdc study`: runs a study and writes its report."""

import dataclasses
import datetime
import importlib
import os
import sys
import time
from pathlib import Path

from sdc.analysis.aggregation import STUDY, Findings, summarize_findings
from sdc.analysis.report import write_report
from sdc.record.determinism import environment, prepare
from sdc.record.records import RunWriter
from sdc.train.images import read_images

from ..errors import CommandError, Exit, run_errors, usage_errors
from ..output import show
from ..progress import CountProgress
from .options import StudyOptions
from .workloads import Workload, convnet, transformer


def run(options: StudyOptions) -> int:
    """Runs the study and returns the exit code."""
    module = importlib.import_module(f".{options.study}", __package__)
    steps: int = module.STEPS if options.steps is None else options.steps
    if steps < 10:
        raise CommandError(f"--steps {steps}: expected at least 10, of which the last tell the result")
    if not 0 <= options.seed < 2**31 - 1:
        raise CommandError(f"--seed {options.seed}: expected a number from 0 to {2**31 - 2}")
    name = f"{options.study}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    folder = (options.run or Path("runs") / name).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"run folder {folder} exists already; name another with --run")
    with usage_errors():
        prepare(cpu_devices=1, cpu_threads=os.cpu_count())
        workloads = _workloads(options)
    started = time.perf_counter()
    findings = Findings()
    with CountProgress(options.study, module.count(workloads)) as progress:
        try:
            for doing, found in module.study(workloads, steps=steps, seed=options.seed):
                findings += found
                if doing:
                    progress.advance(doing)
        except KeyboardInterrupt as error:
            raise CommandError("interrupted; nothing was written: run the study again", Exit.INCONCLUSIVE) from error
    manifest = {
        "kind": STUDY,
        "command": ["sdc", *sys.argv[1:]],
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "study": options.study,
        "workers": module.WORKERS,
        "steps": steps,
        "seed": options.seed,
        "seconds": round(time.perf_counter() - started),
        "workloads": {workload.name: workload.source for workload in workloads},
        "options": {key: str(value) for key, value in dataclasses.asdict(options).items()},
        "environment": environment(),
    }
    summary = summarize_findings(options.study, findings)
    with run_errors(folder):
        with RunWriter.create(folder, manifest) as writer:
            writer.summary(summary)
        report = write_report(folder)
    show(STUDY, {**summary, "run": str(folder), "report": str(report)}, as_json=options.json)
    return int(Exit.CLEAN)


def _workloads(options: StudyOptions) -> list[Workload]:
    found = []
    if options.workload != "transformer":
        images = options.images
        found.append(convnet(read_images(Path(images) if os.sep in images else images)))
    if options.workload != "convnet":
        found.append(transformer(options.corpus))
    return found
