"""Flags of `sdc study` and `sdc abft`."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

import tyro

from sdc.faults import NODES

from .options import TextOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class AggregationStudyOptions:
    """What the studies of robust aggregation have in common."""

    study: ClassVar[str]
    workload: Literal["both", "convnet", "transformer"] = "both"
    """Train a small convolutional network on images, a small transformer on text, or both."""
    steps: int | None = None
    """Optimizer steps of each run; by default 200, 600 for lossy and 60 for shadow."""
    seed: int = 0
    """Seed of parameters, data and everything simulated."""
    images: str = "auto"
    """Images: fashion-mnist, digits, auto (fashion-mnist if installed, else digits), or a folder of idx files."""
    corpus: tuple[str, ...] = ("python",)
    """Text: python (the standard library's source), or files and folders of text or JSONL."""
    run: Path | None = None
    """Run folder, a new one; by default one below runs/."""
    json: bool = False
    """Print the summary as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaftOptions(AggregationStudyOptions):
    """Accuracy and perplexity under inconsistent gradients, bursts, divergence against theory.

    Example: sdc study paft --run runs/paft
    """

    study: ClassVar[str] = "paft"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropComputeOptions(AggregationStudyOptions):
    """Speedup against drop rate and workers, measured and predicted, loss against steps and time.

    Example: sdc study dropcompute --run runs/dropcompute
    """

    study: ClassVar[str] = "dropcompute"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyOptions(AggregationStudyOptions):
    """Perplexity against loss rate, drift against theory.

    Example: sdc study lossy --run runs/lossy
    """

    study: ClassVar[str] = "lossy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowOptions(AggregationStudyOptions):
    """Which faulty ranks a shadow replica finds, how soon, and whom it names.

    Example: sdc study shadow --run runs/shadow
    """

    study: ClassVar[str] = "shadow"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScarStudyOptions:
    """What losing a part of a training costs, beside the bound and the figures of SCAR (Qiao et al., ICML 2019).

    Example: sdc study scar --workload regression --run runs/scar

    Perturbations against theorem 3.2; partial against full recovery, for blocks lost at random and side by side; saves
    by priority, in turn and at random; a failure with real saves; what is predicted against what is measured. A study
    that was interrupted goes on with --resume. Exit codes: 0 done, 2 bad usage, 3 interrupted.
    """

    workload: tuple[
        Literal["regression", "factorization", "topics", "cnn-layers", "cnn-shards", "transformer"], ...
    ] = ("regression", "factorization", "topics", "cnn-layers", "cnn-shards", "transformer")
    """What is trained, one or several."""
    trials: int = 100
    """Failures of each training and case, a multiple of the starts."""
    starts: int = 20
    """First states of each training, at least 5: intervals are over them."""
    seed: int = 0
    """Seed of first states, data and everything simulated."""
    images: str = "auto"
    """Images: fashion-mnist, digits, auto (fashion-mnist if installed, else digits), or a folder of idx files."""
    table: Path | None = None
    """A CSV file of numbers, the class last (CoverType's, for instance), for the regression in the place of images."""
    ratings: str = "movielens-100k"
    """Ratings: movielens-100k, or a file of users, items and ratings, or of a matrix as Jester's."""
    documents: str = "reuters"
    """Documents: reuters, plays, or a folder of texts, such as that of the 20 Newsgroups."""
    corpus: tuple[str, ...] = ("python",)
    """Text: python (the standard library's source), or files and folders of text or JSONL."""
    archives: Path | None = None
    """Folder of the archives that movielens-100k, reuters and plays are read from; by default one in the cache."""
    run: Path | None = None
    """Run folder, a new one; by default one below runs/."""
    resume: bool = False
    """Go on with the study in the folder that --run names."""
    json: bool = False
    """Print the summary as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesStudyOptions:
    """Each simulated node beside each published figure of the real one (Ma et al. 2025): inside or not, and why.

    Example: sdc study nodes --nodes node1 node11 --run runs/nodes

    Fits anew what the published tables leave open; simulates runs of 4,500 steps at the study's size; predicts the
    noise in each node's gradients from the other nodes; trains small models for drift and losses. Exit codes: 0 done,
    2 bad usage, 3 interrupted.
    """

    nodes: tuple[str, ...] = NODES
    """Nodes to compare, node1 to node15; by default all."""
    runs: int = 100
    """Simulated runs of each node at the study's size, at least 20: intervals are over them."""
    steps: int = 80
    """Steps of the small models, at least 40."""
    seed: int = 0
    """Seed of everything simulated."""
    run: Path | None = None
    """Run folder, a new one; by default one below runs/."""
    json: bool = False
    """Print the summary as JSON, and nothing else, on standard output."""


StudyCommand: TypeAlias = (
    Annotated[PaftOptions, tyro.conf.subcommand("paft")]
    | Annotated[DropComputeOptions, tyro.conf.subcommand("dropcompute")]
    | Annotated[LossyOptions, tyro.conf.subcommand("lossy")]
    | Annotated[ShadowOptions, tyro.conf.subcommand("shadow")]
    | Annotated[ScarStudyOptions, tyro.conf.subcommand("scar")]
    | Annotated[NodesStudyOptions, tyro.conf.subcommand("nodes")]
)


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """Repeats the experiments of a paper, scaled down, and shows them beside the published ones.

    Example: sdc study paft --run runs/paft

    All workers live on one device. Exit codes: 0 done, 2 bad usage, 3 interrupted.
    """

    command: Annotated[StudyCommand, tyro.conf.arg(name="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsStudyOptions(TextOptions):
    """Measures what each checking scheme finds and what it flags by mistake, on the matrix products of real training.

    Example: sdc abft study --steps 20 --run runs/study

    Trains the configuration on this machine's healthy devices, judges every product of every step by every scheme
    (false alarms), and puts errors of known size and flips of known bits into the products of some steps (detection).
    Exit codes: 0 done, 2 bad usage.
    """

    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Types of activations and compute parameters to study."""
    steps: int = 20
    """Optimizer steps; the products of the first and of the last one get errors."""
    where: str = "products"
    """Which matrix products to study, a selector such as 'scope("*/ffn/*")'."""
    profile: Path | None = None
    """File that sdc abft calibrate wrote on this kind of device; by default assumptions about the platform are used."""
    run: Path | None = None
    """Run folder, a new one; by default one below runs/."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateOptions(TextOptions):
    """Measures how the devices of this machine round, on synthetic and on real products, and writes a profile.

    Example: sdc abft calibrate --out h200.json, then sdc train --abft --abft-profile h200.json

    It measures kappa (how fast errors of long sums grow), how float32 inputs are rounded, which products of the
    configuration's step should begin with the second tier, and whether the fused kernel is faster than XLA (GPU, TPU).
    A device that computes wrong numbers cannot be calibrated: check the largest margins that are printed. Exit codes: 0
    done, 2 bad usage, 3 inconclusive (products of sound size are flagged, by any threshold).
    """

    out: Path
    """The profile to write; a file that exists is not overwritten."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Types to measure."""
    steps: int = 5
    """Optimizer steps of the configuration, for each type."""


AbftCommand: TypeAlias = (
    Annotated[ProductsStudyOptions, tyro.conf.subcommand("study")]
    | Annotated[CalibrateOptions, tyro.conf.subcommand("calibrate")]
)


@dataclasses.dataclass(frozen=True)
class AbftOptions:
    """Checksummed matrix products: study them, or calibrate them to a device.

    Example: sdc abft study --steps 20, or sdc abft calibrate --out profile.json
    """

    command: Annotated[AbftCommand, tyro.conf.arg(name="")]
