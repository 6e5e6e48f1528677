"""A report as JUnit XML, which continuous integration reads: a suite for each device, a case for each workload."""

from xml.etree import ElementTree as ET

from .report import Report, WorkloadRow


def junit(report: Report) -> str:
    """The report as JUnit XML.

    A case fails where a difference was seen, is an error where it did not run to the end, and is skipped where its time
    at load is void or nothing was compared. The last suite is the verdict itself, so that what is inconclusive cannot
    look like success: it is an error there.

    Args:
        report: of a burn-in.
    """
    root = ET.Element("testsuites", name="sdc burnin")
    for device in report.devices:
        label = f"{report.host.name}.device{device.index}"
        suite = _suite(report, label)
        _properties(suite, _device(report, device.index))
        for row in (row for row in report.workloads if row.device == device.index):
            _case(suite, report, row, label)
        for end in report.unfinished:
            if end.device in (None, device.index):
                case = ET.SubElement(suite, "testcase", name=end.workload or "device", classname=label, time="0")
                ET.SubElement(case, "error", type="ended", message=_clean(end.reason))
        root.append(suite)
    suite = _suite(report, f"{report.host.name}.verdict")
    case = ET.SubElement(suite, "testcase", name="verdict", classname="sdc.burnin", time=f"{report.seconds:.3f}")
    verdict = report.verdict
    sentences = _clean("\n".join(verdict.sentences))
    marked = (
        f"{'SIMULATION: ' if verdict.simulated else ''}{verdict.word} ({', '.join(verdict.kinds) or 'no evidence'})"
    )
    if verdict.word != "PASS":
        kind = "failure" if verdict.word == "FAIL" else "error"
        ET.SubElement(case, kind, type=verdict.word, message=marked).text = sentences
    ET.SubElement(case, "system-out").text = f"{marked}\n{sentences}"
    root.append(suite)
    for each in root:
        _count(each)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _suite(report: Report, name: str) -> ET.Element:
    return ET.Element("testsuite", name=_clean(name), hostname=_clean(report.host.name), timestamp=report.created[:19])


def _device(report: Report, index: int) -> dict[str, str]:
    device = next(row for row in report.devices if row.index == index)
    names = ("kind", "serial", "uuid", "bus", "driver", "firmware")
    known = {name: str(value) for name in names if (value := getattr(device, name)) is not None}
    known |= {"elements": str(device.elements), "seconds": f"{device.seconds:.3f}", "jax-sdc": report.version}
    return known | ({"simulated": "true"} if report.verdict.simulated else {})


def _properties(suite: ET.Element, named: dict[str, str]) -> None:
    properties = ET.SubElement(suite, "properties")
    for name, value in named.items():
        ET.SubElement(properties, "property", name=name, value=_clean(value))


def _case(suite: ET.Element, report: Report, row: WorkloadRow, label: str) -> None:
    case = ET.SubElement(
        suite, "testcase", name=_clean(row.workload), classname=_clean(label), time=f"{row.seconds:.3f}"
    )
    told = [
        finding.sentence
        for finding in report.findings
        if finding.workload == row.workload and row.device in finding.devices
    ]
    if told or row.differences:
        text = "\n".join(told) or f"differences in {row.differences} of {row.runs} runs"
        ET.SubElement(case, "failure", type="difference", message=_clean(text.partition("\n")[0])).text = _clean(text)
    elif row.void:
        ET.SubElement(case, "skipped", message=f"throttled: {row.share or 0:.0%} of what it should reach")
    elif not (row.repeated or row.voted or row.referred or row.golden):
        ET.SubElement(case, "skipped", message="nothing to compare with")


def _count(suite: ET.Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")


def _clean(text: str) -> str:
    """XML has no place for most control characters, and names of hosts and reasons of drivers are foreign text."""
    return "".join(
        c if c in "\t\n" or " " <= c < "\ud800" or "\ue000" <= c < "\ufffe" or c > "\uffff" else "?" for c in text
    )
