"""`sdc study`, shrunk: every study runs to its report, and its figures are what the library computes."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdc.aggregation.drift import pair_drift
from sdc.analysis.aggregation import STUDY, Chart, Check, Findings, Grid, Line, summarize_findings
from sdc.analysis.report import write_report
from sdc.record.records import RunWriter
from sdc.tools.study import workloads
from sdc.tools.study.workloads import Workload
from sdc.train.images import Images
from tests.tools.command import sdc

STEPS = 12


def module(name: str) -> Any:
    return importlib.import_module(f"sdc.tools.study.{name}")


@pytest.fixture(scope="module")
def convnet() -> Workload:
    """Images of two classes, bright above or below: learned in a few steps."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 400).astype(np.int32)
    images = 0.3 * generator.random((400, 8, 8, 1), np.float32)
    images[labels == 1, :4] += 0.5
    images[labels == 0, 4:] += 0.5
    return workloads.convnet(Images(images[:320], labels[:320], images[320:], labels[320:], 2, "made up", "0"))


def run(name: str, workload: Workload, steps: int = STEPS) -> tuple[Findings, int]:
    """All findings, and how many parts were done."""
    findings, done = Findings(), 0
    for doing, found in module(name).study([workload], steps=steps, seed=0):
        findings += found
        done += bool(doing)
    assert done == module(name).count([workload]), "the progress display counts what is done"
    return findings, done


def cells(findings: Findings, caption: str) -> dict[str, tuple[Any, ...]]:
    """Rows of a table by their names."""
    (grid,) = [grid for grid in findings.grids if caption in grid.caption]
    assert all(len(row) == len(grid.header) for row in grid.rows)
    return {row[0]: row[1:] for row in grid.rows}


def test_paft(convnet: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    paft = module("paft")
    monkeypatch.setattr(paft, "VARIANCES", (1e-2,))
    monkeypatch.setattr(paft, "PERIODS", (2, 4))
    monkeypatch.setattr(paft, "BURSTS", (1.0,))
    monkeypatch.setattr(paft, "PUBLISHED", dict.fromkeys(("clean", *paft.methods()), (1.0,)))
    findings, _ = run("paft", convnet)
    rows = cells(findings, "accuracy")
    assert set(rows) == {"clean", "noisy", "paft_sync, H = 2", "paft_sync, H = 4", "paft"}
    assert rows["clean"][0] > 80
    for *_, ratio in cells(findings, "model divergence").values():
        assert ratio == pytest.approx(1, abs=0.1)
    assert len(findings.checks) == 2


def test_dropcompute(convnet: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    dropcompute = module("dropcompute")
    monkeypatch.setattr(dropcompute, "FLEETS", (4, 64))
    monkeypatch.setattr(dropcompute, "THREADS", (2,))
    monkeypatch.setattr(dropcompute, "ITERATIONS", 4)
    monkeypatch.setattr(dropcompute, "DROPS", (0.1, 0.2, 0.3))
    monkeypatch.setattr(dropcompute, "WORKERS", 2)
    findings, _ = run("dropcompute", convnet)
    gains = [row[3] for row in cells(findings, "Predicted effective speedup").values()]
    assert 1 < gains[0] < gains[1]
    rows = cells(findings, "training with dropped")
    assert rows["no threshold"][0] == 0
    assert 0.15 < rows["30% dropped"][0] < 0.45
    assert rows["30% dropped"][3] < rows["10% dropped"][3] < rows["no threshold"][3]


def test_lossy(convnet: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = module("lossy")
    monkeypatch.setattr(lossy, "RATES", (0.0, 0.2))
    monkeypatch.setattr(lossy, "DRIFTING", (0.3,))
    monkeypatch.setattr(
        lossy, "variants", lambda: {"per packet": ((0.2,), lambda rate: {"p_grad": rate, "packet": 64})}
    )
    findings, _ = run("lossy", convnet)
    assert set(cells(findings, "accuracy")) >= {"per shard", "per packet"}
    ((measured, exact, printed, _),) = cells(findings, "Drift").values()
    assert exact == pair_drift(0.3)
    assert measured == pytest.approx(exact, rel=0.05)
    assert printed == pair_drift(0.3, printed=True)


def test_shadow(convnet: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = module("shadow")
    chosen = ("healthy", "always wrong", "wrong once")
    monkeypatch.setattr(shadow, "CASES", tuple(case for case in shadow.CASES if case.name in chosen))
    findings, _ = run("shadow", convnet)
    rows = cells(findings, "watches training")
    assert rows["healthy"] == (0, 0, 0, None, None, "clean", "nobody")
    corrupted, compared, found, *_, verdict, named = rows["always wrong"]
    assert (corrupted, verdict, named) == (STEPS, "corrupt", str(shadow.FAULTY))
    assert 0 < compared == found
    assert rows["wrong once"][0] == 1
    assert all(check.holds for check in findings.checks)


def test_the_report_draws_what_is_recorded(tmp_path: Path) -> None:
    findings = Findings(
        (Grid("A table", ("run", "value"), (("one", 0.123456), ("none", None)), "A note."),),
        (
            Chart("A figure", "A caption.", "x", "y", (Line("measured", [1, 2], [1.0, float("nan")]),), log="xy"),
            Chart("An empty figure", "A caption.", "x", "y", (Line("a", [1], [float("nan")]),)),
        ),
        (Check("something holds", True, "1 of 1"), Check("another does not", False, "0 of 1")),
    )
    manifest = {
        "kind": STUDY,
        "study": "paft",
        "workers": 4,
        "steps": 9,
        "seed": 0,
        "command": ["sdc", "study", "paft"],
    }
    with RunWriter.create(tmp_path / "run", manifest) as writer:
        writer.summary(summarize_findings("paft", findings))
    page = write_report(tmp_path / "run").read_text()
    text = (tmp_path / "run" / "report.md").read_text()
    assert "0.1235" in text
    assert "1 of 2 of the paper's statements" in text
    assert "simulated errors, delays and losses" in page
    assert page.count("<svg") == 1
    assert "An empty figure: nothing finite was measured" in text
    code, out, _ = sdc("report", tmp_path / "run", "--json")
    assert code == 0
    assert json.loads(out)["checks"][1]["holds"] is False


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("paft", "--steps", 5), "--steps 5: expected at least 10"),
        (("lossy", "--seed", -1), "--seed -1"),
        (("shadow", "--images", "nowhere/at/all"), "nowhere/at/all"),
        (("dropcompute", "--corpus", "nowhere", "--workload", "transformer"), "nowhere does not exist"),
        (("other",), "invalid choice"),
    ],
)
def test_bad_input(flags: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    code, _, err = sdc("study", *flags, "--run", tmp_path / "run")
    assert code == 2, err
    assert message in err
    assert not (tmp_path / "run").exists()
