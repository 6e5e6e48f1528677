"""Flags of `sdc study`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """Reproduces the tables and figures of a method of robust aggregation, scaled down, beside the published ones.

    Example: sdc study paft --run runs/paft

    paft: accuracy and perplexity under inconsistent gradients, bursts, divergence against theory. dropcompute: speedup
    against drop rate and workers, measured and predicted, loss against steps and time. lossy: perplexity against loss
    rate, drift against theory. shadow: which faulty ranks a shadow replica finds, how soon, and whom it names. All
    workers live on one device. Exit codes: 0 done, 2 bad usage.
    """

    study: Annotated[Literal["paft", "dropcompute", "lossy", "shadow"], tyro.conf.Positional]
    """Which."""
    workload: Literal["both", "convnet", "transformer"] = "both"
    """Train a small convolutional network on images, a small transformer on text, or both."""
    steps: int | None = None
    """Optimizer steps of each run; by default 200, 600 for lossy and 60 for shadow."""
    seed: int = 0
    """Seed of parameters, data and everything simulated."""
    images: str = "auto"
    """Images: fashion-mnist, digits, auto (fashion-mnist where at hand, else digits), or a folder of idx files."""
    corpus: tuple[str, ...] = ("python",)
    """Text: python (the standard library's source), or files and folders of text or JSONL."""
    run: Path | None = None
    """Run folder, a new one; by default one below runs/."""
    json: bool = False
    """Print the summary as JSON, and nothing else, on standard output."""
