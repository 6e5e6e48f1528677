"""A ledger of devices: the totals of each device over all of its burn-ins, whichever host it was in, so that the
evidence from short tests accumulates.

The ledger is a JSON file with a checksum and is replaced atomically. Each burn-in, identified by its id, counts once.
Only one process writes at a time.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from sdc.records import AnyPath, Format, Lock, Record, RecordBusy, RecordError, identify, package_version
from sdc.schema import Fields, Header, about

from ..statistics import excluded_interval, frequency_upper_bound, mean_interval_limits, proportion_interval
from .collection import HostResult
from .suspects import FLEET, Accusation, Votes, wrong_runs

PATIENCE = 30.0  # seconds to wait for another writer


class Stay(Fields, kw_only=True):
    """A host that contained a device."""

    host: Annotated[str, about("name of the host")]
    machine: Annotated[str | None, about("hash of its identity")] = None
    first: Annotated[str, about("start of the first burn-in on this host")]
    last: Annotated[str, about("start of the last burn-in on this host")]


class Account(Fields, kw_only=True):
    """The totals of a device."""

    kind: Annotated[str, about("model")]
    serial: Annotated[str | None, about("serial number")] = None
    uuid: Annotated[str | None, about("UUID")] = None
    burn_ins: Annotated[int, about("burn-ins")] = 0
    runs: Annotated[int, about("runs that were checked")] = 0
    elements: Annotated[int, about("numbers that were checked")] = 0
    least: Annotated[int, about("of these, those in the family of workloads that each burn-in checked least")] = 0
    seconds: Annotated[float, about("time at load")] = 0.0
    places: Annotated[list[Stay], about("hosts that contained the device")] = []
    accused: Annotated[dict[str, Accusation], about("burn-ins in which the device differed, by id")] = {}

    @property
    def wrong_runs(self) -> int:
        return sum(each.wrong_runs for each in self.accused.values())


class FleetLedger(Header, kw_only=True, tag="jax-sdc fleet ledger"):
    """The contents of a ledger file."""

    simulated: Annotated[bool, about("whether the ledger accepts simulated results only")] = False
    burn_ins: Annotated[dict[str, str], about("end of each counted burn-in, by id")] = {}
    devices: Annotated[dict[str, Account], about("devices, by identity")] = {}


LEDGER = Format(type=FleetLedger, noun="ledger of a fleet", remedy="restore it, or begin a new ledger in another file")


class Added(NamedTuple):
    """The outcome of adding results to a ledger."""

    added: int  # number of newly counted results
    known: int  # number of results that were already counted
    changed: tuple[str, ...]  # files of counted results whose burn-in has continued since; the additions are omitted
    foreign: int  # number of simulated results for a ledger of real ones, or vice versa


def read_ledger(path: AnyPath) -> FleetLedger | None:
    place = os.fspath(path)
    if not Path(place).exists():
        return None
    if Path(place).is_dir():
        file = Path(place) / "ledger.json"
        raise RecordError(f"{place} is a folder, but a ledger is a file; pass a file, such as {file}")
    return LEDGER.read(place)


def enter(ledger: FleetLedger, results: Iterable[HostResult], votes: Votes) -> Added:
    """Adds results to a ledger. A result that was already counted contributes only new evidence from other hosts."""
    added, known, foreign = 0, 0, 0
    changed = []
    taken = []
    for result in results:
        if result.simulated != ledger.simulated:
            foreign += 1
            continue
        taken.append(result)
        if result.id in ledger.burn_ins:
            known += 1
            if ledger.burn_ins[result.id] != result.ended:
                changed.append(result.file)
            continue
        added += 1
        ledger.burn_ins[result.id] = result.ended
        for part in result.parts.values():
            account = ledger.devices.setdefault(part.identity, Account(kind=part.kind))
            account.serial, account.uuid, account.kind = part.serial, part.uuid, part.kind
            account.burn_ins += 1
            account.runs += part.runs
            account.elements += part.elements
            account.least += part.least
            account.seconds += part.seconds
            name, machine = result.host
            stay = next((each for each in account.places if (each.host, each.machine) == result.host), None)
            if stay is None:
                stay = Stay(host=name, machine=machine, first=result.created, last=result.created)
                account.places.append(stay)
                account.places.sort(key=lambda each: each.first)
            stay.first, stay.last = min(stay.first, result.created), max(stay.last, result.created)
    _accuse(ledger, taken, votes)
    return Added(added, known, tuple(changed), foreign)


def update_ledger(
    path: AnyPath, results: Sequence[HostResult], votes: Votes, patience: float = PATIENCE
) -> tuple[FleetLedger, Added]:
    """Adds results to the ledger in a file, which is created if it does not exist.

    If the first results of a ledger are all simulated, it is a ledger of simulations and accepts only simulated
    results.
    """
    Record.check_owner(path)
    until = time.monotonic() + patience
    lock = None
    while lock is None:  # the lock file next to the ledger exists only while this process may write
        try:
            lock = Lock(Path(path).parent, f"{Path(path).name}.lock")
        except RecordBusy as error:
            if time.monotonic() >= until:
                raise RecordBusy(f"{path} is being written by another process ({error})") from error
            time.sleep(0.05)
    try:
        ledger = read_ledger(path)
        if ledger is None:
            ledger = FleetLedger(simulated=bool(results) and all(result.simulated for result in results))
        added = enter(ledger, results, votes)
        ledger.version, ledger.host = package_version("jax-sdc"), identify()
        LEDGER.write(path, ledger)
    finally:
        lock.release()
    return ledger, added


def past_of(ledger: FleetLedger | None) -> Mapping[str, Mapping[str, Accusation]]:
    """Returns a ledger's evidence against devices, by identity and burn-in id; an empty mapping for a ledger of
    simulations."""
    if ledger is None or ledger.simulated:
        return {}
    return {name: account.accused for name, account in ledger.devices.items() if account.accused}


class Limits(NamedTuple):
    """Limits of a device's fault rates at 95 % confidence, computed from all of its burn-ins."""

    # Independent mismatches above this rate in any family of workloads would have been detected; None if any were.
    element_rate: float | None
    run_rate: tuple[float, float] | None  # exact limits of the share of runs with a difference, if there is one
    interval: float | None  # bursts at this interval (seconds at load) would have been detected; None if any were
    mean_interval: tuple[float, float] | None  # exact limits of the mean time between runs with a difference


def limits(account: Account) -> Limits:
    wrong = account.wrong_runs
    if not account.accused:
        rate = frequency_upper_bound(0, account.least) if account.least > 0 else None
        interval = excluded_interval(account.seconds) if account.seconds > 0 else None
        return Limits(rate, None, interval, None)
    runs = max(account.runs, wrong)
    share = proportion_interval(wrong, runs) if runs else None
    mean = mean_interval_limits(account.seconds, wrong) if account.seconds > 0 else None
    return Limits(None, share, None, mean)


def _accuse(ledger: FleetLedger, results: Sequence[HostResult], votes: Votes) -> None:
    """Records which devices differed in which burn-ins. Results of additional hosts can add evidence about a burn-in
    that is already recorded."""
    created = {result.id: result.created for result in results}
    kinds: dict[tuple[str, str], dict[str, None]] = {}
    alone: set[tuple[str, str]] = set()
    for result in results:
        for finding in result.findings:
            for index in finding.devices:
                place = (result.parts[index].identity, result.id)
                kinds.setdefault(place, {}).update(dict.fromkeys(finding.kinds))
                if len(finding.devices) == 1:
                    alone.add(place)
    for each in votes.outvoted:
        place = (each.ballot.part.identity, each.ballot.result.id)
        kinds.setdefault(place, {})[FLEET] = None
        if not each.shared:
            alone.add(place)
    for (name, simulated), burn_ins in wrong_runs(results, votes).items():
        if simulated != ledger.simulated or name not in ledger.devices:
            continue
        counts: dict[str, int] = {}
        for (id, _), (wrong, _) in burn_ins.items():
            counts[id] = counts.get(id, 0) + wrong
        for id in counts.keys() & created.keys():
            before = ledger.devices[name].accused.get(id)
            ledger.devices[name].accused[id] = Accusation(
                created=created[id],
                kinds=sorted({*kinds.get((name, id), {"repeat": None}), *(before.kinds if before else ())}),
                alone=(name, id) in alone or (before is not None and before.alone),
                wrong_runs=max(counts[id], before.wrong_runs if before else 0),
            )
