"""Settings and text form of the aggregation methods (see `sdc.text` for the grammar).

A specification joins methods with `+`: `noise(sigma=0.01) + paft(max_period=50)`, or as shorthand
`noise,sigma=0.01+paft,max_period=50`. The settings of each method are the fields of its class below, and also keywords
of the function that implements the method. This module does not import JAX, so an invalid specification is rejected
without delay.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from sdc._lazy import jax
from sdc.settings import SettingError
from sdc.text import Form, Rest, form, read_term, split, write_term

from .channels import BadLink, Channel, GilbertElliott, Independent
from .delays import Latency, parse_latency
from .workers import check_probability, check_some

Rule: TypeAlias = Literal["update", "gradient"]


class _Method:
    """Settings of a method. Their `repr` is their text form."""

    def __repr__(self) -> str:
        return write_term(self, METHODS)


@dataclasses.dataclass(frozen=True, repr=False)
class Noise(_Method):
    """`noise`: simulated errors in all-reduces (see `gradient_noise`); standard deviations may be traced."""

    sigma: float = 0.0  # standard deviation of the noise on each element of a worker's aggregated gradient
    workers: tuple[int, ...] | None = None  # indices of the workers with noise, as in `0+2` (default: all)
    burst_period: int | None = None  # number of steps between bursts
    burst_sigma: float = 0.0  # standard deviation of a burst

    def __post_init__(self) -> None:
        for name, sigma in (("sigma", self.sigma), ("burst_sigma", self.burst_sigma)):
            if _known(sigma) and not 0 <= sigma < math.inf:
                raise ValueError(f"{name}={sigma}: expected a standard deviation of at least 0")
        check_some("burst_period", self.burst_period, "steps")
        if self.burst_period is None and (not _known(self.burst_sigma) or self.burst_sigma):
            raise ValueError("burst_sigma has no effect without burst_period; give both")

    @property
    def silent(self) -> bool:
        """Whether it is known at trace time that no step has noise."""
        degrees = (self.sigma,) if self.burst_period is None else (self.sigma, self.burst_sigma)
        return all(_known(degree) and not degree for degree in degrees)


def _known(value: Any) -> bool:
    """Returns whether a number is known at trace time."""
    return isinstance(value, int | float) or not isinstance(value, jax.Array)


@dataclasses.dataclass(frozen=True, repr=False)
class PaftSync(_Method):
    """`paft_sync`: averages parameters at a fixed period (see `paft_sync`)."""

    period: int = 10  # number of steps between synchronizations
    sync_state: bool = False  # whether to average the optimizer's state too


@dataclasses.dataclass(frozen=True, repr=False)
class Paft(_Method):
    """`paft`: averages parameters concurrently with the next step, at a period that depends on the noise (see
    `paft`)."""

    initial_period: int = 10  # in steps, as are the next two
    min_period: int = 1
    max_period: int = 1000
    sync_state: bool = False  # whether to average the optimizer's state too
    rule: Rule = (
        "update"  # what the period follows: replicas' distance in updates, or the paper's ratio to the gradient
    )
    target: float = 1.0  # distance of replicas before an average, in updates; for the rule `update`

    def __post_init__(self) -> None:
        if not 1 <= self.min_period <= self.initial_period <= self.max_period:
            raise ValueError(
                f"min_period={self.min_period}, initial_period={self.initial_period}, max_period={self.max_period}: "
                "expected 1 <= min_period <= initial_period <= max_period"
            )
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule={self.rule!r}: expected one of {', '.join(get_args(Rule))}")
        if not 0 < self.target < math.inf:
            raise ValueError(f"target={self.target:g}: expected a positive number of updates")


@dataclasses.dataclass(frozen=True, repr=False)
class DropCompute(_Method):
    """`dropcompute`: workers stop at a compute threshold (see `dropcompute`)."""

    # Threshold in seconds; `auto` chooses it by algorithm 2 from sampled latencies or, on a real clock, from the first
    # `measure` steps.
    threshold: float | Literal["auto"] = math.inf
    # Simulated latencies of micro-batches, such as `lognormal(mean=0.1, std=0.05)`; if neither `latency` nor `replay`
    # is given, every process uses its own clock.
    latency: Latency | None = None
    # Number of micro-batches per worker and step (default: the number of microsteps in the configuration).
    micro_batches: int | None = None
    correction: Literal["none", "rate", "count"] = "none"
    serial: float = 0.0  # time of a step outside its micro-batches in seconds, for `auto` with simulated latencies
    measure: int = 10  # number of steps without a threshold, for `auto` on a real clock
    replay: str | None = None  # run folder whose decisions are replayed

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, str) and not self.threshold > 0:
            raise ValueError(f"threshold={self.threshold:g}: expected a number of seconds above 0, inf, or auto")

    @property
    def real(self) -> bool:
        """Whether processes use real clocks."""
        return self.latency is None and self.replay is None


@dataclasses.dataclass(frozen=True, repr=False)
class Lossy(_Method):
    """`lossy`: ZeRO-2 over links that lose packets (see `lossy_zero2`)."""

    p: float = 0.0  # loss rate of gradients and parameters, unless given separately
    p_grad: float | None = None
    p_param: float | None = None
    # Number of elements per packet (default: everything that a worker sends to another in a step).
    packet: int | None = None
    burst: float | None = None  # mean length of bursts in packets, for losses in bursts
    sender: int | None = None  # only links from this worker lose packets
    receiver: int | None = None  # only links to this worker lose packets
    reliable: float = 0.0  # share of packets sent reliably
    stale: bool = False  # whether the last packet that arrived stands in for a lost one
    parity: int | None = None  # number of data packets per parity packet
    tighten: float = 0.0  # exponent with which rates follow the gradient's norm
    replay: str | None = None  # run folder whose losses are replayed

    def __post_init__(self) -> None:
        self.channels()

    def channels(self) -> tuple[Channel, Channel]:
        """Returns the channels of gradients and of parameters; raises ValueError if settings are mutually exclusive."""
        for name, given in (("p", self.p), ("p_grad", self.p_grad), ("p_param", self.p_param)):
            if given is not None:
                check_probability(name, given)
        one_link = self.sender is not None or self.receiver is not None
        if one_link and self.burst is not None:
            raise ValueError("burst cannot be combined with sender or receiver; give one or the other")

        def channel(rate: float) -> Channel:
            if one_link:
                return BadLink(rate, self.sender, self.receiver)
            return Independent(rate) if self.burst is None else GilbertElliott(rate, self.burst)

        gradient, parameter = (self.p if rate is None else rate for rate in (self.p_grad, self.p_param))
        return channel(gradient), channel(parameter)


@dataclasses.dataclass(frozen=True, repr=False)
class Shadow(_Method):
    """`shadow`: spare ranks recompute the gradients of others (see `shadow`)."""

    spares: int = 1  # number of spare ranks; their share of the batch is omitted


@dataclasses.dataclass(frozen=True, repr=False)
class Aggregation:
    """The methods of a specification. Its `repr` is its text form."""

    noise: Noise | None = None  # noise on gradients
    dropcompute: DropCompute | None = None  # early stopping of workers
    method: PaftSync | Paft | Lossy | Shadow | None = None  # wrapper of the optimizer or of the gradient

    def __repr__(self) -> str:
        return " + ".join(str(method) for method in (self.noise, self.dropcompute, self.method) if method is not None)

    @property
    def lossy(self) -> Lossy | None:
        """Settings of lossy links; None if no links are lossy."""
        return self.method if isinstance(self.method, Lossy) else None

    @property
    def spares(self) -> int:
        """Number of spare ranks."""
        return self.method.spares if isinstance(self.method, Shadow) else 0

    @property
    def clocked(self) -> bool:
        """Whether processes use real clocks."""
        return self.dropcompute is not None and self.dropcompute.real

    def micro_batches(self, microsteps: int) -> int:
        """Returns the number of micro-batches of a worker, for a batch of `microsteps` microsteps."""
        settings = self.dropcompute
        return microsteps if settings is None or settings.micro_batches is None else settings.micro_batches

    def check(self, *, data: int, model: int, batch_size: int, microsteps: int) -> None:
        """Raises SettingError if the methods do not fit the numbers of ranks and the batch size."""

        def wrong(problem: str) -> SettingError:
            return SettingError("aggregate", str(self), problem)

        settings, noise = self.dropcompute, self.noise
        if data < (least := self.spares + 2):
            raise wrong(f"expected at least {least} data ranks, got {data}")
        if model > 1 and (lossy := self.lossy) and (lossy.reliable or lossy.tighten or lossy.replay):
            raise wrong(
                "reliable, tighten and replay act on the data of one model rank, and would make replicated arrays "
                "differ between model ranks; give one model rank"
            )
        share, cut = batch_size // data * microsteps, self.micro_batches(microsteps)
        if cut < 1 or share % cut:
            raise wrong(
                f"the {share} sequences of a data rank are not divisible by micro_batches={cut}; choose a divisor of "
                f"{share}"
            )
        if settings is not None and settings.correction == "rate" and settings.latency is None:
            raise wrong(
                "correction=rate needs the mean drop rate in advance, which requires simulated latencies; give "
                "correction=count"
            )
        if noise is not None and noise.workers and not set(noise.workers) <= set(range(data)):
            raise wrong(f"workers={noise.workers}: expected numbers from 0 to {data - 1}")
        if self.clocked and model > 1:
            raise self.no_clock(data)

    def no_clock(self, data: int) -> SettingError:
        """Returns the error for processes and ranks that cannot use a real clock."""
        return SettingError(
            "aggregate",
            str(self),
            f"a real clock needs one process with one device for each of the {data} data ranks; "
            "to simulate latencies instead, give latency=..., as in latency=lognormal(mean=0.1, std=0.05)",
        )

    @property
    def simulated(self) -> list[str]:
        """Descriptions of the simulated faults, delays and losses, for the run record."""
        found = []
        if self.noise is not None:
            found.append(f"noise on aggregated gradients: {self.noise}")
        if self.dropcompute is not None and not self.dropcompute.real:
            found.append(f"latencies of micro-batches: {self.dropcompute.latency or self.dropcompute.replay}")
        if self.lossy is not None:
            found.append(f"lost packets: {self.lossy}")
        return found


METHODS: Mapping[str, Form] = {
    "noise": form(Noise), "paft_sync": form(PaftSync), "paft": form(Paft),
    "dropcompute": form(DropCompute, read={"latency": Rest(parse_latency)}),
    "lossy": form(Lossy), "shadow": form(Shadow),
}  # fmt: skip
EXAMPLE = "noise(sigma=0.01) + paft(max_period=50)"


def parse_aggregation(text: str) -> Aggregation:
    """Parses a specification."""

    def wrong(problem: str) -> ValueError:
        return ValueError(f"aggregation {text!r}: {problem}")

    found: dict[str, Any] = {}
    for part in split(text, "+"):
        name, settings, *_ = read_term("aggregation", part, METHODS, noun="method", example=EXAMPLE)
        place = name if name in ("noise", "dropcompute") else "method"
        if place in found:
            raise wrong(
                f"{name} cannot be combined with {type(found[place]).__name__.lower()}; give at most one of "
                "paft_sync, paft, lossy and shadow, and each method only once"
            )
        found[place] = settings
    aggregation = Aggregation(**found)
    if isinstance(aggregation.method, Shadow) and len(found) > 1:
        raise wrong(
            "shadow needs replicas that are bitwise equal, and gradients of whole batches; use it alone, and to "
            "simulate faults, inject them into the step"
        )
    if aggregation.lossy is not None and aggregation.noise is not None:
        raise wrong(
            "lossy takes the workers' own gradients, so there is no all-reduce to which noise could be added; combine "
            "noise with paft or paft_sync"
        )
    if aggregation.lossy is not None and aggregation.lossy.stale and aggregation.dropcompute is not None:
        raise wrong(
            "dropcompute gives weights to the workers' gradients, and stale packets have none; leave out one of the two"
        )
    return aggregation
