"""Campaigns: outcomes and detections against runs done by hand, evenly spread, the same when resumed."""

import math

import sdc
from sdc.faults import BitFlip, Stuck
from tests.sdc.campaigns.test_campaign import ROWS, RUNNER, make


def test_faults_kinds_and_texts_are_the_same() -> None:
    faults = [sdc.Fault(BitFlip()), Stuck(math.nan), sdc.Fault(Stuck(0.0))]
    assert [make(faults=faults).plan(number).row for number in range(20)] == [
        RUNNER.plan(number).row for number in range(20)
    ]


def test_injections_do_not_depend_on_how_they_are_run() -> None:
    """Resumed in the middle, or several at a time."""
    assert list(RUNNER.run(range(50, 60))) == ROWS[50:60]
    together = make(faults=("bitflip", "nan", "zero"), batch=4)
    for row, other in zip(ROWS[:10], together.run(range(10)), strict=True):
        for name in ("outcome", "changed", "site", "old", "new", "elements", "detected"):
            assert row[name] == other[name]
