"""Checked products from the command line: clean if healthy, flagged where faults hit, corrected on request."""

from pathlib import Path

import pytest

from sdc.tools.cli import run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--abft-mode", "correct", "--abft-scheme", "paper"), "checks a product as a whole"),
        (("--abft-where", "dot_general"), "dot_general"),
        (("--abft-profile", "none.json"), "there is no none.json; create one with sdc abft calibrate"),
        (("--suspect", "node10", "--fault", "bitflip,rate=1"), "give either a suspect or faults"),
        (("--abft-scheme", "huang"), "huang"),
        (("--least-coverage", "90"), "--least-coverage 90.0: expected a number from 0 to 1"),
        (("--suspect", "node16"), "unknown suspect 'node16'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_one_clear_line(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--abft", *arguments]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("sdc: error: ")
    assert said in line


def test_checks_that_are_not_asked_for_are_not_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--abft-mode", "correct"]) == 2
    assert "--abft-mode correct: configures the checks of matrix products" in capsys.readouterr().err


def test_wrong_use_of_study_and_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        (("study", "--steps", "0"), "--steps 0: expected at least 1"),
        (("study", "--where", "ffn"), "'ffn' is not a selector"),
        (("calibrate", "--out", str(tmp_path / "p.json"), "--steps", "0"), "--steps 0: expected at least 1"),
        (("calibrate",), "--out"),
        ((), "study"),
    ]
    for arguments, said in cases:
        assert run(["abft", *arguments]) == 2
        assert said in capsys.readouterr().err
