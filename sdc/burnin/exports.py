"""Results in formats for other programs: JUnit XML, Prometheus metrics, and JSON Schemas of the files."""

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree as ET

import msgspec

from sdc.settings import SettingError

from ..schema import Fields
from ..verdict import Verdict
from .golden_register import Register
from .pair import Pair
from .results import (
    BurninResult,
    CheckedDevice,
    Element,
    Elements,
    Ended,
    Finding,
    GoldenUse,
    NodeOutlook,
    Standing,
    Tally,
)
from .sensors import Course, Reading, Sensors

# Layouts by name: `result.json`, `pair.json` and `pool.json`, golden registers, and the output of `sdc verdict --json`.
FILES: Mapping[str, type[Fields]] = MappingProxyType(
    {"result": BurninResult, "pair": Pair, "golden": Register, "verdict": Standing}
)
# Types with a table in docs/burnin.md.
TABLES: tuple[type[Any], ...] = (
    BurninResult, CheckedDevice, Course, Reading, Sensors, Tally, Finding, Elements, Element, Ended, GoldenUse,
    NodeOutlook,
)  # fmt: skip
SUFFIX = ".prom"  # the node exporter reads only files with this suffix


# Metrics of a device.
BY_DEVICE = {
    "differences": "Runs with a difference",
    "elements": "Elements checked",
    "load_seconds": "Time under load",
    "excluded_rate": "Rate of mismatches per element that would have been found in each family with 95 % probability",
    "unfinished": "Workloads that did not run to the end",
    "temperature_celsius": "Highest temperature",
    "power_watts": "Highest power",
    "driver_errors": "Errors that the driver reported during the burn-in",
}


def junit(result: BurninResult) -> str:
    """Formats a result as JUnit XML for continuous integration, with a suite per device and a case per workload.

    A case fails if its workload showed a difference, is an error if the workload did not run to the end, and is skipped
    if the time under load is void or nothing was compared. The last suite contains the verdict itself. An inconclusive
    verdict is reported there as an error, so it cannot be mistaken for success.
    """
    root = ET.Element("testsuites", name="sdc burnin")
    for device in result.devices:
        label = f"{result.host.name}.device{device.index}"
        suite = _suite(root, result, label)
        names = ("kind", "serial", "uuid", "bus", "driver", "firmware")
        known = {name: str(value) for name in names if (value := getattr(device, name)) is not None}
        known |= {"elements": str(device.elements), "seconds": f"{device.seconds:.3f}", "jax-sdc": result.version}
        known |= {"simulated": "true"} if result.simulated else {}
        properties = ET.SubElement(suite, "properties")
        for name, value in known.items():
            ET.SubElement(properties, "property", name=name, value=_clean(value))
        for row in result.workloads:
            if row.device == device.index and row.runs:
                _add_case(suite, result, row, label)
        for end in result.unfinished:
            if end.device in (None, device.index):
                case = ET.SubElement(suite, "testcase", name=end.workload or "device", classname=label, time="0")
                ET.SubElement(case, "error", type="ended", message=_clean(end.reason))
    suite = _suite(root, result, f"{result.host.name}.verdict")
    case = ET.SubElement(suite, "testcase", name="verdict", classname="sdc.burnin", time=f"{result.seconds:.3f}")
    sentences = _clean("\n".join(result.sentences))
    if result.verdict is not Verdict.CLEAN:
        kind = "failure" if result.verdict is Verdict.CORRUPT else "error"
        ET.SubElement(case, kind, type=result.verdict.acceptance, message=result.headline).text = sentences
    ET.SubElement(case, "system-out").text = f"{result.headline}\n{sentences}"
    for suite in root:
        cases = suite.findall("testcase")
        suite.set("tests", str(len(cases)))
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(name, str(sum(case.find(tag) is not None for case in cases)))
        suite.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _suite(root: ET.Element, result: BurninResult, name: str) -> ET.Element:
    about = {"name": _clean(name), "hostname": _clean(result.host.name), "timestamp": result.created[:19]}
    return ET.SubElement(root, "testsuite", about)


def _add_case(suite: ET.Element, result: BurninResult, row: Tally, label: str) -> None:
    case = ET.SubElement(
        suite, "testcase", name=_clean(row.workload), classname=_clean(label), time=f"{row.seconds:.3f}"
    )
    found = [
        finding.sentence
        for finding in result.findings
        if finding.workload == row.workload and row.device in finding.devices
    ]
    if found or row.differences:
        text = "\n".join(found) or f"differences in {row.differences} of {row.runs} runs"
        ET.SubElement(case, "failure", type="difference", message=_clean(text.partition("\n")[0])).text = _clean(text)
    elif row.void:
        ET.SubElement(case, "skipped", message=f"throttled to {row.share or 0:.0%} of the expected throughput")
    elif not (row.repeated or row.voted or row.referred or row.golden):
        ET.SubElement(case, "skipped", message="no comparison was possible")


def _clean(text: str) -> str:
    """Replaces characters that XML does not allow; host names and drivers' messages may contain such characters."""
    return "".join(
        c if c in "\t\n" or " " <= c < "\ud800" or "\ue000" <= c < "\ufffe" or c > "\uffff" else "?" for c in text
    )


def metrics(result: BurninResult) -> str:
    """Formats a result as Prometheus metrics, for the textfile collector of the node exporter.

    Every metric has a label `simulated`; alerts should select `simulated="false"` to exclude rehearsals.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    simulated = str(result.simulated).lower()

    def gauge(name: str, about: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(f"sdc_burnin_{name}", about, ["simulated", *labels], registry=registry)

    verdict = gauge("verdict", "1 for the verdict of the last burn-in, 0 for other verdicts", ["verdict"])
    for each in Verdict:
        verdict.labels(simulated, each.acceptance).set(each is result.verdict)
    for name, said, value in (
        ("exit_code", "Exit code: 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE", int(result.verdict.code)),
        (
            "end_time_seconds",
            "Unix time at which the last burn-in ended",
            datetime.datetime.fromisoformat(result.ended).timestamp(),
        ),
        ("duration_seconds", "Duration of the last burn-in", result.seconds),
        ("rounds", "Rounds completed", result.rounds),
    ):
        gauge(name, said).labels(simulated).set(value)
    about = gauge("info", "Settings, version and evidence", ["level", "version", "schema", "evidence"])
    about.labels(simulated, result.settings.level, result.version, str(result.schema), ",".join(result.evidence)).set(1)

    part = ["device", "kind", "serial", "uuid", "bus"]
    gauges = {name: gauge(name, text, part) for name, text in BY_DEVICE.items()}
    for device in result.devices:
        labels = [simulated, str(device.index), *(str(getattr(device, name) or "") for name in part[1:])]
        sensors = device.sensors
        values: tuple[float | None, ...] = (
            sum(row.differences for row in result.workloads if row.device == device.index),
            device.elements, device.seconds, device.excluded_rate,
            sum(end.device in (None, device.index) for end in result.unfinished),
            *((sensors.hottest, sensors.strongest, len(sensors.events)) if sensors else (None, None, None)),
        )  # fmt: skip
        for shown, found in zip(gauges.values(), values, strict=True):
            if found is not None:
                shown.labels(*labels).set(found)
    rate = gauge("throughput", "Median throughput by workload, in units per second", ["device", "workload", "unit"])
    for row in result.workloads:
        if row.rate is not None and not row.void:
            rate.labels(simulated, str(row.device), row.workload, row.unit).set(row.rate)
    text: str = generate_latest(registry).decode("utf-8")
    return text


def check_metrics_file(path: Path) -> None:
    """Raises SettingError for a file name that the node exporter would ignore."""
    if path.suffix != SUFFIX:
        problem = f"expected a file name that ends with {SUFFIX}; the node exporter ignores other files"
        raise SettingError("prometheus", path, problem)


def file_schema(name: str) -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of a layout in `FILES`; the files have an additional field `checksum`."""
    ((reference,), definitions) = msgspec.json.schema_components([FILES[name]], ref_template="#/$defs/{name}")
    for definition in definitions.values():
        if "properties" in definition:
            for field in {"format"} & set(definition["properties"]):
                definition["properties"][field]["description"] = "format of the file"
            definition["required"] = list(definition["properties"])  # readers may rely on every written field
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"jax-sdc {name}",
        **reference,
        "$defs": definitions,
    }
