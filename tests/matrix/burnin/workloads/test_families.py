"""Every family runs on every device, repeats itself, and gives what a plain version of it gives."""

from sdc.burnin.judgement import judge
from sdc.burnin.programs import Programs
from sdc.burnin.rounds import burn_in
from sdc.burnin.workloads.workload import BUILT_IN, BurninWorkload


def test_healthy_devices_repeat_themselves_and_agree(programs: Programs, every: list[BurninWorkload]) -> None:
    """Fifty rounds of everything without a false alarm, of the programs of the other tests."""
    result = burn_in(every, programs.devices, rounds=50, programs=programs)
    assert (result.rounds, result.findings, result.unfinished) == (50, [], [])
    assert {workload.family for workload in every} == set(BUILT_IN)
    assert len(result.workloads) == 4 * len(every)
    assert all((tally.runs, tally.repeated) == (50, 49) for tally in result.tallies.values())
    for workload in every:
        tallies = [result.tallies[workload.name, device] for device in range(4)]
        assert all(tally.elements == 50 * workload.elements for tally in tallies)
        assert {tally.voted for tally in tallies} == {50 if workload.alike else 0}
        assert {tally.referred for tally in tallies} == {50 if workload.exact else 0}
        if workload.alike:
            assert len({tally.digest for tally in tallies}) == 1
        by_checksums = workload.family in ("matrix", "attention")
        assert all((tally.checked > 0) == by_checksums for tally in tallies)
        assert not any(tally.confirmed for tally in tallies)
    judged = judge(result)
    assert (judged.verdict.acceptance, judged.evidence) == ("PASS", ("repeat", "vote"))
    assert any("flushes subnormal float32 numbers to zero" in sentence for sentence in judged.sentences)
