"""The standing of a host. Health checks query the standing every minute, so importing this module must be fast."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path

from sdc.burnin import BURN_IN, EVENTS, PAIR, PAIR_FORMAT, POOL, RESULT, Pair, Standing
from sdc.records import Record, RecordError, read_json
from sdc.verdict import Verdict

from .ledger import REMEDY, DeviceState, Ledger, LedgerEntry, Origin

NAMES = (RESULT, PAIR, POOL)
AHEAD = 300.0  # seconds by which a result may be dated in the future; clocks of hosts differ by less


def standing_of(path: Path, max_age: float | None = None, *, now: datetime.datetime | None = None) -> Standing:
    """Returns a host's standing from its last result; `max_age` is in seconds.

    `path` is a result file, the folder of a burn-in, pair or pool, or a folder of such folders, of which the one with
    the newest result counts. A result that is missing, damaged, too old or dated in the future is INCONCLUSIVE, never a
    PASS. A simulated result says nothing about the hardware, and is INCONCLUSIVE unless `path` refers directly to that
    result.
    """
    try:
        place, named = _newest(path)
    except OSError as error:
        return _unknown(f"{path} cannot be read ({error.strerror})")
    if place is None:
        recorded = (path / "manifest.json").exists()
        kind = "a run record (view it with sdc report), but no result," if recorded else "no result"
        return _unknown(f"there is {kind} in {path}; run sdc burnin")
    try:
        result = (PAIR_FORMAT if _is_pair(place) else BURN_IN).read(place)
    except RecordError as error:
        return _unknown(str(error), place)
    found = Standing(
        verdict=result.verdict, reason=next(iter(result.sentences), result.verdict.acceptance),
        simulated=result.simulated, file=str(place), ended=result.ended,
    )  # fmt: skip
    if found.simulated and not named:
        return _unknown("the newest result is from a simulation, which says nothing about the hardware", place)
    try:
        now = now or datetime.datetime.now(datetime.UTC)
        age = (now - datetime.datetime.fromisoformat(result.ended)).total_seconds()
    except (ValueError, TypeError):
        return _unknown(f"{place} contains an invalid timestamp ({result.ended!r}); run sdc burnin again", place)
    if age < -AHEAD:
        return _unknown(
            f"{place} is dated in the future ({result.ended}), so a clock was wrong; run sdc burnin again",
            place,
        )
    if max_age is not None and age > max_age:
        return _unknown(f"the last result is {_age(age)} old ({found.verdict.acceptance}); run sdc burnin again", place)
    return found


def _is_pair(place: Path) -> bool:
    """Returns whether a file is the result of a pair or pool, judging by its name or, if it was renamed, by its
    format."""
    if place.name in NAMES:
        return place.name != RESULT
    try:
        return read_json(place).get("format") == Pair.__struct_config__.tag
    except (OSError, ValueError):
        return False


def _unknown(reason: str, place: Path | None = None) -> Standing:
    return Standing(verdict=Verdict.INCONCLUSIVE, reason=reason, file=None if place is None else str(place))


def _newest(path: Path) -> tuple[Path | None, bool]:
    if not path.is_dir():
        return (path if os.path.lexists(path) else None), True
    own = [path / name for name in NAMES if os.path.lexists(path / name)]
    if own:
        return max(own, key=_written), True
    with os.scandir(path) as folders:
        there = [place for folder in folders if folder.is_dir() for place in _results(Path(folder.path)) if _own(place)]
    return (max(there, key=_written) if there else None), False


def _results(folder: Path) -> list[Path]:
    """Returns the paths of the results in a folder, or the expected path if a burn-in left a log but no result."""
    found = [folder / name for name in NAMES if os.path.lexists(folder / name)]
    return found or ([folder / RESULT] if (folder / EVENTS).exists() else [])


def _own(place: Path) -> bool:
    """Returns whether no other user planted a result; otherwise, anyone could make a host pass or fail."""
    try:
        Record.check_owner(place)
    except RecordError:
        return False
    return True


def _written(path: Path) -> float:
    """Returns the Unix time at which a result was written, as stated in the result, since the file may be a later copy.

    For an unreadable file, returns the modification time, so that an older result does not replace a damaged one.
    """
    try:
        return datetime.datetime.fromisoformat(str(read_json(path)["ended"])).timestamp()
    except (OSError, ValueError, KeyError):
        place = path if os.path.lexists(path) else path.with_name(EVENTS)
        return place.lstat().st_mtime


def standing_here(
    path: Path, max_age: float | None = None, *, origin: Callable[[], Origin] = Origin.current
) -> Standing:
    """Returns the standing of this host from its ledger; `max_age` is in seconds.

    A difference that nobody has acknowledged is a FAIL. A PASS requires that the last result of every device is a PASS,
    was recorded on this machine, and is not too old, and that no burn-in has begun since and left no result.
    """
    try:
        with Ledger(path) as ledger:
            host, states = ledger.host(), ledger.devices()
    except RecordError as error:
        return _unknown(str(error))
    here = origin()
    if host is None:
        return _unknown(f"there is no result in {path}; run sdc burnin")
    if host.machine != here.host.machine:
        return _unknown(f"{path} is the ledger of another machine; run sdc burnin")
    if lost := [name for name in host.devices if name not in states]:
        return _unknown(f"{path} is damaged ({lost[0]} is missing); {REMEDY}")
    devices = {name: states[name] for name in host.devices}
    listed = {f"uuid {uuid}" for uuid in here.uuids}
    here_now = {name: state for name, state in states.items() if name in devices or listed & {*state.names}}
    failures = [(name, state.failed) for name, state in here_now.items() if state.failed is not None]
    if failures:
        name, newest = max(failures, key=lambda failure: failure[1].number)
        more = f" (and {len(failures) - 1} more devices)" if len(failures) > 1 else ""
        return _stated(Verdict.CORRUPT, f"{name}: {newest.sentence}{more}", newest)
    if host.begun:
        newest = max(host.begun.values(), key=lambda entry: entry.number)
        return _stated(Verdict.INCONCLUSIVE, f"the burn-in that began at {newest.at.written} left no result", newest)
    for name, state in devices.items():
        if (problem := _problem(state, here, max_age)) is not None:
            return _stated(Verdict.INCONCLUSIVE, f"{name}: {problem}; run sdc burnin again", state.result)
    known = {name for state in devices.values() for name in state.names}
    if untested := sorted(listed - known):
        return _unknown(f"{', '.join(untested)} of this host has no result; run sdc burnin")
    if any(state.result.at.host.boot != here.host.boot for state in devices.values()):
        for name, state in states.items():
            if name not in devices and not state.gone and (state.failed or state.result.verdict is not Verdict.CLEAN):
                said = f"{name} had not passed and left this host, but may have returned since; run sdc burnin again"
                return _stated(Verdict.INCONCLUSIVE, said, state.result)
    if not devices:
        return _unknown(f"no device in {path} has a result; run sdc burnin")
    oldest = min((state.result for state in devices.values()), key=lambda entry: entry.number)
    only = f", only {', '.join(oldest.only)}" if oldest.only else ""
    said = f"{', '.join(devices)} of {here.host.name} passed at level {oldest.level}{only}: {oldest.sentence}"
    return _stated(Verdict.CLEAN, said, oldest)


def _stated(verdict: Verdict, reason: str, entry: LedgerEntry) -> Standing:
    return Standing(verdict=verdict, reason=reason, file=entry.file, ended=entry.at.written)


def _problem(state: DeviceState, here: Origin, max_age: float | None) -> str | None:
    """Returns why the last result of a device is no PASS, or not one for this machine at this time."""
    result, then = state.result, state.result.at
    if result.verdict is Verdict.CORRUPT:
        return "its failure was acknowledged, but it has not passed since"
    if result.verdict is not Verdict.CLEAN:
        return result.sentence
    booted = then.host.boot is not None and then.host.boot == here.host.boot
    if not booted and not {*then.chassis} & {*here.chassis}:
        return "its last result was recorded on another machine"
    ages = [(_time(here.written) - _time(then.written)).total_seconds()]
    if ages[0] < -AHEAD:
        return f"its last result is dated in the future ({then.written}), so a clock was wrong"
    if booted:  # the clock may have gone back
        ages.append(here.uptime - then.uptime)
    if max_age is not None and max(ages) > max_age:
        return f"its last result is {_age(max(ages))} old ({result.verdict.acceptance})"
    return None


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def _age(seconds: float) -> str:
    divisor, unit = (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")
    return f"{seconds / divisor:.0f} {unit}"
