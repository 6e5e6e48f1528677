"""`sdc bench record`: what it costs that a record cannot lose anything unseen, as a share of the time of the run."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from sdc.analysis import final_states
from sdc.records import Record, encode
from sdc.schema import RunManifest
from sdc.train import Twins, Workload, run
from sdc.train.programs import place

from .command import BenchOptions

LINES, TURNS = 1000, 5
DEVICES = 2
BARS = {"share": 0.01}


def measure(options: BenchOptions) -> dict[str, Any]:
    """Trains twins, and writes 1,000 lines like theirs with checksums and syncs, and without, in turns."""
    job = Twins(workload=Workload(config=str(options.config)), steps=options.steps + 2)
    every = job.checkpoint_every
    compiling, last = _last_comparison(job)
    with tempfile.TemporaryDirectory() as folder:
        trained = run(Twins(workload=job.workload, steps=job.steps, folder=Path(folder) / "run"))
        assert trained is not None
        rows = [trained.lines[2 + step % options.steps] for step in range(LINES)]
        seconds: dict[str, list[float]] = {"sealed": [], "plain": []}
        for turn in range(TURNS):
            seconds["sealed"].append(_sealed(Path(folder) / f"sealed{turn}", rows, every))
            seconds["plain"].append(_plain(Path(folder) / f"plain{turn}", rows))
    step = statistics.median(row["seconds"] for row in rows)
    added = statistics.median(a - b for a, b in zip(seconds["sealed"], seconds["plain"], strict=True)) + last
    return {
        "float32": {
            "share": added / (LINES * step),
            "added_seconds": added,
            "lines_seconds": statistics.median(seconds["sealed"]),
            "lines_seconds_plain": statistics.median(seconds["plain"]),
            "last_comparison_seconds": last,
            "compiling_digests_seconds": compiling,
            "step_seconds": step,
        }
    }


def _sealed(folder: Path, rows: list[dict[str, Any]], every: int) -> float:
    """Seconds to write lines as a run does that saves a checkpoint `every` so many steps."""
    with Record.create(folder, {}, kind="twin") as record:
        started = time.perf_counter()
        for step, row in enumerate(rows):
            record.line({**_own(row), "step": step})
            if (step + 1) % every == 0:
                record.sync()
        return time.perf_counter() - started


def _plain(file: Path, rows: list[dict[str, Any]]) -> float:
    """Seconds to append the same lines to a file, each handed to the system."""
    with file.open("ab") as lines:
        started = time.perf_counter()
        for step, row in enumerate(rows):
            lines.write(encode({**_own(row), "step": step}).encode() + b"\n")
            lines.flush()
        return time.perf_counter() - started


def _own(row: dict[str, Any]) -> dict[str, Any]:
    """What the run itself had in a line."""
    return {key: value for key, value in row.items() if key not in ("details", "discarded")}


def _last_comparison(job: Twins) -> tuple[float, float]:
    """Seconds to digest the final states and compare them: what compiling takes, which any run does once, and the rest.

    The summary of a run had the digests before they were compared.
    """
    config, _ = job.load()
    placement = place(twins=job.number, data=job.data, model=job.model, kind=job.layout, devices=jax.devices())
    program = job.program(config, placement, donate=False)
    state = program.init(0)
    times = [time.perf_counter()]
    for _ in range(2):
        assert final_states(RunManifest(kind=job.kind, twins=job.number), program.digest(state)) is None
        times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]
