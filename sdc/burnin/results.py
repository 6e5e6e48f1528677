"""What a burn-in found, as an object and as the file `result.json`: a burn-in fills it while it is at work.

`judgement.judge` says what follows from it. Reading and judging a file does without JAX.
"""

import dataclasses
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec

from sdc.settings import Flag, SettingError, Within, check_fields

from ..schema import Device, Environment, Fields, Header, about, now
from ..verdict import Verdict
from .sensors import Course
from .workloads import DTYPES, BurninWorkload, DataType, Family, LevelName, find_level, workloads

if TYPE_CHECKING:
    import jax

RESULT = "result.json"  # name of the file in the folder of a burn-in
EVENTS = "events.jsonl"  # name of the log beside it
BUNDLE = "bundle.tar.gz"  # name of the evidence beside it, where something was found
# Why a burn-in is not at its end: nothing stopped it, or its caller did.
UNDER_WAY, ON_REQUEST = "under way", "asked to stop"
MOST_ROUNDS = 10**9
Evidence: TypeAlias = Literal["repeat", "vote", "golden", "reference", "checksums"]
Accepted: TypeAlias = Literal["repeat"]
Persistence: TypeAlias = Literal["transient", "intermittent", "persistent"]


class CheckedDevice(Device, kw_only=True):
    """A device, and how much was checked on it."""

    index: Annotated[int, about("number of the device among those of the burn-in, from 0")]
    elements: Annotated[int, about("numbers that were checked, without those of runs whose time at load is void")] = 0
    runs: Annotated[int, about("runs that were checked, without the same")] = 0
    seconds: Annotated[float, about("time at load, without what is void")] = 0.0
    excluded_rate: Annotated[
        float,
        about("independent mismatches at this rate per element would have been seen with 95 %; 1 if nothing was"),
    ] = 1.0
    excluded_interval: Annotated[
        float | None,
        about("bursts that come every so many seconds at load would have been seen with 95 %; `null` without time"),
    ] = None
    sensors: Annotated[Course | None, about("temperature, power, clocks and errors, where a driver reports them")] = (
        None
    )


class Tally(Fields, kw_only=True):
    """Counts of a workload on a device; all of them are 0 where it did not run."""

    workload: Annotated[str, about("name: family, type, sizes, data")]
    device: Annotated[int, about("`index` of the device")]
    family: Annotated[str, about("part of the device that it is for")]
    alike: Annotated[bool, about("whether all devices have equal outputs, so that they can vote")] = True
    work: Annotated[float, about("operations or bytes of a run, in `unit`", ge=0)]
    unit: Annotated[str, about("`flop` or `byte`")] = "flop"
    runs: Annotated[int, about("runs that were checked, without those right after a difference", ge=0)] = 0
    elements: Annotated[int, about("numbers that these checked", ge=0)] = 0
    seconds: Annotated[float, about("time at load", ge=0)] = 0.0
    median: Annotated[float, about("median time of a run, seconds, known to 4 %", ge=0)] = 0.0
    fastest: Annotated[float, about("shortest time of a run, seconds", ge=0)] = 0.0
    differences: Annotated[int, about("runs with a difference", ge=0)] = 0
    repeated: Annotated[int, about("runs that could be compared with one before", ge=0)] = 0
    voted: Annotated[int, about("runs in which other devices of its kind agreed with it, or outvoted it", ge=0)] = 0
    referred: Annotated[int, about("runs that were compared with what the host computed", ge=0)] = 0
    golden: Annotated[int, about("runs that were compared with what was recorded", ge=0)] = 0
    checked: Annotated[int, about("rows of products that checksums judged", ge=0)] = 0
    flagged: Annotated[int, about("rows that checksums flagged", ge=0)] = 0
    confirmed: Annotated[int, about("flagged rows that came out otherwise when computed again", ge=0)] = 0
    simulated: Annotated[int, about("elements that simulated faults changed", ge=0)] = 0
    share: Annotated[
        float | None,
        about(
            "throughput at the median as a share of the best run's, or of that of the other devices, whichever is "
            "lower; `null` where runs are too short or devices share a processor"
        ),
    ] = None
    void: Annotated[bool, about("throttled: its time at load counts for nothing")] = False
    key: Annotated[
        str | None, about("what decides the bits: workload, program, digest algorithm, device, versions")
    ] = None
    digest: Annotated[
        str | None, about("of the outputs, 16 hexadecimal digits; those of a healthy device. Later runs must repeat it")
    ] = None

    def begin_anew(self) -> None:
        """Forgets what was checked; differences that were found stay."""
        self.runs = self.elements = self.repeated = self.voted = self.referred = self.golden = self.checked = 0
        self.seconds = self.median = self.fastest = 0.0
        self.digest = self.share = None

    @property
    def rate(self) -> float | None:
        return self.work / self.median if self.median else None


class Element(Fields, kw_only=True):
    """An element that differs."""

    output: Annotated[str, about("path of the output among those of the workload")]
    index: Annotated[int, about("flat index in it, row-major")]
    old: Annotated[str, about("bits as they should be, hexadecimal")]
    new: Annotated[str, about("bits as they are")]
    expected: Annotated[str, about("the number as it should be")]
    found: Annotated[str, about("the number as it is")]


class Elements(Fields, kw_only=True):
    """What outputs differ in."""

    differing: Annotated[int, about("elements that differ in any bit")]
    total: Annotated[int, about("elements compared")]
    first: Annotated[tuple[Element, ...], about("the first of them")]
    largest: Annotated[float, about("largest difference in size, of those finite in both")]
    relative: Annotated[float, about("largest difference relative to the element as it should be")]
    nonfinite: Annotated[int, about("differing elements that are not finite in one of the two")]


class Finding(Fields, kw_only=True):
    """A difference that was seen, and run again at once."""

    sentence: Annotated[str, about("all of it in words")] = ""
    workload: Annotated[str, about("name of the workload")]
    devices: Annotated[tuple[int, ...], about("the device that differs; several where nothing says which of them does")]
    round: Annotated[int, about("number of the round")]
    kinds: Annotated[
        tuple[Evidence, ...], about("evidence that sees it: `repeat`, `vote`, `golden`, `reference`, `checksums`")
    ]
    digest: Annotated[str, about("of the outputs of the first of the devices")]
    expected: Annotated[str | None, about("digest of what they should be, where that is known")] = None
    persistence: Annotated[
        Persistence | None, about("whether it came again in the runs after it; `null` where there were none")
    ] = None
    elements: Annotated[Elements | None, about("what differs; `null` where no right outputs were at hand")] = None
    confirmed: Annotated[int, about("rows of products that checksums flag, and that came out otherwise again")] = 0
    simulated: Annotated[
        int, about("elements that simulated faults changed; in the runs before, if only `repeat` sees it")
    ] = 0
    note: Annotated[str, about("what else there is to say")] = ""


class Ended(Fields, kw_only=True):
    """What did not run to the end."""

    workload: Annotated[str | None, about("name; `null` for all of a device")]
    device: Annotated[int | None, about("index of the device; `null` for all")]
    round: Annotated[int, about("round in which it ended")]
    reason: Annotated[str, about("what was thrown")]

    @property
    def where(self) -> str:
        device = "all devices" if self.device is None else f"device {self.device}"
        return f"{self.workload or 'all workloads'} on {device}"


class BurstOutlook(Fields, kw_only=True):
    """Whether bursts such as a node of the published study showed would have been seen.

    Each published figure is an interval between bursts that was observed once, and taken as that.
    """

    node: Annotated[str, about("the node of arXiv:2502.12340")]
    interval: Annotated[int, about("steps between bursts, as observed once")]
    steps: Annotated[int, about("training steps of the burn-in on each device")]
    probability: Annotated[float, about("that one burst falls into so many steps, the interval being observed once")]
    low: Annotated[float, about("the same at the upper limit (97.5 %) of the mean interval")]
    high: Annotated[float, about("the same at the lower limit (2.5 %)")]


class GoldenUse(Fields, kw_only=True):
    """What became of the golden digests that were given."""

    file: Annotated[str | None, about("name of the file, as it was given")] = None
    used: Annotated[int, about("digests that were compared")] = 0
    foreign: Annotated[int, about("digests of other programs or devices, which were not")] = 0
    unneeded: Annotated[int, about("digests of workloads that were not to run")] = 0
    doubt: Annotated[str | None, about("what stands against a PASS that rests on them")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurninSettings:
    """What was asked for: the flags of `sdc burnin`, by their names."""

    level: Annotated[
        str,
        Flag(type=LevelName),
        about("sizes and length: quick (2 rounds), prejob (5 minutes), acceptance (an hour) or soak (a day)"),
    ] = "quick"
    minutes: Annotated[
        float | None, Within(0, 60 * 24 * 366, above=True), about("how long; by default as the level says")
    ] = None
    rounds: Annotated[
        int | None, Within(1, MOST_ROUNDS), about("how often instead: so many times through all workloads")
    ] = None
    only: Annotated[
        tuple[str, ...] | None,
        Flag(type=tuple[Family, ...], repeated=True),
        about("only this family of workloads; may be repeated; by default all"),
    ] = None
    dtypes: Annotated[tuple[str, ...], Flag(type=tuple[DataType, ...]), about("types of floating-point numbers")] = (
        DTYPES
    )
    seed: Annotated[int, Within(0, 2**32 - 1), about("seed of the data; golden digests hold for one seed")] = 0
    accept: Annotated[
        tuple[str, ...],
        Flag(type=tuple[Accepted, ...], repeated=True),
        about("accept that a device alone can only repeat itself (repeat), which hides faults that repeat themselves"),
    ] = ()
    faults: Annotated[
        tuple[str, ...],
        Flag("fault", repeated=True),
        about(
            "simulated fault, as in bitflip,rate=1e-4,site=matrix/*,device=2; may be repeated; by default on the last "
            "device"
        ),
    ] = ()

    def resolved(self) -> "BurninSettings":
        """With the length of the level where none is given; a `SettingError` says what cannot be."""
        check_fields(self)
        if self.minutes is not None and self.rounds is not None:
            raise SettingError("minutes", self.minutes, "rounds are given too; give one of them")
        if not self.dtypes:
            raise SettingError("dtypes", None, "expected one or several")
        minutes, rounds = self.minutes, self.rounds
        if minutes is None and rounds is None:
            minutes = find_level(self.level).minutes
            rounds = 2 if minutes is None else None
        accept = tuple(dict.fromkeys(self.accept))
        return dataclasses.replace(self, minutes=minutes, rounds=rounds, only=self.only or None, accept=accept)

    def chosen(self, devices: "Sequence[jax.Device]") -> list[BurninWorkload]:
        """The workloads that these settings ask for on devices."""
        return workloads(self.level, devices, self.dtypes, only=self.only, seed=self.seed)


class BurninResult(Header, kw_only=True, tag="jax-sdc burn-in"):
    """`result.json` of a burn-in."""

    id: Annotated[str, about("random, another one for each burn-in; a continued one keeps it")] = msgspec.field(
        default_factory=lambda: uuid.uuid4().hex
    )
    created: Annotated[str, about("when the burn-in began, UTC")] = msgspec.field(default_factory=now)
    ended: Annotated[str, about("when the result was written, UTC")] = ""
    seconds: Annotated[float, about("how long it took by a clock that does not jump, compilation included", ge=0)] = 0.0
    verdict: Annotated[Verdict, about("`clean`, `corrupt` or `inconclusive`")] = Verdict.INCONCLUSIVE
    evidence: Annotated[
        tuple[Evidence, ...],
        about("kinds of evidence that every workload on every device rests on; of a corrupt one those that saw it"),
    ] = ()
    sentences: Annotated[tuple[str, ...], about("findings and reasons, the gravest first")] = ()
    settings: Annotated[BurninSettings, about("what was asked for: the flags of `sdc burnin`")] = msgspec.field(
        default_factory=BurninSettings
    )
    environment: Annotated[Environment, about("what must be equal for bits to be comparable")] = msgspec.field(
        default_factory=Environment
    )
    rounds: Annotated[int, about("rounds that were completed", ge=0)] = 0
    stopped: Annotated[str | None, about("why it was stopped early, such as `SIGTERM`; `null` if it was not")] = None
    hung: Annotated[bool, about("whether a device never answered")] = False
    devices: Annotated[list[CheckedDevice], about("where, and how much was checked")] = []
    workloads: Annotated[list[Tally], about("counts by workload and device")] = []
    findings: Annotated[list[Finding], about("differences that were run again, in order")] = []
    unfinished: Annotated[list[Ended], about("what did not run to the end")] = []
    doubts: Annotated[list[str], about("what stands against a PASS whatever was compared")] = []
    notes: Annotated[list[str], about("what else there is to say")] = []
    outlooks: Annotated[list[BurstOutlook], about("what is known of published bursts")] = []
    golden: Annotated[GoldenUse | None, about("the golden digests; `null` where none were given")] = None
    command: Annotated[list[str] | None, about("the command line")] = None

    @property
    def simulated(self) -> bool:
        """Whether faults were simulated: then nothing here is about the hardware."""
        return bool(self.settings.faults)

    @property
    def headline(self) -> str:
        mark = "SIMULATION: " if self.simulated else ""
        return f"{mark}{self.verdict.acceptance} ({', '.join(self.evidence) or 'no evidence'})"

    @property
    def tallies(self) -> dict[tuple[str, int], Tally]:
        return {(tally.workload, tally.device): tally for tally in self.workloads}

    def has_ended(self, workload: str, devices: range) -> bool:
        """Whether a workload runs no more on devices; one that spans all of them ends with any of these."""
        return any(
            (end.workload is None and end.device in devices)
            or (end.workload == workload and (end.device is None or end.device in devices))
            for end in self.unfinished
        )
