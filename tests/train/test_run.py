"""Runs from Python objects: what is injected is measured, wherever twins run and however a run ends."""

import dataclasses
from typing import Any

import pytest

import sdc
from sdc.program.selectors import direction, probes
from sdc.train import Checks, Tracing, Training, Twins, Workload
from sdc.train.specs import CampaignJob

from .runs import MINI


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Training(steps=2.5), "steps=2.5: expected a whole number"),  # type: ignore[arg-type] # as people pass it
        (Training(faults="nan,rate=1"), "faults=nan,rate=1: expected a sequence of faults"),
        (Twins(twins=1), "twins=1: expected a whole number from 2 to 2,147,483,647"),
        (Training(steps=0), "steps=0: expected a whole number from 1 to 2,147,483,647"),
        (Training(resume=True), "needs the folder of the run to resume"),
        (Twins(suspect="node1", faults=("nan,rate=1",)), "faults are given too"),
        (Twins(suspect="node99"), "unknown suspect 'node99'"),
        (Training(aggregate="foo"), "unknown method 'foo'"),
        (Twins(sync="Compute"), "sync='Compute': expected one of compute, params, none"),  # type: ignore[arg-type]
        (Twins(placement="foo"), "placement='foo': expected one of mesh, vmap"),  # type: ignore[arg-type]
        (Twins(compare="foo"), "compare='foo': expected one of gated, always"),  # type: ignore[arg-type]
        (Twins(twins="2"), "twins='2': expected a whole number"),  # type: ignore[arg-type]
        (Twins(twins=2.5), "twins=2.5: expected a whole number"),  # type: ignore[arg-type]
        (Training(steps=True), "steps=True: expected a whole number"),
        (Training(faults=3), "faults=3: expected a sequence of faults"),  # type: ignore[arg-type]
        (Training(faults=[3]), r"faults=\[3\]: expected every element to be Fault or a string"),  # type: ignore[list-item]
        (Training(workload=Workload(seed="a")), "seed='a': expected a whole number"),  # type: ignore[arg-type]
        (Training(workload=Workload(dtype="float33")), "dtype='float33': expected one of float32, bfloat16 or None"),  # type: ignore[arg-type]
        (Training(workload=Workload(corpus="python")), "corpus=python: expected a sequence of texts"),
        (Training(workload=Workload(corpus=())), "corpus: expected python"),
        (Training(workload="tiny"), "workload='tiny': expected Workload"),  # type: ignore[arg-type]
        (Training(checks="correct"), "checks='correct': expected Checks or None"),  # type: ignore[arg-type]
        (Training(aggregate=3), "aggregate=3: expected a string or None"),  # type: ignore[arg-type]
        (Training(aggregate="noise,sigma=0.1"), "expected at least 2 data ranks, got 1"),
        (Training(folder=3), "folder=3: expected a string or PathLike or None"),  # type: ignore[arg-type]
        (Tracing(simulate=3), "simulate=3: expected a string or None"),  # type: ignore[arg-type]
        (Tracing(where=3), "where=3: expected Selector or a string"),  # type: ignore[arg-type]
        (Training(checks=Checks(where=3)), "where=3: expected Selector or a string"),  # type: ignore[arg-type]
        (CampaignJob(where=3), "where=3: expected Selector or a string"),  # type: ignore[arg-type]
        (CampaignJob(faults="bitflip"), "faults=bitflip: expected a sequence of faults"),
    ],
)
def test_settings_are_checked_before_anything_starts(job: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job.check()


def test_a_selector_will_do_where_its_text_does() -> None:
    selector = probes & direction("bwd")
    for where in (selector, selector.text):
        tracing = Tracing(steps=1, where=where)
        tracing.check()
        assert tracing.manifest(MINI)["where"] == 'probes & direction("bwd")'
        checks = Checks(where=where)
        checks.check()
        assert checks.describe()["where"] == 'probes & direction("bwd")'
        CampaignJob(where=where).check()


def test_a_fault_and_its_text_strike_the_same_twin() -> None:
    text = "bitflip,bits=20,rate=0.5,site=fwd/attn"
    one, other = (Twins(twins=3, faults=[fault]).simulated(layers=2) for fault in (text, sdc.faults.parse_fault(text)))
    assert one == other
    assert dict(one[0].at) == {"twin": 2}
    elsewhere = dataclasses.replace(other[0], at={"twin": 0, "data": 1})
    assert Twins(faults=[elsewhere]).simulated(layers=2) == (elsewhere,)
