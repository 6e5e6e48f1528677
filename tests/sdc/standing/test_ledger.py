"""The ledger of a host: a failure stays until a person has dealt with it, and nothing that is in doubt passes."""

import contextlib
import datetime
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc.burnin import PAIR_FORMAT, BurninResult, BurninSettings, DeviceRequest, Standing
from sdc.schema import Host
from sdc.standing.assessment import standing_here
from sdc.standing.ledger import Announcement, Ledger, LedgerError, Origin, read_uuids, time_of
from sdc.tools import cli
from sdc.tools.commands.burnin import LedgerAccount
from sdc.verdict import Verdict
from tests.reports import make_finding, make_pair, make_report, put_report
from tests.storms import standing

CPU = {"platform": "cpu", "processor": "any", "cpu_threads": "1"}
FIRST, SECOND = "serial SN-host-0-0", "serial SN-host-0-1"


def test_histories() -> None:
    """No host passes that must not, and no failure is lost; `make storms STORMS=standing` plays five hundred."""
    tally = standing.run(15, 0)
    assert tally.wrong == []
    assert {*tally.seen} == {"PASS", "FAIL", "INCONCLUSIVE"}


class Desk:
    """A ledger with the host and clock of a test."""

    def __init__(self, path: Path) -> None:
        self.path, self.moment = path, Origin(
            written="2026-01-05T00:00:00+00:00", uptime=100.0, chassis=("c0", "c1"),
            host=Host(name="host-0", machine="m0", boot="b0", pid=1, process=0),
        )  # fmt: skip

    def open(self) -> Ledger:
        return Ledger(self.path, write=True, origin=lambda: self.moment)

    def burn_in(self, *broken: int, over: bool = True, file: Path | None = None, **fields: Any) -> None:
        findings = [make_finding(devices=(index,)) for index in broken]
        times = {"created": self.moment.written, "ended": self.moment.written}
        report: BurninResult = make_report(machine=self.moment.host.machine, findings=findings, **times | fields)
        with self.open() as ledger:
            ledger.begin("begun", simulated=report.simulated, level="quick", file=file)
            ledger.add(report, "result.json", begun="begun", ended=over)

    def standing(self, max_age: float | None = None) -> Standing:
        return standing_here(self.path, max_age, origin=lambda: self.moment)

    def code(self) -> int:
        return self.standing().verdict.code


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "state" / "ledger.sqlite")


def test_a_failure_stays_until_it_is_acknowledged(desk: Desk) -> None:
    desk.burn_in()
    assert (desk.code(), desk.standing().file) == (0, "result.json")
    desk.burn_in(1)
    parts = make_report().devices
    same = {name: lambda index, name=name: getattr(parts[index], name) for name in ("serial", "uuid")}
    for change in ({}, {"simulated": True}, {"level": "soak"}, {"host": "renamed"}):
        desk.burn_in(device=same, **change)
        found = desk.standing()
        assert (found.verdict, found.reason.startswith(f"{SECOND}: ")) == (Verdict.CORRUPT, True)
    with desk.open() as ledger:
        ledger.acknowledge([SECOND], "reseated", "me")
    assert desk.code() == 0  # the later passes count
    desk.burn_in(0)
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    assert "acknowledged, but it has not passed since" in desk.standing().reason
    with (
        pytest.raises(LedgerError, match="contains no device or test 'serial X'; it contains: serial SN"),
        desk.open() as ledger,
    ):
        ledger.acknowledge(["serial X"], "reseated", "me")
    with desk.open() as ledger:
        kinds = [entry.kind for entry in ledger.entries()]
        assert kinds.count("acknowledged") == 2


def test_a_device_that_left_is_forgotten_only_while_it_is_away(desk: Desk) -> None:
    desk.burn_in(0)
    replaced = {"serial": lambda index: f"SN-new-{index}", "uuid": lambda index: f"GPU-new-{index}"}
    desk.burn_in(device=replaced)
    assert desk.code() == 1  # nobody exchanges a device of a running host: its driver may report other numbers
    desk.moment.host.boot = "b1"
    desk.burn_in(device=replaced)
    assert desk.code() == 0
    desk.moment.host.boot = "b2"
    assert "may have returned since" in desk.standing().reason
    desk.burn_in(device=replaced)
    assert desk.code() == 0
    desk.moment.uuids = (make_report().devices[0].uuid or "",)
    assert desk.standing().reason.startswith(FIRST)
    assert desk.code() == 1
    desk.moment.uuids = ("GPU-unknown",)
    assert "uuid GPU-unknown of this host has no result" in desk.standing().reason
    desk.moment.uuids = ()
    desk.burn_in()
    assert desk.code() == 1  # it has returned, in another slot or not


def test_a_burn_in_that_leaves_no_result_is_no_pass(desk: Desk) -> None:
    desk.burn_in()
    with desk.open() as ledger:
        ledger.begin("rehearsal", simulated=True, level="quick")
    assert desk.code() == 0
    with desk.open() as ledger:
        ledger.begin("killed", simulated=False, level="quick")
    held = "from sdc.standing import Announcement; held = Announcement(Path(sys.argv[1]), 'killed'); print(); input()"
    words = [sys.executable, "-c", f"import sys; from pathlib import Path; {held}", str(desk.path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        assert "is under way (PID 1)" in desk.standing().reason
        process.kill()
    # Whatever process has this number now, perhaps in another container
    assert "left no result" in desk.standing().reason
    desk.burn_in(devices=1, device={"serial": FIRST.split()[1]})
    assert desk.code() == 3  # the other device may be the one that kills
    desk.burn_in()
    assert desk.code() == 0
    desk.burn_in(0, over=False)
    assert desk.code() == 1  # before it ends


def test_a_resumed_burn_in_that_runs_nothing_is_no_new_pass(desk: Desk) -> None:
    desk.burn_in()
    old = {"created": desk.moment.written, "ended": desk.moment.written}
    desk.moment.written, desk.moment.uptime = "2026-01-05T02:00:00+00:00", 7300.0
    desk.burn_in(**old)
    assert desk.standing(3600.0).verdict is Verdict.INCONCLUSIVE
    desk.burn_in(0)
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    desk.moment.written = "2026-01-05T02:10:00+00:00"
    for times in (old, {**old, "ended": desk.moment.written}):  # nothing ran, or the last of many rounds
        desk.burn_in(**times)
        assert desk.code() == 3
    assert "before the device differed" in desk.standing().reason
    desk.burn_in()
    assert desk.code() == 0


def test_a_pass_that_the_ledger_never_contained_is_none(desk: Desk) -> None:
    """Its disk was full when the burn-in ended, which was then resumed and ran nothing."""
    times = {"created": desk.moment.written, "ended": desk.moment.written}
    desk.moment.written = "2026-01-05T02:00:00+00:00"
    with pytest.raises(LedgerError, match="nothing has run since"):
        desk.burn_in(**times)
    assert desk.code() == 3


def test_a_result_from_the_future_is_no_new_pass(desk: Desk) -> None:
    """The clock was ahead; a burn-in of that time was resumed, and ran nothing."""
    future = {"created": "2026-02-05T00:00:00+00:00", "ended": "2026-02-05T00:05:00+00:00"}
    desk.burn_in(0)
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    with pytest.raises(LedgerError, match="nothing has run since"):
        desk.burn_in(**future)
    assert desk.code() == 3
    desk.burn_in(created=future["created"])  # and ran its last round
    assert desk.code() == 3
    desk.burn_in()
    assert desk.code() == 0


def test_a_burn_in_that_began_before_another_failed_clears_nothing(desk: Desk) -> None:
    """In another container, at the same time; whatever the clock does."""
    desk.burn_in()
    with desk.open() as ledger:
        ledger.begin("first", simulated=False, level="quick")
    desk.moment.written = "2026-01-04T00:00:00+00:00"
    desk.burn_in(0)
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    desk.moment.written = "2026-01-05T00:10:00+00:00"
    with desk.open() as ledger:
        times = {"created": "2026-01-05T00:00:00+00:00", "ended": desk.moment.written}
        ledger.add(make_report(machine="m0", **times), "result.json", begun="first")
    assert "before the device differed" in desk.standing().reason
    assert desk.code() == 3
    desk.burn_in()
    assert desk.code() == 0


def test_a_pass_of_fewer_devices_replaces_no_killed_burn_in(desk: Desk) -> None:
    desk.burn_in(devices=2)
    with desk.open() as ledger:
        ledger.begin("killed", simulated=False, level="quick")
        ledger.add(make_report(machine="m0", devices=4), "result.json", begun="killed", ended=False)
    desk.burn_in(devices=2)
    assert "left no result" in desk.standing().reason
    desk.burn_in(devices=4)
    assert desk.code() == 0
    with desk.open() as ledger:
        ledger.begin("killed", simulated=False, level="quick")
        ledger.add(make_report(machine="m0", devices=4), "result.json", begun="killed", ended=False)
        for _ in range(2):  # a device leaves once, however often a person says so
            ledger.acknowledge(["serial SN-host-0-3"], "sent back", "me", gone=True)
    desk.burn_in(devices=2)
    assert desk.code() == 3
    desk.burn_in(devices=3)
    assert desk.code() == 0


def test_a_failure_in_the_folder_of_a_killed_burn_in_counts(desk: Desk, tmp_path: Path) -> None:
    """The process was killed after it had written its result, and before it could add it to the ledger."""
    desk.burn_in()
    report = make_report(machine="m0", findings=[make_finding(devices=(0,))])
    path = put_report(tmp_path, report, "killed")
    with desk.open() as ledger:
        ledger.begin("killed", simulated=False, level="quick", file=path)
    found = desk.standing()
    assert (found.verdict, found.file) == (Verdict.CORRUPT, str(path))
    desk.burn_in()
    assert desk.standing().reason.startswith(f"{FIRST}: ")
    path.unlink()
    desk.burn_in()
    assert desk.code() == 1
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    desk.burn_in()
    assert desk.code() == 0
    path = put_report(tmp_path, report, "again")
    with desk.open() as ledger:
        ledger.begin("again", simulated=False, level="quick", file=path)
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")  # also if the ledger has no entry of it yet
    desk.burn_in()
    assert desk.code() == 0


@pytest.mark.parametrize(
    ("asked", "platform", "devices", "covers"),
    [
        (DeviceRequest("gpu", None), "gpu", 2, True),
        (DeviceRequest("gpu", None), "cpu", 2, False),
        (DeviceRequest("gpu", 4), "gpu", 2, False),
        (DeviceRequest("gpu", 4), "gpu", 4, True),
        (DeviceRequest(None, None), "gpu", 2, True),
        (DeviceRequest(None, None), "cpu", 2, False),  # the ledger contains accelerators
    ],
)
def test_a_burn_in_that_started_no_device_is_replaced_by_what_it_requested(
    desk: Desk, asked: DeviceRequest, platform: str, devices: int, covers: bool
) -> None:
    desk.burn_in()
    with desk.open() as ledger:
        ledger.begin("killed", simulated=False, level="quick", asked=asked)
    desk.burn_in(devices=devices, environment=CPU if platform == "cpu" else {})
    assert (desk.code() == 0) == covers
    with desk.open() as ledger, contextlib.suppress(LedgerError):
        ledger.acknowledge(["test killed"], "the driver was updated", "me")
    assert desk.code() == 0


def test_a_killed_burn_in_is_replaced_by_one_that_ran_the_same(desk: Desk) -> None:
    """By none of some families, and by none that was resumed and ran nothing."""
    desk.burn_in()
    old = {"created": desk.moment.written, "ended": desk.moment.written}
    desk.moment.written = "2026-01-05T02:00:00+00:00"

    def kill(*only: str) -> None:
        with desk.open() as ledger:
            ledger.begin("killed", simulated=False, level="quick", only=only)
            ledger.add(make_report(machine="m0"), begun="killed", ended=False)

    kill()
    desk.burn_in(**old)
    assert desk.code() == 3
    desk.burn_in(settings=BurninSettings(only=("matrix",)))
    assert desk.code() == 3
    desk.burn_in()
    assert desk.code() == 0
    kill("matrix", "memory")
    desk.burn_in(settings=BurninSettings(only=("matrix",)))
    assert desk.code() == 3
    desk.burn_in(settings=BurninSettings(only=("memory", "matrix")))
    assert desk.code() == 0


def test_a_result_of_a_killed_burn_in_that_cannot_be_read_is_not_forgotten(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its disk is not mounted: a later burn-in does not replace it."""
    path = put_report(tmp_path, make_report(machine="m0", findings=[make_finding(devices=(0,))]), "killed")
    with desk.open() as ledger:
        ledger.begin("killed", simulated=False, level="quick", file=path)
        ledger.add(make_report(machine="m0"), path, begun="killed", ended=False)
    away = path.parent.rename(tmp_path / "away")
    desk.burn_in()
    assert f"can be read in {path}" in desk.standing().reason
    away.rename(path.parent)
    assert desk.standing().reason.startswith(f"{FIRST}: ")
    assert cli.run(["fleet", "ledger", "--ledger", str(desk.path)]) == 0
    assert f"FAIL  {FIRST}" in capsys.readouterr().out.splitlines()[-1]
    path.write_text("x")
    desk.burn_in()
    assert "no result that can be read" in desk.standing().reason
    with desk.open() as ledger:
        ledger.acknowledge(["test killed"], "the disk is lost", "me")
    assert desk.code() == 0


def test_what_a_refused_burn_in_found_before_counts_once(desk: Desk, tmp_path: Path) -> None:
    """It was to be resumed, with other flags than before."""
    desk.burn_in()
    path = put_report(tmp_path, make_report(machine="m0", findings=[make_finding(devices=(0,))]), "resumed")

    def refuse() -> int:
        held = Announcement(desk.path, "resumed")
        with desk.open() as ledger:
            ledger.begin("resumed", simulated=False, level="quick", file=path)
            code = desk.code()
            ledger.refuse("resumed", "--rounds: other flags than before")
        held.end()
        return code

    assert refuse() == 1
    assert desk.code() == 1
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    desk.burn_in()
    assert refuse() == 3  # while it is under way
    assert desk.code() == 0


def test_the_dies_of_a_board_are_devices_of_their_own(desk: Desk) -> None:
    """They share its serial number."""
    board = {"serial": "BOARD", "uuid": lambda index: f"GPU-{index}"}
    desk.moment.uuids = ("GPU-0", "GPU-1")
    desk.burn_in(device=board)
    assert desk.code() == 0
    desk.burn_in(1, device=board)
    with desk.open() as ledger:
        ledger.acknowledge([str(name) for name, state in ledger.devices().items() if state.failed], "reseated", "me")
    desk.burn_in(devices=1, verdict=Verdict.CLEAN, device=board)
    assert "has not passed since" in desk.standing().reason
    desk.burn_in(device=board)
    assert desk.code() == 0


def test_a_serial_number_counts_more_than_a_slot(desk: Desk) -> None:
    """The device that differed was moved to the slot of one that has no number."""

    def cards(*serials: str | None) -> dict[str, Any]:
        return {"serial": lambda index: serials[index], "uuid": None}

    desk.burn_in(0, device=cards("S1", None))
    desk.moment.host.boot = "b1"
    desk.burn_in(device=cards("S2", "S1"))
    assert desk.standing().reason.startswith("serial S1: ")


def test_some_types_of_numbers_are_not_all(desk: Desk) -> None:
    desk.burn_in(0)
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    desk.burn_in(settings=BurninSettings(dtypes=("float32",)))
    assert "only in float32" in desk.standing().reason


def test_a_host_without_accelerators_may_test_its_processor(desk: Desk) -> None:
    """A first burn-in that requested nothing has found no accelerator."""
    bare = {name: lambda index: None for name in ("serial", "uuid", "bus")}
    with desk.open() as ledger:
        ledger.begin("first", simulated=False, level="quick", asked=DeviceRequest(None, None))
    desk.burn_in(kind="cpu", device=bare, environment=CPU)
    assert desk.code() == 0
    desk.burn_in(0, kind="Test Accelerator", device=bare)
    desk.burn_in(kind="cpu", device=bare, environment=CPU)
    assert desk.code() == 1  # an accelerator without any number is not device 0 of the processor


def test_a_pass_of_some_families_clears_no_difference(desk: Desk) -> None:
    desk.burn_in(0)
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    some = BurninSettings(only=("matrix",))
    desk.burn_in(settings=some)
    assert "has not passed since in all families, only in matrix" in desk.standing().reason
    desk.burn_in()
    assert desk.code() == 0
    desk.burn_in(devices=1, verdict=Verdict.CLEAN, settings=some)
    said = desk.standing().reason  # each device with what it passed
    assert f"{SECOND} of host-0 passed at level quick 0 s ago" in said
    assert f"{FIRST} of host-0 passed at level quick, only matrix 0 s ago" in said


def test_each_failure_has_its_sentence(desk: Desk) -> None:
    desk.burn_in(0)
    desk.burn_in(1)
    first, second = desk.standing().reason.split("; serial ")
    assert first.startswith(f"{SECOND}: host host-0, device 1 ")
    assert second.startswith(f"{FIRST.removeprefix('serial ')}: host host-0, device 0 ")


def test_devices_of_another_host_are_not_entered(desk: Desk) -> None:
    """The folder to be resumed was copied from there, and no device started here."""
    desk.burn_in()
    report = make_report(machine="m1", host="another", findings=[make_finding()])
    with desk.open() as ledger:
        ledger.begin("begun", simulated=False, level="quick")
        ledger.add(report, "result.json", begun="begun")
        assert [*ledger.devices()] == [FIRST, SECOND]
    assert "tested nothing" in desk.standing().reason


def test_a_pass_whose_beginning_is_not_in_the_ledger_does_not_count(desk: Desk) -> None:
    """The ledger was deleted while the burn-in ran."""
    with desk.open() as ledger:
        ledger.add(make_report(machine="m0"), "result.json", begun="begun")
    assert "does not contain the beginning" in desk.standing().reason
    desk.burn_in()
    assert desk.code() == 0


def test_a_burn_in_elsewhere_stays_under_way(desk: Desk) -> None:
    """In another container, with the same devices."""
    desk.burn_in()
    with desk.open() as ledger:
        ledger.begin("one", simulated=False, level="quick")
    held = Announcement(desk.path, "one")
    desk.burn_in()
    assert "is under way" in desk.standing().reason
    with pytest.raises(LedgerError, match="test one is under way"), desk.open() as ledger:
        ledger.acknowledge(["test one"], "of no importance", "me")
    Announcement(desk.path, "rehearsal").end()
    assert "is under way" in desk.standing().reason
    held.end()
    rehearsal = Announcement(desk.path, "rehearsal")
    assert "left no result" in desk.standing().reason
    rehearsal.end()
    assert not [*desk.path.parent.glob("*.running")]


def test_the_marks_of_killed_tests_are_deleted(desk: Desk) -> None:
    desk.burn_in()
    mark = desk.path.with_name("ledger.sqlite.killed.running")
    mark.touch()
    held = Announcement(desk.path, "one")
    Announcement(desk.path, "two").end()
    assert [*desk.path.parent.glob("*.running")] == [desk.path.with_name("ledger.sqlite.one.running")]
    held.end()


def test_root_has_a_ledger_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's burn-in does not pass a device that failed in a burn-in of a service."""
    root, mine = Desk(tmp_path / "system" / "ledger-m0.sqlite"), Desk(tmp_path / "home" / "ledger-m0.sqlite")
    monkeypatch.setattr("sdc.standing.ledger.SYSTEM", root.path.parent)
    root.burn_in(0)
    mine.burn_in()
    assert (mine.code(), mine.standing().reason.startswith(f"{FIRST}: ")) == (1, True)
    with root.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    with mine.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    for each in (root, mine):
        each.burn_in()
        assert each.code() == 0
    path = put_report(tmp_path, make_report(machine="m0", findings=[make_finding(devices=(1,))]), "killed")
    with root.open() as ledger:
        ledger.begin("killed", simulated=False, level="quick", file=path)
    assert mine.standing().reason.startswith(f"{SECOND}: ")
    monkeypatch.setattr("sdc.standing.ledger.SYSTEM", tmp_path / "nowhere")
    assert mine.code() == 0
    monkeypatch.setattr("sdc.standing.ledger.SYSTEM", tmp_path / ("x" * 300))  # as if it could not be listed
    assert "may contain failures" in mine.standing().reason


def test_a_difference_that_was_acknowledged_elsewhere_makes_older_passes_void(tmp_path: Path) -> None:
    first, second = (Desk(tmp_path / f"ledger-{name}.sqlite") for name in ("m0", "m1"))
    second.moment.host.machine = "m1"
    first.burn_in()
    first.moment.written = second.moment.written = "2026-01-06T00:00:00+00:00"
    second.burn_in(0, id="one")
    with second.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    assert "has not passed since" in first.standing().reason
    first.moment.written = second.moment.written = "2026-01-07T00:00:00+00:00"
    second.burn_in(0, id="one")  # the same burn-in was resumed, and found another difference
    with first.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    second.burn_in(0, id="one")
    assert first.code() == 1
    for each in (first, second):
        with each.open() as ledger:
            ledger.acknowledge([FIRST], "reseated", "me")
    second.burn_in()
    first.moment.written = second.moment.written = "2026-01-08T00:00:00+00:00"
    first.burn_in()
    assert first.code() == 0


def test_a_failure_may_use_the_reserve_of_an_earlier_burn_in(tmp_path: Path) -> None:
    """The ledger could not be used when the burn-in began, as on a full disk."""
    (path := tmp_path / "ledger.sqlite").mkdir()
    account = LedgerAccount(path)
    assert account.begin("quick", simulated=False, file=tmp_path / "result.json")
    (mark,) = tmp_path.glob("ledger.sqlite.*.running")
    assert mark.stat().st_blocks > 0
    account.add(make_report(findings=[make_finding(devices=(0,))]), None)
    assert mark.stat().st_blocks == 0
    assert "keep the host drained" in str(account.problem)


def test_a_burn_in_that_goes_on_after_an_acknowledgement_fails_again(desk: Desk) -> None:
    desk.burn_in(0, id="one")
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    desk.burn_in(0, id="one", over=False)
    desk.burn_in(0, id="one", over=False)
    assert desk.code() == 1
    with desk.open() as ledger:
        assert [entry.verdict for entry in ledger.entries()].count(Verdict.CORRUPT) == 2


def test_a_burn_in_without_devices_hides_no_doubt(desk: Desk) -> None:
    desk.burn_in()
    desk.burn_in(devices=0, sentences=("gpu was requested, but this host has cpu",))
    assert "tested nothing: gpu was requested" in desk.standing().reason
    desk.burn_in()
    assert desk.code() == 0
    with desk.open() as ledger:
        ledger.begin("again", simulated=False, level="quick")
        ledger.refuse("again", "--rounds: ...")
    assert desk.code() == 0


def test_a_failure_is_found_in_the_ledger_of_the_same_folder(tmp_path: Path) -> None:
    """After a new identity of the machine, or a move to another host."""
    first, second = (Desk(tmp_path / f"ledger-{name}.sqlite") for name in ("m0", "m1"))
    first.burn_in(0)
    second.moment.host.machine = "m1"
    assert second.standing().reason.startswith(FIRST)  # also before the new identity has a ledger, or a result in it
    with second.open() as ledger:
        ledger.begin("killed", simulated=False, level="quick")
    assert second.code() == 1
    second.moment.chassis = ("c2",)  # a ledger of another machine
    assert second.code() == 3
    second.moment.chassis = first.moment.chassis
    second.burn_in()
    assert second.standing().reason.startswith(FIRST)
    assert second.code() == 1
    with second.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    second.burn_in()
    assert second.code() == 0
    # The old identity returns after a failure under the new one, of which its own ledger contains nothing.
    with first.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    first.burn_in()
    assert first.code() == 0
    first.moment.written = second.moment.written = "2026-01-06T00:00:00+00:00"
    second.burn_in(1, id="another")
    assert first.standing().reason.startswith(SECOND)
    assert first.code() == 1
    with first.open() as ledger:
        ledger.acknowledge([SECOND], "reseated", "me")
    assert "has not passed since" in first.standing().reason
    first.burn_in()
    assert first.code() == 0
    second.path.write_bytes(b"x" * 9000)
    assert "another ledger of this folder may contain failures" in first.standing().reason
    assert first.code() == 3
    second.path.unlink()
    second.burn_in()
    shutil.copy(first.path, second.path)
    with pytest.raises(LedgerError, match="another machine; keep the host drained"):
        second.burn_in()


def test_a_link_beside_the_ledger_hides_no_failure(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ledger-m0.sqlite")
    desk.burn_in()
    (tmp_path / "ledger-m1.sqlite").symlink_to("nowhere")
    assert "another ledger of this folder may contain failures" in desk.standing().reason
    desk.burn_in(0)
    assert desk.code() == 1
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "reseated", "me")
    assert "has not passed since" in desk.standing().reason


def test_a_folder_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    for name in ("loop/x", "n" * 300):
        (tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to("loop")
        found = standing_here(tmp_path / name)
        assert found.verdict is Verdict.INCONCLUSIVE
        assert "cannot be used as a ledger" in found.reason


def test_a_device_without_a_number_is_known_by_its_machine(tmp_path: Path) -> None:
    """The identity of the machine is new, its mainboard is not."""
    bare = {"serial": lambda index: None, "uuid": lambda index: None}
    first, second = (Desk(tmp_path / f"ledger-{name}.sqlite") for name in ("m0", "m1"))
    first.burn_in(0, device=bare)
    second.moment.host.machine = "m1"
    second.burn_in(device=bare)
    assert second.code() == 1
    second.moment.chassis = ("c2",)
    second.path.unlink()
    second.burn_in(device=bare)
    assert second.code() == 0


def test_a_row_that_is_missing_is_damage(desk: Desk) -> None:
    """The device has left, so no other row names it."""
    desk.burn_in(0)
    desk.moment.host.boot = "b1"
    desk.burn_in(device={"serial": lambda index: f"SN-new-{index}", "uuid": lambda index: f"GPU-new-{index}"})
    assert desk.code() == 0
    for key in (FIRST, "host"):
        with contextlib.closing(sqlite3.connect(desk.path)) as base, base:
            base.execute("DELETE FROM states WHERE key = ?", (key,))
        assert "is damaged (a row of" in desk.standing().reason
        assert desk.code() == 3
        with pytest.raises(LedgerError, match="is damaged"):
            desk.burn_in()


def test_the_index_of_a_device_is_no_place(desk: Desk) -> None:
    """Another device may be the only visible one."""
    bare = {"bus": lambda index: None, "uuid": lambda index: None}
    desk.burn_in(0, device=bare)
    desk.burn_in(devices=1, device={**bare, "serial": lambda index: SECOND.split()[1]})
    assert desk.standing().reason.startswith(FIRST)


def test_space_is_reserved_for_a_failure(desk: Desk) -> None:
    desk.burn_in()
    held = Announcement(desk.path, "one")
    mark = desk.path.with_name("ledger.sqlite.one.running")
    assert mark.stat().st_blocks * 512 >= 100_000
    assert mark.stat().st_mode & 0o077 == 0  # others cannot hold the lock
    held.free()
    assert mark.stat().st_blocks == 0


@pytest.mark.parametrize(
    ("change", "max_age", "said"),
    [
        ({"written": "2026-01-05T01:00:00+00:00"}, 3600.0, None),
        ({"written": "2026-01-05T02:00:00+00:00"}, 3600.0, "its last result is 2 h old (PASS)"),
        ({"written": "2026-01-04T00:00:00+00:00"}, None, "dated in the future"),
        ({"uptime": 8000.0}, 3600.0, "its last result is 2 h old (PASS)"),  # the clock has gone back
        ({"boot": "b1"}, None, None),
        ({"boot": "b1", "chassis": ("c1", "c2")}, None, None),
        ({"boot": "b1", "chassis": ("c2", "c3")}, None, "was recorded on another machine"),
        ({"boot": "b1", "chassis": ()}, None, "was recorded on another machine"),  # nothing shows that it is this one
        ({"boot": None, "chassis": ()}, None, "make one readable"),
        ({"machine": "m1"}, None, "is the ledger of another machine"),
    ],
)
def test_a_pass_is_of_this_machine_and_not_too_old(
    desk: Desk, change: dict[str, Any], max_age: float | None, said: str | None
) -> None:
    desk.burn_in()
    for name, value in change.items():
        setattr(desk.moment.host if name in ("boot", "machine") else desk.moment, name, value)
    found = desk.standing(max_age)
    assert (found.verdict is Verdict.CLEAN) == (said is None)
    assert said is None or said in found.reason


def test_a_pass_before_the_clock_was_set_back_has_no_age(desk: Desk) -> None:
    """Later, and after a restart, its time looks like one of the past."""
    desk.moment.written = "2026-03-01T00:00:00+00:00"
    desk.burn_in()
    desk.moment.written = "2026-01-05T00:00:00+00:00"
    with desk.open() as ledger:
        ledger.begin("rehearsal", simulated=True, level="quick")
    desk.moment.written, desk.moment.host.boot = "2026-03-02T00:00:00+00:00", "b1"
    assert "the clock has been set back" in desk.standing().reason
    desk.burn_in()
    assert desk.code() == 0


def test_a_ledger_that_is_lost_damaged_or_none_is_no_pass(desk: Desk, tmp_path: Path) -> None:
    assert "there is no ledger" in desk.standing().reason
    desk.burn_in()
    content = desk.path.read_bytes()
    for damaged in (content[: len(content) // 2], content.replace(b"SN-host-0-1", b"SN-host-0-2"), b"", b"text" * 1000):
        desk.path.write_bytes(damaged)
        assert desk.code() == 3
    desk.path.unlink()
    with contextlib.closing(sqlite3.connect(desk.path)) as base:
        base.execute("CREATE TABLE other (x)")
    assert desk.code() == 3
    with pytest.raises(LedgerError, match="has tables of version"), desk.open():
        pass


def test_entries_stay(desk: Desk) -> None:
    """Only passes are folded; the last of each day remains."""
    for day in range(1, 29):
        for hour in (1, 2):
            desk.moment.written = f"2026-0{1 + day // 20}-{day:02}T0{hour}:00:00+00:00"
            desk.burn_in(*([0] if day == 1 and hour == 1 else []))
    desk.moment.written = "2026-05-01T00:00:00+00:00"
    desk.burn_in()
    with desk.open() as ledger:
        found = [entry for entry in ledger.entries() if entry.device == FIRST and entry.kind == "result"]
    assert [entry.verdict for entry in found[:2]] == ["corrupt", "clean"]
    assert len(found) == 1 + 28 + 1
    with contextlib.closing(sqlite3.connect(desk.path)) as base:
        for statement in ("UPDATE entries SET verdict = 'clean'", "DELETE FROM entries WHERE verdict = 'corrupt'"):
            with pytest.raises(sqlite3.IntegrityError, match="never"):
                base.execute(statement)


def test_what_the_kernel_lists(tmp_path: Path) -> None:
    for bus, uuid in (("0000:3b:00.0", "GPU-5b1c0e6a-0000-0000-0000-000000000001"), ("0000:5e:00.0", "GPU-????????")):
        folder = tmp_path / "proc" / "driver" / "nvidia" / "gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n")
    folder = tmp_path / "sys" / "bus" / "pci" / "drivers" / "amdgpu" / "0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "unique_id").write_text("c2c5b6a1d0e0f001\n")
    assert read_uuids(tmp_path) == ("GPU-5b1c0e6a-0000-0000-0000-000000000001", "c2c5b6a1d0e0f001")


def test_pairs_are_entries_too(desk: Desk) -> None:
    """A pair that differs counts against both of its hosts, and one that passes hides no failure."""

    def compare(verdict: Verdict, **changes: Any) -> None:
        with desk.open() as ledger:
            ledger.begin("begun", simulated=False, level="pair")
            pair = msgspec.structs.replace(make_pair(verdict, ("host-0", "b")), **changes)
            ledger.add(pair, "pair.json", begun="begun", process=0)

    with desk.open() as ledger:
        ledger.begin("begun", simulated=False, level="pair")
    assert "the pair that began at" in desk.standing().reason
    compare(Verdict.CLEAN)
    found = desk.standing()
    assert (found.verdict.code, "serial SN-host-0-0 of host-0 passed at level pair" in found.reason) == (0, True), found
    compare(Verdict.INCONCLUSIVE, stages=[])  # nothing ran
    assert desk.code() == 0
    compare(Verdict.INCONCLUSIVE)
    assert desk.code() == 3
    compare(Verdict.CORRUPT)
    compare(Verdict.CLEAN)
    assert (desk.code(), desk.standing().file) == (1, "pair.json")
    with desk.open() as ledger:
        ledger.acknowledge(["serial SN-host-0-0"], "replaced", "A. Person")
    compare(Verdict.CLEAN)
    assert desk.code() == 0
    compare(Verdict.CORRUPT, undecided=["b"])  # a majority agreed with this host
    assert (desk.code(), "another host differed in its last pair" in desk.standing().reason) == (3, True)


def test_the_clock_of_the_first_host_of_a_pair_may_be_slow(desk: Desk) -> None:
    for seconds, counts in ((10, True), (1000, False)):
        begin = time_of(desk.moment.written)
        ended = (begin - datetime.timedelta(seconds=seconds)).isoformat()
        with desk.open() as ledger:
            ledger.begin("begun", simulated=False, level="pair")
            pair = make_pair(Verdict.CLEAN, ("host-0", "b"))
            ledger.add(msgspec.structs.replace(pair, created=ended, ended=ended), "pair.json", begun="begun")
            *_, last = ledger.entries()
        assert (last.verdict is Verdict.CLEAN) == counts, seconds
    assert "the clocks of this host" in desk.standing().reason


@pytest.mark.parametrize("lost", ["nothing", "a part", "the folder", "rights"])
def test_what_one_process_of_a_killed_pair_has_written_counts(
    desk: Desk, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it cannot be read until after a burn-in."""

    def refuse(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", folder)

    folder, away = tmp_path / "pair", tmp_path / "away"
    folder.mkdir()
    desk.burn_in()
    with desk.open() as ledger:
        ledger.begin("pair", simulated=False, level="pair", file=folder / "pair.json")
    PAIR_FORMAT.write(folder / "pair-0.json", make_pair(Verdict.CORRUPT, ("host-0", "b")))
    shutil.copytree(folder, away)
    if lost == "a part":
        (folder / "pair-0.json").write_bytes((away / "pair-0.json").read_bytes()[:100])
    elif lost == "the folder":
        shutil.rmtree(folder)
    elif lost == "rights":
        monkeypatch.setattr("sdc.standing.ledger.os.listdir", refuse)
    for _ in range(2):
        found = desk.standing()
        assert (found.verdict.code, "no result that can be read" in found.reason) == (
            (1, False) if lost == "nothing" else (3, True)
        )
        desk.burn_in()
    monkeypatch.undo()
    shutil.copytree(away, folder, dirs_exist_ok=True)
    assert desk.code() == 1
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "replaced", "A. Person")
    desk.burn_in()
    assert desk.code() == 0


def test_a_burn_in_that_began_before_a_failure_in_another_ledger_clears_nothing(tmp_path: Path) -> None:
    mine, other = Desk(tmp_path / "ledger-a.sqlite"), Desk(tmp_path / "ledger-b.sqlite")
    mine.burn_in(0)  # a failure in this ledger, too
    with mine.open() as ledger:
        ledger.begin("begun", simulated=False, level="quick")
        begin = mine.moment.written
        other.moment.written = "2026-01-05T01:00:00+00:00"
        other.burn_in(0)
        mine.moment.written = "2026-01-05T02:00:00+00:00"
        report = make_report(machine="m0", created=begin, ended=mine.moment.written)
        ledger.add(report, begun="begun")
        ledger.acknowledge([FIRST], "reseated", "A. Person")
    assert "began before the device differed" in mine.standing().reason
    mine.burn_in()
    assert mine.code() == 0


def test_a_device_that_failed_is_not_excused(desk: Desk) -> None:
    """Neither by the UUID of a device that the ledger knows by its serial number, nor once it has left and returned."""
    uuid = f"uuid {make_report().devices[0].uuid}"
    desk.burn_in(0, devices=1)
    desk.moment.uuids = (make_report().devices[0].uuid or "",)
    with desk.open() as ledger:
        ledger.acknowledge([uuid], "seen", "A. Person")
    assert "has not passed since" in desk.standing().reason
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "returned", "A. Person", gone=True)
        ledger.acknowledge([uuid], "seen", "A. Person")
    assert (desk.code(), "remove it" in desk.standing().reason) == (3, True)
    desk.burn_in(devices=1, verdict=Verdict.CLEAN)
    assert desk.code() == 0
    desk.burn_in(0, devices=1)
    desk.burn_in(devices=1, verdict=Verdict.CLEAN)
    desk.moment.host.boot = "b1"
    desk.burn_in(devices=1, verdict=Verdict.CLEAN, device={"serial": lambda _: "SN-new", "uuid": None})
    with desk.open() as ledger:
        ledger.acknowledge([FIRST], "seen", "A. Person")
    assert f"{uuid} of this host has no result" in desk.standing().reason


def test_a_gpu_that_no_test_can_use_is_acknowledged(desk: Desk) -> None:
    """Until a test uses it after all, or a person says that it has left."""
    desk.burn_in()
    desk.moment.uuids = ("GPU-display",)
    assert (desk.code(), "if JAX cannot use it" in desk.standing().reason) == (3, True)
    with desk.open() as ledger:
        with pytest.raises(LedgerError, match="no device or test"):
            ledger.acknowledge(["uuid GPU-display"], "for the screen", "A. Person", gone=True)  # it is there
        for _ in range(2):
            ledger.acknowledge(["uuid GPU-display"], "for the screen", "A. Person")
    assert desk.code() == 0
    desk.moment.host.boot = "b1"
    assert desk.code() == 0
    desk.burn_in()
    assert desk.code() == 0
    with desk.open() as ledger:
        ledger.acknowledge(["uuid GPU-display"], "for the screen", "A. Person", gone=True)
    assert desk.code() == 3  # it has not left
    with desk.open() as ledger:
        ledger.acknowledge(["uuid GPU-display"], "for the screen", "A. Person")
    assert desk.code() == 0
    more = {"serial": None, "uuid": lambda index: f"GPU-{['a', 'b', 'display'][index]}"}
    desk.burn_in(2, devices=3, device=more)
    with desk.open() as ledger:
        for _ in range(2):
            ledger.acknowledge(["uuid GPU-display"], "for the screen", "A. Person")
    desk.moment.host.boot = "b2"
    desk.burn_in()
    assert "GPU-display: its failure was acknowledged, but it has not passed" in desk.standing().reason


def test_a_gpu_that_was_tested_after_all_is_acknowledged_no_more(desk: Desk) -> None:
    display = f"uuid {make_report(devices=3).devices[2].uuid}"
    desk.burn_in()
    desk.moment.uuids = (display.split()[1],)
    with desk.open() as ledger:
        ledger.acknowledge([display], "for the screen", "A. Person")
    desk.burn_in(devices=3, verdict=Verdict.INCONCLUSIVE)
    desk.moment.host.boot = "b1"
    other = {"serial": lambda index: f"SN-{index}" if index == 2 else f"SN-host-0-{index}", "uuid": None}
    desk.burn_in(devices=3, device=other)  # in its place; it may have another one
    assert f"{display} of this host has no result" in desk.standing().reason


def test_a_ledger_without_the_row_of_an_acknowledged_gpu_is_damaged(desk: Desk) -> None:
    desk.burn_in()
    desk.moment.uuids = ("GPU-display",)
    with desk.open() as ledger:
        ledger.acknowledge(["uuid GPU-display"], "for the screen", "A. Person")
    with contextlib.closing(sqlite3.connect(desk.path)) as base, base:
        base.execute("DELETE FROM states WHERE key = 'uuid GPU-display'")
    assert "missing or old" in desk.standing().reason
