"""Every public name occurs in a running example on a page of docs/api."""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_docs import ROOT, blocks
from tests.test_house import FACADES

API = ROOT / "docs" / "api"
PAGES = sorted(API.glob("sdc*.md"))


def used(path: Path) -> set[str]:
    """Returns the names that the Python blocks of a page import or use."""
    found = set()
    for _, block in blocks(path, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                found |= {alias.name for alias in node.names}
    return found


def test_every_facade_has_a_page() -> None:
    assert {path.stem for path in PAGES} == {name for name in FACADES if importlib.import_module(name).__all__}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_public_name_stands_in_an_example(path: Path) -> None:
    missing = set(importlib.import_module(path.stem).__all__) - used(path)
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_signatures_are_generated(path: Path) -> None:
    assert re.search(rf"^```\{{eval-rst\}}\n\.\. automodule:: {path.stem}$", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "documentation"}
    for above, block in blocks(path, "python"):
        exec(compile("\n" * above + block, str(path), "exec"), namespace)
