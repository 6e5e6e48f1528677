"""Evaluation of a burn-in's result: the verdict, its evidence, and the fault rates that would have been detected.

Any difference results in FAIL. PASS requires that every workload ran to the end on every device, and that the outputs
agreed with those of other devices or with golden digests. Agreement between repeated runs on one device suffices only
if `accept` allows it.
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from ..records import Format, package_version
from ..verdict import Verdict, limit
from .results import ON_REQUEST, RESULT, UNDER_WAY, BurninResult, CheckedDevice, Evidence, Finding, Tally
from .sensors import driver_errors

# A device counts as throttled if its throughput is below this share of its own best throughput or of the median of the
# other devices.
THROTTLED = 0.5
MEASURABLE = 2e-3  # seconds below which the time of a run depends more on the host than on the device
# Expected number of events (mismatches or bursts) at which at least one event occurs with 95 % probability, known as
# the rule of three.
WAITS = -math.log(0.05)
NO_KIND = "no single kind of comparison (with earlier runs, other devices or golden digests) covered all workloads"
REPEAT_ONLY = "the only evidence is repetition, which cannot detect faults that repeat themselves"


def judge(result: BurninResult) -> BurninResult:
    """Returns the result with a verdict, evidence and sentences that are derived anew from its counts."""
    tallies = _paced(result)
    devices = [
        _tested(device, [each for each in tallies if each.device == device.index and not each.void])
        for device in result.devices
    ]
    result = msgspec.structs.replace(result, workloads=tallies, devices=devices)
    result.findings = [
        msgspec.structs.replace(finding, sentence=_finding_sentence(result, finding)) for finding in result.findings
    ]
    reasons = [*result.doubts]
    for device in devices:
        if device.sensors is not None:
            reasons += [f"device {device.index}: {error}" for error in driver_errors(device.sensors)]
    if result.golden is not None:
        used = sum(tally.golden > 0 for tally in tallies)
        result.golden = msgspec.structs.replace(result.golden, used=used)
        reasons += [result.golden.doubt] if result.golden.doubt is not None else []
    reasons += [*_missing(result), *_doubtful(result)]
    notes = list(result.notes)
    if shares_processor(result):
        notes.append(
            "the devices share one processor: throughput is not evaluated, and a fault of the processor affects all of "
            "the devices"
        )
    if result.findings or any(tally.differences or tally.confirmed for tally in tallies):
        result.verdict = Verdict.CORRUPT
        result.evidence = tuple(dict.fromkeys(kind for finding in result.findings for kind in finding.kinds))
        result.sentences = (*_differences(result), *reasons, *notes)
        return result
    result.evidence = _evidence(result)
    independent = {"vote", "golden"} & set(result.evidence)
    if not reasons and not result.evidence:
        reasons.append(NO_KIND)
    elif not reasons and not independent and "repeat" not in result.settings.accept:
        reasons.append(REPEAT_ONLY)
    if reasons:
        result.verdict, result.sentences = Verdict.INCONCLUSIVE, (*reasons, *notes)
        return result
    worst = max(devices, key=lambda device: device.excluded_rate)
    statement = (
        f"no difference was found in {len({tally.workload for tally in tallies})} workloads on "
        f"{'1 device' if len(devices) == 1 else f'{len(devices)} devices'} (at least "
        f"{min(device.elements for device in devices):.3g} elements in {min(device.runs for device in devices)} runs "
        f"per device); independent mismatches at a rate above {limit(worst.excluded_rate, 2, up=True)} per element "
        "would have been detected with 95 % probability in every family of workloads (the one checked least: "
        f"{worst.weakest})"
    )
    accepted = [] if independent else [f"accepted: {REPEAT_ONLY}"]
    result.verdict, result.sentences = Verdict.CLEAN, (statement, *accepted, *notes)
    return result


def shares_processor(result: BurninResult) -> bool:
    return len(result.devices) > 1 and all(device.kind == "cpu" for device in result.devices)


def _paced(result: BurninResult) -> list[Tally]:
    """Returns the counts with shares of the expected throughput; the time under load of a throttled device is void."""
    shared = shares_processor(result)
    kinds = {device.index: device.kind for device in result.devices}
    groups: dict[tuple[str, str | None], dict[int, float]] = defaultdict(dict)
    for tally in result.workloads:
        if tally.runs:
            groups[tally.workload, kinds.get(tally.device)][tally.device] = tally.median
    paced = []
    for tally in result.workloads:
        share = None
        if not shared and tally.runs and tally.median >= MEASURABLE:
            medians = groups[tally.workload, kinds.get(tally.device)]
            share = min(1.0, tally.fastest / tally.median)
            if others := [median for device, median in medians.items() if device != tally.device]:
                share = min(share, statistics.median(others) / tally.median)
        paced.append(msgspec.structs.replace(tally, share=share, void=share is not None and share < THROTTLED))
    return paced


def _tested(device: CheckedDevice, tallies: list[Tally]) -> CheckedDevice:
    """Returns a device with its totals, and the mismatch rate and the burst interval that these totals exclude.

    If n independent elements show no mismatch, rates above -ln(0.05) / n are excluded with 95 % confidence; n is that
    of the family of workloads that was checked least, since a fault may affect any one part of a device. If bursts
    occur at random times and disturb whatever runs, at least one occurs with 95 % probability within -ln(0.05) mean
    intervals.
    """
    families: dict[str, int] = defaultdict(int)
    for tally in tallies:
        families[tally.family] += 0 if tally.zeros or not _compared(tally) else tally.elements
    weakest, least = min(families.items(), key=lambda item: item[1], default=("", 0))
    seconds = sum(tally.seconds for tally in tallies)
    useful = sum(tally.seconds for tally in tallies if not tally.zeros and _compared(tally))
    return msgspec.structs.replace(
        device,
        elements=sum(families.values()),
        weakest=weakest,
        least=least,
        runs=sum(tally.runs for tally in tallies),
        seconds=seconds,
        excluded_rate=min(1.0, WAITS / least) if least else 1.0,
        excluded_interval=useful / WAITS if useful else None,
    )


def _finding_sentence(result: BurninResult, finding: Finding) -> str:
    """Returns a sentence that states the host, device, workload, elements, persistence and evidence of a finding."""
    elements = finding.elements
    seen = [
        f"{elements.differing} of {elements.total:.3g} elements" if elements is not None else "",
        finding.persistence or "",
        f"found by {', '.join(finding.kinds)}",
        f"checksums confirm {finding.confirmed} wrong rows" if finding.confirmed else "",
        "simulated" if finding.simulated else "",
        "" if finding.seed == 0 else f"data of seed {finding.seed}",
        finding.note,
    ]
    who = " or ".join(_device(result, device) for device in finding.devices)
    return f"{who}, {finding.workload}: {', '.join(filter(None, seen))}"


def _compared(tally: Tally) -> bool:
    return bool(tally.repeated or tally.voted or tally.referred or tally.golden or tally.checked)


def _differences(result: BurninResult) -> Iterator[str]:
    """Yields a sentence for the differences of each family of workloads on a device, or on devices of which it is
    unknown which is wrong."""
    families = {tally.workload: tally.family for tally in result.workloads}
    groups: dict[tuple[tuple[int, ...], str], list[Finding]] = {}
    for finding in result.findings:
        family = families.get(finding.workload, finding.workload)
        groups.setdefault((finding.devices, family), []).append(finding)
    listed = {(device, finding.workload) for finding in result.findings for device in finding.devices}
    for tally in result.workloads:  # a difference may lack a finding, if the device was lost during the reruns
        if (tally.differences or tally.confirmed) and (tally.device, tally.workload) not in listed:
            groups.setdefault(((tally.device,), tally.family), [])
    for (devices, family), findings in sorted(groups.items(), key=lambda group: len(group[0][0])):
        mine = [each for each in result.workloads if each.device in devices and each.family == family]
        odd = {finding.workload for finding in findings}
        odd |= {each.workload for each in mine if each.differences or each.confirmed}
        wrong = [each for each in mine if each.workload in odd]
        differing = sum(each.differences for each in wrong)
        runs = f"in {differing:,} of {sum(each.runs for each in wrong):,} runs"
        who = " or ".join(_device(result, device) for device in devices)
        if len(odd) == 1:
            (name,) = odd
            yield from (finding.sentence for finding in findings[:1])
            if differing > len(devices) or not findings:
                yield f"{who}, {name}: differences {runs}"
            continue
        most = max((each.elements for each in findings if each.elements), key=lambda one: one.differing, default=None)
        courses = Counter(finding.persistence for finding in findings if finding.persistence)
        kinds = dict.fromkeys(kind for finding in findings for kind in finding.kinds)
        confirmed = sum(finding.confirmed for finding in findings)
        seen = [
            runs,
            f"up to {most.differing:,} of {most.total:.3g} elements" if most is not None else "",
            *(f"{count} {course}" for course, count in courses.most_common()),
            f"found by {', '.join(kinds)}" if kinds else "",
            f"checksums confirm {confirmed:,} wrong rows" if confirmed else "",
            "simulated" if any(finding.simulated for finding in findings) else "",
        ]
        ran = {each.workload for each in mine if each.runs or each.workload in odd}
        yield f"{who}: differences in {len(odd)} of {len(ran)} {family} workloads, {', '.join(filter(None, seen))}"


def _device(result: BurninResult, index: int) -> str:
    device = next(each for each in result.devices if each.index == index)
    return f"host {device.host or result.host.name}, device {index}{f' ({device.mark})' if device.mark else ''}"


def _missing(result: BurninResult) -> Iterator[str]:
    if not any(tally.runs for tally in result.workloads):
        yield "nothing was checked"
    if result.stopped:
        known = {UNDER_WAY: UNDER_WAY, ON_REQUEST: "stopped"}
        yield f"{known.get(result.stopped, f'stopped by {result.stopped}')} after {result.rounds} rounds"
    for end in result.unfinished:
        yield f"{end.where} ended in round {end.round}: {end.reason}"
    never = [
        tally
        for tally in result.workloads
        if not tally.runs and not result.has_ended(tally.workload, range(tally.device, tally.device + 1))
    ]
    if never and len(never) < len(result.workloads):
        more = f" and {len(never) - 1} more" if len(never) > 1 else ""
        yield f"{never[0].workload} on device {never[0].device}{more} did not run"


def _doubtful(result: BurninResult) -> Iterator[str]:
    """Yields doubts about completed runs: void time under load, and flagged rows that recomputation reproduced.

    If all devices flag the same number of such rows, the flags are false alarms.
    """
    rows: dict[str, list[Tally]] = defaultdict(list)
    for tally in result.workloads:
        if tally.runs:
            rows[tally.workload].append(tally)
        if tally.void:
            yield (
                f"{_device(result, tally.device)}, {tally.workload}: throttled to {tally.share:.0%} of the expected "
                f"throughput, so {tally.seconds:.3g} s under load are void"
            )
    for name, tallies in rows.items():
        shares = {each.device: each.flagged / each.runs for each in tallies if each.flagged > each.confirmed}
        if shares and (len(tallies) < 2 or len(shares) < len(tallies) or len(set(shares.values())) > 1):
            device = max(shares, key=lambda device: shares[device])
            yield (
                f"{_device(result, device)}, {name}: checksums flag {shares[device]:.3g} rows per run that "
                "recomputation reproduces, which indicates a fault that repeats itself or a false alarm"
            )


def _evidence(result: BurninResult) -> tuple[Evidence, ...]:
    """Returns the kinds of evidence that cover every workload on every device.

    If devices have different outputs by design, a comparison with the host's result replaces the vote.
    """
    tallies = result.workloads
    if not tallies or not all(tally.runs for tally in tallies):
        return ()
    voted = all(tally.voted if tally.alike else tally.referred for tally in tallies)
    kinds: dict[Evidence, bool] = {
        "repeat": all(tally.repeated for tally in tallies),
        "vote": voted and any(tally.alike for tally in tallies),
        "golden": all(tally.golden for tally in tallies),
    }
    return tuple(kind for kind, known in kinds.items() if known)


def contradictions(result: BurninResult) -> Iterator[str]:
    """Yields descriptions of the contradictions in a result; its counts take precedence over its stated verdict."""
    indices = {device.index for device in result.devices}
    places = [(tally.workload, tally.device) for tally in result.workloads]
    if len(set(places)) < len(places):
        yield "a workload is listed twice"
    named = {device for _, device in places} | {device for each in result.findings for device in each.devices}
    if not named <= indices:
        yield f"device {min(named - indices)} is not described"
        return
    if len({tally.workload for tally in result.workloads}) * len(indices) != len(places):
        yield "not every workload is listed for every device"
    if any(tally.simulated for tally in result.workloads) and not result.simulated:
        yield "simulated faults changed elements, but the settings contain no fault"
    again = judge(result)
    if again.verdict != result.verdict:
        yield (
            f"the verdict is {result.verdict.acceptance}, but {again.verdict.acceptance} follows from the counts "
            f"({again.sentences[0]})"
        )
    if again.evidence != result.evidence:
        said, found = (", ".join(each.evidence) or "no evidence" for each in (result, again))
        yield f"the stated evidence is {said}, but the counts support {found}"
    for device, judged in zip(result.devices, again.devices, strict=True):
        if device.elements != judged.elements:
            yield f"device {device.index} lists {device.elements} elements, but its workloads list {judged.elements}"
    if result.version == package_version("jax-sdc") and again.sentences != result.sentences:
        # Other versions may state the same facts in other words.
        yield f"its sentences do not follow from the counts: {next(_unlike(result.sentences, again.sentences))}"


def _unlike(sentences: Sequence[str], expected: Sequence[str]) -> Iterator[str]:
    for said, right in itertools.zip_longest(sentences, expected):
        if said != right:
            yield f"{said!r} instead of {right!r}"


BURN_IN = Format(
    type=BurninResult,
    noun="result of sdc burnin",
    remedy="run the burn-in again",
    source="give a file that sdc burnin wrote, or the folder of that file",
    names=(RESULT,),
    contradictions=contradictions,
)
