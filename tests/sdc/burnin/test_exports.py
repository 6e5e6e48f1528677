"""What machines read: JSON against its schema, JUnit against its schema, metrics by a Prometheus parser."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import msgspec
import pytest
import xmlschema
from prometheus_client.parser import text_string_to_metric_families

from sdc.burnin.exports import FILES, TABLES, check_metrics_file, file_schema, junit, metrics
from sdc.burnin.judgement import BURN_IN
from sdc.burnin.results import BurninResult, Ended
from sdc.settings import SettingError
from tests.pages import check_table
from tests.reports import WORKLOADS, make_finding, make_report

HOSTILE = 'a"b\\c\n<d>&\x00\x1b]|é\ud7ff'
REPORTS: dict[str, BurninResult] = {
    "pass": make_report(),
    "fail": make_report(findings=[make_finding(devices=(1,))]),
    "simulated": make_report(findings=[make_finding()], simulated=True),
    "stopped": make_report(stopped="SIGTERM"),
    "ended": make_report(unfinished=[Ended(workload=None, device=1, round=2, reason="device lost")]),
    "throttled": make_report(void=[(WORKLOADS[0], 0)]),
    "driver errors": make_report(events={0: ["Xid 48"]}, uncorrected={0: 2}),
    "hostile": make_report(HOSTILE, findings=[make_finding(host=HOSTILE)]),
    "nothing": make_report(devices=0, unfinished=[Ended(workload=None, device=None, round=0, reason="no device")]),
}
JUNIT = xmlschema.XMLSchema(Path(__file__).with_name("junit.xsd"))


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_json_fits_its_schema(report: BurninResult, tmp_path: Path) -> None:
    BURN_IN.write(tmp_path / "result.json", report)
    schema = file_schema("result")
    jsonschema.Draft202012Validator.check_schema(schema)
    read = json.loads((tmp_path / "result.json").read_text())
    jsonschema.validate(read, schema, cls=jsonschema.Draft202012Validator)
    for field in ("verdict", "devices", "host"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({name: read[name] for name in read if name != field}, schema)


@pytest.mark.parametrize("name", FILES)
def test_every_layout_is_a_schema_whose_fields_are_described(name: str) -> None:
    schema = file_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    for definition in schema["$defs"].values():
        for field, told in definition.get("properties", {}).items():
            assert "description" in told, (definition["title"], field)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_junit_fits_its_schema_and_says_the_verdict(report: BurninResult) -> None:
    text = junit(report)
    JUNIT.validate(text)
    root = ElementTree.fromstring(text)
    *devices, last = root.findall("testsuite")
    assert len(devices) == len(report.devices)
    tag = {"PASS": None, "FAIL": "failure", "INCONCLUSIVE": "error"}[report.verdict.acceptance]
    (case,) = last.findall("testcase")
    assert [child.tag for child in case if child.tag != "system-out"] == ([tag] if tag else [])
    assert ("SIMULATION" in str(case.findtext("system-out"))) is report.simulated
    failed = [int(suite.get("failures", 0)) for suite in devices]
    differing = [sum(row.differences > 0 for row in report.workloads if row.device == d.index) for d in report.devices]
    assert failed == differing


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_metrics_are_read_by_a_prometheus_parser(report: BurninResult) -> None:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(metrics(report)):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    simulated = ("simulated", str(report.simulated).lower())
    assert all(simulated in labels for values in found.values() for labels in values)
    words = {dict(labels)["verdict"]: value for labels, value in found["sdc_burnin_verdict"].items()}
    assert {word for word, value in words.items() if value} == {report.verdict.acceptance}
    assert found["sdc_burnin_exit_code"] == {(simulated,): report.verdict.code}
    differences = {dict(labels)["device"]: value for labels, value in found.get("sdc_burnin_differences", {}).items()}
    assert sum(differences.values()) == sum(row.differences for row in report.workloads)
    assert len(differences) == len(report.devices)


def test_driver_errors_and_time_are_metrics() -> None:
    text = metrics(REPORTS["driver errors"])
    values = {
        (sample.name, sample.labels.get("device")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["sdc_burnin_driver_errors", "0"] == 1
    assert values["sdc_burnin_end_time_seconds", None] == 1767571500


def test_a_file_that_the_collector_would_pass_over_is_refused() -> None:
    check_metrics_file(Path("sdc.prom"))
    with pytest.raises(SettingError, match=r"\.prom"):
        check_metrics_file(Path("sdc.txt"))


def test_reports_are_plain_json() -> None:
    """What readers of other languages get: no NaN, no field that a type leaves open without a word."""
    for report in REPORTS.values():
        plain = json.dumps(msgspec.to_builtins(report), allow_nan=False)
        assert json.loads(plain) == json.loads(msgspec.json.encode(report))


@pytest.mark.parametrize("type", TABLES, ids=lambda type: type.__name__)
def test_the_page_as_it_is_built_has_a_table_of_every_field(type: Any) -> None:
    check_table("burnin", type)
