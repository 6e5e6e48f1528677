"""What the studies of robust aggregation measure: numbers, before anybody makes tables, figures or claims of them.

`sdc.train.studies` runs the experiments and returns these; `sdc.analysis.studies` reads them. Neither knows the other.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What every study says of itself.

    Attributes:
        workers: of the trainings.
        steps: optimizer steps of a training.
        seed: of parameters, data and everything simulated.
        sources: by workload, where its data come from.
    """

    study: ClassVar[str]
    workers: int
    steps: int
    seed: int
    sources: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class OfWorkload:
    """What is measured of one workload.

    Attributes:
        workload: its name.
        metric: what its scores are, `accuracy` or `perplexity`.
    """

    workload: str
    metric: str


@dataclasses.dataclass(frozen=True)
class Burst:
    """A training with bursts of noise.

    Attributes:
        method: by which it is trained.
        variance: of a burst.
        steps: after which the score was taken.
        scores: one for each of these steps.
    """

    method: str
    variance: float
    steps: Int[np.ndarray, "looks"]
    scores: Float[np.ndarray, "looks"]


@dataclasses.dataclass(frozen=True)
class NoisyTraining(OfWorkload):
    """A workload under noise in the mean gradients.

    Attributes:
        scores: by method, one for each variance of `PaftMeasured`; `clean` has no noise.
        synchronizations: of `paft`, one number for each variance.
        bursts: trainings with bursts.
    """

    scores: Mapping[str, tuple[float, ...]]
    synchronizations: tuple[int, ...]
    bursts: tuple[Burst, ...]


@dataclasses.dataclass(frozen=True)
class Drifted:
    """Replicas that drift apart under plain SGD.

    Attributes:
        period: steps from one synchronization to the next; None for none.
        squares: squared distance of a replica from the mean of all after each step, before a synchronization; the mean
            over the replicas.
    """

    period: int | None
    squares: Float[np.ndarray, "steps"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaftMeasured(Measured):
    """What the study of inconsistent gradients measures.

    Attributes:
        variances: of the noise.
        burst_every: steps from one burst to the next.
        trainings: one for each workload.
        drifting: the workload of which the divergence was measured.
        sigma, rate, dimension: of its noise; its learning rate; how many parameters it has.
        drifts: with and without synchronization.
    """

    study: ClassVar[str] = "paft"
    variances: tuple[float, ...]
    burst_every: int
    trainings: tuple[NoisyTraining, ...]
    drifting: str
    sigma: float
    rate: float
    dimension: int
    drifts: tuple[Drifted, ...]


@dataclasses.dataclass(frozen=True)
class PredictedSpeedup:
    """What a threshold would gain, from sampled latencies.

    Attributes:
        workers: of the fleet.
        step: mean seconds of a step without a threshold.
        threshold, drop_rate, speedup: of the best threshold.
        rates, speedups: drop rates, and what the threshold gains that drops so many.
    """

    workers: int
    step: float
    threshold: float
    drop_rate: float
    speedup: float
    rates: tuple[float, ...]
    speedups: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class ClockedSpeedup:
    """What a threshold gained on a real clock.

    Attributes:
        workers: threads.
        iterations: of each of the two measurements.
        seconds: of all iterations, without a threshold.
        stopped_seconds: of all iterations, with it.
        speedup: measured.
        predicted: the speedup of the same latencies by post analysis.
    """

    workers: int
    iterations: int
    seconds: float
    stopped_seconds: float
    speedup: float
    predicted: float


@dataclasses.dataclass(frozen=True)
class DroppedRun:
    """A training with a compute threshold.

    Attributes:
        rate: the drop rate that was asked for; 0 for no threshold.
        extra: steps beyond those of the study.
        correction: see `sdc.aggregation.combine`.
        drop_rate: that was found.
        score: of the end.
        losses: of the steps; NaN where nothing was completed.
        ends: simulated seconds at the end of each step.
        unstopped: simulated seconds of all steps without a threshold.
    """

    rate: float
    extra: int
    correction: str
    drop_rate: float
    score: float
    losses: Float[np.ndarray, "steps"]
    ends: Float[np.ndarray, "steps"]
    unstopped: float


@dataclasses.dataclass(frozen=True)
class DroppedTraining(OfWorkload):
    """The trainings of a workload: the first without a threshold, one with extra steps, some with corrections."""

    runs: tuple[DroppedRun, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropComputeMeasured(Measured):
    """What the study of DropCompute measures.

    Attributes:
        micro_batches: of a step of a worker.
        base: seconds of a micro-batch without any delay.
        mean, deviation: of the seconds of a micro-batch, by theory.
        serial: seconds of the rest of a step.
        predicted: by number of workers.
        clocked: by number of threads.
        trainings: one for each workload.
    """

    study: ClassVar[str] = "dropcompute"
    micro_batches: int
    base: float
    mean: float
    deviation: float
    serial: float
    predicted: tuple[PredictedSpeedup, ...]
    clocked: tuple[ClockedSpeedup, ...]
    trainings: tuple[DroppedTraining, ...]


@dataclasses.dataclass(frozen=True)
class LossyTraining(OfWorkload):
    """A workload over links that lose packets.

    Attributes:
        steps: of its trainings.
        seeds: trainings of which a score is the mean.
        scores: by the way in which packets get lost, and by loss rate.
        drifts: by loss rate, the mean square of the drift between two copies over that of the owners' moves.
    """

    steps: int
    seeds: int
    scores: Mapping[str, Mapping[float, float]]
    drifts: Mapping[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyMeasured(Measured):
    """What the study of lost packets measures.

    Attributes:
        rates: loss rates of the trainings.
        packet: elements of a packet, where losses are per packet.
        burst: mean length of a burst, in packets.
        trainings: one for each workload.
        walks: by loss rate, the drift between two copies of a random walk, in squares of its step.
    """

    study: ClassVar[str] = "lossy"
    rates: tuple[float, ...]
    packet: int
    burst: float
    trainings: tuple[LossyTraining, ...]
    walks: Mapping[float, float]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A training that a shadow replica watched.

    Attributes:
        hardware: what kind it was.
        faulty: the rank with faults, or None.
        corrupted: steps in which a fault changed something.
        differed: steps in which a comparison found a difference.
        compared: ranks that were compared in each step.
        verdict: of `sdc.aggregation.judge`.
        suspects: ranks that it names.
        undecided: sets of ranks, one of which is wrong.
    """

    hardware: str
    faulty: int | None
    corrupted: Bool[np.ndarray, "steps"]
    differed: Bool[np.ndarray, "steps"]
    compared: Int[np.ndarray, "steps ranks"]
    verdict: str
    suspects: tuple[int, ...]
    undecided: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class WatchedTraining(OfWorkload):
    """The trainings of a workload, on each kind of hardware."""

    runs: tuple[Watched, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowMeasured(Measured):
    """What the study of the shadow replica measures: one training for each workload and kind of hardware."""

    study: ClassVar[str] = "shadow"
    trainings: tuple[WatchedTraining, ...]
