"""The report of a run folder: one offline page, the same bytes every time, whatever the record holds."""

import itertools
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from sdc.analysis import figures, write_report
from sdc.analysis.report import Chart, Line, line_figure
from sdc.analysis.report.canvas import power, svg
from sdc.records.format import RecordError
from sdc.records.record import write_summary

from .records import PUBLISHED, details_of, free_steps, lines_of, manifest, shown, step_row, steps, summarize, write_run

RATES = {site: known["frequency"] for site, known in PUBLISHED.items()}
REAL = {"suspect": {"name": None, "simulated": False, "faults": []}, "published": None}
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Reads a page and checks that its elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def html(path: Path) -> str:
    return write_report(path).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def corrupt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "node11", manifest(), *steps(20, rates=RATES))


def test_the_page_is_whole_and_needs_no_network(corrupt: Path) -> None:
    text = html(corrupt)
    page = Page(text)
    assert not {"script", "img", "link", "iframe", "object", "image"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in {"href", "xlink:href", "src", "action"}:
            assert (value or "").startswith("#")
    assert not re.search(r"url\((?!#)|@import", text)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 100
    targets = {value[1:] for name, value in page.attributes if name == "xlink:href" and value}
    targets |= set(re.findall(r"url\(#([^)]+)\)", text))
    assert targets <= set(ids)


def test_verdict_published_values_and_figures_are_there(corrupt: Path) -> None:
    text = html(corrupt)
    page = Page(text)
    for wanted in ("✖ CORRUPT (simulated faults)", "SIMULATED FAULTS", "profile node11", "0.0289", "7.68e+03"):
        assert wanted in page.words
    assert page.tags.count("svg") == 5
    for title in ("Where and when", "Mismatch frequency over time", "Mismatches by layer", "Losses of the twins"):
        assert f"<b>{title}</b>" in text
    assert page.words.index("CORRUPT") < page.words.index("Mismatch frequency and severity by submodule")
    assert "sdc twin --devices 4 --model 2 --suspect node11 --steps 20" in page.words
    markdown = (corrupt / "report.md").read_text(encoding="utf-8")
    assert "| fwd/attn | 0.0344 |" in markdown
    assert "0.0289" in markdown


def test_every_table_and_figure_of_a_simulation_says_so(corrupt: Path) -> None:
    text = html(corrupt)
    before_settings = text[: text.index("<h2>How to reproduce")]
    captions = re.findall(r"<(caption|figcaption)>(.*?)</\1>", before_settings)
    assert len(captions) == 11
    assert all(caption.startswith("[simulated faults]") for _, caption in captions)
    assert len(re.findall(r"<text[^>]*>simulated faults</text>", text)) == 5
    markdown = (corrupt / "report.md").read_text(encoding="utf-8")
    assert "**SIMULATED FAULTS**" in markdown


def test_real_hardware_is_never_called_simulated(tmp_path: Path) -> None:
    rows, mismatches = steps(5, rates=RATES)
    for counts in [*mismatches, *(site for row in rows for site in row["sites"].values())]:
        counts["injected"] = 0
    path = write_run(tmp_path / "run", manifest(**REAL), rows, mismatches)
    text = html(path)
    assert "✖ CORRUPT" in text
    body = text.split("</style>")[1].split("<h2>How to reproduce")[0]
    assert "simulated" not in body.replace("Real or simulated", "").lower()  # the question is always asked
    assert "findings are real" in text


def test_every_figure_has_a_name_and_the_colours_of_the_page(corrupt: Path) -> None:
    text = html(corrupt)
    ids = dict(re.findall(r'<(?:title|desc) id="([^"]+)">([^<]+)</', text))
    figures = re.findall(r'<svg role="img" aria-labelledby="(\S+) (\S+)"', text)
    assert len(figures) == text.count("<svg ") == 5
    assert all(ids[title] and ids[caption] for title, caption in figures)
    drawn = "".join(re.findall(r"<svg .*?</svg>", text, re.DOTALL))
    assert {"ink", "grid", "c1", "c2", "mark"} <= set(re.findall(r"var\(--(\w+), #", drawn))
    assert not re.search(r"(?:fill|stroke): #(?:18212b|0072b2|e3e6ea)", drawn)  # dark paper would hide them
    variables = set(re.findall(r"var\(--([\w-]+)", text))
    for paper in re.findall(r":root \{ (.*?)\}", text.split("@media print")[0], re.DOTALL):
        defined = set(re.findall(r"--([\w-]+):", paper))
        assert variables - {"tone", "tone-band"} <= defined


def test_the_first_screen_comes_first(corrupt: Path) -> None:
    page = Page(html(corrupt))
    order = ["CORRUPT", "Twin 1", "Which device", "What now", "What to do", "Where and when", "Figures", "Measured"]
    places = [page.words.index(word) for word in order]
    assert places == sorted(places)
    assert page.words.index("Parameters of the simulated faults") > places[-1]
    assert page.tags.count("h1") == page.tags.count("main") == page.tags.count("header") == 1


def test_text_in_figures_is_text(corrupt: Path) -> None:
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", html(corrupt))
    assert {"fwd/attn", "bwd/ffn", "step", "mismatch frequency", "0.01", "layer"} <= set(texts)
    assert not any("$" in text for text in texts)


def test_the_same_record_gives_the_same_bytes(corrupt: Path) -> None:
    first = (html(corrupt), (corrupt / "report.md").read_bytes())
    with matplotlib.rc_context(
        {"axes.facecolor": "black", "svg.fonttype": "path", "xtick.labelsize": 20}
    ):  # a user's settings
        assert (html(corrupt), (corrupt / "report.md").read_bytes()) == first
    assert matplotlib.__version__ not in first[0]


def test_clean_explains_how_sure_it_is(tmp_path: Path) -> None:
    text = html(write_run(tmp_path / "run", manifest(**REAL), *steps(20)))
    page = Page(text)
    assert "✔ CLEAN" in page.words
    assert "below 3.6e-08 per element" in page.words
    assert "corruption comes in bursts. Without that assumption, 20 steps" in page.words
    assert "every 6.67 steps" in page.words  # 20 steps / -ln 0.05
    assert "no submodule mismatched at any step" in page.words


def test_free_twins_show_drift_and_leave_the_submodules_out(tmp_path: Path) -> None:
    text = html(write_run(tmp_path / "run", manifest(sync="none", steps=60), free_steps(60)))
    page = Page(text)
    for title in ("Gradient difference beside gradient norm", "Parameter difference", "Losses of the twins"):
        assert f"<b>{title}</b>" in text
    assert "Mismatch frequency over time: no submodule was compared (this requires --sync compute)" in page.words
    assert "Worst-case" in page.words
    assert "<caption>[simulated faults] Elements by submodule</caption>" in text  # what was injected


def test_a_run_that_has_not_ended_is_not_called_clean(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", manifest(**REAL, steps=50), *steps(20), ended=False)
    page = Page(html(path))
    assert "? INCONCLUSIVE, RUN NOT ENDED The run has not ended; so far: no mismatch" in page.words
    assert "20 of 50 planned steps" in page.words
    assert "✔ CLEAN" not in page.words
    with (path / "steps.jsonl").open("a") as lines:
        lines.write('{"step": 20, "lo')  # cut off by a crash
    assert "20 of 50 planned steps" in Page(html(path)).words


def test_a_run_that_has_not_ended_can_be_corrupt_already(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", manifest(steps=50), *steps(4, rates=RATES), ended=False)
    page = Page(html(path))
    assert "✖ CORRUPT" in page.words
    assert "is incomplete" in page.words


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    page = Page(html(write_run(tmp_path / "run", manifest(**REAL), [], ended=False)))
    assert "no step was completed" in page.words
    assert "the record holds no losses" in page.words


def test_what_the_run_says_of_itself_wins(tmp_path: Path) -> None:
    about = manifest(**REAL)
    path = write_run(tmp_path / "run", about, *steps(3), ended=False)
    digests = ["ab"] * 2
    verdict = {"verdict": "inconclusive", "reason": "the peer vanished at step 3", "state_digest": digests}
    write_summary(path, verdict)
    assert "The peer vanished at step 3." in Page(html(path)).words


def test_a_training_run_has_no_comparison(tmp_path: Path) -> None:
    about = manifest(kind="train", twins=1, suspect={}, published=None, sync="none")
    text = html(write_run(tmp_path / "run", about, [step_row(step, twins=1) for step in range(20)]))
    page = Page(text)
    body = page.words[: page.words.index("Definitions")]
    assert "TRAINING RUN" in body
    assert page.tags.count("svg") == 2
    assert "<b>Gradient norm</b>" in text
    for absent in ("Mismatch", "suspect", "Left out", "twin 0", "reference"):
        assert absent not in body.replace("has no twin", "").split("How to reproduce")[0]


HOSTILE = '</title><script>alert("x")</script><img src=x onerror=alert(1)>$\\frac{a}{b}$ & | `` \'"'


def test_nothing_in_a_record_becomes_markup(tmp_path: Path) -> None:
    rows, mismatches = steps(3, rates=RATES)
    for row in rows:
        row["sites"][HOSTILE] = {**row["sites"]["fwd/attn"]}
    for row in mismatches[:4]:
        row["site"] = HOSTILE
    about = manifest(
        suspect={"name": HOSTILE, "simulated": True, "faults": [HOSTILE]},
        command=["sdc", HOSTILE],
        environment={HOSTILE: HOSTILE},
        config={"a": {HOSTILE: [HOSTILE]}},
        mesh={HOSTILE: 2},
        sync=HOSTILE,
        created=HOSTILE,
    )
    path = write_run(tmp_path / "<script>&'run", about, rows, mismatches)
    page = Page(html(path))
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(HOSTILE) >= 4
    markdown = (path / "report.md").read_text(encoding="utf-8")
    outside = re.sub(r"^(`{3,})\n.*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<script", outside)


def test_a_dollar_in_a_name_stays_a_dollar() -> None:
    rows, mismatches = steps(3, rates=RATES)
    for row in rows:
        row["sites"]["fwd/$x_1$"] = row["sites"]["fwd/attn"]
    picture = shown(figures.frequency_over_time(summarize(manifest(), rows, mismatches), lines_of(rows)))
    assert ">fwd/$x_1$<" in svg(picture, "figure")


def replaced(value: Any, values: "itertools.cycle[Any]") -> Any:
    """The record with every number but steps and layers replaced."""
    if isinstance(value, dict):
        return {
            key: item if key in {"step", "site", "layer"} else replaced(item, values) for key, item in value.items()
        }
    if isinstance(value, list):
        return [replaced(item, values) for item in value]
    return next(values) if isinstance(value, int | float) else value


EXTREMES = [math.nan, math.inf, -math.inf, 3.4e38, 1e-45, None, 0.0, -1.0]


@pytest.mark.parametrize("values", [EXTREMES, *([value] for value in EXTREMES)], ids=str)
@pytest.mark.parametrize("kind", ["compute", "none"])
def test_any_number_may_stand_in_any_field(tmp_path: Path, values: list[Any], kind: str) -> None:
    rows, mismatches = steps(6, rates=RATES) if kind == "compute" else (free_steps(6), [])
    cycle = itertools.cycle(values)
    rows = [replaced(row, cycle) for row in rows]
    mismatches = [replaced(row, cycle) for row in mismatches]
    page = Page(html(write_run(tmp_path / "run", manifest(sync=kind), rows, mismatches)))
    assert "✔ CLEAN" not in page.words


def test_captions_say_what_could_not_be_drawn(tmp_path: Path) -> None:
    rows = free_steps(20)
    rows[3]["loss"][1] = math.nan
    rows[4]["loss"][1] = math.inf
    page = Page(html(write_run(tmp_path / "run", manifest(sync="none"), rows)))
    assert "not drawn: loss of twin 1 at 2 steps" in page.words


def test_a_long_run_keeps_its_spike_and_a_small_page(tmp_path: Path) -> None:
    rows = [step_row(step) for step in range(20_000)]
    rows[13_337]["loss"] = [rows[0]["loss"][0], 777.0]
    picture = shown(figures.losses(lines_of(rows)))
    assert len(svg(picture, "figure")) < 200_000
    assert "800" in re.findall(r"<text[^>]*>([^<]*)</text>", svg(picture, "figure"))


def test_heat_map_has_a_cell_for_every_layer_and_no_image() -> None:
    rows, mismatches = steps(3, layers=32, rates=RATES)
    summary = summarize(manifest(layers=32), rows, mismatches)
    picture = shown(figures.layers_heat_map(summary))
    assert "<image" not in svg(picture, "figure")
    root = ET.fromstring(svg(picture, "figure"))
    drawn = root.iter("{http://www.w3.org/2000/svg}path")
    paths = [item for item in drawn if "stroke: var(--paper" in item.get("style", "")]
    mismatched = np.count_nonzero([summary.layers[site].mismatched for site in PUBLISHED])
    assert len(paths) >= 2 * mismatched == 2 * 4 * 32


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not a run folder"):
        write_report(tmp_path)


def test_a_full_disk_is_one_clear_line(corrupt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = html(corrupt)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sdc.records.format.os.fsync", full)
    with pytest.raises(RecordError, match="No space left on device; free some space") as caught:
        write_report(corrupt)
    assert "\n" not in str(caught.value)
    assert (corrupt / "report.html").read_text(encoding="utf-8") == before
    assert not list(corrupt.glob(".report*"))


def test_what_was_never_measured_is_not_zero(tmp_path: Path) -> None:
    """Before the first synchronization nothing is known of the divergence."""
    rows = [
        {**step_row(step, 1), "aggregation": {
            "divergence": None, "expected_divergence": None, "period": 9, "next": 8, "synchronizations": 0,
        }}
        for step in range(3)
    ]  # fmt: skip
    about = manifest(kind="train", twins=None, aggregate="paft", **REAL)
    words = Page(html(write_run(tmp_path / "run", about, rows))).words
    assert "largest divergence measured not measured: no synchronization" in words
    assert "Divergence of replicas: nothing finite was measured" in words


@pytest.mark.parametrize(
    ("value", "text"), [(1e-7, "10⁻⁷"), (0.01, "0.01"), (2e-7, "2e-07"), (1.0, "1"), (1e5, "10⁵"), (3e9, "3e+09")]
)
def test_powers_of_ten_are_plain_text(value: float, text: str) -> None:
    assert power(value) == text


def test_axes_have_no_latex_and_no_fractions_of_steps() -> None:
    chart = Chart("A chart", "A caption.", "step", "loss", (Line("a", [0, 1, 2], [1e-9, 1e-3, 1e2]),), log="y")
    picture = shown(line_figure(chart))
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg(picture, "figure"))
    assert {"10⁻⁸", "10⁻⁶"} <= set(texts)
    assert not [text for text in texts if "math" in text or "{" in text or text == "0.5"]


def test_the_only_cell_of_a_heat_map_can_be_read() -> None:
    """Its colour is the darkest of the scale."""
    rows, mismatches = steps(3)
    mismatches = [{"step": 1, "site": "bwd/ffn", "layer": 2, "mismatched": 4}]
    rows[1]["sites"]["bwd/ffn"]["mismatched"] = 4
    picture = shown(figures.layers_heat_map(summarize(manifest(), rows, mismatches)))
    assert len(re.findall(r"<text [^>]*var\(--paper[^>]*>[^<]*e-0\d</text>", svg(picture, "figure"))) == 1


def test_marks_of_a_long_run_are_few_and_keep_the_spike() -> None:
    hits = [
        {"step": step, "site": site, "layer": layer, "mismatched": 900_000 if step == 71_717 else 3}
        for step in range(0, 100_000, 7)
        for site, layer in (("fwd/attn", 0), ("bwd/ffn", 31), ("my own", 5))
    ] + [{"step": 71_717, "site": "my own", "layer": 31, "mismatched": 900_000}]
    lines = lines_of([{"step": 99_999}])
    picture = shown(figures.where_and_when(lines, details_of(hits), 32))
    marks = re.findall(r"<use ", svg(picture, "figure"))
    assert len(marks) <= figures.MARKS + 60  # and ticks
    assert len(svg(picture, "figure")) < 250_000
    flat = shown(figures.where_and_when(lines, details_of([{**hit, "mismatched": 3} for hit in hits]), 32))
    shapes = [set(re.findall(r'<path id="[^"]*" d="([^"]*)"', svg(each, "figure"))) for each in (picture, flat)]
    assert len(shapes[0]) > len(shapes[1])  # the others are smaller than the spike
    assert "Each column covers" in picture.caption
