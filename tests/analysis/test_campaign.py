"""Campaign summaries against counts by hand; reports that say what they are."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sdc.analysis.campaign import summarize_campaign
from sdc.analysis.report import write_report
from sdc.outcomes import DETECTORS
from sdc.records import INJECTIONS, RunWriter, read_campaign

MANIFEST = {
    "kind": "campaign", "injections": 8, "steps": 9, "follow": 3, "where": "arithmetic", "faults": ["bitflip", "nan"],
    "config": {"name": "tiny"}, "command": ["sdc", "campaign"], "sites": 3,
}  # fmt: skip


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


def test_order_and_repetition_do_not_matter() -> None:
    mixed = random.Random(0).sample(ROWS, len(ROWS))
    repeated = [*mixed, row(2, "masked"), row(3, "masked")]  # the first of each stands
    assert summarize_campaign(MANIFEST, list(reversed(ROWS))) == summarize_campaign(MANIFEST, ROWS)
    assert summarize_campaign(MANIFEST, repeated) == summarize_campaign(MANIFEST, ROWS)


def test_damaged_rows_count_for_nothing() -> None:
    damaged = [{}, {"injection": "x"}, {"injection": 9}, {"injection": 10, "outcome": "fine"}, {"injection": -1}]
    assert summarize_campaign(MANIFEST, [*ROWS, *damaged]) == summarize_campaign(MANIFEST, ROWS)
    odd = [{"injection": 0, "outcome": "spike", "detected": 3, "bits": "x", "layer": [1], "scope": 4}]
    assert summarize_campaign(MANIFEST, odd)["harm"]["count"] == 1
    empty = summarize_campaign(MANIFEST, [])
    assert not empty["complete"]
    assert empty["harm"]["share"] is None


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [ROWS[5]], []], ids=["all", "one", "not reached", "none"])
def test_the_report(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", MANIFEST, None, lines=INJECTIONS) as writer:
        for each in rows:
            writer.step(each)
        if len(rows) == len(ROWS):
            writer.summary(summarize_campaign(MANIFEST, rows))
    page = write_report(tmp_path / "run").read_text()
    markdown = (tmp_path / "run" / "report.md").read_text()
    assert "SIMULATED FAULTS" in page
    assert "://" not in page.replace("http://www.w3.org", "")
    assert ("NOT ENDED" in page) == (len(rows) < len(ROWS))
    assert "Outcome: masked" in markdown
    if len(rows) == len(ROWS):
        assert "5 of 7 injections changed training; 3 harmed it, and 1 of those" in page
        assert page.count("<svg") == 5
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"]
    assert [r["injection"] for r in read_campaign(tmp_path / "run").injections] == [r["injection"] for r in rows]
