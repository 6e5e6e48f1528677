"""From what a burn-in saw to its report, and from the report of one that was stopped to where it goes on."""

import dataclasses
import datetime
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec

from sdc.faults import Fault
from sdc.settings import SettingError

from ..records import Environment
from .evidence import Finding
from .host import Element, Elements
from .observed import Ended, Result
from .pace import Throughput, throughputs
from .programs import Checks
from .report import (
    Course,
    DeviceRow,
    EndedRow,
    FindingRow,
    GoldenPart,
    Outlook,
    Report,
    Settings,
    VerdictPart,
    WorkloadRow,
    stamped,
)
from .tally import Tally, step_of
from .verdict import describe_finding, judge
from .workload import Workload

SHIFT = 5.0
"""Seconds by which the clock of the host may be corrected during a burn-in without a word."""


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """What a report says beside what was seen.

    Attributes:
        settings: what was asked for.
        environment: what `sdc.records.environment` returned.
        described: what `sdc.records.describe_devices` says of the devices, in their order.
        command: the command line.
        id: of the burn-in.
        created: when it began, UTC.
    """

    settings: Settings
    environment: Mapping[str, Any]
    described: Sequence[Mapping[str, Any]]
    command: list[str] | None = None
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: str = dataclasses.field(default_factory=lambda: now())


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def clock_shift(begun: datetime.datetime, ended: datetime.datetime, seconds: float) -> str | None:
    """What to say where the host's clock went another way than one that does not jump; None where it did not.

    Args:
        begun, ended: by the host's clock.
        seconds: that passed between them.

    Example:
        >>> import datetime
        >>> from sdc.burnin.reporting import clock_shift
        >>> noon = datetime.datetime(2026, 1, 1, 12)
        >>> clock_shift(noon, noon + datetime.timedelta(seconds=10), 10.0)
        >>> clock_shift(noon, noon - datetime.timedelta(hours=1), 10.0)
        "the host's clock was set by -3610 s meanwhile: the times of begin and end do not fit"
    """
    shift = (ended - begun).total_seconds() - seconds
    if abs(shift) <= SHIFT + 0.01 * seconds:
        return None
    return f"the host's clock was set by {shift:+.0f} s meanwhile: the times of begin and end do not fit"


def report_of(
    result: Result,
    circumstances: Circumstances,
    *,
    courses: Sequence[Course | None] = (),
    golden: GoldenPart | None = None,
    outlooks: Sequence[Outlook] = (),
    stopped: str | None = None,
) -> Report:
    """The report of a burn-in.

    Args:
        result: what was seen.
        circumstances: what else there is to tell.
        courses: what the sensors of each device told.
        golden: what became of the golden digests.
        outlooks: whether published bursts would have been seen.
        stopped: why it was stopped early.
    """
    described = circumstances.described
    verdict = judge(result, described)
    pace = {(each.workload, each.device): each for each in throughputs(result)}
    checked = verdict.checked
    devices = []
    for index in range(len(result.devices)):
        known = described[index] if index < len(described) else {}
        seconds, elements = checked.seconds[index], checked.elements[index]
        devices.append(
            msgspec.convert(
                {
                    **known,
                    "index": index,
                    "elements": elements,
                    "runs": checked.runs[index],
                    "seconds": seconds,
                    "excluded_rate": checked.rate_of(index),
                    "excluded_interval": seconds / checked.WAITS if seconds else None,
                    "sensors": courses[index] if index < len(courses) else None,
                },
                DeviceRow,
                from_attributes=True,
            )
        )
    return Report(
        **stamped(),
        id=circumstances.id,
        created=circumstances.created,
        ended=now(),
        seconds=result.seconds,
        verdict=VerdictPart(
            word=verdict.word,
            code=verdict.code,
            kinds=list(verdict.kinds),
            sentences=list(verdict.sentences),
            simulated=verdict.simulated,
        ),
        settings=circumstances.settings,
        environment=msgspec.convert(circumstances.environment, Environment),
        rounds=result.rounds,
        stopped=(stopped or "asked to stop") if result.stopped else None,
        devices=devices,
        workloads=_workloads(result, pace),
        findings=[_finding(result, finding, described) for finding in result.findings],
        unfinished=[EndedRow(**dataclasses.asdict(end)) for end in result.ended],
        notes=list(result.notes),
        outlooks=list(outlooks),
        golden=golden,
        command=circumstances.command,
    )


def _workloads(result: Result, pace: Mapping[tuple[str, int], Throughput]) -> list[WorkloadRow]:
    families = {workload.name: workload.family for workload in result.workloads}
    rows = []
    for (name, device), tally in result.tallies.items():
        speed = pace.get((name, device))
        rows.append(
            WorkloadRow(
                workload=name,
                device=device,
                family=families[name],
                runs=tally.runs,
                elements=tally.elements,
                seconds=tally.seconds,
                differences=tally.differences,
                repeated=tally.repeated,
                voted=tally.voted,
                referred=tally.referred,
                golden=tally.golden,
                checked=tally.checks.checked,
                flagged=tally.checks.flagged,
                confirmed=tally.checks.confirmed,
                simulated=tally.simulated,
                rate=speed.rate if speed else None,
                best=speed.best if speed else None,
                unit=speed.unit if speed else "flop",
                share=speed.share if speed else None,
                void=speed.void if speed else False,
                key=result.keys.get((name, device)),
                digest=tally.baseline,
            )
        )
    return rows


def _finding(result: Result, finding: Finding, described: Sequence[Mapping[str, Any]]) -> FindingRow:
    return msgspec.convert(
        {
            "sentence": describe_finding(result, finding, described),
            "workload": finding.workload,
            "devices": list(finding.devices),
            "round": finding.round,
            "kinds": list(finding.kinds),
            "digest": finding.digest,
            "expected": finding.expected,
            "persistence": finding.persistence,
            "elements": None if finding.elements is None else dataclasses.asdict(finding.elements),
            "confirmed": finding.checks.confirmed,
            "simulated": finding.simulated,
            "note": finding.note,
        },
        FindingRow,
    )


def restored(
    report: Report,
    workloads: Sequence[Workload],
    devices: Sequence[jax.Device],
    *,
    accept: Sequence[str] = (),
    inject: Sequence[Fault] = (),
) -> Result:
    """What an earlier burn-in saw, for one that goes on.

    Args:
        report: of the earlier one.
        workloads: of the one that goes on.
        devices: where it runs.
        accept: what it accepts.
        inject: its simulated faults.

    Raises:
        SettingError: it is another burn-in: other workloads, devices or simulated faults.
    """
    names = {workload.name: workload for workload in workloads}
    faults = list(map(str, inject))
    for what, before, here in (
        ("devices", [row.kind for row in report.devices], [device.device_kind for device in devices]),
        ("simulated faults", report.settings.faults, faults),
        ("workloads", sorted({row.workload for row in report.workloads} - set(names)), []),
    ):
        if before != here:
            raise SettingError(
                "resume", None, f"the {what} were {_short(before)}, and are {_short(here)}; give the same flags"
            )
    result = Result(workloads, devices, tuple(accept), tuple(faults), rounds=report.rounds, seconds=report.seconds)
    result.notes = list(report.notes)
    for row in report.workloads:
        work = names[row.workload].work
        median, best = (work / rate if rate else row.seconds / max(row.runs, 1) for rate in (row.rate, row.best))
        result.tallies[row.workload, row.device] = Tally(
            runs=row.runs, elements=row.elements, seconds=row.seconds, best=best, differences=row.differences,
            repeated=row.repeated, voted=row.voted, referred=row.referred, golden=row.golden,
            checks=Checks(row.checked, row.flagged, row.confirmed), simulated=row.simulated, baseline=row.digest,
            times=Counter({step_of(median): row.runs}),
        )  # fmt: skip
        if row.key is not None:
            result.keys[row.workload, row.device] = row.key
    result.findings = [_found(row) for row in report.findings]
    result.ended = [Ended(row.workload, row.device, row.round, row.reason) for row in report.unfinished]
    return result


def _found(row: FindingRow) -> Finding:
    elements = None
    if row.elements is not None:
        plain = msgspec.to_builtins(row.elements)
        elements = Elements(**{**plain, "first": tuple(Element(**each) for each in plain["first"])})
    kinds: Any = tuple(row.kinds)
    return Finding(
        row.workload, tuple(row.devices), row.round, kinds, row.persistence, row.digest, row.expected, elements,
        Checks(confirmed=row.confirmed), row.simulated, row.note,
    )  # fmt: skip


def _short(values: Sequence[str | None]) -> str:
    return ", ".join(map(str, values[:3])) + (" ..." if len(values) > 3 else "") if values else "none"
