"""The bundle shows the fault by itself: its cases run again without this package, and tell right from wrong."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdc.burnin.bundle import write_bundle
from sdc.burnin.evidence import Finding
from sdc.burnin.observed import Result
from sdc.burnin.programs import Programs
from sdc.burnin.report import EVENTS, RESULT, Settings, write_report
from sdc.burnin.reporting import Circumstances, report_of
from sdc.burnin.rounds import burn_in
from sdc.burnin.workload import Workload
from sdc.faults import BitFlip, Fault
from sdc.records import describe_devices
from sdc.records.determinism import environment

ALONE = """
import runpy, sys
for name in ("sdc", "msgspec", "flax", "optax", "jaxtyping"):
    sys.modules[name] = None
sys.argv = ["reproduce.py", *sys.argv[1:]]
runpy.run_path("reproduce.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def struck(programs: Programs, few: list[Workload]) -> Result:
    fault = Fault(BitFlip(), rate=0.1, site="*", at={"device": 1})
    return burn_in(few, programs.devices, rounds=1, programs=programs, inject=[fault])


def bundled(folder: Path, result: Result, programs: Programs) -> Path:
    """Writes a bundle and unpacks it."""
    settings = Settings(level="smallest", rounds=1, faults=list(result.simulated))
    report = report_of(result, Circumstances(settings, environment(), describe_devices(programs.devices)))
    write_report(folder / RESULT, report)
    (folder / EVENTS).write_text("{}\n")
    cases = write_bundle(folder / "bundle.tar.gz", report, result, programs)
    assert len(cases) == len({finding.workload for finding in result.findings})
    with tarfile.open(folder / "bundle.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "bundle"


def reproduce(folder: Path, *words: str) -> tuple[int, str]:
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_the_cases_run_again_without_this_package(
    programs: Programs, few: list[Workload], struck: Result, tmp_path: Path
) -> None:
    assert len(struck.findings) == len(few), struck.ended
    folder = bundled(tmp_path, struck, programs)
    names = {path.relative_to(folder).parts[0] for path in folder.rglob("*")}
    assert {"manifest.json", RESULT, EVENTS, "environment.json", "requirements.txt", "reproduce.py"} < names
    code, out = reproduce(folder, "--runs", "2")
    assert code == 0, out
    assert "SIMULATION" in out
    assert "0 of 2 runs wrong" in out
    assert " 1 of 2" not in out
    assert " 2 of 2" not in out
    for finding in struck.findings:
        assert finding.outputs is not None
        slug = "".join(c if c.isalnum() else "-" for c in finding.workload)
        kept = [np.load(folder / f"{name}/{slug}.npz")["a0"] for name in ("expected", "found")]
        assert not np.array_equal(*kept)


def test_wrong_bits_are_told_element_by_element(
    programs: Programs, few: list[Workload], struck: Result, tmp_path: Path
) -> None:
    """The found outputs are put in the place of the right ones: then every run is wrong, as on a faulty device."""
    swapped: list[Finding] = []
    for finding in struck.findings[:1]:
        assert finding.outputs is not None
        assert finding.sums is not None
        changes: dict[str, Any] = {"outputs": finding.outputs[::-1], "sums": finding.sums[::-1]}
        swapped.append(finding.__class__(**{**vars(finding), **changes}))
    result = Result(**{**vars(struck), "findings": swapped})
    folder = bundled(tmp_path, result, programs)
    code, out = reproduce(folder, "--runs", "2")
    assert code == 1, out
    assert out.count("2 of 2 runs wrong") == 4
    assert "->" in out
    assert "elements differ" in out


def test_a_damaged_bundle_and_unknown_cases_are_no_verdict(programs: Programs, struck: Result, tmp_path: Path) -> None:
    folder = bundled(tmp_path, struck, programs)
    assert reproduce(folder, "nothing") == (3, "no such case: nothing\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    first = folder / next(name for name in manifest["files"] if name.startswith("inputs/"))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    code, out = reproduce(folder)
    assert code == 3
    assert "damaged" in out


def test_the_same_evidence_gives_the_same_bytes(programs: Programs, struck: Result, tmp_path: Path) -> None:
    settings = Settings(level="smallest", rounds=1, faults=list(struck.simulated))
    report = report_of(struck, Circumstances(settings, environment(), describe_devices(programs.devices)))
    paths = [tmp_path / name for name in ("a.tar.gz", "b.tar.gz")]
    for path in paths:
        write_bundle(path, report, struck, programs)
    assert paths[0].read_bytes() == paths[1].read_bytes()
