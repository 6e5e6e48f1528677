"""`sdc abft study`: false alarms and detection of every scheme, on the products of real training."""

import os
import sys

from sdc.analysis.studies import write_products_study
from sdc.checksums.profile import Profile
from sdc.record.determinism import prepare
from sdc.train.config import get_config
from sdc.train.studies import ProductsStudy, finish

from ..errors import Exit, setting_errors, storage_errors, usage_errors
from ..folders import new_folder
from ..output import show_study
from ..progress import CountProgress
from ..session import workload
from .options import ProductsStudyOptions, workload_of


def study(options: ProductsStudyOptions) -> int:
    """Runs the study and returns the exit code."""
    with usage_errors():
        get_config(options.config)
        chosen = ProductsStudy(dtypes=options.dtypes, steps=options.steps, where=options.where, seed=options.seed)
        prepare(cpu_devices=1, cpu_threads=os.cpu_count())
        profile = Profile.load(options.profile) if options.profile else None
    folder = new_folder(options.run, "study")
    with usage_errors():
        config, dataset = workload(workload_of(options))
    with CountProgress("study", chosen.count()) as progress, setting_errors():
        measured = finish(chosen.run(config, dataset, profile), progress.advance)
    name = str(options.profile) if options.profile else "assumed of the platform"
    with storage_errors(folder):
        summary = write_products_study(folder, measured, {"command": ["sdc", *sys.argv[1:]], "profile": name})
    show_study(summary, as_json=options.json)
    return int(Exit.CLEAN)
