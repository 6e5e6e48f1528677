"""What studies measure: numbers, before anybody makes tables, figures or claims of them.

The experiments return these and `sdc.analysis.studies` reads them, so nothing here needs JAX.
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
    """What every study says of itself."""

    study: Study[Any]  # with its settings
    sources: Mapping[str, str]  # where the data come from, by workload


@dataclasses.dataclass(frozen=True)
class OfWorkload:
    """What is measured of one workload."""

    workload: str  # name of the workload
    metric: str  # what scores are: `accuracy` or `perplexity`


@dataclasses.dataclass(frozen=True)
class Burst:
    """A training with bursts of noise."""

    method: str  # how gradients were aggregated
    variance: float  # variance of a burst
    steps: Int[np.ndarray, "looks"]  # steps after which the score was taken
    scores: Float[np.ndarray, "looks"]  # one for each of these steps


@dataclasses.dataclass(frozen=True)
class NoisyTraining(OfWorkload):
    """A workload under noise in the mean gradients."""

    scores: Mapping[str, tuple[float, ...]]  # by method, one for each variance of `PaftMeasured`; `clean` has no noise
    synchronizations: tuple[int, ...]  # how often `paft` synchronized, for each variance
    bursts: tuple[Burst, ...]  # trainings with bursts


@dataclasses.dataclass(frozen=True)
class Drifted:
    """Replicas that drift apart under plain SGD."""

    period: int | None  # steps from one synchronization to the next; None for none
    # Squared distance of a replica from the mean of all, after each step and before a synchronization: the mean over
    # the replicas.
    squares: Float[np.ndarray, "steps"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaftMeasured(Measured):
    """What the study of inconsistent gradients measures."""

    study: PaftStudy
    trainings: tuple[NoisyTraining, ...]  # one for each workload
    drifting: str  # the workload of which the divergence was measured
    dimension: int  # number of its parameters
    drifts: tuple[Drifted, ...]  # with and without synchronization


@dataclasses.dataclass(frozen=True)
class PredictedSpeedup:
    """What a threshold would gain, from sampled latencies."""

    workers: int  # size of the fleet
    step: float  # mean seconds of a step without a threshold
    threshold: float  # the best threshold, in seconds
    drop_rate: float  # share of the micro-batches that it drops
    speedup: float  # what it gains
    rates: tuple[float, ...]  # other drop rates
    speedups: tuple[float, ...]  # what the threshold gains that drops so many


@dataclasses.dataclass(frozen=True)
class ClockedSpeedup:
    """What a threshold gained on a real clock."""

    workers: int  # number of threads
    iterations: int  # length of each of the two measurements
    seconds: float  # time of all iterations without a threshold
    stopped_seconds: float  # the same with a threshold
    speedup: float  # what was measured
    predicted: float  # what the same latencies predict


@dataclasses.dataclass(frozen=True)
class DroppedRun:
    """A training with a compute threshold."""

    rate: float  # the drop rate that was asked for; 0 for no threshold
    extra: int  # steps beyond those of the study
    correction: str  # see `sdc.aggregation.combine`
    drop_rate: float  # the drop rate that was found
    score: float  # score at the end
    losses: Float[np.ndarray, "steps"]  # loss of each step; NaN where nothing was completed
    ends: Float[np.ndarray, "steps"]  # simulated seconds at the end of each step
    unstopped: float  # simulated seconds of all steps without a threshold


@dataclasses.dataclass(frozen=True)
class DroppedTraining(OfWorkload):
    """The trainings of a workload: the first without a threshold, one with extra steps, some with corrections."""

    runs: tuple[DroppedRun, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropComputeMeasured(Measured):
    """What the study of DropCompute measures."""

    study: DropComputeStudy
    predicted: tuple[PredictedSpeedup, ...]  # by number of workers
    clocked: tuple[ClockedSpeedup, ...]  # by number of threads
    trainings: tuple[DroppedTraining, ...]  # one for each workload


@dataclasses.dataclass(frozen=True)
class LossyTraining(OfWorkload):
    """A workload over links that lose packets."""

    steps: int  # optimizer steps of its trainings
    seeds: int  # number of trainings of which a score is the mean
    scores: Mapping[str, Mapping[float, float]]  # by the way in which packets get lost, and by loss rate
    # By loss rate, the mean square of the drift between two copies over that of the owners' moves.
    drifts: Mapping[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyMeasured(Measured):
    """What the study of lost packets measures."""

    study: LossyStudy
    trainings: tuple[LossyTraining, ...]  # one for each workload
    walks: Mapping[float, float]  # by loss rate, the drift between two copies of a random walk, in squares of its step


@dataclasses.dataclass(frozen=True)
class Watched:
    """A training that a shadow replica watched."""

    hardware: str  # kind of hardware
    faulty: int | None  # the rank with faults, or None
    corrupted: Bool[np.ndarray, "steps"]  # steps in which a fault changed something
    differed: Bool[np.ndarray, "steps"]  # steps in which a comparison found a difference
    compared: Int[np.ndarray, "steps ranks"]  # ranks that were compared in each step
    verdict: str  # verdict of `sdc.aggregation.judge`
    suspects: tuple[int, ...]  # ranks that it names
    undecided: tuple[tuple[int, ...], ...]  # sets of ranks, one of which is wrong


@dataclasses.dataclass(frozen=True)
class WatchedTraining(OfWorkload):
    """The trainings of a workload, on each kind of hardware."""

    runs: tuple[Watched, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowMeasured(Measured):
    """What the study of the shadow replica measures: one training for each workload and kind of hardware."""

    study: ShadowStudy
    trainings: tuple[WatchedTraining, ...]


Quantity: TypeAlias = Literal[
    "frequency", "severity", "frequency by layer", "severity by layer", "noise", "time", "drift", "loss"
]


@dataclasses.dataclass(frozen=True)
class Compared:
    """One published figure beside the simulated one."""

    node: str
    quantity: Quantity
    place: str  # submodule, and layer from 1, or empty
    published: float | None  # None where the study says it in words only
    simulated: float | None  # the median of the simulated ones; None where the simulation is too short to say
    low: float | None = None  # what holds 95 % of the simulated ones, a little widened
    high: float | None = None
    agrees: bool | None = None  # whether the published figure is inside; None where nothing can be said
    note: str = ""  # what else there is to say, such as the study's words


@dataclasses.dataclass(frozen=True)
class Predicted:
    """The worst noise-to-signal ratio of a node, and what the other nodes predict of it, within 95 %."""

    published: float
    median: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.published <= self.high


@dataclasses.dataclass(frozen=True)
class Response:
    """How the gradients of a small model answer to errors."""

    model: str  # the model in words
    rounding: float  # noise-to-signal ratio where a few last bits are wrong in every microstep
    # By submodule, the squared ratio over the mean square of the relative errors (those of elements that are right
    # being zero).
    linear: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Drifting:
    """A small model trained on a simulated node."""

    node: str  # the node
    model: str  # the model in words
    # Noise-to-signal ratios of the gradients, parameters being synchronized after each step.
    noise: Float[np.ndarray, "steps"]
    # Distances of the parameters from the healthy ones, nothing being synchronized.
    distances: Float[np.ndarray, "steps"]
    losses: Float[np.ndarray, "steps"]  # relative differences of the losses, nothing being synchronized


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesMeasured:
    """What the study of the nodes found; `sdc.train.studies.NodesStudy` makes it."""

    study: NodesStudy
    rows: tuple[Compared, ...]  # published figures beside simulated ones
    predicted: Mapping[str, Predicted]  # by node, the noise that the other nodes predict
    estimates: Mapping[str, FittedValue]  # parameters as fitted now
    used: Mapping[str, FittedValue]  # parameters that the simulated nodes have
    # By node, the correlation of its submodules' frequencies over the steps; None for fewer than two that are hit.
    together: Mapping[str, float | None]
    responses: tuple[Response, ...]  # of the small models
    trainings: tuple[Drifting, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsMeasured:
    """What the study of all schemes counts; `sdc.train` runs it, `sdc.analysis` makes tables of it."""

    study: ProductsStudy
    config: Mapping[str, Any]  # what was trained
    rounding: Rounding  # how the device rounds, from which thresholds follow
    departs: tuple[str, ...]  # in what this device departs from the one that the rounding is of
    counts: Mapping[str, Mapping[str, SchemeCounts]]  # by variant (type, sums or rounded) and scheme
    magnitudes: tuple[float, ...]  # sizes of the errors, in root mean squares of the row
