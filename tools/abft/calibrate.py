"""`sdc abft calibrate`: measures how the devices at hand round, and writes a profile."""

import dataclasses
import json
import sys
from collections import Counter
from typing import Any

import jax
import numpy as np
from rich.console import Console

import sdc
from sdc.checksums.calibration import Measured, begin_with_second, fit, measure
from sdc.checksums.kernel import time_both
from sdc.checksums.profile import Profile, hardware
from sdc.record.files import to_json
from sdc.train.config import get_config

from ..errors import CommandError, Exit, run_errors, usage_errors
from ..progress import CountProgress
from .options import CalibrateOptions
from .training import start, train


def calibrate(options: CalibrateOptions) -> int:
    """Measures, writes the profile, and returns the exit code."""
    start(options)
    with usage_errors():
        get_config(options.config)
        if options.out.exists():
            raise ValueError(f"--out {options.out} exists already; name another file, or remove it")
        if not options.out.parent.is_dir():
            raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}; make it first")
    with CountProgress("calibrate", 2 + 2 * len(options.dtypes)) as progress:
        errors: dict[str, Measured] = {}
        for dtype in options.dtypes:
            errors[dtype] = measure(dtype, seed=options.seed)
            progress.advance(f"{dtype}, sums")
        try:
            rounding = fit(errors.get("bfloat16"), errors.get("float32"))
        except ValueError as error:
            raise CommandError(
                f"the errors of synthetic products are too large to be rounding ({error}): this device may compute "
                "wrong numbers. No profile was written; compare with another device",
                Exit.INCONCLUSIVE,
            ) from error
        profile = Profile(rounding, measured_on=hardware())
        checked: Counter[str] = Counter()
        examined: Counter[str] = Counter()
        flagged: Counter[str] = Counter()
        margin = 0.0
        for dtype in options.dtypes:
            for flags, _, _ in train(options, dtype, lambda step: sdc.abft(step, profile=profile)):
                for name, flag in jax.device_get(flags).items():
                    checked[name] += int(np.sum(flag.checked))
                    examined[name] += int(np.sum(flag.examined))
                    flagged[name] += int(np.sum(flag.flagged))
                    margin = max(margin, float(np.max(flag.margin)))
            progress.advance(f"{dtype}, {options.config}")
        kernel = time_both() if jax.default_backend() == "gpu" else None
        progress.advance("done")
    profile = dataclasses.replace(
        profile,
        second_tier=begin_with_second(examined, checked),
        fused=kernel is not None and kernel["fused"] < kernel["separate"],
        measurements={
            "largest_error": {
                dtype: {str(depth): error for depth, error in found.relative.items()} for dtype, found in errors.items()
            },
            "config": options.config,
            "steps": options.steps,
            "checked": checked.total(),
            "examined": examined.total(),
            "flagged": flagged.total(),
            "largest_margin": margin,
            "kernel_seconds": kernel,
        },
    )
    if flagged.total():
        raise CommandError(
            f"{flagged.total():,} of {checked.total():,} rows of real products are flagged under the thresholds that "
            "the synthetic products ask for: this device may compute wrong numbers. No profile was written; compare "
            "with another device",
            Exit.INCONCLUSIVE,
        )
    with run_errors(options.out):
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
    console.print(f"kappa: {profile.rounding.kappa:g}; rounding of float32 inputs: {profile.rounding.inputs:g}")
    for dtype, errors in found["largest_error"].items():
        text = ", ".join(f"{error:.2g} (k={depth})" for depth, error in errors.items())
        console.print(f"largest |r| / (q + |cs|), {dtype}: {text}", soft_wrap=True)
    rows = f"{found['checked']:,} rows of {options.config}, {found['steps']} steps"
    console.print(f"{rows}: largest margin {float(found['largest_margin']):.3g}, none flagged")
    console.print(f"products that begin with the second tier: {', '.join(profile.second_tier) or 'none'}")
    if found["kernel_seconds"]:
        console.print(f"fused kernel: {json.dumps(found['kernel_seconds'])}; {'used' if profile.fused else 'not used'}")
    console.print(f"profile: {options.out}", soft_wrap=True)
