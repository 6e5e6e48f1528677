"""Measurements of studies: raw numbers, from which tables, figures and claims are made.

The experiments return these measurements, and `sdc.analysis.studies` reads them without JAX, so this module does not
import JAX.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

from sdc.checksums import Rounding
from sdc.nodes import FittedValue
from sdc.schema import SchemeCounts

from .settings import DropComputeStudy, LossyStudy, NodesStudy, PaftStudy, ProductsStudy, ShadowStudy, Study


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Fields common to the measurements of all studies."""

    study: Study[Any]  # the study with its settings
    sources: Mapping[str, str]  # origin of the data, by workload


@dataclasses.dataclass(frozen=True)
class OfWorkload:
    """Measurements of one workload."""

    workload: str  # name of the workload
    metric: str  # kind of score: `accuracy` or `perplexity`


@dataclasses.dataclass(frozen=True)
class Burst:
    """Training runs with bursts of noise."""

    method: str  # aggregation method
    variance: float  # variance of a burst
    steps: Int[np.ndarray, "looks"]  # steps after which the score was measured
    scores: Float[np.ndarray, "seeds looks"]  # one for each run and step


@dataclasses.dataclass(frozen=True)
class NoisyTraining(OfWorkload):
    """Training runs of a workload with noise in the mean gradients."""

    # By method, for each variance of `PaftMeasured` and each seed; `clean` has no noise.
    scores: Mapping[str, Float[np.ndarray, "variances seeds"]]
    synchronizations: Mapping[str, Float[np.ndarray, "variances seeds"]]  # by rule of `paft`, their number
    bursts: tuple[Burst, ...]  # training runs with bursts


@dataclasses.dataclass(frozen=True)
class Drifted:
    """Divergence of replicas under plain SGD."""

    period: int | None  # number of steps between synchronizations; None without synchronization
    dimension: int  # number of parameters
    # Squared distance of a replica from the mean of all replicas, after each step and before a synchronization,
    # averaged over the replicas.
    squares: Float[np.ndarray, "steps"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaftMeasured(Measured):
    """Measurements of the study of inconsistent gradients."""

    study: PaftStudy
    trainings: tuple[NoisyTraining, ...]  # one for each workload
    drifting: str  # the workload whose divergence was measured
    drifts: tuple[Drifted, ...]  # with and without synchronization


@dataclasses.dataclass(frozen=True)
class PredictedSpeedup:
    """Predicted gain of a threshold, from sampled latencies."""

    workers: int  # size of the fleet
    step: float  # mean seconds of a step without a threshold
    threshold: float  # the best threshold, in seconds
    drop_rate: float  # share of the micro-batches that this threshold drops
    speedup: float  # speedup with this threshold
    rates: tuple[float, ...]  # other drop rates
    speedups: tuple[float, ...]  # speedups of the thresholds with these drop rates


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Samples of times and batch sizes, with thresholds."""

    workers: int  # size of the fleet
    rates: tuple[float, ...]  # drop rates of the thresholds; 0 without one
    alone: Float[np.ndarray, "samples"]  # seconds of one worker's micro-batches, without a threshold
    steps: Float[np.ndarray, "rates iterations"]  # seconds of the slowest worker
    batches: Float[np.ndarray, "rates iterations"]  # share of the micro-batches of all workers that were completed


@dataclasses.dataclass(frozen=True)
class ClockedSpeedup:
    """Measured gain of a threshold on a real clock."""

    workers: int  # number of threads
    iterations: int  # length of each of the two measurements
    seconds: float  # time of all iterations without a threshold
    stopped_seconds: float  # the same with a threshold
    speedup: float  # measured speedup
    predicted: float  # speedup predicted from the same latencies


@dataclasses.dataclass(frozen=True, eq=False)
class NoisySpeedup:
    """Predicted gain of a threshold for one distribution of delays."""

    figure: str  # figure of the paper
    latency: str  # time of a micro-batch in seconds, as a sum
    workers: tuple[int, ...]  # sizes of the fleets
    ratios: Float[np.ndarray, "fleets seeds"]  # E[T] / E[T_n], the slowest worker's time relative to a worker's
    drop_rates: Float[np.ndarray, "fleets seeds"]  # share of the micro-batches that the best threshold drops
    speedups: Float[np.ndarray, "fleets seeds"]  # speedup with the best threshold


@dataclasses.dataclass(frozen=True, eq=False)
class LocalSpeedup:
    """Predicted gain of local SGD, with and without a threshold, over training that averages after each step."""

    period: int  # local steps between two averages
    server: bool  # whether all stragglers are in one server
    drop_rates: Float[np.ndarray, "seeds"]  # share of the local steps that the threshold drops
    local: Float[np.ndarray, "seeds"]  # speedup of local SGD
    dropped: Float[np.ndarray, "seeds"]  # its effective speedup with a threshold: dropped steps count as lost time


@dataclasses.dataclass(frozen=True, eq=False)
class DroppedRun:
    """Training runs with a compute threshold."""

    rate: float  # requested drop rate; 0 for no threshold
    compensation: str  # how dropped samples are made up for: `none`, `extra steps`, `larger batch` or `repetition`
    correction: str  # see `sdc.aggregation.combine`
    drop_rate: float  # measured drop rate, averaged over the seeds
    scores: Float[np.ndarray, "seeds"]  # score at the end
    losses: Float[np.ndarray, "seeds steps"]  # loss of each step; NaN if nothing was completed
    ends: Float[np.ndarray, "seeds steps"]  # simulated seconds at the end of each step


@dataclasses.dataclass(frozen=True)
class DroppedTraining(OfWorkload):
    """Training runs of a workload: the first has no threshold, some have compensations or corrections."""

    runs: tuple[DroppedRun, ...]
    # By correction and drop rate: scores if each worker drops its whole share of a batch with this probability.
    shares: Mapping[str, Mapping[float, Float[np.ndarray, "seeds"]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropComputeMeasured(Measured):
    """Measurements of the study of DropCompute."""

    study: DropComputeStudy
    predicted: tuple[PredictedSpeedup, ...]  # by number of workers
    distributions: Distributions | None  # of times and batch sizes
    noisy: tuple[NoisySpeedup, ...]  # by distribution of delays
    local: tuple[LocalSpeedup, ...]  # by period and place of stragglers
    clocked: tuple[ClockedSpeedup, ...]  # by number of threads
    trainings: tuple[DroppedTraining, ...]  # one for each workload


@dataclasses.dataclass(frozen=True)
class LossyTraining(OfWorkload):
    """Training runs of a workload over links that lose packets."""

    steps: int  # number of optimizer steps of each run
    scores: Mapping[str, Mapping[float, Float[np.ndarray, "seeds"]]]  # by loss model and loss rate
    # By loss rate of shards: training loss, averaged over the workers and the last tenth of the steps.
    losses: Mapping[float, Float[np.ndarray, "seeds"]]
    curves: Mapping[float, Float[np.ndarray, "points"]]  # by loss rate of shards: mean training loss over time
    # By loss rate, the mean squared drift between two copies divided by that of the owners' updates.
    drifts: Mapping[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyMeasured(Measured):
    """Measurements of the study of lost packets."""

    study: LossyStudy
    trainings: tuple[LossyTraining, ...]  # one for each workload
    walks: Mapping[
        float, float
    ]  # by loss rate, the drift between two copies of a random walk, in units of its squared step


@dataclasses.dataclass(frozen=True)
class Watched:
    """A training run that a shadow replica watched."""

    hardware: str  # kind of hardware
    seed: int  # seed of the run
    faulty: int | None  # the rank with faults, or None
    corrupted: Bool[np.ndarray, "steps"]  # steps in which a fault changed a value
    differed: Bool[np.ndarray, "steps"]  # steps in which a comparison found a difference
    compared: Int[np.ndarray, "steps ranks"]  # ranks that were compared in each step
    verdict: str  # verdict of `sdc.aggregation.judge`
    suspects: tuple[int, ...]  # ranks that the verdict identifies as faulty
    undecided: tuple[tuple[int, ...], ...]  # sets of ranks of which one is faulty


@dataclasses.dataclass(frozen=True)
class WatchedTraining(OfWorkload):
    """Training runs of a workload, one for each kind of hardware and seed."""

    runs: tuple[Watched, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowMeasured(Measured):
    """Measurements of the study of the shadow replica: training runs for each workload and kind of hardware."""

    study: ShadowStudy
    trainings: tuple[WatchedTraining, ...]


Quantity: TypeAlias = Literal[
    "frequency", "severity", "frequency by layer", "severity by layer", "noise", "time", "drift", "loss"
]


@dataclasses.dataclass(frozen=True)
class Compared:
    """A published value and the corresponding simulated value."""

    node: str
    quantity: Quantity
    place: str  # submodule, and layer from 1, or empty
    published: float | None  # None if the study only describes it
    simulated: float | None  # median of the simulated values; None if the simulation is too short
    low: float | None = None  # lower limit of the central 95 % of the simulated values, slightly widened
    high: float | None = None
    agrees: bool | None = None  # whether the published value is within the limits; None if undetermined
    p: float | None = None  # two-sided p-value of the published value among the simulated ones
    note: str = ""  # further remarks, such as the study's description


@dataclasses.dataclass(frozen=True)
class Predicted:
    """The worst noise-to-signal ratio of a node, and the prediction from the other nodes with a 95 % interval."""

    published: float
    median: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.published <= self.high


@dataclasses.dataclass(frozen=True)
class Response:
    """The response of a small model's gradients to errors."""

    model: str  # description of the model
    rounding: float  # noise-to-signal ratio with a few wrong last bits in every microstep
    # By submodule, the squared ratio divided by the mean square of the relative errors (zero for correct elements).
    linear: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Drifting:
    """A small model trained on a simulated node."""

    node: str  # the node
    model: str  # description of the model
    # Noise-to-signal ratios of the gradients, with parameters synchronized after each step.
    noise: Float[np.ndarray, "steps"]
    # Distances of the parameters from the healthy ones, without synchronization.
    distances: Float[np.ndarray, "steps"]
    losses: Float[np.ndarray, "steps"]  # relative differences of the losses, without synchronization


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesFit:
    """The model of the nodes, fitted to the published figures."""

    predicted: Mapping[str, Predicted]  # by node, the noise predicted from the other nodes
    estimates: Mapping[str, FittedValue]  # parameters fitted now
    # By node, the correlation of its submodules' frequencies over the steps; None if fewer than two submodules are
    # struck.
    together: Mapping[str, float | None]
    flagged: Mapping[str, float | None]  # by node, the share of products that equation 6 would flag (`flagged_share`)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesMeasured(NodesFit):
    """Findings of the study of the nodes, made by `sdc.train.studies.NodesStudy`."""

    study: NodesStudy
    rows: tuple[Compared, ...]  # published and simulated values
    used: Mapping[str, FittedValue]  # parameters of the simulated nodes
    responses: tuple[Response, ...]  # of the small models
    trainings: tuple[Drifting, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsMeasured:
    """Counts from the study of checked matrix products, of which `sdc.analysis` makes tables."""

    study: ProductsStudy
    config: Mapping[str, Any]  # the configuration
    rounding: Rounding  # rounding behavior of the device, which determines the thresholds
    departs: tuple[str, ...]  # differences of this device from the one that `rounding` describes
    counts: Mapping[str, Mapping[str, SchemeCounts]]  # by variant (type, sums or rounded) and scheme
    magnitudes: tuple[float, ...]  # magnitudes of the errors, in units of the root mean square of the row
