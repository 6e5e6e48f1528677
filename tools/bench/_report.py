"""`sdc bench report`: time and memory of the report of a long run."""

import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sdc.analysis import SUBMODULES
from sdc.records import Record

from .command import BenchOptions

STEPS, LAYERS, ELEMENTS = 100_000, 16, 4_194_304
BARS = {"seconds": 20.0, "megabytes": 500.0, "page_megabytes": 1.0}
REPORT = (
    "import resource, sys\n"
    "from sdc.tools.cli import run\n"
    "code = run(['report', sys.argv[1]])\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, file=sys.stderr)\n"
    "raise SystemExit(code)\n"
)


def measure(options: BenchOptions) -> dict[str, Any]:
    """Writes the record of 100,000 steps of twins, of which one in forty mismatches, and reports on it once."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        started = time.perf_counter()
        write_run(run, STEPS)
        written = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", REPORT, run], capture_output=True, text=True, check=False)
        ended = time.perf_counter()
        assert done.returncode == 1, done.stderr
        return {
            "report": {
                "steps": STEPS,
                "seconds": ended - written,
                "megabytes": float(done.stderr.splitlines()[-1]),
                "page_megabytes": (run / "report.html").stat().st_size / 1e6,
                "record_megabytes": sum(file.stat().st_size for file in run.glob("*.jsonl")) / 1e6,
                "writing_seconds": written - started,
            }
        }


def write_run(folder: Path, steps: int) -> None:
    """A record as twins in lock-step on two ranks write it: bursts of mismatches, losses that differ at every step."""
    draw = random.Random(0)
    about = {
        "steps": steps, "layers": LAYERS, "sync": "compute", "compare": "gated", "placement": "mesh", "twins": 2,
        "mesh": {"twin": 2, "data": 1, "model": 2}, "suspect": {"name": None, "simulated": False, "faults": []},
    }  # fmt: skip
    with Record.create(folder, about, kind="twin") as record:
        for step in range(steps):
            hits = [_hit(step, draw) for _ in range(draw.randrange(1, 4))] if step % 2000 < 50 else []
            record.line(_line(step, hits, draw), hits)
        record.finish({"verdict": "corrupt", "reason": "twins differ"})


def _hit(step: int, draw: random.Random) -> dict[str, Any]:
    found, severity = draw.randrange(1, 1000), draw.lognormvariate(2, 2)
    rank = {"mismatched": found, "relative_mean": severity, "relative_max": 9 * severity}
    return {
        "step": step, "microstep": 0, "site": draw.choice(SUBMODULES), "layer": draw.randrange(LAYERS),
        "checked": ELEMENTS, "mismatched": found, "zero_reference": 0, "nonfinite": 0, "injected": 0,
        "frequency": found / ELEMENTS, "severity": severity, "relative_max": 9 * severity,
        "ranks": [{"twin": 1, "data": 0, "model": draw.randrange(2), **rank}],
    }  # fmt: skip


def _line(step: int, hits: list[dict[str, Any]], draw: random.Random) -> dict[str, Any]:
    sites = {}
    for site in SUBMODULES:
        here = [hit for hit in hits if hit["site"] == site]
        found = sum(hit["mismatched"] for hit in here)
        sites[site] = {
            "checked": ELEMENTS * LAYERS, "mismatched": found, "zero_reference": 0, "nonfinite": 0, "undecided": 0,
            "injected": 0, "frequency": found / (ELEMENTS * LAYERS),
            "severity": max((hit["severity"] for hit in here), default=None),
        }  # fmt: skip
    loss, norm = 2 + 3 * math.exp(-step / 9000) + draw.gauss(0, 0.02), math.exp(draw.gauss(0, 0.2))
    compared = {"checked": 100_000_000, "mismatched": 0}
    return {
        "step": step, "loss": [loss] * 2, "gradient_norm": [norm] * 2, "learning_rate": 1e-3, "sites": sites,
        "seconds": 0.5 + draw.random() / 10, "state": compared, "gradient": compared, "gradient_difference": [0.0, 0.0],
        "noise_to_signal": [0.0, 0.0], "parameter_difference": [0.0, 0.0], "parameter_norm": [40.0 + norm] * 2,
    }  # fmt: skip
