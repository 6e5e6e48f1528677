"""`sdc abft calibrate`: measures how the devices at hand round, and writes a profile."""

import json
import os
import sys
from typing import Any

from rich.console import Console

from sdc.checksums.profile import Profile, hardware
from sdc.record.determinism import prepare
from sdc.record.files import to_json
from sdc.train.config import get_config
from sdc.train.studies import Calibration, CalibrationError, finish

from ..errors import CommandError, Exit, setting_errors, storage_errors, usage_errors
from ..progress import CountProgress
from ..session import workload
from .options import CalibrateOptions, workload_of


def calibrate(options: CalibrateOptions) -> int:
    """Measures, writes the profile, and returns the exit code."""
    with usage_errors():
        get_config(options.config)
        chosen = Calibration(dtypes=options.dtypes, steps=options.steps, seed=options.seed)
        if options.out.exists():
            raise ValueError(f"--out {options.out} exists already; name another file, or remove it")
        if not options.out.parent.is_dir():
            raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}; make it first")
        prepare(cpu_devices=1, cpu_threads=os.cpu_count())
        config, dataset = workload(workload_of(options))
    try:
        with CountProgress("calibrate", chosen.count()) as progress, setting_errors():
            profile = finish(chosen.run(config, dataset), progress.advance)
    except CalibrationError as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error
    with storage_errors(options.out):
        profile.save(options.out)
    _show(profile, options)
    return int(Exit.CLEAN)


def _show(profile: Profile, options: CalibrateOptions) -> None:
    if options.json:
        sys.stdout.write(options.out.read_text(encoding="utf-8"))
        return
    console = Console(highlight=False)
    found: dict[str, Any] = to_json(profile.measurements)
    console.print(f"device: {hardware()['device_kind']}")
    console.print(f"kappa: {profile.arithmetic.kappa:g}; rounding of float32 inputs: {profile.arithmetic.inputs:g}")
    for dtype, errors in found["largest_error"].items():
        text = ", ".join(f"{error:.2g} (k={depth})" for depth, error in errors.items())
        console.print(f"largest |r| / (q + |cs|), {dtype}: {text}", soft_wrap=True)
    rows = f"{found['checked']:,} rows of {options.config}, {found['steps']} steps"
    console.print(f"{rows}: largest margin {float(found['largest_margin']):.3g}, none flagged")
    console.print(f"products that begin with the second tier: {', '.join(profile.second_tier) or 'none'}")
    if found["kernel_seconds"]:
        console.print(f"fused kernel: {json.dumps(found['kernel_seconds'])}; {'used' if profile.fused else 'not used'}")
    console.print(f"profile: {options.out}", soft_wrap=True)
