"""The standing of a host. Health checks query the standing every minute, so importing this module must be fast."""

import datetime
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sdc.burnin import BurninResult, Pair, Standing, candidates
from sdc.records import RecordError, identify
from sdc.schema import Device
from sdc.verdict import Verdict

from .ledger import (
    AHEAD,
    BEGUN,
    COMPARISONS,
    FOREIGN,
    NAMES,
    REMEDY,
    DeviceState,
    HostState,
    Ledger,
    LedgerEntry,
    Origin,
    is_unreadable,
    name_of_test,
    read_result,
    time_of,
    under_way,
)

MOST_NAMES = 16  # devices that a sentence names


def standing_of(
    path: Path, max_age: float | None = None, *, any_host: bool = False, now: datetime.datetime | None = None
) -> Standing:
    """Returns the standing that follows from one result; `max_age` is in seconds.

    `path` is the file of a result, or the folder of a burn-in, pair or pool. A result that is missing, damaged, too old
    or dated in the future, a result of other hosts (unless `any_host`), and a PASS of a rehearsal are INCONCLUSIVE.
    """
    try:
        inside = os.listdir(path) if path.is_dir() else None
    except OSError as error:
        return _unknown(f"{path} cannot be read ({error.strerror}); make it readable for this user")
    places = [path] if inside is None else [path / name for name in NAMES if name in inside]
    if not places or not os.path.lexists(places[0]):
        recorded = inside is not None and "manifest.json" in inside
        kind = "a run record (view it with sdc report), but no result," if recorded else "no result"
        return _unknown(f"there is {kind} in {path}; run sdc burnin, or give the folder of one burn-in, pair or pool")
    if len(places) > 1:
        return _unknown(f"{path} holds {' and '.join(place.name for place in places)}; give one of these files")
    (place,) = places
    if place.suffix == ".sqlite":
        return _unknown(f"{place} is a ledger, not a result; run sdc verdict --ledger {place}")
    try:
        result = read_result(place)
    except RecordError as error:
        return _unknown(str(error), place)
    if not any_host and not _is_here(result):
        hosts = ", ".join(sorted({device.host or result.host.name for device in _devices(result)}))
        return _unknown(f"{place} is a result of {hosts}, not of this host; to read it here, give --any-host", place)
    if result.simulated and result.verdict is Verdict.CLEAN:
        return _unknown("the result is of a simulation, which says nothing about the hardware", place, simulated=True)
    try:
        age = ((now or datetime.datetime.now(datetime.UTC)) - time_of(result.ended)).total_seconds()
    except (ValueError, TypeError):
        age = math.nan
    if result.verdict is not Verdict.CORRUPT:  # a failure counts whatever the clock said
        if math.isnan(age):
            return _unknown(f"{place} contains an invalid timestamp ({result.ended!r}); run sdc burnin again", place)
        if age < -AHEAD:
            said = f"{place} is dated in the future ({result.ended}), so a clock was wrong; run sdc burnin again"
            return _unknown(said, place)
        if max_age is not None and age > max_age:
            said = f"the result is {_age(age)} old ({result.verdict.acceptance}); run sdc burnin again"
            return _unknown(said, place)
    reason = next(iter(result.sentences), result.verdict.acceptance)
    if result.verdict is Verdict.CLEAN:
        if isinstance(result, BurninResult):
            names = [candidates(result, device)[0] for device in result.devices]
            hosts, level, only = result.host.name, result.settings.level, result.settings.only
        else:
            names = [device.mark or f"device {device.id}" for device in _devices(result)]
            hosts, level, only = ", ".join(row.host for row in result.hosts), result.kind, None
        reason = f"{_passed(names, hosts, level, only, age, max_age)}: {reason}"
    return Standing(
        verdict=result.verdict, reason=reason, simulated=result.simulated, file=str(place), ended=result.ended
    )


def _devices(result: BurninResult | Pair) -> list[Device]:
    return (
        [*result.devices]
        if isinstance(result, BurninResult)
        else [each for row in result.hosts for each in row.devices]
    )


def _is_here(result: BurninResult | Pair) -> bool:
    """Returns whether a result is of this host: of this boot, or of a machine with this name and identity. The identity
    alone may be that of an image from which many hosts were installed."""
    here = identify()
    if here.boot is not None and here.boot == result.host.boot:
        return True
    return (here.name, here.machine) in {(result.host.name, result.host.machine)} | {
        (device.host, device.machine) for device in _devices(result)
    }


def _unknown(reason: str, place: Path | None = None, *, simulated: bool = False) -> Standing:
    return Standing(
        verdict=Verdict.INCONCLUSIVE, reason=reason, simulated=simulated, file=None if place is None else str(place)
    )


def _passed(
    devices: Sequence[str],
    host: str,
    level: str | None,
    only: Sequence[str] | None,
    age: float,
    max_age: float | None,
) -> str:
    part = f", only {', '.join(only)}" if only else ""
    limit = "no limit" if max_age is None else f"limit {_age(max_age)}"
    return f"{', '.join(devices)} of {host} passed at level {level}{part} {_age(age)} ago ({limit})"


def standing_here(
    path: Path, max_age: float | None = None, *, origin: Callable[[], Origin] = Origin.current
) -> Standing:
    """Returns the standing of this host from its ledger; `max_age` is in seconds.

    A difference that nobody has acknowledged is a FAIL. A PASS requires that the last result of every device is a PASS,
    was recorded on this machine, and is not too old, and that no burn-in has begun since and left no result.
    """
    try:
        with Ledger(path) as ledger:
            host, states, here = ledger.host(), ledger.devices(), origin()
            unlisted = ledger.unlisted(here)
            try:
                others, doubt = ledger.others(), None
            except RecordError as error:
                others, doubt = ledger.others(skip=True), str(error)
    except RecordError as error:
        return _elsewhere(path, origin()) or _unknown(str(error))
    if host is None:
        return _elsewhere(path, here) or _unknown(f"there is no result in {path}; run sdc burnin")
    if host.machine != here.host.machine:
        return _unknown(f"{path} {FOREIGN}")
    if lost := [name for name in host.devices if name not in states]:
        return _unknown(f"{path} is damaged ({lost[0]} is missing); {REMEDY}")
    devices = {name: states[name] for name in host.devices}
    for state in states.values():
        state.inherit(others, here.chassis)
    listed = {f"uuid {uuid}" for uuid in here.uuids}
    here_now = {name: state for name, state in states.items() if name in devices or listed & {*state.names}}
    failures = [(name, state.failed) for name, state in here_now.items() if state.failed is not None]
    failures += [
        (entry.names[0], msgspec.structs.replace(entry, number=test.number, at=test.at)) for test, entry in unlisted
    ]
    if failures:
        failures.sort(key=lambda failure: failure[1].number, reverse=True)
        shown: dict[str, list[str]] = {}
        for name, failed in failures[:MOST_NAMES]:
            shown.setdefault(failed.sentence, []).append(name)
        said = "; ".join(f"{', '.join(names)}: {sentence}" for sentence, names in shown.items())
        more = f"; and {len(failures) - MOST_NAMES} more devices" if len(failures) > MOST_NAMES else ""
        return _stated(Verdict.CORRUPT, said + more, failures[0][1])
    if not devices and (found := _elsewhere(path, here)) is not None:
        return found
    if host.begun:
        return _unended(path, host, here)
    results = sorted((state.result for state in devices.values()), key=lambda entry: entry.number)
    for name, state in devices.items():
        if (problem := _problem(state, here, max_age, host.turned)) is not None:
            said = f"{name}: {problem}; run sdc burnin again"
            if state.result.number == 0 or state.result.run != results[-1].run:
                said += f" or, if the device has left this host for good, sdc fleet acknowledge '{name}' --gone"
            return _stated(Verdict.INCONCLUSIVE, said, state.result)
    tested = [state for name, state in states.items() if name in devices or state.unused]
    for name in sorted(listed - {name for state in tested for name in state.names}):
        if any(name in state.names and not state.cleared for state in states.values()):
            return _unknown(f"{name} of this host has not passed since it failed; run sdc burnin on it, or remove it")
        said = f"{name} of this host has no result; run sdc burnin or, if JAX cannot use it, "
        return _unknown(f"{said}sdc fleet acknowledge '{name}'")
    if any(state.result.at.host.boot != here.host.boot for state in devices.values()):
        for name, state in states.items():
            left = name not in devices and not state.gone and not state.unused
            if left and (state.failed or state.result.verdict is not Verdict.CLEAN):
                said = f"{name} had not passed and left this host, but may have returned since; burn in again or, "
                said += f"if it has left for good, sdc fleet acknowledge '{name}' --gone"
                return _stated(Verdict.INCONCLUSIVE, said, state.result)
    if not devices:
        return _unknown(f"no device in {path} has a result; run sdc burnin")
    if doubt is not None:
        return _unknown(f"another ledger of this folder may contain failures of these devices: {doubt}")
    tests: dict[tuple[object, ...], list[LedgerEntry]] = {}
    for result in results:
        tests.setdefault((result.run, result.at.written, result.level, result.only), []).append(result)
    passes = []
    for same in tests.values():
        one, age = same[0], max(_ages(same[0].at, here))
        passed = [result.device or "" for result in same]
        passes.append(f"{_passed(passed, here.host.name, one.level, one.only, age, max_age)}: {one.sentence}")
    return _stated(Verdict.CLEAN, "; ".join(passes), results[0])


def _unended(path: Path, host: HostState, here: Origin) -> Standing:
    """Returns the standing of a host on which a test is under way or left no result."""
    run, newest = max(host.begun.items(), key=lambda item: item[1].number)
    which = "all devices of this host"
    if newest.devices:
        which = ", ".join(names[0] for names in newest.devices[:MOST_NAMES])
        which += f" and {len(newest.devices) - MOST_NAMES} more devices" if len(newest.devices) > MOST_NAMES else ""
    if newest.asked is not None and newest.asked.platform is not None:
        which += f", with --devices {':'.join(str(word) for word in newest.asked if word is not None)}"
    remedy = f"run sdc burnin on {which}, or sdc fleet acknowledge '{name_of_test(run)}' if it is of no importance"
    if newest.sentence != BEGUN:
        said = f"tested nothing: {newest.sentence}; {remedy}"
    elif newest.at.host.boot == here.host.boot and (running := under_way(path, run)) is not False:
        said = f"is under way (PID {newest.at.host.pid})"
        said += "" if running else " or left no result, which the user who started it can see"
    else:
        said = f"left no result; {remedy}"
        if is_unreadable(newest):
            said = f"left no result that can be read in {newest.file}; continue it with --resume, make the file "
            said += f"readable or, once you know that it contains no FAIL, sdc fleet acknowledge '{name_of_test(run)}'"
    test = newest.level if newest.level in COMPARISONS else "burn-in"
    return _stated(Verdict.INCONCLUSIVE, f"the {test} that began at {newest.at.written} {said}", newest)


def _elsewhere(path: Path, here: Origin) -> Standing | None:
    """Returns a failure in the other ledgers of the folder whose device is listed here, or which was recorded in a
    machine with the same mainboard or network adapter: the identity of this machine may have changed."""
    listed = {f"uuid {uuid}" for uuid in here.uuids}
    for state in Ledger(path).others(skip=True):
        if (failed := state.failed) is None:
            continue
        if listed & {*state.names} or ({*here.chassis} & {*failed.at.chassis} and not state.gone):
            return _stated(Verdict.CORRUPT, f"{state.names[0]}: {failed.sentence}", failed)
    return None


def _stated(verdict: Verdict, reason: str, entry: LedgerEntry) -> Standing:
    return Standing(verdict=verdict, reason=reason, file=entry.file, ended=entry.at.written)


def _problem(state: DeviceState, here: Origin, max_age: float | None, turned: int) -> str | None:
    """Returns why the last result of a device is no PASS, or not one for this machine at this time."""
    result, then = state.result, state.result.at
    if result.verdict is Verdict.CORRUPT:
        return "its failure was acknowledged, but it has not passed since"
    if result.verdict is not Verdict.CLEAN:
        return result.sentence
    if not state.cleared:
        part = f" in all families, only in {', '.join(result.only)}" if result.only else ""
        return f"its failure was acknowledged, but it has not passed since{part}"
    booted = then.host.boot is not None and then.host.boot == here.host.boot
    if here.host.boot is None and not here.chassis:
        return (
            "neither the identifier of the boot nor a number of the mainboard or a network adapter can be read, and "
            "without one nothing shows that the last result was recorded on this machine; first make one readable"
        )
    if not booted and not {*then.chassis} & {*here.chassis}:
        return "its last result was recorded on another machine"
    if not booted and result.number < turned:
        return "its age is unknown, because the clock has been set back since its last result"
    ages = _ages(then, here)
    if ages[0] < -AHEAD:
        return f"its last result is dated in the future ({then.written}), so a clock was wrong"
    if max_age is not None and max(ages) > max_age:
        return f"its last result is {_age(max(ages))} old ({result.verdict.acceptance})"
    return None


def _ages(then: Origin, here: Origin) -> list[float]:
    """Returns the age of an entry in seconds by the clock and, within a boot, by the time since then: the clock may
    have gone back."""
    booted = then.host.boot is not None and then.host.boot == here.host.boot
    return [(time_of(here.written) - time_of(then.written)).total_seconds(), *[here.uptime - then.uptime] * booted]


def _age(seconds: float) -> str:
    divisor, unit = (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")
    return f"{seconds / divisor:.0f} {unit}"
