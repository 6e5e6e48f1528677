"""The ledger: short tests add up, each of them once, whoever writes at the same time."""

import math
import multiprocessing
from pathlib import Path

import pytest

from sdc.analysis.fleet.collection import Collection, HostResult
from sdc.analysis.fleet.fleet_summary import Moved, summarize_results
from sdc.analysis.fleet.ledger import Account, Accusation, FleetLedger, enter, limits, read_ledger, update_ledger
from sdc.analysis.fleet.suspects import find_suspects, vote
from sdc.records.format import RecordError
from sdc.records.lock import Lock, RecordBusy
from tests.reports import DAY, WORKLOADS, make_finding, make_report, put_report

from .test_majority import reduced, wrong

NEXT_DAY = DAY.replace("-05T", "-06T")
ELEMENTS, SECONDS = 3 * 1000, 3 * 2.0
"""Of a device in a result."""


def add(path: Path, results: list[HostResult]) -> tuple[FleetLedger, tuple[object, ...]]:
    ledger, added = update_ledger(path, results, vote(results))
    return ledger, (added.added, added.known, len(added.changed), added.foreign)


def test_short_tests_add_up_and_count_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    days = [reduced(make_report("a", created=day), make_report("b", created=day)) for day in (DAY, NEXT_DAY)]
    assert add(path, days[0])[1] == (2, 0, 0, 0)
    before = path.read_bytes()
    assert add(path, days[0])[1] == (0, 2, 0, 0)
    assert path.read_bytes().partition(b"burn_ins")[2] == before.partition(b"burn_ins")[2]
    ledger, counts = add(path, [*days[0], *days[1]])
    assert counts == (2, 2, 0, 0)
    assert ledger == read_ledger(path)
    account = ledger.devices["serial SN-a-1"]
    assert (account.burn_ins, account.runs, account.elements, account.seconds) == (2, 18, 2 * ELEMENTS, 2 * SECONDS)
    assert [(place.host, place.first, place.last) for place in account.places] == [("a", DAY, NEXT_DAY)]
    said = limits(account)
    assert said.element_rate == pytest.approx(-math.log(0.05) / (2 * ELEMENTS / 3))  # of one family of three
    assert said.interval == pytest.approx(2 * SECONDS / -math.log(0.05))
    assert (said.run_rate, said.mean_interval) == (None, None)
    assert [each.name for each in tmp_path.iterdir()] == ["ledger.json"]


def test_limits_where_something_was_seen() -> None:
    """Against the textbook: two of 100 runs (Clopper and Pearson: 0.243 and 7.038 %), two events (Garwood: 0.242 and
    7.225)."""
    seen = Accusation(created=DAY, kinds=["repeat"], alone=True, wrong_runs=2)
    said = limits(Account(kind="x", runs=100, elements=10**6, seconds=1000.0, accused={"id": seen}))
    assert said.run_rate == pytest.approx((0.002431, 0.07038), rel=1e-3)
    assert said.mean_interval == pytest.approx((1000 / 7.225, 1000 / 0.2422), rel=1e-3)
    assert (said.element_rate, said.interval) == (None, None)
    assert limits(Account(kind="x")) == (None, None, None, None)


def test_a_device_that_moves_takes_its_past_along(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    serial = {"serial": lambda i: f"S{i}"}
    finding = make_finding(devices=[1], kinds=["reference"])
    add(path, reduced(make_report("old", device=serial, findings=[finding])))
    later = reduced(make_report("new", device=serial, created=NEXT_DAY))
    ledger, _ = add(path, later)
    assert [place.host for place in ledger.devices["serial S1"].places] == ["old", "new"]
    summary = summarize_results(Collection(tuple(later)), ledger=ledger)
    assert Moved(identity="serial S1", hosts=["old", "new"]) in summary.moved
    assert summary.suspects == []
    (watched,) = [each for each in summary.watch if each.identity == "serial S1"]
    assert watched.reason == f"differed in 1 earlier burn-in according to the ledger, most recently on {DAY}"


def test_what_was_seen_before_makes_a_suspect_surer(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    others = [make_report(f"gpu-{n}") for n in range(3)]
    add(path, first := reduced(*others, make_report("x", digests=wrong("x"))))
    second = reduced(*others, make_report("x", digests=wrong("x"), created=NEXT_DAY))
    ledger, _ = add(path, second)
    alone = find_suspects(first, vote(first))
    assert [each.confidence for each in alone] == ["probable"]
    summary = summarize_results(Collection(tuple(second)), ledger=ledger)
    (row,) = summary.suspects
    assert (row.confidence, row.burn_ins, row.first, row.last) == ("confirmed", 2, DAY, NEXT_DAY)


def test_other_hosts_may_accuse_later(tmp_path: Path) -> None:
    """A burn-in that counts already adds nothing, but what more hosts say of it."""
    path = tmp_path / "ledger.json"
    lonely = reduced(make_report("x", digests=wrong("x")))
    ledger, _ = add(path, lonely)
    assert not ledger.devices["serial SN-x-1"].accused
    together = [*lonely, *reduced(*(make_report(f"gpu-{n}") for n in range(3)))]
    ledger, counts = add(path, together)
    assert counts == (3, 1, 0, 0)
    account = ledger.devices["serial SN-x-1"]
    assert (account.burn_ins, account.elements) == (1, ELEMENTS)
    (accused,) = account.accused.values()
    assert (accused.kinds, accused.wrong_runs, accused.alone) == (["fleet vote"], 3, True)
    assert add(path, together)[0].devices["serial SN-x-1"] == account


def test_a_burn_in_that_went_on_is_reported_and_kept_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    add(path, reduced(make_report("a", id="one")))
    ledger, counts = add(path, reduced(make_report("a", id="one", runs=300, elements=10**6, ended=NEXT_DAY)))
    assert counts == (0, 1, 1, 0)
    assert ledger.devices["serial SN-a-0"].elements == ELEMENTS


def test_simulations_have_a_ledger_of_their_own(tmp_path: Path) -> None:
    real, played = make_report("a"), make_report("s", simulated=True)
    ledger, counts = add(tmp_path / "real.json", reduced(real, played))
    assert (ledger.simulated, counts) == (False, (1, 0, 0, 1))
    assert not any("SN-s" in name for name in ledger.devices)
    ledger, _ = add(tmp_path / "played.json", reduced(played))
    assert ledger.simulated
    assert add(tmp_path / "played.json", reduced(real))[1] == (0, 0, 0, 1)


def test_a_damaged_ledger_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    results = reduced(make_report("a"))
    add(path, results)
    whole = path.read_bytes()
    for content, problem in (
        (whole.replace(b'"elements": 3000', b'"elements": 9000', 1), "its checksum is wrong"),
        (whole[:-40], "damaged"),
        (whole[: whole.index(b',\n "checksum"')] + b"\n}\n", "no checksum"),
        (put_report(tmp_path, make_report("a")).read_bytes(), "not a ledger of a fleet"),
    ):
        path.write_bytes(content)
        with pytest.raises(RecordError, match=problem):
            add(path, results)
        assert path.read_bytes() == content


def _write(path: Path, number: int) -> None:
    results = reduced(*(make_report(f"host-{number}-{each}", devices=1, workloads=WORKLOADS[:1]) for each in range(4)))
    for result in results:
        update_ledger(path, [result], vote([result]))


def test_several_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=_write, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    ledger = read_ledger(path)
    assert ledger is not None
    assert (len(ledger.burn_ins), len(ledger.devices)) == (12, 12)
    assert [each.name for each in tmp_path.iterdir()] == ["ledger.json"]


def test_a_writer_that_goes_on_is_waited_for_and_then_reported(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    results = reduced(make_report("a"))
    lock = Lock(tmp_path, "ledger.json.lock")
    with pytest.raises(RecordBusy, match="is being written by another process"):
        update_ledger(path, results, vote(results), patience=0.1)
    assert not path.exists()
    lock.release()
    assert update_ledger(path, results, vote(results))[1].added == 1


def test_entering_is_what_the_file_holds(tmp_path: Path) -> None:
    results = reduced(make_report("a", findings=[make_finding()]), make_report("b"))
    ledger = FleetLedger()
    enter(ledger, results, vote(results))
    stored, _ = add(tmp_path / "ledger.json", results)
    assert (stored.devices, stored.burn_ins) == (ledger.devices, ledger.burn_ins)
