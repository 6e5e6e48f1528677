"""Traces from Python objects: a struck run parts from the golden trace where it was struck."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from sdc.analysis import conclude
from sdc.records import RecordError, read_manifest
from sdc.records.format import write_sealed
from sdc.train import Tracing, run
from sdc.train.policy import Golden
from sdc.twins.traces import NotComparable, diff, read_trace
from tests.train.runs import WORKLOAD, execute, lines, loaded

JOB = Tracing(workload=WORKLOAD, steps=3, model=2, where='primitive("dot_general")', simulate="none")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "golden"
    found = execute(dataclasses.replace(JOB, folder=folder))
    assert (found["verdict"], found["simulated"]) == (None, False)
    return folder


def test_a_struck_run_parts_from_the_golden_trace(golden: Path) -> None:
    """Live against the record, and afterwards from both records: the same place, marked as simulated."""
    target = next(s for s in read_trace(golden).sites if s.direction == "bwd" and "ffn" in s.scope and s.loops == 2)
    fault = f"bitflip,bits=30,step=1,site={target.name},iteration=1+1,element=7,model=1"
    folder = golden.parent / "struck"
    found = execute(dataclasses.replace(JOB, simulate=fault, against=golden, folder=folder))
    assert found["simulated"]
    assert found["verdict"] == "corrupt"
    assert f"first differs from {golden} at step 1: {target.name}, iteration 1, 1, on data=0 model=1" in found["reason"]
    assert len(lines(folder)) == 2  # it stopped there
    assert (found["first_difference"]["step"], found["first_difference"]["site"]) == (1, target.name)
    assert f"layer 1, {target.name}" in found["sentence"]
    assert "SIMULATED" in (folder / "report.html").read_text()
    first = diff(read_trace(golden), read_trace(folder))
    assert (first.step, first.first.site.name) == (1, target.name)  # type: ignore[union-attr] # they part


def test_what_was_found_before_a_run_was_resumed_stays_found(golden: Path) -> None:
    folder = golden.parent / "struck and resumed"
    target = next(s for s in read_trace(golden).sites if s.direction == "bwd" and "ffn" in s.scope and s.loops == 2)
    fault = f"bitflip,bits=30,step=1,site={target.name},iteration=1+1,element=7,model=1"
    job = dataclasses.replace(JOB, simulate=fault, against=golden, checkpoint_every=1, folder=folder)
    found = execute(job)
    assert found["verdict"] == "corrupt"
    resumed = execute(dataclasses.replace(job, resume=True))
    assert (resumed["verdict"], resumed["reason"]) == ("corrupt", found["reason"])
    with pytest.raises(RecordError, match=r"another configuration .*against"):
        run(dataclasses.replace(job, resume=True, against=None), loaded=loaded(WORKLOAD))


def test_a_healthy_run_agrees_with_the_golden_trace(golden: Path) -> None:
    found = execute(dataclasses.replace(JOB, against=golden, folder=golden.parent / "healthy"))
    assert (found["verdict"], found["reason"]) == ("clean", f"3 steps agree with {golden} in every digest")
    assert lines(golden, "trace.jsonl") == lines(golden.parent / "healthy", "trace.jsonl")
    (golden.parent / "healthy" / "summary.json").unlink()
    cut_off = conclude(golden.parent / "healthy")
    assert (cut_off["verdict"], cut_off["reason"]) == ("inconclusive", "the run has not ended")


def test_a_golden_trace_without_the_steps_of_a_run_judges_nothing(golden: Path) -> None:
    empty = Golden(golden)
    empty.trace = dataclasses.replace(empty.trace, lines={})
    assert empty.conclude() == {"verdict": "inconclusive", "reason": f"{golden} and this run have no step in common"}


def test_traces_of_different_programs_are_not_compared(golden: Path) -> None:
    other = golden.parent / "other"
    shutil.copytree(golden, other)
    manifest = read_manifest(other)
    write_sealed(other / "manifest.json", {**manifest, "program": {"step": "another"}})
    with pytest.raises(NotComparable, match=r"program\.step"):
        diff(read_trace(golden), read_trace(other))
    with pytest.raises(NotComparable, match=r"program\.step"):
        run(dataclasses.replace(JOB, against=other, folder=golden.parent / "never"), loaded=loaded(WORKLOAD))
    assert not (golden.parent / "never").exists()
