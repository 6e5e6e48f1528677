"""`sdc study` from the command line: its flags, the record that it writes, and its exit codes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sdc import records
from sdc.tools.cli import run
from sdc.tools.progress import CountProgress
from sdc.train import studies
from sdc.train.studies import ScarStudy
from sdc.train.studies.settings import KINDS, ShadowStudy
from tests.train.test_scar_study import subject


def test_a_study_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Studies one kind of hardware in this process, whose devices have started already."""
    experiment = ShadowStudy.run
    monkeypatch.setattr(
        ShadowStudy, "run", lambda self, tasks: experiment(dataclasses.replace(self, kinds=KINDS[:1]), tasks)
    )
    monkeypatch.setattr(records, "prepare", lambda **_: None)
    flags = ("--workload", "convnet", "--images", "digits", "--steps", "10", "--seed", "3")
    assert run(["study", "shadow", *flags, "--run", str(tmp_path / "run"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert [row[0] for row in summary["grids"][0]["rows"]] == ["healthy"]
    assert all(check["holds"] for check in summary["checks"])
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["study"], manifest["steps"], manifest["seed"], manifest["workers"]) == ("shadow", 10, 3, 5)
    assert manifest["workloads"] == {"convnet": "scikit-learn digits"}
    assert manifest["options"]["seed"] == "3"
    assert (tmp_path / "run" / "report.html").is_file()
    assert run(["report", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary


def test_a_study_of_failures_is_recorded_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small training replaces the workloads, and is interrupted as by Ctrl-C."""
    monkeypatch.setattr(records, "prepare", lambda **_: None)
    monkeypatch.setattr(studies, "subjects", lambda names, sources: [subject()])
    monkeypatch.setitem(ScarStudy.__init__.__kwdefaults__, "perturbations", 20)
    words = ["study", "scar", "--trials", "10", "--starts", "5", "--run", str(tmp_path / "run"), "--json"]
    done: list[str] = []

    def advance(self: Any, text: str) -> None:
        done.append(text)
        if len(done) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(CountProgress, "advance", advance)
    assert run(words) == 3
    said = capsys.readouterr().err
    assert "--resume" in said
    assert len((tmp_path / "run" / "parts.jsonl").read_text().splitlines()) == 4
    assert run(words) == 2
    assert "continue its run with --resume" in capsys.readouterr().err
    assert run([*words, "--resume", "--seed", "1"]) == 2
    assert "contains another study" in capsys.readouterr().err
    assert run([*words, "--resume"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["complete"]
    assert {check["claim"].partition(":")[0] for check in summary["checks"]} >= {"Figure 3", "regression"}
    assert run(["report", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    page = (tmp_path / "run" / "report.html").read_text()
    assert "published reduction" in page
