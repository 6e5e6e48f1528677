"""What follows from what was seen, path by path, with results written by hand."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import jax
import msgspec
import pytest

from sdc.burnin.judgement import judge
from sdc.burnin.results import ON_REQUEST, BurninResult, BurninSettings, Element, Elements, Ended, Finding, Tally
from sdc.burnin.rounds import median_of, planned_result, step_of
from sdc.burnin.workloads.workload import BurninWorkload
from sdc.schema import Host


def tally(*, seconds: Sequence[float] = (1.0,) * 10, voted: int = 10, golden: int = 0, flagged: int = 0) -> Tally:
    """Ten runs of a hundred elements."""
    return Tally(
        workload="",
        device=0,
        family="",
        work=0.0,
        runs=10,
        elements=1000,
        seconds=sum(seconds),
        median=median_of(Counter(map(step_of, seconds))),
        fastest=min(seconds),
        repeated=9,
        voted=voted,
        referred=10,
        golden=golden,
        checked=800,
        flagged=flagged,
        digest="a" * 16,
    )


def result(
    workloads: list[BurninWorkload], devices: list[jax.Device], *, accept: tuple[str, ...] = (), **made: Tally
) -> BurninResult:
    """Of the devices `d0`, `d1` and so on of each workload; the others are healthy."""
    found = planned(workloads, devices, accept=tuple(accept))
    found.rounds = 10
    for number, row in enumerate(found.workloads):
        counts = made.get(f"d{row.device}") or tally()
        facts = {name: getattr(row, name) for name in ("workload", "device", "family", "work", "alike")}
        found.workloads[number] = msgspec.structs.replace(counts, **facts)
    return found


def planned(workloads: list[BurninWorkload], devices: list[jax.Device], **settings: tuple[str, ...]) -> BurninResult:
    host = Host(name="gpu-17")
    return planned_result(workloads, devices, host=host, settings=BurninSettings(**settings))  # type: ignore[arg-type]


@pytest.fixture
def pair(few: list[BurninWorkload]) -> list[BurninWorkload]:
    return few[:2]


def test_pass_says_what_was_checked(pair: list[BurninWorkload], devices: list[jax.Device]) -> None:
    judged = judge(result(pair, devices))
    assert (judged.verdict.acceptance, judged.verdict.code, judged.evidence, judged.simulated) == (
        "PASS",
        0,
        ("repeat", "vote"),
        False,
    )
    assert [device.elements for device in judged.devices] == [2000] * 4
    assert [device.runs for device in judged.devices] == [20] * 4
    assert [device.seconds for device in judged.devices] == [20.0] * 4
    assert judged.devices[0].excluded_rate == pytest.approx(3 / 1000, rel=2e-3)  # the rule of three, in each family
    assert judged.devices[0].least == 1000
    assert judged.sentences[0].startswith(
        "no difference was found in 2 workloads on 4 devices (at least 2e+03 elements in 20 runs per device)"
    )
    assert "at a rate above 0.003 per element would have been detected with 95 %" in judged.sentences[0]
    assert "share one processor" in judged.sentences[1]
    assert judged.headline == "PASS (repeat, vote)"


def test_the_device_that_was_checked_least_decides(pair: list[BurninWorkload], devices: list[jax.Device]) -> None:
    least = tally()
    least.elements = 10
    judged = judge(result(pair, devices, d3=least))
    assert max(device.excluded_rate for device in judged.devices) == pytest.approx(3 / 10, rel=2e-3)
    assert "at a rate above 0.3 per element would" in judged.sentences[0]


def test_the_family_that_was_checked_least_decides(pair: list[BurninWorkload], devices: list[jax.Device]) -> None:
    seen = result(pair, devices)
    for row in seen.workloads:
        if row.workload == pair[0].name:
            row.elements = 10**9
    judged = judge(seen)
    assert {(device.weakest, device.least) for device in judged.devices} == {(pair[1].family, 1000)}
    assert judged.devices[0].excluded_rate == pytest.approx(3 / 1000, rel=2e-3)
    assert f"(the one checked least: {pair[1].family})" in judged.sentences[0]
    # Elements that the device reads as zeros are none.
    for row in seen.workloads:
        row.zeros = row.workload == pair[0].name and row.device == 2
    judged = judge(seen)
    assert (judged.devices[2].weakest, judged.devices[2].excluded_rate) == (pair[0].family, 1.0)
    assert judged.devices[2].elements == 1000
    of_zeros = sum(row.seconds for row in seen.workloads if row.zeros)
    assert of_zeros > 0
    assert judged.devices[2].excluded_interval == pytest.approx((judged.devices[2].seconds - of_zeros) / 3, rel=2e-3)


def test_a_difference_fails_whatever_else_there_is(pair: list[BurninWorkload], devices: list[jax.Device]) -> None:
    seen = result(pair, devices, accept=("repeat",))
    first = Element(output="", index=5, old="3f800000", new="3f800001", expected="1.0", found="1.0000001")
    elements = Elements(differing=4, total=9_000_000_000, first=(first,), largest=1e-7, relative=1e-7, nonfinite=0)
    seen.findings.append(
        Finding(
            workload=pair[0].name, devices=(3,), round=7, kinds=("vote", "repeat"), persistence="transient",
            digest="b", expected="a", elements=elements, confirmed=1,
        )
    )  # fmt: skip
    seen.unfinished.append(Ended(workload=pair[1].name, device=0, round=8, reason="RuntimeError: gone"))
    for device in seen.devices:
        device.serial = str(1000 + device.index)
    judged = judge(seen)
    assert (judged.verdict.acceptance, judged.verdict.code, judged.evidence) == ("FAIL", 1, ("vote", "repeat"))
    assert judged.sentences[0] == (
        f"host gpu-17, device 3 (serial 1003), {pair[0].name}: 4 of 9e+09 elements, transient, "
        "found by vote, repeat, checksums confirm 1 wrong rows"
    )
    assert "ended in round 8: RuntimeError: gone" in judged.sentences[1]


def test_simulations_say_so(pair: list[BurninWorkload], devices: list[jax.Device]) -> None:
    seen = result(pair, devices)
    seen.settings = dataclasses.replace(seen.settings, faults=("bitflip,rate=0.1",))
    judged = judge(seen)
    assert judged.simulated
    assert judged.headline.startswith("SIMULATION: PASS")


def test_more_differences_than_findings_are_counted(pair: list[BurninWorkload], devices: list[jax.Device]) -> None:
    seen = result(pair, devices)
    seen.tallies[pair[0].name, 1].differences = 9
    seen.findings.append(
        Finding(
            workload=pair[0].name, devices=(1,), round=0, kinds=("vote",), persistence="persistent", digest="b",
            expected="a", note="why",
        )
    )  # fmt: skip
    judged = judge(seen)
    assert judged.sentences[0].endswith("persistent, found by vote, why")
    assert judged.sentences[1] == f"host gpu-17, device 1, {pair[0].name}: differences in 9 of 10 runs"


def test_nothing_is_clean_by_default(pair: list[BurninWorkload], devices: list[jax.Device]) -> None:
    nothing = judge(planned(pair, devices))
    assert (nothing.verdict.acceptance, nothing.verdict.code, nothing.evidence) == ("INCONCLUSIVE", 3, ())
    assert nothing.sentences[0] == "nothing was checked"
    assert {device.excluded_rate for device in nothing.devices} == {1.0}
    assert judge(planned([], devices, accept=("repeat",))).verdict.acceptance == "INCONCLUSIVE"

    missing = result(pair, devices)
    missing.tallies[pair[1].name, 2].runs = 0
    judged = judge(missing)
    assert (judged.verdict.acceptance, judged.sentences[0]) == (
        "INCONCLUSIVE",
        f"{pair[1].name} on device 2 did not run",
    )

    stopped = result(pair, devices)
    stopped.stopped = ON_REQUEST
    assert judge(stopped).sentences[0] == "stopped after 10 rounds"
    assert judge(stopped).verdict.code == 3


def test_one_device(pair: list[BurninWorkload], devices: list[jax.Device]) -> None:
    alone = {"d0": tally(voted=0)}
    judged = judge(result(pair, devices[:1], **alone))
    assert (judged.verdict.acceptance, judged.evidence) == ("INCONCLUSIVE", ("repeat",))
    assert judged.sentences[0] == "the only evidence is repetition, which cannot detect faults that repeat themselves"
    assert judge(result(pair, devices[:1], accept=("repeat",), **alone)).verdict.acceptance == "PASS"
    judged = judge(result(pair, devices[:1], d0=tally(voted=0, golden=10)))
    assert (judged.verdict.acceptance, judged.evidence) == ("PASS", ("repeat", "golden"))
    # One of two workloads without a record: what covers all of them is repetition.
    half = result(pair, devices[:1], d0=tally(voted=0, golden=10))
    half.tallies[pair[1].name, 0].golden = 0
    assert judge(half).evidence == ("repeat",)
    assert judge(half).verdict.acceptance == "INCONCLUSIVE"


def test_a_device_of_a_kind_of_its_own_has_nobody_to_vote_with(
    pair: list[BurninWorkload], devices: list[jax.Device]
) -> None:
    judged = judge(result(pair, devices, d1=tally(voted=0)))
    assert (judged.verdict.acceptance, judged.evidence) == ("INCONCLUSIVE", ("repeat",))


def test_time_at_load_of_a_slow_device_is_void(
    pair: list[BurninWorkload], devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = [1.0] + [3.0] * 9
    seen = result(pair, devices, d2=tally(seconds=slower))
    assert judge(seen).verdict.acceptance == "PASS"  # as simulated devices slow each other down
    monkeypatch.setattr("sdc.burnin.judgement.shares_processor", lambda result: False)
    pace = judge(seen).tallies
    slow = pace[pair[0].name, 2]
    assert slow.void
    assert slow.share is not None
    assert slow.share == pytest.approx(1 / 3, rel=0.05)  # times are known to 4 %
    assert slow.rate == pytest.approx(pair[0].work / 3, rel=0.05)
    assert not pace[pair[0].name, 1].void
    alone = result(pair, devices[:1], d0=tally(seconds=slower))  # which has its own best run to be compared with
    assert all(each.void for each in judge(alone).workloads)
    judged = judge(seen)
    assert (judged.verdict.acceptance, judged.verdict.code) == ("INCONCLUSIVE", 3)
    assert "device 2" in judged.sentences[0]
    assert (
        f"throttled to {slow.share:.0%} of the expected throughput, so 28 s under load are void" in judged.sentences[0]
    )
    assert (judged.devices[2].seconds, judged.devices[2].elements) == (0, 0)
    assert judged.devices[1].elements == 2000


def test_a_device_that_was_slow_all_the_time_is_seen_by_the_others(
    pair: list[BurninWorkload], devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdc.burnin.judgement.shares_processor", lambda result: False)
    always = result(pair, devices, d0=tally(seconds=[4.0] * 10))
    assert {each.device for each in judge(always).workloads if each.void} == {0}
    alone = result(pair, devices[:1], d0=tally(seconds=[4.0] * 10))
    assert not any(each.void for each in judge(alone).workloads)
    short = result(pair, devices, d0=tally(seconds=[1e-3] * 10), d1=tally(seconds=[1e-4] * 10))
    assert {each.share for each in judge(short).workloads if each.device < 2} == {None}


def test_flags_that_are_not_confirmed(pair: list[BurninWorkload], devices: list[jax.Device]) -> None:
    one = judge(result(pair, devices, d1=tally(flagged=10)))
    assert one.verdict.acceptance == "INCONCLUSIVE"
    assert "device 1" in one.sentences[0]
    assert "checksums flag 1 rows per run" in one.sentences[0]
    # All devices flag as many: the bound is at fault, and not the hardware.
    alike = {f"d{device}": tally(flagged=10) for device in range(4)}
    assert judge(result(pair, devices, **alike)).verdict.acceptance == "PASS"
    alone = judge(result(pair, devices[:1], d0=tally(flagged=10, golden=10)))
    assert alone.verdict.acceptance == "INCONCLUSIVE"


def test_the_median_time() -> None:
    assert median_of(Counter()) == 0.0
    assert median_of(Counter(map(step_of, [0.5] * 4 + [8.0] * 6))) == 8.0
    assert median_of(Counter(map(step_of, [0.5] * 6 + [8.0] * 4))) == 0.5
