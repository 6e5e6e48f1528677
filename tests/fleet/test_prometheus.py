"""From a burn-in's metrics by way of node exporter and Prometheus to an alert that fires."""

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .slurm import DEPLOY, FAULT, burnin, free_ports, until

pytestmark = pytest.mark.fleet
RULES = DEPLOY / "prometheus"
PASSED = 'sdc_burnin_verdict{simulated="false",verdict="PASS"}'
CONFIGURATION = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{folder}/alerts.yml, {folder}/rehearsal.yml]
scrape_configs:
  - job_name: node
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@contextmanager
def program(log: Path, *words: object) -> Iterator[None]:
    with log.open("w") as out:
        process = subprocess.Popen([str(word) for word in words], stdout=out, stderr=out)
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def ask(port: int, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]
    except (urllib.error.URLError, ConnectionError):  # it starts
        return None


def value(port: int, query: str) -> float | None:
    found = ask(port, f"query?query={urllib.parse.quote(query)}")
    return float(found["result"][0]["value"][1]) if found and found["result"] else None


def firing(port: int) -> set[tuple[str, str]]:
    """Names and severities of the alerts that fire."""
    found = ask(port, "alerts") or {"alerts": []}
    return {(a["labels"]["alertname"], a["labels"]["severity"]) for a in found["alerts"] if a["state"] == "firing"}


def test_rules_hold() -> None:
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *words], cwd=RULES, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_burn_in_fires_the_alert(tmp_path: Path) -> None:
    """The rules of a rehearsal are those of the file, for simulated faults; the file's own do not fire for these."""
    rules = (RULES / "alerts.yml").read_text()
    (tmp_path / "alerts.yml").write_text(rules)
    command = next(line.strip("# ") for line in rules.splitlines() if line.startswith("#   sed "))
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    collected = tmp_path / "collected"
    collected.mkdir()
    exporter, port = free_ports(2)
    (tmp_path / "prometheus.yml").write_text(CONFIGURATION.format(folder=tmp_path, port=exporter))
    exporting = program(
        tmp_path / "exporter.log", "prometheus-node-exporter", "--collector.disable-defaults", "--collector.textfile",
        f"--collector.textfile.directory={collected}", f"--web.listen-address=127.0.0.1:{exporter}",
    )  # fmt: skip
    scraping = program(
        tmp_path / "prometheus.log", "prometheus", f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}",
    )  # fmt: skip
    with exporting, scraping:
        assert burnin(tmp_path / "passes", "--prometheus", str(collected / "sdc.prom")) == 0
        until(
            lambda: value(port, 'sdc_burnin_verdict{simulated="false",verdict="PASS"}') == 1, 30, lambda: logs(tmp_path)
        )
        assert not firing(port)
        assert burnin(tmp_path / "fails", "--prometheus", str(collected / "sdc.prom"), *FAULT.split()) == 1
        until(lambda: ("SdcBurninFailed", "rehearsal") in firing(port), 30, lambda: f"{firing(port)} {logs(tmp_path)}")
        assert ("SdcBurninFailed", "critical") not in firing(port)
        assert value(port, PASSED) is None  # the rehearsal took its place
        written = (collected / "sdc.prom").read_text()
        for title, query in queries():
            there = all(f"\n{name}{{" in written for name in re.findall(r"sdc_burnin_\w+", query))
            assert (value(port, query.replace("$simulated", "true")) is not None) == there, title
        assert sum(value(port, query.replace("$simulated", "true")) is not None for _, query in queries()) >= 9


def queries() -> list[tuple[str, str]]:
    """Titles and queries of the panels of the dashboard."""
    panels = json.loads((RULES / "dashboard.json").read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def logs(folder: Path) -> str:
    return "".join(file.read_text()[-2000:] for file in folder.glob("*.log"))
