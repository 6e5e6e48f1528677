"""`sdc study`: runs a study and writes its report."""

import dataclasses
import sys
import time

from sdc.train.studies.settings import LEAST, check_training

from ..conduct import experiment, new_folder
from ..errors import Exit, run_errors, usage_errors
from ..study_options import StudyOptions


def run(options: StudyOptions) -> int:
    """Runs the study and returns the exit code."""
    with usage_errors():
        check_training(LEAST if options.steps is None else options.steps, options.seed)
        folder = new_folder(options.study, options.run)
    from sdc.analysis.studies import write_study
    from sdc.train.studies import STUDIES
    from sdc.train.studies.workloads import chosen_tasks

    from ..output import show

    with usage_errors():
        steps = {} if options.steps is None else {"steps": options.steps}
        chosen = STUDIES[options.study](seed=options.seed, **steps)
        tasks = chosen_tasks(options.workload, images=options.images, corpus=options.corpus)
    started = time.perf_counter()
    measured = experiment(options.study, chosen.count(tasks), chosen.run(tasks))
    manifest = {
        "command": ["sdc", *sys.argv[1:]],
        "seconds": round(time.perf_counter() - started),
        "options": {key: str(value) for key, value in dataclasses.asdict(options).items()},
    }
    with run_errors(folder, resumable=False):
        summary = write_study(folder, measured, manifest)
    show("aggregation study", summary, as_json=options.json)
    return int(Exit.CLEAN)
