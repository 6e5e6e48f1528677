"""What follows from what was seen: PASS, FAIL or INCONCLUSIVE, with the evidence that it rests on."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .evidence import Evidence, Finding
from .observed import Result
from .pace import shares_processor, throughputs
from .report import CODES, Word

NO_KIND = "neither runs nor devices nor records could be compared in all workloads"
REPEAT_ONLY = "repeat only: blind to faults that repeat themselves"


@dataclasses.dataclass(frozen=True)
class Checked:
    """How much was checked, from which follows what would have been seen.

    Attributes:
        workloads: workloads that ran.
        elements: numbers that were checked on each device, by its index. For elements that are independent of each
            other, n of them without a mismatch exclude rates above -ln(0.05) / n, at 95 %.
        runs: runs on each device. Of bursts that hit a run as a whole, that many were looked for.
        seconds: time at load on each device, without what is void.
    """

    workloads: int
    elements: dict[int, int]
    runs: dict[int, int]
    seconds: dict[int, float]

    WAITS: ClassVar[float] = -math.log(0.05)
    """Mean intervals of bursts at random times, of which one is seen with 95 %."""

    @property
    def rate(self) -> float:
        """Mismatch rate that would have been seen with 95 % on the device that was checked least; 1 without any."""
        return max((self.rate_of(device) for device in self.elements), default=1.0)

    def rate_of(self, device: int) -> float:
        """The same of one device."""
        return min(1.0, self.WAITS / self.elements[device]) if self.elements[device] else 1.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What follows.

    Attributes:
        word: PASS, FAIL or INCONCLUSIVE.
        code: exit code of a command that ends with it.
        kinds: independent kinds of evidence that every workload on every device rests on; of a FAIL those that saw it.
        sentences: findings and reasons, the gravest first.
        checked: how much was checked.
        simulated: whether faults were simulated: then nothing here is about the hardware.
    """

    word: Word
    code: int
    kinds: tuple[Evidence, ...]
    sentences: tuple[str, ...]
    checked: Checked
    simulated: bool

    def __str__(self) -> str:
        head = f"{'SIMULATION: ' if self.simulated else ''}{self.word} ({', '.join(self.kinds) or 'no evidence'})"
        return "\n".join([head, *self.sentences])


def judge(result: Result, described: Sequence[Mapping[str, Any]] = ()) -> Verdict:
    """The verdict on a burn-in.

    Any difference is a FAIL. A PASS takes that every workload ran on every device to the end, and that other devices
    or recorded digests agreed with each of them; repetition alone passes only if that is accepted.

    Args:
        result: what was seen.
        described: what `sdc.records.describe_devices` says of the devices, in their order: serial numbers and the like.

    Example:
        >>> import jax
        >>> from sdc.burnin.levels import SMALLEST
        >>> from sdc.burnin.registry import workloads
        >>> from sdc.burnin.rounds import burn_in
        >>> from sdc.burnin.verdict import judge
        >>> devices = jax.local_devices()[:1]
        >>> verdict = judge(burn_in(workloads(SMALLEST, devices, only=["ordering"]), devices, rounds=2))
        >>> verdict.word, verdict.code, verdict.sentences[0]
        ('INCONCLUSIVE', 3, 'repeat only: blind to faults that repeat themselves')
    """
    pace = throughputs(result)
    slow = [each for each in pace if each.void]
    reasons = [*result.doubts, *_missing(result)]
    reasons += [
        f"{_device(result, described, each.device)}, {each.workload}: throttled, {each.share:.0%} of what it should "
        f"reach; {each.seconds:.3g} s at load are void"
        for each in slow
    ]
    reasons += _unconfirmed(result, described)
    kinds = _kinds(result)
    notes = [*result.notes, *_foreign(result)]
    if shares_processor(result):
        notes.append("the devices share one processor: throughput is not judged, and a fault of it is in all of them")
    checked = _checked(result, {(each.workload, each.device) for each in slow})
    simulated = bool(result.simulated)
    if result.findings:
        sentences = [describe_finding(result, finding, described) for finding in result.findings]
        sentences += _counted(result, described)
        seen = tuple(dict.fromkeys(kind for finding in result.findings for kind in finding.kinds))
        return Verdict("FAIL", CODES["FAIL"], seen, (*sentences, *reasons, *notes), checked, simulated)
    if not reasons and not {"vote", "golden"} & set(kinds) and "repeat" not in result.accept:
        reasons.append(REPEAT_ONLY if kinds else NO_KIND)
    elif not reasons and not kinds:
        reasons.append(NO_KIND)
    if reasons:
        return Verdict("INCONCLUSIVE", CODES["INCONCLUSIVE"], kinds, (*reasons, *notes), checked, simulated)
    if not {"vote", "golden"} & set(kinds):
        notes.insert(0, f"accepted: {REPEAT_ONLY}")
    return Verdict("PASS", CODES["PASS"], kinds, (_statement(checked), *notes), checked, simulated)


def describe_finding(result: Result, finding: Finding, described: Sequence[Mapping[str, Any]] = ()) -> str:
    """A sentence: host, device, workload, elements, whether it came again, and who says so."""
    who = " or ".join(_device(result, described, device) for device in finding.devices)
    parts = [f"{who}, {finding.workload}"]
    seen = []
    if finding.elements is not None:
        seen.append(f"{finding.elements.differing} of {finding.elements.total:.3g} elements")
    if finding.persistence is not None:
        seen.append(finding.persistence)
    seen.append(f"seen by {', '.join(finding.kinds)}")
    if finding.checks.confirmed:
        seen.append(f"checksums confirm {finding.checks.confirmed} rows")
    if finding.simulated:
        seen.append("simulated")
    if finding.note:
        seen.append(finding.note)
    return ": ".join([*parts, ", ".join(seen)])


def _counted(result: Result, described: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where there were more differences than were looked at one by one."""
    sentences = []
    for (name, device), tally in result.tallies.items():
        told = sum(finding.workload == name and device in finding.devices for finding in result.findings)
        if tally.differences > told:
            where = _device(result, described, device)
            sentences.append(f"{where}, {name}: differences in {tally.differences} of {tally.runs} runs")
    return sentences


def _device(result: Result, described: Sequence[Mapping[str, Any]], index: int) -> str:
    known = described[index] if index < len(described) else {}
    marks = [f"{name} {known[name]}" for name in ("serial", "uuid", "bus") if name in known][:1]
    return f"host {known.get('host', result.host)}, device {index}{f' ({marks[0]})' if marks else ''}"


def _expected(result: Result) -> list[tuple[str, int]]:
    return [(workload.name, device) for workload in result.workloads for device in range(len(result.devices))]


def _missing(result: Result) -> list[str]:
    reasons = []
    if not any(tally.runs for tally in result.tallies.values()):
        reasons.append("nothing was checked")
    if result.stopped:
        reasons.append(f"{result.stopper or 'stopped'} after {result.rounds} rounds")
    for end in result.ended:
        what = end.workload or "all workloads"
        where = "all devices" if end.device is None else f"device {end.device}"
        reasons.append(f"{what} on {where} ended in round {end.round}: {end.reason}")
    never = [
        place
        for place in _expected(result)
        if (place not in result.tallies or not result.tallies[place].runs) and not result.has_ended(*place)
    ]
    if never and len(never) < len(_expected(result)):
        name, device = never[0]
        more = f" and {len(never) - 1} more" if len(never) > 1 else ""
        reasons.append(f"{name} on device {device}{more} did not run")
    return reasons


def _kinds(result: Result) -> tuple[Evidence, ...]:
    """Kinds of evidence that every workload on every device has; a reference stands in where devices cannot vote."""
    places = [result.tallies.get(place) for place in _expected(result)]
    if not places or any(tally is None for tally in places):
        return ()
    tallies = [tally for tally in places if tally is not None]
    alike = [workload.alike for workload in result.workloads for _ in result.devices]
    kinds: list[Evidence] = []
    if all(tally.repeated for tally in tallies):
        kinds.append("repeat")
    if all(tally.voted if same else tally.referred for tally, same in zip(tallies, alike, strict=True)) and any(alike):
        kinds.append("vote")
    if all(tally.golden for tally in tallies):
        kinds.append("golden")
    return tuple(kinds)


def _unconfirmed(result: Result, described: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows that checksums flag and that come out the same again are false alarms where all devices flag as many."""
    reasons = []
    for workload in result.workloads:
        tallies = [(device, t) for (name, device), t in result.tallies.items() if name == workload.name and t.runs]
        shares = {device: t.checks.flagged / t.runs for device, t in tallies if t.checks.flagged > t.checks.confirmed}
        if shares and (len(tallies) < 2 or len(shares) < len(tallies) or len(set(shares.values())) > 1):
            device = max(shares, key=lambda device: shares[device])
            reasons.append(
                f"{_device(result, described, device)}, {workload.name}: checksums flag {shares[device]:.3g} rows a "
                "run, which come out the same again: a fault that repeats itself, or a false alarm"
            )
    return reasons


def _foreign(result: Result) -> list[str]:
    told = []
    if result.foreign:
        told.append(
            f"{len(result.foreign)} golden digests are of other programs or devices and were not compared, "
            f"such as {result.foreign[0]}"
        )
    if result.unneeded:
        told.append(f"{len(result.unneeded)} golden digests are of workloads that were not to run, and not needed")
    return told


def _checked(result: Result, void: set[tuple[str, int]]) -> Checked:
    devices = range(len(result.devices))
    elements, runs, seconds = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0), dict.fromkeys(devices, 0.0)
    for (name, device), tally in result.tallies.items():
        if (name, device) not in void:
            elements[device] += tally.elements
            runs[device] += tally.runs
            seconds[device] += tally.seconds
    return Checked(len({name for name, _ in result.tallies}), elements, runs, seconds)


def _statement(checked: Checked) -> str:
    devices = "1 device" if len(checked.elements) == 1 else f"{len(checked.elements)} devices"
    return (
        f"{checked.workloads} workloads on {devices}, at least "
        f"{min(checked.elements.values()):.3g} elements in {min(checked.runs.values())} runs of each, no difference: "
        f"mismatches of independent elements above a rate of {checked.rate:.2g} would have been seen with 95 %"
    )
