"""The page of the papers has one row for each of their tables and figures."""

import re
from pathlib import Path

import pytest

from sdc.records import read_record, to_json

from . import results

PAGE = (Path(__file__).parents[2] / "docs" / "papers.md").read_text("utf-8")
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


@pytest.mark.parametrize("folder", sorted(results.RECORDS.iterdir()), ids=lambda folder: folder.name)
def test_results_are_those_of_the_recorded_measurements(folder: Path) -> None:
    """`make results` renews both."""
    stored, found = read_record(folder).summary or {}, to_json(results.conclusion(folder))
    assert stored["checks"] == found["checks"]
    assert stored["grids"] == found["grids"]
    assert results.section(folder) in results.PAGE.read_text("utf-8")


def test_the_page_of_results_is_complete() -> None:
    headings = re.findall("^## (.*)$", results.PAGE.read_text("utf-8"), re.MULTILINE)
    assert headings == [folder.name.replace("-", " ") for folder in sorted(results.RECORDS.iterdir())]
