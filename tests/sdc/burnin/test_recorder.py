"""Golden digests are recorded where runs or devices agree, and confirmed or contradicted by other ones."""

import functools
from pathlib import Path
from typing import Any

import jax
import msgspec
import pytest

from sdc.burnin import recorder
from sdc.burnin.golden_register import GOLDEN, lookup, mark_of
from sdc.burnin.host import surroundings
from sdc.burnin.judgement import judge
from sdc.burnin.programs import Programs
from sdc.burnin.recorder import record, recorded, register_of, verify
from sdc.burnin.results import BurninSettings
from sdc.burnin.rounds import burn_in, planned_result
from sdc.burnin.sensors.base import Course, Sensors
from sdc.burnin.sensors.monitor import Monitor
from sdc.burnin.workloads.workload import BurninWorkload
from sdc.faults import BitFlip, Fault
from sdc.records import describe_devices

ONCE = {"level": "quick", "only": ("ordering",), "dtypes": ("float32",)}


@pytest.fixture
def pair(devices: list[jax.Device]) -> list[jax.Device]:
    return devices[:2]


def faulty(monkeypatch: pytest.MonkeyPatch, **where: Any) -> None:
    fault = Fault(BitFlip(bits=(20,)), rate=1.0, **where)
    monkeypatch.setattr(recorder, "burn_in", functools.partial(burn_in, inject=[fault]))


def test_what_devices_agree_on_is_recorded_and_confirmed(pair: list[jax.Device], tmp_path: Path) -> None:
    events: list[Any] = []
    register, found = record(BurninSettings(rounds=1, **ONCE), pair, on_event=events.append)
    assert register is not None
    assert (found.verdict, found.sentences) == ("clean", [])
    (entry,), (name, recording) = register.entries, *register.recordings.items()
    (seen,) = entry.seen
    assert (seen.recording, seen.devices, seen.runs, seen.agreed) == (name, (0, 1), 2, ("vote",))
    assert entry.subject.workload == "ordering/int32/65536/random"
    assert entry.subject.environment == mark_of(surroundings(pair))
    assert (recording.level, recording.rounds, len(recording.devices)) == ("quick", 1, 2)
    assert recording.devices[0].simulated  # one processor: told of each
    assert [event["event"] for event in events][-2:] == ["run", "run"]
    GOLDEN.write(tmp_path / "a.golden", register)
    confirmed = verify(GOLDEN.read(tmp_path / "a.golden"), pair[:1])
    assert (confirmed.confirmed, confirmed.elsewhere, confirmed.verdict) == (1, 0, "clean")


def test_a_single_run_of_a_single_device_is_not_recorded(pair: list[jax.Device]) -> None:
    register, found = record(BurninSettings(rounds=1, **ONCE), pair[:1])
    assert register is None
    assert found.verdict == "inconclusive"
    assert found.sentences == ["no workload ran twice on one device, or on two devices of one kind"]
    again, _ = record(BurninSettings(rounds=2, **ONCE), pair[:1])
    assert again is not None
    assert again.entries[0].seen[0].agreed == ("repeat",)


def test_nothing_is_recorded_where_anything_differs(pair: list[jax.Device], monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, at={"device": 1})
    register, found = record(BurninSettings(rounds=1, **ONCE), pair)
    assert register is None
    assert found.verdict == "corrupt"
    assert "device 1, ordering/int32/65536/random: 262160 of" in found.sentences[0]  # values, places and counts


def test_nothing_is_recorded_where_a_driver_reports_errors(
    pair: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(source="nvml", before=Sensors(), after=Sensors(), samples=1, events=["Xid 48"])
    monkeypatch.setattr(Monitor, "courses", lambda self: [None, course])
    register, found = record(BurninSettings(rounds=1, **ONCE), pair)
    assert (register, found.verdict) == (None, "inconclusive")
    assert found.sentences == ["device 1: Xid 48 (double-bit ECC error)"]


def test_a_digest_that_this_host_does_not_compute(pair: list[jax.Device], monkeypatch: pytest.MonkeyPatch) -> None:
    register, _ = record(BurninSettings(rounds=1, **ONCE), pair)
    assert register is not None
    register.entries[0] = msgspec.structs.replace(register.entries[0], digest="0" * 16)
    found = verify(register, pair[:1])
    assert (found.verdict, found.confirmed) == ("corrupt", 0)
    assert "found by golden" in found.sentences[0]


def test_digests_of_elsewhere_are_explained(pair: list[jax.Device]) -> None:
    register, _ = record(BurninSettings(rounds=1, **ONCE), pair)
    assert register is not None
    here = surroundings(pair)
    there = {**here, "jaxlib": "0.0.1"}
    (entry,) = register.entries
    subject = msgspec.structs.replace(entry.subject, environment=mark_of(there))
    register.environments = {mark_of(there): there}
    register.entries = [msgspec.structs.replace(entry, subject=subject)]
    found = verify(register, pair[:1])
    assert (found.verdict, found.confirmed, found.elsewhere) == ("inconclusive", 0, 1)
    assert found.sentences == [f"jaxlib {here['jaxlib']} on this host, 0.0.1 in the register (1 workload)"]
    register.entries = []
    assert verify(register, pair).sentences == ["the devices of this host can run none of the register's workloads"]


def test_a_workload_that_checksums_doubt_is_left_out(few: list[BurninWorkload], programs: Programs) -> None:
    chosen = [each for each in few if each.family in ("matrix", "ordering", "collectives")]
    settings = BurninSettings(level="prejob", dtypes=("float32",))
    planned = planned_result(chosen, programs.devices, describe_devices(programs.devices), settings=settings)
    result = burn_in(chosen, programs.devices, rounds=2, programs=programs, result=planned)
    assert judge(result).verdict.acceptance == "PASS"
    here = surroundings(programs.devices)
    register = register_of(result, here)
    assert lookup(register) == recorded(result)
    assert [(each.level, each.dtypes) for each in register.recordings.values()] == [("prejob", ["float32"])]
    shards = [entry.subject.shard for entry in register.entries if entry.subject.shard is not None]
    assert shards == [0, 1, 2, 3]
    matrix = next(each.name for each in chosen if each.family == "matrix")
    result.tallies[matrix, 2].flagged, result.tallies[matrix, 2].confirmed = 2, 1
    left = register_of(result, here)
    assert {entry.subject.workload for entry in register.entries} - {
        entry.subject.workload for entry in left.entries
    } == {matrix}
    with pytest.raises(ValueError, match="ran in environment"):
        register_of(result, {**here, "driver": "1"})
