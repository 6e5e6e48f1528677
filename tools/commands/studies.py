"""`sdc study` repeats the experiments of a paper; `sdc abft` studies and calibrates checked matrix products."""

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import tyro

from sdc.checksums import Profile
from sdc.settings import SettingError
from sdc.train import Workload
from sdc.train.finetuning import FinetuneStudy
from sdc.train.studies import (
    Calibration,
    DropComputeStudy,
    LossyStudy,
    NodesStudy,
    PaftStudy,
    ProductsStudy,
    ScarStudy,
    ShadowStudy,
    Sources,
    Study,
)
from sdc.verdict import Exit

from .. import CommandError, Only, ResultCommand, experiment, new_folder, onward, run_errors, usage_errors

if TYPE_CHECKING:
    from sdc.train.studies import RecordedParts

Text = Annotated[Workload, Only("config", "seed", "corpus", "tokenizer")]
TRAINED = Only("steps", "seed", "seeds")
NOISY = Only("workers", "steps", "variances", "burst_every", "seed", "seeds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedStudy(ResultCommand):
    """Flags that all studies share."""

    run: Path | None = None
    """New run folder; by default one below runs/."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumableStudy(RecordedStudy):
    """Flags that all studies with parts share."""

    resume: bool = False
    """Resume the study in the folder given with --run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AggregationStudyCommand(ResumableStudy):
    """Flags that the studies of robust aggregation share."""

    study: Annotated[Study[Any], TRAINED]
    workload: Literal["both", "convnet", "transformer"] = "both"
    """Train a small convolutional network on images, a small transformer on text, or both."""
    sources: Annotated[Sources, Only("images", "corpus")] = dataclasses.field(default_factory=Sources)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaftCommand(AggregationStudyCommand):
    """PAFT: the loss under inconsistent gradients, and the divergence compared with theory.

    Example: sdc study paft --run runs/paft
    Example: sdc study paft --workload convnet --workers 32 --variances 1e-3 1
    """

    study: Annotated[PaftStudy, NOISY] = dataclasses.field(default_factory=PaftStudy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropComputeCommand(AggregationStudyCommand):
    """DropCompute: measured and predicted speedup, by drop rate and number of workers.

    Example: sdc study dropcompute --run runs/dropcompute
    Example: sdc study dropcompute --steps 300
    """

    study: Annotated[DropComputeStudy, TRAINED] = dataclasses.field(default_factory=DropComputeStudy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyCommand(AggregationStudyCommand):
    """Lossy collectives: the perplexity at each loss rate, and the drift compared with theory.

    Example: sdc study lossy --run runs/lossy
    Example: sdc study lossy --steps 300
    """

    study: Annotated[LossyStudy, TRAINED] = dataclasses.field(default_factory=LossyStudy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowCommand(AggregationStudyCommand):
    """Shadow replicas: which faulty ranks they detect, how soon, and which of these ranks they identify.

    Example: sdc study shadow --run runs/shadow
    Example: sdc study shadow --steps 300
    """

    study: Annotated[ShadowStudy, TRAINED] = dataclasses.field(default_factory=ShadowStudy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScarStudyCommand(ResumableStudy):
    """SCAR: the cost of losing part of the state, compared with the bound and the paper.

    Example: sdc study scar --workload regression --run runs/scar
    Example: sdc study scar --run runs/scar --resume

    Makes three comparisons: the cost of perturbations with theorem 3.2 (Qiao et al., ICML 2019); partial with full
    recovery, if random or adjacent blocks are lost; and saving the blocks with the highest priority with saving blocks
    in turn or at random. Then measures the cost of a failure in a run that saves its state to disk. --resume continues
    an interrupted study. Exit codes: 0 done, 2 bad usage, 3 interrupted.
    """

    workload: tuple[
        Literal["regression", "factorization", "topics", "cnn-layers", "cnn-shards", "transformer"], ...
    ] = ("regression", "factorization", "topics", "cnn-layers", "cnn-shards", "transformer")
    """Models to train."""
    study: Annotated[ScarStudy, Only("trials", "starts", "seed")] = dataclasses.field(default_factory=ScarStudy)
    sources: Sources = dataclasses.field(default_factory=Sources)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesStudyCommand(ResumableStudy):
    """Simulated nodes, compared with every published figure for the real nodes.

    Example: sdc study nodes --nodes node1 node11 --run runs/nodes
    Example: sdc study nodes --runs 20

    Fits the parameters that the published tables (Ma et al. 2025) leave open; simulates runs of 4,500 steps at the
    study's size; predicts the noise in the gradients of each node from the figures of the other nodes; and trains small
    models to measure drift and losses. Exit codes: 0 done, 2 bad usage, 3 interrupted.
    """

    study: NodesStudy = dataclasses.field(default_factory=NodesStudy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneCommand(ResumableStudy):
    """Fine-tuning on simulated nodes: accuracy, and disagreement of predictions.

    Example: sdc study finetune --nodes node1 node11 --run runs/finetune
    Example: sdc study finetune --task openbookqa --steps 300 --run runs/finetune

    Fine-tunes a decoder on healthy and on simulated nodes with the same questions in the same order (Ma et al. 2025,
    tables 3 to 5), once for each seed. The default task needs nothing that is not installed and suits CPUs; the others
    fine-tune SmolLM2-135M-Instruct or --weights. Exit codes: 0 done, 2 bad usage, 3 interrupted.
    """

    study: Annotated[
        FinetuneStudy,
        Only("nodes", "task", "dtype", "steps", "batch", "length", "questions", "rate", "seeds", "seed"),
    ] = dataclasses.field(default_factory=FinetuneStudy)
    weights: Path | None = None
    """GGUF file of a Llama-style decoder (default: SmolLM2-135M-Instruct)."""
    archives: Path | None = None
    """Folder with the archives of the weights and the questions (default: a folder in the cache)."""


COMMAND = "from sdc.tools.cli import main; main()"
# Flags of each study at the small scale, in the order in which they run.
SMALL: dict[str, tuple[str, ...]] = {
    "paft": ("--steps", "60", "--seeds", "3"),
    "dropcompute": ("--steps", "60", "--seeds", "3"),
    "lossy": ("--steps", "80", "--seeds", "3"),
    "shadow": ("--steps", "30", "--seeds", "3", "--workload", "convnet"),
    "scar": ("--trials", "20", "--workload", "regression", "factorization", "cnn-layers", "cnn-shards", "transformer"),
    "nodes": ("--runs", "200", "--steps", "40"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllStudiesCommand(ResumableStudy):
    """All studies, one after the other, each in a folder of its own.

    Example: sdc study all --scale small --run runs/studies
    Example: sdc study all --scale small --run runs/studies --resume

    Prints how many claims of each paper were reproduced. Exit codes: 0 done, 2 bad usage, 3 interrupted, or a study
    failed.
    """

    scale: Literal["full", "small"] = "full"
    """Each study with its defaults (full), or with fewer steps, seeds and trials, shadow on images only, and SCAR
    without topics (small: about an hour on two cores)."""


StudyChoice: TypeAlias = (
    Annotated[PaftCommand, tyro.conf.subcommand("paft")]
    | Annotated[DropComputeCommand, tyro.conf.subcommand("dropcompute")]
    | Annotated[LossyCommand, tyro.conf.subcommand("lossy")]
    | Annotated[ShadowCommand, tyro.conf.subcommand("shadow")]
    | Annotated[ScarStudyCommand, tyro.conf.subcommand("scar")]
    | Annotated[NodesStudyCommand, tyro.conf.subcommand("nodes")]
    | Annotated[FinetuneCommand, tyro.conf.subcommand("finetune")]
    | Annotated[AllStudiesCommand, tyro.conf.subcommand("all")]
)


@dataclasses.dataclass(frozen=True)
class StudyCommand:
    """Repeats the experiments of a paper on a smaller scale.

    Example: sdc study paft --run runs/paft
    Example: sdc study nodes --nodes node1 node11

    All workers share one device, and the report shows the published figures next to the measured ones. Exit codes:
    0 done, 2 bad usage, 3 interrupted.
    """

    command: Annotated[StudyChoice, tyro.conf.arg(name="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsStudyCommand(RecordedStudy):
    """Measures the detections and false alarms of each checking scheme in real training.

    Example: sdc abft study --steps 20 --run runs/study
    Example: sdc abft study --dtypes bfloat16 --where 'scope("*/ffn/*")'

    Trains the configuration on this machine's healthy devices, and checks every matrix product of every step with every
    scheme to count false alarms. Injects errors of known size and flips of known bits into some steps to measure
    detection. Exit codes: 0 done, 2 bad usage.
    """

    text: Text = dataclasses.field(default_factory=Workload)
    study: Annotated[ProductsStudy, Only("dtypes", "steps", "where")] = dataclasses.field(default_factory=ProductsStudy)
    profile: Path | None = None
    """Profile that sdc abft calibrate wrote on this kind of device; by default, the profile assumed for the
    platform."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateCommand(ResultCommand):
    """Measures the rounding errors of this machine's devices, and writes a profile.

    Example: sdc abft calibrate --out h200.json
    Example: sdc train --abft --abft-profile h200.json

    Uses synthetic and real matrix products to measure kappa (how fast the errors of long sums grow), how the device
    rounds float32 inputs, which products of the configuration's step should start at the second tier, and whether the
    fused kernel is faster than XLA (GPU, TPU). Calibrate only a healthy device, and check the largest margins that the
    command prints. Exit codes: 0 done, 2 bad usage, 3 inconclusive (the errors are too large to be rounding errors).
    """

    text: Text = dataclasses.field(default_factory=Workload)
    out: Path
    """The profile to write; a file that exists is not overwritten."""
    study: Annotated[Calibration, Only("dtypes", "steps")] = dataclasses.field(default_factory=Calibration)


AbftChoice: TypeAlias = (
    Annotated[ProductsStudyCommand, tyro.conf.subcommand("study")]
    | Annotated[CalibrateCommand, tyro.conf.subcommand("calibrate")]
)


@dataclasses.dataclass(frozen=True)
class AbftCommand:
    """Studies checksummed matrix products, or calibrates a device.

    Example: sdc abft study --steps 20
    Example: sdc abft calibrate --out profile.json
    """

    command: Annotated[AbftChoice, tyro.conf.arg(name="")]


def study(options: StudyCommand) -> int:
    """Runs the study and returns the exit code."""
    command = options.command
    if isinstance(command, ScarStudyCommand):
        return _scar(command)
    if isinstance(command, AllStudiesCommand):
        return _all(command)
    chosen = command.study
    with usage_errors():
        chosen.check()
        folder = new_folder(
            chosen.kind if command.resume else chosen.name, command.run, resume=command.resume, resumable=True
        )
    if isinstance(chosen, FinetuneStudy):
        assert isinstance(command, FinetuneCommand)
        with usage_errors():
            given = chosen.read(weights=command.weights, archives=command.archives)
        return _resumable(command, folder, chosen.count(), functools.partial(chosen.run, given=given))
    if isinstance(chosen, NodesStudy):
        return _resumable(command, folder, chosen.count(), chosen.run)
    assert isinstance(command, AggregationStudyCommand)
    from sdc.train.studies import chosen_tasks

    with usage_errors():
        tasks = chosen_tasks(command.workload, command.sources)
    workloads = {task.name: task.source for task in tasks}
    return _resumable(command, folder, chosen.count(tasks), functools.partial(chosen.run, tasks), workloads=workloads)


def _all(options: AllStudiesCommand) -> int:
    """Runs each study in a process of its own, because they need different numbers of devices."""
    from sdc.records import RecordError, read_record

    from .. import print_parts, table, write_json

    with usage_errors():
        if options.resume and options.run is None:
            raise SettingError("resume", None, "needs the folder of the studies to resume; give --run DIR")
        folder = options.run.absolute() if options.run and options.resume else new_folder("studies", options.run)
        if options.resume and not any((folder / name / "manifest.json").exists() for name in SMALL):
            raise SettingError(
                "resume", folder, "contains no studies; give the folder of sdc study all, or no --resume"
            )
    onward.folder = folder
    rows, code = [], Exit.CLEAN
    for name, flags in SMALL.items():
        place, began = folder / name, time.perf_counter()
        words = [sys.executable, "-c", COMMAND, "study", name, "--run", str(place), "--json"]
        if options.resume and (place / "manifest.json").exists():
            words.append("--resume")
        words += flags if options.scale == "small" else ()
        checks = []  # of a study that has failed, or whose settings differ, no claim counts
        if subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode:
            code = Exit.INCONCLUSIVE
        else:
            with contextlib.suppress(RecordError):
                checks = (read_record(place).summary or {}).get("checks", [])
        answers, seconds = [check["holds"] for check in checks], round(time.perf_counter() - began)
        rows.append(
            {
                "study": name, "checks": len(checks), "hold": answers.count(True),
                "undecided": answers.count(None), "seconds": seconds, "run": str(place),
            }
        )  # fmt: skip
    if options.json:
        write_json({"studies": rows})
    else:
        title = f"Checks of claims of the papers and criteria of this project ({options.scale} scale)"
        print_parts([table(title, list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])])
    return code


def _resumable(
    command: AggregationStudyCommand | NodesStudyCommand | FinetuneCommand,
    folder: Path,
    count: int,
    run: "Callable[[RecordedParts], Generator[str, None, Any]]",
    **about: Any,
) -> int:
    """Runs a study with parts, except those on record, writes its measurements, and prints their summary."""
    from sdc.analysis import describe
    from sdc.analysis.studies import write_study
    from sdc.records import environment, prepare
    from sdc.train.studies import RecordedParts

    from .. import show

    with run_errors(folder):
        _check_place(folder)
    with usage_errors():
        prepare(cpu_devices=1, cpu_threads=os.cpu_count())
    onward.folder = folder
    manifest = {
        **command.study.manifest(), **about, "parts": count, "command": ["sdc", *sys.argv[1:]],
        "environment": environment(),
    }  # fmt: skip
    with run_errors(folder), RecordedParts.open(folder, manifest, resume=command.resume) as (record, parts):
        summary = write_study(record, experiment(command.study.name, count, run(parts)))
    show(summary, describe(folder).report, as_json=command.json)
    return Exit.CLEAN


def _check_place(folder: Path) -> None:
    """Raises OSError if a folder cannot be made, before minutes of work."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in made:  # a signal ends the process at once and should leave no empty folder
        place.rmdir()


def _recorded(
    command: RecordedStudy, folder: Path, parts: tuple[str, int, Generator[str, None, Any]], about: Mapping[str, Any]
) -> int:
    """Runs an experiment, writes its measurements into a folder, and prints their summary."""
    from sdc.analysis import describe
    from sdc.analysis.studies import write_study

    from .. import show

    with run_errors(folder, resumable=False):
        _check_place(folder)
        started = time.perf_counter()
        measured = experiment(*parts)
        seconds = round(time.perf_counter() - started)
        summary = write_study(folder, measured, command=["sdc", *sys.argv[1:]], seconds=seconds, **about)
    show(summary, describe(folder).report, as_json=command.json)
    return Exit.CLEAN


def _scar(options: ScarStudyCommand) -> int:
    with usage_errors():
        folder = new_folder("scar study", options.run, resume=options.resume, resumable=True)
        if not options.workload:
            raise SettingError("workload", None, "expected at least one; see --help")
        options.study.check()
    from sdc.analysis import draw_conclusion
    from sdc.records import prepare
    from sdc.train.studies import record_study, subjects

    from .. import CountProgress, show

    with usage_errors():
        ratings, documents = map(_path, (options.sources.ratings, options.sources.documents))
        sources = dataclasses.replace(options.sources, ratings=ratings, documents=documents)
        chosen = subjects(options.workload, sources)
        prepare(cpu_devices=os.cpu_count() or 1, cpu_threads=os.cpu_count())  # the devices share the trials
    onward.folder = folder
    with run_errors(folder), CountProgress("scar", len(options.study.parts(chosen))) as progress:
        record_study(
            options.study,
            chosen,
            folder,
            resume=options.resume,
            command=["sdc", *sys.argv[1:]],
            on_part=progress.advance,
        )
        found = draw_conclusion(folder)
    show(found.contents, found.report, as_json=options.json)
    return Exit.CLEAN


def _path(source: str | Path) -> str | Path:
    """Returns a source as a path if it contains a path separator or names an existing file."""
    return Path(source) if os.sep in str(source) or os.path.exists(source) else source


def abft(options: AbftCommand) -> int:
    """Runs the subcommand and returns the exit code."""
    command = options.command
    if isinstance(command, CalibrateCommand):
        return _calibrate(command)
    with usage_errors():
        command.study.check()
        profile = Profile.read(command.profile) if command.profile else None
        folder = new_folder("study", command.run)
        loaded = command.text.load()
    chosen = dataclasses.replace(command.study, seed=command.text.seed)
    parts = "study", chosen.count(), chosen.run(*loaded, profile)
    about = {"profile": str(command.profile or "assumed of the platform")}
    return _recorded(command, folder, parts, about)


def _calibrate(options: CalibrateCommand) -> int:
    """Measures how the devices of this machine round, and writes a profile."""
    out = options.out
    with usage_errors():
        if out.exists():
            raise SettingError("out", out, "exists already; choose another file, or remove it")
        if not out.parent.is_dir():
            raise SettingError("out", out, f"there is no folder {out.parent}; create it first")
        options.study.check()
        try:  # measuring takes minutes, and permissions do not show every obstacle
            out.touch(exist_ok=False)
            out.unlink()
        except OSError as error:
            raise SettingError("out", out, f"cannot be written ({error.strerror}); choose another file") from error
        loaded = options.text.load()
    from sdc.train.studies import CalibrationError

    from .. import show_profile

    calibration = dataclasses.replace(options.study, seed=options.text.seed)
    with run_errors(out, resumable=False):
        try:
            profile = experiment("calibrate", calibration.count(), calibration.run(*loaded))
        except CalibrationError as error:
            raise CommandError(str(error), Exit.INCONCLUSIVE) from error
        profile.save(out)
    show_profile(profile, out, as_json=options.json)
    return Exit.CLEAN
