"""`sdc bench`: runs a benchmark and prints its figures."""

import dataclasses
import importlib
import json
import os
import sys
from typing import Any

from rich.table import Table

from sdc.costs import prepare_compilers
from sdc.records import environment, prepare
from sdc.train import get_config
from sdc.train.studies import check_measurement

from .. import Output, usage_errors
from .options import BenchOptions


def run(options: BenchOptions) -> int:
    """Runs the benchmark and prints its figures; always returns 0: the bars are in BENCHMARKS.md."""
    config = options.config or ("tiny" if options.benchmark in ("campaign", "record") else "bench")
    options = dataclasses.replace(options, config=config)
    with usage_errors():
        check_measurement(options.steps, options.dtypes)
        get_config(config)
        benchmark = importlib.import_module(f"._{options.benchmark}", __package__)
        devices = getattr(benchmark, "DEVICES", 1)  # simulated ones of a CPU
        if options.benchmark == "targets":
            prepare_compilers()
        else:
            prepare(cpu_devices=devices, cpu_threads=os.cpu_count(), only_cpu=options.benchmark == "aggregation")
    measured: dict[str, Any] = benchmark.measure(options)
    about = environment()
    if options.json:
        result = {"environment": about, "config": config, "steps": options.steps, **measured}
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        _show(f"{options.benchmark}, config {config}, {about['device_kind']}", measured, benchmark.BARS)
    return 0


def _show(title: str, measured: dict[str, Any], bars: dict[str, float]) -> None:
    """Figures in rows, types in columns; only single numbers are shown."""
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("bar", justify="right")
    for dtype in measured:
        table.add_column(dtype, justify="right")
    names = dict.fromkeys(
        name for part in measured.values() for name, value in part.items() if isinstance(value, int | float)
    )
    for name in names:
        figures = [part.get(name) for part in measured.values()]
        bar = f"{bars[name]:g}" if name in bars else ""
        table.add_row(name, bar, *("" if value is None else f"{value:.4g}" for value in figures))
    Output().print(table)
