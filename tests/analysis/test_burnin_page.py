"""The page of a burn-in: what differed, what to do, the sensors."""

import re
from pathlib import Path

import msgspec
import pytest

from sdc.analysis import burnin_report, write_burnin_report
from sdc.analysis.report import Facts, Figure, Report, Section, to_html, to_markdown
from sdc.burnin import BurninResult, BurninSettings, CheckedDevice, Finding, Tally, judge
from sdc.burnin.results import Element, Elements, Evidence
from sdc.burnin.sensors import Course, Reading, Sensors
from sdc.schema import Host

FAMILIES = {"matrix": 4, "reduction": 2}


def found(device: tuple[int, ...], workload: str, kinds: tuple[Evidence, ...] = ("vote",)) -> Finding:
    first = Element(output="['x']", index=5, old="3f800000", new="bf800001", expected="1.0", found="-1.0000001")
    elements = Elements(differing=4, total=10**6, first=(first,) * 5, largest=2.0, relative=2.0, nonfinite=0)
    return Finding(
        workload=workload, devices=device, round=2, kinds=kinds, persistence="persistent", digest="b", expected="a",
        elements=elements,
    )  # fmt: skip


def result(
    *findings: Finding, faults: tuple[str, ...] = (), readings: bool = False, only: tuple[str, ...] = ()
) -> BurninResult:
    """Of a host with three devices, four matrix workloads and two reductions."""
    course = Course(
        source="nvml", before=Sensors(), after=Sensors(), samples=9,
        readings=[Reading(seconds=float(second), temperature=50.0 + second, clock=None) for second in range(9)],
    )  # fmt: skip
    devices = [
        CheckedDevice(index=index, kind="NVIDIA H100", serial=f"{index}{index}", sensors=course if readings else None)
        for index in range(3)
    ]
    struck = {(each.workload, device) for each in findings for device in each.devices}
    tallies = [
        Tally(
            workload=f"{family}/{number}", device=device.index, family=family, work=1.0, runs=4, elements=10**6,
            seconds=1.0, voted=4, repeated=3,
            differences=(f"{family}/{number}", device.index) in struck,
        )
        for family, count in FAMILIES.items()
        for number in range(count)
        for device in devices
    ]  # fmt: skip
    return judge(
        BurninResult(
            host=Host(name="gpu-17"), devices=devices, workloads=tallies, findings=list(findings), rounds=4,
            settings=BurninSettings(faults=faults, only=only or None), seed=7, created="2026-01-01T00:00:00",
            command=["sdc", "burnin", "--run", "a", "--junit=b", "--resume", "--level", "quick"],
        )
    )  # fmt: skip


WRONG = [found((2,), f"matrix/{number}") for number in range(4)]


def test_a_device_that_fails_is_named_once() -> None:
    judged = result(*WRONG, found((2,), "reduction/1", ("repeat",)))
    assert judged.sentences == (
        "host gpu-17, device 2 (serial 22): differences in 4 of 4 matrix workloads, in 4 of 16 runs, up to 4 of 1e+06 "
        "elements, 4 persistent, found by vote",
        "host gpu-17, device 2 (serial 22), reduction/1: 4 of 1e+06 elements, persistent, found by repeat",
    )
    page = burnin_report(judged)
    assert page.banner is not None
    assert page.banner.label == "FAIL (vote, repeat)"
    text = to_markdown(page)
    assert "device 2 (serial 22)" in text
    assert "matrix (4 of 4 workloads), reduction (1 of 2 workloads)" in text
    assert "round 3 of 4" in text
    assert "Send the bundle to the vendor" in text
    assert text.count("| matrix/0 |") == 1 + 3  # the finding, and its first elements
    assert "sdc burnin --level quick --seed 7\n" in text
    assert 'sdc fleet acknowledge "serial 22"' in text
    assert re.search(r"\| 2 NVIDIA H100, serial 22 \| .* \| differed \| - \|", text)  # instead of a rate
    assert "2/4" not in to_html(page)
    assert "4/4" in to_html(page)
    assert "1/2" in to_html(page)


def test_of_a_tie_nothing_is_called_right() -> None:
    tie = burnin_report(result(found((0, 1), "matrix/1")))
    assert "right bits" not in to_markdown(tie)
    assert "another's bits" in to_markdown(tie)
    known = burnin_report(result(found((0, 1), "matrix/1"), found((1,), "matrix/1", ("repeat",))))
    assert ("Which device", "device 1 (serial 11)") in _answers(known)
    assert known.banner is not None
    assert known.banner.sentence.startswith("host gpu-17, device 1 (serial 11), matrix/1")


def _answers(page: Report) -> tuple[tuple[str, ...], ...]:
    (first,) = (part for part in page.sections[0].parts if isinstance(part, Section))
    (facts,) = (part for part in first.parts if isinstance(part, Facts))
    return facts.entries


@pytest.mark.parametrize(
    ("judged", "action"),
    [
        (result(), "Use the host"),
        (result(found((0, 1), "matrix/1")), "Find out which device is wrong"),
        (result(*WRONG, faults=("bitflip,rate=1e-5",)), "No action"),
        (result(only=("matrix",)), "Test the rest before you rely on the host"),
        (judge(msgspec.structs.replace(result(), stopped="SIGTERM")), "Remove the reason, and test again"),
        (judge(BurninResult(host=Host(name="gpu-17"))), "Do not count this as a PASS"),
    ],
)
def test_what_to_do_follows_from_the_verdict(judged: BurninResult, action: str, tmp_path: Path) -> None:
    assert f"{action}</b>" in write_burnin_report(judged, tmp_path).read_text()
    assert ("SIMULAT" in to_markdown(burnin_report(judged))) is judged.simulated


def test_readings_are_drawn_over_time() -> None:
    def titles(judged: BurninResult) -> set[str]:
        parts = [part for section in burnin_report(judged).sections for part in section.parts]
        return {part.title for part in parts if isinstance(part, Figure)}

    assert titles(result(readings=True)) == {"Where it differed", "Temperature over time"}
    assert titles(result()) == {"Where it differed"}
