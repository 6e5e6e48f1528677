"""`sdc abft`: the study and the calibration of checksummed products."""

import os
import sys

from sdc.checksums.profile import Profile
from sdc.settings import SettingError
from sdc.train.workload import Workload

from ..conduct import new_folder
from ..errors import CommandError, Exit, run_errors, usage_errors
from ..study_options import AbftOptions, CalibrateOptions, ProductsStudyOptions


def run(options: AbftOptions) -> int:
    """Runs the subcommand and returns the exit code."""
    return _study(options.command) if isinstance(options.command, ProductsStudyOptions) else _calibrate(options.command)


def _workload(options: ProductsStudyOptions | CalibrateOptions) -> Workload:
    """What is trained; its type is chosen later."""
    return Workload(config=options.config, seed=options.seed, corpus=options.corpus, tokenizer=options.tokenizer)


def _study(options: ProductsStudyOptions) -> int:
    from sdc.analysis.studies import write_products_study
    from sdc.record.determinism import prepare
    from sdc.train.studies import ProductsStudy, finish

    from ..output import show
    from ..progress import CountProgress

    with usage_errors():
        workload = _workload(options)
        workload.resolve()
        chosen = ProductsStudy(dtypes=options.dtypes, steps=options.steps, where=options.where, seed=options.seed)
        profile = Profile.read(options.profile) if options.profile else None
        folder = new_folder("study", options.run)
        config, dataset = workload.load()
        prepare(cpu_devices=1, cpu_threads=os.cpu_count())
    with run_errors(folder):
        with CountProgress("study", chosen.count()) as progress:
            measured = finish(chosen.run(config, dataset, profile), progress.advance)
        name = str(options.profile) if options.profile else "assumed of the platform"
        summary = write_products_study(folder, measured, {"command": ["sdc", *sys.argv[1:]], "profile": name})
    show("abft study", summary, as_json=options.json)
    return int(Exit.CLEAN)


def _calibrate(options: CalibrateOptions) -> int:
    """Measures how the devices at hand round, and writes a profile."""
    from sdc.record.determinism import prepare
    from sdc.train.studies import Calibration, CalibrationError, finish

    from ..output import show_profile
    from ..progress import CountProgress

    with usage_errors():
        workload = _workload(options)
        workload.resolve()
        chosen = Calibration(dtypes=options.dtypes, steps=options.steps, seed=options.seed)
        if options.out.exists():
            raise SettingError("out", options.out, "exists already; name another file, or remove it")
        if not options.out.parent.is_dir():
            raise SettingError("out", options.out, f"there is no folder {options.out.parent}; make it first")
        config, dataset = workload.load()
        prepare(cpu_devices=1, cpu_threads=os.cpu_count())
    with run_errors(options.out):
        try:
            with CountProgress("calibrate", chosen.count()) as progress:
                profile = finish(chosen.run(config, dataset), progress.advance)
        except CalibrationError as error:
            raise CommandError(str(error), Exit.INCONCLUSIVE) from error
        profile.save(options.out)
    show_profile(profile, options.out, as_json=options.json)
    return int(Exit.CLEAN)
