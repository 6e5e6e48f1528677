"""The result of a burn-in, as the file `result.json` and as an object that a running burn-in updates.

`judgement.judge` derives the verdict. Reading and evaluating a file does not require JAX.
"""

import dataclasses
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from sdc.settings import Flag, SettingError, Within, check_fields

from ..schema import Device, Environment, Fields, Header, about, now
from ..verdict import Verdict
from .sensors import Course
from .workloads import DTYPES, BurninWorkload, DataType, Family, LevelName, find_level, workloads

if TYPE_CHECKING:
    import jax

RESULT = "result.json"  # name of the file in the folder of a burn-in
EVENTS = "events.jsonl"  # name of the log beside the result
BUNDLE = "bundle.tar.gz"  # name of the bundle beside the result, if there are findings
# Reasons why a burn-in has not run to its end: it is still running, or its caller stopped it.
UNDER_WAY, ON_REQUEST = "under way", "asked to stop"
MOST_ROUNDS = 10**9
Evidence: TypeAlias = Literal["repeat", "vote", "golden", "reference", "checksums"]
Accepted: TypeAlias = Literal["repeat"]
Persistence: TypeAlias = Literal["transient", "intermittent", "persistent"]


class CheckedDevice(Device, kw_only=True):
    """A device, and the amount of checking done on it."""

    index: Annotated[int, about("number of the device among those of the burn-in, from 0")]
    elements: Annotated[
        int, about("number of elements checked, excluding runs that were compared with nothing or whose time is void")
    ] = 0
    runs: Annotated[int, about("number of runs checked, excluding those whose time under load is void")] = 0
    seconds: Annotated[float, about("time under load in seconds, excluding void time")] = 0.0
    weakest: Annotated[str, about("family of workloads with the fewest checked elements")] = ""
    least: Annotated[int, about("number of elements checked in that family", ge=0)] = 0
    excluded_rate: Annotated[
        float,
        about(
            "rate per element at which independent mismatches in that family would have been detected with 95 % "
            "probability; 1 if nothing was checked"
        ),
    ] = 1.0
    excluded_interval: Annotated[
        float | None,
        about(
            "mean interval, in seconds under load, at which bursts would have been detected with 95 % probability; "
            "`null` without time under load"
        ),
    ] = None
    sensors: Annotated[Course | None, about("temperature, power, clocks and errors, where a driver reports them")] = (
        None
    )


class Tally(Fields, kw_only=True):
    """Counts of the runs of a workload on a device; all counts are 0 if the workload did not run."""

    workload: Annotated[str, about("name: family, type, sizes, data")]
    device: Annotated[int, about("`index` of the device")]
    family: Annotated[str, about("family of the workload: the part of the device that it tests")]
    alike: Annotated[bool, about("whether all devices have equal outputs and can therefore vote")] = True
    work: Annotated[float, about("operations or bytes per run, in `unit`", ge=0)]
    unit: Annotated[str, about("`flop` or `byte`")] = "flop"
    runs: Annotated[int, about("number of runs checked, excluding reruns after a difference", ge=0)] = 0
    standard: Annotated[int, about("number of these runs that used the data of the first rounds", ge=0)] = 0
    elements: Annotated[int, about("number of elements checked in these runs", ge=0)] = 0
    seconds: Annotated[float, about("time under load in seconds", ge=0)] = 0.0
    median: Annotated[float, about("median time of a run in seconds, with a resolution of 4 %", ge=0)] = 0.0
    fastest: Annotated[float, about("shortest time of a run in seconds", ge=0)] = 0.0
    differences: Annotated[int, about("number of runs with a difference", ge=0)] = 0
    repeated: Annotated[int, about("number of runs that were compared with an earlier one", ge=0)] = 0
    voted: Annotated[
        int, about("number of runs in which other devices of the same kind agreed or outvoted the device", ge=0)
    ] = 0
    referred: Annotated[int, about("number of runs that were compared with the host's result", ge=0)] = 0
    golden: Annotated[int, about("number of runs that were compared with a golden digest", ge=0)] = 0
    checked: Annotated[int, about("number of rows of matrix products that checksums checked", ge=0)] = 0
    flagged: Annotated[int, about("number of rows that checksums flagged", ge=0)] = 0
    confirmed: Annotated[int, about("number of flagged rows whose recomputation was right", ge=0)] = 0
    simulated: Annotated[int, about("number of elements that simulated faults changed", ge=0)] = 0
    share: Annotated[
        float | None,
        about(
            "median throughput as a share of the best run's or the other devices' throughput, whichever is lower; "
            "`null` if runs are too short or devices share a processor"
        ),
    ] = None
    void: Annotated[bool, about("whether the device was throttled, which voids its time under load")] = False
    zeros: Annotated[bool, about("whether the device reads the data as zeros, so that its elements do not count")] = (
        False
    )
    key: Annotated[
        str | None, about("everything that determines the bits: workload, program, digest algorithm, device, versions")
    ] = None
    digest: Annotated[
        str | None,
        about("digest of a healthy device's outputs with the data of the first rounds, 16 hexadecimal digits"),
    ] = None

    def begin_anew(self) -> None:
        """Resets the counts of checks, but keeps the differences that were found."""
        self.runs = self.standard = self.elements = 0
        self.repeated = self.voted = self.referred = self.golden = self.checked = 0
        self.seconds = self.median = self.fastest = 0.0
        self.digest = self.share = None

    @property
    def rate(self) -> float | None:
        return self.work / self.median if self.median else None


class Element(Fields, kw_only=True):
    """A differing element of an output."""

    output: Annotated[str, about("path of the output in the pytree of outputs")]
    index: Annotated[int, about("flat index in the output, row-major")]
    old: Annotated[str, about("right bits, hexadecimal")]
    new: Annotated[str, about("bits found, hexadecimal")]
    expected: Annotated[str, about("right value")]
    found: Annotated[str, about("value found")]


class Elements(Fields, kw_only=True):
    """An element-by-element comparison of right and wrong outputs."""

    differing: Annotated[int, about("number of elements that differ in any bit")]
    total: Annotated[int, about("number of elements compared")]
    first: Annotated[tuple[Element, ...], about("the first differing elements")]
    largest: Annotated[float, about("largest absolute difference, among elements that are finite in both outputs")]
    relative: Annotated[float, about("largest difference relative to the right element")]
    nonfinite: Annotated[int, about("number of differing elements that are not finite in at least one of the outputs")]


class Finding(Fields, kw_only=True):
    """A difference, with the results of the reruns after it."""

    sentence: Annotated[str, about("the finding in words")] = ""
    workload: Annotated[str, about("name of the workload")]
    devices: Annotated[
        tuple[int, ...], about("the device whose outputs differ, or several devices if it is unknown which is wrong")
    ]
    round: Annotated[int, about("number of the round, from 0")]
    seed: Annotated[int, about("seed of the data")] = 0
    kinds: Annotated[
        tuple[Evidence, ...],
        about("evidence of the difference: `repeat`, `vote`, `golden`, `reference`, `checksums`"),
    ]
    digest: Annotated[str, about("digest of the first device's outputs")]
    expected: Annotated[str | None, about("digest of the right outputs; `null` if unknown")] = None
    persistence: Annotated[
        Persistence | None, about("whether the difference recurred in the reruns; `null` without reruns")
    ] = None
    elements: Annotated[
        Elements | None, about("the elements that differ; `null` if no right outputs were available")
    ] = None
    confirmed: Annotated[
        int, about("number of rows of matrix products that checksums flagged and whose recomputation was right")
    ] = 0
    simulated: Annotated[
        int,
        about(
            "number of elements that simulated faults changed (in the earlier runs, if `repeat` is the only evidence)"
        ),
    ] = 0
    note: Annotated[str, about("further remarks")] = ""


class Ended(Fields, kw_only=True):
    """A workload or device that did not run to the end."""

    workload: Annotated[str | None, about("name of the workload; `null` for all workloads of a device")]
    device: Annotated[int | None, about("index of the device; `null` for all devices")]
    round: Annotated[int, about("round in which it ended")]
    reason: Annotated[str, about("the exception")]

    @property
    def where(self) -> str:
        device = "all devices" if self.device is None else f"device {self.device}"
        return f"{self.workload or 'all workloads'} on {device}"


class NodeOutlook(Fields, kw_only=True):
    """Probability that the burn-in would have detected a node of the published study, at its published rates."""

    node: Annotated[str, about("the node of arXiv:2502.12340")]
    probability: Annotated[float, about("probability of a difference on the device that was checked least")]
    low: Annotated[float, about("the probability at the lower 95 % limit of the node's rates")]
    high: Annotated[float, about("the probability at the upper 95 % limit of the node's rates")]


class GoldenUse(Fields, kw_only=True):
    """Use of the given golden digests."""

    file: Annotated[str | None, about("name of the file, as given")] = None
    used: Annotated[int, about("number of digests that were compared")] = 0
    foreign: Annotated[int, about("number of digests of other programs or devices, which were not compared")] = 0
    unneeded: Annotated[int, about("number of digests of workloads that were not selected")] = 0
    doubt: Annotated[str | None, about("reason why the digests do not support a PASS")] = None


class DeviceRequest(NamedTuple):
    platform: str | None  # `cpu`, `gpu` or `tpu`; None for the best available
    number: int | None  # None for all available

    @property
    def simulated(self) -> int:
        return (self.number or 1) if self.platform in ("cpu", None) else 1

    def doubts(self, platform: str | None, count: int) -> list[str]:
        """Returns reasons against a PASS if the available devices do not satisfy the request."""
        if self.platform is None:
            doubt = "no accelerator was found, and the CPU was not requested; give --devices cpu to test the CPU"
            return [doubt] if platform == "cpu" else []
        if platform != self.platform:
            return [f"{self.platform} was requested, but this host has {platform or 'no device'}"]
        if self.number is not None and count < self.number:
            return [f"{self.number} {self.platform} devices were requested, but this host has {count}"]
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurninSettings:
    """Settings of a burn-in: the flags of `sdc burnin`, by name."""

    level: Annotated[
        str,
        Flag(type=LevelName),
        about("sizes and duration: quick (4 rounds), prejob (5 minutes), acceptance (an hour) or soak (a day)"),
    ] = "quick"
    minutes: Annotated[
        float | None, Within(0, 60 * 24 * 366, above=True), about("duration in minutes; by default, that of the level")
    ] = None
    rounds: Annotated[
        int | None, Within(1, MOST_ROUNDS), about("number of rounds of all workloads, instead of a duration")
    ] = None
    only: Annotated[
        tuple[str, ...] | None,
        Flag(type=tuple[Family, ...], repeated=True),
        about("family of workloads to run; may be repeated; by default, all families"),
    ] = None
    dtypes: Annotated[tuple[str, ...], Flag(type=tuple[DataType, ...]), about("floating-point types")] = DTYPES
    seed: Annotated[
        int | None,
        Within(0, 2**32 - 1),
        about("seed of the data after the first rounds, which always use the same data; by default random"),
    ] = None
    accept: Annotated[
        tuple[str, ...],
        Flag(type=tuple[Accepted, ...], repeated=True),
        about(
            "accept repetition on one device (repeat) as the only evidence, although it misses faults that repeat "
            "themselves"
        ),
    ] = ()
    faults: Annotated[
        tuple[str, ...],
        Flag("fault", repeated=True),
        about(
            "simulated fault, such as bitflip,rate=1e-4,site=matrix/*,device=2 (default: on the last device); may be "
            "repeated"
        ),
    ] = ()

    @property
    def selected(self) -> tuple[str, ...]:
        """The families and types of numbers to which these settings restrict a burn-in; empty if none are left out."""
        return (*(self.only or ()), *(self.dtypes if {*self.dtypes} != {*DTYPES} else ()))

    def resolved(self) -> "BurninSettings":
        """Returns valid settings, with the level's duration if none is given; raises SettingError otherwise."""
        check_fields(self)
        if self.minutes is not None and self.rounds is not None:
            raise SettingError("minutes", self.minutes, "rounds are given too; give either minutes or rounds")
        if not self.dtypes:
            raise SettingError("dtypes", None, "expected at least one floating-point type")
        minutes, rounds = self.minutes, self.rounds
        if minutes is None and rounds is None:
            minutes = find_level(self.level).minutes
            rounds = 2 * find_level(self.level).repeats if minutes is None else None
        accept = tuple(dict.fromkeys(self.accept))
        return dataclasses.replace(self, minutes=minutes, rounds=rounds, only=self.only or None, accept=accept)

    def chosen(self, devices: "Sequence[jax.Device]") -> list[BurninWorkload]:
        """Returns the workloads that these settings select for devices."""
        return workloads(self.level, devices, self.dtypes, only=self.only)


class BurninResult(Header, kw_only=True, tag="jax-sdc burn-in"):
    """`result.json` of a burn-in."""

    id: Annotated[str, about("random identifier, which a resumed burn-in keeps")] = msgspec.field(
        default_factory=lambda: uuid.uuid4().hex
    )
    created: Annotated[str, about("when the burn-in began, UTC")] = msgspec.field(default_factory=now)
    ended: Annotated[str, about("when the result was written, UTC")] = ""
    seconds: Annotated[float, about("duration by a monotonic clock, including compilation", ge=0)] = 0.0
    verdict: Annotated[Verdict, about("`clean`, `corrupt` or `inconclusive`")] = Verdict.INCONCLUSIVE
    evidence: Annotated[
        tuple[Evidence, ...],
        about("evidence that covers every workload on every device; for `corrupt`, the evidence of a difference"),
    ] = ()
    sentences: Annotated[tuple[str, ...], about("findings and reasons, the most severe first")] = ()
    settings: Annotated[BurninSettings, about("the settings, which are flags of `sdc burnin`")] = msgspec.field(
        default_factory=BurninSettings
    )
    environment: Annotated[Environment, about("properties that must be equal for bits to be comparable")] = (
        msgspec.field(default_factory=Environment)
    )
    rounds: Annotated[int, about("number of rounds completed", ge=0)] = 0
    seed: Annotated[
        int | None, about("seed of the data after the first rounds; `null` if all rounds use the same data")
    ] = None
    stopped: Annotated[str | None, about("why the burn-in was stopped early, such as `SIGTERM`; otherwise `null`")] = (
        None
    )
    hung: Annotated[bool, about("whether a device never answered")] = False
    devices: Annotated[list[CheckedDevice], about("the devices, and how much was checked on each")] = []
    workloads: Annotated[list[Tally], about("counts by workload and device")] = []
    findings: Annotated[list[Finding], about("differences with their reruns, in chronological order")] = []
    unfinished: Annotated[list[Ended], about("workloads and devices that did not run to the end")] = []
    doubts: Annotated[list[str], about("reasons against a PASS that do not depend on the comparisons")] = []
    notes: Annotated[list[str], about("further remarks")] = []
    outlooks: Annotated[
        list[NodeOutlook], about("probabilities that nodes of the published study would have been detected")
    ] = []
    golden: Annotated[GoldenUse | None, about("use of the golden digests; `null` if none were given")] = None
    command: Annotated[list[str] | None, about("the command line")] = None

    @property
    def simulated(self) -> bool:
        """Whether faults were simulated, in which case the result says nothing about the hardware."""
        return bool(self.settings.faults)

    @property
    def under_way(self) -> bool:
        return self.stopped == UNDER_WAY

    @property
    def headline(self) -> str:
        mark = "SIMULATION: " if self.simulated else ""
        return f"{mark}{self.verdict.acceptance} ({', '.join(self.evidence) or 'no evidence'})"

    @property
    def tallies(self) -> dict[tuple[str, int], Tally]:
        return {(tally.workload, tally.device): tally for tally in self.workloads}

    def has_ended(self, workload: str, devices: range) -> bool:
        """Returns whether a workload has ended on any of these devices.

        A workload that spans all devices ends on all of them if one device fails.
        """
        return any(
            (end.workload is None and end.device in devices)
            or (end.workload == workload and (end.device is None or end.device in devices))
            for end in self.unfinished
        )


class Standing(Fields, kw_only=True):
    """Whether the devices of a host may be used: the output of `sdc verdict --json`."""

    verdict: Annotated[Verdict, about("`clean`, `corrupt` or `inconclusive`")]
    reason: Annotated[str, about("the first sentence of the verdict, or why there is no valid result")]
    simulated: Annotated[bool, about("whether faults were simulated")] = False
    file: Annotated[str | None, about("file of the result")] = None
    ended: Annotated[str | None, about("when the result was written, UTC")] = None
