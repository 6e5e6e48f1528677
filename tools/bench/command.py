"""`sdc bench`: the flags of the command, and the code that runs a benchmark and prints its figures."""

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import tyro

from .. import print_parts, usage_errors

# The module whose `BENCHMARKS` holds each benchmark.
MODULES = {
    "lockstep": "_twins", "delay": "_twins", "transform": "_transform", "campaign": "_transform", "abft": "_abft",
    "aggregation": "_aggregation", "report": "_records", "record": "_records", "checkpoint": "_records",
    "targets": "_targets", "burnin": "_burnin", "nodes": "_burnin", "guard": "_guard",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Measures what the tools cost, as ratios within one run.

    Example: sdc bench transform --json
    Example: sdc bench abft --steps 7 --dtypes float32

    Programs are compiled first and then take turns, so other load affects all of them equally. The figures are medians.
    lockstep: twins with lock-step, compared with twins without it. transform: fingerprint, inject, digest and
    rewriting, compared with the plain step. campaign: injections through one program, compared with a separate run for
    each injection. abft: checked matrix products and steps, compared with plain ones; false alarms and detected errors.
    aggregation: PAFT, lossy ZeRO-2, a shadow replica and DropCompute, compared with plain data parallelism, on
    simulated CPU devices. report: time and memory for the report of 100,000 steps. record: checksums and syncs of a
    record, as a share of the run's time. targets: digests, lock-step, fingerprint, inject and abft on TPUs and GPUs,
    with costs estimated by their compilers, without the hardware. delay: twins in two processes with a slow network
    between them, compared with a fast one; needs root. checkpoint: certificates and running checkpoints, compared with
    Orbax alone and with a training step. burnin: digests and comparison as a share of a level's time, checked matrix
    products, a quick level, a pool's digests, the summary of 1,000 hosts, and false alarms in 1,000 healthy rounds.
    nodes: simulated nodes of the study that a burn-in, a pair and a pool detect, compared with predictions (takes
    minutes). guard: comparing what a step computes twice, and a guard, compared with the plain step.
    """

    benchmark: Annotated[
        Literal[
            "lockstep",
            "transform",
            "campaign",
            "abft",
            "aggregation",
            "report",
            "record",
            "targets",
            "delay",
            "checkpoint",
            "burnin",
            "nodes",
            "guard",
        ],
        tyro.conf.Positional,
    ]
    """Benchmark to run."""
    config: str | None = None
    """Configuration; by default bench, or tiny for campaign and record."""
    steps: int = 15
    """Number of measured steps of each program, after two warm-up steps; a campaign makes ten injections per step."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Dtypes to measure; campaign, aggregation and record measure only float32."""
    json: bool = False
    """Print the figures as JSON."""


def run(options: BenchOptions) -> int:
    """Runs the benchmark and prints its figures; always returns 0, since only BENCHMARKS.md judges them."""
    from sdc.costs import prepare_compilers
    from sdc.records import environment, prepare
    from sdc.train import get_config
    from sdc.train.studies import check_measurement

    config = options.config or ("tiny" if options.benchmark in ("campaign", "record") else "bench")
    options = dataclasses.replace(options, config=config)
    with usage_errors():
        check_measurement(options.steps, options.dtypes)
        get_config(config)
        module = importlib.import_module(f".{MODULES[options.benchmark]}", __package__)
        benchmark = module.BENCHMARKS[options.benchmark]
        if options.benchmark == "targets":
            prepare_compilers()
        else:
            only_cpu = options.benchmark == "aggregation"
            prepare(cpu_devices=benchmark.devices, cpu_threads=os.cpu_count(), only_cpu=only_cpu)
    measured: dict[str, Any] = benchmark.measure(options)
    about = environment()
    if options.json:
        result = {"environment": about, "config": config, "steps": options.steps, **measured}
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        title = f"{options.benchmark}, config {config}, {about['device_kind']}"
        print_parts([_table(title, measured, benchmark.bars)])
    return 0


def _table(title: str, measured: dict[str, Any], bars: Mapping[str, float]) -> Any:
    """Returns a table with a row for each numeric figure and a column for each dtype."""
    from rich.table import Table

    table = Table(title=title)
    table.add_column("figure", no_wrap=True)
    for column in ("bar", *measured):
        table.add_column(column, justify="right")
    names = dict.fromkeys(
        name for part in measured.values() for name, value in part.items() if isinstance(value, int | float)
    )
    for name in names:
        figures = [part.get(name) for part in measured.values()]
        bar = f"{bars[name]:g}" if name in bars else ""
        table.add_row(name, bar, *("" if value is None else f"{value:.4g}" for value in figures))
    return table
