"""Campaign summaries against counts by hand; reports that say what they are."""

import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc import analysis
from sdc.analysis import write_report
from sdc.analysis.campaigns import GROUPS
from sdc.analysis.summary import contents_of
from sdc.campaigns.outcomes import ABFT, DETECTORS, OUTCOMES
from sdc.records.format import RecordError
from sdc.records.layout import INJECTIONS
from sdc.records.record import Record, read_record, write_summary
from sdc.schema import CampaignManifest, InjectionRow

MANIFEST = {
    "kind": "campaign", "injections": 8, "steps": 9, "follow": 3, "where": "arithmetic", "faults": ["bitflip", "nan"],
    "config": {"name": "tiny"}, "command": ["sdc", "campaign"], "sites": 3,
    "thresholds": {"spike": 0.125, "visible": 0.003, "rise": 0.375, "factor": 4.5},
}  # fmt: skip


def summarize_campaign(about: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `summary.json` says of lines that are not typed yet."""
    manifest = msgspec.convert(about, CampaignManifest)
    return contents_of(analysis.summarize_campaign(manifest, msgspec.convert(rows, list[InjectionRow])), None)


def row(number: int, outcome: str, **values: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(DETECTORS)
    if outcome not in ("masked", "not_reached"):
        found["fingerprint"] = 0
    return {
        "injection": number, "site": "fwd/dot_general", "operation": "dot_general", "phase": "fwd", "layer": 0,
        "scope": "jvp()/attn/abc->ab", "dtype": "float32", "shape": [4], "step": 2, "fault": "bitflip", "bits": [3],
        "field": "mantissa", "outcome": outcome, "visible_after": None, **values,
        "detected": found | values.get("detected", {}),
    }  # fmt: skip


ROWS = [
    row(0, "masked"),
    row(1, "benign", layer=1),
    row(2, "spike", layer=1, bits=[30], field="exponent", detected={"loss_spike": 1}, visible_after=1),
    row(3, "divergence", operation="exp", bits=[30], field="exponent", visible_after=0),
    row(4, "nonfinite", operation="exp", fault="nan", bits=None, field=None, detected={"nonfinite": 0}),
    row(5, "not_reached", operation="sin"),
    row(6, "masked", phase="bwd", scope="transpose(jvp())/ffn/rematted_computation/ffn"),
    row(7, "benign", phase="memory", scope="", layer=None, detected={"history_bound": 2}),
]


def test_counts_by_hand() -> None:
    summary = summarize_campaign(MANIFEST, ROWS)
    assert summary["complete"]
    assert (summary["done"], summary["reached"]) == (8, 7)
    assert {name: entry["count"] for name, entry in summary["outcomes"].items()} == {
        "not_reached": 1, "masked": 2, "benign": 2, "spike": 1, "divergence": 1, "nonfinite": 1,
    }  # fmt: skip
    assert summary["vulnerability"]["share"] == 5 / 7
    assert summary["harm"]["share"] == 3 / 7
    assert summary["harm"]["low"] < 3 / 7 < summary["harm"]["high"]
    groups = summary["groups"]
    assert {name: entry["harm"]["share"] for name, entry in groups["operation"].items()} == {
        "dot_general": 1 / 5, "exp": 1.0,
    }  # fmt: skip
    assert {name: entry["injections"] for name, entry in groups["layer"].items()} == {"0": 4, "1": 2}
    assert set(groups["scope"]) == {"attn", "ffn", "(none)"}
    assert groups["field"]["exponent"]["harm"]["share"] == 1.0
    assert summary["bits"] == {
        "float32": {"3": {"benign": 2, "masked": 2}, "30": {"divergence": 1, "spike": 1}},
    }
    detectors = summary["detectors"]
    assert detectors["fingerprint"]["of_unmasked"]["share"] == 1.0
    assert (detectors["loss_spike"]["of_harmful"]["count"], detectors["loss_spike"]["median_latency"]) == (1, 1)
    assert detectors["history_bound"]["of_unmasked"]["count"] == 1
    assert detectors["history_bound"]["of_harmful"]["count"] == 0
    assert summary["harmful_missed"] == 1  # the divergence: only the fingerprint found it
    assert summary["verdict"] is None
    assert (summary["visible"]["count"], summary["visible"]["of"], summary["steps_to_visible"]) == (2, 5, 0.5)


def test_order_and_repetition_do_not_matter() -> None:
    mixed = random.Random(0).sample(ROWS, len(ROWS))
    repeated = [*mixed, row(2, "masked"), row(3, "masked")]  # the first of each stands
    expected = json.dumps(summarize_campaign(MANIFEST, ROWS))  # as text, for the order of its parts counts too
    assert json.dumps(summarize_campaign(MANIFEST, list(reversed(ROWS)))) == expected
    assert json.dumps(summarize_campaign(MANIFEST, repeated)) == expected


def test_damaged_rows_count_for_nothing() -> None:
    damaged = [{"injection": 9}, {"injection": 10, "outcome": "fine"}]
    assert summarize_campaign(MANIFEST, [*ROWS, *damaged]) == summarize_campaign(MANIFEST, ROWS)
    odd = [{"injection": 0, "outcome": "spike", "bits": ["x"], "layer": -1, "dtype": "none"}]
    assert summarize_campaign(MANIFEST, odd)["harm"]["count"] == 1
    empty = summarize_campaign(MANIFEST, [])
    assert not empty["complete"]
    assert empty["harm"]["share"] is None


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [ROWS[5]], []], ids=["all", "one", "not reached", "none"])
def test_the_report(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", MANIFEST) as record:
        for each in rows:
            record.line(each)
        if len(rows) == len(ROWS):
            record.finish(summarize_campaign(MANIFEST, rows))
    page = write_report(tmp_path / "run").read_text()
    markdown = (tmp_path / "run" / "report.md").read_text()
    assert "SIMULATED FAULTS" in page
    assert "://" not in page.replace("http://www.w3.org", "")
    assert ("NOT ENDED" in page) == (len(rows) < len(ROWS))
    assert "Outcome: masked" in markdown
    if len(rows) == len(ROWS):
        assert (
            "5 of 7 injections changed training; 3 of them harmed training, and detectors without a recorded "
            "trace missed 1 of these" in page
        )
        assert page.count("<svg") == 5
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"]
    assert [r["injection"] for r in read_record(tmp_path / "run").lines] == [r["injection"] for r in rows]


def write(path: Path, rows: list[dict[str, Any]], **changes: Any) -> str:
    """The report of a campaign with these rows, which has not ended."""
    with Record.create(path, MANIFEST | changes) as record:
        for each in rows:
            record.line(each)
    return write_report(path).read_text()


def test_impossible_bits_and_latencies_do_not_blow_up_the_report(tmp_path: Path) -> None:
    """A figure as wide as a damaged number would never end."""
    odd = [
        row(8, "benign", bits=[10**12]),
        row(9, "benign", bits=[32]),
        row(10, "benign", bits=[1], dtype="float33"),
        row(11, "benign", bits=[1], dtype=None),
        row(12, "spike", bits=["x"], layer=10**12, visible_after=float("nan"), detected={"loss_spike": 10**12}),
    ]
    summary = summarize_campaign(MANIFEST, [*ROWS, *odd])
    assert summary["bits"] == summarize_campaign(MANIFEST, ROWS)["bits"]
    assert set(summary["groups"]["bit"]) == {"float32  3", "float32 30"}
    assert summary["steps_to_visible"] == 0.5
    assert len(write(tmp_path / "run", [*ROWS, *odd])) < 500_000


def test_definitions_give_the_thresholds_of_the_record(tmp_path: Path) -> None:
    write(tmp_path / "run", ROWS)
    lines = (tmp_path / "run" / "report.md").read_text().split("## Definitions")[1].splitlines()
    text = {line.split("**")[1]: line.split("**")[2] for line in lines if line.startswith("- **")}
    assert len([name for name in text if name.startswith("Outcome: ")]) == len(OUTCOMES)
    assert len([name for name in text if name.startswith("Detector: ")]) == len((*DETECTORS, ABFT))
    assert "bit for bit" in text["Outcome: masked"]
    for name, threshold in {
        "Outcome: benign drift": "≤ 0.125", "Outcome: loss spike": "0.125", "Outcome: divergence": "0.125",
        "Visible loss change": "0.003", "Detector: loss spike": "0.375", "Detector: gradient-norm spike": "4.5",
    }.items():  # fmt: skip
        assert threshold in text[name]
    assert "refer to injections that reached their site" in text["Outcome: not reached"]


def test_every_table_and_figure_says_that_faults_are_simulated(tmp_path: Path) -> None:
    page = write(tmp_path / "run", ROWS).split("<h2>How to reproduce")[0]
    captions = re.findall(r"<(?:caption|figcaption)>(.*?)</", page)
    assert len(captions) == 2 + len(GROUPS) + 5
    assert all(caption.startswith("[simulated faults]") for caption in captions)
    assert len(re.findall(r"<text[^>]*>simulated faults</text>", page)) == 5
    assert "Shares of the 7 injections that reached their site" in page
    assert "0.5 (2 of the 5 unmasked injections changed the loss visibly)" in page


def test_a_figure_says_what_it_leaves_out(tmp_path: Path) -> None:
    rows = [row(number, "benign", operation=f"operation_{number}", layer=number) for number in range(90)]
    page = write(tmp_path / "run", rows, injections=90)
    assert "24 of 90 operations" in page
    assert "operation_89" in page  # in the table
    assert "operations are shown; the table has all" not in write(tmp_path / "small", ROWS)


def test_nothing_in_a_record_becomes_markup(tmp_path: Path) -> None:
    hostile = '</title><script>alert("x")</script>$\\frac{a}{b}$ & | `` \''
    names = dict.fromkeys(("site", "operation", "phase", "scope", "field", "fault"), hostile)
    page = write(
        tmp_path / "run", [row(0, "spike", **names)], where=hostile, faults=[hostile], command=["sdc", hostile]
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6


def test_an_ended_campaign_must_be_what_its_summary_was_made_of(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", MANIFEST) as record:
        for each in ROWS:
            record.line(each)
    write_summary(tmp_path / "run", summarize_campaign(MANIFEST, ROWS))
    write_report(tmp_path / "run")
    lines = (tmp_path / "run" / INJECTIONS).read_text().splitlines(keepends=True)
    for damaged, problem in (
        (lines[1:], "does not match its checksum"),
        (lines[:-1], "does not match the summary"),
    ):
        (tmp_path / "run" / INJECTIONS).write_text("".join(damaged))
        with pytest.raises(RecordError, match=problem):
            write_report(tmp_path / "run")
