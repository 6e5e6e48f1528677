"""The first screen of a report: one sentence, five answers and what to do, for every way in which a run can end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc.analysis import conclude
from sdc.analysis.headline import headline
from sdc.analysis.report import Headline
from sdc.analysis.summary import contents_of, summary_of
from sdc.records import Record
from sdc.records.record import read_record, write_summary
from sdc.schema import RunSummary

from .records import manifest, step_row, steps, summarize, write_run

REAL = {"suspect": {"name": None, "simulated": False, "faults": []}, "published": None}
DEVICES = [
    {
        "process": twin, "host": f"gpu-{16 + twin}", "id": 2 + model, "kind": "H200", "serial": f"S{twin}{model}",
        "rank": {"twin": twin, "data": 0, "model": model},
    }
    for twin in range(3)
    for model in range(2)
]  # fmt: skip


def hits(*at: int, twins: tuple[int, ...] = (1,), layers: tuple[int, ...] = (2,), count: int = 40) -> Any:
    """Lines of a run whose steps `at` mismatched in a few elements of bwd/ffn."""
    rows, _ = steps(count)
    found = []
    for step in at:
        rows[step]["sites"]["bwd/ffn"] |= {"mismatched": 4 * len(layers), "injected": 0}
        ranks = [{"twin": twin, "data": 0, "model": 1, "mismatched": 4} for twin in twins]
        found += [
            {"step": step, "site": "bwd/ffn", "layer": layer, "mismatched": 4, "ranks": ranks} for layer in layers
        ]
    return rows, found


def told(path: Path, about: Mapping[str, Any], lines: Any, *, ended: bool = True, **known: Any) -> Headline:
    """The headline of a run; `known` is put into its summary."""
    write_run(path, dict(about), *lines, ended=ended)
    run = read_record(path)
    return headline(run, msgspec.convert({**msgspec.to_builtins(summary_of(run)), **known}, RunSummary))


@pytest.mark.parametrize(
    ("at", "about", "sentence"),
    [
        ([31], {"devices": DEVICES}, "twin 1 (host gpu-17, device 3): layer 2, ffn, backward: 4 of"),
        ([31], {}, "twin 1 (model 1): layer 2, ffn, backward: 4 of"),
        ([31], {"mesh": {"twin": 2}}, "twin 1: layer 2, ffn, backward: 4 of"),
    ],
    ids=["devices", "ranks", "one device each"],
)
def test_the_sentence(at: list[int], about: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    found = told(tmp_path / "run", manifest(**REAL, **about), hits(*at))
    assert found.sentence == f"{sentence} 1.7e8 elements, first at step 31, transient"
    assert dict(found.answers)["Which operation"] == "layer 2, ffn, backward"
    assert ("serial S11" in found.device) == ("devices" in about)


def test_several_places_are_named_together(tmp_path: Path) -> None:
    rows, found = hits(31)
    rows[31]["sites"]["fwd/attn"] |= {"mismatched": 4, "injected": 0}
    sentence = told(tmp_path / "run", manifest(**REAL), (rows, [*found, {**found[0], "site": "fwd/attn"}])).sentence
    assert sentence.startswith("twin 1 (model 1): layer 2, attn and ffn, forward and backward: 8 of ")


@pytest.mark.parametrize(
    ("at", "course", "since", "advice"),
    [
        (range(31, 40), "persistent", "8 of the 8 later steps", "Reproduce the fault"),
        ([31, 37], "intermittent", "1 of the 8 later steps", "Observe the fault for longer"),
        ([31], "transient", "0 of the 8 later steps", "Observe the fault for longer"),
        ([39], None, "no step followed it", "Do not trust"),
    ],
)
def test_the_course_of_a_fault(at: Any, course: str | None, since: str, advice: str, tmp_path: Path) -> None:
    found = told(tmp_path / "run", manifest(**REAL), hits(*at))
    assert found.sentence.endswith(f"first at step {at[0]}" + (f", {course}" if course else ""))
    assert since in found.since
    assert found.actions[1].what.startswith(advice)
    if advice == "Observe the fault for longer":  # the plan rests on the steps that had a finding
        assert f"{len(at)} burst{'s' * (len(at) > 1)} in 40 steps" in found.actions[1].how


def flagged(confirmed: int) -> Any:
    row = {"checked": 100, "examined": 3, "flagged": 2, "confirmed": confirmed, "corrected": 0, "nonfinite": 0}
    place = {"site": "bwd/ffn/dot_general", "layer": 1, "data": 0, "model": 1, "flagged": 2, "confirmed": confirmed}
    found = {**row, "margin": 3.0, "sites": {"bwd/ffn/dot_general": {**row, "margin": 3.0}}, "rows": [place]}
    quiet = row | dict.fromkeys(("examined", "flagged", "confirmed"), 0)
    sound = {**quiet, "margin": 0.1, "sites": {"bwd/ffn/dot_general": {**quiet, "margin": 0.1}}, "rows": []}
    return [{**step_row(step, 1), "abft": found if step == 1 else sound} for step in range(4)], []


TRAIN = {"kind": "train", "twins": None, "sync": None, "abft": {"mode": "detect"}, **REAL}


@pytest.mark.parametrize(
    ("about", "lines", "known", "ended", "expected"),
    [
        (REAL, hits(3), {}, True, ("twin 1 (model 1)", "by convention", "real: nothing", "which twin is wrong")),
        (
            {**REAL, "twins": 3, "devices": DEVICES}, hits(3, twins=(0,)), {"odd_twins": [0]}, True,
            ("twin 0 (host gpu-16, device 3)", "kind H200, serial S01", "real: nothing", "until tested: twin 0"),
        ),
        (
            {**REAL, "twins": 3, "devices": DEVICES}, hits(3, 4, twins=(1, 2), layers=(0, 1, 2)), {}, True,
            ("twin 1 (host gpu-17, device 3) and twin 2 (host gpu-18, device 3): layers 0-2", "out of service: twin 1"),
        ),
        ({}, hits(3), {}, True, ("simulated: node11 was deliberately corrupted", "detection works")),
        (REAL, hits(3), {"rehearsal": True}, True, ("a rehearsal, not a test", "Suspect this machine")),
        (REAL, steps(5), {"hosts": 2}, True, ("over 5 steps on 2 hosts", "nothing differed", "No action")),
        (REAL, steps(5), {"rehearsal": True}, True, ("no mismatch", "Run the test on the hosts that you want to test")),
        (REAL, ([], []), {}, False, ("the run has not ended", "Let the run continue, or resume it")),
        (REAL, steps(5), {}, False, ("the run has not ended; so far: no mismatch", "5 of 20 planned")),
        (REAL, ([], []), {}, True, ("no step was completed", "Fix the stated cause")),
        (
            {"kind": "train", "twins": None, "sync": None, **REAL}, ([step_row(0, 1)], []), {}, True,
            ("a training run has no twin", "no verdict was requested"),
        ),
        (
            TRAIN, flagged(2), {}, True,
            ("model 1: layer 1, ffn/dot_general, backward: 2 of 400", "step 1, transient", "until tested: model 1"),
        ),
        (TRAIN, flagged(0), {}, True, ("equally wrong when recomputed", "on another device")),
        (
            {"kind": "trace", "twins": None, **REAL}, ([step_row(0, 1)], []),
            {"verdict": "corrupt", "first_difference": {
                "step": 7, "site": "bwd/ffn", "operation": "dot_general", "direction": "bwd", "scope": "ffn",
                "source": "model.py:3", "layer": 1, "devices": [{"data": 0, "model": 1}],
            }}, True,
            ("data 0, model 1: layer 1, bwd/ffn, at model.py:3: first difference at step 7", "third host"),
        ),
    ],
    ids=[
        "two twins", "three", "two of three", "simulated", "rehearsal corrupt", "clean", "rehearsal clean",
        "no step yet", "under way", "no step", "training", "products", "products unsure", "trace",
    ],
)  # fmt: skip
def test_answers_and_advice(
    about: dict[str, Any], lines: Any, known: dict[str, Any], ended: bool, expected: tuple[str, ...], tmp_path: Path
) -> None:
    found = told(tmp_path / "run", manifest(**about), lines, ended=ended, **known)
    text = " | ".join([found.sentence, *(answer for _, answer in found.answers), *(a.how for a in found.actions)])
    for part in expected:
        assert part in text, text
    assert 1 <= len(found.actions) <= 3
    assert found.answers[-1] == ("What now", found.actions[0].what)


def test_twins_that_share_a_device_are_told_so(tmp_path: Path) -> None:
    shared = [{"host": "gpu-9", "id": model, "rank": {"data": 0, "model": model}} for model in range(2)]
    found = told(tmp_path / "run", manifest(**REAL, placement="vmap", devices=shared), hits(3))
    assert found.sentence.startswith("twin 1 (host gpu-9, device 1): ")
    assert "all twins share" in found.device


def test_twins_that_are_not_synchronized_have_no_course(tmp_path: Path) -> None:
    rows, _ = steps(9)
    for row in rows[4:]:
        row["state"]["mismatched"] = 3
    found = told(tmp_path / "run", manifest(**REAL, sync="none"), (rows, []))
    assert found.sentence.endswith("15 of 900,000 elements of the parameters and optimizer state, first at step 4")
    assert "continue to differ" in found.since


def test_what_a_step_showed_before_it_was_run_again_is_named(tmp_path: Path) -> None:
    about = manifest(**REAL, devices=DEVICES)
    rows, found = hits(31)
    with Record.create(tmp_path / "run", about) as record:
        for row in rows[:32]:
            record.line(row, [hit for hit in found if hit["step"] == row["step"]])
        record.rewind(30)
        for row in steps(40)[0][30:]:
            record.line(row)
        record.finish({"state_digest": ["ab"] * 2, **contents_of(summarize(about, steps(40)[0], []), None)})
    run = read_record(tmp_path / "run")
    summary = summary_of(run)
    assert (summary.verdict, summary.first_mismatch_step) == ("corrupt", None)
    told = headline(run, summary)
    assert told.sentence == (
        "twin 1 (host gpu-17, device 3): layer 2, ffn, backward: 4 of 1.8e8 elements, first at step 31, transient, in "
        "steps that were repeated"
    )
    assert dict(told.answers)["Which operation"] == "layer 2, ffn, backward"
    assert "serial S11" in told.device
    page = conclude(tmp_path / "run")["report"]
    assert "Repeated: 2 steps." in Path(page).read_text()


def test_what_did_not_differ_again_is_named_with_its_place(tmp_path: Path) -> None:
    rows, _ = steps(3)
    rows[1]["sites"]["fwd/ffn"]["unrepeated"] = 1
    rank = {"twin": 1, "data": 0, "model": 0, "mismatched": 0, "unrepeated": 1}
    row = {"step": 1, "site": "fwd/ffn", "layer": 2, "mismatched": 0, "checked": 9, "unrepeated": 1, "ranks": [rank]}
    with Record.create(tmp_path / "run", manifest(**REAL)) as record:
        for line in rows:
            record.line(line, [row] if line["step"] == 1 else [])
    run = read_record(tmp_path / "run")
    told = "layer 2, ffn, forward: 1 digest whose difference did not recur in the repetition, first at step 1"
    assert told in headline(run, summary_of(run)).sentence


def test_a_step_that_was_run_twice_is_one_step(tmp_path: Path) -> None:
    rows, found = hits(*range(5), count=5)
    with Record.create(tmp_path / "run", manifest(**REAL)) as record:
        for row in rows[:3]:
            record.line(row, [hit for hit in found if hit["step"] == row["step"]])
        record.rewind(1)
        for row in rows[1:]:
            record.line(row, [hit for hit in found if hit["step"] == row["step"]])
    run = read_record(tmp_path / "run")
    assert "persistent: 4 of the 4 later steps" in headline(run, summary_of(run)).since


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"parameter_norm": [1.0, 2.0]}, "parameter norms"),
        ({"gradient_difference": [0.0, 0.1]}, "distances of the gradients"),
        ({"state": {"checked": 100_000, "mismatched": 0, "undecided": 2}}, "counts of state"),
    ],
)
def test_what_differs_without_a_count_of_elements_is_named(change: Any, what: str, tmp_path: Path) -> None:
    rows, _ = steps(5)
    rows[2] |= change
    found = told(tmp_path / "run", manifest(**REAL), (rows, []))
    assert found.sentence == f"twin 1: {what}, first at step 2, transient"
    assert "0 of the 2 later steps" in found.since


@pytest.mark.parametrize(
    ("twins", "digests", "who"),
    [
        (2, ["a", "b"], "twin 1 (host gpu-17, devices 2 and 3)"),
        (3, ["a", "b", "b"], "twin 0 (host gpu-16, devices 2 and 3)"),
        (3, ["a", "b", "c"], None),
    ],
)
def test_twins_whose_final_states_alone_differ_are_named(
    twins: int, digests: list[str], who: str | None, tmp_path: Path
) -> None:
    rows, _ = steps(5)
    for row in rows:
        row |= {key: row[key][:1] * twins for key in ("loss", "gradient_norm")}
    about = manifest(**REAL | {"twins": twins, "devices": DEVICES})
    write_run(tmp_path / "run", about, rows)
    run = read_record(tmp_path / "run")
    assert run.summary is not None
    run.summary["state_digest"] = digests
    found = headline(run, summary_of(run))
    if who is None:  # no majority
        assert "twin 0 has a, twin 1 has b, twin 2 has c" in found.sentence
        return
    assert found.sentence == f"{who}: the final state differs, although no difference was found at any step"
    assert found.device.startswith(who)
    assert found.since == "after the last comparison, at step 4"


def test_terminal_markdown_and_page_say_the_same(tmp_path: Path) -> None:
    summary = conclude(write_run(tmp_path / "run", manifest(**REAL), *hits(31)))
    sentence = summary["sentence"]
    assert "sentence" not in (read_record(tmp_path / "run").summary or {"sentence"})
    assert f"T{sentence[1:]}." in Path(summary["report"]).read_text()
    assert f"**T{sentence[1:]}.**" in (tmp_path / "run" / "report.md").read_text()


def test_what_devices_hold_may_be_little(tmp_path: Path) -> None:
    about = manifest(**REAL, devices=[{}, {"rank": {}}, {"host": None, "rank": {"twin": 1, "model": 1}}])
    assert told(tmp_path / "run", about, hits(3)).sentence.startswith("twin 1 (host ")
    write_summary(tmp_path / "run", {"verdict": "corrupt", "reason": "so it is"})
    run = read_record(tmp_path / "run")
    assert headline(run, summary_of(run)).sentence
