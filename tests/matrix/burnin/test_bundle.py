"""The bundle shows the fault by itself: its cases run again without this package, and tell right from wrong."""

import dataclasses
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from sdc.burnin import bundle
from sdc.burnin.bundle import write_bundle
from sdc.burnin.judgement import BURN_IN, judge
from sdc.burnin.programs import Programs, bits_of
from sdc.burnin.reproduce import seal
from sdc.burnin.results import EVENTS, RESULT, BurninResult, BurninSettings
from sdc.burnin.rounds import Kept, burn_in, planned_result, seed_of
from sdc.burnin.workloads.workload import BurninWorkload
from sdc.faults import BitFlip, Fault, When
from sdc.records import describe_devices

ALONE = """
import runpy, sys
for name in ("sdc", "msgspec", "flax", "optax", "jaxtyping", *sys.argv.pop(1).split()):
    sys.modules[name] = None
sys.argv = ["reproduce.py", *sys.argv[1:]]
runpy.run_path("reproduce.py", run_name="__main__")
"""


class Struck(NamedTuple):
    result: BurninResult
    workloads: list[BurninWorkload]
    kept: dict[str, Kept]


@pytest.fixture(scope="module")
def struck(programs: Programs, few: list[BurninWorkload]) -> Struck:
    fault = Fault(BitFlip(), rate=0.1, site="*", at={"device": 1})
    settings = BurninSettings(level="smallest", rounds=1, faults=(str(fault),))
    result = planned_result(few, programs.devices, describe_devices(programs.devices), settings=settings)
    kept: dict[str, Kept] = {}
    burn_in(few, programs.devices, rounds=1, programs=programs, inject=[fault], result=result, kept=kept)
    return Struck(judge(result), few, kept)


def bundled(folder: Path, struck: Struck, programs: Programs) -> Path:
    """Writes a bundle and unpacks it."""
    BURN_IN.write(folder / RESULT, struck.result)
    (folder / EVENTS).write_text("{}\n")
    cases = write_bundle(folder / "bundle.tar.gz", struck.result, programs, struck.workloads, struck.kept)
    assert len(cases) == len({finding.workload for finding in struck.result.findings})
    with tarfile.open(folder / "bundle.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "bundle"


def reproduce(folder: Path, *words: str, without: str = "") -> tuple[int, str]:
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, without, *words],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_the_cases_run_again_without_this_package(
    programs: Programs, few: list[BurninWorkload], struck: Struck, tmp_path: Path
) -> None:
    assert len(struck.result.findings) == len(few), struck.result.unfinished
    folder = bundled(tmp_path, struck, programs)
    names = {path.relative_to(folder).parts[0] for path in folder.rglob("*")}
    assert "SIMULATION" in (folder / "README.txt").read_text()
    assert {"manifest.json", RESULT, EVENTS, "environment.json", "requirements.txt", "reproduce.py"} < names
    code, out = reproduce(folder, "--runs", "2")
    assert code == 0, out
    assert "SIMULATION" in out
    assert "0 of 2 runs wrong" in out
    assert " 1 of 2" not in out
    assert " 2 of 2" not in out
    for finding in struck.result.findings:
        assert struck.kept[finding.workload].outputs is not None
        slug = "".join(c if c.isalnum() else "-" for c in finding.workload)
        right, wrong = (np.load(folder / f"{name}/{slug}.npz") for name in ("expected", "found"))
        outputs = struck.kept[finding.workload].outputs
        assert outputs is not None
        for number, (kept, found) in enumerate(zip(*outputs, strict=True)):
            stored = right[f"a{number}"].reshape(-1).copy()
            assert np.array_equal(bits_of(stored), bits_of(kept))
            assert len(wrong[f"i{number}"]) < stored.size
            stored[wrong[f"i{number}"]] = wrong[f"a{number}"]
            assert np.array_equal(bits_of(stored), bits_of(found))


def test_wrong_bits_are_told_element_by_element(
    programs: Programs, few: list[BurninWorkload], struck: Struck, tmp_path: Path
) -> None:
    """The found outputs are put in the place of the right ones: then every run is wrong, as on a faulty device."""
    finding = struck.result.findings[0]
    kept = struck.kept[finding.workload]
    assert kept.outputs is not None
    assert kept.sums is not None
    (right, wrong), (good, bad) = kept.outputs, kept.sums
    swapped = Kept(kept.finding, (wrong, right), (bad, good))
    result = msgspec.structs.replace(struck.result, findings=[finding])
    folder = bundled(tmp_path, Struck(judge(result), struck.workloads, {finding.workload: swapped}), programs)
    code, out = reproduce(folder, "--runs", "2")
    assert code == 1, out
    assert out.count("2 of 2 runs wrong") == 4
    assert "->" in out
    assert "elements differ" in out


def test_a_bundle_has_a_few_cases_of_each_family(
    programs: Programs, struck: Struck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest ones that recur, and at least one, however large."""
    one = struck.workloads[0]
    copies = [dataclasses.replace(one, name=f"{one.name}/{number}") for number in range(5)]
    finding = struck.result.findings[0]
    found = [msgspec.structs.replace(finding, workload=each.name, persistence="transient") for each in copies]
    found[3] = msgspec.structs.replace(found[3], persistence="persistent")
    result = msgspec.structs.replace(struck.result, findings=found)
    kept = {each.workload: Kept(each, *struck.kept[finding.workload][1:]) for each in found}

    def cases() -> list[str]:
        names = write_bundle(tmp_path / "bundle.tar.gz", result, programs, copies, kept)
        return [name[-1] for name in names]

    assert cases() == ["3", "0", "1"]
    monkeypatch.setattr(bundle, "MOST", 1)
    assert cases() == ["3"]


def test_exit_code_1_follows_a_comparison(programs: Programs, struck: Struck, tmp_path: Path) -> None:
    """Every failure of the reproducer itself, and every damage of the bundle, gives exit code 3 and a line."""
    folder = bundled(tmp_path, struck, programs)
    assert reproduce(folder, "nothing") == (3, "no such case: nothing\n")
    for package in ("jax", "jax.export", "numpy"):
        code, out = reproduce(folder, without=package)
        assert (code, package.partition(".")[0] in out.lower()) == (3, True), out
    for module, error in (("numpy", "RuntimeError"), ("numpy", "SystemExit"), ("argparse", "KeyError")):
        (folder / f"{module}.py").write_text(f"raise {error}('no core')")
        code, out = reproduce(folder)
        assert (code, f"cannot be imported ({error}: " in out) == (3, True), out
        (folder / f"{module}.py").unlink()
    path = folder / "manifest.json"
    text = path.read_text()
    manifest = json.loads(text)
    right = manifest["cases"][0]["right"]
    digest = next(iter(right.values()))
    other = f"{int(digest[0], 16) ^ 1:x}{digest[1:]}"

    def sealed(**changes: object) -> str:
        value = {key: value for key, value in {**manifest, **changes}.items() if key != "seal"}
        return json.dumps({**value, "seal": seal(value)})

    no_outputs = [{**manifest["cases"][0], "outputs": 0}]
    for changed, words in (
        (text.replace(digest, other), "damaged"),
        (json.dumps({key: value for key, value in manifest.items() if key != "seal"}), "damaged"),
        (text[:-20], "damaged"),
        ("[]", "damaged"),
        (sealed(devices=0), "nothing to compare"),
        (sealed(cases=no_outputs), "nothing to compare"),
        (sealed(cases=[{"name": "a", "program": None}]), "cannot run on this host"),
    ):
        path.write_text(changed)
        code, out = reproduce(folder)
        assert (code, words in out) == (3, True), out
    path.unlink()
    os.mkfifo(path)
    assert reproduce(folder)[0] == 3
    path.unlink()
    path.write_text(text)
    first = folder / next(name for name in manifest["files"] if name.startswith("inputs/"))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    code, out = reproduce(folder)
    assert code == 3
    assert "damaged" in out
    first.unlink()
    assert reproduce(folder)[0] == 3
    os.mkfifo(first)
    assert reproduce(folder)[0] == 3


def test_the_same_evidence_gives_the_same_bytes(programs: Programs, struck: Struck, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.tar.gz", "b.tar.gz")]
    for path in paths:
        write_bundle(path, struck.result, programs, struck.workloads, struck.kept)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_case_has_the_data_of_its_finding(programs: Programs, few: list[BurninWorkload], tmp_path: Path) -> None:
    work = [workload for workload in few if workload.family in ("ordering", "matrix")]
    late = Fault(BitFlip(), rate=0.1, site="*", at={"device": 1}, when=When(onset=4))
    settings = BurninSettings(level="smallest", rounds=3, faults=(str(late),))
    result = planned_result(work, programs.devices, describe_devices(programs.devices), settings=settings)
    kept: dict[str, Kept] = {}
    burn_in(work, programs.devices, rounds=6, programs=programs, inject=[late], result=result, kept=kept, fresh=3)
    assert {finding.seed for finding in result.findings} <= {seed_of(3, 1), seed_of(3, 2)}
    folder = bundled(tmp_path, Struck(judge(result), work, kept), programs)
    code, out = reproduce(folder, "--runs", "1")
    assert (code, out.count("0 of 1 runs wrong")) == (0, 4 * len(work)), out
