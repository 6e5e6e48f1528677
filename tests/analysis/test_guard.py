"""What the record of a guarded run says: proof, suspicion, and silence that excludes enough or too little."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc import analysis
from sdc.analysis import conclude
from sdc.analysis.summary import summary_of
from sdc.records import Record, read_record
from sdc.schema import GuardTotals

from .records import about_of, details_of, lines_of, manifest, step_row, steps, summarize
from .test_summary import REAL

GUARDED: dict[str, Any] = {
    "kind": "train", "twins": None, "sync": None, "published": None, "guard": {"budget": 0.01},
    "suspect": {"name": None, "simulated": False, "faults": []},
}  # fmt: skip
WITNESS = {"name": "witness", "compares": "12 operations", "why_not": "", "checks": 20, "coverage": 0.75}
PROOF = {"layer": "ring", "step": 3, "what": "2 results differ", "devices": ["tpu:4"], "proof": True}
SUSPICION = {"layer": "metrics", "step": 2, "what": "loss = 9", "devices": [], "proof": False}


def totals(*findings: Any, wrong: float | None = 1.5, steps: int = 10, **layer: Any) -> dict[str, Any]:
    layers = [{**WITNESS, "most_wrong": wrong, **layer}]
    return {"steps": steps, "overhead": 0.01, "start_up": 5.0, "layers": layers, "findings": [*findings]}


CASES: dict[str, tuple[dict[int, Any], Any, str | None, str]] = {
    "silence": ({}, totals(), "clean", "at most 15 % of the steps of each device were wrong, in what witness compares"),
    "too few checks": ({}, totals(wrong=6.0), "inconclusive", "are too few, or cover too little"),
    "too little covered": ({}, totals(coverage=0.4), "inconclusive", "are too few, or cover too little"),
    "nothing excluded": ({}, totals(wrong=None, coverage=None), "inconclusive", "are too few, or cover too little"),
    "resumed": ({}, totals(steps=8), "clean", "at most 35 %"),
    "resumed late": ({}, totals(steps=2), "inconclusive", "are too few"),
    "proof in a line": ({4: [PROOF]}, totals(), "corrupt", "ring: 2 results differ on tpu:4, at step 3"),
    "proof at the end": ({}, totals(PROOF), "corrupt", "ring: 2 results differ on tpu:4, at step 3"),
    "proof twice": ({4: [PROOF]}, totals(PROOF), "corrupt", "at step 3"),
    "suspicion": (
        {4: [SUSPICION]},
        totals(),
        "inconclusive",
        "a suspicion, but no proof: metrics: loss = 9, at step 2",
    ),
    "suspicion and proof": ({3: [SUSPICION], 4: [PROOF]}, totals(), "corrupt", "ring: 2 results differ"),
    "no checks": ({}, totals(checks=0), "inconclusive", "are too few"),
    "bad counts": ({}, totals(wrong=-3.0), "inconclusive", "are too few"),
    "bad coverage": ({}, totals(coverage=75.0), "inconclusive", "are too few"),
    "no end": ({}, None, "inconclusive", "it reports at the end of the run"),
    "proof before the end": ({4: [PROOF]}, None, "corrupt", "ring: 2 results differ"),
}


def test_findings_count_if_the_manifest_names_no_guard() -> None:
    rows = [{**step_row(number, 1), "findings": [PROOF] * (number == 4)} for number in range(10)]
    summary = summarize(manifest(**{**GUARDED, "guard": None}), rows, [])
    assert summary.verdict == "corrupt"


@pytest.mark.parametrize("of_guard", [True, False])
def test_a_flagged_product_is_not_cleared_by_other_comparisons(of_guard: bool) -> None:
    counts = {"checked": 9, "examined": 1, "flagged": 1, "confirmed": 1, "corrected": 0, "nonfinite": 0}
    found, sound = (
        {**one, "sites": {"a": one}, "coverage": 1.0} for one in (counts, {**counts, "flagged": 0, "confirmed": 0})
    )
    rows, details = ([step_row(number, 1) for number in range(10)], []) if of_guard else steps(10)
    rows = [{**row, "abft": found if row["step"] == 3 else sound} for row in rows]
    about = manifest(**(GUARDED if of_guard else {**REAL}), abft={"mode": "detect"})
    guard = msgspec.convert(totals(), GuardTotals) if of_guard else None
    summary = analysis.summarize(about_of(about), lines_of(rows), details_of(details), guard=guard)
    assert summary.verdict == "corrupt"
    assert ("the guard found nothing" if of_guard else "no mismatch in") in str(summary.reason)
    assert "checked rows of matrix products are wrong" in str(summary.reason)


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_of_a_guarded_run(name: str, tmp_path: Path) -> None:
    lines, guard, verdict, reason = CASES[name]
    rows = [{**step_row(number, 1), "sites": {}, "findings": lines.get(number, [])} for number in range(10)]
    for row in rows:
        for part in ("state", "gradient"):
            row.pop(part, None)
    with Record.create(tmp_path / "run", manifest(**GUARDED)) as record:
        for row in rows:
            record.line(row)
        if guard:
            record.finish({"guard": guard})
    for _ in range(2):  # the summary that the first call writes changes nothing
        found = conclude(tmp_path / "run")
        assert found["verdict"] == verdict
        assert reason in found["reason"]
    findings = summary_of(read_record(tmp_path / "run")).guard
    assert findings is not None
    assert [one.layer for one in findings.findings] == [
        *("metrics" for each in lines.values() if SUSPICION in each), *("ring" for _ in [0] if verdict == "corrupt")
    ]  # fmt: skip
    page = (tmp_path / "run" / "report.md").read_text()
    assert ("2 results differ" in page) == (verdict == "corrupt")
    if guard:
        assert "Evidence of the guard" in page
