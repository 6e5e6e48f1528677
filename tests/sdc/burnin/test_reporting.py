"""The report says what was seen, survives being written and read, and refuses what contradicts itself."""

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc.burnin.programs import Programs
from sdc.burnin.report import Report, Settings, contradictions, read_report, write_report
from sdc.burnin.reporting import Circumstances, clock_shift, report_of, restored
from sdc.burnin.rounds import burn_in
from sdc.burnin.workload import Workload
from sdc.faults import BitFlip, Fault
from sdc.records import describe_devices
from sdc.records.determinism import environment
from sdc.records.storage import RecordError
from sdc.settings import SettingError

FAULT = Fault(BitFlip(), rate=0.1, site="ordering/*", at={"device": 2})


def about(programs: Programs, faults: tuple[Fault, ...] = ()) -> Circumstances:
    settings = Settings(level="smallest", rounds=2, faults=list(map(str, faults)))
    return Circumstances(settings, environment(), describe_devices(programs.devices), ["sdc", "burnin"])


@pytest.fixture(scope="module")
def healthy(programs: Programs, few: list[Workload]) -> Report:
    return report_of(burn_in(few, programs.devices, rounds=2, programs=programs), about(programs))


@pytest.fixture(scope="module")
def struck(programs: Programs, few: list[Workload]) -> Report:
    result = burn_in(few, programs.devices, rounds=2, programs=programs, inject=[FAULT])
    return report_of(result, about(programs, (FAULT,)))


def test_the_report_of_healthy_devices(healthy: Report, few: list[Workload]) -> None:
    assert (healthy.verdict.word, healthy.verdict.kinds) == ("PASS", ["repeat", "vote"])
    assert len(healthy.workloads) == 4 * len(few)
    assert [row.index for row in healthy.devices] == [0, 1, 2, 3]
    for row in healthy.devices:
        assert row.excluded_rate == pytest.approx(2.9957 / row.elements, rel=1e-3)
        assert row.excluded_interval == pytest.approx(row.seconds / 2.9957, rel=1e-3)
    assert all(row.key and row.digest and len(row.digest) == 16 for row in healthy.workloads)


@pytest.mark.parametrize("which", ["healthy", "struck"])
def test_written_and_read(which: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    report = request.getfixturevalue(which)
    write_report(tmp_path / "result.json", report)
    assert read_report(tmp_path) == report == read_report(tmp_path / "result.json")


def test_findings_are_told_element_by_element(struck: Report) -> None:
    assert (struck.verdict.word, struck.verdict.simulated) == ("FAIL", True)
    finding = struck.findings[0]
    assert finding.devices == [2]
    assert finding.elements is not None
    assert finding.elements.differing == finding.simulated
    assert finding.elements.first[0].old != finding.elements.first[0].new
    assert "device 2" in finding.sentence
    assert "simulated" in finding.sentence


def damaged(report: Report, **changes: Any) -> Report:
    return msgspec.convert({**msgspec.to_builtins(report), **changes}, Report)


def test_a_report_that_contradicts_itself_is_refused(healthy: Report, struck: Report, tmp_path: Path) -> None:
    passed, failed = msgspec.to_builtins(healthy.verdict), msgspec.to_builtins(struck.verdict)
    devices = msgspec.to_builtins(healthy.devices)
    told = {"source": "nvml", "before": {}, "after": {}, "samples": 1, "events": ["Xid 48"]}

    def rows(**changes: Any) -> list[dict[str, Any]]:
        return [{**row, **changes} for row in msgspec.to_builtins(healthy.workloads)]

    fewer = {"elements": devices[-1]["elements"] - rows()[-1]["elements"]}
    lies = {
        "differences were seen": damaged(struck, verdict={**passed, "simulated": True}),
        "FAIL without a difference": damaged(healthy, verdict={**failed, "simulated": False}),
        "with code 1": damaged(healthy, verdict={**passed, "code": 1}),
        "nothing was checked": damaged(healthy, workloads=[]),
        "only repetition": damaged(healthy, verdict={**passed, "kinds": ["repeat"]}),
        "did not run to the end": damaged(healthy, stopped="SIGTERM"),
        "simulated in one place": damaged(struck, verdict={**failed, "simulated": False}),
        "is not described": damaged(healthy, devices=msgspec.to_builtins(healthy.devices)[:3]),
        "elements on device": damaged(
            healthy, devices=[{**msgspec.to_builtins(row), "elements": 10**15} for row in healthy.devices]
        ),
        "rests on a vote": damaged(healthy, workloads=rows(voted=0, referred=0)),
        "rests on repetition": damaged(healthy, workloads=rows(repeated=0)),
        "rests on golden": damaged(healthy, verdict={**passed, "kinds": ["vote", "golden"]}),
        "less than nothing": damaged(healthy, workloads=rows(repeated=-3)),
        "checksums confirm": damaged(healthy, workloads=rows(confirmed=5)),
        "none is named": damaged(healthy, workloads=rows(simulated=5)),
        "on every device": damaged(healthy, workloads=rows()[:-1], devices=[*devices[:-1], {**devices[-1], **fewer}]),
        "driver reported": damaged(healthy, devices=[{**row, "sensors": told} for row in devices]),
        "were not used": damaged(healthy, golden={"file": "x", "problem": "damaged"}),
        "stands there twice": damaged(healthy, workloads=2 * msgspec.to_builtins(healthy.workloads)),
    }
    assert not list(contradictions(healthy))
    assert not list(contradictions(struck))
    for message, report in lies.items():
        write_report(tmp_path / "result.json", report)
        with pytest.raises(RecordError, match=message):
            read_report(tmp_path)


def test_damaged_and_foreign_files_are_refused(healthy: Report, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_report(path, healthy)
    text = path.read_text()
    for change, message in (
        (text.replace('"code": 0', '"code": 1'), "checksum is wrong"),
        (text[: len(text) // 2], "damaged"),
        (json.dumps(json.loads(text)), "checksum"),
        ("[]", "JSON object"),
        ("", "damaged"),
    ):
        assert change != text
        path.write_text(change)
        with pytest.raises(RecordError, match=message):
            read_report(path)
    for name, value, message in (("schema", 99, "layout 99"), ("format", "other", "no result of sdc burnin")):
        write_report(path, msgspec.structs.replace(healthy, **{name: value}))
        with pytest.raises(RecordError, match=message):
            read_report(path)
    with pytest.raises(RecordError, match=r"there is no .*nowhere"):
        read_report(tmp_path / "nowhere")


def test_going_on_from_a_report(healthy: Report, struck: Report, programs: Programs, few: list[Workload]) -> None:
    again = restored(healthy, few, programs.devices)
    assert report_of(again, about(programs)).workloads == healthy.workloads
    result = burn_in(few, programs.devices, rounds=3, programs=programs, result=again)
    assert {tally.runs for tally in result.tallies.values()} == {3}
    assert not result.findings

    old = restored(struck, few, programs.devices, inject=[FAULT])
    assert report_of(old, about(programs, (FAULT,))).findings == struck.findings
    with pytest.raises(SettingError, match="simulated faults"):
        restored(struck, few, programs.devices)
    with pytest.raises(SettingError, match="workloads"):
        restored(healthy, few[:1], programs.devices)
    with pytest.raises(SettingError, match="devices"):
        restored(healthy, few, programs.devices[:2])


def test_another_program_is_not_compared_with_earlier_runs(
    healthy: Report, programs: Programs, few: list[Workload]
) -> None:
    again = restored(healthy, few, programs.devices)
    place = (few[0].name, 1)
    again.keys[place] = "an older program"
    again.tallies[place].baseline = "0" * 16
    result = burn_in(few, programs.devices, rounds=3, programs=programs, result=again)
    assert not result.findings
    assert any("another program" in note for note in result.notes)


def test_a_clock_that_jumps_is_told() -> None:
    noon = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    hour = datetime.timedelta(hours=1)
    assert clock_shift(noon, noon + hour, 3600.0) is None
    assert "+3600 s" in str(clock_shift(noon, noon + 2 * hour, 3600.0))
