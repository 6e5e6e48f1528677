"""Pages of more than one run: the index of a folder, two runs side by side, two traces compared."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from sdc.analysis import PartedTraces, describe_difference, write_beside, write_difference, write_overview
from sdc.analysis.compare_runs import differing
from sdc.analysis.summary import summary_of
from sdc.records.format import RecordError
from sdc.records.record import Contents, read_manifest
from sdc.schema import RunSummary
from sdc.tools import cli
from sdc.twins.traces import diff, read_trace
from sdc.verdict import Exit

from .records import manifest, step_row, steps, write_run
from .test_headline import REAL, hits
from .test_report import Page
from .traces import write_traces


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "a clean", manifest(**REAL), *steps(5))
    write_run(folder / "b corrupt", manifest(**REAL, seed=7), *hits(3))
    write_run(folder / "c under way", manifest(**REAL), *steps(2), ended=False)
    write_run(folder / "d trained", manifest(**REAL, kind="train", twins=None), [step_row(0, 1)])
    (folder / "e lost").mkdir()
    (folder / "e lost" / "steps.jsonl").write_text("")
    write_run(folder / "f <damaged>", manifest(**REAL), *steps(2))
    (folder / "f <damaged>" / "steps.jsonl").write_text("{")
    (folder / "notes").mkdir()
    return folder


def test_the_index_lists_every_run_the_gravest_first(runs: Path) -> None:
    found = write_overview(runs)
    assert found.verdict == "corrupt"
    listed = [(one.run, one.verdict) for one in found.runs]
    assert listed == [
        ("b corrupt", "corrupt"), ("c under way", "inconclusive"), ("e lost", "inconclusive"),
        ("f <damaged>", "inconclusive"), ("a clean", "clean"), ("d trained", None),
    ]  # fmt: skip
    text = (runs / "index.html").read_text()
    page = Page(text)
    places = [page.words.index(name) for name, _ in listed]
    assert places == sorted(places)
    assert "1 corrupt, 1 inconclusive, 2 cannot be read, 1 clean, 1 without a verdict" in page.words
    assert "is cut off after line 0" in page.words
    links = re.findall(r'href="([^"]+)"', text)
    assert links == ["b%20corrupt/report.html", "c%20under%20way/report.html", "a%20clean/report.html",
                     "d%20trained/report.html"]  # fmt: skip
    assert all((runs / link.replace("%20", " ")).is_file() for link in links)


@pytest.mark.parametrize(
    ("gone", "code"),
    [((), Exit.CORRUPT), (("b corrupt",), Exit.INCONCLUSIVE), (("b corrupt", "c under way"), Exit.INCONCLUSIVE)],
)
def test_the_gravest_verdict_is_the_exit_code(
    runs: Path, gone: tuple[str, ...], code: Exit, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in gone:
        (runs / name).rename(runs.parent / name)
    assert cli.run(["report", str(runs)]) == code
    out = capsys.readouterr().out
    assert "CANNOT BE READ  e lost" in out
    assert "(simulated faults)" not in out
    assert f"report: {runs / 'index.html'}" in out


def test_a_run_whose_report_fails_does_not_hide_the_others(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: Contents) -> RunSummary:
        if record.path.name == "a clean":
            raise TypeError("what nobody thought of")
        return summary_of(record)

    monkeypatch.setattr("sdc.analysis.conclusion.summary_of", fail)
    found = {one.run: one for one in write_overview(runs).runs}
    assert found["a clean"].verdict == "inconclusive"
    assert found["a clean"].sentence == "what nobody thought of"
    assert found["b corrupt"].verdict == "corrupt"


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="contains no run, nor do its subfolders"):
        write_overview(tmp_path)


def test_two_runs_side_by_side(runs: Path, tmp_path: Path) -> None:
    found = write_beside(runs / "a clean", runs / "b corrupt")
    assert (found.verdict, found.settings) == ("corrupt", {"seed": ("0", "7")})
    assert Path(found.report) == runs / "b corrupt" / "beside-a clean.html"
    text = Path(found.report).read_text()
    page = Page(text)
    order = ["✔ CLEAN", "✖ CORRUPT", "Losses overlaid", "Answers", "Settings that differ", "Figures", "Measured"]
    places = [page.words.index(word) for word in order]
    assert places == sorted(places)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    named = {part for value in re.findall(r'aria-labelledby="([^"]+)"', text) for part in value.split()}
    assert named <= set(ids)
    assert "a clean has no such figure" in page.words
    assert 'href="../a%20clean/report.html"' in text
    elsewhere = write_beside(runs / "a clean", runs / "b corrupt", tmp_path / "new" / "pages")
    assert Path(elsewhere.report).parent == tmp_path / "new" / "pages"
    assert 'href="../../runs/a%20clean/report.html"' in Path(elsewhere.report).read_text()
    with pytest.raises(ValueError, match="is given twice"):
        write_beside(runs / "a clean", runs / "." / "a clean")


def test_settings_that_differ() -> None:
    a: dict[str, Any] = {"config": {"width": 1, "layers": [1, 2]}, "devices": [{"id": 1}], "created": "x", "seed": 0}
    b: dict[str, Any] = {
        "config": {"width": 2, "layers": [1, 2]},
        "devices": [{"id": 2}],
        "created": "y",
        "sync": "none",
    }
    assert differing(a, b) == {"config.width": ("1", "2"), "seed": ("0", "–"), "sync": ("–", "none")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUNS: expected a run folder, a folder of run folders, or several run folders"),
        (["{a}", "{b}", "{a}"], "is given twice"),
        (["{a}", "{b}", "{a}", "{b}", "{a}", "{b}", "{a}"], "7 runs are too many to distinguish on one page"),
        (["{a}", "--output", "{b}"], "--output: the report of one run is in its own folder"),
        (["{a}", "{a}"], "is given twice"),
        (["{a}", "{none}"], "is not a run folder"),
        (["{none}"], "is not a run folder"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    runs: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"{a}": str(runs / "a clean"), "{b}": str(runs / "b corrupt"), "{none}": str(runs / "notes")}
    assert cli.run(["report", *(names.get(word, word) for word in arguments)]) == Exit.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_two_runs_from_the_command_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", str(runs / "a clean"), str(runs / "d trained"), "--output", str(runs)]) == Exit.CLEAN
    assert "kind: twin | train" in capsys.readouterr().out
    assert (runs / "beside-a clean.html").is_file()


@pytest.mark.parametrize("simulated", [False, True])
def test_a_comparison_of_traces_has_a_page(tmp_path: Path, simulated: bool) -> None:
    golden, suspect, copy = write_traces(tmp_path, simulated=simulated)
    a, b, c = map(read_trace, (golden, suspect, copy))
    found = diff(a, b)
    page = write_difference(tmp_path / "pages", a, b, found)
    assert page == tmp_path / "pages" / "diff.html"
    words = Page(page.read_text()).words
    assert found.first is not None
    assert f"Layer 2, {found.first.site.name}" in words
    host = read_manifest(golden)["host"]["name"]
    device = (
        f"the only device of the run, in golden (host {host}) or in suspect (host {host}): either of the two traces"
    )
    for part in (
        device,
        "first difference at step 2",
        "Spread of the difference",
        "Equal values before the first difference",
        "sdc diff",
    ):
        assert part in words
    assert ("SIMULATED FAULTS" in words) == simulated
    assert ("Trace again on a third host" in words) != simulated
    same = write_difference(tmp_path / "pages", a, c, diff(a, c)).read_text()
    assert "✔ CLEAN" in same
    assert "no digest differs" in same
    told = describe_difference(a, b, found)
    assert isinstance(told, PartedTraces)
    # Two steps agree as a whole, and of the third what comes before.
    assert told.agreeing == 2 * sum(math.prod(shape[:-1]) for shape in a.shapes) + found.first.agreeing
    assert found.first.agreeing > 0


def test_a_page_of_a_comparison_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden, suspect, _ = write_traces(tmp_path)
    assert cli.run(["diff", str(golden), str(suspect), "--output", str(tmp_path)]) == Exit.CORRUPT
    assert f"report: {tmp_path / 'diff.html'}" in capsys.readouterr().out
    file = golden / "manifest.json"
    assert cli.run(["diff", str(golden), str(suspect), "--output", str(file)]) == Exit.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cannot write a report into {file}" in line
