"""The page of the papers has one row for each of their tables and figures."""

import json
import re
import shutil
from pathlib import Path

import pytest

from sdc.records import Record, RecordError, read_record, to_json

from . import results

PAGE = (Path(__file__).parents[2] / "docs" / "papers.md").read_text("utf-8")
RECORDS = results.RECORDS
# Numbers of tables and figures of each paper, by the heading of its section.
PAPERS = {
    "Silent data corruption in training": (9, 11),
    "PAFT": (6, 17),
    "DropCompute": (1, 14),
    "Lossy collectives": (1, 2),
    "SCAR": (0, 9),
}
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])


def test_each_paper_has_a_section() -> None:
    assert [*SECTIONS] == [*PAPERS]


@pytest.mark.parametrize("paper", PAPERS)
def test_each_table_and_figure_has_a_row(paper: str) -> None:
    rows = [line.split(" | ") for line in SECTIONS[paper].splitlines() if re.match(r"\| (table|figure) ", line)]
    tables, figures = PAPERS[paper]
    names = [*(f"table {n}" for n in range(1, tables + 1)), *(f"figure {n}" for n in range(1, figures + 1))]
    assert [row[0].removeprefix("| ") for row in rows] == names
    for name, *cells in rows:
        assert len(cells) == 2, name
        assert all(cell.strip(" |") for cell in cells), name


@pytest.mark.parametrize("folder", results.folders(), ids=lambda folder: folder.name)
def test_results_are_those_of_the_recorded_measurements(folder: Path) -> None:
    """`make results` renews both."""
    stored, found = read_record(folder).summary or {}, to_json(results.conclusion(folder))
    assert stored["checks"] == found["checks"]
    assert stored["grids"] == found["grids"]
    assert results.section(folder) in results.PAGE.read_text("utf-8")


def test_the_page_of_results_is_complete() -> None:
    headings = re.findall("^## (.*)$", results.PAGE.read_text("utf-8"), re.MULTILINE)
    assert headings == [folder.name.replace("-", " ") for folder in results.folders()]


def test_records_of_results_name_no_machine() -> None:
    for folder in results.folders():
        for name in ("manifest.json", "summary.json"):
            found = json.loads((folder / name).read_text())
            assert found["host"] == results.HOST
            assert not re.search(r"(?:^|[ =\"])/[^ \"]+", json.dumps(found)), folder


def test_only_complete_studies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written for anything else."""
    monkeypatch.setattr(results, "RECORDS", tmp_path / "results")
    shadow = next(folder for folder in results.folders() or [RECORDS / "shadow"])
    for name, said in (("summary.json", "incomplete"), ("parts.jsonl", "parts.jsonl")):
        broken = Path(shutil.copytree(shadow, tmp_path / name))
        (broken / name).unlink()
        with pytest.raises(RecordError, match=said):
            results.keep(broken)
    with Record.create(tmp_path / "train", {"kind": "train"}) as record, pytest.raises(RecordError, match="kind"):
        results.keep(Path(record.path))
    assert not (tmp_path / "results").exists()
