"""`sdc abft`: the study and the calibration of checksummed products."""

import sys
from pathlib import Path

from sdc.checksums import Profile
from sdc.program import as_selector
from sdc.settings import SettingError
from sdc.train.studies import check_measurement

from .. import (
    AbftOptions,
    CalibrateOptions,
    CommandError,
    Exit,
    ProductsStudyOptions,
    experiment,
    new_folder,
    run_errors,
    usage_errors,
    workload_of,
)


def run(options: AbftOptions) -> int:
    """Runs the subcommand and returns the exit code."""
    return _study(options.command) if isinstance(options.command, ProductsStudyOptions) else _calibrate(options.command)


def _study(options: ProductsStudyOptions) -> int:
    with usage_errors():
        as_selector(options.where)
        profile = Profile.read(options.profile) if options.profile else None
        folder = new_folder("study", options.run)
        check_measurement(options.steps, options.dtypes)
        loaded = workload_of(options).load()
    from sdc.analysis.studies import write_products_study
    from sdc.train.studies import ProductsStudy

    from .. import show

    study = ProductsStudy(dtypes=options.dtypes, steps=options.steps, where=options.where, seed=options.seed)
    with run_errors(folder, resumable=False):
        measured = experiment("study", study.count(), study.run(*loaded, profile))
        about = {"command": ["sdc", *sys.argv[1:]], "profile": str(options.profile or "assumed of the platform")}
        summary = write_products_study(folder, measured, about)
    show("abft study", summary, as_json=options.json)
    return int(Exit.CLEAN)


def _calibrate(options: CalibrateOptions) -> int:
    """Measures how the devices at hand round, and writes a profile."""
    with usage_errors():
        if options.out.exists():
            raise SettingError("out", options.out, "exists already; name another file, or remove it")
        if not options.out.parent.is_dir():
            raise SettingError("out", options.out, f"there is no folder {options.out.parent}; make it first")
        check_measurement(options.steps, options.dtypes)
        _check_writable(options.out)
        loaded = workload_of(options).load()
    from sdc.train.studies import Calibration, CalibrationError

    from .. import show_profile

    calibration = Calibration(dtypes=options.dtypes, steps=options.steps, seed=options.seed)
    with run_errors(options.out, resumable=False):
        try:
            profile = experiment("calibrate", calibration.count(), calibration.run(*loaded))
        except CalibrationError as error:
            raise CommandError(str(error), Exit.INCONCLUSIVE) from error
        profile.save(options.out)
    show_profile(profile, options.out, as_json=options.json)
    return int(Exit.CLEAN)


def _check_writable(file: Path) -> None:
    """Makes the file and removes it again: to measure takes minutes, and permissions do not tell of every system."""
    try:
        file.touch(exist_ok=False)
        file.unlink()
    except OSError as error:
        raise SettingError("out", file, f"cannot be written ({error.strerror}); name another file") from error
