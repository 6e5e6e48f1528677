"""`sdc burnin`: every verdict as exit code, JSON, JUnit and metrics; early ends; short tests that add up."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import xmlschema
from prometheus_client.parser import text_string_to_metric_families

from sdc.burnin.exports import file_schema
from sdc.burnin.judgement import BURN_IN
from sdc.tools import cli
from sdc.verdict import Verdict
from tests.tools import test_burnin as units
from tests.tools.test_burnin import (
    FAST,
)

# Fixtures.
started = units.started

JUNIT = xmlschema.XMLSchema(Path(__file__).parents[1] / "sdc" / "burnin" / "junit.xsd")


PATHS = {
    "vote": ("--devices 4", 0, "PASS", ["vote"], "no difference"),
    "repeat accepted": (
        "--devices cpu --rounds 2 --accept repeat",
        0,
        "PASS",
        ["repeat"],
        "accepted: the only evidence is repetition",
    ),
    "repeat only": ("--devices cpu --rounds 2", 3, "INCONCLUSIVE", ["repeat"], "cannot detect faults that repeat"),
    "one run": ("--devices cpu --accept repeat", 3, "INCONCLUSIVE", [], "covered all workloads"),
    "cpu not requested": ("--rounds 2 --accept repeat", 3, "INCONCLUSIVE", ["repeat"], "no accelerator was found"),
    "no such device": ("--devices gpu", 3, "INCONCLUSIVE", [], "gpu was requested, but this host has cpu"),
    "fault": ("--devices 4 --fault bitflip,rate=1e-5", 1, "FAIL", ["vote"], "device 3: differences in"),
    "golden damaged": ("--devices 4 --golden {golden}", 3, "INCONCLUSIVE", ["vote"], "golden digests were not used"),
}


@pytest.mark.parametrize("case", PATHS.values(), ids=PATHS)
def test_every_verdict(
    case: tuple[str, int, str, list[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, code, word, kinds, sentence = case
    (tmp_path / "golden.json").write_text('{"entries": []}')
    flags = flags.format(golden=tmp_path / "golden.json")
    fast = "--only transfers" if "--rounds" in flags else FAST
    places = {name: tmp_path / name for name in ("run", "junit.xml", "sdc.prom")}
    words = (
        f"burnin {fast} {flags} --run {places['run']} --junit {places['junit.xml']} --prometheus {places['sdc.prom']}"
    )
    assert cli.run([*words.split(), "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert (Verdict(printed["verdict"]).acceptance, Verdict(printed["verdict"]).code) == (word, code)
    assert set(kinds) <= set(printed["evidence"])
    assert any(sentence in each for each in printed["sentences"]), printed["sentences"]
    assert bool(printed["settings"]["faults"]) is ("--fault" in flags)
    assert not printed["workloads"] or any("were selected: transfers" in note for note in printed["notes"])
    assert not any("clock" in note for note in printed["notes"])

    jsonschema.validate(printed, file_schema("result"))
    assert BURN_IN.read(places["run"]).id == printed["id"]
    JUNIT.validate(str(places["junit.xml"]))
    suites = ElementTree.parse(places["junit.xml"]).getroot().findall("testsuite")
    bad = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("failures", "errors")}
    assert [bool(bad["failures"]), bool(bad["errors"])] == [word == "FAIL", word == "INCONCLUSIVE"]
    families = text_string_to_metric_families(places["sdc.prom"].read_text())
    samples = [sample for family in families for sample in family.samples]
    (exit_code,) = [sample for sample in samples if sample.name == "sdc_burnin_exit_code"]
    assert (exit_code.value, exit_code.labels["simulated"]) == (code, str("--fault" in flags).lower())
    bundle = places["run"] / "bundle.tar.gz"
    assert bundle.exists() is (word == "FAIL")
    assert f"{word} (" in (places["run"] / "report.html").read_text()
    if word == "FAIL":
        with tarfile.open(bundle) as archive:
            assert {"bundle/report.html", "bundle/README.txt"} < set(archive.getnames())

    assert cli.run(["verdict", str(places["run"])]) == code
    assert word in capsys.readouterr().out
    assert cli.run(["verdict", str(places["run"]), "--format", "nagios"]) == {0: 0, 1: 2, 3: 3}[code]


def test_people_read_the_verdict_and_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"burnin {FAST} --devices 4 --fault bitflip,rate=1e-5 --run {tmp_path / 'run'}"
    assert cli.run(words.split()) == 1
    out = capsys.readouterr().out
    assert "SIMULATION  FAIL" in out
    assert "bundle.tar.gz" in out
    assert "rate excluded" in out
    page = tmp_path / "run" / "report.html"
    before = page.read_text()
    page.unlink()
    assert cli.run(["report", str(tmp_path / "run")]) == 1
    assert "SIMULATION: FAIL" in capsys.readouterr().out
    assert page.read_text() == before


def test_programs_of_a_cache_are_not_tested(tmp_path: Path) -> None:
    """A damaged entry would be a difference of the device that runs it."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    words = [
        Path(sys.executable).with_name("sdc"),
        "burnin",
        *FAST.split(),
        "--devices",
        "2",
        "--run",
        tmp_path / "run",
    ]
    done = subprocess.run(words, env={**os.environ, **cache}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "cache").glob("*"))
