"""Faults are attributed, found again, missed only by what is blind to them; and whatever ends a burn-in is said."""

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.burnin.judgement import judge
from sdc.burnin.programs import Programs
from sdc.burnin.recorder import recorded
from sdc.burnin.results import ON_REQUEST, BurninResult
from sdc.burnin.rounds import DETAILED, burn_in, planned_result, seed_of
from sdc.burnin.workloads.workload import BurninWorkload
from sdc.faults import BitFlip, Fault, When
from sdc.settings import SettingError

from .conftest import changed

ALWAYS = Fault(BitFlip(bits=(20,)), rate=1.0, site="ordering/*", at={"device": 0})
"""The same bits in the same elements each time."""


@pytest.fixture(scope="module")
def alone(devices: list[jax.Device]) -> Programs:
    return Programs(devices[:1])


@pytest.fixture(scope="module")
def ordering(few: list[BurninWorkload]) -> list[BurninWorkload]:
    return [workload for workload in few if workload.family == "ordering"]


@pytest.fixture(scope="module")
def rounding(few: list[BurninWorkload]) -> list[BurninWorkload]:
    """Of which the host knows nothing."""
    return [workload for workload in few if workload.family == "functions"]


def test_fifty_random_faults_are_attributed_by_vote(programs: Programs, few: list[BurninWorkload]) -> None:
    random = np.random.default_rng(0)
    seen = []
    for case in range(50):
        device, workload = int(random.integers(4)), few[int(random.integers(len(few)))]
        fault = Fault(BitFlip(), rate=0.1, site=workload.name, at={"device": device})
        result = burn_in(few, programs.devices, rounds=1, inject=[fault], programs=programs, seed=case)
        (finding,) = result.findings
        assert (finding.workload, finding.devices) == (workload.name, (device,))
        assert "vote" in finding.kinds
        assert "repeat" not in finding.kinds  # there was no run before
        assert finding.elements is not None
        assert finding.elements.differing == finding.simulated > 0  # found equals injected
        judged = judge(result)
        assert (judged.verdict.acceptance, judged.verdict.code, judged.simulated) == ("FAIL", 1, True)
        assert f"device {device}, {workload.name}: {finding.simulated} of" in judged.sentences[0]
        seen.append((device, workload.name))
    assert len(set(seen)) > 15


def test_later_rounds_use_fresh_data(alone: Programs, few: list[BurninWorkload]) -> None:
    """Of which a run counts once another run, or the host, has confirmed it; golden digests are those of the first
    rounds."""
    work = [workload for workload in few if workload.family in ("ordering", "functions")]
    golden = recorded(burn_in(work, alone.devices, rounds=2, programs=alone))

    def digests(fresh: int, rounds: int = 7) -> tuple[BurninResult, list[int], dict[str, list[str]]]:
        seeds, found = [], defaultdict[str, list[str]](list)

        def note(event: Mapping[str, Any]) -> None:
            if event["event"] == "run":
                found[event["workload"]].append(event["digest"])
                seeds.append(event["seed"])

        settings: Any = {"golden": golden, "fresh": fresh, "programs": alone, "on_event": note}
        return burn_in(work, alone.devices, rounds=rounds, **settings), seeds, found

    result, seeds, found = digests(7)
    assert seeds[:: len(work)] == [0, 0, *(seed_of(7, data) for data in (1, 1, 2, 2, 3))]
    assert not result.findings
    for name, each in found.items():
        assert each[0:6:2] == each[1:6:2]
        assert len(set(each)) == 4
        tally = result.tallies[name, 0]
        assert (tally.digest, tally.golden, tally.standard, tally.repeated) == (each[0], 2, 2, 3)
        confirmed = 7 if name.startswith("ordering/") else 6
        per_run = next(workload.elements for workload in work if workload.name == name)
        assert (tally.runs, tally.elements) == (confirmed, confirmed * per_run)
    assert digests(7)[2] == found
    assert all(each[:2] == found[name][:2] and each[2] != found[name][2] for name, each in digests(8)[2].items())


def test_counts_that_begin_anew_have_the_data_of_the_first_rounds_again(
    alone: Programs, rounding: list[BurninWorkload]
) -> None:
    """As after a resumption in which the earlier runs were void: the golden digest must be compared again."""
    (workload,) = rounding
    golden = recorded(burn_in(rounding, alone.devices, rounds=2, programs=alone))
    settings: Any = {"programs": alone, "golden": golden, "fresh": 7}
    result = burn_in(rounding, alone.devices, rounds=5, **settings)
    tally = result.tallies[workload.name, 0]
    tally.begin_anew()
    burn_in(rounding, alone.devices, rounds=9, result=result, **settings)
    assert (tally.digest, tally.golden, tally.standard) == (next(iter(golden.values())), 2, 2)
    assert judge(result).evidence == ("repeat", "golden")


def test_a_fault_that_depends_on_the_data(programs: Programs, ordering: list[BurninWorkload]) -> None:
    """It never shows with the data of the first rounds."""
    (workload,) = ordering
    before = workload.inputs()[0][:4]

    def run(keys: Any, at: Any) -> Any:
        right = type(workload).run(workload, keys, at)
        return {**right, "sort": right["sort"] ^ jnp.any(keys[:4] != before).astype(keys.dtype)}

    data = changed(workload, run=run, program="wrong for other data")
    assert not burn_in([data], programs.devices, rounds=4, programs=programs).findings
    result = judge(burn_in([data], programs.devices, rounds=4, programs=programs, fresh=7))
    assert {(finding.round, finding.seed, finding.kinds) for finding in result.findings} == {
        (number, seed_of(7, 1), ("reference",)) for number in (2, 3)
    }
    assert f"data of seed {seed_of(7, 1)}" in result.sentences[0]


def test_right_bits_after_wrong_ones_are_no_finding(programs: Programs, rounding: list[BurninWorkload]) -> None:
    """Even if all runs right after a difference were wrong, each in its own way."""
    (workload,) = rounding
    (count,) = (tally.elements for tally in burn_in([workload], programs.devices[:1], rounds=1).tallies.values())
    seen = []
    for seed in range(8):
        fault = Fault(BitFlip(), rate=1 / count, site=workload.name, at={"device": 0})  # 63 % of the runs
        result = burn_in([workload], programs.devices, rounds=4, inject=[fault], programs=programs, seed=seed)
        assert all("vote" in finding.kinds and finding.simulated for finding in result.findings)
        assert len(result.findings) == result.tallies[workload.name, 0].differences
        seen += [finding.persistence for finding in result.findings]
    assert {"transient", "intermittent", "persistent"} <= set(seen)


def test_a_fault_that_repeats_itself(programs: Programs, alone: Programs, rounding: list[BurninWorkload]) -> None:
    fault = dataclasses.replace(ALWAYS, site="functions/*")
    good = burn_in(rounding, alone.devices, rounds=2, programs=alone)
    digests = recorded(good)
    assert list(digests) == [good.tallies[rounding[0].name, 0].key]

    blind = burn_in(rounding, alone.devices, rounds=4, programs=alone, inject=[fault])
    assert blind.findings == []
    assert blind.tallies[rounding[0].name, 0].simulated > 0
    judged = judge(blind)
    assert (judged.verdict.acceptance, judged.verdict.code, judged.evidence) == ("INCONCLUSIVE", 3, ("repeat",))
    assert judged.sentences[0] == "the only evidence is repetition, which cannot detect faults that repeat themselves"
    assert recorded(blind) == {}  # nothing of a simulation is recorded

    found = burn_in(rounding, alone.devices, rounds=2, programs=alone, inject=[fault], golden=digests)
    assert [finding.kinds for finding in found.findings] == [("golden",)] * 2
    assert found.findings[0].persistence == "persistent"
    assert found.findings[0].expected == digests[good.tallies[rounding[0].name, 0].key]
    assert judge(found).verdict.code == 1

    voted = burn_in(rounding, programs.devices, rounds=2, programs=programs, inject=[fault])
    assert [(finding.kinds, finding.devices) for finding in voted.findings] == [(("vote",), (0,))] * 2
    assert voted.findings[0].persistence == "persistent"


def test_golden_digests(alone: Programs, ordering: list[BurninWorkload]) -> None:
    digests = recorded(burn_in(ordering, alone.devices, rounds=2, programs=alone))
    result = burn_in(ordering, alone.devices, rounds=1, programs=alone, golden={**digests, "another program": "00"})
    assert (result.findings, result.golden and result.golden.foreign) == ([], 1)
    judged = judge(result)
    assert (judged.verdict.acceptance, judged.evidence) == ("PASS", ("golden",))
    assert "1 golden digests belong to other programs or devices" in judged.sentences[-1]
    more = {f"matrix/else | {next(iter(digests)).partition(' | ')[2]}": "00"}  # a register of all families
    part = burn_in(ordering, alone.devices, rounds=1, programs=alone, golden={**digests, **more})
    assert (part.golden and (part.golden.foreign, part.golden.unneeded)) == (0, 1)
    assert judge(part).verdict.acceptance == "PASS"
    assert "1 golden digests belong to workloads that were not selected" in judge(part).sentences[-1]
    foreign = judge(burn_in(ordering, alone.devices, rounds=2, programs=alone, golden={"another program": "00"}))
    assert (foreign.verdict.acceptance, foreign.evidence) == ("INCONCLUSIVE", ("repeat",))


def test_a_golden_digest_of_each_shard(programs: Programs, few: list[BurninWorkload]) -> None:
    (workload,) = (each for each in few if each.multi)
    digests = recorded(burn_in([workload], programs.devices, rounds=2, programs=programs))
    assert len(digests) == 4
    wrong = {key: "0" * 16 if "device 2" in key else digest for key, digest in digests.items()}
    result = burn_in([workload], programs.devices, rounds=1, programs=programs, golden=wrong)
    assert [(finding.devices, finding.kinds) for finding in result.findings] == [((2,), ("golden",))]


@pytest.mark.parametrize(
    ("when", "persistence"),
    [(When(onset=2, end=3), "transient"), (When(onset=2, end=4), "intermittent"), (When(onset=2), "persistent")],
)
def test_what_differs_is_run_again(
    when: When, persistence: str, alone: Programs, rounding: list[BurninWorkload]
) -> None:
    fault = dataclasses.replace(ALWAYS, site="*", when=when)
    result = burn_in(rounding, alone.devices, rounds=5, programs=alone, inject=[fault])
    (first,) = result.findings  # what stays is what later rounds are compared with
    assert (first.round, first.kinds, first.persistence) == (2, ("repeat",), persistence)
    assert result.tallies[rounding[0].name, 0].runs == 5  # those after the difference are not counted
    if persistence == "persistent":
        assert "either the earlier or the later runs are wrong" in first.note
        assert first.elements is None  # nobody has the right outputs
    else:
        assert first.elements is not None
        assert first.elements.differing == first.simulated == rounding[0].elements
    assert judge(result).verdict.acceptance == "FAIL"


def test_bits_and_magnitudes_are_evidence(programs: Programs, rounding: list[BurninWorkload]) -> None:
    fault = Fault(BitFlip(bits=(31,)), rate=1.0, at={"device": 2})
    (finding,) = burn_in(rounding, programs.devices, rounds=1, programs=programs, inject=[fault]).findings
    assert finding.elements is not None
    for element in finding.elements.first:
        assert int(element.old, 16) ^ int(element.new, 16) == 1 << 31
    assert finding.elements.relative == 2.0  # another sign
    assert finding.elements.largest > 0


def test_what_differs_each_time_is_counted(programs: Programs, ordering: list[BurninWorkload]) -> None:
    result = burn_in(ordering, programs.devices, rounds=DETAILED + 3, programs=programs, inject=[ALWAYS])
    assert len(result.findings) == DETAILED
    assert result.tallies[ordering[0].name, 0].differences == DETAILED + 3
    assert result.tallies[ordering[0].name, 1].differences == 0


def test_a_tie_is_said(devices: list[jax.Device], rounding: list[BurninWorkload]) -> None:
    programs = Programs(devices[:2])
    fault = dataclasses.replace(ALWAYS, site="*", at={"device": 1})
    result = burn_in(rounding, devices[:2], rounds=1, programs=programs, inject=[fault])
    (finding,) = result.findings
    assert (finding.devices, finding.kinds, finding.persistence) == ((0, 1), ("vote",), "persistent")
    assert finding.elements is not None
    assert finding.elements.differing == finding.simulated
    judged = judge(result)
    assert judged.verdict.acceptance == "FAIL"
    assert "device 0 or host" in judged.sentences[0]
    assert "it is unknown which of them is wrong" in judged.sentences[0]
    # One that does not come again is named: it does not repeat itself.
    passing = dataclasses.replace(fault, when=When(end=1))
    (finding,) = burn_in(rounding, devices[:2], rounds=1, programs=programs, inject=[passing]).findings
    assert (finding.devices, finding.kinds, finding.persistence) == ((1,), ("vote", "repeat"), "transient")


def test_a_collective_names_the_device_whose_outputs_differ(programs: Programs, every: list[BurninWorkload]) -> None:
    chosen = [each for each in every if each.name.startswith(("collectives/psum_scatter", "collectives/psum/"))]
    fault = Fault(BitFlip(bits=(3,)), rate=0.2, at={"device": 2})
    result = burn_in(chosen, programs.devices, rounds=1, programs=programs, inject=[fault])
    found = {finding.workload.split("/")[1]: finding for finding in result.findings}
    assert {name: (each.devices, each.kinds) for name, each in found.items()} == {
        "psum": ((2,), ("vote", "reference")),
        "psum_scatter": ((2,), ("reference",)),
    }
    for finding in found.values():
        assert finding.elements is not None
        assert finding.elements.differing == finding.simulated


def test_repetition_may_be_accepted(alone: Programs, ordering: list[BurninWorkload]) -> None:
    judged = judge(burn_in(ordering, alone.devices, rounds=2, programs=alone, accept=["repeat"]))
    assert (judged.verdict.acceptance, judged.verdict.code, judged.evidence) == ("PASS", 0, ("repeat",))
    assert (
        judged.sentences[1]
        == "accepted: the only evidence is repetition, which cannot detect faults that repeat themselves"
    )
    once = judge(burn_in(ordering, alone.devices, rounds=1, programs=alone, accept=["repeat"]))
    assert (once.verdict.acceptance, once.evidence) == ("INCONCLUSIVE", ())


def failing(workload: BurninWorkload, device: jax.Device, message: str) -> BurninWorkload:
    """Fails on one device, from its third run on."""
    runs = []

    def drive(bench: Any) -> Any:
        if bench.device == device:
            runs.append(1)
            if len(runs) > 2:
                raise RuntimeError(message)
        return bench.call(*bench.arguments)

    return changed(workload, name="failing", drive=drive)


def test_an_exception_midway_ends_a_workload_on_a_device(programs: Programs, ordering: list[BurninWorkload]) -> None:
    broken = failing(ordering[0], programs.devices[1], "RESOURCE_EXHAUSTED: out of memory")
    result = burn_in([broken, *ordering], programs.devices, rounds=5, programs=programs)
    (end,) = result.unfinished
    assert (end.workload, end.device, end.round) == ("failing", 1, 2)
    assert end.reason == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert [result.tallies["failing", device].runs for device in range(4)] == [5, 2, 5, 5]
    assert result.tallies[ordering[0].name, 1].runs == 5
    judged = judge(result)
    assert (judged.verdict.acceptance, judged.verdict.code) == ("INCONCLUSIVE", 3)
    assert "failing on device 1 ended in round 2: RuntimeError: RESOURCE_EXHAUSTED" in judged.sentences[0]


def test_a_lost_device_ends(
    programs: Programs, few: list[BurninWorkload], ordering: list[BurninWorkload], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = programs.devices[1]
    monkeypatch.setattr("sdc.burnin.rounds._alive", lambda device: device != lost)
    both = [failing(ordering[0], lost, "gone"), *ordering, *(each for each in few if each.multi)]
    result = burn_in(both, programs.devices, rounds=4, programs=programs)
    (end,) = result.unfinished
    assert (end.workload, end.device, end.reason) == (None, 1, "device lost: RuntimeError: gone")
    assert [result.tallies[ordering[0].name, device].runs for device in range(4)] == [4, 2, 4, 4]
    assert result.tallies[both[-1].name, 0].runs == 2  # it spans all devices
    assert judge(result).verdict.acceptance == "INCONCLUSIVE"


def test_what_does_not_compile_is_missing(programs: Programs, ordering: list[BurninWorkload]) -> None:
    def run(*arguments: Any) -> Any:
        raise NotImplementedError("no such operation here")

    broken = changed(ordering[0], name="broken", program="broken", run=run)
    result = burn_in([broken, *ordering], programs.devices, rounds=2, programs=programs)
    assert {end.reason for end in result.unfinished} == {"NotImplementedError: no such operation here"}
    assert judge(result).verdict.acceptance == "INCONCLUSIVE"

    def reference(*arguments: Any) -> Any:
        raise MemoryError("the host is full")

    unknown = changed(ordering[0], name="unknown", reference=reference)
    (*_, end) = burn_in([unknown, *ordering], programs.devices, rounds=2, programs=programs).unfinished
    assert (end.workload, end.reason) == ("unknown", "MemoryError: the host is full")
    other = changed(ordering[0], name="other", reference=lambda *arguments: np.zeros(3, np.int8))
    (*_, end) = burn_in([other, *ordering], programs.devices, rounds=2, programs=programs).unfinished
    assert "reference returns the outputs int8[3]; expected those of run, " in end.reason
    only = burn_in([broken], programs.devices, rounds=2, programs=programs)
    assert only.rounds == 0
    assert judge(only).sentences[0] == "nothing was checked"


def test_it_stops_between_runs(programs: Programs, few: list[BurninWorkload]) -> None:
    events: list[str] = []

    def stop() -> bool:
        return events.count("run") >= 4 * 3  # three workloads on four devices

    result = burn_in(
        few,
        programs.devices,
        rounds=1000,
        programs=programs,
        stop=stop,
        on_event=lambda event: events.append(event["event"]),
    )
    assert (result.stopped, result.rounds) == (ON_REQUEST, 0)
    assert sum(tally.runs > 0 for tally in result.workloads) == 12
    judged = judge(result)
    assert judged.verdict.code == 3
    assert judged.sentences[0] == "stopped after 0 rounds"
    assert any("and 11 more did not run" in sentence for sentence in judged.sentences)


def test_a_pause_ends_when_it_is_told_to(programs: Programs, ordering: list[BurninWorkload]) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 5

    result = burn_in(ordering, programs.devices, rounds=2, programs=programs, stop=stop, pauses=[3600.0])
    assert (result.stopped, result.rounds) == (ON_REQUEST, 0)
    assert result.seconds < 60


def test_load_swings(programs: Programs, ordering: list[BurninWorkload], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("sdc.burnin.rounds._BurnIn._rest", lambda self, seconds: slept.append(seconds))
    burn_in(ordering, programs.devices, rounds=5, programs=programs, pauses=(0.0, 0.25))
    assert slept == [0.0, 0.25, 0.0, 0.25, 0.0]


def test_minutes(programs: Programs, ordering: list[BurninWorkload]) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    result = burn_in(ordering, programs.devices, minutes=1.0, programs=programs, clock=clock)
    assert 10 < result.rounds < 60
    assert result.stopped is None
    assert judge(result).verdict.acceptance == "PASS"


def test_events(programs: Programs, ordering: list[BurninWorkload]) -> None:
    events: list[Any] = []
    burn_in(ordering, programs.devices, rounds=2, programs=programs, inject=[ALWAYS], on_event=events.append)
    kinds = [event["event"] for event in events]
    assert kinds == ["compile", *["round", "run", "run", "run", "run", "difference", "finding"] * 2]
    assert events[7] == {"event": "finding", "workload": ordering[0].name, "devices": [0]}
    assert [event["device"] for event in events if event["event"] == "run"] == [0, 1, 2, 3] * 2


def test_a_difference_counts_before_it_is_followed(programs: Programs, ordering: list[BurninWorkload]) -> None:
    """A device may take the process with it when its workload runs again."""
    result, found = planned_result(ordering, programs.devices), list[str]()

    def look(event: Mapping[str, Any]) -> None:
        if event["event"] == "difference":
            assert not result.findings
            found.append(judge(result).verdict.acceptance)

    burn_in(ordering, programs.devices, rounds=1, programs=programs, inject=[ALWAYS], on_event=look, result=result)
    assert found == ["FAIL"]


def test_subnormal_data_on_a_device_that_flushes(every: list[BurninWorkload], programs: Programs) -> None:
    (workload,) = (each for each in every if each.name == "reductions/float32/8x8/subnormal")
    assert (programs.host(workload)[0] != 0).all()
    (outcome,) = programs.run(workload, 0)
    np.testing.assert_array_equal(outcome.outputs["columns"], 0)
    result = burn_in([workload], programs.devices, rounds=1, programs=programs)
    assert result.notes == ["cpu cpu flushes subnormal float32 numbers to zero, so the subnormal data are zeros"]


def test_what_is_refused(programs: Programs, few: list[BurninWorkload]) -> None:
    devices: Any = programs.devices
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "minutes: expected either minutes or rounds"),
        ({"minutes": 1, "rounds": 1}, "expected either minutes or rounds"),
        ({"minutes": float("nan")}, "minutes=nan"),
        ({"rounds": 0}, "rounds=0"),
        ({"rounds": 1, "accept": ["everything"]}, "accept=everything"),
        ({"rounds": 1, "pauses": [-1.0]}, "pauses"),
        ({"rounds": 1, "inject": [Fault(BitFlip(), rate=1.0, at={"device": 4})]}, "a device from 0 to 3"),
        ({"rounds": 1, "inject": [Fault(BitFlip(), rate=1.0, at={"rank": 0})]}, "'device': 1"),
        ({"rounds": 1, "inject": [Fault(BitFlip())]}, "has no rate"),
        ({"rounds": 1, "inject": [Fault(BitFlip(), rate=1.0, site="fwd/*")]}, "matches no workload"),
        ({"rounds": 1, "inject": [Fault(BitFlip(), rate=1.0, site='primitive("sin")')]}, "pattern of workload names"),
    ]
    for settings, message in cases:
        with pytest.raises(SettingError, match=message):
            burn_in(few, devices, programs=programs, **settings)
    with pytest.raises(SettingError, match="devices: expected at least one device"):
        burn_in(few, [], rounds=1)
    with pytest.raises(SettingError, match="expected distinct devices"):
        burn_in(few, [devices[0], devices[0]], rounds=1)
    with pytest.raises(SettingError, match="compiled for other devices"):
        burn_in(few, devices[:2], rounds=1, programs=programs)
    with pytest.raises(SettingError, match="expected distinct names"):
        burn_in([few[0], few[0]], devices, rounds=1, programs=programs)


def test_a_device_that_never_answers(
    programs: Programs, few: list[BurninWorkload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on, nothing waits for it, and it is no pass."""
    ended = threading.Event()
    run = programs.run

    def stuck(workload: BurninWorkload, index: int | None, **settings: Any) -> Any:
        if index == 2:
            ended.wait(20)
        return run(workload, index, **settings)

    monkeypatch.setattr(programs, "run", stuck)
    plain = [workload for workload in few if workload.family == "ordering"]
    result = burn_in(plain, programs.devices, rounds=2, programs=programs, limit=0.5)
    ended.set()
    assert result.hung
    assert [(end.workload, end.device) for end in result.unfinished] == [(None, 2)]
    assert "no answer within 0.5 s" in result.unfinished[0].reason
    assert [result.tallies[plain[0].name, device].runs for device in (0, 1, 3)] == [2, 2, 2]
    assert judge(result).verdict.acceptance == "INCONCLUSIVE"


def test_going_on_where_an_earlier_burn_in_ended(programs: Programs, few: list[BurninWorkload]) -> None:
    first = burn_in(few, programs.devices, rounds=1, programs=programs)
    both = burn_in(few, programs.devices, rounds=3, programs=programs, result=first)
    assert both is first
    assert both.rounds == 3
    assert {tally.runs for tally in both.tallies.values()} == {3}
    assert {tally.repeated for tally in both.tallies.values()} == {2}


@pytest.mark.parametrize("empty", [lambda x: x[:0], lambda x: (), lambda x: 3.0, lambda x: x[:32]])
def test_a_workload_that_checks_less_than_it_says_is_no_pass(
    empty: Any, programs: Programs, ordering: list[BurninWorkload]
) -> None:
    less = changed(
        ordering[0], name="mine/less", program=f"mine/{empty}", run=lambda x, *more: empty(x), elements=64,
        reference=BurninWorkload.reference,
    )  # fmt: skip
    judged = judge(burn_in([less], programs.devices, rounds=2, programs=programs))
    assert judged.verdict.acceptance == "INCONCLUSIVE"
    assert any("declares that a run checks 64" in sentence for sentence in judged.sentences)
