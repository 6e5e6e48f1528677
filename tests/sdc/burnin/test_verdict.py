"""What follows from what was seen, path by path, with results written by hand."""

import math
from collections import Counter
from collections.abc import Sequence

import jax
import pytest

from sdc.burnin.evidence import Finding
from sdc.burnin.host import Element, Elements
from sdc.burnin.observed import Ended, Result
from sdc.burnin.pace import throughputs
from sdc.burnin.programs import Checks
from sdc.burnin.tally import STEPS, Tally
from sdc.burnin.verdict import judge
from sdc.burnin.workload import Workload

CHECKED = Checks(800, 0, 0)


def tally(
    *, seconds: Sequence[float] = (1.0,) * 10, voted: int = 10, golden: int = 0, checks: Checks = CHECKED
) -> Tally:
    """Ten runs of a hundred elements."""
    times = Counter(round(math.log2(each) * STEPS) for each in seconds)
    return Tally(
        runs=10,
        elements=1000,
        seconds=sum(seconds),
        best=min(seconds),
        repeated=9,
        voted=voted,
        referred=10,
        golden=golden,
        checks=checks,
        baseline="a" * 16,
        times=times,
    )


def result(
    workloads: list[Workload], devices: list[jax.Device], *, accept: tuple[str, ...] = (), **made: Tally
) -> Result:
    """Of the devices `d0`, `d1` and so on of each workload; the others are healthy."""
    found = Result(workloads, devices, accept, host="gpu-17", rounds=10)
    for workload in workloads:
        for device in range(len(devices)):
            found.tallies[workload.name, device] = made.get(f"d{device}") or tally()
    return found


@pytest.fixture
def pair(few: list[Workload]) -> list[Workload]:
    return few[:2]


def test_pass_says_what_was_checked(pair: list[Workload], devices: list[jax.Device]) -> None:
    verdict = judge(result(pair, devices))
    assert (verdict.word, verdict.code, verdict.kinds, verdict.simulated) == ("PASS", 0, ("repeat", "vote"), False)
    assert verdict.checked.workloads == 2
    assert verdict.checked.elements == dict.fromkeys(range(4), 2000)
    assert verdict.checked.runs == dict.fromkeys(range(4), 20)
    assert verdict.checked.seconds == dict.fromkeys(range(4), 20.0)
    assert verdict.checked.rate == pytest.approx(3 / 2000, rel=2e-3)  # the rule of three
    assert verdict.sentences[0].startswith("2 workloads on 4 devices, at least 2e+03 elements in 20 runs of each")
    assert "above a rate of 0.0015 would have been seen with 95 %" in verdict.sentences[0]
    assert "share one processor" in verdict.sentences[1]
    assert str(verdict).startswith("PASS (repeat, vote)\n2 workloads")


def test_the_device_that_was_checked_least_decides(pair: list[Workload], devices: list[jax.Device]) -> None:
    least = tally()
    least.elements = 10
    assert judge(result(pair, devices, d3=least)).checked.rate == pytest.approx(3 / 20, rel=2e-3)


def test_a_difference_fails_whatever_else_there_is(pair: list[Workload], devices: list[jax.Device]) -> None:
    seen = result(pair, devices, accept=("repeat",))
    first = Element("", 5, "3f800000", "3f800001", "1.0", "1.0000001")
    elements = Elements(4, 9_000_000_000, (first,), 1e-7, 1e-7, 0)
    seen.findings.append(
        Finding(pair[0].name, (3,), 7, ("vote", "repeat"), "transient", "b", "a", elements, Checks(8, 1, 1), 0)
    )
    seen.ended.append(Ended(pair[1].name, 0, 8, "RuntimeError: gone"))
    described = [{"host": "gpu-17", "serial": str(1000 + index)} for index in range(4)]
    verdict = judge(seen, described)
    assert (verdict.word, verdict.code, verdict.kinds) == ("FAIL", 1, ("vote", "repeat"))
    assert verdict.sentences[0] == (
        f"host gpu-17, device 3 (serial 1003), {pair[0].name}: 4 of 9e+09 elements, transient, "
        "seen by vote, repeat, checksums confirm 1 rows"
    )
    assert "ended in round 8: RuntimeError: gone" in verdict.sentences[1]


def test_simulations_say_so(pair: list[Workload], devices: list[jax.Device]) -> None:
    seen = result(pair, devices)
    seen.simulated = ("bitflip,rate=0.1",)
    verdict = judge(seen)
    assert verdict.simulated
    assert str(verdict).startswith("SIMULATION: PASS")


def test_more_differences_than_findings_are_counted(pair: list[Workload], devices: list[jax.Device]) -> None:
    seen = result(pair, devices)
    seen.tallies[pair[0].name, 1].differences = 9
    seen.findings.append(Finding(pair[0].name, (1,), 0, ("vote",), "persistent", "b", "a", None, CHECKED, 0, "why"))
    verdict = judge(seen)
    assert verdict.sentences[0].endswith("persistent, seen by vote, why")
    assert verdict.sentences[1] == f"host gpu-17, device 1, {pair[0].name}: differences in 9 of 10 runs"


def test_nothing_is_clean_by_default(pair: list[Workload], devices: list[jax.Device]) -> None:
    nothing = judge(Result(pair, devices, host="gpu-17"))
    assert (nothing.word, nothing.code, nothing.kinds) == ("INCONCLUSIVE", 3, ())
    assert nothing.sentences[0] == "nothing was checked"
    assert nothing.checked.rate == 1.0
    assert judge(Result([], devices, accept=("repeat",))).word == "INCONCLUSIVE"

    missing = result(pair, devices)
    del missing.tallies[pair[1].name, 2]
    verdict = judge(missing)
    assert (verdict.word, verdict.sentences[0]) == ("INCONCLUSIVE", f"{pair[1].name} on device 2 did not run")

    stopped = result(pair, devices)
    stopped.stopped = True
    assert judge(stopped).sentences[0] == "stopped after 10 rounds"
    assert judge(stopped).code == 3


def test_one_device(pair: list[Workload], devices: list[jax.Device]) -> None:
    alone = {"d0": tally(voted=0)}
    verdict = judge(result(pair, devices[:1], **alone))
    assert (verdict.word, verdict.kinds) == ("INCONCLUSIVE", ("repeat",))
    assert verdict.sentences[0] == "repeat only: blind to faults that repeat themselves"
    assert judge(result(pair, devices[:1], accept=("repeat",), **alone)).word == "PASS"
    verdict = judge(result(pair, devices[:1], d0=tally(voted=0, golden=10)))
    assert (verdict.word, verdict.kinds) == ("PASS", ("repeat", "golden"))
    # One of two workloads without a record: what covers all of them is repetition.
    half = result(pair, devices[:1], d0=tally(voted=0, golden=10))
    half.tallies[pair[1].name, 0] = tally(voted=0)
    assert judge(half).kinds == ("repeat",)
    assert judge(half).word == "INCONCLUSIVE"


def test_a_device_of_a_kind_of_its_own_has_nobody_to_vote_with(pair: list[Workload], devices: list[jax.Device]) -> None:
    verdict = judge(result(pair, devices, d1=tally(voted=0)))
    assert (verdict.word, verdict.kinds) == ("INCONCLUSIVE", ("repeat",))


def test_time_at_load_of_a_slow_device_is_void(
    pair: list[Workload], devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = [1.0] + [3.0] * 9
    seen = result(pair, devices, d2=tally(seconds=slower))
    assert judge(seen).word == "PASS"  # as simulated devices slow each other down
    monkeypatch.setattr("sdc.burnin.pace.shares_processor", lambda result: False)
    pace = {(each.workload, each.device): each for each in throughputs(seen)}
    slow = pace[pair[0].name, 2]
    assert slow.void
    assert slow.share is not None
    assert slow.share == pytest.approx(1 / 3, rel=0.05)  # times are known to 4 %
    assert slow.rate == pytest.approx(pair[0].work / 3, rel=0.05)
    assert slow.best == pair[0].work
    assert not pace[pair[0].name, 1].void
    alone = result(pair, devices[:1], d0=tally(seconds=slower))  # which has its own best run to be compared with
    assert all(each.void for each in throughputs(alone))
    verdict = judge(seen)
    assert (verdict.word, verdict.code) == ("INCONCLUSIVE", 3)
    assert "device 2" in verdict.sentences[0]
    assert f"throttled, {slow.share:.0%} of what it should reach; 28 s at load are void" in verdict.sentences[0]
    assert verdict.checked.seconds[2] == 0
    assert verdict.checked.elements[2] == 0
    assert verdict.checked.elements[1] == 2000


def test_a_device_that_was_slow_all_the_time_is_seen_by_the_others(
    pair: list[Workload], devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdc.burnin.pace.shares_processor", lambda result: False)
    always = result(pair, devices, d0=tally(seconds=[4.0] * 10))
    assert {each.device for each in throughputs(always) if each.void} == {0}
    alone = result(pair, devices[:1], d0=tally(seconds=[4.0] * 10))
    assert not any(each.void for each in throughputs(alone))
    short = result(pair, devices, d0=tally(seconds=[1e-3] * 10), d1=tally(seconds=[1e-4] * 10))
    assert {each.share for each in throughputs(short) if each.device < 2} == {None}


def test_flags_that_are_not_confirmed(pair: list[Workload], devices: list[jax.Device]) -> None:
    flagged = Checks(800, 10, 0)
    one = judge(result(pair, devices, d1=tally(checks=flagged)))
    assert one.word == "INCONCLUSIVE"
    assert "device 1" in one.sentences[0]
    assert "checksums flag 1 rows a run" in one.sentences[0]
    # All devices flag as many: the bound is at fault, and not the hardware.
    alike = {f"d{device}": tally(checks=flagged) for device in range(4)}
    assert judge(result(pair, devices, **alike)).word == "PASS"
    alone = judge(result(pair, devices[:1], d0=tally(checks=flagged, golden=10)))
    assert alone.word == "INCONCLUSIVE"


def test_the_median_time() -> None:
    assert math.isnan(Tally().median())
    assert tally(seconds=[0.5] * 4 + [8.0] * 6).median() == 8.0
    assert tally(seconds=[0.5] * 6 + [8.0] * 4).median() == 0.5
