"""`sdc study` from the command line: its flags, the record that it writes, and its exit codes."""

import dataclasses
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdc import records
from sdc.tools.cli import run
from sdc.tools.progress import CountProgress
from sdc.train import studies
from sdc.train.studies import ScarStudy
from sdc.train.studies.settings import KINDS, ShadowStudy
from tests.train.test_scar_study import subject


def test_a_study_is_recorded_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Studies two kinds of hardware in this process, whose devices have started already, and is interrupted."""
    experiment = ShadowStudy.run
    monkeypatch.setattr(
        ShadowStudy, "run", lambda self, *given: experiment(dataclasses.replace(self, kinds=KINDS[:2]), *given)
    )
    monkeypatch.setattr(records, "prepare", lambda **_: None)
    flags = ["study", "shadow", "--workload", "convnet", "--images", "digits", "--seed", "3", "--seeds", "3", "--json"]
    words = [*flags, "--steps", "10", "--run", str(tmp_path / "run")]

    def interrupt(self: Any, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CountProgress, "advance", interrupt)
        assert run(words) == 3
    assert "--resume" in capsys.readouterr().err
    assert run(["report", str(tmp_path / "run")]) == 0
    assert "the study is incomplete" in capsys.readouterr().out
    assert run([*flags, "--steps", "11", "--run", str(tmp_path / "run"), "--resume"]) == 2
    assert "contains another study (settings.steps: the study had 10, now 11)" in capsys.readouterr().err
    assert run([*words, "--resume"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = (tmp_path / "run" / "parts.jsonl").read_text().splitlines()
    assert [json.loads(row)["what"] for row in rows] == ["convnet, healthy", "convnet, always wrong"]
    assert run([*words[:-1], str(tmp_path / "whole")]) == 0
    assert json.loads(capsys.readouterr().out)["grids"] == summary["grids"]
    assert [row[0] for row in summary["grids"][0]["rows"]] == ["healthy", "always wrong"]
    assert all(check["holds"] for check in summary["checks"])
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["study"], manifest["steps"], manifest["seed"], manifest["workers"]) == ("shadow", 10, 3, 5)
    assert manifest["workloads"] == {"convnet": "scikit-learn digits"}
    assert manifest["settings"]["seed"] == 3
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


def test_all_studies_run_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a process of its own; a study that fails ends no other, and only begun studies are resumed."""
    ran: list[list[str]] = []

    def start(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(words[words.index("study") + 1 :])
        return subprocess.CompletedProcess(words, 3 if "lossy" in words else 0)

    monkeypatch.setattr(subprocess, "run", start)
    words = ["study", "all", "--scale", "small", "--run", str(tmp_path / "all")]
    assert run(words) == 3
    assert [each[0] for each in ran] == ["paft", "dropcompute", "lossy", "shadow", "scar", "nodes"]
    assert ran[0] == ["paft", "--run", str(tmp_path / "all" / "paft"), "--json", "--steps", "60", "--seeds", "3"]
    assert "small scale" in capsys.readouterr().out
    for name in ("paft", "lossy"):
        (tmp_path / "all" / name).mkdir(parents=True)
    (tmp_path / "all" / "paft" / "manifest.json").touch()
    kept = SimpleNamespace(summary={"checks": [{"holds": True}, {"holds": None}]})
    monkeypatch.setattr(records, "read_record", lambda place: kept)
    assert run([*words, "--resume", "--json"]) == 3
    assert ["--resume" in each for each in ran[6:]] == [True, *[False] * 5]
    rows = json.loads(capsys.readouterr().out)["studies"]
    found = [(row["checks"], row["hold"], row["undecided"]) for row in rows[:3]]
    assert found == [(2, 1, 1), (2, 1, 1), (0, 0, 0)]
    assert len(rows) == 6
    assert run(["study", "all", "--resume"]) == 2
    assert "give --run DIR" in capsys.readouterr().err
