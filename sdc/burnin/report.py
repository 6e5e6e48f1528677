"""The result of a burn-in as a file, `result.json`: what fleets collect. Reading and checking it does without JAX."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from sdc.records import RecordError

from ..records import (
    AnyPath,
    Device,
    Environment,
    Fields,
    Host,
    about,
    identify,
    is_sound,
    package_version,
    read_bytes,
    read_json,
    write_sealed,
)

FORMAT = "jax-sdc burn-in"
SCHEMA = 1
"""Version of the layout. It changes with every change that an older reader would misread."""
READABLE = (1,)
RESULT = "result.json"
"""Name of the file in the folder of a burn-in."""
EVENTS = "events.jsonl"
"""Name of the log beside it."""
BUNDLE = "bundle.tar.gz"
"""Name of the evidence beside it, where something was found."""
Word: TypeAlias = Literal["PASS", "FAIL", "INCONCLUSIVE"]
CODES: dict[Word, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
NON_FINITE = (b'"NaN"', b'Infinity"')
"""Words that stand for numbers."""
NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
SHALLOW = 12
"""Levels of lists and objects, of which a report needs five."""


class VerdictPart(Fields, kw_only=True):
    """What follows."""

    word: Annotated[Word, about("`PASS`, `FAIL` or `INCONCLUSIVE`")]
    code: Annotated[int, about("exit code of the command: 0, 1 or 3")]
    kinds: Annotated[
        list[str],
        about("kinds of evidence that it rests on: `repeat`, `vote`, `golden`; of a FAIL those that saw the fault"),
    ]
    sentences: Annotated[list[str], about("findings and reasons, the gravest first")]
    simulated: Annotated[bool, about("whether faults were simulated: then nothing here is about the hardware")]


class Sensors(Fields, kw_only=True):
    """What a device's driver tells at one moment. What it does not tell is absent."""

    temperature: Annotated[float | None, about("degrees Celsius")] = None
    power: Annotated[float | None, about("watts")] = None
    clock: Annotated[float | None, about("clock of the processors, MHz")] = None
    memory_clock: Annotated[float | None, about("clock of the memory, MHz")] = None
    corrected: Annotated[int | None, about("memory errors that ECC corrected, since the driver was loaded")] = None
    uncorrected: Annotated[int | None, about("memory errors that ECC could not correct, since then")] = None
    retired: Annotated[int | None, about("memory pages or rows that were taken out of use")] = None
    slowed: Annotated[list[str] | None, about("why the clock is lower than it could be, in the driver's words")] = None


class Course(Fields, kw_only=True):
    """What a device's driver told before, during and after."""

    source: Annotated[str, about("who told: `nvml`, `amdsmi`, `hwmon` ...")]
    before: Annotated[Sensors, about("before the first run")]
    after: Annotated[Sensors, about("after the last one")]
    samples: Annotated[int, about("how often it was asked in between")]
    hottest: Annotated[float | None, about("highest temperature, degrees Celsius")] = None
    strongest: Annotated[float | None, about("highest power, watts")] = None
    slowest: Annotated[float | None, about("lowest clock of the processors under load, MHz")] = None
    events: Annotated[list[str], about("errors that the driver reported meanwhile, such as `Xid 48`")] = msgspec.field(
        default_factory=list
    )


class DeviceRow(Device, kw_only=True):
    """A device, and how much was checked on it."""

    index: Annotated[int, about("number of the device among those of the burn-in, from 0")]
    elements: Annotated[int, about("numbers that were checked, without those of runs whose time at load is void")]
    runs: Annotated[int, about("runs that were checked, without the same")]
    seconds: Annotated[float, about("time at load, without what is void")]
    excluded_rate: Annotated[
        float,
        about("independent mismatches at this rate per element would have been seen with 95 %; 1 if nothing was"),
    ]
    excluded_interval: Annotated[
        float | None,
        about("bursts that come every so many seconds at load would have been seen with 95 %; `null` without time"),
    ] = None
    sensors: Annotated[Course | None, about("temperature, power, clocks and errors, where a driver tells them")] = None


class WorkloadRow(Fields, kw_only=True):
    """A workload on a device."""

    workload: Annotated[str, about("name: family, type, sizes, data")]
    device: Annotated[int, about("`index` of the device")]
    family: Annotated[str, about("part of the device that it is for")]
    runs: Annotated[int, about("runs that were checked")]
    elements: Annotated[int, about("numbers that these checked")]
    seconds: Annotated[float, about("time at load")]
    differences: Annotated[int, about("runs with a difference")]
    repeated: Annotated[int, about("runs that could be compared with one before")]
    voted: Annotated[int, about("runs in which other devices of its kind agreed with it, or outvoted it")]
    referred: Annotated[int, about("runs that were compared with what the host computed")]
    golden: Annotated[int, about("runs that were compared with what was recorded")]
    checked: Annotated[int, about("rows of products that checksums judged")] = 0
    flagged: Annotated[int, about("rows that checksums flagged")] = 0
    confirmed: Annotated[int, about("flagged rows that came out otherwise when computed again")] = 0
    simulated: Annotated[int, about("elements that simulated faults changed")] = 0
    rate: Annotated[float | None, about("throughput at the median, `unit` per second")] = None
    best: Annotated[float | None, about("throughput of the fastest run")] = None
    unit: Annotated[str, about("`flop` or `byte`")] = "flop"
    share: Annotated[
        float | None,
        about("the median rate as a share of the best one, or of that of the other devices; `null` where not judged"),
    ] = None
    void: Annotated[bool, about("throttled: its time at load counts for nothing")] = False
    key: Annotated[
        str | None, about("what decides the bits: workload, program, digest algorithm, device, versions")
    ] = None
    digest: Annotated[str | None, about("of the outputs, 16 hexadecimal digits; those of a healthy device")] = None


class ElementRow(Fields, kw_only=True):
    """An element that differs."""

    output: Annotated[str, about("path of the output among those of the workload")]
    index: Annotated[int, about("flat index in it, row-major")]
    old: Annotated[str, about("bits as they should be, hexadecimal")]
    new: Annotated[str, about("bits as they are")]
    expected: Annotated[str, about("the number as it should be")]
    found: Annotated[str, about("the number as it is")]


class ElementsPart(Fields, kw_only=True):
    """What outputs differ in."""

    differing: Annotated[int, about("elements that differ in any bit")]
    total: Annotated[int, about("elements compared")]
    first: Annotated[list[ElementRow], about("the first of them")]
    largest: Annotated[float, about("largest difference in size, of those finite in both")]
    relative: Annotated[float, about("largest difference relative to the element as it should be")]
    nonfinite: Annotated[int, about("differing elements that are not finite in one of the two")]


class FindingRow(Fields, kw_only=True):
    """A difference that was seen, and run again at once."""

    sentence: Annotated[str, about("all of it in words")]
    workload: Annotated[str, about("name of the workload")]
    devices: Annotated[list[int], about("the device that differs; several where nothing says which of them does")]
    round: Annotated[int, about("number of the round")]
    kinds: Annotated[list[str], about("evidence that sees it: `repeat`, `vote`, `golden`, `reference`, `checksums`")]
    digest: Annotated[str, about("of the outputs")]
    expected: Annotated[str | None, about("digest of what they should be, where that is known")] = None
    persistence: Annotated[
        Literal["transient", "intermittent", "persistent"] | None, about("whether it came again in the runs after it")
    ] = None
    elements: Annotated[ElementsPart | None, about("what differs; `null` where no right outputs were at hand")] = None
    confirmed: Annotated[int, about("rows of products that checksums flag, and that came out otherwise again")] = 0
    simulated: Annotated[int, about("elements that simulated faults changed")] = 0
    note: Annotated[str, about("what else there is to say")] = ""


class EndedRow(Fields, kw_only=True):
    """What did not run to the end."""

    workload: Annotated[str | None, about("name; `null` for all of a device")]
    device: Annotated[int | None, about("index of the device; `null` for all")]
    round: Annotated[int, about("round in which it ended")]
    reason: Annotated[str, about("what was thrown")]


class Outlook(Fields, kw_only=True):
    """Whether bursts such as a node of the published study showed would have been seen.

    Each published figure is an interval between bursts that was observed once, and taken as that.
    """

    node: Annotated[str, about("the node of arXiv:2502.12340")]
    interval: Annotated[int, about("steps between bursts, as observed once")]
    steps: Annotated[int, about("training steps of the burn-in on each device")]
    probability: Annotated[float, about("that one burst falls into so many steps, the interval being observed once")]
    low: Annotated[float, about("the same at the upper limit (97.5 %) of the mean interval")]
    high: Annotated[float, about("the same at the lower limit (2.5 %)")]


class GoldenPart(Fields, kw_only=True):
    """The golden digests that were given."""

    file: Annotated[str, about("name of the file, as it was given")]
    checksum: Annotated[str | None, about("its checksum; `null` where it could not be read")] = None
    used: Annotated[int, about("digests that were compared")] = 0
    foreign: Annotated[int, about("digests of other programs or devices, which were not")] = 0
    problem: Annotated[str | None, about("why it was not used")] = None


class Settings(Fields, kw_only=True):
    """What was asked for."""

    level: Annotated[str, about("`quick`, `prejob`, `acceptance` or `soak`")]
    minutes: Annotated[float | None, about("how long; `null` for a number of rounds")] = None
    rounds: Annotated[int | None, about("how often; `null` for a time")] = None
    only: Annotated[list[str] | None, about("families of workloads; `null` for all")] = None
    dtypes: Annotated[list[str], about("types of floating-point numbers")] = msgspec.field(default_factory=list)
    seed: Annotated[int, about("from which data are made")] = 0
    accept: Annotated[list[str], about("what was accepted, such as `repeat`")] = msgspec.field(default_factory=list)
    faults: Annotated[list[str], about("simulated faults, one readable line each")] = msgspec.field(
        default_factory=list
    )


class Report(Fields, kw_only=True):
    """`result.json` of a burn-in."""

    format: Annotated[Literal["jax-sdc burn-in"], about("`jax-sdc burn-in`")]
    schema: Annotated[int, about("version of this layout, 1")]
    version: Annotated[str, about("version of jax-sdc")]
    id: Annotated[str, about("random, another one for each burn-in; a continued one keeps it")]
    host: Annotated[Host, about("who wrote it")]
    created: Annotated[str, about("when the burn-in began, UTC")]
    ended: Annotated[str, about("when the result was written, UTC")]
    seconds: Annotated[float, about("how long it took by a clock that does not jump, compilation included")]
    verdict: Annotated[VerdictPart, about("what follows")]
    settings: Annotated[Settings, about("what was asked for")]
    environment: Annotated[Environment, about("what must be equal for bits to be comparable")]
    rounds: Annotated[int, about("rounds that were completed")]
    stopped: Annotated[str | None, about("why it was stopped early, such as `SIGTERM`; `null` if it was not")] = None
    devices: Annotated[list[DeviceRow], about("where, and how much was checked")]
    workloads: Annotated[list[WorkloadRow], about("counts by workload and device")]
    findings: Annotated[list[FindingRow], about("differences that were run again, in order")]
    unfinished: Annotated[list[EndedRow], about("what did not run to the end")]
    notes: Annotated[list[str], about("what else there is to say")]
    outlooks: Annotated[list[Outlook], about("what is known of published bursts")] = msgspec.field(default_factory=list)
    golden: Annotated[GoldenPart | None, about("the golden digests; `null` where none were given")] = None
    command: Annotated[list[str] | None, about("the command line")] = None


def stamped() -> dict[str, Any]:
    """The fields of a report that say who writes it, in which layout."""
    return {"format": FORMAT, "schema": SCHEMA, "version": package_version("jax-sdc"), "host": identify()}


def write_report(path: AnyPath, report: Report) -> None:
    """Writes a report with its checksum, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_sealed(path, msgspec.to_builtins(report))


def read_report(path: AnyPath) -> Report:
    """Reads a report, and looks whether it says one thing.

    Args:
        path: the file, or the folder of a burn-in.

    Raises:
        RecordError: it is not there, damaged, of another format or layout, or its verdict does not follow from what
            it counts; the message says which.
    """
    place = Path(path) / RESULT if os.path.isdir(path) else Path(path)
    if not place.exists():
        raise RecordError(f"there is no {place}; give a file that sdc burnin wrote, or its folder")
    report = _decoded(place) or _converted(place)
    if problem := next(contradictions(report), None):
        raise RecordError(f"{place} contradicts itself: {problem}; run the burn-in again")
    return report


def _decoded(place: Path) -> Report | None:
    """A report that leaves no doubt, decoded at once; None for what has to be looked at closely to say what is wrong.

    A fleet has a thousand of them, and walking through each value by value takes several times as long.
    """
    try:
        content = read_bytes(place)
        if not is_sound(content) or any(word in content for word in NON_FINITE) or not _is_shallow(content):
            return None
        report = msgspec.json.decode(content, type=Report)
    except (ValueError, OSError, RecursionError):
        return None
    return report if report.schema in READABLE else None


def _is_shallow(content: bytes) -> bool:
    """Whether brackets in a text, those in its words included, close again and again until none is left."""
    brackets = content.translate(None, NO_BRACKETS)
    for _ in range(SHALLOW):
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return not brackets


def _converted(place: Path) -> Report:
    """A report, or what is wrong with it."""
    value = read_json(place, sealed=True)
    if value.get("format") != FORMAT:
        raise RecordError(f"{place} is no result of sdc burnin (its format is {value.get('format')!r})")
    if value.get("schema") not in READABLE:
        raise RecordError(
            f"{place} has layout {value.get('schema')!r}, this version of jax-sdc reads {', '.join(map(str, READABLE))}"
        )
    try:
        return msgspec.convert(value, Report)
    except msgspec.ValidationError as error:
        raise RecordError(f"{place} is damaged ({error}); run the burn-in again") from error


def contradictions(report: Report) -> Iterator[str]:
    """What in a report cannot be so, in words: a verdict never beats what was counted."""
    verdict, indices = report.verdict, {device.index for device in report.devices}
    if CODES[verdict.word] != verdict.code:
        yield f"the verdict is {verdict.word} with code {verdict.code}"
    places = [(row.workload, row.device) for row in report.workloads]
    if len(set(places)) < len(places):
        yield "a workload stands there twice"
    named = {device for _, device in places} | {device for row in report.findings for device in row.devices}
    if not named <= indices:
        yield f"device {min(named - indices)} is not described"
    seen = bool(report.findings) or any(row.differences for row in report.workloads)
    if seen and verdict.word != "FAIL":
        yield f"differences were seen, and the verdict is {verdict.word}"
    if not seen and verdict.word == "FAIL":
        yield "the verdict is FAIL without a difference"
    if verdict.word == "PASS":
        if not report.workloads or any(row.runs < 1 or row.elements < 1 for row in report.workloads):
            yield "the verdict is PASS although nothing was checked"
        if report.unfinished or report.stopped or any(row.void for row in report.workloads):
            yield "the verdict is PASS although something did not run to the end"
        if not {"vote", "golden"} & set(verdict.kinds) and "repeat" not in report.settings.accept:
            yield "the verdict is PASS although only repetition was compared"
        yield from _unfounded(report)
    if verdict.simulated != bool(report.settings.faults):
        yield "faults are simulated in one place and not in another"
    if report.rounds < 0 or not report.seconds >= 0 or any(min(_counts(row)) < 0 for row in report.workloads):
        yield "it counts less than nothing"
    for row in report.devices:
        counted = sum(each.elements for each in report.workloads if each.device == row.index and not each.void)
        if row.elements != counted:
            yield f"{row.elements} elements on device {row.index}, where its workloads have {counted}"


def _counts(row: WorkloadRow) -> tuple[float, ...]:
    return (
        row.runs, row.elements, row.seconds, row.differences, row.repeated, row.voted, row.referred, row.golden,
        row.checked, row.flagged, row.confirmed, row.simulated,
    )  # fmt: skip


def _unfounded(report: Report) -> Iterator[str]:
    """What a PASS claims and its counts do not show."""
    kinds, rows = report.verdict.kinds, report.workloads
    if "repeat" in kinds and not all(row.repeated for row in rows):
        yield "the verdict rests on repetition, which not every workload has"
    if "vote" in kinds and not all(row.voted or row.referred for row in rows):
        yield "the verdict rests on a vote, which not every workload has"
    if "golden" in kinds and not all(row.golden for row in rows):
        yield "the verdict rests on golden digests, which not every workload has"
    if len({row.workload for row in rows}) * len(report.devices) != len(rows):
        yield "the verdict is PASS although not every workload ran on every device"
    if any(row.confirmed for row in rows):
        yield "the verdict is PASS although checksums confirm wrong rows"
    if any(row.simulated for row in rows) and not report.settings.faults:
        yield "faults changed elements, and none is named"
    if report.golden is not None and report.golden.problem is not None:
        yield "the verdict is PASS although the golden digests were not used"
    for device in report.devices:
        if (course := device.sensors) is not None and (course.events or _grown(course)):
            yield f"the verdict is PASS although the driver reported errors of device {device.index}"


def _grown(course: Course) -> bool:
    """Whether errors that no code corrects were counted meanwhile."""
    before, after = course.before.uncorrected, course.after.uncorrected
    return before is not None and after is not None and after > before
