"""`sdc study` repeats the experiments of a paper; `sdc abft` studies and calibrates checked products."""

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

import tyro

from sdc.checksums import Profile
from sdc.settings import SettingError
from sdc.train import Workload
from sdc.train.studies import (
    LEAST,
    CalibrationSettings,
    NodesSettings,
    ProductsSettings,
    ScarSettings,
    Sources,
    check_training,
)
from sdc.verdict import Exit

from .. import CommandError, Only, check_folder, experiment, new_folder, onward, run_errors, usage_errors

Text = Annotated[Workload, Only("config", "seed", "corpus", "tokenizer")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AggregationStudyCommand:
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
class PaftCommand(AggregationStudyCommand):
    """Accuracy and perplexity under inconsistent gradients, bursts, divergence against theory.

    Example: sdc study paft --run runs/paft
    """

    study: ClassVar[str] = "paft"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropComputeCommand(AggregationStudyCommand):
    """Speedup against drop rate and workers, measured and predicted, loss against steps and time.

    Example: sdc study dropcompute --run runs/dropcompute
    """

    study: ClassVar[str] = "dropcompute"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyCommand(AggregationStudyCommand):
    """Perplexity against loss rate, drift against theory.

    Example: sdc study lossy --run runs/lossy
    """

    study: ClassVar[str] = "lossy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowCommand(AggregationStudyCommand):
    """Which faulty ranks a shadow replica finds, how soon, and whom it names.

    Example: sdc study shadow --run runs/shadow
    """

    study: ClassVar[str] = "shadow"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScarStudyCommand:
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
    study: ScarSettings = dataclasses.field(default_factory=ScarSettings)
    sources: Sources = dataclasses.field(default_factory=Sources)
    run: Path | None = None
    """Run folder, a new one; by default one below runs/."""
    resume: bool = False
    """Go on with the study in the folder that --run names."""
    json: bool = False
    """Print the summary as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesStudyCommand:
    """Each simulated node beside each published figure of the real one (Ma et al. 2025): inside or not, and why.

    Example: sdc study nodes --nodes node1 node11 --run runs/nodes

    Fits anew what the published tables leave open; simulates runs of 4,500 steps at the study's size; predicts the
    noise in each node's gradients from the other nodes; trains small models for drift and losses. Exit codes: 0 done,
    2 bad usage, 3 interrupted.
    """

    study: NodesSettings = dataclasses.field(default_factory=NodesSettings)
    run: Path | None = None
    """Run folder, a new one; by default one below runs/."""
    json: bool = False
    """Print the summary as JSON, and nothing else, on standard output."""


StudyChoice: TypeAlias = (
    Annotated[PaftCommand, tyro.conf.subcommand("paft")]
    | Annotated[DropComputeCommand, tyro.conf.subcommand("dropcompute")]
    | Annotated[LossyCommand, tyro.conf.subcommand("lossy")]
    | Annotated[ShadowCommand, tyro.conf.subcommand("shadow")]
    | Annotated[ScarStudyCommand, tyro.conf.subcommand("scar")]
    | Annotated[NodesStudyCommand, tyro.conf.subcommand("nodes")]
)


@dataclasses.dataclass(frozen=True)
class StudyCommand:
    """Repeats the experiments of a paper, scaled down, and shows them beside the published ones.

    Example: sdc study paft --run runs/paft

    All workers live on one device. Exit codes: 0 done, 2 bad usage, 3 interrupted.
    """

    command: Annotated[StudyChoice, tyro.conf.arg(name="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsStudyCommand:
    """Measures what each checking scheme finds and what it flags by mistake, on the matrix products of real training.

    Example: sdc abft study --steps 20 --run runs/study

    Trains the configuration on this machine's healthy devices, judges every product of every step by every scheme
    (false alarms), and puts errors of known size and flips of known bits into the products of some steps (detection).
    Exit codes: 0 done, 2 bad usage.
    """

    text: Text = dataclasses.field(default_factory=Workload)
    study: Annotated[ProductsSettings, Only("dtypes", "steps", "where")] = dataclasses.field(
        default_factory=ProductsSettings
    )
    profile: Path | None = None
    """File that sdc abft calibrate wrote on this kind of device; by default assumptions about the platform are used."""
    run: Path | None = None
    """Run folder, a new one; by default one below runs/."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Measures how the devices of this machine round, on synthetic and on real products, and writes a profile.

    Example: sdc abft calibrate --out h200.json, then sdc train --abft --abft-profile h200.json

    It measures kappa (how fast errors of long sums grow), how float32 inputs are rounded, which products of the
    configuration's step should begin with the second tier, and whether the fused kernel is faster than XLA (GPU, TPU).
    A device that computes wrong numbers cannot be calibrated: check the largest margins that are printed. Exit codes: 0
    done, 2 bad usage, 3 inconclusive (products of sound size are flagged, by any threshold).
    """

    text: Text = dataclasses.field(default_factory=Workload)
    out: Path
    """The profile to write; a file that exists is not overwritten."""
    study: Annotated[CalibrationSettings, Only("dtypes", "steps")] = dataclasses.field(
        default_factory=CalibrationSettings
    )
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


AbftChoice: TypeAlias = (
    Annotated[ProductsStudyCommand, tyro.conf.subcommand("study")]
    | Annotated[CalibrateCommand, tyro.conf.subcommand("calibrate")]
)


@dataclasses.dataclass(frozen=True)
class AbftCommand:
    """Checksummed matrix products: study them, or calibrate them to a device.

    Example: sdc abft study --steps 20, or sdc abft calibrate --out profile.json
    """

    command: Annotated[AbftChoice, tyro.conf.arg(name="")]


def study(options: StudyCommand) -> int:
    """Runs the study and returns the exit code."""
    command = options.command
    if isinstance(command, ScarStudyCommand):
        return _scar(command)
    return _nodes(command) if isinstance(command, NodesStudyCommand) else _aggregation(command)


def _aggregation(options: AggregationStudyCommand) -> int:
    with usage_errors():
        check_training(LEAST if options.steps is None else options.steps, options.seed)
        folder = new_folder(options.study, options.run)
    from sdc.analysis import describe
    from sdc.analysis.studies import write_study
    from sdc.train.studies import STUDIES, chosen_tasks

    from .. import show

    with usage_errors():
        steps = {} if options.steps is None else {"steps": options.steps}
        chosen = STUDIES[options.study](seed=options.seed, **steps)
        tasks = chosen_tasks(options.workload, images=options.images, corpus=options.corpus)
    started = time.perf_counter()
    measured = experiment(options.study, chosen.count(tasks), chosen.run(tasks))
    manifest = {
        "command": ["sdc", *sys.argv[1:]],
        "seconds": round(time.perf_counter() - started),
        "options": {key: str(value) for key, value in dataclasses.asdict(options).items()},
    }
    with run_errors(folder, resumable=False):
        summary = write_study(folder, measured, manifest)
    show(summary, describe(folder).report, as_json=options.json)
    return Exit.CLEAN


def _scar(options: ScarStudyCommand) -> int:
    with usage_errors():
        if options.resume and options.run is None:
            raise SettingError("resume", None, "continues what is in the folder that --run names; give --run DIR")
        folder = options.run.absolute() if options.run else new_folder("scar")
        check_folder(folder, options.resume, "scar study")
        if not options.workload:
            raise SettingError("workload", None, "expected one or several; see --help")
        options.study.check()
    from sdc.analysis import draw_conclusion
    from sdc.records import prepare
    from sdc.train.studies import ScarStudy, record_study, subjects

    from .. import CountProgress, show

    with usage_errors():
        study = ScarStudy(**vars(options.study))
        ratings, documents = map(_path, (options.sources.ratings, options.sources.documents))
        sources = dataclasses.replace(options.sources, ratings=ratings, documents=documents)
        chosen = subjects(options.workload, sources)
        prepare(cpu_devices=os.cpu_count() or 1, cpu_threads=os.cpu_count())  # trials are shared out
    onward.folder = folder
    with run_errors(folder), CountProgress("scar", len(study.parts(chosen))) as progress:
        record_study(
            study, chosen, folder, resume=options.resume, command=["sdc", *sys.argv[1:]], on_part=progress.advance
        )
        found = draw_conclusion(folder)
    show(found.contents, found.report, as_json=options.json)
    return Exit.CLEAN


def _nodes(options: NodesStudyCommand) -> int:
    with usage_errors():
        folder = new_folder("nodes", options.run)
        options.study.check()
    from sdc.analysis import describe
    from sdc.analysis.studies import write_nodes_study
    from sdc.train.studies import NodesStudy

    from .. import show

    study = NodesStudy(**vars(options.study))
    with run_errors(folder, resumable=False):
        if not folder.exists():  # whether it can be made is told now, and not after minutes of work
            folder.mkdir(parents=True)
            folder.rmdir()  # a signal ends the process at once, and is to leave nothing behind
    started = time.perf_counter()
    measured = experiment("nodes", study.count(), study.run())
    manifest = {
        "command": ["sdc", *sys.argv[1:]],
        "seconds": round(time.perf_counter() - started),
        "settings": {"nodes": list(options.study.nodes), "runs": options.study.runs, "steps": options.study.steps},
    }
    with run_errors(folder, resumable=False):
        summary = write_nodes_study(folder, measured, manifest)
    show(summary, describe(folder).report, as_json=options.json)
    return Exit.CLEAN


def _path(source: str | Path) -> str | Path:
    """What holds a path separator, or is there, is a file or a folder."""
    return Path(source) if os.sep in str(source) or os.path.exists(source) else source


def abft(options: AbftCommand) -> int:
    """Runs the subcommand and returns the exit code."""
    return (
        _products(options.command) if isinstance(options.command, ProductsStudyCommand) else _calibrate(options.command)
    )


def _products(options: ProductsStudyCommand) -> int:
    with usage_errors():
        options.study.check()
        profile = Profile.read(options.profile) if options.profile else None
        folder = new_folder("study", options.run)
        loaded = options.text.load()
    from sdc.analysis import describe
    from sdc.analysis.studies import write_products_study
    from sdc.train.studies import ProductsStudy

    from .. import show

    study = ProductsStudy(**vars(options.study) | {"seed": options.text.seed})
    with run_errors(folder, resumable=False):
        measured = experiment("study", study.count(), study.run(*loaded, profile))
        about = {"command": ["sdc", *sys.argv[1:]], "profile": str(options.profile or "assumed of the platform")}
        summary = write_products_study(folder, measured, about)
    show(summary, describe(folder).report, as_json=options.json)
    return Exit.CLEAN


def _calibrate(options: CalibrateCommand) -> int:
    """Measures how the devices at hand round, and writes a profile."""
    with usage_errors():
        if options.out.exists():
            raise SettingError("out", options.out, "exists already; name another file, or remove it")
        if not options.out.parent.is_dir():
            raise SettingError("out", options.out, f"there is no folder {options.out.parent}; make it first")
        options.study.check()
        _check_writable(options.out)
        loaded = options.text.load()
    from sdc.train.studies import Calibration, CalibrationError

    from .. import show_profile

    calibration = Calibration(**vars(options.study) | {"seed": options.text.seed})
    with run_errors(options.out, resumable=False):
        try:
            profile = experiment("calibrate", calibration.count(), calibration.run(*loaded))
        except CalibrationError as error:
            raise CommandError(str(error), Exit.INCONCLUSIVE) from error
        profile.save(options.out)
    show_profile(profile, options.out, as_json=options.json)
    return Exit.CLEAN


def _check_writable(file: Path) -> None:
    """Makes the file and removes it again: to measure takes minutes, and permissions do not tell of every system."""
    try:
        file.touch(exist_ok=False)
        file.unlink()
    except OSError as error:
        raise SettingError("out", file, f"cannot be written ({error.strerror}); name another file") from error
