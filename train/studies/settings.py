"""Specifications of the studies, which are checked before JAX is imported. `run` and `parts` import the experiments."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import math
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
    from .parts import RecordedParts
    from .workloads import Task

MOST = 1_000_000  # maximum number of steps of a study; the measurements of each step are kept in memory
# Maximum numbers of runs and steps of the study of nodes, and of trials of the SCAR study; all results are kept in
# memory.
MOST_NODES, MOST_TRIALS = 1000, 100_000
WINDOW = 8  # number of steps for which each kind of error lasts when the responses of small models are measured
# Layers, width and tokens of the small models. The first model is trained on the nodes; the response of gradients to
# errors is measured with both models.
SIZES = ((4, 64, 64), (16, 64, 64))

# Modules of the experiments of the aggregation studies.
EXPERIMENTS = {"paft": "._paft", "dropcompute": ".dropcompute", "lossy": ".lossy", "shadow": "._shadow"}

Found = TypeVar("Found")
Measurement = TypeVar("Measurement", covariant=True)


def _check_steps(steps: int, least: int, why: str = "") -> None:
    if steps < least:
        raise SettingError("steps", steps, f"expected at least {least}{why}")
    if steps > MOST:
        raise SettingError("steps", steps, f"expected at most {MOST:,}, since all measurements are kept in memory")


def check_measurement(steps: int, dtypes: Sequence[str]) -> None:
    """Checks the settings of a measurement of matrix products."""
    _check_steps(steps, 1)
    if not dtypes:
        raise SettingError("dtypes", None, "expected float32, bfloat16 or both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(abc.ABC, Generic[Measurement]):
    """A study of one robust aggregation method.

    Attributes:
        workers: number of workers in each training run, all on one device.
    """

    kind: ClassVar[str] = "aggregation study"
    name: ClassVar[str]
    workers: int
    steps: int
    """Number of optimizer steps of each training run."""
    seed: int = 0
    """Seed for the parameters, the data and all simulations."""
    seeds: int = 5
    """Number of training runs of each kind, which differ in parameters, data and all draws; at least 3. Confidence
    intervals are computed over these runs."""

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that identifies the first invalid one."""
        _check_steps(self.steps, 10, ", since the result is computed from the last steps")
        if not 3 <= self.seeds <= MOST_NODES:
            problem = f"expected 3 to {MOST_NODES:,}; fewer do not suffice for an interval"
            raise SettingError("seeds", self.seeds, problem)
        if not 0 <= self.seed <= LARGEST_SEED:
            raise SettingError("seed", self.seed, f"expected an integer from 0 to {LARGEST_SEED}")

    def manifest(self) -> dict[str, Any]:
        """Returns the fields of the record's manifest that describe the study."""
        return {
            "kind": self.kind, "study": self.name, "seed": self.seed, "workers": self.workers, "steps": self.steps,
            "settings": dataclasses.asdict(self),
        }  # fmt: skip

    @property
    def runs(self) -> range:
        """The seeds of the training runs of a kind."""
        return range(self.seed, self.seed + self.seeds)

    def about(self, workloads: Sequence[Task]) -> Mapping[str, Any]:
        """Returns the fields of `Measured` that describe the study itself."""
        return {"study": self, "sources": {workload.name: workload.source for workload in workloads}}

    @abc.abstractmethod
    def count(self, workloads: Sequence[Task]) -> int:
        """Returns the number of parts that `run` yields."""

    def run(self, workloads: Sequence[Task], kept: RecordedParts | None = None) -> Generator[str, None, Measurement]:
        """Runs the study, except the parts on record: yields the title of each completed part, and returns the
        measurements."""
        from .parts import RecordedParts

        self.check()
        module = importlib.import_module(EXPERIMENTS[self.name], __package__)
        parts: Generator[str, None, Measurement] = module.experiment(self, workloads, kept or RecordedParts())
        return parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaftStudy(Study["PaftMeasured"]):
    """The study of accuracy and perplexity under inconsistent gradients and under bursts, and of the divergence of
    replicas.

    Attributes:
        periods: periods of `paft_sync`.
        bursts: sigma^2 of the noise in bursts; in all other steps, it is the smallest of the variances.
        rate: learning rate of the plain SGD run in which divergence is measured.
        sigma: sigma of the noise in this SGD run.
        drifting_steps: maximum number of steps of this SGD run.
    """

    name: ClassVar[str] = "paft"
    workers: int = 4
    """Number of workers, all on one device."""
    steps: int = 200
    variances: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    """sigma^2 of the noise, the paper's measure of inconsistency, in ascending order."""
    periods: tuple[int, ...] = (5, 10, 50)
    burst_every: int = 50
    """Number of steps from one burst of noise to the next; 500 in the paper, whose runs are longer."""
    bursts: tuple[float, ...] = (0.1, 1.0)
    rate: float = 0.02
    sigma: float = 0.03
    drifting_steps: int = 100

    def check(self) -> None:
        super().check()
        if not 2 <= self.workers <= MOST_NODES:
            raise SettingError("workers", self.workers, f"expected 2 to {MOST_NODES:,}")
        if not 1 <= self.burst_every <= MOST:
            raise SettingError("burst_every", self.burst_every, f"expected 1 to {MOST:,} steps")
        rising = self.variances and list(self.variances) == sorted(set(self.variances))
        if not rising or not 0 < self.variances[0] <= self.variances[-1] < math.inf:
            raise SettingError("variances", self.variances, "expected one or more positive numbers in ascending order")

    @property
    def methods(self) -> Mapping[str, Callable[[optax.GradientTransformation], optax.GradientTransformation]]:
        """Wrappers of the optimizer by name."""
        from ._paft import methods

        return methods(self.periods)

    def count(self, workloads: Sequence[Task]) -> int:
        runs = 1 + (4 + len(self.periods)) * len(self.variances) + 2 * len(self.bursts)
        return len(workloads) * runs + 1 + len(self.periods[:2])


# By figure of the paper on DropCompute (figures 13 and 14): the time of a micro-batch without delay, and the
# distribution of its delay (`sdc.aggregation.delays`), in seconds; normal delays may be negative.
NOISES: Mapping[str, tuple[float, str]] = {
    "13a, 14a": (0.45, "lognormal(mean=0.225, std=0.2236)"),
    "13b": (0.0, "normal(mu=0.675, sigma=0.2236)"),
    "13c": (0.45, "bernoulli(base=0, extra=0.45, probability=0.5)"),
    "13d": (0.45, "exponential(mean=0.2237)"),
    "13e": (0.45, "gamma(mean=0.225, shape=1)"),
    "14b": (0.45, "lognormal(mean=0.225, std=0.3162)"),
    "14c": (0.45, "lognormal(mean=0.225, std=0.3873)"),
    "14d": (0.45, "lognormal(mean=0.225, std=0.4472)"),
    "14e": (0.45, "lognormal(mean=0.225, std=0.5)"),
    "14f": (0.45, "lognormal(mean=0.225, std=0.5477)"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropComputeStudy(Study["DropComputeMeasured"]):
    """The study of the speedup by drop rate and number of workers (predicted, and measured on a real clock), and of the
    loss by step and by time.

    Attributes:
        micro_batches: micro-batches per step and worker, as in the paper's simulated-delay environment.
        latency: latency of a micro-batch, in seconds.
        serial: duration of the rest of a step, in seconds.
        fleets: numbers of workers for which the speedup is predicted.
        threads: number of workers whose speedup is measured; each is a thread with its own clock.
        unit: base of the threads' delays, in seconds.
        iterations: number of iterations of a measurement.
        spread: number of workers whose distributions of times and batch sizes are sampled; 0 for none.
        noisy_fleets: numbers of workers of the paper's figures 13 and 14; the paper does not state them.
        local_periods: numbers of local steps between two averages of local SGD.
        drops: drop rates of the training runs.
        mended: the drop rate at which compensations and corrections are tested.
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
    spread: int = 200
    noisy_fleets: tuple[int, ...] = (16, 64, 256, 512, 1024)
    local_periods: tuple[int, ...] = (1, 2, 4, 8, 16)
    drops: tuple[float, ...] = (0.03, 0.06, 0.1, 0.2)
    mended: float = 0.1

    def count(self, workloads: Sequence[Task]) -> int:
        images = sum(workload.metric == "accuracy" for workload in workloads)
        simulated = bool(self.spread) + len(NOISES) * bool(self.noisy_fleets) + 2 * len(self.local_periods)
        trained = len(workloads) * (1 + len(self.drops) + 5) + images * (1 + 3 * len(self.drops))
        return len(self.fleets) + simulated + len(self.threads) + trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyStudy(Study["LossyMeasured"]):
    """The study of perplexity and accuracy at several loss rates, and of the drift between copies in training and in a
    random walk.

    Attributes:
        rates: fractions of gradient and parameter shards that are lost; the first is 0.
        stale_rates: loss rates if the last piece that arrived stands in for a lost piece of a gradient.
        packet_rates, burst_rates, mended_rates: loss rates for packets lost singly, for packets lost in bursts, and for
            losses repaired by parity or reliable packets.
        packet: elements per packet.
        burst: mean length of a burst, in packets.
        walk_rates: loss rates of the random walk.
        walk, settled: number of steps of the walk, and the number of initial steps that are discarded.
    """

    name: ClassVar[str] = "lossy"
    workers: int = 8
    steps: int = 600
    rates: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4)
    stale_rates: tuple[float, ...] = (0.2, 0.4)
    packet_rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)
    burst_rates: tuple[float, ...] = (0.1, 0.2)
    mended_rates: tuple[float, ...] = (0.2,)
    packet: int = 64
    burst: float = 8.0
    walk_rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    walk: int = 200
    settled: int = 40

    def count(self, workloads: Sequence[Task]) -> int:
        several = (self.rates, self.stale_rates, self.packet_rates, self.burst_rates, self.mended_rates)
        runs = sum(map(len, (*several, self.mended_rates)))
        return len(workloads) * runs + len(self.walk_rates)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A simulated set of ranks with or without faults.

    Attributes:
        name: name in the record.
        faulty: the rank with faults, or None.
        spike: probability that a step is struck.
        once: whether only one step is struck.
        spares: number of spare ranks.
    """

    name: str
    faulty: int | None
    spike: float = 1.0
    once: bool = False
    spares: int = 1


# Five ranks: four workers and one spare.
KINDS = (
    Hardware("healthy", None),
    Hardware("always wrong", 2),
    Hardware("wrong in every second step", 2, spike=0.5),
    Hardware("wrong in every tenth step", 2, spike=0.1),
    Hardware("wrong once", 2, once=True),
    Hardware("home spare always wrong", 4),
    Hardware("always wrong, two spares", 2, spares=2),
    Hardware("wrong in every tenth step, two spares", 2, spike=0.1, spares=2),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowStudy(Study["ShadowMeasured"]):
    """The study of faulty ranks under a shadow replica: which ranks the replica detects, after how many steps, and
    which rank it identifies as faulty.

    Attributes:
        workers: number of ranks, including one spare; with two spares there is one more rank.
        kinds: kinds of hardware.
        rate: fraction of a gradient's elements that a fault strikes in an affected step; high enough to strike at least
            one.
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
        parts: the experiment, which yields a description of each completed part and returns the measurements.
        progress: called with each description.

    Returns:
        The measurements.
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
    """Runs a study of a robust aggregation method on one device.

    Args:
        which: `paft`, `dropcompute`, `lossy` or `shadow`; or a study with custom settings.
        workloads: workloads to train, such as `convnet(read_images())`, `transformer(("python",))` or `linear()`.
        progress: called after each part; `Study.count` returns the number of parts.
        settings: fields of the study's class, such as `steps` and `seed`, if `which` is a name.

    Returns:
        The measurements: `PaftMeasured`, `DropComputeMeasured`, `LossyMeasured` or `ShadowMeasured`.
        `sdc.analysis.studies.findings_of` makes tables, figures and claims from them.

    Raises:
        SettingError: the study does not exist, or a setting is invalid.
    """
    if isinstance(which, str):
        if which not in STUDIES:
            raise SettingError("study", which, f"expected one of {', '.join(STUDIES)}")
        which = STUDIES[which](**settings)
    return finish(which.run(workloads), progress)


@dataclasses.dataclass(frozen=True)
class Sources:
    """Sources of the training data."""

    images: str = "auto"
    """Images: fashion-mnist, digits, auto (fashion-mnist if installed, else digits), or a folder of idx files."""
    table: Path | None = None
    """CSV file of numbers with the class in the last column (such as CoverType), on which to train the regression
    instead of images."""
    ratings: Annotated[str | Path, Flag(type=str)] = "movielens-100k"
    """Ratings: movielens-100k, a file of users, items and ratings, or a file with a matrix, as in Jester."""
    documents: Annotated[str | Path, Flag(type=str)] = "reuters"
    """Documents: reuters, plays, or a folder of texts, such as 20 Newsgroups."""
    corpus: tuple[str, ...] = ("python",)
    """Training text: python (the source of the standard library), or files and folders of text or JSONL."""
    archives: Path | None = None
    """Folder with the archives of movielens-100k, reuters and plays (default: a folder in the cache)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScarStudy:
    """Reproduction of figures 3 and 5 to 9 of Qiao et al., ICML 2019."""

    trials: int = 100
    """Number of failures per training algorithm and case; a multiple of the number of starts."""
    starts: int = 20
    """Number of initial states of each training algorithm, at least 5; confidence intervals are computed over these
    states."""
    seed: Annotated[int, Within(0, LARGEST_SEED)] = 0
    """Seed for initial states, data and all simulations."""
    perturbations: int = 1000

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that identifies the first invalid one."""
        check_fields(self)
        if self.starts < 5:
            raise SettingError("starts", self.starts, "expected at least 5; fewer do not suffice for an interval")
        if self.trials > MOST_TRIALS:
            problem = f"expected at most {MOST_TRIALS:,}, since the outcomes of all trials are kept in memory"
            raise SettingError("trials", self.trials, problem)
        if self.trials < self.starts or self.trials % self.starts:
            raise SettingError("trials", self.trials, f"expected a multiple of {self.starts}, the number of starts")

    def parts(self, subjects: Sequence[Subject]) -> list[Part]:
        """Returns the parts in the order in which they run.

        Raises:
            SettingError: there are too few trials for an interval, or the seed is invalid.
            ValueError: a training algorithm is invalid; see `Iterative.check`.
        """
        from ._scar import parts_of

        self.check()
        return parts_of(self, subjects)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesStudy:
    """Comparison of each simulated node with the published figures of the real node; the noise model is fitted to all
    fifteen nodes."""

    kind: ClassVar[str] = "nodes study"
    name: ClassVar[str] = "nodes"
    nodes: tuple[str, ...] = NODES
    """Nodes to compare, node1 to node15 (default: all)."""
    runs: int = 1000
    """Number of simulated runs of each node at the size of the study, at least 20; p-values and intervals are computed
    over these runs."""
    steps: int = 80
    """Number of steps of the small models, at least 40."""
    seed: Annotated[int, Within(0, LARGEST_SEED)] = 0
    """Seed for all simulations."""

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that identifies the first invalid one."""
        check_fields(self)
        if unknown := [node for node in self.nodes or (None,) if node not in NODES]:
            raise SettingError("nodes", unknown[0], f"expected one or more of {NODES[0]} ... {NODES[-1]}")
        if len(set(self.nodes)) < len(self.nodes):
            raise SettingError("nodes", " ".join(self.nodes), "expected each node once")
        if not 20 <= self.runs <= MOST_NODES:
            raise SettingError(
                "runs", self.runs, f"expected 20 to {MOST_NODES:,}; fewer do not suffice for an interval"
            )
        if not WINDOW * 5 <= self.steps <= MOST_NODES:
            problem = f"expected {WINDOW * 5} to {MOST_NODES:,}; fewer do not suffice for a conclusion"
            raise SettingError("steps", self.steps, problem)

    def manifest(self) -> dict[str, Any]:
        """Returns the fields of the record's manifest that describe the study."""
        return {"kind": self.kind, "study": self.name, "seed": self.seed, "settings": dataclasses.asdict(self)}

    def count(self) -> int:
        """Returns the number of parts that `run` yields."""
        return len(NODES) + 2 * len(self.nodes) + len(SIZES) + 1

    def run(self, kept: RecordedParts | None = None) -> Generator[str, None, NodesMeasured]:
        """Runs the study, except the parts on record: yields the title of each completed part, and returns the
        findings.

        Raises:
            SettingError: a node does not exist, or there are too few runs or steps.
        """
        from ._nodes import experiment
        from .parts import RecordedParts

        self.check()
        return experiment(self, kept or RecordedParts())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsStudy:
    """Measurement of the errors that each checksum scheme detects and the false alarms that it raises, on the matrix
    products of real training."""

    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    """Data types of activations and compute parameters to study."""
    steps: int = 20
    """Number of optimizer steps. Every scheme checks every matrix product of every step; errors are injected in the
    first and the last step."""
    where: str = "products"
    """Selector of the matrix products to study, such as 'scope("*/ffn/*")'."""
    seed: int = 0
    """Seed for the parameters and the errors."""

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that identifies the first invalid one."""
        check_measurement(self.steps, self.dtypes)
        as_selector(self.where)

    @property
    def marked(self) -> tuple[int, ...]:
        """Steps in which errors are injected into matrix products: the first and the last."""
        return tuple(sorted({0, self.steps - 1}))

    def count(self) -> int:
        """Returns the number of parts that `run` yields."""
        return (self.steps + len(self.marked)) * len(self.dtypes)

    def run(
        self, config: TrainConfig, dataset: Dataset, profile: Profile | None = None
    ) -> Generator[str, None, ProductsMeasured]:
        """Runs the study on the first device of this host: yields a description of each completed part.

        Args:
            config: the configuration to train; each of `dtypes` in turn replaces its type.
            dataset: the training text.
            profile: profile of the device, which sets the thresholds (default: assumptions about the platform).

        Returns:
            Counts by variant and scheme; `sdc.analysis.studies.write_study` writes a report of them.

        Raises:
            SettingError: there are no steps or no types, or `where` is not a selector or selects no product.
            ValueError: the configuration or the data set does not fit.
        """
        from .products import experiment

        self.check()
        return experiment(self, config, dataset, profile)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurement of a device's rounding."""

    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    """Data types to measure."""
    steps: int = 5
    """Number of optimizer steps, for each data type, whose matrix products are checked with the measured profile."""
    seed: int = 0
    """Seed for the parameters and the synthetic factors."""

    def check(self) -> None:
        """Checks the settings, and raises a SettingError that identifies the first invalid one."""
        check_measurement(self.steps, self.dtypes)

    def count(self) -> int:
        """Returns the number of parts that `run` yields."""
        return 1 + 2 * len(self.dtypes)

    def run(self, config: TrainConfig, dataset: Dataset) -> Generator[str, None, Profile]:
        """Measures the first device of this host: yields a description of each completed part.

        Args:
            config: the configuration whose step is measured; each of `dtypes` in turn replaces its type.
            dataset: the training text.

        Returns:
            The profile, for `sdc.abft(step, profile=...)`.

        Raises:
            CalibrationError: errors are too large to be rounding errors, or real matrix products are flagged, so this
                device may compute wrong numbers.
            SettingError: there are no steps or no types.
            ValueError: the configuration or the data set does not fit.
        """
        from .products import calibrate

        self.check()
        return calibrate(self, config, dataset)
