"""Runs of a decoder that compiles within seconds, in this process, and what their records say."""

import functools
import json
from pathlib import Path
from typing import Any

from sdc.analysis import conclude
from sdc.train import Loaded, Workload, run
from sdc.train.programs.config import PRESETS, ModelConfig, OptimizerConfig, TrainConfig
from sdc.train.specs import Job

MINI = TrainConfig(
    name="mini",
    model=ModelConfig(vocab_size=320, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=64),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, total_steps=1_000),
    sequence_length=32,
    batch_size=4,
    microsteps=2,
)
# So that commands can name it, here and in the processes that tests start.
PRESETS[MINI.name] = lambda: MINI
WORKLOAD = Workload(config=MINI)


@functools.cache
def loaded(workload: Workload) -> Loaded:
    """The data of a workload, read once for all tests."""
    return workload.load()


def execute(job: Job, **options: Any) -> dict[str, Any]:
    """Runs a job in its folder and returns the summary."""
    assert job.folder is not None
    job.check()
    assert run(job, loaded=loaded(job.workload), **options) is not None
    return conclude(job.folder)


def lines(folder: Path | str, name: str = "steps.jsonl") -> list[dict[str, Any]]:
    """The lines of a record, but for how long steps and saves took, and whether some were run again."""
    rows = [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]
    apart = ("seconds", "outlook", "details", "discarded", "checksum")
    return [{key: value for key, value in row.items() if key not in apart} for row in rows]
