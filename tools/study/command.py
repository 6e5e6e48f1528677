"""`sdc study`: runs a study and writes its report."""

import dataclasses
import os
import sys
import time
from pathlib import Path

from sdc.analysis.studies import write_study
from sdc.record.determinism import prepare
from sdc.train.images import read_images
from sdc.train.studies import STUDIES, Workload, convnet, finish, transformer

from ..errors import CommandError, Exit, storage_errors, usage_errors
from ..folders import new_folder
from ..output import show_findings
from ..progress import CountProgress
from .options import StudyOptions


def study(options: StudyOptions) -> int:
    """Runs the study and returns the exit code."""
    with usage_errors():
        steps = {} if options.steps is None else {"steps": options.steps}
        chosen = STUDIES[options.study](seed=options.seed, **steps)
    folder = new_folder(options.run, options.study)
    with usage_errors():
        workloads = _workloads(options)
        prepare(cpu_devices=1, cpu_threads=os.cpu_count())
    started = time.perf_counter()
    with CountProgress(options.study, chosen.count(workloads)) as progress:
        try:
            measured = finish(chosen.run(workloads), progress.advance)
        except KeyboardInterrupt as error:
            raise CommandError("interrupted; nothing was written: run the study again", Exit.INCONCLUSIVE) from error
    manifest = {
        "command": ["sdc", *sys.argv[1:]],
        "seconds": round(time.perf_counter() - started),
        "options": {key: str(value) for key, value in dataclasses.asdict(options).items()},
    }
    with storage_errors(folder):
        summary = write_study(folder, measured, manifest)
    show_findings(summary, as_json=options.json)
    return int(Exit.CLEAN)


def _workloads(options: StudyOptions) -> list[Workload]:
    found = []
    if options.workload != "transformer":
        images = options.images
        found.append(convnet(read_images(Path(images) if os.sep in images else images)))
    if options.workload != "convnet":
        found.append(transformer(options.corpus))
    return found
