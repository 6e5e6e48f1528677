"""`sdc study` from the command line: its flags, the record that it writes, its exit codes."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from sdc.record import determinism
from sdc.tools.cli import run
from sdc.train import studies
from sdc.train.studies._shadow import KINDS, ShadowStudy


def test_a_study_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kind of hardware, in this process, whose devices have started already."""
    monkeypatch.setitem(studies.STUDIES, "shadow", functools.partial(ShadowStudy, kinds=KINDS[:1]))
    monkeypatch.setattr(determinism, "prepare", lambda **_: None)
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("paft", "--steps", 5), "--steps 5: expected at least 10"),
        (("lossy", "--seed", -1), "--seed -1: expected a number from 0"),
        (("shadow", "--images", "nowhere/at/all"), "--images nowhere/at/all: is no folder"),
        (("dropcompute", "--corpus", "nowhere", "--workload", "transformer"), "--corpus nowhere: does not exist"),
        (("other",), "invalid choice"),
    ],
)
def test_bad_input(flags: tuple[Any, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", *map(str, flags), "--run", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(["study", "shadow", "--run", str(tmp_path)]) == 2
    assert f"--run {tmp_path}: exists already; name another folder" in capsys.readouterr().err
