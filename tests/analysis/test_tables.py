"""Tables: measured beside published, and text that cannot break out of a cell."""

import math
import random
import re
import sys
from typing import Any

import pytest
from hypothesis import given, strategies as st
from markdown_it import MarkdownIt

from sdc.analysis import tables
from sdc.analysis.report import LeftOut, Report, Section, Table, flat, show, to_markdown
from sdc.analysis.statistics.intervals import bootstrap_interval
from sdc.analysis.tables import MOST_QUIET, products
from sdc.schema import ProductCounts, ProductTotals
from sdc.tools import print_parts

from .records import PUBLISHED, details_of, free_steps, lines_of, manifest, shown, steps, summarize

RATES = {site: known["frequency"] for site, known in PUBLISHED.items()}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (1234567, "1,234,567"),
        (0.0, "0"),
        (1.23456e-9, "1.23e-09"),
        ("x", "–"),
    ],
)
def test_numbers_are_shown_for_reading(value: object, text: str) -> None:
    assert show(value) == text


def test_published_values_stand_beside_the_measured_ones() -> None:
    rows, mismatches = steps(20, rates=RATES)
    summary = summarize(manifest(), rows, mismatches)
    table = shown(tables.submodules(summary, lines_of(rows)))
    for row, site in zip(table.rows, PUBLISHED, strict=True):
        cells = dict(enumerate(row))
        measured, published = summary.submodules[site].frequency, PUBLISHED[site]["frequency"]
        assert (cells[0], cells[1], cells[3]) == (site, show(measured), show(published))
        assert cells[4] == show(measured / published)
        assert cells[6] == show(PUBLISHED[site]["severity"])
    assert len(table.header) == len(table.rows[0]) == 8


def test_without_a_profile_there_is_nothing_published() -> None:
    table = shown(tables.submodules(summarize(manifest(published=None), *steps(3)), lines_of(steps(3)[0])))
    assert table.header == ("site", "frequency (2)", "95 % interval", "severity (4)")
    assert table.rows[0][1] == "0"
    assert table.rows[0][2].startswith("below ")


def test_what_bursts_let_expect_stands_beside_the_measured() -> None:
    expected = {site: 2 * known["frequency"] for site, known in PUBLISHED.items()}
    table = shown(tables.submodules(summarize(manifest(expected=expected), *steps(3, rates=RATES)), []))
    assert table.header[3] == "expected here"
    assert [row[3] for row in table.rows] == [show(value) for value in expected.values()]
    assert {len(row) for row in table.rows} == {len(table.header)}


def spiky(often: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A run of 600 steps of which some differ, in 40 of 1,000 elements of a submodule and of the gradient."""
    draw = random.Random(0)
    counts = [{"checked": 1000, "mismatched": 40 * (draw.random() < often)} for _ in range(600)]
    rows = [{"step": step, "sites": {"fwd/ffn": found}, "gradient": found} for step, found in enumerate(counts)]
    return rows, summarize(manifest(published=None), rows, [])


def test_intervals_are_of_the_counts_of_steps() -> None:
    """Were elements independent, the interval would be 11 % of the frequency to each side; it is 65 spikes."""
    rows, summary = spiky(0.1)
    counts = [row["gradient"]["mismatched"] for row in rows]
    limits = bootstrap_interval(counts, [1000] * 600)
    assert limits is not None
    assert limits[1] / limits[0] > 1.5
    found, whole = tables.submodules(summary, lines_of(rows)), tables.whole_step(summary, lines_of(rows))
    assert isinstance(found, Table)
    assert isinstance(whole, Table)
    assert found.rows[1][2] == whole.rows[0][4] == f"{show(limits[0])} to {show(limits[1])}"
    assert "block bootstrap" in found.note
    assert "block bootstrap" in whole.note


def test_where_too_little_was_seen_it_is_said_instead_of_a_number() -> None:
    rows, summary = spiky(0.007)
    found = shown(tables.submodules(summary, lines_of(rows)))
    whole = shown(tables.whole_step(summary, lines_of(rows)))
    assert [row[2] for row in found.rows] == ["–", "too few steps for an interval", "–", "–"]
    assert whole.rows[0][4] == "too few steps for an interval"
    damaged = [{**row, "gradient": {"checked": 1.5, "mismatched": 3}} for row in rows]
    unclear = shown(tables.whole_step(summary, lines_of(damaged)))
    assert unclear.rows[0][4] == "too few steps for an interval"


def test_differences_that_persist_have_no_interval() -> None:
    rows = free_steps(60)
    table = shown(tables.whole_step(summarize(manifest(sync="none"), rows, []), lines_of(rows)))
    assert [row[4] for row in table.rows] == ["–", "–"]
    assert "no interval" in table.note


def test_a_published_zero_has_no_ratio() -> None:
    published = {site: {"frequency": 0.0, "severity": 0.0} for site in PUBLISHED}
    table = shown(tables.submodules(summarize(manifest(published=published), *steps(3, rates=RATES)), []))
    assert [row[4] for row in table.rows] == ["–"] * 4


def test_a_simulation_says_whether_every_injection_was_found() -> None:
    rows, mismatches = steps(3, rates=RATES)
    found = shown(tables.counts(summarize(manifest(), rows, mismatches)))
    assert "injected counts agree" in found.note
    rows[0]["sites"]["bwd/attn"]["injected"] += 1
    missed = shown(tables.counts(summarize(manifest(), rows, mismatches)))
    assert "differ at bwd/attn" in missed.note


def test_ranks_add_up() -> None:
    _, mismatches = steps(3, rates=RATES)
    table = shown(tables.ranks(details_of(mismatches)))
    assert table.rows[0][:2] == ("1 / 0 / 1", show(sum(row["mismatched"] for row in mismatches)))
    assert isinstance(tables.ranks(details_of([])), LeftOut)


def test_first_mismatches_come_in_the_order_of_the_step() -> None:
    _, mismatches = steps(3, rates=RATES)
    table = shown(tables.first_mismatches(details_of(mismatches[::-1]), limit=5))
    assert [row[1] for row in table.rows] == ["0"] * 5
    assert [row[0] for row in table.rows] == ["fwd/attn"] * 4 + ["fwd/ffn"]


def test_losses_show_their_last_bits() -> None:
    rows, _ = steps(3)
    rows[-1]["loss"] = [2.5, 2.5000002]
    table = tables.training(summarize(manifest(), rows, []))
    assert dict(table.rows)["last loss, twin 0"] != dict(table.rows)["last loss, twin 1"]


def test_nested_settings_become_one_row_each() -> None:
    table = shown(flat("x", {"a": {"b": 1, "c": [1, 2]}, "d": None}))
    assert table.rows == (("a.b", "1"), ("a.c", "1, 2"))
    assert flat("x", None) is None


@given(st.text(alphabet="ab|\\`*_[]<>&~#$\n\r!()-+.1 é", max_size=20))
def test_a_cell_shows_its_text_literally(text: str) -> None:
    table = Table("caption", ("name", "value"), (("row", text), ("after", "1")))
    markdown = to_markdown(Report("title", "kind", None, (Section("", (table,)),)))
    tokens = [token for token in MarkdownIt("commonmark").enable("table").parse(markdown) if token.type == "inline"]
    cells = tokens[2:]  # the title and the caption stand before
    assert len(cells) == 6
    text_of = "".join(child.content for child in cells[3].children or [])
    assert text_of == " ".join(text.split())
    assert cells[4].content == "after"


def test_what_was_not_compared_is_not_nought() -> None:
    """Under `params` and `none` no submodule is compared, though values are injected in them."""
    table = shown(tables.counts(summarize(manifest(), free_steps(10), [])))
    for row in table.rows:
        assert row[1:] == ("not compared", "-", "30", "-", "-")


def test_products_with_flags_come_first_and_quiet_ones_share_a_row() -> None:
    def counts(flagged: int, examined: int) -> ProductCounts:
        return ProductCounts(
            checked=100, examined=examined, flagged=flagged, confirmed=flagged, corrected=0, nonfinite=0,
            margin=2.0 * flagged, first_margin=0.5 + examined,
        )  # fmt: skip

    sites = {f"quiet {number}": counts(0, 0) for number in range(MOST_QUIET + 3)}
    sites |= {"examined": counts(0, 1), "flagged": counts(3, 4), "worst": counts(5, 5)}
    table = products(ProductTotals(sites=sites))[0]
    assert isinstance(table, Table)
    names = [row[0] for row in table.rows]
    assert names[:2] == ["worst", "flagged"]
    assert "examined" in names
    assert len(names) == 3 + MOST_QUIET + 1
    assert table.rows[-1] == ("3 more products", "300", "0", "0", "0", "0", "0", "0", "0.5")


@pytest.mark.parametrize("width", [40, 80, 400])
def test_a_table_fits_a_terminal_with_all_of_its_columns(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    header = ("site", *(f"column {number}" for number in range(12)))
    print_parts([Table("Counts", header, (("fwd/attn", *(str(10**9 + number) for number in range(12))),))])
    printed = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, printed)) <= width
    assert [word for word in " ".join(printed).split() if word.startswith("10000")] == [
        str(10**9 + number) for number in range(12)
    ]
    assert sum("fwd/attn" in line for line in printed) == {40: 6, 80: 3, 400: 1}[width]
