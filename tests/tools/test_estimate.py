"""`sdc estimate` with fake compilers, and without any."""

import importlib.metadata
import json
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest

from sdc.tools import cli
from sdc.tools.commands import estimates

EXCHANGE = {
    "kind": "all-reduce", "axes": "twin", "crosses": "slices", "blocking": True, "count": 4, "sent": 64.0,
    "seconds": 1e-5, "hidden": 0.0,
}  # fmt: skip
FOUND: dict[str, Any] = {
    "devices": 8, "cycles": 1_000, "kernel_cycles": 0, "kernel_instructions": 0, "kernels": None, "moved": 0,
    "seconds": 1e-6, "parts": {"dot_general": 0.9}, "collectives": [EXCHANGE], "arguments": 2**20, "outputs": 10,
    "temporaries": 0, "memory": 2**30, "capacity": 2**34, "code": 1, "compile_seconds": 0.5,
}  # fmt: skip


class Compilers:
    """Fakes the process of each program; `answers` holds its results by tool."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, list[Any]()

    def __call__(self, words: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        subject = json.loads(Path(words[3]).read_text())
        self.asked.append((subject, words[5:]))
        answer = self.answers[subject["tool"]]
        answer = answer.pop(0) if isinstance(answer, list) else answer

        if isinstance(answer, int):
            return subprocess.CompletedProcess(words, answer, stderr=b"check failed: layout\n")
        Path(words[4]).write_text(json.dumps(answer))
        return subprocess.CompletedProcess(words, 0, stderr=b"")


def use(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Compilers:
    compilers = Compilers(**answers)
    monkeypatch.setattr(estimates, "subprocess", types.SimpleNamespace(run=compilers, DEVNULL=None, PIPE=None))
    monkeypatch.setattr("sdc.costs.prepare_compilers", lambda: None)
    monkeypatch.setattr("sdc.costs.check_compiler", lambda target: None)
    return compilers


class Run:
    """Runs a command in this process with the fake compilers, and returns its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: object, code: int) -> Any:
        assert cli.run([str(word) for word in words]) == code
        return self.capsys.readouterr()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


COMMAND = ("estimate", "--target", "v5p:2x2x4", "--config", "tiny")


def test_ratios_and_a_report(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slower = {"estimate": FOUND | {"cycles": 1_100}}
    compilers = use(monkeypatch, plain={"estimate": FOUND}, lockstep=[{"uncharged": "a kernel"}, slower])
    option = ("--compiler-option", "xla_tpu_enable_sdc_checker=true", "count=2", "name=x")
    found = json.loads(run(*COMMAND, *option, "--run", tmp_path / "run", "--json", code=0).out)
    assert [(row["tool"], row["ratio"]) for row in found["programs"]] == [("plain", 1.0), ("lockstep", 1.1)]
    assert compilers.asked[0][0]["options"] == {"xla_tpu_enable_sdc_checker": True, "count": 2, "name": "x"}
    assert [rest[1:] for _, rest in compilers.asked] == [
        ["sdc_kernel"],
        ["sdc_kernel"],
        [""],
    ]  # again, for foreign kernels
    page = (tmp_path / "run" / "report.html").read_text()
    for said in ("COMPILER", "lockstep 1.100", "all-reduce", "slices", "nothing was run; this is an estimate"):
        assert said in page
    again = run("report", tmp_path / "run", code=0)
    assert "lockstep" in again.out


def test_what_does_not_fit_is_told_beside_the_rest(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, plain={"estimate": FOUND}, lockstep={"does_not_fit": "the step needs 100.0 GiB: 5 GiB too much"})
    printed = run(*COMMAND, "--run", tmp_path / "run", code=2)
    assert "DOES NOT FIT" in printed.out
    assert "5 GiB too much" in (tmp_path / "run" / "report.md").read_text()


def test_one_that_fails_is_told_beside_the_rest(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of zero cost has no ratio."""
    use(monkeypatch, plain={"estimate": FOUND | {"cycles": 0}}, lockstep=-6)
    printed = run(*COMMAND, "--run", tmp_path / "run", code=3)
    assert "ended with SIGABRT on the lockstep step" in printed.err
    assert "plain" in printed.out
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (-6, 3, "the compiler of v5p:2x2x4 ended with SIGABRT on the plain step and produced no estimate"),
        (9, 3, "ended with exit code 9"),
        ({"usage": "--compiler-option x: the compiler has no such option"}, 2, "--compiler-option x: the compiler has"),
    ],
)
def test_a_compiler_that_fails(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, code: int, message: str
) -> None:
    use(monkeypatch, plain=answer)
    printed = run(*COMMAND, "--run", tmp_path / "run", code=code)
    assert message in printed.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target", "v9:1x1", "--config", "tiny"), "--target v9:1x1: expected a target"),
        (("--target", "v5e:2x2"), "--step: expected either config or step"),
        (("--target", "v5e:2x2", "--config", "tiny", "--step", "a:b"), "expected either config or step"),
        (("--target", "v5e:2x2", "--step", "mymodel"), "--step mymodel: expected MODULE:FUNCTION"),
        (("--target", "v5e:2x2", "--config", "tiny", "--model", "4"), "has 4 devices, but 2 twin × 1 data × 4 model"),
        (
            ("--target", "v5e:2x2", "--config", "tiny", "--twins", "1"),
            "--twins 1: expected a whole number from 2",
        ),
        (("--target", "v5e:2x2", "--config", "tiny", "--compiler-option", "fast"), "expected NAME=VALUE"),
        (("--target", "v5e:2x2", "--config", "huge"), "--config huge: unknown"),
        (("--target", "v5e:2x2", "--config", "tiny", "--tool"), "--tool: expected at least one"),
        (("--target", "--config", "tiny"), "--target: expected at least one"),
    ],
)
def test_wrong_flags(run: Run, flags: tuple[str, ...], message: str) -> None:
    assert message in run("estimate", *flags, code=2).err


def test_without_the_compiler_one_line_says_how_to_get_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    printed = run("estimate", "--target", "v5e:2x2", "--config", "tiny", "--run", tmp_path / "run", code=2)
    assert printed.err.strip().endswith("libtpu, which is not installed; pip install 'jax-sdc[targets]'")
    assert not (tmp_path / "run").exists()
