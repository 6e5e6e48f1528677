"""The examples and the notebook run without the command line, and detect the faults that they simulate."""

import ast
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from sdc.train.programs import config
from tests.train.runs import MINI

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPTS = sorted((DOCS / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the default configuration by one whose programs compile within seconds."""
    monkeypatch.setitem(config.PRESETS, "tiny", lambda: MINI)


def example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs a script with a new folder, and returns its variables."""
    path = DOCS / "examples" / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(path), str(folder)])
    return runpy.run_path(str(path), run_name="__main__")


def read(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns the summary and the report of a record."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert (folder / "report.html").is_file()
    return summary, (folder / "report.md").read_text()


def lines(folder: Path, name: str = "steps.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def modules(tree: ast.AST) -> set[str]:
    """Returns the modules and names that a program imports."""
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return found | {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip


def test_there_is_a_script_for_each_command() -> None:
    assert [path.stem for path in SCRIPTS] == ["campaign", "study", "trace", "train_abft", "twin"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_ten_lines_without_the_command_line(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    code = {number for node in tree.body[1:] for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    assert len(code) <= 10
    assert not any(name.startswith("sdc.tools") for name in modules(tree))


def test_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example("twin", tmp_path / "run", monkeypatch)
    found, report = read(tmp_path / "run")
    assert (found["verdict"], found["simulated"], len(lines(tmp_path / "run"))) == ("corrupt", True, 2)
    for site, row in found["submodules"].items():
        assert row["mismatched"] == row["injected"]
        assert (row["mismatched"] > 0) == (site == "fwd/ffn")
    assert "bitflip" in report


def test_train_abft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example("train_abft", tmp_path / "run", monkeypatch)
    found, _ = read(tmp_path / "run")
    assert (found["verdict"], found["simulated"]) == ("corrupt", True)
    assert found["abft"]["flagged"] == found["abft"]["confirmed"] == found["abft"]["corrected"] > 0
    assert found["abft"]["nonfinite"] == 0


def test_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example("trace", tmp_path, monkeypatch)
    assert "the traces first differ at step 1: bwd/ffn, iteration 1, 1" in capsys.readouterr().out
    assert read(tmp_path / "golden")[0]["verdict"] is None
    found, _ = read(tmp_path / "struck")
    assert (found["verdict"], found["simulated"]) == ("corrupt", True)
    assert "at step 1: bwd/ffn, iteration 1, 1" in found["reason"]


def test_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example("campaign", tmp_path / "run", monkeypatch)
    found, _ = read(tmp_path / "run")
    assert found["complete"]
    assert found["done"] == found["reached"] == len(lines(tmp_path / "run", "injections.jsonl")) == 10
    assert found["groups"]["fault"]["nan"]["outcomes"] == {"nonfinite": 5}


def test_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = example("study", tmp_path / "run", monkeypatch)["measured"]
    found, report = read(tmp_path / "run")
    assert (found["study"], measured.study.steps) == ("lossy", 24)
    assert {check["claim"]: check["holds"] for check in found["checks"]} == {
        "drift follows the exact form, not the printed one (once)": True
    }
    assert "linear" in report


def test_a_script_that_type_checkers_accept(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).with_name("typed_script.py")), run_name="__main__")
    assert "clean: no flag in 4 checked rows" in capsys.readouterr().out


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells contain assertions of what they show."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notebook = json.loads((DOCS / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = json.dumps([cell["outputs"] for cell in cells])
    assert all(cell["execution_count"] for cell in cells)  # `python -m tests.docs.notebook` stores what cells print
    assert "clean: the twins" not in shown
    assert "corrupt: the twins differ" in shown
    assert not any(name in shown for name in ("/tmp", "/home", "/root", "/work", "Traceback"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        code = "".join(cell["source"])
        assert not any(name.startswith("sdc.tools") for name in modules(ast.parse(code)))
        exec(compile(code, cell["id"], "exec"), namespace)
    kinds = {json.loads(path.read_text())["kind"] for path in tmp_path.rglob("manifest.json")}
    assert {"twin", "train", "trace", "campaign"} < kinds
