"""What the results of a fleet say, in one dictionary: whom to look at, why, and what to do next."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from sdc.verdict import Verdict

from .collecting import Collection, Host, HostResult, Part
from .identity import printable
from .ledger import Added, Ledger, limits, past_of
from .majority import Tie, Votes, vote
from .pace import outliers
from .pairing import is_host_name
from .suspects import Suspect, find_suspects

SHOWN = 20
"""Sightings of a suspect that are told one by one."""
NEXT_PAIRED = 4
"""Healthy hosts that a suspect is to meet."""


def summarize_results(
    collection: Collection,
    *,
    votes: Votes | None = None,
    ledger: Ledger | None = None,
    added: Added | None = None,
) -> dict[str, Any]:
    """What results say: suspects, hosts that differ, devices to watch, outliers, and what does not count.

    Args:
        collection: the results.
        votes: what hosts say of each other, where somebody has asked already.
        ledger: of the devices, these results included.
        added: what became of the results in the ledger.

    Returns:
        `verdict`: `corrupt` with a suspect or with hosts that differ, `clean` if hosts or devices were compared and
        none differs, else `inconclusive`; `simulated`: `none`, `some` or `all`; and the lists that the page of
        `sdc fleet` in the documentation explains. Texts of others in it can be shown as they are.

    Example:
        >>> from sdc.analysis.fleet.collecting import Collection
        >>> from sdc.analysis.fleet.summarizing import summarize_results
        >>> summarize_results(Collection(()))["verdict"]
        'inconclusive'
    """
    results = collection.results
    votes = vote(results) if votes is None else votes
    suspects = find_suspects(results, votes, past_of(ledger))
    hosts = {result.host for result in results}
    simulated = simulation(results)
    # Of a mixture, simulations that agree with each other say nothing about the hosts that are real.
    voters = (
        votes.hosts & {result.host for result in results if not result.simulated}
        if simulated == "some"
        else votes.hosts
    )
    parts = {part.identity: (result.host, part) for result in results for part in result.parts.values()}
    compared = {
        "programs": votes.compared,
        "programs_on_one_host": votes.alone,
        "workloads_of_several_versions": votes.split,
        "devices_that_agree": len(votes.agreed),
        "hosts": len(voters),
        "hosts_not_compared": sorted(host.name for host in hosts - votes.hosts),
    }
    value = {
        "simulated": simulated,
        "results": len(results),
        "simulated_results": sum(result.simulated for result in results),
        "hosts": len(hosts),
        "devices": len(parts),
        "elements": sum(part.elements for result in results for part in result.parts.values()),
        "seconds": sum(part.seconds for result in results for part in result.parts.values()),
        "compared": compared,
        "suspects": [suspect_row(each) for each in suspects],
        "ties": [_tie(each) for each in votes.ties],
        "watch": [*_watched(results, ledger, suspects)],
        "outliers": [
            {**each._asdict(), "host": parts[each.identity][0].name, "device": parts[each.identity][1].index}
            for each in outliers(results)
        ],
        "refused": [each._asdict() for each in collection.refused],
        "duplicates": [each._asdict() for each in collection.duplicates],
        "doubtful_identities": list(collection.doubtful),
        "moved": _moved(results, ledger),
        "ledger": None if ledger is None else _ledger(ledger, added),
    }
    verdict, sentence = _verdict(value)
    shown: dict[str, Any] = _printable({"verdict": verdict, "sentence": sentence, **value})
    return shown


def simulation(results: Sequence[HostResult]) -> Literal["none", "some", "all"]:
    """Whether results are of simulations."""
    count = sum(result.simulated for result in results)
    return "none" if not count else "all" if count == len(results) else "some"


def suspect_row(suspect: Suspect) -> dict[str, Any]:
    """A suspect as the summary has it."""
    part, host = suspect.part, suspect.host
    return {
        "host": host.name,
        "machine": host.machine,
        "device": part.index,
        "identity": suspect.identity,
        **{name: getattr(part, name) for name in ("kind", "serial", "uuid", "bus", "driver")},
        "simulated": suspect.simulated,
        "confidence": suspect.confidence,
        "points": suspect.points,
        "kinds": list(suspect.kinds),
        "workloads": list(suspect.workloads),
        "wrong_runs": suspect.wrong_runs,
        "runs": suspect.runs,
        "burn_ins": suspect.burn_ins,
        "first": suspect.first,
        "last": suspect.last,
        "persistence": suspect.persistence,
        "errors": list(part.errors),
        "seen": [each.text for each in suspect.sightings[:SHOWN]],
        "not_shown": max(0, len(suspect.sightings) - SHOWN),
        "next": _next(suspect),
    }


def _next(suspect: Suspect) -> list[str]:
    """What to do, as sentences and commands."""
    name = suspect.host.name
    said = "nothing with the host: these faults are simulated" if suspect.simulated else f"take {name} out of service"
    steps = [said]
    if is_host_name(name):
        healthy = " ".join(f"HEALTHY{number}" for number in range(1, NEXT_PAIRED + 1))
        steps.append(f"sdc fleet schedule {name} {healthy} --rounds {NEXT_PAIRED} --suspects {name}")
    if suspect.confidence == "possible":
        steps.append("compare versions, firmware and settings of the hosts that differ before you accuse a device")
    elif not suspect.simulated:
        what = suspect.part.serial or suspect.part.uuid or f"device {suspect.part.index}"
        steps.append(f"if it differs from healthy hosts again, send {what} back with the result and its evidence")
    return steps


def _tie(tie: Tie) -> dict[str, Any]:
    return {
        "workload": tie.workload,
        "simulated": all(ballot.result.simulated for _, ballots in tie.groups for ballot in ballots),
        "groups": [
            {
                "digest": digest,
                "devices": len({ballot.part.identity for ballot in ballots}),
                "hosts": sorted({ballot.result.host.name for ballot in ballots}),
            }
            for digest, ballots in tie.groups
        ],
    }


def _watched(
    results: Sequence[HostResult], ledger: Ledger | None, suspects: Sequence[Suspect]
) -> Iterator[dict[str, Any]]:
    """What is no suspect, but no clean result either: errors that drivers report first."""
    accused = {suspect.identity for suspect in suspects}

    def row(result: HostResult, part: Part | None, why: str) -> dict[str, Any]:
        return {
            "host": result.host.name,
            "device": None if part is None else part.index,
            "identity": None if part is None else part.identity,
            "simulated": result.simulated,
            "since": result.created,
            "reason": why,
        }

    for result in results:
        for part in result.parts.values():
            if part.errors:
                yield row(result, part, f"the driver reported {', '.join(part.errors[:5])}")
    present = {part.identity: (result, part) for result in results for part in result.parts.values()}
    for name, each in past_of(ledger).items():
        if name in present and name not in accused:
            last = max(past.created for past in each.values())
            times = f"{len(each)} burn-in{'s' if len(each) > 1 else ''}"
            yield row(*present[name], f"differed in {times} before, the last time on {last} (ledger)")
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
        told = result.unfinished or result.stopped or any(each.void for each in result.rows)
        told = told or any(part.errors for part in result.parts.values())
        if result.verdict is Verdict.INCONCLUSIVE and not told:
            yield row(result, None, f"inconclusive: {'; '.join(result.sentences[:2]) or 'no reason is told'}")


def _moved(results: Sequence[HostResult], ledger: Ledger | None) -> list[dict[str, Any]]:
    """Devices that were in several hosts, in the order of time."""
    places: dict[str, dict[Host, str]] = {}
    if ledger is not None:
        for name, account in ledger.devices.items():
            for place in account.places:
                places.setdefault(name, {})[Host(place.host, place.machine)] = place.first
    for result in results:
        for part in result.parts.values():
            known = places.setdefault(part.identity, {})
            known[result.host] = min(known.get(result.host, result.created), result.created)
    return [
        {"identity": name, "hosts": [host.name for host in sorted(known, key=lambda host: (known[host], str(host)))]}
        for name, known in sorted(places.items())
        if len(known) > 1
    ]


def _ledger(ledger: Ledger, added: Added | None) -> dict[str, Any]:
    return {
        "simulated": ledger.simulated,
        "burn_ins": len(ledger.burn_ins),
        "devices": len(ledger.devices),
        "elements": sum(account.elements for account in ledger.devices.values()),
        "seconds": sum(account.seconds for account in ledger.devices.values()),
        "added": 0 if added is None else added.added,
        "known": 0 if added is None else added.known,
        "changed": [] if added is None else list(added.changed),
        "foreign": 0 if added is None else added.foreign,
    }


def device_rows(
    results: Sequence[HostResult], votes: Votes, suspects: Sequence[Mapping[str, Any]], ledger: Ledger | None
) -> list[dict[str, Any]]:
    """Each device with what these results, or all in the ledger, checked on it, and what that excludes."""
    from .ledger import enter

    whole = ledger
    if whole is None:
        whole = Ledger(simulated=simulation(results) == "all")
        enter(whole, results, votes)
    standing = {(each["identity"], each["simulated"]): each["confidence"] for each in reversed(suspects)}
    latest = {(part.identity, result.simulated): (result, part) for result in results for part in result.parts.values()}
    rows = []
    for (name, simulated), (result, part) in sorted(latest.items(), key=lambda item: item[0]):
        account = whole.devices.get(name) if simulated == whole.simulated else None
        said = None if account is None else limits(account)
        rates = (None, None) if said is None or said.run_rate is None else said.run_rate
        means = (None, None) if said is None or said.mean_interval is None else said.mean_interval
        rows.append({
            "host": result.host.name, "device": part.index, "identity": name, "kind": part.kind,
            "serial": part.serial, "uuid": part.uuid, "bus": part.bus, "driver": part.driver,
            "simulated": simulated, "suspect": standing.get((name, simulated), ""),
            "agrees_with_other_hosts": name in votes.agreed,
            "burn_ins": None if account is None else account.burn_ins,
            "elements": None if account is None else account.elements,
            "seconds_at_load": None if account is None else account.seconds,
            "runs": None if account is None else account.runs,
            "wrong_runs": None if account is None else account.wrong_runs,
            "excluded_element_rate": None if said is None else said.element_rate,
            "wrong_run_share_low": rates[0], "wrong_run_share_high": rates[1],
            "excluded_burst_interval_seconds": None if said is None else said.interval,
            "mean_interval_low_seconds": means[0], "mean_interval_high_seconds": means[1],
            "first": min((place.first for place in account.places), default=None) if account else None,
            "last": max((place.last for place in account.places), default=None) if account else None,
            "hosts": " ".join(place.host for place in account.places) if account else None,
        })  # fmt: skip
    shown: list[dict[str, Any]] = _printable(rows)
    return shown


def _verdict(value: Mapping[str, Any]) -> tuple[str, str]:
    suspects, ties, compared = value["suspects"], value["ties"], value["compared"]
    if suspects:
        named = ", ".join(dict.fromkeys(_named(each) for each in suspects[:5]))
        more = f" and {len(suspects) - 5} more" if len(suspects) > 5 else ""
        plural = "suspects" if len(suspects) > 1 else "suspect"
        text = f"{len(suspects)} {plural} among {value['devices']:,} devices of {value['hosts']:,} hosts: {named}{more}"
        return "corrupt", text + (f"; {len(ties)} differences that nobody can decide" if ties else "")
    if ties:
        return "corrupt", f"hosts differ in {len(ties)} programs, and there is no majority that says which is wrong"
    if compared["hosts"] < 2:
        why = "no result counts" if not value["results"] else "no two hosts ran the same program on the same devices"
        return "inconclusive", f"{why}: nothing was compared"
    left = len(compared["hosts_not_compared"])
    text = (
        f"no suspect: {compared['hosts']:,} hosts agree in {compared['programs']:,} programs that several of them ran"
    )
    return "clean", text + (f"; {left:,} hosts could not be compared with any other" if left else "")


def _named(row: Mapping[str, Any]) -> str:
    return f"{'SIMULATED ' if row['simulated'] else ''}{row['host']} device {row['device']} ({row['confidence']})"


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value
