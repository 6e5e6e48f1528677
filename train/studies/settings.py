"""The studies as specs: what to run, checked before JAX is imported. `run` and `parts` import the experiments."""

from __future__ import annotations

import abc
import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, overload

from sdc.aggregation import BoundedLogNormal
from sdc.nodes import NODES
from sdc.program import as_selector
from sdc.settings import LARGEST_SEED, Flag, SettingError, Within, check_fields

from ..programs import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    import optax

    from sdc.checksums import Profile

    from .. import Dataset, TrainConfig
    from ._scar import Part, Subject
    from .measurements import (  # noqa: F401, in quotes below
        DropComputeMeasured,
        LossyMeasured,
        NodesMeasured,
        PaftMeasured,
        ProductsMeasured,
        ShadowMeasured,
    )
    from .workloads import Task

MOST = 1_000_000  # steps of a study, which keeps what it measures of each
# Runs and steps of the study of nodes, and trials of that of SCAR, of which all are kept in memory.
MOST_NODES, MOST_TRIALS = 1000, 100_000
WINDOW = 8  # steps for which each kind of error lasts, where responses of small models are measured
# Layers, width and tokens of the small models; nodes train the first, both show how gradients answer to errors.
SIZES = ((4, 64, 64), (16, 64, 64))

# Where the experiments of the aggregation studies are.
EXPERIMENTS = {"paft": "._paft", "dropcompute": ".dropcompute", "lossy": ".lossy", "shadow": "._shadow"}

Found = TypeVar("Found")
Measurement = TypeVar("Measurement", covariant=True)


def _check_steps(steps: int, least: int, why: str = "") -> None:
    if steps < least:
        raise SettingError("steps", steps, f"expected at least {least}{why}")
    if steps > MOST:
        raise SettingError("steps", steps, f"expected at most {MOST:,}, since what is measured of each is kept")


def check_measurement(steps: int, dtypes: Sequence[str]) -> None:
    """Checks the settings of a measurement of products."""
    _check_steps(steps, 1)
    if not dtypes:
        raise SettingError("dtypes", None, "expected float32, bfloat16 or both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(abc.ABC, Generic[Measurement]):
    """A study of a method of robust aggregation.

    Attributes:
        workers: workers of its trainings, all on one device.
    """

    name: ClassVar[str]
    workers: int
    steps: int
    """Optimizer steps of each training."""
    seed: int = 0
    """Seed of parameters, data and everything simulated."""

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that names the wrong one."""
        _check_steps(self.steps, 10, ", of which the last tell the result")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise SettingError("seed", self.seed, f"expected a number from 0 to {LARGEST_SEED}")

    def about(self, workloads: Sequence[Task]) -> Mapping[str, Any]:
        """What `Measured` says of the study itself."""
        return {"study": self, "sources": {workload.name: workload.source for workload in workloads}}

    @abc.abstractmethod
    def count(self, workloads: Sequence[Task]) -> int:
        """How many parts `run` yields."""

    def run(self, workloads: Sequence[Task]) -> Generator[str, None, Measurement]:
        """Runs the study: yields what has just been done, and returns what was measured."""
        self.check()
        module = importlib.import_module(EXPERIMENTS[self.name], __package__)
        parts: Generator[str, None, Measurement] = module.experiment(self, workloads)
        return parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaftStudy(Study["PaftMeasured"]):
    """Accuracy and perplexity under inconsistent gradients and under bursts; divergence of replicas.

    Attributes:
        variances: sigma^2 of the noise, as the paper gives its degree.
        periods: periods of `paft_sync`.
        burst_every: steps from one burst to the next; the paper has one in 500 steps of a longer training.
        bursts: sigma^2 of accidental large noise on top of the smallest of the variances.
        rate: learning rate of the plain SGD whose divergence is measured.
        sigma: noise of that SGD.
        drifting_steps: most steps of it.
    """

    name: ClassVar[str] = "paft"
    workers: int = 4
    steps: int = 200
    variances: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    periods: tuple[int, ...] = (5, 10, 50)
    burst_every: int = 50
    bursts: tuple[float, ...] = (0.1, 1.0)
    rate: float = 0.02
    sigma: float = 0.03
    drifting_steps: int = 100

    @property
    def methods(self) -> Mapping[str, Callable[[optax.GradientTransformation], optax.GradientTransformation]]:
        """What is put around the optimizer, by name."""
        from ._paft import methods

        return methods(self.periods)

    def count(self, workloads: Sequence[Task]) -> int:
        runs = 1 + (2 + len(self.periods)) * len(self.variances) + 2 * len(self.bursts)
        return len(workloads) * runs + 1 + len(self.periods[:2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropComputeStudy(Study["DropComputeMeasured"]):
    """Speedup against drop rate and workers, predicted and on a real clock; loss against steps and time.

    Attributes:
        micro_batches: micro-batches of a step of a worker, as in the paper's environment of simulated delays.
        latency: latency of a micro-batch, in seconds.
        serial: seconds of the rest of a step.
        fleets: workers for which the speedup is predicted.
        threads: workers whose speedup is measured, threads with a clock each.
        unit: base of their delays, in seconds.
        iterations: iterations of a measurement.
        drops: drop rates of the trainings.
        mended: the drop rate that is made up for by extra steps, and by corrections.
    """

    name: ClassVar[str] = "dropcompute"
    workers: int = 8
    steps: int = 200
    micro_batches: int = 12
    latency: BoundedLogNormal = BoundedLogNormal(0.45)  # noqa: RUF009, of frozen numbers
    serial: float = 0.5
    fleets: tuple[int, ...] = (8, 32, 112, 512, 2048)
    threads: tuple[int, ...] = (2, 4, 8)
    unit: float = 0.004
    iterations: int = 25
    drops: tuple[float, ...] = (0.03, 0.06, 0.1, 0.2)
    mended: float = 0.1

    def count(self, workloads: Sequence[Task]) -> int:
        return len(self.fleets) + len(self.threads) + len(workloads) * (1 + len(self.drops) + 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyStudy(Study["LossyMeasured"]):
    """Perplexity and accuracy against loss rates; drift of copies in training and in a random walk.

    Attributes:
        rates: shares of the shards that get lost, of gradients and of parameters; the first is 0.
        packet_rates, burst_rates, mended_rates: the same where losses are per packet, come in bursts, or are mended by
            parity or by reliable packets.
        packet: elements of a packet.
        burst: mean length of a burst, in packets.
        perplexity_seeds, accuracy_seeds: trainings of which a score is the mean; single perplexities differ by one or
            two percent.
        walk_rates: loss rates of the random walk.
        walk, settled: steps of the walk, and how many of them are not counted.
    """

    name: ClassVar[str] = "lossy"
    workers: int = 8
    steps: int = 600
    rates: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4)
    packet_rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)
    burst_rates: tuple[float, ...] = (0.1, 0.2)
    mended_rates: tuple[float, ...] = (0.2,)
    packet: int = 64
    burst: float = 8.0
    perplexity_seeds: int = 2
    accuracy_seeds: int = 1
    walk_rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    walk: int = 200
    settled: int = 40

    def seeds(self, workload: Task) -> int:
        """Trainings of a workload of which a score is the mean."""
        return self.perplexity_seeds if workload.metric == "perplexity" else self.accuracy_seeds

    def count(self, workloads: Sequence[Task]) -> int:
        runs = len(self.rates) + len(self.packet_rates) + len(self.burst_rates) + 2 * len(self.mended_rates)
        return sum(map(self.seeds, workloads)) * runs + len(self.walk_rates)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A kind of hardware.

    Attributes:
        name: name for the record.
        faulty: the rank with faults, or None.
        spike: probability that a step is hit at all.
        once: whether only one step is hit.
        spares: ranks to spare.
    """

    name: str
    faulty: int | None
    spike: float = 1.0
    once: bool = False
    spares: int = 1


# Of five ranks: four that work and one to spare.
KINDS = (
    Hardware("healthy", None),
    Hardware("always wrong", 2),
    Hardware("wrong in every second step", 2, spike=0.5),
    Hardware("wrong in every tenth step", 2, spike=0.1),
    Hardware("wrong once", 2, once=True),
    Hardware("the home spare always wrong", 4),
    Hardware("always wrong, two spares", 2, spares=2),
    Hardware("wrong in every tenth step, two spares", 2, spike=0.1, spares=2),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowStudy(Study["ShadowMeasured"]):
    """Which faulty ranks a shadow replica finds, how soon, and whom it names.

    Attributes:
        workers: ranks, one of them to spare; with two spares there is one rank more.
        kinds: kinds of hardware.
        rate: share of the elements of a gradient that a fault hits, in a step that is hit: so many that it hits one.
    """

    name: ClassVar[str] = "shadow"
    workers: int = 5
    steps: int = 60
    kinds: tuple[Hardware, ...] = KINDS
    rate: float = 1e-3

    def count(self, workloads: Sequence[Task]) -> int:
        return len(workloads) * len(self.kinds)


STUDIES: Mapping[str, type[Study[Any]]] = {
    kind.name: kind for kind in (PaftStudy, DropComputeStudy, LossyStudy, ShadowStudy)
}


def finish(parts: Generator[str, None, Found], progress: Callable[[str], object] | None = None) -> Found:
    """Runs an experiment to its end.

    Args:
        parts: yields what has just been done, and returns what was measured.
        progress: told of each part.

    Returns:
        What was measured.
    """
    while True:
        try:
            done = next(parts)
        except StopIteration as end:
            found: Found = end.value
            return found
        if progress is not None:
            progress(done)


@overload
def study(
    which: Study[Found], workloads: Sequence[Task], *, progress: Callable[[str], object] | None = None
) -> Found: ...


@overload
def study(
    which: str, workloads: Sequence[Task], *, progress: Callable[[str], object] | None = None, **settings: Any
) -> Any: ...


def study(
    which: str | Study[Any],
    workloads: Sequence[Task],
    *,
    progress: Callable[[str], object] | None = None,
    **settings: Any,
) -> Any:
    """Runs a study of a method of robust aggregation, on one device.

    Args:
        which: `paft`, `dropcompute`, `lossy` or `shadow`; or a study with settings of its own.
        workloads: what is trained, such as `convnet(read_images())`, `transformer(("python",))` or `linear()`.
        progress: told of each part that is done; `Study.count` says how many there are.
        settings: settings for a study given by its name, fields of its class, such as `steps` and `seed`.

    Returns:
        What was measured: `PaftMeasured`, `DropComputeMeasured`, `LossyMeasured` or `ShadowMeasured`.
        `sdc.analysis.studies.findings_of` makes tables, figures and claims of it.

    Raises:
        SettingError: there is no such study, or a setting makes no sense.
    """
    if isinstance(which, str):
        if which not in STUDIES:
            raise SettingError("study", which, f"expected one of {', '.join(STUDIES)}")
        which = STUDIES[which](**settings)
    return finish(which.run(workloads), progress)


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where data come from."""

    images: str = "auto"
    """Images: fashion-mnist, digits, auto (fashion-mnist if installed, else digits), or a folder of idx files."""
    table: Path | None = None
    """A CSV file of numbers, the class last (CoverType's, for instance), for the regression in the place of images."""
    ratings: Annotated[str | Path, Flag(type=str)] = "movielens-100k"
    """Ratings: movielens-100k, or a file of users, items and ratings, or of a matrix as Jester's."""
    documents: Annotated[str | Path, Flag(type=str)] = "reuters"
    """Documents: reuters, plays, or a folder of texts, such as that of the 20 Newsgroups."""
    corpus: tuple[str, ...] = ("python",)
    """Text: python (the standard library's source), or files and folders of text or JSONL."""
    archives: Path | None = None
    """Folder of the archives that movielens-100k, reuters and plays are read from; by default one in the cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScarStudy:
    """Figures 3 and 5 to 9 of Qiao et al., ICML 2019, with so many perturbations of a quadratic program."""

    trials: int = 100
    """Failures of each training and case, a multiple of the starts."""
    starts: int = 20
    """First states of each training, at least 5: intervals are over them."""
    seed: Annotated[int, Within(0, LARGEST_SEED)] = 0
    """Seed of first states, data and everything simulated."""
    perturbations: int = 1000

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that names the wrong one."""
        check_fields(self)
        if self.starts < 5:
            raise SettingError("starts", self.starts, "expected at least 5, of which an interval can be told")
        if self.trials > MOST_TRIALS:
            problem = f"expected at most {MOST_TRIALS:,}, since the outcome of each is kept"
            raise SettingError("trials", self.trials, problem)
        if self.trials < self.starts or self.trials % self.starts:
            raise SettingError("trials", self.trials, f"expected a multiple of the {self.starts} starts")

    def parts(self, subjects: Sequence[Subject]) -> list[Part]:
        """The parts, in their order.

        Raises:
            SettingError: there are too few trials for an interval, or the seed is none.
            ValueError: a training is put together wrongly, see `Iterative.check`.
        """
        from ._scar import parts_of

        self.check()
        return parts_of(self, subjects)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesStudy:
    """Each simulated node beside each published figure of the real one; the noise model is fitted to all fifteen."""

    name: ClassVar[str] = "nodes"
    nodes: tuple[str, ...] = NODES
    """Nodes to compare, node1 to node15; by default all."""
    runs: int = 100
    """Simulated runs of each node at the study's size, at least 20: intervals are over them."""
    steps: int = 80
    """Steps of the small models, at least 40."""
    seed: Annotated[int, Within(0, LARGEST_SEED)] = 0
    """Seed of everything simulated."""

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that names the wrong one."""
        check_fields(self)
        if unknown := [node for node in self.nodes or (None,) if node not in NODES]:
            raise SettingError("nodes", unknown[0], f"expected one or several of {NODES[0]} ... {NODES[-1]}")
        if not 20 <= self.runs <= MOST_NODES:
            raise SettingError("runs", self.runs, f"expected 20 to {MOST_NODES:,}; fewer are too few for an interval")
        if not WINDOW * 5 <= self.steps <= MOST_NODES:
            problem = f"expected {WINDOW * 5} to {MOST_NODES:,}; fewer are too short for a statement"
            raise SettingError("steps", self.steps, problem)

    def count(self) -> int:
        """How many parts `run` yields."""
        return len(NODES) + 2 * len(self.nodes) + len(SIZES) + 1

    def run(self) -> Generator[str, None, NodesMeasured]:
        """Runs the study: yields what has just been done, and returns what was found.

        Raises:
            SettingError: a node that does not exist, or too few runs or steps.
        """
        from ._nodes import experiment

        self.check()
        return experiment(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsStudy:
    """What each scheme of checking finds and what it flags by mistake, on the products of real training."""

    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    """Types of activations and compute parameters to study."""
    steps: int = 20
    """Optimizer steps; every scheme judges every product of every step, and those of the first and last get errors."""
    where: str = "products"
    """Which matrix products to study, a selector such as 'scope("*/ffn/*")'."""
    seed: int = 0
    """Seed of the parameters and the errors."""

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that names the wrong one."""
        check_measurement(self.steps, self.dtypes)
        as_selector(self.where)

    @property
    def marked(self) -> tuple[int, ...]:
        """The steps whose products get errors: the first and the last."""
        return tuple(sorted({0, self.steps - 1}))

    def count(self) -> int:
        """How many parts `run` yields."""
        return (self.steps + len(self.marked)) * len(self.dtypes)

    def run(
        self, config: TrainConfig, dataset: Dataset, profile: Profile | None = None
    ) -> Generator[str, None, ProductsMeasured]:
        """Runs the study on this machine's first device: yields what has just been done.

        Args:
            config: what is trained; its type is replaced by each of `dtypes`.
            dataset: its text.
            profile: profile of the device, for thresholds; by default what is assumed of the platform.

        Returns:
            Counts by variant and scheme; `sdc.analysis.studies.write_products_study` makes a report of them.

        Raises:
            SettingError: there is no step or no type, or `where` is no selector or selects no product.
            ValueError: the configuration or the data set does not fit.
        """
        from .products import experiment

        self.check()
        return experiment(self, config, dataset, profile)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measures how a device rounds."""

    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    """Types to measure."""
    steps: int = 5
    """Optimizer steps of the configuration, for each type, whose products are checked by what was measured."""
    seed: int = 0
    """Seed of the parameters and the synthetic factors."""

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that names the wrong one."""
        check_measurement(self.steps, self.dtypes)

    def count(self) -> int:
        """How many parts `run` yields."""
        return 1 + 2 * len(self.dtypes)

    def run(self, config: TrainConfig, dataset: Dataset) -> Generator[str, None, Profile]:
        """Measures this machine's first device: yields what has just been done.

        Args:
            config: whose step is measured; its type is replaced by each of `dtypes`.
            dataset: its text.

        Returns:
            The profile, for `sdc.abft(step, profile=...)`.

        Raises:
            CalibrationError: errors are too large to be rounding, or real products are flagged: this device may compute
                wrong numbers.
            SettingError: there is no step or no type.
            ValueError: the configuration or the data set does not fit.
        """
        from .products import calibrate

        self.check()
        return calibrate(self, config, dataset)
