"""A report as metrics in the text format of Prometheus, for the textfile collector of its node exporter."""

import datetime
from collections.abc import Iterable
from pathlib import Path

from sdc.settings import SettingError

from .report import CODES, DeviceRow, Report

SUFFIX = ".prom"
"""The node exporter reads files of that name only."""


def metrics(report: Report) -> str:
    """The report as metrics.

    Every metric has a label `simulated`, so that no alert takes a rehearsal for a fault: alert on `simulated="false"`.

    Args:
        report: of a burn-in.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    simulated = str(report.verdict.simulated).lower()

    def gauge(name: str, about: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(f"sdc_burnin_{name}", about, ["simulated", *labels], registry=registry)

    verdict = gauge("verdict", "1 for the verdict of the last burn-in, 0 for the others", ["verdict"])
    for word in CODES:
        verdict.labels(simulated, word).set(word == report.verdict.word)
    gauge("exit_code", "Exit code: 0 pass, 1 fail, 3 inconclusive").labels(simulated).set(report.verdict.code)
    ended = datetime.datetime.fromisoformat(report.ended).timestamp()
    gauge("end_time_seconds", "When the last burn-in ended, Unix time").labels(simulated).set(ended)
    gauge("duration_seconds", "How long it took").labels(simulated).set(report.seconds)
    gauge("rounds", "Rounds that were completed").labels(simulated).set(report.rounds)
    about = gauge("info", "What was tested with what", ["level", "version", "schema", "evidence"])
    about.labels(
        simulated, report.settings.level, report.version, str(report.schema), ",".join(report.verdict.kinds)
    ).set(1)

    part = ["device", "kind", "serial", "uuid", "bus"]
    by_device = {
        "differences": "Runs with a difference",
        "elements": "Numbers that were checked",
        "load_seconds": "Time at load",
        "excluded_rate": "Rate of independent mismatches that would have been seen with 95 %",
        "unfinished": "Workloads that did not run to the end",
        "temperature_celsius": "Highest temperature",
        "power_watts": "Highest power",
        "driver_errors": "Errors that the driver reported meanwhile",
    }
    gauges = {name: gauge(name, text, part) for name, text in by_device.items()}
    for device in report.devices:
        labels = [simulated, str(device.index), *(str(getattr(device, name) or "") for name in part[1:])]
        for name, value in _values(report, device).items():
            if value is not None:
                gauges[name].labels(*labels).set(value)
    rate = gauge("throughput", "Median throughput by workload, in unit a second", ["device", "workload", "unit"])
    for row in report.workloads:
        if row.rate is not None and not row.void:
            rate.labels(simulated, str(row.device), row.workload, row.unit).set(row.rate)
    text: str = generate_latest(registry).decode("utf-8")
    return text


def _values(report: Report, device: DeviceRow) -> dict[str, float | None]:
    sensors = device.sensors
    rows = [row for row in report.workloads if row.device == device.index]
    return {
        "differences": sum(row.differences for row in rows),
        "elements": device.elements,
        "load_seconds": device.seconds,
        "excluded_rate": device.excluded_rate,
        "unfinished": sum(end.device in (None, device.index) for end in report.unfinished),
        "temperature_celsius": sensors.hottest if sensors else None,
        "power_watts": sensors.strongest if sensors else None,
        "driver_errors": len(sensors.events) if sensors else None,
    }


def check_metrics_file(path: Path) -> None:
    """Refuses a name that the node exporter would pass over.

    Raises:
        SettingError: it does not end with `.prom`.
    """
    if path.suffix != SUFFIX:
        raise SettingError("prometheus", path, f"expected a name that ends with {SUFFIX}: others are not collected")
