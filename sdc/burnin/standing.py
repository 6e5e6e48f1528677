"""The standing of a host. Health checks query the standing every minute, so importing this module must be fast."""

import datetime
import os
from pathlib import Path
from typing import Annotated

from sdc.records import RecordError

from ..records import Record, read_json
from ..schema import Fields, about
from ..verdict import Verdict
from .judgement import BURN_IN
from .pair import PAIR, PAIR_FORMAT, POOL, Pair
from .results import EVENTS, RESULT

NAMES = (RESULT, PAIR, POOL)
AHEAD = 300.0  # seconds by which a result may be dated in the future; clocks of hosts differ by less


class Standing(Fields, kw_only=True):
    """The verdict of a host's last result, if it is still valid."""

    verdict: Annotated[Verdict, about("`clean`, `corrupt` or `inconclusive`")]
    reason: Annotated[str, about("the first sentence of the verdict, or why there is no valid result")]
    simulated: Annotated[bool, about("whether faults were simulated")] = False
    file: Annotated[str | None, about("file of the result")] = None
    ended: Annotated[str | None, about("when the result was written, UTC")] = None


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
        divisor, unit = (1, "s") if age < 120 else (60, "min") if age < 7200 else (3600, "h")
        old = f"{age / divisor:.0f} {unit}"
        return _unknown(f"the last result is {old} old ({found.verdict.acceptance}); run sdc burnin again", place)
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
