"""`sdc doctor` from the command line: exit codes, JSON for another host, and errors before anything starts."""

import functools
from pathlib import Path
from typing import Any

import pytest

from sdc.tools.cli import run
from sdc.train.doctor import diagnosis
from tests.matrix.train.test_doctor import FLAGGED, PLAIN, SEEDED


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the environment that the command examines, with few operations."""
    found = dict(PLAIN)
    partial = functools.partial(diagnosis.examine, environ=found, suite=FLAGGED)
    monkeypatch.setattr("sdc.tools.commands.doctor.examine", partial)
    return found


def test_without_an_answer_it_is_inconclusive(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--seconds", "0.05"]) == 3
    out = capsys.readouterr().out
    assert "INCONCLUSIVE  these checks could not be run: twice in one process" in out
    assert "was killed" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no "),
        ("", "is damaged"),
        ("[]", "expected a JSON object"),
        ('{"format": "jax-sdc burn-in"}', "is not a result of sdc doctor (its format is 'jax-sdc burn-in')"),
        ('{"format": "jax-sdc doctor", "schema": 2}', "has layout 2, but this version of jax-sdc reads layout 1"),
        ('{"format": "jax-sdc doctor", "schema": 1}', "is damaged (object missing required field version)"),
    ],
)
def test_a_file_that_is_none(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("sdc.tools.commands.doctor.examine", never)
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    assert run(["doctor", "--against", str(file)]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("sdc: error: ")
    assert said in line


def test_a_configuration_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--config", "huge"]) == 2
    assert "--config huge: unknown; choose one of" in capsys.readouterr().err


def test_as_the_commands_set_it_up() -> None:
    """The examined environment includes the flags of GPUs and the size of the thread pool."""
    asked = diagnosis.Examination(devices=5, prepared=True, seconds=0.01)
    found = diagnosis.examine(asked, environ={**PLAIN, "NPROC": "1"}, suite=SEEDED)
    assert found.settings["--xla_gpu_autotune_level"] == "0"
    assert int(found.settings["NPROC"]) >= 5
    assert found.asked.prepared
