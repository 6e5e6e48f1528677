"""`sdc golden`: records, verifies, merges and lists; a damaged or foreign register is inconclusive, never clean."""

import functools
from pathlib import Path

import pytest

from sdc.burnin import recorder
from sdc.burnin.rounds import burn_in
from sdc.faults import BitFlip, Fault
from tests.tools import test_golden as units
from tests.tools.test_golden import (
    ONLY,
    Run,
)

# Fixtures.
recorded = units.recorded
run = units.run


def test_nothing_is_recorded_where_devices_differ(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(BitFlip(bits=(20,)), rate=1.0, at={"device": 1})
    monkeypatch.setattr(recorder, "burn_in", functools.partial(burn_in, inject=[fault]))
    found = run.json("record", tmp_path / "a.golden", *ONLY, code=1)
    assert (found["verdict"], found["recorded"]) == ("corrupt", 0)
    assert "device 1, ordering/int32/65536/random" in found["sentences"][0]
    assert "CORRUPT" in run("record", tmp_path / "a.golden", *ONLY, code=1).out
    assert list(tmp_path.iterdir()) == []
