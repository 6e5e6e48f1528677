"""The report says what was seen, survives being written and read, and refuses what contradicts itself."""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc.burnin.judgement import BURN_IN, contradictions, judge
from sdc.burnin.programs import Programs
from sdc.burnin.results import BurninResult, BurninSettings
from sdc.burnin.rounds import burn_in, planned_result
from sdc.burnin.sensors import Course, Sensors
from sdc.burnin.session import clock_shift, go_on
from sdc.burnin.workloads.workload import BurninWorkload
from sdc.faults import BitFlip, Fault
from sdc.records import describe_devices
from sdc.records.format import write_sealed
from sdc.records.storage import RecordError
from sdc.schema import Environment
from sdc.settings import SettingError
from sdc.verdict import Verdict

FAULT = Fault(BitFlip(), rate=0.1, site="ordering/*", at={"device": 2})


def planned(programs: Programs, few: list[BurninWorkload], *faults: Fault) -> BurninResult:
    settings = BurninSettings(level="smallest", rounds=2, faults=tuple(map(str, faults)))
    return planned_result(few, programs.devices, describe_devices(programs.devices), settings=settings)


def going_on(
    earlier: BurninResult, programs: Programs, few: list[BurninWorkload], *faults: Fault, devices: int = 4
) -> BurninResult:
    result = planned(programs, few, *faults)
    result.devices = result.devices[:devices]
    go_on(result, earlier)
    return result


@pytest.fixture(scope="module")
def healthy(programs: Programs, few: list[BurninWorkload]) -> BurninResult:
    return judge(burn_in(few, programs.devices, rounds=2, programs=programs, result=planned(programs, few)))


@pytest.fixture(scope="module")
def struck(programs: Programs, few: list[BurninWorkload]) -> BurninResult:
    result = planned(programs, few, FAULT)
    return judge(burn_in(few, programs.devices, rounds=2, programs=programs, inject=[FAULT], result=result))


def test_the_report_of_healthy_devices(healthy: BurninResult, few: list[BurninWorkload]) -> None:
    assert (healthy.verdict, healthy.evidence) == ("clean", ("repeat", "vote"))
    assert len(healthy.workloads) == 4 * len(few)
    assert [row.index for row in healthy.devices] == [0, 1, 2, 3]
    for row in healthy.devices:
        assert row.excluded_rate == pytest.approx(2.9957 / row.least, rel=1e-3)
        assert row.excluded_interval == pytest.approx(row.seconds / 2.9957, rel=1e-3)
    assert all(row.key and row.digest and len(row.digest) == 16 for row in healthy.workloads)


@pytest.mark.parametrize("which", ["healthy", "struck"])
def test_written_and_read(which: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    report = request.getfixturevalue(which)
    BURN_IN.write(tmp_path / "result.json", report)
    assert BURN_IN.read(tmp_path) == report == BURN_IN.read(tmp_path / "result.json")


def test_findings_are_told_element_by_element(struck: BurninResult) -> None:
    assert (struck.verdict, struck.simulated) == (Verdict.CORRUPT, True)
    finding = struck.findings[0]
    assert finding.devices == (2,)
    assert finding.elements is not None
    assert finding.elements.differing == finding.simulated
    assert finding.elements.first[0].old != finding.elements.first[0].new
    assert "device 2" in finding.sentence
    assert "simulated" in finding.sentence


def damaged(report: BurninResult, **changes: Any) -> BurninResult:
    return msgspec.convert({**msgspec.to_builtins(report), **changes}, BurninResult)


def test_a_report_that_contradicts_itself_is_refused(
    healthy: BurninResult, struck: BurninResult, tmp_path: Path
) -> None:
    devices = msgspec.to_builtins(healthy.devices)
    told = {"source": "nvml", "before": {}, "after": {}, "samples": 1, "events": ["Xid 48"]}

    def rows(**changes: Any) -> list[dict[str, Any]]:
        return [{**row, **changes} for row in msgspec.to_builtins(healthy.workloads)]

    lies = {
        "the verdict is PASS, but FAIL follows": damaged(struck, verdict="clean"),
        "the verdict is FAIL, but PASS follows": damaged(healthy, verdict="corrupt"),
        "INCONCLUSIVE follows .*nothing was checked": damaged(
            healthy, workloads=rows(runs=0, elements=0), devices=[{**device, "elements": 0} for device in devices]
        ),
        "the only evidence is repetition": damaged(healthy, workloads=rows(voted=0, golden=0, referred=0)),
        "stopped by SIGTERM": damaged(healthy, stopped="SIGTERM"),
        "INCONCLUSIVE follows .*a doubt": damaged(healthy, doubts=["a doubt"]),
        "is not described": damaged(healthy, devices=devices[:3]),
        "elements, but its workloads list": damaged(
            healthy, devices=[{**device, "elements": 10**15} for device in devices]
        ),
        "evidence is repeat, vote, but the counts support repeat": damaged(
            healthy, workloads=rows(voted=0, referred=0), settings={"accept": ["repeat"]}
        ),
        "evidence is repeat, vote, but the counts support vote": damaged(healthy, workloads=rows(repeated=0)),
        "evidence is vote, golden": damaged(healthy, evidence=["vote", "golden"]),
        "has different fields .*>= 0": msgspec.structs.replace(healthy, rounds=-3),
        "the verdict is PASS, but FAIL": damaged(healthy, workloads=rows(confirmed=5)),
        "contain no fault": damaged(healthy, workloads=rows(simulated=5)),
        "for every device": damaged(healthy, workloads=rows()[:-1]),
        "INCONCLUSIVE follows .*Xid 48": damaged(healthy, devices=[{**row, "sensors": told} for row in devices]),
        "INCONCLUSIVE follows .*not used": damaged(healthy, golden={"file": "x", "doubt": "they were not used"}),
        "sentences do not follow .*'all is well' instead of 'no difference": damaged(
            healthy, sentences=["all is well"]
        ),
        "sentences do not follow .* instead of '.*device 2": damaged(struck, sentences=["a cosmic ray"]),
        "is listed twice": damaged(healthy, workloads=2 * msgspec.to_builtins(healthy.workloads)),
    }
    assert not list(contradictions(healthy))
    assert not list(contradictions(struck))
    for message, report in lies.items():
        (tmp_path / "result.json").write_bytes(BURN_IN.encode(report))
        with pytest.raises(RecordError, match=message):
            BURN_IN.read(tmp_path)


def test_damaged_and_foreign_files_are_refused(healthy: BurninResult, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    BURN_IN.write(path, healthy)
    text = path.read_text()
    for change, message in (
        (text.replace('"clean"', '"corrupt"'), "checksum is wrong"),
        (text[: len(text) // 2], "damaged"),
        (json.dumps(json.loads(text)), "checksum"),
        ("[]", "JSON object"),
        ("", "damaged"),
    ):
        assert change != text
        path.write_text(change)
        with pytest.raises(RecordError, match=message):
            BURN_IN.read(path)
    plain = msgspec.to_builtins(healthy)
    for name, value, message in (("schema", 99, "layout 99"), ("format", "other", "not a result of sdc burnin")):
        write_sealed(path, {**plain, name: value})
        with pytest.raises(RecordError, match=message):
            BURN_IN.read(path)
    with pytest.raises(RecordError, match=r"there is no .*nowhere"):
        BURN_IN.read(tmp_path / "nowhere")


def test_going_on_from_a_report(
    healthy: BurninResult, struck: BurninResult, programs: Programs, few: list[BurninWorkload]
) -> None:
    again = going_on(healthy, programs, few)
    assert judge(again).workloads == healthy.workloads
    result = burn_in(few, programs.devices, rounds=3, programs=programs, result=again)
    assert {tally.runs for tally in result.tallies.values()} == {3}
    assert not result.findings

    old = going_on(struck, programs, few, FAULT)
    assert judge(old).findings == struck.findings
    with pytest.raises(SettingError, match="simulated faults"):
        going_on(struck, programs, few)
    with pytest.raises(SettingError, match=r"workloads were .*, but are now none"):
        going_on(healthy, programs, few[:1])
    seeded = msgspec.structs.replace(healthy, seed=5)
    assert going_on(seeded, programs, few).seed == 5
    other = planned(programs, few)
    other.settings = dataclasses.replace(other.settings, seed=7)
    with pytest.raises(SettingError, match="seeds of the data were 5, but are now 7"):
        go_on(other, seeded)
    with pytest.raises(SettingError, match="devices"):
        going_on(healthy, programs, few, devices=2)


ANEW = "earlier runs do not count: "
# Changes of the host and of device 1 that a resumed burn-in meets, and whether the devices are recognized
PARTS: dict[str, tuple[dict[str, str | None], dict[str, str | None], str, str]] = {
    "nothing": ({}, {}, "same", ""),
    "a renamed host": ({"name": "b"}, {"host": "b"}, "same", ""),
    "another slot": ({}, {"bus": "0000:02:00.0"}, "same", ""),
    "another serial number": ({}, {"serial": "S2"}, "other", "device 1 was serial S1, and is now serial S2"),
    "another UUID": ({}, {"serial": None, "uuid": "GPU-2"}, "other", "was serial S1, and is now uuid GPU-2"),
    "another machine": ({"machine": "m2"}, {"machine": "m2"}, "other", "device 0 was machine m1 bus 0000:00:00.0"),
    "another boot": ({"boot": "b2"}, {}, "unknown", f"{ANEW}the system was restarted, after which devices without"),
    "an unknown boot": ({"boot": None}, {}, "unknown", f"{ANEW}the system was restarted"),
}


@pytest.mark.parametrize("change", PARTS)
def test_only_the_same_devices_go_on(
    healthy: BurninResult, struck: BurninResult, programs: Programs, few: list[BurninWorkload], change: str
) -> None:
    """Others begin anew, except that findings on them are never lost. A serial number is known again after a boot, a
    slot is not."""
    here, part, recognized, said = PARTS[change]

    def host(report: BurninResult, here: dict[str, str | None], part: dict[str, str | None]) -> BurninResult:
        place: dict[str, str | None] = {"machine": part.get("machine", "m1"), "host": "a"}
        devices = [
            msgspec.structs.replace(row, **place, bus=f"0000:0{row.index}:00.0", serial=None) for row in report.devices
        ]
        devices[1] = msgspec.structs.replace(devices[1], **{"serial": "S1", "uuid": "GPU-1", **part})
        known = msgspec.structs.replace(report.host, **{"name": "a", "machine": "m1", "boot": "b1", **here})
        return msgspec.structs.replace(report, devices=devices, host=known)

    for report, faults in ((healthy, ()), (struck, (FAULT,))):
        earlier, result = host(report, {}, {}), host(planned(programs, few, *faults), here, part)
        if faults and recognized == "other":
            with pytest.raises(SettingError, match="which found differences"):
                go_on(result, earlier)
            continue
        go_on(result, earlier)
        same = recognized == "same"
        assert (result.id == earlier.id) == (recognized != "other")
        assert (result.rounds, any(tally.runs for tally in result.workloads)) == (2 * same, same)
        assert said in " ".join(result.notes)
        assert result.findings == earlier.findings
        assert judge(result).verdict == ("corrupt" if faults else "clean" if same else "inconclusive")


def test_what_was_seen_is_seen_after_a_resumption_too(
    healthy: BurninResult, programs: Programs, few: list[BurninWorkload]
) -> None:
    """Doubts, notes and errors of drivers stay; void time counts for nothing; other versions begin anew."""
    course = Course(source="nvml", before=Sensors(), after=Sensors(), samples=1, events=["Xid 48"])
    devices = [msgspec.structs.replace(row, sensors=course if row.index == 2 else None) for row in healthy.devices]
    rows = [msgspec.structs.replace(row, void=row.device == 3) for row in healthy.workloads]
    seen = msgspec.structs.replace(healthy, doubts=["a doubt"], notes=["a note"], devices=devices, workloads=rows)
    result = going_on(seen, programs, few)
    assert result.doubts == ["a doubt", "device 2: Xid 48 (double-bit ECC error)"]
    assert result.notes[0] == "a note"
    assert all("s under load were void" in note for note in result.notes[1:])
    assert {tally.device for tally in result.workloads if not tally.runs} == {3}
    again = going_on(judge(result), programs, few)
    assert (again.doubts, again.notes) == (result.doubts, result.notes)

    newer = planned(programs, few)
    newer.environment = Environment(packages={"jaxlib": "0.11.0"})
    go_on(newer, healthy)
    assert not any(tally.runs for tally in newer.workloads)
    assert any(f"{ANEW}packages" in note for note in newer.notes)


def test_another_program_is_not_compared_with_earlier_runs(
    healthy: BurninResult, programs: Programs, few: list[BurninWorkload]
) -> None:
    again = going_on(healthy, programs, few)
    place = (few[0].name, 1)
    again.tallies[place].key, again.tallies[place].digest = "an older program", "0" * 16
    again.tallies[place].golden, before = 2, again.tallies[place].runs
    result = burn_in(few, programs.devices, rounds=3, programs=programs, result=again)
    assert not result.findings
    assert any(f"changed, so {before} earlier runs do not count" in note for note in result.notes)
    assert (result.tallies[place].runs, result.tallies[place].golden) == (1, 0)
    assert result.tallies[few[0].name, 0].runs == before + 1


def test_a_clock_that_jumps_is_told() -> None:
    noon = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    hour = datetime.timedelta(hours=1)
    assert clock_shift(noon, noon + hour, 3600.0) is None
    assert "+3600 s" in str(clock_shift(noon, noon + 2 * hour, 3600.0))
