"""The summary of a fleet: suspects, the evidence against them, the next actions, and outliers in throughput."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from sdc.results import counted
from sdc.verdict import Verdict

from .collection import Collection, ComparedHosts, DeviceResult, Duplicate, HostKey, HostResult, Refused, printable
from .ledger import Added, FleetLedger, enter, limits, past_of
from .suspects import NamedDevice, SuspectRow, TieRow, Votes, find_suspects, named_device, vote

LEAST = 8  # minimum number of devices of one kind from which a median is computed
FAR = 5.0  # number of robust deviations from the median that counts as far
FLOOR = 0.02
"""Minimum of the robust deviation, as a share of the median. Without this minimum, even devices whose throughputs agree
within 0.1 % could count as outliers. Five deviations of this size amount to a tenth of the median throughput."""
NORMAL = 1.4826  # standard deviation of a normal distribution divided by its median absolute deviation
SHARE = 0.1  # minimum share of a device's workloads in which an outlier is far from the median


class WatchRow(msgspec.Struct, kw_only=True):
    """A device that is neither suspect nor clean."""

    host: str
    device: int | None
    identity: str | None
    simulated: bool
    since: str
    reason: str


class Outlier(msgspec.Struct, kw_only=True):
    """A device that is slower or faster than others of its kind."""

    identity: str
    slow: bool
    far: int  # number of workloads in which it is far from the median
    judged: int  # number of workloads in which it was judged
    workload: str  # workload in which it is farthest from the median
    ratio: float  # its throughput in that workload, as a share of the median
    z: float  # its distance from the median in robust deviations
    simulated: bool  # whether simulated results are among the evidence
    host: str = ""
    device: int = 0


class Moved(msgspec.Struct, kw_only=True):
    """A device that was installed in several hosts, with these hosts in chronological order."""

    identity: str
    hosts: list[str]


class Comparisons(msgspec.Struct, kw_only=True):
    programs: int
    programs_on_one_host: int
    workloads_of_several_versions: int
    devices_that_agree: int
    hosts: int
    hosts_not_compared: list[str]


class LedgerPart(msgspec.Struct, kw_only=True):
    """The totals of the ledger, and the outcome of entering the summarized results in it."""

    simulated: bool
    burn_ins: int
    devices: int
    elements: int
    seconds: float
    added: int
    known: int
    changed: list[str]
    foreign: int


class FleetSummary(msgspec.Struct, kw_only=True):
    """The summary of a fleet; see docs/fleet-summaries.md."""

    verdict: Verdict
    sentence: str
    simulated: Literal["none", "some", "all"]
    results: int
    simulated_results: int
    hosts: int
    devices: int
    elements: int
    seconds: float
    compared: Comparisons
    suspects: list[SuspectRow]
    ties: list[TieRow]
    pairs: list[ComparedHosts]  # pairs and pools that did not pass
    watch: list[WatchRow]
    outliers: list[Outlier]
    refused: list[Refused]
    duplicates: list[Duplicate]
    doubtful_identities: list[str]
    moved: list[Moved]
    ledger: LedgerPart | None


class DeviceSheetRow(NamedDevice, kw_only=True):
    """A device, its totals in these results or in the ledger, and the fault rates that these totals rule out."""

    suspect: str
    agrees_with_other_hosts: bool
    burn_ins: int | None = None
    elements: int | None = None
    seconds_at_load: float | None = None
    runs: int | None = None
    wrong_runs: int | None = None
    excluded_element_rate: float | None = None
    wrong_run_share_low: float | None = None
    wrong_run_share_high: float | None = None
    excluded_burst_interval_seconds: float | None = None
    mean_interval_low_seconds: float | None = None
    mean_interval_high_seconds: float | None = None
    first: str | None = None
    last: str | None = None
    hosts: str | None = None


Shown = TypeVar("Shown", FleetSummary, list[DeviceSheetRow])


def summarize_results(
    collection: Collection, *, votes: Votes | None = None, ledger: FleetLedger | None = None, added: Added | None = None
) -> FleetSummary:
    """Summarizes results: suspects, hosts that differ, devices to watch, outliers, and files that are not counted.

    The verdict is corrupt if there is a suspect or if hosts differ; it is clean if hosts were compared and all of them
    agree, everything could be read, and no burn-in is under way.
    """
    results = collection.results
    votes = vote(results) if votes is None else votes
    suspects = find_suspects(results, votes, past_of(ledger))
    hosts = {result.host for result in results}
    simulated = simulation(results)
    # If real and simulated results are mixed, agreement between simulations does not test the real hosts.
    voters = (
        votes.hosts & {result.host for result in results if not result.simulated}
        if simulated == "some"
        else votes.hosts
    )
    parts = {part.identity: (result.host, part) for result in results for part in result.parts.values()}
    far = outliers(results)
    for each in far:
        host, part = parts[each.identity]
        each.host, each.device = host.name, part.index
    value = FleetSummary(
        verdict=Verdict.INCONCLUSIVE,
        sentence="",
        simulated=simulated,
        results=len(results),
        simulated_results=sum(result.simulated for result in results),
        hosts=len(hosts),
        devices=len(parts),
        elements=sum(part.elements for result in results for part in result.parts.values()),
        seconds=sum(part.seconds for result in results for part in result.parts.values()),
        compared=Comparisons(
            programs=votes.compared,
            programs_on_one_host=votes.alone,
            workloads_of_several_versions=votes.split,
            devices_that_agree=len(votes.agreed),
            hosts=len(voters),
            hosts_not_compared=sorted(host.name for host in hosts - votes.hosts),
        ),
        suspects=suspects,
        ties=list(votes.ties),
        pairs=[pair for pair in collection.pairs if pair.verdict is not Verdict.CLEAN],
        watch=list(_watched(results, ledger, suspects)),
        outliers=far,
        refused=list(collection.refused),
        duplicates=list(collection.duplicates),
        doubtful_identities=list(collection.doubtful),
        moved=_moved(results, ledger),
        ledger=None,
    )
    if ledger is not None:
        new = Added(0, 0, (), 0) if added is None else added
        value.ledger = LedgerPart(
            simulated=ledger.simulated, burn_ins=len(ledger.burn_ins), devices=len(ledger.devices),
            elements=sum(account.elements for account in ledger.devices.values()),
            seconds=sum(account.seconds for account in ledger.devices.values()), **new._asdict(),
        )  # fmt: skip
    under_way = [result.host.name for result in results if result.under_way]
    value.verdict, value.sentence = _verdict(value, under_way)
    return _printable(value, FleetSummary)


def simulation(results: Sequence[HostResult]) -> Literal["none", "some", "all"]:
    count = sum(result.simulated for result in results)
    return "none" if not count else "all" if count == len(results) else "some"


def _watched(
    results: Sequence[HostResult], ledger: FleetLedger | None, suspects: Sequence[SuspectRow]
) -> Iterator[WatchRow]:
    """Yields devices that are neither suspect nor clean, starting with those whose drivers reported errors."""
    accused = {suspect.identity for suspect in suspects}

    def row(result: HostResult, part: DeviceResult | None, why: str) -> WatchRow:
        index, identity = (None, None) if part is None else (part.index, part.identity)
        return WatchRow(host=result.host.name, device=index, identity=identity, simulated=result.simulated,
                       since=result.created, reason=why)  # fmt: skip

    for result in results:
        for part in result.parts.values():
            if part.errors:
                yield row(result, part, f"the driver reported {', '.join(part.errors[:5])}")
    present = {part.identity: (result, part) for result in results for part in result.parts.values()}
    for name, each in past_of(ledger).items():
        if name in present and name not in accused:
            last = max(past.created for past in each.values())
            times = f"{len(each)} earlier burn-in{'s' if len(each) > 1 else ''}"
            yield row(*present[name], f"differed in {times} according to the ledger, most recently on {last}")
    for result in results:
        for end in result.unfinished:
            what, where = end.workload or "all workloads", "" if end.device is not None else " on all devices"
            at = None if end.device is None else result.parts.get(end.device)
            yield row(result, at, f"{what}{where} ended in round {end.round}: {end.reason}")
        if result.stopped:
            yield row(result, None, f"stopped early by {result.stopped}")
        for index in sorted({each.device for each in result.rows if each.void}):
            slow = sum(each.void and each.device == index for each in result.rows)
            yield row(result, result.parts[index], f"throttled in {slow} workload{'s' if slow > 1 else ''}")
        explained = result.unfinished or result.stopped or any(each.void for each in result.rows)
        explained = explained or any(part.errors for part in result.parts.values())
        if result.verdict is Verdict.INCONCLUSIVE and not explained:
            yield row(result, None, f"inconclusive: {'; '.join(result.sentences[:2]) or 'no reason is given'}")


def _moved(results: Sequence[HostResult], ledger: FleetLedger | None) -> list[Moved]:
    places: dict[str, dict[HostKey, str]] = {}
    if ledger is not None:
        for name, account in ledger.devices.items():
            for place in account.places:
                places.setdefault(name, {})[HostKey(place.host, place.machine)] = place.first
    for result in results:
        for part in result.parts.values():
            known = places.setdefault(part.identity, {})
            known[result.host] = min(known.get(result.host, result.created), result.created)
    return [
        Moved(identity=name, hosts=[host.name for host in sorted(known, key=lambda host: (known[host], str(host)))])
        for name, known in sorted(places.items())
        if len(known) > 1
    ]


def device_rows(
    results: Sequence[HostResult], votes: Votes, suspects: Sequence[SuspectRow], ledger: FleetLedger | None
) -> list[DeviceSheetRow]:
    """Returns each device with its totals in these results or in the ledger, and the fault rates that these totals rule
    out."""
    whole = ledger
    if whole is None:
        whole = FleetLedger(simulated=simulation(results) == "all")
        enter(whole, results, votes)
    standing = {(each.identity, each.simulated): each.confidence for each in reversed(suspects)}
    latest = {(part.identity, result.simulated): (result, part) for result in results for part in result.parts.values()}
    rows = []
    for (name, simulated), (result, part) in sorted(latest.items(), key=lambda item: item[0]):
        row = DeviceSheetRow(
            **msgspec.structs.asdict(named_device(result, part, simulated)),
            suspect=standing.get((name, simulated), ""), agrees_with_other_hosts=name in votes.agreed,
        )  # fmt: skip
        account = whole.devices.get(name) if simulated == whole.simulated else None
        if account is not None:
            said = limits(account)
            row.burn_ins, row.elements, row.seconds_at_load = account.burn_ins, account.elements, account.seconds
            row.runs, row.wrong_runs = account.runs, account.wrong_runs
            row.excluded_element_rate, row.excluded_burst_interval_seconds = said.element_rate, said.interval
            row.wrong_run_share_low, row.wrong_run_share_high = said.run_rate or (None, None)
            row.mean_interval_low_seconds, row.mean_interval_high_seconds = said.mean_interval or (None, None)
            row.first = min((place.first for place in account.places), default=None)
            row.last = max((place.last for place in account.places), default=None)
            row.hosts = " ".join(place.host for place in account.places)
        rows.append(row)
    return _printable(rows, list[DeviceSheetRow])


def _verdict(value: FleetSummary, under_way: Sequence[str]) -> tuple[Verdict, str]:
    suspects, ties, compared = value.suspects, value.ties, value.compared
    if suspects:
        marked = [("SIMULATED " if each.simulated else "", each) for each in suspects[:5]]
        places = (f"{mark}{each.host} device {each.device} ({each.confidence})" for mark, each in marked)
        named = ", ".join(dict.fromkeys(places))
        more = f" and {len(suspects) - 5} more" if len(suspects) > 5 else ""
        among = f"{counted(value.devices, 'device')} of {counted(value.hosts, 'host')}"
        text = f"{counted(len(suspects), 'suspect')} among {among}: {named}{more}"
        rest = f"; {len(ties)} other differences cannot be attributed to a device" if ties else ""
        return Verdict.CORRUPT, text + rest
    if ties:
        why = "and no majority shows which hosts are wrong"
        return Verdict.CORRUPT, f"hosts differ in {len(ties)} programs, {why}"
    real = value.results > value.simulated_results or any(not each.simulated for each in value.pairs)
    if differing := [each for each in value.pairs if each.verdict is Verdict.CORRUPT and not (real and each.simulated)]:
        named = "; ".join(
            f"{'SIMULATED ' if each.simulated else ''}{' and '.join(each.hosts)}" for each in differing[:5]
        )
        named += f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        return Verdict.CORRUPT, f"hosts differed in pairs or pools: {named}"
    if compared.hosts < 2:
        why = (
            "no result is counted"
            if not value.results
            else "no two hosts ran the same program on devices of the same kind"
        )
        return Verdict.INCONCLUSIVE, f"{why}: nothing was compared"
    if value.refused:
        first, others = value.refused[0], len(value.refused) - 1
        return Verdict.INCONCLUSIVE, (
            f"{first.file}{f' and {others:,} other files or folders' if others else ''} could not be read or counted: "
            f"{first.reason}"
        )
    if under_way:
        more = f" and {len(under_way) - 1} more" if len(under_way) > 1 else ""
        return Verdict.INCONCLUSIVE, f"the burn-in of {under_way[0]}{more} is under way"
    left = len(compared.hosts_not_compared)
    text = (
        f"no suspect: {compared.hosts:,} hosts were compared and agree on all {compared.programs:,} programs that at "
        "least two of them ran"
    )
    return Verdict.CLEAN, text + (f"; {counted(left, 'host')} could not be compared with any other" if left else "")


def _printable(value: Shown, type: type[Shown]) -> Shown:
    """Makes all strings in a value safe to display, since they come from external files."""

    def clean(part: Any) -> Any:
        if isinstance(part, str):
            return printable(part)
        if isinstance(part, dict):
            return {key: clean(item) for key, item in part.items()}
        return [clean(item) for item in part] if isinstance(part, list | tuple) else part

    return msgspec.convert(clean(msgspec.to_builtins(value)), type)


def robust_z(values: Sequence[float], floor: float = FLOOR) -> list[float]:
    """Returns the distance of each value from the median, in robust deviations: (x - median) / max(1.4826 MAD, floor ·
    median)."""
    middle = statistics.median(values)
    spread = NORMAL * statistics.median(abs(value - middle) for value in values)
    scale = max(spread, floor * middle)
    return [(value - middle) / scale if scale else 0.0 for value in values]


def outliers(results: Sequence[HostResult]) -> list[Outlier]:
    """Returns devices whose throughput is far from that of other devices of the same kind in at least a tenth of their
    workloads.

    For a device that was tested several times, the median of its throughputs is used. Throughput that a burn-in did not
    evaluate, because its runs were too short or its devices share a processor, is omitted. The throughput of throttled
    devices is deliberately included."""
    rates: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    simulated: set[str] = set()
    for result in results:
        for row in result.rows:
            if row.rate is not None and row.rate > 0:
                part = result.parts[row.device]
                rates[row.workload, part.kind, row.unit][part.identity].append(row.rate)
                if result.simulated:
                    simulated.add(part.identity)
    judged: dict[str, int] = defaultdict(int)
    far: dict[tuple[str, bool], list[tuple[float, float, str]]] = defaultdict(list)
    for (workload, _, _), each in rates.items():
        if len(each) < LEAST:
            continue
        values = [statistics.median(several) if len(several) > 1 else several[0] for several in each.values()]
        middle = statistics.median(values)
        for name, value, z in zip(each, values, robust_z(values), strict=True):
            judged[name] += 1
            if abs(z) >= FAR:
                far[name, z < 0].append((abs(z), value / middle, workload))
    found = []
    for (name, slow), places in far.items():
        if len(places) >= max(1, math.ceil(SHARE * judged[name])):
            most, ratio, workload = max(places)
            found.append(Outlier(
                identity=name, slow=slow, far=len(places), judged=judged[name], workload=workload, ratio=ratio,
                z=-most if slow else most, simulated=name in simulated,
            ))  # fmt: skip
    return sorted(found, key=lambda each: (not each.slow, each.ratio if each.slow else -each.ratio, each.identity))
